"""Full-matrix attention, with and without max subtraction.

    S = scale·Q Kᵀ + M,  M_ij = 0 where key j is visible to row i, else −∞
    m_i = max_j S_ij      P_ij = exp(S_ij − m_i)      l_i = Σ_j P_ij
    O = P V / l           lse_i = m_i + ln l_i

Unsafe softmax takes m = 0 in the exponent: exp(s) leaves FP16 at s > 11.09, FP32 and BF16 at s > 88.72, and a row of
deeply negative scores has l = 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.attention.algorithm import Algorithm
from harness.attention.rows import Problem, finish, key_range, probs_times_v, scores, sink_logits


def attend(
    ar: Arithmetic, p: Problem, rows: slice, keys: slice, subtract_max: bool = True
) -> tuple[Tensor, Tensor]:
    """Attention of these rows over these keys in one piece; keys outside them are taken as hidden."""
    s = scores(ar, p, rows, keys)
    sink = sink_logits(ar, p, rows)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    if sink is not None:
        top = torch.maximum(top, sink)
    empty = top == -math.inf
    m = top.masked_fill(empty, 0.0) if subtract_max else torch.zeros_like(top)

    own = p.v_finite  # else the scores tell once more which keys are hidden
    e = ar.exp(ar.sub(s, m, "shifted", own), "exp", own=True) if subtract_max else ar.exp(s, "exp", own)
    scale = ar.recipe.p_scale
    if ar.recipe.normalise == "early":
        l = _denominator(ar, e, sink, m)
        e.div_(l.masked_fill(empty, 1.0))
        w = ar.cast(e.mul_(scale) if scale != 1 else e, "probs", own=True)
        divisor = None
    else:
        w = ar.cast(e * scale if scale != 1 else e, "probs")
        summed = e if ar.recipe.row_sum != "after" else w / scale if scale != 1 else w
        l = _denominator(ar, summed, sink, m)
        divisor = l
    o = probs_times_v(ar, p, w, s, keys, "acc")
    return finish(ar, p, o, divisor, m + l.log(), empty)


def _denominator(ar: Arithmetic, e: Tensor, sink: Tensor | None, m: Tensor) -> Tensor:
    l = ar.sum(e, "row_sum")
    return l if sink is None else ar.add(l, torch.exp(sink - m), "row_sum")


def _whole(p: Problem) -> tuple[slice, slice]:
    return slice(0, p.shape.q_len), slice(0, p.shape.S)


def naive_masked(ar: Arithmetic, p: Problem) -> tuple[Tensor, Tensor]:
    """All L × S scores at once."""
    return attend(ar, p, *_whole(p))


def naive_unsafe(ar: Arithmetic, p: Problem) -> tuple[Tensor, Tensor]:
    """`naive_masked` without max subtraction: kept because flags must catch it."""
    return attend(ar, p, *_whole(p), subtract_max=False)


def _part(ar: Arithmetic, p: Problem, rows: slice) -> tuple[Tensor, Tensor]:
    return attend(ar, p, rows, key_range(p, rows))


NAIVE_MASKED = Algorithm("naive_masked", naive_masked, _part)
NAIVE_UNSAFE = Algorithm("naive_unsafe", naive_unsafe, subtracts_max=False)
