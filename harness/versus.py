"""Two implementations, recipes or checkouts on the same inputs: judged, then timed by turns where both passed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.case import Case
from harness.devices import synchronise, use_device
from harness.docket import Docket
from harness.error_model import form_of
from harness.inputs import make_inputs
from harness.operands import NO_EXTRAS
from harness.quantize import store
from harness.recipe import Recipe
from harness.records import Status
from harness.result import Fallen, tried
from harness.spec import AttentionSpec, Shape
from harness.timing.pairs import Paired, paired, repeated
from harness.timing.sides import Checkout, Here, Problem, Ready, Side
from harness.unit import is_emulated


@dataclass(frozen=True)
class Contender:
    """An implementation under a recipe, which was `written` as a name or a TOML path; `old`: as another checkout has
    it."""

    name: str
    recipe: Recipe
    written: str
    old: Path | None = None

    @property
    def emulated(self) -> bool:
        return is_emulated(self.name, self.recipe)

    def __str__(self) -> str:
        text = f"{self.name}:{self.written}"
        return text if self.old is None else f"{text} of {self.old}"


@dataclass(frozen=True)
class Judged:
    """The accuracy of one side: its status and reasons, rel_l2, and error ÷ expected; NaN where nothing ran."""

    status: Status
    reasons: tuple[str, ...]
    rel_l2: float = math.nan
    ratio: float = math.nan


@dataclass(frozen=True)
class Versus:
    """One comparison. `times` is None where a side was not to be timed."""

    shape: Shape
    a: Contender
    b: Contender
    judged: tuple[Judged, Judged]
    times: Paired | None


@contextmanager
def sides(old: Path | None) -> Iterator[tuple[Side, Side]]:
    """What A and B run in: this process, or where A is another checkout's, a process of its own for each of the two."""
    root = Path(__file__).resolve().parents[1]
    with (
        closing(Checkout(old) if old else Here()) as before,
        closing(Checkout(root) if old else Here()) as now,
    ):
        yield before, now


def versus(
    pairs: Iterable[tuple[Contender, Contender]], shapes: Iterable[Shape], spec: AttentionSpec,
    sides: tuple[Side, Side], budget_s: float, threshold: float, device: str = "cpu", anyway: bool = False,
    seed: int = 0,
) -> Iterator[Versus]:  # fmt: skip
    """Every pair on every shape, inputs drawn from N(0, 1). All of it counts as one command: the more comparisons, the
    wider their intervals. A side that raises is an ERROR, with its first line.

    Raises ValueError for a device that is not there, and a shape without numbers.
    """
    place, pairs, shapes = use_device(device), tuple(pairs), tuple(shapes)
    for shape in shapes:
        if not math.prod(shape.tensor("out")) * math.prod(shape.tensor("k")):
            raise ValueError(f"the shape is {shape}; allowed: sizes ≥ 1")
        case = Case("compare", "normal", shape, "what is timed", spec=spec)
        exact = tuple(x.to(place) for x in make_inputs(case, seed).tensors)
        bench = _Bench(shape, spec, (exact[0], exact[1], exact[2]))
        for a, b in pairs:
            tried = [bench.tried(side, who) for side, who in zip(sides, (a, b), strict=True)]
            (ready_a, judged_a), (ready_b, judged_b) = tried
            times = None
            if ready_a and ready_b and (anyway or judged_a.status is judged_b.status is Status.PASS):
                timed = partial(
                    _timed, budget_s=budget_s, threshold=threshold, comparisons=len(pairs) * len(shapes)
                )
                times = bench.timed(sides, (a, b), (ready_a, ready_b), timed)
            yield Versus(shape, a, b, (judged_a, judged_b), times)


def _timed(a: Ready, b: Ready, budget_s: float, threshold: float, comparisons: int) -> Paired:
    """Both in the same way: as calls alone where both can be."""
    alone = a.bare and b.bare
    return paired(
        lambda calls: a.clock(calls, alone),
        lambda calls: b.clock(calls, alone),
        budget_s,
        threshold,
        comparisons,
    )


class _Bench:
    """Inputs of one shape, stored once for each recipe, and what judges outputs on them."""

    def __init__(self, shape: Shape, spec: AttentionSpec, exact: tuple[Tensor, Tensor, Tensor]) -> None:
        self.shape, self.spec, self.exact = shape, spec, exact
        self._dockets: dict[Recipe, Docket] = {}

    def tried(self, side: Side, who: Contender) -> tuple[Ready | None, Judged]:
        """Run once, and judged. What a side raises is its own: it is under test."""
        stored = store(self.exact, who.recipe, round_first=True)

        def run() -> Ready:
            ready = side.ready(who.name, Problem(self.shape, self.spec, who.recipe, who.written, stored))
            synchronise(ready.out.device)
            return ready

        ready = tried(run)
        if isinstance(ready, Fallen):
            return None, Judged(ready.status, tuple(x.partition("\n")[0] for x in ready.reasons))
        return ready, self._judged(who, stored, ready.out)

    def timed(
        self, sides: tuple[Side, Side], who: tuple[Contender, Contender], ready: tuple[Ready, Ready],
        timed: Callable[[Ready, Ready], Paired],
    ) -> Paired:  # fmt: skip
        """The comparison, and where each side is a process of its own, what it says in fresh ones."""
        if who[0].old is None:
            return timed(*ready)
        first = [ready]

        def measure() -> Paired:
            a, b = first.pop() if first else (self._again(*x) for x in zip(sides, who, strict=True))
            return timed(a, b)

        def end() -> None:
            for side in sides:
                side.close()

        return repeated(measure, end)

    def _again(self, side: Side, who: Contender) -> Ready:
        """The same call once more, of a side that has started anew: it was judged before."""
        stored = store(self.exact, who.recipe, round_first=True)
        return side.ready(who.name, Problem(self.shape, self.spec, who.recipe, who.written, stored))

    @torch.no_grad()
    def _judged(self, who: Contender, stored: Any, out: Tensor) -> Judged:
        if tuple(out.shape) != self.shape.tensor("out"):
            return Judged(
                Status.FAIL, (f"out is {tuple(out.shape)}, but should be {self.shape.tensor('out')}",)
            )
        docket = self._dockets.get(who.recipe)
        if docket is None:
            docket = self._dockets[who.recipe] = Docket(stored, self.spec, NO_EXTRAS, who.recipe)
        (verdict,) = docket.verdicts([out], [form_of(who.name)])
        return Judged(verdict.status, verdict.reasons, verdict.errors.rel_l2, verdict.margins.ratio)
