"""Lazy rescaling: the running maximum is left behind by up to 2^8, and what P's format holds above it decides.

FlashAttention-4 rescales O only where the new maximum exceeds the one in use by more than 8 in base 2. Its P then
reaches 2^8. E4M3 holds that, but not with the offset of 8 that production kernels add so that small P do not flush:
2^(8 + 8) saturates at 448, and the full-precision denominator keeps what O loses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.published.rows import Paper, Row, normal, source, told
from harness import Shape, round_to

PAPER = Paper(
    "lazy_rescale", "Lazy rescaling (FlashAttention-4)", "modal.com/blog/reverse-engineer-flash-attention-4"
)
N, D, ROWS, BLOCK = 4096, 64, 256, 128


def lazy(s: Tensor, v: Tensor, threshold: float, offset: float) -> Tensor:
    """Attention of base-2 scores s `[R, N]` and v `[N, D]` in FP64 but for P = 2^(s − m + offset) in saturating E4M3;
    m moves where the scores exceed it by more than the threshold."""
    o, l = torch.zeros(s.shape[0], v.shape[1], dtype=s.dtype), torch.zeros(s.shape[0], 1, dtype=s.dtype)  # noqa: E741
    m = torch.full_like(l, -math.inf)
    for start in range(0, s.shape[1], BLOCK):
        part = s[:, start : start + BLOCK]
        top = torch.maximum(m, part.amax(-1, keepdim=True))
        used = torch.where(top - m > threshold, top, m)
        a, p = torch.exp2(m - used), torch.exp2(part - used + offset)
        l = a * l + p.sum(-1, keepdim=True)  # noqa: E741
        o = a * o + round_to(p, "fp8_e4m3", "saturate") @ v[start : start + BLOCK]
        m = used
    return o / l


def rows(full: bool) -> Iterator[Row]:
    seeds = 20 if full else 4
    pairs = ((8.0, 8.0), (0.0, 8.0), (8.0, 0.0), (0.0, 0.0))
    shares = {pair: [0.0, 0.0] for pair in pairs}
    for seed in told(range(seeds), PAPER.name):
        src = source(PAPER.name, Shape(1, 1, ROWS, D, kv_len=N), seed)
        s, v = normal(src, "scores", ROWS, N), normal(src, "v", N, D)
        truth = torch.softmax(s, -1) @ v
        for pair in pairs:
            out = lazy(s / math.log(2), v, *pair)
            shares[pair][0] += float((out * truth).sum())
            shares[pair][1] += float((truth * truth).sum())
    size = f"n = {N}, {ROWS} rows, d = {D}, {seeds} seeds, block {BLOCK}"
    for threshold, offset in pairs:
        both = threshold == offset == 8.0
        slope = shares[threshold, offset][0] / shares[threshold, offset][1]
        band, told_as = ((0.0, 0.97), "< 0.97") if both else ((0.995, math.inf), "> 0.995")
        setting = f"slope, threshold {threshold:g}, E4M3 offset {offset:g}"
        yield Row(setting, told_as, slope, *band, size, digits=4)
