"""The FP64 truth of the whole layer, by its own code.

    Q = X W_Q   K = X W_K   V = X W_V      [B,T,D]·[D,N,H] → [B,T,N,H], [B,T,K,H], [B,T,K,H]
    Y = softmax(Q Kᵀ/√H + M) V             [B,T,N,H]
    Z = Y W_O                              [B,T,N,H]·[N,H,D] → [B,T,D]
    Out = LayerNorm(X + Z)                 [B,T,D]

It shares nothing with `harness.attention.layer`: sums are contracted by their axes' names, positions turn as complex
numbers, the attention in the middle is `harness.truth.reference`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.layer_store import StoredLayer
from harness.spec import AttentionSpec, LayerSpec, Shape
from harness.truth import Truth, reference


@dataclass(frozen=True)
class LayerTruth:
    """FP64. `flat`: q, k and v before they are turned; `q` `[B, N, T, H]`, `k` and `v` `[B, K, T, H]` after.
    `attention` is theirs. `z`, `residual`, `out` `[B, 1, T, D]`; `normal` the residual before γ and β, `sigma` its
    √(variance + ε) `[B, 1, T, 1]`."""

    flat: tuple[Tensor, Tensor, Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    attention: Truth
    z: Tensor
    residual: Tensor
    normal: Tensor
    sigma: Tensor
    out: Tensor


@torch.no_grad()
def project(
    stored: StoredLayer, shape: Shape, layer: LayerSpec
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """q, k and v in FP64 before and after they are turned."""
    x, flat = stored.operand.values[:, 0], []
    for name, heads in zip("qkv", (shape.heads, shape.Hkv, shape.Hkv), strict=True):
        w = stored.matrices[name].values[0, 0].reshape(heads, shape.head_dim, layer.width)
        flat.append(torch.einsum("btd,nhd->bnth", x, w))
    if layer.rope is None:
        return tuple(flat), tuple(flat)
    pair = torch.arange(shape.head_dim // 2, dtype=torch.float64, device=x.device)
    token = torch.arange(shape.q_len, dtype=torch.float64, device=x.device)
    angles = torch.outer(token, torch.exp(-2 * math.log(layer.rope) * pair / shape.head_dim))
    turn = torch.polar(torch.ones_like(angles), angles)
    return tuple(flat), (*(_turned(t, turn) for t in flat[:2]), flat[2])


def _turned(t: Tensor, turn: Tensor) -> Tensor:
    """Channels i and i + H/2 as one complex number, times e^(iθ)."""
    half = t.shape[-1] // 2
    z = torch.complex(t[..., :half].contiguous(), t[..., half:].contiguous()) * turn
    return torch.cat((z.real, z.imag), -1)


@torch.no_grad()
def layer_reference(
    stored: StoredLayer, shape: Shape, spec: AttentionSpec, layer: LayerSpec, ranges: bool = False
) -> LayerTruth:
    """The layer in FP64 on the values given: of what a recipe stores, or exact ones (`unstored`). NaN and ±Inf
    propagate."""
    flat, (q, k, v) = project(stored, shape, layer)
    attention = reference(q, k, v, spec, ranges=ranges)
    w = stored.matrices["o"].values[0, 0].reshape(layer.width, shape.heads, shape.head_dim)
    z = torch.einsum("bnth,dnh->btd", attention.out, w)[:, None]
    r = stored.x + z
    variance, mean = torch.var_mean(r, -1, correction=0, keepdim=True)
    sigma = torch.sqrt(variance + layer.eps)
    normal = (r - mean) / sigma
    out = normal * stored.gamma + stored.beta
    return LayerTruth((flat[0], flat[1], flat[2]), q, k, v, attention, z, r, normal, sigma, out)
