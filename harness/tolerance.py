"""What error is normal for a shape and a precision, and the `rtol` and `atol` that it comes to.

The output's own rounding is at most u|o|, hence rtol = u of the output's format. What is left of an element's error has
the variance of the error model less (c·u·o)², c = 0.4247; atol is passed by a correct kernel with the stated
probability, by one element or more of the whole tensor:

    Σ over elements of erfc(atol / (slack·σ·√2)) = probability
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.case import Case, Draw
from harness.error_model import BLACK_BOX, expectations
from harness.formats import get_format
from harness.inputs import make_inputs
from harness.quantize import quantize
from harness.recipe import TENSORS, Recipe
from harness.rounding import ulp
from harness.spec import AttentionSpec, Shape
from harness.truth import reference
from harness.yardstick import FP32_LIMITS, NARROW

C = 1 / math.sqrt(8 * math.log(2))  # RMS of one rounding of a log-uniform significand, in units of u
PROBABILITY = 1e-3
DATA = {"normal": Draw(), "peaked": Draw("normal", {"q": 8.0}), "outliers": Draw("outliers")}
HEADS, FIRST_ROWS, ROWS = 2, 64, 256  # what is looked at: early causal rows have the largest errors
_STEP = 1e-3  # of the softmax scale


@dataclass(frozen=True)
class Normal:
    """What a correct kernel shows. `rms`, `rel_l2`: of the whole tensor. `largest`, `ulps` (of the output's format, at
    the size of the row: its RMS): what no element passes but with the probability asked for. `rtol`, `atol`: of
    `assert_close`, that passes with the same probability."""

    rms: float
    rel_l2: float
    largest: float
    ulps: float
    rtol: float
    atol: float


@dataclass(frozen=True)
class Tolerance:
    """`stored`: against FP64 attention on the inputs as they are stored; `exact`: on the inputs before. `scale_unseen`:
    the relative error of the softmax scale that passes `stored`'s rtol and atol. `slack`: what σ is multiplied by,
    since measured ÷ predicted goes so far on honest runs."""

    stored: Normal
    exact: Normal
    elements: int
    slack: float
    scale_unseen: float


@torch.no_grad()
def tolerance(
    shape: Shape, recipe: Recipe, spec: AttentionSpec, data: str = "normal", probability: float = PROBABILITY,
    seed: int = 0,
) -> Tolerance:  # fmt: skip
    """The tolerance for drawn data of a shape, looked at in 2 heads and at most 256 rows.

    Raises ValueError for a probability outside (0, 1), unknown data, a call without numbers, and a recipe that has no
    expected size of error.
    """
    if not 0 < probability < 1:
        raise ValueError(f"probability is {probability!r}; allowed: a number between 0 and 1")
    if data not in DATA:
        raise ValueError(f"data is {data!r}; allowed: {', '.join(DATA)}")
    if recipe.base == "fp64":
        raise ValueError(
            f"{recipe.name} is as wide as the truth, which tells nothing about it; allowed: base fp32"
        )
    if recipe.accumulator is not None:
        raise ValueError(
            f"{recipe.name} has a limited accumulator, whose error has a ceiling but no expected size"
        )
    looked, weights = _sampled(shape)
    exact = _inputs(shape, spec, DATA[data], seed, looked)
    stored = tuple(quantize(x, n, recipe) for x, n in zip(exact, TENSORS, strict=True))
    q, k, v = (x.values for x in stored)
    mask = _visible(shape, spec, looked)
    plain = replace(spec, causal=False, window=None)
    truth = reference(q, k, v, plain, mask=mask)
    before = reference(*exact, plain, mask=mask).out
    scales = (stored[0].scale, stored[1].scale, stored[2].scale)
    (expected,) = expectations(truth, q, k, v, plain, [(recipe, BLACK_BOX)], mask=mask, scales=scales)
    if not bool(torch.isfinite(expected.variance).all()):
        raise ValueError(
            f"{recipe.name} promises nothing for some rows of {data} data: its scores leave their format"
        )
    wide = not {*recipe.at.values()} - {recipe.base}
    slack = (FP32_LIMITS if wide else NARROW).slack
    whole = weights[None, None, :, None] * (shape.batch * shape.heads / q.shape[1])
    seen = _Tail(truth.out, expected.variance, recipe, whole, probability, slack).normal()
    between = (truth.out - before).square()
    total = _Tail(before, expected.variance, recipe, whole, probability, slack, between).normal()
    stepped = replace(plain, scale=plain.scale_for(shape.head_dim) * (1 + _STEP))
    moved = (reference(q, k, v, stepped, mask=mask).out - truth.out).abs() / _STEP
    room = (seen.atol + seen.rtol * truth.out.abs()) / moved
    return Tolerance(seen, total, math.prod(shape.tensor("out")), slack, float(room.min()))


def _sampled(shape: Shape) -> tuple[Tensor, Tensor]:
    """Rows to look at, and how many rows each stands for: the first ones alone, then evenly spaced ones."""
    if min(*shape.tensor("q"), *shape.tensor("k"), shape.E) < 1:
        raise ValueError(f"the shape is {shape}; allowed: sizes ≥ 1")
    rows = torch.arange(min(shape.q_len, FIRST_ROWS))
    left = shape.q_len - len(rows)
    if not left:
        return rows, torch.ones(len(rows), dtype=torch.float64)
    count = min(left, ROWS - FIRST_ROWS)
    later = shape.q_len - 1 - torch.arange(count - 1, -1, -1) * left // count
    return torch.cat([rows, later]), torch.cat(
        [torch.ones(len(rows)), torch.full((count,), left / count)]
    ).double()


def _inputs(
    shape: Shape, spec: AttentionSpec, draw: Draw, seed: int, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    small = replace(shape, batch=1, heads=min(shape.heads, HEADS), kv_heads=min(shape.heads, HEADS))
    case = Case("tolerance", "drawn", small, "what error is normal", spec=spec, draw=draw)
    q, k, v = make_inputs(case, seed).tensors
    return q[:, :, rows], k, v


def _visible(shape: Shape, spec: AttentionSpec, rows: Tensor) -> Tensor | None:
    """Bool `[1, 1, rows, S]` of these query rows, None where all see all."""
    if spec.left is None and spec.right is None:
        return None
    position, key = rows[:, None] + spec.shift(shape.q_len, shape.S), torch.arange(shape.S)
    seen = torch.ones(len(rows), shape.S, dtype=torch.bool)
    if spec.left is not None:
        seen &= key >= position - spec.left
    if spec.right is not None:
        seen &= key <= position + spec.right
    return seen[None, None]


class _Tail:
    """How far errors of known variance go. `weight`: how many elements each of those looked at stands for. `between`:
    squares of what storing the inputs did, which is as random as the rest over a row."""

    def __init__(
        self, out: Tensor, variance: Tensor, recipe: Recipe, weight: Tensor, probability: float, slack: float,
        between: Tensor | float = 0.0,
    ) -> None:  # fmt: skip
        self.out, self.variance, self.probability = out, variance + between, probability
        self.weight, self.fmt = weight.expand_as(out), get_format(recipe.out_format)
        rounded = recipe.out_format != recipe.base  # else its rounding is part of the model's variance
        self.rounding = self.fmt.unit_roundoff * out.abs() * rounded
        rest = (variance - (C * self.rounding).square()).clamp(min=0)
        if isinstance(between, Tensor):
            rest = rest + between.mean(-1, keepdim=True)
        self.sigma = slack * rest.sqrt()

    def normal(self) -> Normal:
        size, u = self.out.abs(), self.fmt.unit_roundoff
        spacing = ulp(self.out.square().mean(-1, keepdim=True).sqrt(), self.fmt)
        total, count = float((self.variance * self.weight).sum()), float(self.weight.sum())
        truth = float((self.out.square() * self.weight).sum())
        return Normal(
            math.sqrt(total / count), math.sqrt(total / truth) if truth else math.nan,
            self._solve(lambda x: x - self.rounding), self._solve(lambda x: x * spacing - self.rounding),
            u, self._solve(lambda x: x + u * size - self.rounding),
        )  # fmt: skip

    def _solve(self, room: Callable[[float], Tensor]) -> float:
        """The smallest x whose `room` beyond the output's rounding is passed with the probability, by bisection."""
        low, high = 0.0, 2.0**-60
        while self._passed(room(high)) > self.probability:
            high *= 2
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self._passed(room(middle)) > self.probability else (low, middle)
        return high

    def _passed(self, room: Tensor) -> float:
        """How many elements are expected to go past their room."""
        share = torch.erfc(room.clamp(min=0) / (self.sigma * math.sqrt(2)).clamp(min=1e-300))
        return float((share.masked_fill(room < 0, 1.0) * self.weight).sum())
