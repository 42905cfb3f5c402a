"""The verdict on a layer's output: classes, ceiling and yardstick, as attention's has them.

There are no fault directions here: those are of attention, whose output a layer mixes with X and normalises. A layer
that fails is followed part by part instead, and the first part that errs by more than is normal is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from harness.compare import Target
from harness.error_model.layer import LayerExpectation
from harness.error_model.layer_parts import Bounded
from harness.recipe import Recipe
from harness.records import Diagnosis, Margins, Status
from harness.significance import ratio_limit
from harness.verdict import FEWEST_ROWS, YARDSTICK_LIMIT, Verdict, class_reasons
from harness.yardstick import FP32_LIMITS, NARROW, Ground, Weights, Yardstick, over_ceiling, own_rounding

PARTS = {
    "q": "W_Q's product, its turn or its store", "k": "W_K's product, its turn or its store",
    "v": "W_V's product or its store", "y": "attention", "z": "W_O's product or its store",
    "residual": "X + Z", "out": "LayerNorm",
}  # fmt: skip


def judge_layer(out: Tensor, truth: Tensor, expected: LayerExpectation, recipe: Recipe) -> Verdict:
    """`out` `[B, 1, T, D]` against the stored truth, FP64."""
    out = out.detach().double()
    target = Target(truth, recipe.out_format)
    errors = target.errors(out)
    finite = torch.isfinite(out) & torch.isfinite(truth)
    e = torch.where(finite, out - truth, 0.0)
    limits = NARROW if {*recipe.at.values()} - {recipe.base} else FP32_LIMITS
    independent = _independent(truth)
    ground = Ground(tuple(truth.shape), limits, independent, own_rounding(target))
    over, beyond = over_ceiling(e, expected.ceiling)
    yard = Yardstick(e, Weights(expected.variance, finite, ground))
    reasons = [*class_reasons(errors), *beyond, *yard.reasons()]
    size = _rms(truth)
    normal = _rms(expected.variance.sqrt()) / size if size else math.nan
    margins = Margins(yard.ratio, yard.limit, yard.worst, yard.worst_at, over, 0.0, 0.0, "", normal)
    if reasons:
        return Verdict(Status.FAIL, tuple(reasons), errors, margins, ())
    rows = int((independent & torch.isfinite(truth).all(-1).flatten()).sum())
    if doubts := _doubts(rows, expected.variance, normal):
        return Verdict(Status.INCONCLUSIVE, doubts, errors, margins, ())
    told = f"error {yard.ratio:.2f} × what is normal (classes, ceiling and yardstick: a layer has no fault directions)"
    return Verdict(Status.PASS, (told,), errors, margins, ())


def blame(got: Mapping[str, Tensor], expected: Mapping[str, Bounded], recipe: Recipe) -> Diagnosis:
    """The first part of a failed layer whose error is more than chance allows, or than its bound."""
    slack = (NARROW if {*recipe.at.values()} - {recipe.base} else FP32_LIMITS).slack
    for name, b in expected.items():
        e = got[name].double() - b.value
        tokens = b.value.shape[2]
        power, normal = float((e * e).sum()), float(b.variance.sum())
        ratio = math.sqrt(power / normal) if normal else (math.inf if power else 0.0)
        if not ratio <= ratio_limit(tokens, len(PARTS), slack) or bool((e.abs() > b.bound).any()):
            return Diagnosis(
                f"stage {name}", f"{name} is the first part to err: {PARTS[name]}", ratio, 0.0, 1.0
            )
    return Diagnosis("nothing known", "every part alone errs as is normal", 0.0, 0.0, 0.0)


def _independent(truth: Tensor) -> Tensor:
    """Rows that count, `[B·T]`: of those with equal outputs the first. Tokens that share k and v share those errors,
    but each of these moves a row in its own direction: a row's D channels count as one sample all the same."""
    kept = torch.ones(truth.shape[0], truth.shape[2], dtype=torch.bool, device=truth.device)
    for b in range(truth.shape[0]):
        values, inverse = torch.unique(truth[b, 0].float(), dim=0, return_inverse=True)
        order = torch.arange(truth.shape[2], device=truth.device)
        first = order.new_full((len(values),), truth.shape[2]).scatter_reduce_(0, inverse, order, "amin")
        kept[b] = first[inverse] == order
    return kept.flatten()


def _doubts(rows: int, variance: Tensor, normal: float) -> tuple[str, ...]:
    doubts = []
    if rows < FEWEST_ROWS:
        doubts.append(f"{rows} independent rows to judge by; at least {FEWEST_ROWS} are needed")
    unjudged = int(torch.isinf(variance).any(-1).sum())
    if unjudged:
        doubts.append(f"{unjudged} rows were not judged: the recipe promises nothing there")
    if normal > YARDSTICK_LIMIT:
        told = f"the recipe's own error is {normal:.0%} of the output; beyond {YARDSTICK_LIMIT:.0%}"
        doubts.append(f"{told} its yardstick passes anything")
    return tuple(doubts)


def _rms(x: Tensor) -> float:
    kept = x[torch.isfinite(x)]
    return math.sqrt(float((kept * kept).mean())) if kept.numel() else math.nan
