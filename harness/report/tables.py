"""Records → `Report`: grouping, pooling and ordering. Nothing is recomputed and nothing is rendered."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter

from harness.deviations import Review
from harness.formats import get_format
from harness.recipe import recipes
from harness.records import Errors, Hazard, HazardKind, Margins, Record, Status
from harness.report.model import (
    KNOWN,
    LABELS,
    Cell,
    Failure,
    GroupTable,
    HazardRow,
    Headline,
    InputRow,
    KnownRow,
    RefusalRow,
    Report,
    WorstRow,
    can_pool,
    pool,
    pool_ratio,
)
from harness.report.precision import (
    CaseRecipe,
    Precision,
    cost,
    costly,
    counts,
    doubts,
    own_losses,
    precisions,
    unseen,
)
from harness.report.related import lying_masks, relation_rows
from harness.report.tradeoff import tradeoff

WORST = 15
_FAILING = frozenset((Status.FAIL, Status.ERROR))
# An enum's own .value is ten times as slow, and met often.
_VALUE = {status: status.value for status in Status}
# Those that spoil numbers; the other kinds warn of what might.
FLAGGED = frozenset(
    (HazardKind.OVERFLOW, HazardKind.SATURATION, HazardKind.NON_FINITE, HazardKind.STAGNATION)
)
_SEVERITY = (
    HazardKind.OVERFLOW, HazardKind.NON_FINITE, HazardKind.SATURATION, HazardKind.STAGNATION, HazardKind.FLUSH,
    HazardKind.SENTINEL, HazardKind.NEAR_OVERFLOW, HazardKind.RESOLUTION, HazardKind.ZERO_AMAX,
)  # fmt: skip
_URGENT = (Status.FAIL.value, Status.ERROR.value, KNOWN, Status.INCONCLUSIVE.value)
_BY_SEVERITY = {kind: rank for rank, kind in enumerate(_SEVERITY)}

Identity = tuple[str, str, str, int, str]
GroupKey = tuple[str, str, str]


def summary(records: Iterable[Record], review: Review) -> Report:
    """What the records show, sorted by the review into known and unexpected failures. Of records of the same cell and
    device the last stands for all."""
    given = list(records)
    by_identity = _by_identity(given)
    records = list(by_identity.values())
    known = frozenset(_identity(r) for r, _ in review.known)
    precise = precisions(records)
    by_key: dict[GroupKey, list[Record]] = defaultdict(list)
    for record in records:
        by_key[record.group_key].append(record)
    return Report(
        headline=_headline(records, known, counts(precise), len(given) - len(records)),
        failures=_failures(_current(review.unexpected, by_identity), by_key),
        problems=problems(review),
        groups=(groups := _groups(records, known, precise)),
        tradeoff=tradeoff(groups, records),
        worst=_worst(by_key, known),
        costly=costly(precise),
        own_losses=own_losses(precise),
        unseen=unseen(records),
        doubts=doubts(records),
        hazards=_hazards(records),
        lies=lying_masks(records),
        relations=relation_rows(records),
        inputs=_inputs(records),
        refusals=_refusals(records),
        known=tuple(KnownRow(d, n) for d, n in Counter(d for _, d in review.known).items()),
    )


def latest(records: Sequence[Record]) -> list[Record]:
    """Without those that a later one of the same cell and device replaces, in the order of their first."""
    return list(_by_identity(records).values())


def _by_identity(records: Sequence[Record]) -> dict[Identity, Record]:
    return dict(zip(map(_identity, records), records, strict=True))


def _current(failed: Iterable[Record], found: Mapping[Identity, Record]) -> list[Record]:
    """Those that no later record replaces."""
    last = _by_identity(tuple(failed))
    return [r for key, r in last.items() if found.get(key, r).status is r.status]


def problems(review: Review) -> tuple[str, ...]:
    """Entries of the deviations file that need attention, a line each."""
    unmatched = [f"{d} matches no failure of this run: remove it ({d.reason})" for d in review.unmatched]
    expired = [f"{d} expired on {d.expires}: fix it or renew it ({d.reason})" for d in review.expired]
    return tuple(unmatched + expired)


_identity: Callable[[Record], Identity] = attrgetter(
    "case", "implementation", "recipe", "seed", "machine.device"
)


def _label(record: Record, known: frozenset[Identity]) -> str:
    failing = record.status in _FAILING
    return KNOWN if failing and _identity(record) in known else _VALUE[record.status]


def _labels(records: Sequence[Record], known: frozenset[Identity]) -> set[str]:
    met = {r.status for r in records}
    if met.isdisjoint(_FAILING):
        return {_VALUE[status] for status in met}
    return {_label(r, known) for r in records}


def _headline(
    records: Sequence[Record],
    known: frozenset[Identity],
    precision: tuple[tuple[str, int], ...],
    repeated: int,
) -> Headline:
    met = Counter(_label(r, known) for r in records)
    return Headline(
        records=len(records),
        labels=tuple((label, met[label]) for label in LABELS),
        groups=len({r.group for r in records}),
        cases=len({r.case for r in records}),
        implementations=len({r.implementation for r in records}),
        recipes=len({r.recipe for r in records}),
        seeds=len({r.seed for r in records}),
        machines=tuple(dict.fromkeys(r.machine for r in records)),
        precision=precision,
        repeated=repeated,
        ran=_ran(records),
    )


def _ran(records: Iterable[Record]) -> tuple[str, ...]:
    """What each black box ran: recipes and dtypes of the same operators share a line."""
    seen: dict[tuple[str, str, str, str], dict[str, None]] = defaultdict(dict)
    for r in records:
        if r.ran is not None and r.ran.operators:
            operators = ", ".join(r.ran.operators)
            seen[r.implementation, r.ran.backend, operators, r.ran.device][
                f"{r.ran.dtype} for {r.recipe}"
            ] = None
    return tuple(
        f"{name} ran {operators} ({backend}) on {device}: {', '.join(dtypes)}"
        for (name, backend, operators, device), dtypes in seen.items()
    )


def _failures(unexpected: Iterable[Record], by_key: dict[GroupKey, list[Record]]) -> tuple[Failure, ...]:
    """One entry per cell and status; its seeds share the line."""
    cells: dict[tuple[GroupKey, Status], list[Record]] = defaultdict(list)
    for record in unexpected:
        cells[record.group_key, record.status].append(record)
    found = []
    for (key, status), failed in cells.items():
        first = failed[0]
        last_line = first.traceback.strip().rpartition("\n")[2]
        of = max(len(by_key.get(key, ())), len(failed))
        judged = _largest(r.margins for r in failed)
        found.append(
            Failure(
                case=first.case,
                source=first.source or first.group,
                implementation=first.implementation,
                recipe=first.recipe,
                status=status,
                reason="; ".join(first.reasons) or last_line or status.advice,
                diagnosis=next((str(r.diagnosis) for r in failed if r.diagnosis is not None), ""),
                ratio=math.nan if judged is None else judged.ratio,
                traceback=first.traceback,
                seeds=len(failed),
                of=of,
                first_seeds=1 + max(r.seed for r in failed),  # --seeds N runs the seeds 0 … N − 1
                device=first.machine.device,
            )
        )
    return tuple(found)


def _groups(
    records: Sequence[Record], known: frozenset[Identity], precise: Mapping[CaseRecipe, Precision]
) -> tuple[GroupTable, ...]:
    by_group: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_group[record.group].append(record)
    return tuple(_group(name, members, known, precise) for name, members in by_group.items())


def _group(
    name: str,
    records: Sequence[Record],
    known: frozenset[Identity],
    precise: Mapping[CaseRecipe, Precision],
) -> GroupTable:
    cells: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        cells[record.implementation, record.recipe].append(record)
    rows = tuple(dict.fromkeys(r.implementation for r in records))
    met = dict.fromkeys(r.recipe for r in records)
    columns = (*(r for r in recipes() if r in met), *(r for r in met if r not in recipes()))
    filled = tuple(tuple(_cell(cells.get((i, r), ()), known) for r in columns) for i in rows)
    cases = dict.fromkeys(r.case for r in records)
    costs = tuple(cost([p for case in cases if (p := precise.get((case, r)))]) for r in columns)
    return GroupTable(name, len(cases), len({r.seed for r in records}), rows, columns, filled, costs)


def _cell(records: Sequence[Record], known: frozenset[Identity]) -> Cell | None:
    if not records:
        return None
    return Cell(
        kernel=pool(r.errors for r in records),
        ratio=pool_ratio(records),
        labels=frozenset(_labels(records, known)),
        flagged=any(spoils(h) for r in records for h in r.hazards),
    )


def spoils(hazard: Hazard) -> bool:
    """Observed, and of a kind in FLAGGED, or a flush that lost more of P's mass than rounding it may."""
    lost = hazard.kind is HazardKind.FLUSH and hazard.lost_mass > get_format(hazard.format).unit_roundoff
    return hazard.source == "observed" and (hazard.kind in FLAGGED or lost)


