"""Why low-precision training fails: tied maxima make BF16 sums of negative values too negative.

k keys share the maximum, so P = 1 for each, and V has the sign of its column. The sum of k values of V lies on a grid
k times finer than its own spacing; ties would round either way, but a tail of the same sign sends them all away from
zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.published.rows import Paper, Row, source
from harness import Shape, round_to
from harness.rounding import ulp

PAPER = Paper("tied_maxima", "Tied maxima in BF16", "arXiv 2510.04212")
PUBLISHED = {2: (-0.25, "−1/4"), 4: (-0.125, "−1/8")}
TAIL = 1e-6  # absolute; a larger one changes the figure


def bias(k: int, draws: int, tail: float = TAIL) -> float:
    """Mean of rounded − exact in ulps of the sum, in FP64 but for the roundings of V and of the sum."""
    src = source(f"{PAPER.name}-{k}", Shape(1, 1, 1, 1))
    v = round_to(torch.from_numpy(src.generator("v").uniform(-4.0, -2.0, (draws, k))), "bf16")
    exact = v.sum(-1) - tail
    return float(((round_to(exact, "bf16") - exact) / ulp(exact, "bf16")).mean())


def rows(full: bool) -> Iterator[Row]:
    draws = 4_000_000 if full else 500_000
    for k, (published, text) in PUBLISHED.items():
        yield Row(
            f"mean rounding error in ulps, k = {k}", text, bias(k, draws), published - 0.003, published + 0.003,
            f"{draws} sums, V in [−4, −2], tail {TAIL:g}",
        )  # fmt: skip
