"""Records → what each recipe costs its inputs, and what the inputs could not have shown.

Precision is a record's, since an algorithm may lose what another under the same recipe keeps. A (case, recipe) fails
when it does with every implementation; otherwise the loss is theirs who alone have it.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from harness.records import Record, Status
from harness.report.model import Cost, CostlyRow, Doubt, OwnLoss, Unseen, finite_rms, pool

CaseRecipe = tuple[str, str]
PRECISION = (Status.PASS, Status.FAIL, Status.INCONCLUSIVE)
_FAILING = (Status.FAIL, Status.ERROR)
_SOURCE = re.compile(", (observed|predicted)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


class Precision:
    """All records of one case under one recipe."""

    def __init__(self, records: Sequence[Record]) -> None:
        by_name: dict[str, set[Status]] = defaultdict(set)
        for r in records:
            if r.precision is not None:
                by_name[r.implementation].add(r.precision)
        failing = tuple(name for name, met in by_name.items() if Status.FAIL in met)
        self.status: Status | None = None
        if by_name:
            passing = any(met == {Status.PASS} for met in by_name.values())
            self.status = Status.PASS if passing else Status.INCONCLUSIVE
            if len(failing) == len(by_name):
                self.status = Status.FAIL
        self.alone = () if self.status is Status.FAIL else failing
        sound = [r for r in records if r.status not in _FAILING and r.implementation not in self.alone]
        self.records = sound or list(records)


def precisions(records: Iterable[Record]) -> dict[CaseRecipe, Precision]:
    """By case and recipe, in the order met."""
    found: dict[CaseRecipe, list[Record]] = defaultdict(list)
    for record in records:
        found[record.case, record.recipe].append(record)
    return {key: Precision(members) for key, members in found.items()}


def counts(found: Mapping[CaseRecipe, Precision]) -> tuple[tuple[str, int], ...]:
    """Each status and its number of (case, recipe); nothing where no record has one."""
    met = Counter(p.status for p in found.values() if p.status is not None)
    return tuple((s.value, met[s]) for s in PRECISION) if met else ()


def cost(found: Sequence[Precision]) -> Cost:
    """What one recipe costs, over some cases."""
    records = [r for p in found for r in p.records]
    return Cost(
        total=pool(r.total_errors for r in records),
        floor=finite_rms(r.floor for r in records),
        cases=len(found),
        failing=sum(p.status is Status.FAIL for p in found),
        inconclusive=sum(p.status is Status.INCONCLUSIVE for p in found),
    )


def costly(found: Mapping[CaseRecipe, Precision]) -> tuple[CostlyRow, ...]:
    """Worst first: what has no finite figure, then by total error ÷ floor."""
    rows = []
    for key, p in found.items():
        if p.status is Status.FAIL:
            kinds: dict[str, str] = {}
            for r in p.records:
                for reason in r.precision_reasons:
                    kinds.setdefault(kind(reason), reason)
            total = pool(r.total_errors for r in p.records)
            rows.append(CostlyRow(*key, total, finite_rms(r.floor for r in p.records), tuple(kinds.values())))
    return tuple(sorted(rows, key=_costliest))


def _costliest(row: CostlyRow) -> tuple[bool, float, float]:
    times = row.total.rel_l2 / row.floor if row.floor > 0 else math.inf
    return not row.total.left_out, -(math.inf if math.isnan(times) else times), -row.floor


def own_losses(found: Mapping[CaseRecipe, Precision]) -> tuple[OwnLoss, ...]:
    """Most frequent first."""
    met = Counter(p.alone for p in found.values() if p.alone)
    return tuple(OwnLoss(names, n) for names, n in met.most_common())


def kind(reason: str) -> str:
    """A reason without its figures and whether it was seen or foreseen: what tells one from another."""
    return _NUMBER.sub("…", _SOURCE.sub("", short(reason)))


def short(reason: str) -> str:
    """A reason without what follows its first colon or semicolon: the figures and place of a hazard, an explanation."""
    return reason.partition(": ")[0].partition(";")[0]


def unseen(records: Iterable[Record]) -> tuple[Unseen, ...]:
    """One row a group whose records were judged."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for r in records:
        if r.margins is not None:
            met = groups.setdefault(r.group, {})
            for name in ("shrink", "scale"):
                size = r.margins.unseen.get(name, math.nan)
                if not math.isnan(size) and (name not in met or size > met[name][0]):
                    met[name] = (size, f"{r.case} · {r.recipe}")
    nothing = (math.nan, "")
    return tuple(
        Unseen(g, *met.get("shrink", nothing), *met.get("scale", nothing)) for g, met in groups.items()
    )


def doubts(records: Iterable[Record]) -> tuple[Doubt, ...]:
    """Reasons that differ by their numbers alone come to one, with the range of these. Most frequent first."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for r in records:
        if r.status is Status.INCONCLUSIVE:
            for reason in r.reasons or ("no reason given",):
                found[_NUMBER.sub("…", reason)].append((reason, r.case))
    rows = []
    for entries in found.values():
        cases = Counter(case for _, case in entries)
        rows.append(Doubt(_ranged([reason for reason, _ in entries]), len(entries), tuple(cases.items())))
    return tuple(sorted(rows, key=lambda row: -row.cells))


def _ranged(texts: Sequence[str]) -> str:
    """Texts that differ by their numbers alone, as one."""
    numbers = [_NUMBER.findall(text) for text in dict.fromkeys(texts)]
    spans = (sorted(set(met), key=float) for met in zip(*numbers, strict=True))
    shown = iter([span[0] if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans])
    return _NUMBER.sub(lambda _: next(shown), texts[0])
