"""P in E4M3 under sink tokens: how much of it flushes to zero, and what a factor of 256 is worth.

Four sink tokens stand Δ above scores drawn from N(0, 1), so that the running maximum is Δ + x, x the largest of four
normals. With P = exp(s − m)·S, a score of z is flushed where z ≤ Δ + x − 10·ln 2 − ln S, since 2^-10 ties to 0:

    share = ∫ 4Φ(x)³φ(x) · Φ(Δ + x − 10 ln 2 − ln S) dx

Scores come in as a bias over q·k = 0, everything but P's cast is FP64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.published.rows import Paper, Row, around, normal, source, told
from harness import AttentionSpec, Recipe, Shape, get, reference
from harness.arithmetic import Block
from harness.operands import Extras
from harness.quantize import Stored

PAPER = Paper("p_cast", "P cast under sink tokens", "arXiv 2606.06521")
INSTANCES, ROWS, D, SINKS = 100, 4, 64, 4
FLUSHED = {5: 0.229, 6: 0.529, 7: 0.816}  # at S = 1, by Δ
PEAKS = {512: 1.8, 2048: 3.6, 8192: 10.8}  # of MSE(S = 1) ÷ MSE(S = 256), by n
SHIFTS = (0, 2, 4, 6, 8, 10, 12, 13)
AT_ONCE = 10  # instances


@dataclass
class Flushed:
    """A watcher that counts the P of keys after the sinks, and those that the cast made 0."""

    zero: int = 0
    total: int = 0

    def __call__(self, stage: str, before: Tensor, after: Tensor, block: Block) -> None:
        if stage == "probs":
            kept = after[..., max(0, SINKS - block.key) :]
            self.zero += int((kept == 0).sum())
            self.total += kept.numel()

    def stagnation(self, stage: str, held: Tensor, added: Tensor, after: Tensor) -> None:
        """FP64 sums do not stagnate here."""


def cast(p_scale: float) -> Recipe:
    return Recipe(f"p_e4m3_×{p_scale:g}", base="fp64", at={"probs": "fp8_e4m3"}, p_scale=p_scale)


def predicted(shift: float, p_scale: float = 1.0) -> float:
    """The integral, by the midpoint rule."""
    x = (torch.arange(-80_000, 80_000, dtype=torch.float64) + 0.5) / 1e4
    density = 4 * torch.special.ndtr(x) ** 3 * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return float((density * torch.special.ndtr(shift + x - 10 * math.log(2) - math.log(p_scale))).sum()) / 1e4


def parts(
    n: int, instances: int, shifts: tuple[int, ...], scales: tuple[float, ...]
) -> Iterator[tuple[int, float, float, Flushed]]:
    """(Δ, S, squared error, what flushed) of every part of the instances."""
    shape, online = Shape(1, AT_ONCE, ROWS, D, kv_len=n), get("online_softmax")
    for part in told(range(instances // AT_ONCE), f"{PAPER.name}, n = {n}"):
        src = source(f"{PAPER.name}-{n}", shape, part)
        s, v = normal(src, "scores", 1, AT_ONCE, ROWS, n), src.normal("v")
        q, k = s.new_zeros(1, AT_ONCE, ROWS, 1), s.new_zeros(1, AT_ONCE, n, 1)
        stored = Stored(q), Stored(k), Stored(v)
        for shift in shifts:
            bias = s.clone()
            bias[..., :SINKS] += shift
            truth = reference(q, k, v, AttentionSpec(), bias=bias).out
            for p_scale in scales:
                seen = Flushed()
                out = online.run_stored(stored, AttentionSpec(), cast(p_scale), Extras(bias=bias), seen).out
                yield shift, p_scale, float((out - truth).square().sum()), seen


def flushed(instances: int) -> Iterator[Row]:
    counts = {shift: Flushed() for shift in FLUSHED}
    for shift, _, _, seen in parts(2048, instances, tuple(FLUSHED), (1.0,)):
        counts[shift].zero += seen.zero
        counts[shift].total += seen.total
    for shift, published in FLUSHED.items():
        share = counts[shift].zero / counts[shift].total
        yield Row(
            f"share of P flushed, Δ = {shift}", f"{published:.3f}", share, published - 0.025, published + 0.025,
            size(2048, instances), f"the integral gives {predicted(shift):.3f}",
        )  # fmt: skip


def peak(n: int, instances: int) -> Row:
    errors: dict[tuple[int, float], float] = {}
    for shift, p_scale, squares, _ in parts(n, instances, SHIFTS, (1.0, 256.0)):
        errors[shift, p_scale] = errors.get((shift, p_scale), 0.0) + squares
    ratios = {shift: errors[shift, 1.0] / errors[shift, 256.0] for shift in SHIFTS}
    at = max(ratios, key=lambda shift: ratios[shift])
    return Row(
        f"MSE, S = 1 ÷ S = 256, peak over Δ, n = {n}", f"{PEAKS[n]:.1f}", ratios[at], *around(PEAKS[n], 0.25),
        size(n, instances), f"at Δ = {at} of {', '.join(map(str, SHIFTS))}",
    )  # fmt: skip


def size(n: int, instances: int) -> str:
    return f"n = {n}, {instances} instances × {ROWS} rows, d = {D}, block 128"


def rows(full: bool) -> Iterator[Row]:
    """The same at both sizes: the setting's own."""
    yield from flushed(INSTANCES)
    for n in PEAKS:
        yield peak(n, INSTANCES)
