"""Put your kernel in the place of this one. The harness reads the signature: what is not in it is never asked for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, align: str = "bottom-right",
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of q `[B, H, L, D]`, k `[B, Hkv, S, D]`, v `[B, Hkv, S, E]`, in their own dtype.

    `mask`: bool, True = attend. `align`: which keys the rows of unequal lengths meet: the last row the last key, or the
    first the first.
    """
    rows, keys = q.shape[2], k.shape[2]
    if causal:
        position = torch.arange(rows, device=q.device)[:, None] + (
            keys - rows if align == "bottom-right" else 0
        )
        seen = torch.arange(keys, device=q.device) <= position
        mask = seen if mask is None else mask & seen
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
