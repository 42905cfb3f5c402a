"""Golden et al., Is Flash Attention Stable?: in BF16 throughout, the smaller the tile the larger the error.

Their flash attention is FlashAttention-1's: O is normalised at every tile, and every result of an operation is stored
in BF16. With FP32 sums and statistics, which is how flash kernels are built, the order turns around.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.published.rows import Paper, Row, around, source, told
from harness import Shape, get, get_recipe, reference
from harness.arithmetic import Arithmetic
from harness.attention.algorithm import Algorithm
from harness.attention.rows import Problem, finish, probs_times_v, scores
from harness.quantize import quantize
from harness.recipe import TENSORS

PAPER = Paper("golden", "Is Flash Attention Stable? (Golden et al.)", "arXiv 2405.02803")
# NUMERICS section 8.2: RMS error flash ÷ eager by tile
PUBLISHED = {16: 2.86, 32: 2.13, 64: 1.68, 128: 1.39, 256: 1.23, 512: 1.12, 1024: 1.00}
N, D = 1024, 64


def flash_1(ar: Arithmetic, p: Problem, block: int = 128) -> tuple[Tensor, Tensor]:
    """FlashAttention-1, algorithm 1 (2205.14135): for each tile of keys

    m̃ = rowmax S     P̃ = exp(S − m̃)     l̃ = rowsum P̃     m' = max(m, m̃)     a = exp(m − m')     b = exp(m̃ − m')
    l' = a·l + b·l̃     O = ((l·a)·O + b·(P̃V)) / l'
    """
    rows = slice(0, p.shape.q_len)
    size = (p.shape.batch, p.shape.Hkv, p.shape.group * p.shape.q_len)
    o, l = p.q.new_zeros(*size, p.shape.E), p.q.new_zeros(*size, 1)  # noqa: E741
    m = torch.full_like(l, -math.inf)
    for start in range(0, p.shape.S, block):
        keys = slice(start, min(start + block, p.shape.S))
        s = scores(ar, p, rows, keys)
        m_tile = s.amax(-1, keepdim=True)
        m_new = torch.maximum(m, m_tile)
        e = ar.cast(ar.exp(ar.sub(s, m_tile, "shifted"), "exp"), "probs")
        a = ar.exp(ar.sub(m, m_new, "shifted"), "rescale")
        b = ar.exp(ar.sub(m_tile, m_new, "shifted"), "rescale")
        held = ar.mul(l, a, "row_sum")
        part = ar.mul(ar.sum(e, "row_sum"), b, "row_sum")
        l = ar.add(held, part, "row_sum")  # noqa: E741
        pv = ar.mul(probs_times_v(ar, p, e, s, keys, "block_out"), b, "acc")
        o = ar.div(ar.add(ar.mul(o, held, "acc"), pv, "acc"), l, "acc")
        m = m_new
    return finish(ar, p, o, None, m + l.log(), m == -math.inf)


FLASH_1 = Algorithm("flash_1", flash_1, options={"block": 128})


def squares(heads: int, seed: int) -> dict[object, float]:
    """Squared error of eager attention, of flash by tile, and of flash with FP32 sums."""
    recipe = get_recipe("bf16_eager")
    src = source(PAPER.name, Shape(1, heads, N, D), seed)
    q, k, v = (quantize(src.normal(t), t, recipe).values for t in TENSORS)
    truth = reference(q, k, v).out
    outs: dict[object, Tensor] = {
        "eager": get("naive_masked").run(q, k, v, recipe=recipe).out,
        "FP32 sums": get("online_softmax").run(q, k, v, recipe="bf16", block=64).out,
        **{tile: FLASH_1.run(q, k, v, recipe=recipe, block=tile).out for tile in PUBLISHED},
    }
    return {name: float((out.double() - truth).square().sum()) for name, out in outs.items()}


def rows(full: bool) -> Iterator[Row]:
    heads, seeds = (16, 4) if full else (2, 2)
    sums: dict[object, float] = {}
    for seed in told(range(seeds), PAPER.name):
        for name, x in squares(heads, seed).items():
            sums[name] = sums.get(name, 0.0) + x
    size = f"n = {N}, d = {D}, {heads} heads, {seeds} seeds, N(0, 1), stored truth; quotients of RMS errors"
    ratio = {name: math.sqrt(x / sums["eager"]) for name, x in sums.items()}
    for tile, published in PUBLISHED.items():
        yield Row(
            f"flash ÷ eager, tile {tile}", f"{published:.2f}", ratio[tile], *around(published, 0.15), size
        )
    falls = min(ratio[a] / ratio[b] for a, b in itertools.pairwise(PUBLISHED))
    yield Row("least quotient of neighbouring tiles", "monotone", falls, 1.0, math.inf, size)
    yield Row("flash ÷ eager, FP32 sums, tile 64", "< 0.6", ratio["FP32 sums"], 0.0, 0.6, size)
