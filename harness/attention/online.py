"""Online softmax: key blocks with a running max (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1).

For each key block j:
    m' = max(m, rowmax S_j)      a = exp(m − m')      P_j = exp(S_j − m')
    l  = a·l + rowsum P_j        O = a·O + P_j V_j    m = m'
and at the end O / l, lse = m + ln l. P is always unnormalised here, whatever `Recipe.normalise` says.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.attention.algorithm import Algorithm
from harness.attention.rows import (
    Problem,
    finish,
    key_range,
    rescale_add_probs_times_v,
    scores,
    sink_logits,
)


def online_softmax(ar: Arithmetic, p: Problem, block: int = 128, q_block: int = 256) -> tuple[Tensor, Tensor]:
    """`block` keys at a time, for `q_block` query rows at a time."""
    parts = []
    for start in range(0, max(p.shape.q_len, 1), q_block):
        rows = slice(start, min(start + q_block, p.shape.q_len))
        parts.append(_stream(ar, p, rows, block))
    return torch.cat([o for o, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _stream(
    ar: Arithmetic, p: Problem, rows: slice, block: int = 128, q_block: int = 256
) -> tuple[Tensor, Tensor]:
    """These rows alone, however many (`q_block` is the caller's business)."""
    sh = p.shape
    size = (sh.batch, sh.Hkv, sh.group * (rows.stop - rows.start))
    o = p.q.new_zeros(*size, sh.E)
    l = p.q.new_zeros(*size, 1)
    m = torch.full_like(l, -math.inf)
    lowest = torch.finfo(l.dtype).min
    sink = sink_logits(ar, p, rows)
    if sink is not None:  # a key with value 0 that comes first
        m = sink.expand_as(m)
        # 1; 0 of −∞; NaN of +∞, as a key's score gives
        l = torch.exp(m - m.masked_fill(m == -math.inf, 0.0))

    seen, scale = key_range(p, rows), ar.recipe.p_scale
    for start in range(seen.start, seen.stop, block):
        keys = slice(start, min(start + block, seen.stop))
        s = scores(ar, p, rows, keys)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        base = m_new.clamp_min(lowest)  # finite in a row that has seen nothing yet, where −∞ minus it is −∞
        a = ar.exp(ar.sub(m, base, "shifted"), "rescale", own=True)
        e = ar.exp(ar.sub(s, base, "shifted", own=p.v_finite), "exp", own=True)
        w = ar.cast(e * scale if scale != 1 else e, "probs")
        part = ar.sum(e if ar.recipe.row_sum != "after" else w / scale if scale != 1 else w, "row_sum")
        l = ar.rescale_add(a, l, part, "row_sum", own=True)
        o = rescale_add_probs_times_v(ar, p, a, o, w, s, keys)
        m = m_new
    empty = m == -math.inf
    return finish(ar, p, o, l, m + l.log(), empty)


ONLINE_SOFTMAX = Algorithm("online_softmax", online_softmax, _stream, options={"block": 128, "q_block": 256})
