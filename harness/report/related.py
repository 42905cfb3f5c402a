"""Records → the tables of runs that should agree and of masks that lie."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from harness.records import HazardKind, Record, Relation
from harness.report.model import LyingMask, RelationRow


def relation_rows(records: Iterable[Record]) -> tuple[RelationRow, ...]:
    """One row for each implementation and pair of runs, in the order met."""
    found: dict[tuple[str, str], list[tuple[Relation, Record]]] = defaultdict(list)
    for record in records:
        for relation in record.relations:
            found[record.implementation, relation.name].append((relation, record))
    rows = []
    for key, entries in found.items():
        worst, record = max(entries, key=lambda e: _distance(e[0]))
        equal = sum(relation.bits_equal for relation, _ in entries)
        rows.append(RelationRow(*key, len(entries), equal, worst, record.case, record.recipe))
    return tuple(sorted(rows, key=lambda row: row.implementation))


def _distance(relation: Relation) -> tuple[float, float]:
    """A place where only one run is NaN or infinite comes before any distance."""
    return (math.inf if math.isinf(relation.max_ulps) else relation.rel_l2, relation.max_ulps)


def lying_masks(records: Iterable[Record]) -> tuple[LyingMask, ...]:
    """One entry for each case and format in which its bias is added; what a seed shows, all its cells show."""
    found: dict[tuple[str, str], dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record.mask_rows:
            found[record.case, record.mask_rows[0].format].setdefault(record.recipe, record)
    lies = []
    for (case, fmt), by_recipe in found.items():
        first = next(iter(by_recipe.values()))
        hazard = next(h for h in first.hazards if h.kind is HazardKind.SENTINEL)
        lies.append(LyingMask(case, fmt, tuple(by_recipe), hazard.count, hazard.total, first.mask_rows))
    return tuple(lies)
