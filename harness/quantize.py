"""Storing inputs: exact values → codes in the storage format, and scales. Stored value = code · scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.formats import FP32, FloatFormat, get_format
from harness.recipe import TENSORS, Recipe, Scaling
from harness.rotation import rotate
from harness.rounding import holds, round_to

_AXES = {"tensor": (0, 1, 2, 3), "head": (2, 3), "token": (3,)}
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
E8M0_MIN, E8M0_MAX = 2.0**-127, 2.0**127  # OCP MX v1.0, section 5.4.1: no zero, no infinity


@dataclass(frozen=True)
class Stored:
    """One tensor as a kernel finds it. `codes`: FP64 values of the storage format, `[B, H, L, D]`. `scale`: FP32 or
    E8M0 values held in FP64, or None; `[B|1, H|1, L|1, 1]`, scales of row blocks repeated for each row, and
    `[B|1, H|1, L, D]` for mx blocks, repeated for each value. `zero_blocks`: those of the `blocks` scale blocks without
    a finite non-zero value; their scale is 1."""

    codes: Tensor
    scale: Tensor | None = None
    zero_blocks: int = 0
    blocks: int = 0

    @property
    def values(self) -> Tensor:
        """code · scale, exact in FP64 (a code has ≤ 24 bits and a scale 24)."""
        return self.codes if self.scale is None else self.codes * self.scale


def round_inputs(x: Tensor, recipe: Recipe) -> Tensor:
    """`x` (FP64) as the recipe's input format has it; NaN, ±Inf and what overflows as that format does by default."""
    return x if recipe.inputs is None else round_to(x, recipe.inputs)


def prepare(x: Tensor, name: str, recipe: Recipe) -> Tensor:
    """What is scaled and stored of `x` `[B, H, L, D]`, in FP64: rounded to the input format, and q and k rotated and
    rounded to it again where the recipe rotates. Non-finite values as in `round_inputs` and `rotate`."""
    x = round_inputs(x.detach().double(), recipe)
    return round_inputs(rotate(x), recipe) if recipe.rotates(name) else x


def quantize(x: Tensor, name: str, recipe: Recipe, scale: Tensor | float | None = None) -> Stored:
    """Store `x` (FP64 or FP32, `[B, H, L, D]`) as the recipe stores tensor `name` (q, k or v).

    NaN stays NaN; ±Inf and finite values beyond the format follow the recipe's overflow policy. An all-zero scale
    block gives zeros with scale 1. q and k are stored rotated where the recipe rotates: attention over the stored
    values is the same function of both. `scale` is for recipes whose scales are given; it scales what `prepare` gives.
    Raises ValueError when it is missing there, present elsewhere, not positive and finite, no power of two where E8M0
    holds it, or does not broadcast.
    """
    fmt, scaling = get_format(recipe.storage[name]), recipe.scaling.get(name)
    x = prepare(x, name, recipe)
    divisor, zero_blocks, blocks = None, 0, 0
    if scaling is None or scaling.source == "unit":
        _no_scale(scale, name, recipe)
    elif scale is not None:
        divisor = check_scale(scale, x, name, scaling)
        blocks = divisor.numel()
    elif scaling.source == "given":
        raise ValueError(f"recipe {recipe.name} takes given scales; pass one for {name}")
    else:
        block_scale, zero_blocks = amax_scale(x, scaling, fmt, name)
        divisor, blocks = spread(block_scale, x, name, scaling), block_scale.numel()
    codes = round_to(x if divisor is None else x / divisor, fmt, recipe.policy(name))
    return Stored(codes, divisor, zero_blocks, blocks)


