"""What charts draw, as data: a grid, sweeps over length, a ladder of amplitudes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.records import Record, Status
from harness.report.review.material import FAILING, Material

LADDER = "magnitude"
GRID_ROWS = 40  # of a heat map that can be read
USELESS = 0.25  # of the output: beyond it the judge says INCONCLUSIVE, since zeros would pass
FEWEST = 3  # lengths that make a sweep


@dataclass(frozen=True)
class GridCell:
    """The largest error ÷ expected, NaN where nothing was judged, and a mark."""

    ratio: float
    mark: str


@dataclass(frozen=True)
class Grid:
    """Rows are cases and sweeps of them, or groups where `grouped`; columns are implementations within recipes."""

    rows: tuple[str, ...]
    implementations: tuple[str, ...]
    recipes: tuple[str, ...]
    cells: Mapping[tuple[str, str, str], GridCell | None]  # by row, implementation, recipe
    grouped: bool


@dataclass(frozen=True)
class Sweep:
    """Cases that differ in their number of keys alone. `points`: recipe → (keys, total rel_l2)."""

    name: str
    cases: tuple[str, ...]
    points: Mapping[str, tuple[tuple[int, float], ...]]


@dataclass(frozen=True)
class Rung:
    """One amplitude. `peak`: the largest |score|."""

    case: str
    peak: float


@dataclass(frozen=True)
class Step:
    """What a recipe does on a rung. `status`: precision's."""

    error: float
    status: Status | None
    left_out: bool
    reason: str


@dataclass(frozen=True)
class Ladder:
    rungs: tuple[Rung, ...]
    steps: Mapping[tuple[str, str], Step]  # by case and recipe


def grid(m: Material) -> Grid | None:
    """All cases, a sweep as one row; or their groups where there are more than GRID_ROWS."""
    if not m.records:
        return None
    members: dict[str, dict[str, None]] = defaultdict(dict)
    swept = {case: f"{s.name}, {len(s.cases)} lengths" for s in sweeps(m) for case in s.cases}
    for r in m.records:
        members[swept.get(r.case, r.case)][r.case] = None
    grouped = len(members) > GRID_ROWS
    if grouped:
        members.clear()
        for r in m.records:
            members[r.group][r.case] = None
    cells = {
        (row, name, recipe): _grid_cell(m, [r for c in cases for r in m.cell(c, name, recipe)])
        for row, cases in members.items()
        for name in m.implementations
        for recipe in m.asked.recipes
    }
    return Grid(tuple(members), m.implementations, m.asked.recipes, cells, grouped)


def _grid_cell(m: Material, records: Sequence[Record]) -> GridCell | None:
    if not records:
        return None
    ratios = [
        r.margins.ratio
        for r in records
        if r.margins is not None and r.errors is not None and not r.errors.class_mismatch
    ]
    met = {r.status for r in records}
    unexplained = {r.status for r in records if m.failed(r)}
    mark = ""
    if unexplained:
        mark = "E" if Status.ERROR in unexplained else "F"
    elif met & set(FAILING):
        mark = "k"
    elif Status.INCONCLUSIVE in met:
        mark = "?"
    elif met == {Status.REFUSED}:
        mark = "–"
    return GridCell(max(filter(math.isfinite, ratios), default=math.nan), mark)


def keys(shape: str) -> tuple[str, int] | None:
    """What a shape `[B, H, L×S, D]` has but its lengths, and S; None for text that is no shape."""
    found = re.fullmatch(r"\[(\d+), (\d+(?:/\d+)?), (?:\d+×)?(\d+), (\d+(?:→\d+)?)\]", shape)
    return None if found is None else (f"[{found[1]}, {found[2]}, n, {found[4]}]", int(found[3]))


def sweeps(m: Material) -> tuple[Sweep, ...]:
    """Families of one group, one reason and one shape but for the length, with FEWEST lengths or more."""
    families: dict[tuple[str, str, str], dict[int, str]] = defaultdict(dict)
    for r in m.records:
        if (shape := keys(r.shape)) is not None and shape[1] > 0:
            families[r.group, r.why, shape[0]].setdefault(shape[1], r.case)
    found = []
    for (group, _, alike), cases in families.items():
        if len(cases) >= FEWEST:
            points = {
                recipe: tuple(
                    (n, m.total([cases[n]], recipe).rel_l2)
                    for n in sorted(cases)
                    if m.sound(cases[n], recipe)
                )
                for recipe in m.asked.recipes
            }
            found.append(
                Sweep(f"{group} {alike}", tuple(cases.values()), {r: p for r, p in points.items() if p})
            )
    return tuple(found)


def ladder(m: Material) -> Ladder | None:
    """Cases of the group LADDER by the largest score; None where there are none."""
    peaks: dict[str, list[float]] = defaultdict(list)
    for r in m.records:
        if r.group == LADDER and math.isfinite(r.data.get("score_peak", math.nan)):
            peaks[r.case].append(r.data["score_peak"])
    if not peaks:
        return None
    rungs = sorted((Rung(case, max(met)) for case, met in peaks.items()), key=lambda r: (r.peak, r.case))
    steps = {
        (rung.case, recipe): _step(m, rung.case, recipe, records)
        for rung in rungs
        for recipe in m.asked.recipes
        if (records := m.sound(rung.case, recipe))
    }
    return Ladder(tuple(rungs), steps)


def _step(m: Material, case: str, recipe: str, records: list[Record]) -> Step:
    total = m.total([case], recipe)
    status: Status | None = m.precise[case, recipe].status
    reason = next((x for r in records for x in r.precision_reasons), "")
    if total.rel_l2 > USELESS:
        reason = reason or f"the error is {total.rel_l2:.0%} of the output, as much with ideal scales"
        status = Status.FAIL
    return Step(total.rel_l2, status, bool(total.left_out), reason)
