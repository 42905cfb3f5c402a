"""Certificates: the FP64 truth held against ball arithmetic (`harness.enclosure`), and the distance that is left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.case import Case
from harness.enclosure import LIMIT, Enclosure, certifiable, enclose, upper
from harness.inputs import make_inputs
from harness.operands import NO_EXTRAS, Extras
from harness.quantize import quantize
from harness.recipe import TENSORS, Recipe, get_recipe
from harness.spec import AttentionSpec
from harness.truth import Truth, reference

if TYPE_CHECKING:
    from flint import arb as Ball


@dataclass(frozen=True)
class Certificate:
    """`contained`: every enclosed row of the truth lies in its balls widened by what FP64 may be off by, and every
    empty row follows the rule. `distance`: the most that out can be from the true value, `lse_distance` the same of
    lse; `relative`: distance ÷ rms(out); `radius`: the largest ball's of out; `of_bound`: the largest share of the
    bound that was used, at `worst` (b, h, i). `rows` were enclosed. In `unbounded` others FP64 does not know the
    differences of the scores (a bias of −3e38 absorbs them): the truth is what FP64 makes of them, and no figure covers
    it. `left_out`: see `Enclosure`. Figures are upper bounds."""

    contained: bool
    radius: float
    distance: float
    relative: float
    lse_distance: float
    of_bound: float
    rows: int
    unbounded: int
    left_out: int
    bits: int
    worst: tuple[int, int, int] | None


@dataclass(frozen=True)
class Row:
    """A line of a report: one case's first draw, as one recipe stores it."""

    case: str
    recipe: str
    certificate: Certificate

    @property
    def distance(self) -> float:
        return self.certificate.distance

    @property
    def radius(self) -> float:
        return self.certificate.radius


def certify_cases(
    cases: Iterable[Case], recipes: Sequence[str | Recipe] = ("fp32", "fp16", "fp8_e4m3"), limit: int = LIMIT
) -> tuple[Row, ...]:
    """A certificate for each small case's first draw as each recipe stores it, cases too large left out."""
    rows = []
    for case in cases:
        if not certifiable(case.shape, limit):
            continue
        made = make_inputs(case, 0)
        for recipe in map(get_recipe, recipes):
            q, k, v = (quantize(x, n, recipe).values for x, n in zip(made.tensors, TENSORS, strict=True))
            rows.append(Row(case.id, recipe.name, certificate(q, k, v, case.spec, made.extras)))
    return tuple(rows)


def certificate(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec | None = None, extras: Extras = NO_EXTRAS,
    truth: Truth | None = None,
) -> Certificate:  # fmt: skip
    """Hold a truth (None: the harness's own) of q `[B, H, L, D]`, k `[B, Hkv, S, D]`, v `[B, Hkv, S, E]` against the
    enclosure of the same call. Raises as `enclose` does."""
    spec = spec or AttentionSpec()
    balls = enclose(q, k, v, spec, extras)
    truth = truth or reference(q, k, v, spec, **extras.as_options())
    radius = distance = lse_distance = share = square = 0.0
    worst, count, unbounded = None, 0, 0
    for at, true in balls.out.items():
        out, (bound, lse_bound) = truth.out[at].tolist(), balls.bounds[at]
        if lse_bound == math.inf:
            unbounded += 1
            continue
        far = [_distance(x, t) for x, t in zip(out, true, strict=True)]
        lse_far = _distance(float(truth.lse[at]), balls.lse[at])
        used = max(_share(lse_far, lse_bound), *map(_share, far, bound.tolist()), 0.0)
        if used > share:
            share, worst = used, at
        radius = max([radius, *(upper(t.rad()) for t in true)])
        distance, lse_distance = max([distance, *far]), max(lse_distance, lse_far)
        square, count = square + math.fsum(x * x for x in out), count + len(out)
    rms = math.sqrt(square / count) if count else 0.0
    return Certificate(
        contained=share <= 1.0 and _empty_rows_hold(balls, truth, spec), radius=radius, distance=distance,
        relative=distance / rms if rms else 0.0 if distance == 0 else math.inf, lse_distance=lse_distance,
        of_bound=share, rows=len(balls.out) - unbounded, unbounded=unbounded, left_out=len(balls.left_out),
        bits=balls.bits, worst=worst,
    )  # fmt: skip


def _distance(x: float, true: Ball) -> float:
    """An upper bound of |x − true| over the whole ball; infinite where x is not finite."""
    return upper(true - x) if math.isfinite(x) else math.inf


def _share(far: float, bound: float) -> float:
    return far / bound if bound > 0 else 0.0 if far == 0 else math.inf


def _empty_rows_hold(balls: Enclosure, truth: Truth, spec: AttentionSpec) -> bool:
    zero = spec.empty_row == "zero"
    return all(
        bool((truth.out[at] == 0).all() if zero else torch.isnan(truth.out[at]).all())
        and (float(truth.lse[at]) == -math.inf if zero else math.isnan(float(truth.lse[at])))
        for at in balls.empty
    )
