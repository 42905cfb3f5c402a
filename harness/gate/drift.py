"""Has the error risen? A paired test over seeds, with a stated smallest drift.

Both runs draw the same inputs for a seed, so that the two rmse of a (cell, seed) are a pair, and the spread between
inputs, far larger than any drift worth finding, cancels in d = log(rmse_new / rmse_old). The same code on the same
machine gives the same bits: every d is exactly 0, and nothing below can fire.

**Smallest drift.** A cell has drifted when the mean of its d passes log(1.025) + noise; an implementation under a
recipe, all its cells together, when theirs passes log(1.01) + noise. Where a rise is the same in every seed, as that of
a fault nearly is, the noise is nearly 0: a rise of 5 % is found in a single cell and one of 2 % in all cells with a
power of 1. One case alone never convicts a group: its mean has to pass without any one of its cells.

**Noise** is what other roundings of the same code would do: another processor's matrix product, sums in another order.
If every rounding is drawn anew, S = Σ e² over n elements has Var S ≤ Σ E e⁴ ≤ max e²·S, so log rmse = ½ log(S/n) has a
variance of at most 1/(4·n_eff) with n_eff = n·rmse²/max², and d twice that: τ² = 1/(2·n_eff). τ tells how noisy pairs
are *relative to each other* (`noise.unit` says what few elements add); the level s is measured in the run, as in any
paired test by what seeds differ by within their cell: s² = Σ ((d − mean of its cell)/τ)² / Σ (seeds − 1), over the
cells of one implementation under one recipe, or over those of all implementations under it where that is more (few
seeds may agree by chance, and another product moves all of them). A cell of k seeds then has σ = √(Σ τ²)/k, and all
cells together, weighted by 1/τ², σ = 1/√(Σ 1/τ²). `gate.noise` derives how many s·σ are noise. With one seed alone
nothing tells the noise, and s is 0.

**False alarms.** Where bits moved without a fault, all tests of a gate together alarm with a chance of 1e-3 at most,
whatever implementations share; where none moved, never. It is divided among the tests of implementations and recipes
whose bits moved: those of the others cannot alarm. (Five standard errors, as it was, are 3e-7 a test if s is known;
with s from four degrees of freedom 3e-3, where the smallest drift is little beside the noise: 3 to 5 alarms in 1,000
gates. `reports/gate-study.md` has both.)

**Floor.** Where nearly all elements are exact, rmse is a few that round the other way, and doubles by chance: no
statistic of one cell tells that from a fault. Their mean square adds to the rest, hence a rise counts from
hypot(old, 0.05·u·truth_rms), with u the output format's unit roundoff. A sum in place of hypot would hide 15 % wherever
rmse < u·truth_rms, and there lies every output that is rounded once and correctly (about 0.4·u·truth_rms). With hypot,
5 % shows from 0.23·u·truth_rms upwards. Rises and limits are told beyond the floor; the rmse itself has to rise by the
limit's factor times hypot(1, 0.05·u·truth_rms/rmse): at 0.4·u·truth_rms by 3.3 % in a cell, by 1.8 % in all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.formats import get_format
from harness.gate.noise import Level, share, unit
from harness.gate.pooled import Key, Pooled
from harness.recipe import get_recipe

SMALLEST_IN_CELL = 0.025
SMALLEST_IN_ALL = 0.01
FLOOR = 0.05
_CLIP = 7.0  # e^7: an rmse of 0 on one side is a factor of a thousand, not infinity

Pair = tuple[Pooled, Pooled]  # new, old
Group = tuple[str, str]  # implementation, recipe


@dataclass(frozen=True)
class Drift:
    """The mean of d beyond the floor, and the limit that it passed, both as ratios of rmse minus 1. `cases` of `of`
    cells of a group: those beyond a cell's limit of their own; `most`: the case that drifted farthest."""

    rise: float
    limit: float
    pairs: int
    cases: int = 1
    of: int = 1
    most: str = ""


@dataclass(frozen=True)
class Found:
    """What drifted: cells, and whole groups, whose cells are then not named again. `moved` of `pairs` had any other
    rmse, by a factor of 1 + `widest` at most."""

    cells: Mapping[Key, Drift]
    groups: Mapping[Group, Drift]
    moved: int
    pairs: int
    widest: float


@dataclass(frozen=True)
class _Cell:
    """The pairs of a cell: raw d, d beyond the floor, what of d tells the noise, τ."""

    key: Key
    raw: tuple[float, ...]
    drifts: tuple[float, ...]
    telling: tuple[float, ...]
    noise: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.drifts) / len(self.drifts)

    @property
    def residuals(self) -> list[float]:
        mean = math.fsum(self.telling) / len(self.telling)
        return [((d - mean) / tau) ** 2 for d, tau in zip(self.telling, self.noise, strict=True)]

    @property
    def moved(self) -> bool:
        return any(self.raw)

    def limit(self, level: Level) -> float:
        smallest = math.log1p(SMALLEST_IN_CELL)
        return smallest + level.allowance(smallest, math.hypot(*self.noise) / len(self.noise))


def roundoff(recipe: str) -> float:
    """Of the output's format. A user's recipe is not known here: FP32's is small enough never to hide
    much."""
    try:
        return get_format(get_recipe(recipe).out_format).unit_roundoff
    except ValueError:
        return get_format("fp32").unit_roundoff