def amax_scale(x: Tensor, scaling: Scaling, fmt: FloatFormat, name: str) -> tuple[Tensor, int]:
    """Scales of tensor `name` as FP64, one per block, and the number of blocks with nothing to scale (scale 1).

    The amax is over finite values. FP32 holds the scale amax / max, rounded there; a power of two is rounded up, or by
    OCP's rule 2^(⌊log2 amax⌋ − emax). A scale outside FP32's normal numbers, or E8M0's, becomes the nearest of them.
    """
    if x.numel() == 0:
        return x.new_ones([1, 1, 1, 1]), 0
    amax = _block_amax(torch.where(torch.isfinite(x), x, 0.0).abs(), scaling, name)
    empty = amax == 0
    low, high = (E8M0_MIN, E8M0_MAX) if scaling.granularity == "mx" else (FP32.min_normal, FP32.max)
    if scaling.power_of_two == "floor":
        # The mantissa lies in [½, 1): amax over it is 2^(⌊log2 amax⌋ + 1), exactly, and so is all that follows.
        scale = amax / torch.frexp(amax)[0] * 0.5 * 2.0**-fmt.emax
    else:
        scale = (amax / fmt.max).clamp(low, high)
        mantissa = torch.frexp(scale)[0]
        power = torch.where(mantissa == 0.5, scale, scale / mantissa)
        scale = power if scaling.power_of_two else scale.float().double()
    if scaling.power_of_two:
        high = E8M0_MAX  # 2^127 is FP32's largest power of two as well
    return scale.clamp(low, high).masked_fill(empty, 1.0), int(empty.sum())


def _block_amax(size: Tensor, scaling: Scaling, name: str) -> Tensor:
    """Largest of each block, `[B, H, L, D]` with every axis as many as it has blocks."""
    cut = scaling.block_of(name)
    if cut is None:
        return size.amax(_AXES[scaling.granularity], keepdim=True)
    axis, n = cut
    if axis == 2 and scaling.granularity == "block":
        size = size.amax(3, keepdim=True)
    return torch.cat([part.amax(axis, keepdim=True) for part in torch.split(size, n, axis)], axis)


def spread(scale: Tensor, x: Tensor, name: str, scaling: Scaling) -> Tensor:
    """A scale per block, as it comes with each row of `x`, or with each value where blocks are mx."""
    cut = scaling.block_of(name)
    if cut is None or scale.numel() == 1:
        return scale
    axis, n = cut
    if scale.shape[axis] not in (1, x.shape[axis]):
        scale = scale.repeat_interleave(n, axis).narrow(axis, 0, x.shape[axis])
    return scale.expand(*scale.shape[:2], *x.shape[2:]) if scaling.granularity == "mx" else scale