def _worst(by_key: dict[GroupKey, list[Record]], known: frozenset[Identity]) -> tuple[WorstRow, ...]:
    """Unexpected failures first, known ones last; then what cannot be pooled, then by error ÷ expected."""
    urgent = []
    for key, members in by_key.items():
        errors = [r.errors for r in members if r.errors is not None]
        if errors:
            labels = _labels(members, known)
            label = next((x for x in _URGENT if x in labels), Status.PASS.value)
            urgent.append((_urgency(label, members), key, label))
    rows = []
    for _, key, label in heapq.nsmallest(WORST, urgent, key=itemgetter(0)):
        members = by_key[key]
        errors = [r.errors for r in members if r.errors is not None]
        signed = _extreme(errors, "slope"), _extreme(errors, "bias_ulp")
        rows.append(WorstRow(*key, label, pool(errors), _largest(r.margins for r in members), *signed))
    return tuple(rows)


def _largest(margins: Iterable[Margins | None]) -> Margins | None:
    """Those of the largest error ÷ expected; NaN is larger than any."""
    met = [m for m in margins if m is not None]
    return max(met, key=lambda m: _nan_first(m.ratio), default=None)


def _urgency(label: str, records: Sequence[Record]) -> tuple[int, bool, float]:
    rank = {Status.FAIL.value: 0, Status.ERROR.value: 0, KNOWN: 2}.get(label, 1)
    poolable = all(can_pool(r.errors) for r in records if r.errors is not None)
    ratio = max((_nan_first(r.margins.ratio) for r in records if r.margins is not None), default=-1.0)
    return rank, poolable, -ratio


