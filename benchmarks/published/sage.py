"""SageAttention, table 2: which 8-bit format suits which operand. The order is what is reproduced.

Q and K have a scale per token, V one per channel, P a static one: each of them amax, or P's largest value of 1, over
the format's largest number. INT8 is rounded half to even and stands here for comparison alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.published.rows import Paper, Row, number, source, told
from harness import Recipe, Scaling, Shape, get, reference
from harness.formats import get_format
from harness.quantize import quantize

PAPER = Paper("sage", "SageAttention, table 2 (order alone)", "arXiv 2410.02367")
N, D, ROWS = 4096, 64, 1024
E4M3, E5M2, INT8 = "fp8_e4m3", "fp8_e5m2", "int8"


def by_rows(x: Tensor, fmt: str) -> Tensor:
    """`x` as `fmt` stores it with an amax scale per row."""
    if fmt == INT8:
        step = x.abs().amax(-1, keepdim=True) / 127
        return torch.round(x / step) * step  # half to even
    return quantize(x, "k", Recipe("r", storage={"k": fmt}, scaling={"k": Scaling("token")})).values


def errors(heads: int, seed: int) -> dict[tuple[str, str], float]:
    """Squared errors of the output by (operands, format), and of the output itself."""
    src = source(PAPER.name, Shape(1, heads, ROWS, D, kv_len=N), seed)
    q, k, v = (src.normal(t) for t in "qkv")
    truth = reference(q, k, v).out
    found = {("o", ""): float(truth.square().sum())}
    for fmt in (INT8, E4M3, E5M2):
        out = reference(by_rows(q, fmt), by_rows(k, fmt), v).out
        found["Q, K", fmt] = float((out - truth).square().sum())
    for fmt in (E4M3, E5M2):
        recipe = Recipe("p", base="fp64", at={"probs": fmt}, p_scale=get_format(fmt).max)
        out = get("online_softmax").run(q, k, by_rows(v.mT, fmt).mT, recipe=recipe).out
        found["P, V", fmt] = float((out - truth).square().sum())
    return found


def rows(full: bool) -> Iterator[Row]:
    heads, seeds = (8, 4) if full else (1, 2)
    sums: dict[tuple[str, str], float] = {}
    for seed in told(range(seeds), PAPER.name):
        for key, x in errors(heads, seed).items():
            sums[key] = sums.get(key, 0.0) + x
    size = f"n = {N}, d = {D}, {heads} heads × {ROWS} rows, {seeds} seeds, N(0, 1)"

    def error(operands: str, fmt: str) -> float:
        return math.sqrt(sums[operands, fmt] / sums["o", ""])

    for operands, fine, coarse in (("Q, K", INT8, E4M3), ("Q, K", E4M3, E5M2), ("P, V", E4M3, E5M2)):
        a, b = error(operands, fine), error(operands, coarse)
        names = [x.removeprefix("fp8_").upper() for x in (coarse, fine)]
        note = f"relative L2 error {number(b)} and {number(a)}"
        yield Row(f"{operands}: error {names[0]} ÷ {names[1]}", "> 1", b / a, 1.0, math.inf, size, note)