def floor_of(cell: Pooled) -> float:
    """The error of a few elements that round the other way."""
    truth = cell.truth_rms if cell.truth_rms is not None and math.isfinite(cell.truth_rms) else 0.0
    return FLOOR * roundoff(cell.recipe) * truth


def find_drifts(pairs: Iterable[Pair], sign: int = 1) -> Found:
    """Cells and groups whose error rose, or with sign −1 fell, beyond the limits above. A pair with a figure that is
    missing or not finite is left out."""
    groups: dict[Group, list[_Cell]] = defaultdict(list)
    for new, old in pairs:
        cell = _cell(new, old, sign)
        if cell.raw:
            groups[new.implementation, new.recipe].append(cell)
    levels = _levels(groups)
    cells: dict[Key, Drift] = {}
    whole: dict[Group, Drift] = {}
    for group, members in groups.items():
        level = levels[group]
        alone = [c for c in members if c.mean > c.limit(level)]
        if _systematic(members, level):
            whole[group] = _of_group(members, level, len(alone))
        else:
            cells |= {c.key: Drift(_ratio(c.mean), _ratio(c.limit(level)), len(c.raw)) for c in alone}
    raw = [d for members in groups.values() for c in members for d in c.raw]
    return Found(cells, whole, sum(d != 0 for d in raw), len(raw), _ratio(max(map(abs, raw), default=0.0)))


def _cell(new: Pooled, old: Pooled, sign: int) -> _Cell:
    floor = floor_of(old)
    kept = [
        (sign * _log(b, a, 0.0), sign * _log(b, a, floor), sign * _log(b, a, _hiding(floor, a, b)), unit(tau))
        for b, a, tau in zip(new.rmses, old.rmses, new.noise, strict=True)
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)
    ]
    raw, drifts, telling, noise = zip(*kept, strict=True) if kept else ((), (), (), ())
    return _Cell(new.key, raw, drifts, telling, noise)


def _hiding(floor: float, old: float, new: float) -> float:
    """The floor for what tells the noise: none where it hides less than 3 %. It would swallow small moves of all large
    cells, and noise would seem to be 0."""
    return floor if min(old, new) < 4 * floor else 0.0


def _log(new: float, old: float, floor: float) -> float:
    """log(new / old) as far as the floor does not explain it; 0 for equal figures, and of either sign alike."""
    if new < old:
        return -_log(old, new, floor)
    base = math.hypot(old, floor)
    if new <= base:
        return 0.0
    return min(_CLIP, math.log(new / base)) if base else _CLIP


def _levels(groups: Mapping[Group, Sequence[_Cell]]) -> dict[Group, Level]:
    """The noise of each group: the larger of its own and of its recipe's s, with the freedom of its own, which is the
    less. That of a recipe counts a case once: implementations may share every rounding."""
    by_recipe: dict[str, list[_Cell]] = defaultdict(list)
    for (_, recipe), members in groups.items():
        by_recipe[recipe] += members
    of_recipe = {recipe: (_scale(members), _freedom(members)) for recipe, members in by_recipe.items()}
    # A test of each cell, and one of all together.
    alpha = share(sum(len(members) + 1 for members in groups.values() if any(c.moved for c in members)))
    levels = {}
    for group, members in groups.items():
        scale, freedom = of_recipe[group[1]]
        levels[group] = Level(max(_scale(members), scale), _freedom(members) or freedom, alpha)
    return levels


def _freedom(members: Sequence[_Cell]) -> int:
    """Degrees of freedom of s: each case's once."""
    seeds = {c.key[0]: len(c.raw) for c in sorted(members, key=lambda c: -len(c.raw))}  # the fewest stay
    return sum(seeds.values()) - len(seeds)


def _scale(members: Sequence[_Cell]) -> float:
    """s: root mean square of what seeds differ by within their cells, in units of τ."""
    squares = math.fsum(square for c in members for square in c.residuals)
    freedom = sum(len(c.raw) - 1 for c in members)
    return math.sqrt(squares / freedom) if freedom else 0.0


def _systematic(members: Sequence[_Cell], level: Level) -> bool:
    """Whether all cells together passed their limit, and would without any one case: a single cell's drift is told as
    that cell's."""
    if len(members) < 2:
        return False
    subsets = ([c for c in members if c is not left] for left in members)
    return all(mean > limit for mean, limit in (_weighed(subset, level) for subset in (members, *subsets)))


def _weighed(members: Sequence[_Cell], level: Level) -> tuple[float, float]:
    """Mean drift of all pairs, weighted by 1/τ², and its limit."""
    pairs = [(d, tau**-2) for c in members for d, tau in zip(c.drifts, c.noise, strict=True)]
    weight = math.fsum(w for _, w in pairs)
    mean = math.fsum(d * w for d, w in pairs) / weight
    smallest = math.log1p(SMALLEST_IN_ALL)
    return mean, smallest + level.allowance(smallest, 1 / math.sqrt(weight))


def _of_group(members: Sequence[_Cell], level: Level, alone: int) -> Drift:
    mean, limit = _weighed(members, level)
    most = max(members, key=lambda c: c.mean)
    pairs = sum(len(c.raw) for c in members)
    return Drift(_ratio(mean), _ratio(limit), pairs, alone, len(members), most.key[0])


def _ratio(log: float) -> float:
    return math.expm1(log)
