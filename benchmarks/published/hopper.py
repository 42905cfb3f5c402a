"""Hopper's FP8 tensor core keeps 13 fractional bits of a sum, and long sums lose what is added last.

The recipe option `Accumulator` is what is measured: dot products of positive data as MMA-Sim (2511.10909) describes the
hardware, and P·V over 128k keys. Promotion to FP32 every 128 products is DeepSeek-V3's cure (2412.19437).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.published.rows import Paper, Row, around, normal, relative, source, told
from harness import Recipe, Shape, get_recipe, round_to
from harness.arithmetic import Arithmetic
from harness.quantize import quantize

PAPER = Paper("hopper", "Limited FP8 accumulators (MMA-Sim)", "arXiv 2511.10909")
DOTS = 512
PUBLISHED = {1024: 0.015, 2048: 0.033, 4096: 0.069, 8192: 0.138}
KEYS, D = 128 * 1024, 64
LIMITED, PROMOTED = (get_recipe(f"fp8_e4m3_{x}") for x in ("hopper", "promoted"))


def largest(n: int, recipe: Recipe, dots: int = DOTS) -> float:
    """Largest relative error of sums of n products of U[0, 1) numbers in E4M3."""
    src = source(f"{PAPER.name}-{n}", Shape(1, 1, 1, 1))
    a, b = (
        round_to(torch.from_numpy(src.generator(t).random(size)), "fp8_e4m3").float()
        for t, size in (("a", (dots, 1, n)), ("b", (dots, n, 1)))
    )
    exact = a.double() @ b.double()
    return float(((Arithmetic(recipe).matmul(a, b, "acc") - exact) / exact).abs().max())


def p_v(recipe: Recipe, p: Tensor, v: Tensor) -> float:
    """Relative error of P·V in a recipe's accumulator, against the exact product of the same codes."""
    return relative(Arithmetic(recipe).matmul(p, v, "acc"), p.double() @ v.double())


def long_context(mean: float, heads: int, keys: int = KEYS) -> tuple[Tensor, Tensor]:
    """Codes of P·256 `[heads, 1, keys]` and of V `[heads, keys, D]`, in E4M3: scores N(0, 1), V of that mean."""
    src = source(f"{PAPER.name}-{mean:g}", Shape(1, heads, 1, D, kv_len=keys))
    s = normal(src, "scores", heads, 1, keys).float()
    p = Arithmetic(LIMITED).cast(torch.exp(s - s.amax(-1, keepdim=True)) * LIMITED.p_scale, "probs")
    return p, quantize(src.normal("v", mean), "v", LIMITED).codes[0].float()


def rows(full: bool) -> Iterator[Row]:
    for n, published in told(PUBLISHED.items(), PAPER.name):
        yield Row(
            f"largest relative error, K = {n}", f"{published:g}", largest(n, LIMITED), *around(published, 0.1),
            f"{DOTS} dots, U[0, 1) in E4M3",
        )  # fmt: skip
    worst = max(largest(n, PROMOTED) for n in told(PUBLISHED, f"{PAPER.name}, promoted"))
    yield Row(
        "the same, promoted every 128", "≤ 1e-3", worst, 0.0, 1e-3, f"{DOTS} dots, the largest of four K"
    )
    heads = 16 if full else 1
    size = f"{KEYS} keys, d = {D}, {heads} row{'s' if heads > 1 else ''}, scores N(0, 1), against exact P̂·V̂"
    for mean in told((0.25, 1.0), f"{PAPER.name}, 128k keys"):
        p, v = long_context(mean, heads)
        yield Row(f"P·V over 128k keys, V mean {mean:g}", "> 0.2", p_v(LIMITED, p, v), 0.2, math.inf, size)
        error = p_v(PROMOTED, p, v)
        yield Row(f"the same, V mean {mean:g}, promoted", "< 1e-3", error, 0.0, 1e-3, size)
