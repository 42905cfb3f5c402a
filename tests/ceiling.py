"""The bound no correct run exceeds, element by element (NUMERICS section 4), by dense FP64 formulas of its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness import AttentionSpec, Recipe, get_recipe
from harness.formats import get_format


def scores_of(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Scores `[B, H, L, S]` of stored values aligned bottom-right, −∞ where hidden, and scale·|q|·|k|."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    length, keys, scale = q.shape[2], k.shape[2], spec.scale_for(q.shape[3])
    s = scale * (q @ k.mT)
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    ahead = torch.arange(keys) - (torch.arange(length) + keys - length)[:, None]
    hidden = ahead > 0 if spec.causal else torch.zeros_like(ahead, dtype=torch.bool)
    if spec.left is not None:
        hidden = hidden | (ahead < -spec.left)
    return s.masked_fill(hidden, -math.inf), abs(scale) * (q.abs() @ k.abs().mT)


def ceiling(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, recipe: str | Recipe, sinks: Tensor | None = None,
    blocks: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Bounds on |Δout| `[B, H, L, E]` and |Δlse| `[B, H, L]` against stored truth.

    For recipes that round P, partial outputs and the output alone, all else in the base. 10u |s| covers the products
    with scale and the scales of q and k (4), and softcap (division, tanh at 2u, product). `blocks` key blocks or parts;
    a part's lse is itself rounded, which moves its weight by u(|lse| + |m| + 2) at most, |lse| ≤ max |s| + ln n.
    """
    recipe = get_recipe(recipe)
    u, out, probs = (get_format(recipe.format_of(x)) for x in ("acc", "out", "probs"))
    u_b, u_part = u.unit_roundoff, get_format(recipe.format_of("block_out"))
    s, absolute = scores_of(q, k, spec)
    n, d = s.shape[-1], q.shape[3]
    hidden = s == -math.inf
    sink = (
        torch.full((1, s.shape[1], 1, 1), -math.inf).double()
        if sinks is None
        else sinks.view(1, -1, 1, 1).double()
    )
    joined = torch.cat([s, sink.expand(*s.shape[:3], 1)], -1)
    m = joined.amax(-1, keepdim=True)
    m = m.masked_fill(m == -math.inf, 0.0)
    lse = torch.logsumexp(joined, -1, keepdim=True)
    l = torch.exp(lse - m).clamp(min=1.0)  # noqa: E741
    p = torch.exp(s - torch.where(torch.isfinite(lse), lse, 0.0))
    size = joined.abs().masked_fill(joined == -math.inf, 0.0).amax(-1, keepdim=True) + math.log(n + 1)
    eps = (d + 2) * u_b * absolute + 10 * u_b * s.abs().masked_fill(hidden, 0.0)
    distance = (s - m).abs().masked_fill(hidden, 0.0)
    shift = (
        eps
        + u_b * (distance + 2)
        + 2 * blocks * u_b
        + (2 * u_b * (size + m.abs() + 2) if blocks > 1 else 0.0)
    )
    eta = torch.expm1(shift).masked_fill(hidden, 0.0)
    sunk = torch.expm1(
        u_b * ((sink - m).abs().nan_to_num(posinf=0.0) + sink.abs().nan_to_num(posinf=0.0) + 4)
    )
    a = (p * eta).sum(-1, keepdim=True) + sunk
    wide = v.repeat_interleave(q.shape[1] // v.shape[1], 1).abs()
    mass, gross = p @ wide, (~hidden).double() @ wide
    o = p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    u_parts = u_part.unit_roundoff if blocks > 1 else 0.0
    relative = (probs.unit_roundoff + u_parts) + (2 * n + 4 * blocks + 8) * u_b
    least = probs.min_subnormal / (2 * recipe.p_scale) / l * gross + u.min_normal * (1 + gross)
    error = (
        (p * eta) @ wide
        + a * mass
        + relative * mass
        + least
        + out.unit_roundoff * o.abs()
        + out.min_subnormal / 2
    )
    error = error + (u_part.min_subnormal * blocks if blocks > 1 else 0.0)
    log = (eta.amax(-1, keepdim=True) if n else torch.zeros_like(m)) + sunk + (2 * n + 4 * blocks + 4) * u_b
    if recipe.row_sum == "after":
        log = log + probs.unit_roundoff + n * probs.min_subnormal / (2 * recipe.p_scale)
    log = log + 4 * u_b * (size + m.abs())
    return error * (1 + a + out.unit_roundoff), log[..., 0]
