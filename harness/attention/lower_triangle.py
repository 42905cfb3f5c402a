"""Causal attention that computes the lower triangle alone: half the products of `naive_masked`.

rows i0 … i1 − 1 meet keys 0 … i1 − 1 + shift and no others; within that the formulas of `naive` hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.attention.algorithm import Algorithm
from harness.attention.naive import attend
from harness.attention.rows import Problem, key_range


def lower_triangle(ar: Arithmetic, p: Problem, block: int = 64) -> tuple[Tensor, Tensor]:
    """Row blocks of `block` rows. Larger blocks waste more above the diagonal: (1 + block/L)/2 of the full work."""
    parts = []
    for start in range(0, max(p.shape.q_len, 1), block):
        rows = slice(start, min(start + block, p.shape.q_len))
        parts.append(attend(ar, p, rows, key_range(p, rows)))
    return torch.cat([o for o, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


LOWER_TRIANGLE = Algorithm("lower_triangle", lower_triangle, causal_only=True, options={"block": 64})
