"""Two runs, or a run and a baseline → what changed, by cell (case, implementation, recipe) over its seeds.

For a reader, not a gate: it says what is different, `harness.gate` what is worse.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.records import Record, Status
from harness.report.model import pool, pool_ratio

# Instruction sets sum in another order, which moves an RMS error by up to 3 %: the gate's headroom is told from here.
MOVED = 1.10
Key = tuple[str, str, str]
_FAILING = (Status.FAIL.value, Status.ERROR.value)
_ORDER = (Status.PASS, Status.INCONCLUSIVE, Status.REFUSED, Status.FAIL, Status.ERROR)


@dataclass(frozen=True)
class Side:
    """A cell in one of the two. `status` and `precision` count its seeds by what they ended in; `rel_l2` is pooled,
    None where no seed gave an output; `ratio` is error ÷ expected, None where nothing was judged."""

    status: Mapping[str, int]
    precision: Mapping[str, int]
    rel_l2: float | None
    ratio: float | None
    seeds: tuple[int, ...]
    machine: str

    @property
    def failing(self) -> bool:
        return any(self.status.get(name) for name in _FAILING)

    @property
    def told(self) -> str:
        return " ".join(f"{s.value} {self.status[s.value]}" for s in _ORDER if self.status.get(s.value))


@dataclass(frozen=True)
class Change:
    """A cell that both have, before and now."""

    key: Key
    before: Side
    now: Side

    @property
    def factor(self) -> float:
        """The error now ÷ before; infinite where it became non-finite or was 0, NaN where one has none."""
        before, now = self.before.rel_l2, self.now.rel_l2
        if before is None or now is None:
            return math.nan
        finite = math.isfinite(before), math.isfinite(now)
        if before == now or not any(finite):
            return 1.0
        if not all(finite):
            return math.inf if finite[0] else 0.0
        return now / before if before else math.inf


@dataclass(frozen=True)
class Changes:
    """What changed against `against`. A cell stands in one list alone, but where its precision changed too. `same`
    cells stand in none; `notes` say where other things were compared."""

    against: str
    newly_failing: tuple[Change, ...]
    newly_passing: tuple[Change, ...]
    other_status: tuple[Change, ...]
    precision: tuple[Change, ...]
    error_up: tuple[Change, ...]
    error_down: tuple[Change, ...]
    new: tuple[tuple[Key, Side], ...]
    vanished: tuple[tuple[Key, Side], ...]
    same: int
    notes: tuple[str, ...]


def sides(records: Iterable[Record]) -> dict[Key, Side]:
    """The cells of a run."""
    cells: dict[Key, list[Record]] = defaultdict(list)
    for record in records:
        cells[record.group_key].append(record)
    return {key: _side(members) for key, members in cells.items()}


def _side(records: Sequence[Record]) -> Side:
    errors = pool(r.errors for r in records)
    ratio = pool_ratio(records)
    return Side(
        status=Counter(r.status.value for r in records),
        precision=Counter(r.precision.value for r in records if r.precision is not None),
        rel_l2=None if not (errors.measured or errors.left_out) else _figure(errors.rel_l2, errors.left_out),
        ratio=None if math.isnan(ratio) else ratio,
        seeds=tuple(sorted(r.seed for r in records)),
        machine="+".join(sorted({f"{r.machine.device} {r.machine.isa}" for r in records})),
    )


def _figure(rel_l2: float, left_out: int) -> float:
    """A cell with a seed that cannot be pooled has no finite figure: it is worse than one that has."""
    return math.nan if left_out else rel_l2


def changes(before: Mapping[Key, Side], now: Mapping[Key, Side], against: str) -> Changes:
    """Compare. `against` names what `before` comes from."""
    pairs = [Change(key, before[key], side) for key, side in now.items() if key in before]
    rest = [c for c in pairs if c.before.failing == c.now.failing]
    other = [c for c in rest if _shares(c)]
    moved = [c for c in rest if not _shares(c)]
    up = sorted((c for c in moved if c.factor > MOVED), key=lambda c: -c.factor)
    down = sorted((c for c in moved if c.factor < 1 / MOVED), key=lambda c: c.factor)
    failing = [c for c in pairs if c.now.failing and not c.before.failing]
    passing = [c for c in pairs if c.before.failing and not c.now.failing]
    return Changes(
        against=against,
        newly_failing=tuple(failing),
        newly_passing=tuple(passing),
        other_status=tuple(other),
        precision=tuple(c for c in pairs if _precision_changed(c)),
        error_up=tuple(up),
        error_down=tuple(down),
        new=_without(now, before),
        vanished=_without(before, now),
        same=len(pairs) - sum(map(len, (failing, passing, other, up, down))),
        notes=_notes(pairs),
    )


def _without(cells: Mapping[Key, Side], others: Mapping[Key, Side]) -> tuple[tuple[Key, Side], ...]:
    """Those that the others lack, failing ones first."""
    found = [(key, side) for key, side in cells.items() if key not in others]
    return tuple(sorted(found, key=lambda entry: not entry[1].failing))


def _shares(change: Change) -> bool:
    """Whether the shares of the statuses differ: more seeds of the same alone are no change."""
    before, now = change.before.status, change.now.status
    return any(
        before.get(s.value, 0) * sum(now.values()) != now.get(s.value, 0) * sum(before.values())
        for s in Status
    )


def _precision_changed(change: Change) -> bool:
    """Where both have been judged so, and failing begins or ends."""
    sides = change.before.precision, change.now.precision
    before, now = (bool(side.get(Status.FAIL.value)) for side in sides)
    return all(sides) and before != now


def _notes(pairs: Sequence[Change]) -> tuple[str, ...]:
    notes = []
    machines = [{getattr(c, side).machine for c in pairs} for side in ("before", "now")]
    if machines[0] != machines[1]:
        there, here = (", ".join(sorted(met)) for met in machines)
        notes.append(f"measured on {here}, before on {there}: errors may differ by a few percent")
    seeds = sum(c.before.seeds != c.now.seeds for c in pairs)
    if seeds:
        notes.append(f"{seeds} cells have other seeds than before: their inputs differ")
    return tuple(notes)
