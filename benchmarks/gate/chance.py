"""How often the gate's paired test fires by chance where bits moved, and what it then still finds: simulated gates.

A simulated gate is a smoke run against its own baseline, whose rmse are multiplied by e^d: the pairs, their τ and the
test are the gate's own (`harness.gate.drift`), the d are drawn.

* *Resampled*: each (case, seed) of a recipe takes the d/τ that all implementations had together at a random (case,
  seed) of the same recipe where any bit moved, between two random settings of the machine, with a random sign. What
  implementations share stays shared, and how d is distributed in truth stays as it is.
* *Normal*: d = s·τ times a standard normal, in every FP32 pair; for each implementation its own, or the same for all.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from harness.gate import Pooled, drift
from harness.gate.drift import find_drifts
from harness.gate.noise import Level
from harness.gate.pooled import Key

Cells = Mapping[Key, Pooled]
Slot = tuple[str, int]  # case, seed
Draw = Callable[[random.Random, Pooled, int], float]  # d of a cell's pair
ALIKE = "naive_masked"  # whose d stands for one that a case does not run: the plainest order of the same sums


BEFORE_Z = 5.0


@dataclass(frozen=True)
class Simulated:
    """How many of the gates alarmed by this rule, and by the one before."""

    what: str
    gates: int
    alarms: int
    before: int

    def row(self) -> str:
        bound = upper_95(self.alarms, self.gates)
        return f"| {self.what} | {self.gates} | {self.before} | **{self.alarms}** | {bound:.2g} |"


def upper_95(alarms: int, gates: int) -> float:
    """Of the rate: the one whose chance of so few is 5 % (Poisson)."""
    low, high = 0.0, 10.0 + 3.0 * alarms
    for _ in range(60):
        mean = (low + high) / 2
        few = math.fsum(math.exp(-mean + n * math.log(mean) - math.lgamma(n + 1)) for n in range(alarms + 1))
        low, high = (mean, high) if few > 0.05 else (low, mean)
    return high / gates


@contextmanager
def rule_before() -> Iterator[None]:
    """z = 5 standard errors of the measured s, whatever its freedom, the floor and however few the elements."""

    def allowance(level: Level, _smallest: float, sigma: float) -> float:
        return BEFORE_Z * level.scale * sigma

    def hiding(floor: float, _old: float, _new: float) -> float:
        return floor

    with (
        mock.patch.object(Level, "allowance", allowance),
        mock.patch.object(drift, "unit", float),
        mock.patch.object(drift, "_hiding", hiding),
    ):
        yield


def alarms_of(new: Sequence[Pooled], old: Sequence[Pooled]) -> tuple[bool, bool]:
    """By this rule, and by the one before."""
    pairs = list(zip(new, old, strict=True))
    now = find_drifts(pairs)
    with rule_before():
        then = find_drifts(pairs)
    return bool(now.cells or now.groups), bool(then.cells or then.groups)


def whole(settings: Mapping[str, Cells]) -> list[Simulated]:
    """Every setting against every other as they are, paired although their class of machine may differ."""
    rows = []
    for (a, old), (b, new) in itertools.permutations(settings.items(), 2):
        now, before = alarms_of([new[key] for key in old], list(old.values()))
        rows.append(Simulated(f"{b} against {a}", 1, now, before))
    return rows


def donors(settings: Mapping[str, Cells]) -> dict[str, list[dict[str, float]]]:
    """By recipe: d/τ by implementation, of each (case, seed) where any bit moved between two settings."""
    found: dict[tuple[str, str, str, Slot], dict[str, float]] = defaultdict(dict)
    for (a, old), (b, new) in itertools.combinations(settings.items(), 2):
        for key, cell in old.items():
            for seed, was, now, tau in zip(cell.seeds, cell.rmses, new[key].rmses, cell.noise, strict=True):
                if was and now and math.isfinite(was) and math.isfinite(now):
                    found[a, b, key[2], (key[0], seed)][key[1]] = math.log(now / was) / tau
    blocks: dict[str, list[dict[str, float]]] = defaultdict(list)
    for (_, _, recipe, _), block in sorted(found.items()):
        if any(block.values()):
            blocks[recipe].append(block)
    return blocks


def drawn(cells: Cells, draws: Mapping[tuple[Key, int], float]) -> list[Pooled]:
    """The cells with their rmse times e^d; d = 0 where none was drawn."""
    return [
        replace(
            cell,
            rmses=tuple(
                x if x is None else x * math.exp(draws.get((key, seed), 0.0))
                for seed, x in zip(cell.seeds, cell.rmses, strict=True)
            ),
        )
        for key, cell in cells.items()
    ]


def _pairs(cells: Cells, recipes: Sequence[str]) -> Iterator[tuple[Key, int, float]]:
    for key, cell in cells.items():
        if key[2] in recipes:
            for seed, tau in zip(cell.seeds, cell.noise, strict=True):
                yield key, seed, tau


def resampled(
    cells: Cells, blocks: Mapping[str, Sequence[Mapping[str, float]]], gates: int, seed: int
) -> Simulated:
    draw = random.Random(seed)
    cells = {key: cell for key, cell in cells.items() if key[2] in blocks}  # the others' d stay 0
    pairs, old = list(_pairs(cells, list(blocks))), list(cells.values())
    slots = sorted({(key[2], (key[0], n)) for key, n, _ in pairs})

    def one() -> tuple[bool, bool]:
        chosen = {slot: (draw.choice(blocks[slot[0]]), draw.choice((-1, 1))) for slot in slots}
        draws = {}
        for key, n, tau in pairs:
            block, sign = chosen[key[2], (key[0], n)]
            draws[key, n] = sign * tau * block.get(key[1], block.get(ALIKE, 0.0))
        return alarms_of(drawn(cells, draws), old)

    return _counted("resampled from real differences", one, gates)


def normal(cells: Cells, level: float, alike: bool, gates: int, seed: int) -> Simulated:
    draw = random.Random(seed)
    chosen = {key: cell for key, cell in cells.items() if key[2] == "fp32"}
    pairs, old = list(_pairs(chosen, ["fp32"])), list(chosen.values())

    def one() -> tuple[bool, bool]:
        shared: dict[Slot, float] = defaultdict(lambda: draw.gauss(0, level))
        return alarms_of(
            drawn(
                chosen,
                {(k, n): tau * (shared[k[0], n] if alike else draw.gauss(0, level)) for k, n, tau in pairs},
            ),
            old,
        )

    return _counted(f"normal, s = {level:.2g}, {'the same for all' if alike else 'each its own'}", one, gates)


def _counted(what: str, one: Callable[[], tuple[bool, bool]], gates: int) -> Simulated:
    now, before = zip(*(one() for _ in range(gates)), strict=True)
    return Simulated(what, gates, sum(now), sum(before))


def found(
    cells: Cells, rise: float, level: float, everywhere: bool, gates: int, seed: int
) -> tuple[float, float]:
    """How often a rise of one implementation is found, by this rule and by the one before: under bf16, the others' bits
    unchanged, its d spread by `level` between seeds, in all its cases or in `smoke/normal` alone."""
    draw, name = random.Random(seed), "online_softmax"
    chosen = {key: cell for key, cell in cells.items() if key[2] == "bf16"}
    old = list(chosen.values())
    hit = [
        (key, n, tau)
        for key, n, tau in _pairs(chosen, ["bf16"])
        if key[1] == name and (everywhere or key[0] == "smoke/normal")
    ]

    def one() -> tuple[bool, bool]:
        rises = {(key, n): math.log1p(rise) + tau * draw.gauss(0, level) for key, n, tau in hit}
        return alarms_of(drawn(chosen, rises), old)

    met = _counted("", one, gates)
    return met.alarms / gates, met.before / gates
