"""Storing inputs: exact values → codes in the storage format, and scales. Stored value = code · scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.formats import get_format
from harness.recipe import Recipe, Scaling
from harness.rounding import round_to

_AXES = {"tensor": (0, 1, 2, 3), "head": (2, 3), "token": (3,)}


@dataclass(frozen=True)
class Stored:
    """One tensor as a kernel finds it. `codes`: FP64 values of the storage format, `[B, H, L, D]`. `scale`: FP32
    values held in FP64, broadcastable to `[B, H, L, 1]`, or None. `zero_blocks`: scale blocks without a finite
    non-zero value; their scale is 1."""

    codes: Tensor
    scale: Tensor | None = None
    zero_blocks: int = 0

    @property
    def values(self) -> Tensor:
        """code · scale, exact in FP64 (a code has ≤ 24 bits and a scale 24)."""
        return self.codes if self.scale is None else self.codes * self.scale


def quantize(x: Tensor, name: str, recipe: Recipe, scale: Tensor | float | None = None) -> Stored:
    """Store `x` (FP64 or FP32, `[B, H, L, D]`) as the recipe stores tensor `name` (q, k or v).

    NaN stays NaN; ±Inf and finite values beyond the format follow the recipe's overflow policy. An all-zero scale
    block gives zeros with scale 1. `scale` is for recipes whose scales are given. Raises ValueError when it is
    missing there, present elsewhere, not positive and finite, or does not broadcast.
    """
    fmt, scaling = get_format(recipe.storage[name]), recipe.scaling.get(name)
    x = x.detach().double()
    divisor, zero_blocks = None, 0
    if scaling is None or scaling.source == "unit":
        _no_scale(scale, name, recipe)
    elif scale is not None:
        divisor = check_scale(scale, x, name)
    elif scaling.source == "given":
        raise ValueError(f"recipe {recipe.name} takes given scales; pass one for {name}")
    else:
        divisor, zero_blocks = amax_scale(x, scaling, fmt.max)
    codes = round_to(x if divisor is None else x / divisor, fmt, recipe.policy(name))
    return Stored(codes, divisor, zero_blocks)


def amax_scale(x: Tensor, scaling: Scaling, top: float) -> tuple[Tensor, int]:
    """amax / top per block as FP32 values in FP64, and the number of blocks with nothing to scale (scale 1).

    The amax is over finite values. Kernels hold scales in FP32, so they are rounded there; a power of two is rounded
    up, so that nothing saturates. A scale below FP32's smallest normal is raised to it.
    """
    if x.numel() == 0:
        return x.new_ones([1, 1, 1, 1]), 0
    amax = torch.where(torch.isfinite(x), x, 0.0).abs().amax(_AXES[scaling.granularity], keepdim=True)
    empty = amax == 0
    scale = (amax / top).clamp(min=torch.finfo(torch.float32).tiny, max=torch.finfo(torch.float32).max)
    if scaling.power_of_two:
        mantissa = torch.frexp(scale)[0]  # in [½, 1); scale / mantissa is a power of two, so it is exact
        scale = torch.where(mantissa == 0.5, scale, scale / mantissa).clamp(max=2.0**127)
    else:
        scale = scale.float().double()
    return scale.masked_fill(empty, 1.0), int(empty.sum())


def check_scale(scale: Tensor | float, x: Tensor, name: str) -> Tensor:
    """A given scale as FP32 values in FP64. Raises ValueError when it cannot scale `x`."""
    scale = torch.as_tensor(scale, device=x.device).detach().float().double()
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(
            f"the scale of {name} is not positive and finite; allowed: numbers > 0 that FP32 holds"
        )
    if scale.dim() < 4:
        scale = scale[(None,) * (4 - scale.dim())] if scale.dim() else scale.view(1, 1, 1, 1)
    allowed = [(1, have) for have in x.shape[:3]] + [(1,)]
    if scale.dim() != 4 or any(size not in ok for size, ok in zip(scale.shape, allowed, strict=True)):
        raise ValueError(
            f"the scale of {name} has shape {tuple(scale.shape)}; allowed: [B, H, L, 1] of {tuple(x.shape)}, any axis 1"
        )
    return scale


def _no_scale(scale: Tensor | float | None, name: str, recipe: Recipe) -> None:
    if scale is not None:
        raise ValueError(f"a scale for {name} was given; recipe {recipe.name} takes none: leave it out")


def admit(x: Tensor, name: str, recipe: Recipe, scale: Tensor | float | None) -> Stored:
    """Take `x` as stored values (codes times scales) and find the codes.

    NaN is accepted, ±Inf where the format has it. An FP32 `x` may be code·scale rounded to FP32. Raises ValueError
    for a value that the storage format cannot hold, and for a scale where the recipe has none.
    """
    fmt = get_format(recipe.storage[name])
    scaling, divisor = recipe.scaling.get(name), None
    if scaling is None or scaling.source == "unit":
        _no_scale(scale, name, recipe)
    elif scale is not None:
        divisor = check_scale(scale, x, name)
    x = x.detach()
    exact = x.double()
    codes = round_to(
        exact if divisor is None else exact / divisor, fmt, "nan" if not fmt.infinities else "inf"
    )
    back = (codes if divisor is None else codes * divisor).to(x.dtype)
    wrong = ~((back == x) | (torch.isnan(back) & torch.isnan(x)))
    if bool(wrong.any()):
        at = tuple(int(n) for n in wrong.nonzero()[0])
        hint = (
            " with scale " + format(float(divisor.expand(*x.shape[:3], 1)[*at[:3], 0]), ".9g")
            if divisor is not None
            else ""
        )
        raise ValueError(
            f"{name}[{', '.join(map(str, at))}] = {float(x[at])!r} is no value of {fmt.name}{hint};"
            f" allowed: stored values, with scales= where the recipe scales, or quantize=True to round first"
        )
    return Stored(codes, divisor)