def check_scale(scale: Tensor | float, x: Tensor, name: str, scaling: Scaling) -> Tensor:
    """A given scale as FP64, spread over `x`. Raises ValueError when it cannot scale `x`.

    Besides one per block it may come one per row (or value, where blocks are mx), which need not agree within a block.
    """
    try:
        if isinstance(scale, Tensor) and (scale.is_meta or scale.layout is not torch.strided):
            raise ValueError("it holds no numbers")
        scale = torch.as_tensor(scale, device=x.device).detach().float().double()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"the scale of {name} is {scale!r}; allowed: a tensor or a number > 0") from None
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(
            f"the scale of {name} is not positive and finite; allowed: numbers > 0 that FP32 holds"
        )
    mx = scaling.granularity == "mx"
    if mx and not bool(((torch.frexp(scale)[0] == 0.5) & (scale >= E8M0_MIN)).all()):
        raise ValueError(f"the scale of {name} is no E8M0 number; allowed: powers of two, 2^-127 to 2^127")
    if scale.dim() < 4:
        scale = scale[(None,) * (4 - scale.dim())] if scale.dim() else scale.view(1, 1, 1, 1)
    wanted = [[size] for size in (*x.shape[:3], x.shape[3] if mx else 1)]
    if cut := scaling.block_of(name):
        wanted[cut[0]].append(-(-x.shape[cut[0]] // cut[1]))
    if scale.dim() != 4 or any(n != 1 and n not in ok for n, ok in zip(scale.shape, wanted, strict=True)):
        axes = ["B", "H", "L", "D" if mx else "1"]
        if cut:
            axes[cut[0]] += f" or ⌈{axes[cut[0]]}/{cut[1]}⌉"
        raise ValueError(
            f"the scale of {name} has shape {tuple(scale.shape)};"
            f" allowed: [{', '.join(axes)}] of {tuple(x.shape)}, any axis 1"
        )
    return spread(scale, x, name, scaling)


def admit(x: Tensor, name: str, recipe: Recipe, scale: Tensor | float | None) -> Stored:
    """Take `x` as stored values (codes times scales, rotated where the recipe rotates) and find the codes.

    NaN is accepted, ±Inf where the format has it. An FP32 `x` may be code·scale rounded to FP32. Raises ValueError
    for a value that the storage format cannot hold, and for a scale where the recipe has none.
    """
    fmt = get_format(recipe.storage[name])
    scaling, divisor = recipe.scaling.get(name), None
    if scaling is None or scaling.source == "unit":
        _no_scale(scale, name, recipe)
    elif scale is not None:
        divisor = check_scale(scale, x, name, scaling)
    x = x.detach()
    given = _NAMES.get(x.dtype)
    if divisor is None and fmt.infinities and given is not None and holds(fmt, get_format(given)):
        return Stored(
            x.to(torch.float64, copy=True)
        )  # nothing to look for: the format has every value of the dtype
    exact = x.double()
    codes = round_to(
        exact if divisor is None else exact / divisor, fmt, "nan" if not fmt.infinities else "inf"
    )
    back = (codes if divisor is None else codes * divisor).to(x.dtype)
    wrong = ~((back == x) | (torch.isnan(back) & torch.isnan(x)))
    if bool(wrong.any()):
        at = tuple(int(n) for n in wrong.nonzero()[0])
        hint = "" if divisor is None else f" with scale {float(divisor.expand(x.shape)[at]):.9g}"
        raise ValueError(
            f"{name}[{', '.join(map(str, at))}] = {float(x[at])!r} is no value of {fmt.name}{hint};"
            " allowed: stored values, with scales= where the recipe scales, or quantize=True to round"
            f" first{_own(x, fmt)}"
        )
    return Stored(codes, divisor, 0, 0 if divisor is None else divisor.numel())


def _own(x: Tensor, fmt: FloatFormat) -> str:
    """Which recipe stores these values as they are: their dtype's, where that holds more than the recipe's format."""
    name = _NAMES[x.dtype]
    wider = get_format(name).storage_bits > fmt.storage_bits
    return (
        f", if the kernel does; recipe {name} takes {str(x.dtype).removeprefix('torch.')} as it is"
        if wider
        else ""
    )


def store(
    tensors: tuple[Tensor, Tensor, Tensor], recipe: Recipe, scales: Any = None, round_first: bool = False
) -> tuple[Stored, Stored, Stored]:
    """q, k and v as stored inputs. Raises ValueError as `quantize` and `admit` do."""
    take = quantize if round_first else admit
    q, k, v = (take(x, n, recipe, s) for x, n, s in zip(tensors, TENSORS, three(scales), strict=True))
    return q, k, v


def three(scales: Any) -> Any:
    """Scales of q, k and v as given. Raises ValueError for what are not three."""
    allowed = "three, for q, k and v, each a tensor, a number or None"
    if scales is None:
        return (None, None, None)
    if not isinstance(scales, (tuple, list)):
        raise ValueError(f"scales is a {type(scales).__name__}; allowed: a tuple of {allowed}")
    if len(scales) != 3:
        raise ValueError(f"scales has {len(scales)} entries; allowed: {allowed}")
    return scales


def _no_scale(scale: Tensor | float | None, name: str, recipe: Recipe) -> None:
    if scale is not None:
        raise ValueError(f"a scale for {name} was given; recipe {recipe.name} takes none: leave it out")
