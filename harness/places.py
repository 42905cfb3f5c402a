"""Where an output is off: its error and what is normal, by head and by position."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PARTS = 8  # ranges of positions


@dataclass(frozen=True)
class Place:
    """Some rows of an output. `rel_l2` against the truth; `ratio`: root mean square of error ÷ expectation. Both over
    elements where truth, output and expectation are finite, NaN without any. `wrong`: elements that are NaN or
    infinite where the truth is not, or not where it is."""

    name: str
    rel_l2: float
    ratio: float
    max_abs: float
    wrong: int


def by_head(out: Tensor, truth: Tensor, variance: Tensor) -> list[Place]:
    """One place a head of each sequence, of `[B, H, L, E]`."""
    b, h = out.shape[:2]
    return [
        _place(f"b={i} h={j}", out[i, j], truth[i, j], variance[i, j]) for i in range(b) for j in range(h)
    ]


def by_position(
    out: Tensor, truth: Tensor, variance: Tensor, number: Callable[[int], int] = int, parts: int = PARTS
) -> list[Place]:
    """At most `parts` ranges of query rows, all heads and sequences together. `number`: what a row is called."""
    length = out.shape[2]
    size = max(1, -(-length // parts))
    ranges = [slice(start, min(start + size, length)) for start in range(0, length, size)]
    return [
        _place(
            f"rows {number(r.start)} to {number(r.stop - 1)}", out[:, :, r], truth[:, :, r], variance[:, :, r]
        )
        for r in ranges
    ]


def _place(name: str, out: Tensor, truth: Tensor, variance: Tensor) -> Place:
    out = out.double()
    finite = torch.isfinite(out) & torch.isfinite(truth)
    same = finite | (out == truth) | (torch.isnan(out) & torch.isnan(truth))
    error = (out - truth)[finite]
    judged = finite & torch.isfinite(variance) & (variance > 0)
    expected = float(variance[judged].sum())
    return Place(
        name, _ratio(float(error.norm()), float(truth[finite].norm())),
        math.sqrt(_ratio(float((out - truth)[judged].square().sum()), expected)),
        float(error.abs().max()) if error.numel() else math.nan, int((~same).sum()),
    )  # fmt: skip


def _ratio(a: float, b: float) -> float:
    """a / b, where 0 / 0 has nothing to say."""
    return a / b if b else (math.inf if a else math.nan)
