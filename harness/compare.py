"""Distance of an output from a truth: classes first, then errors in FP64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.finite import all_finite, argmax
from harness.records import Errors
from harness.rounding import ulp


def compare(out: Tensor, truth: Tensor, fmt: str) -> Errors:
    """Errors of `out` `[B, H, L, E]` (any float dtype) against `truth` (FP64), ulps in the format `fmt`.

    NaN, +Inf and −Inf are classes: a position where they differ is a mismatch of its class, and takes no part in the
    figures, which cover the elements finite in both. Squares run in FP64: errors beyond 1e154 give infinite figures.
    Raises ValueError when the shapes differ.
    """
    return Target(truth, fmt).errors(out)


class Target:
    """A truth that several outputs are compared with: what depends on it alone is computed once."""

    def __init__(self, truth: Tensor, fmt: str) -> None:
        self.truth, self.fmt = truth.detach().to(torch.float64), fmt

    @cached_property
    def finite(self) -> bool:
        return all_finite(self.truth)

    @cached_property
    def spacing(self) -> Tensor:
        """An ulp of each element."""
        return ulp(self.truth, self.fmt)

    def errors(self, out: Tensor, finite: bool | None = None) -> Errors:
        """`compare`. `finite`: whether all of `out` is, where known."""
        if out.shape != self.truth.shape:
            raise ValueError(
                f"output is {tuple(out.shape)} and truth {tuple(self.truth.shape)}; allowed: one shape"
            )
        x, t = out.detach().to(torch.float64), self.truth
        if (all_finite(x) if finite is None else finite) and self.finite:
            count = x.numel()
            return Errors(count, 0, 0, 0, **_figures(x, t, x - t, None, count, lambda: self.spacing))
        both = torch.isfinite(x) & torch.isfinite(t)
        count = int(both.sum())
        nan = int((torch.isnan(x) != torch.isnan(t)).sum())
        posinf = int(((x == math.inf) != (t == math.inf)).sum())
        neginf = int(((x == -math.inf) != (t == -math.inf)).sum())
        delta = torch.where(both, x - t, 0.0)
        x, t = torch.where(both, x, 0.0), torch.where(both, t, 0.0)
        figures = _figures(x, t, delta, both, count, lambda: ulp(t, self.fmt))
        return Errors(count, nan, posinf, neginf, **figures)


def _figures(
    x: Tensor, t: Tensor, delta: Tensor, finite: Tensor | None, count: int, spacing: Callable[[], Tensor]
) -> dict[str, Any]:
    if count == 0:
        names = (
            "max_abs",
            "rmse",
            "rel_l2",
            "rel_l1",
            "cosine",
            "sqnr_db",
            "max_ulp",
            "p99_ulp",
            "bias_ulp",
            "slope",
        )
        return dict.fromkeys((*names, "truth_rms"), math.nan)
    rows = torch.stack((delta.reshape(-1), t.reshape(-1), x.reshape(-1)))
    (square, along, _), (_, power, cross), (_, _, own) = (rows @ rows.mT).tolist()
    size = rows[:2].abs()  # of delta and of the truth
    in_ulps = (delta / spacing()).reshape(-1)
    ulps = in_ulps.abs() if finite is None else in_ulps[finite.reshape(-1)].abs()
    rank = math.ceil(0.99 * count)
    worst = argmax(size[0])
    (gross, gross_truth), largest = size.sum(1).tolist(), float(size[0, worst])
    return {
        "max_abs": largest,
        "rmse": math.sqrt(square / count),
        "rel_l2": _ratio(math.sqrt(square), math.sqrt(power)),
        "rel_l1": _ratio(gross, gross_truth),
        "cosine": _ratio(cross, math.sqrt(own) * math.sqrt(power)) if own or power else 1.0,
        "sqnr_db": _decibel(power, square),
        "max_ulp": float(ulps.max()),
        "p99_ulp": float(np.partition(ulps.numpy(force=True), rank - 1)[rank - 1]),
        "bias_ulp": float(in_ulps.sum()) / count,
        "slope": _ratio(along, power),
        "truth_rms": math.sqrt(power / count),
        "worst": unravel(worst, delta.shape),
    }


def _ratio(a: float, b: float) -> float:
    """a / b; 0/0 is 0 (a zero output met exactly), a/0 is ±Inf."""
    return a / b if b else (0.0 if a == 0 else math.copysign(math.inf, a))


def _decibel(power: float, square: float) -> float:
    """10 log₁₀(power / square); +∞ without an error, −∞ for an error on a zero truth."""
    if square == 0:
        return math.inf
    return (
        10 * (math.log10(power) - math.log10(square)) if power else -math.inf
    )  # the quotient could underflow


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Index of a flat position in a contiguous tensor. (torch's own takes half a millisecond.)"""
    return tuple(int(n) for n in np.unravel_index(flat, tuple(shape)))
