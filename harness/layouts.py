"""How tensors lie in memory: the same values under other strides, as callers pass them."""

from __future__ import annotations

import torch
from torch import Tensor

PADDING = 8  # elements between rows that belong to nobody


def lay_out(x: Tensor, layout: str) -> Tensor:
    """`x` `[B, H, L, D]` with equal values in another place: one of `harness.case.LAYOUTS`, which says what they are.

    What lies between the rows is NaN: a kernel that assumes another stride reads it. Raises ValueError for an unknown
    layout.
    """
    b, h, n, d = x.shape
    if layout == "contiguous":
        return x.contiguous()
    if layout == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "padded":
        return x.new_full((b, h, n, d + PADDING), torch.nan)[..., :d].copy_(x)
    if layout == "interleaved":
        return x.new_full((b, h, n, d, 2), torch.nan)[..., 0].copy_(x)
    if layout == "fused":  # as one third of a token-major [B, L, 3, H, D] buffer
        return x.new_full((b, n, 3, h, d), torch.nan)[:, :, 1].transpose(1, 2).copy_(x)
    raise ValueError(f"layout is {layout!r}; allowed: contiguous, bshd, padded, interleaved, fused")