def _nan_first(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _extreme(errors: Sequence[Errors], name: str) -> float:
    """The value of largest magnitude; NaN counts as larger than any."""
    values: list[float] = [getattr(e, name) for e in errors]
    return max(values, key=lambda v: (math.isnan(v), abs(v)))


def _hazards(records: Iterable[Record]) -> tuple[HazardRow, ...]:
    """Most severe first: by kind, observed before predicted, then by how far beyond the format."""
    found: dict[tuple[HazardKind, str, str, str], list[tuple[Hazard, Record]]] = defaultdict(list)
    for record in records:
        for hazard in _causes(record.hazards) if record.hazards else ():
            found[hazard.kind, hazard.stage, hazard.format, record.recipe].append((hazard, record))
    rows = []
    for key, entries in found.items():
        worst, where = min(entries, key=lambda e: _depth(e[0]))
        observed = {id(r) for h, r in entries if h.source == "observed"}
        predicted = {id(r) for h, r in entries if h.source != "observed"}
        counts = (len(observed | predicted), len(observed), len(predicted))
        rows.append(HazardRow(*key, *counts, worst, where.case, where.implementation))
    rows.sort(
        key=lambda row: (
            _BY_SEVERITY.get(row.kind, len(_SEVERITY)),
            not row.observed,
            _depth(row.worst),
            -row.cells,
        )
    )
    return tuple(rows)


def _causes(hazards: Iterable[Hazard]) -> Iterator[Hazard]:
    """Without the Inf and NaN that later stages inherit: hazards stand in the order data meets the stages."""
    spread = False
    for hazard in hazards:
        spreads = hazard.source == "observed" and hazard.kind in (HazardKind.OVERFLOW, HazardKind.NON_FINITE)
        if not (spreads and spread):
            yield hazard
        spread = spread or spreads


def _inputs(records: Iterable[Record]) -> tuple[InputRow, ...]:
    """One row a case; a seed's facts are the same in all its cells."""
    seeds: dict[str, dict[int, Record]] = defaultdict(dict)
    for record in records:
        seeds[record.case].setdefault(record.seed, record)
    rows = []
    for case, by_seed in seeds.items():
        first, *_ = met = list(by_seed.values())
        var, peak, top = (
            statistics.fmean(r.data.get(name, math.nan) for r in met)
            for name in ("var_qk_per_dim", "score_peak", "mean_top_prob")
        )
        rows.append(InputRow(case, first.shape, var, peak, top, first.why))
    return tuple(rows)


def _depth(hazard: Hazard) -> tuple[float, float]:
    """Smaller is worse: headroom in bits (NaN worst of all), then the share of elements met."""
    bits = hazard.headroom_bits
    return (-math.inf if math.isnan(bits) else bits, -hazard.share)


def _refusals(records: Iterable[Record]) -> tuple[RefusalRow, ...]:
    """Most frequent first."""
    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in records:
        if record.status is Status.REFUSED:
            for reason in record.reasons or ("no reason given",):
                cases[record.implementation, reason].append(record.case)
    rows = [RefusalRow(*key, len(set(met)), len(met)) for key, met in cases.items()]
    return tuple(sorted(rows, key=lambda row: (-row.records, row.implementation, row.reason)))
