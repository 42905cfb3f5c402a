"""One correct rounding (nearest, ties to even) of FP32 and FP64 tensors to any `FloatFormat`.

The definition is `ldexp(rint(ldexp(x, -e)), e)` with e = max(floor(log2|x|), emin) - (p - 1): NUMERICS
section 1. Library casts are used only where they are that definition (FP64 -> FP32, FP32 -> FP16): torch
rounds FP64 to 16 and 8 bits twice, its BF16 cast may flush subnormals (AVX512-BF16), and its E4M3 cast has
changed its overflow policy between releases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.formats import FP16, FP32, FP64, FloatFormat, get_format

_SOURCES: dict[object, FloatFormat] = {torch.float32: FP32, torch.float64: FP64}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
# Conversions of IEEE 754-2019 section 5.4.2, which the hardware rounds once, subnormals included.
_CASTS = {(FP64, FP32): torch.float32, (FP32, FP16): torch.float16}
CHUNK = 2**17  # elements: a rounding takes seven passes, all but the first of which then find them in cache


def round_to(x: Tensor, fmt: str | FloatFormat, overflow: str | None = None) -> Tensor:
    """`x` rounded once, to nearest even, to the values of `fmt`.

    NaN stays NaN (its payload and sign are not kept). A value beyond the largest finite number after
    rounding, ±Inf included, becomes by policy `overflow`: `saturate` ±max, `nan` NaN, `inf` ±Inf; None is
    the format's default. Signed zeros stay, and a value that rounds to zero keeps its sign. Where `fmt` is
    at least as wide as the dtype only ±Inf can change, and the ±max of `saturate` is the dtype's.

    Any shape, strides and device. The result has x's dtype and shape, shares no memory with x (which is
    never modified) and carries no gradient.

    Raises ValueError for an input that is not an FP32 or FP64 tensor, an unknown format or policy, `inf`
    for a format without infinities, and a format that the dtype cannot emulate.
    Source: IEEE 754-2019 sections 4.3.1 and 7.4; OCP OFP8 1.0 (saturating and other conversions).
    """
    target = get_format(fmt)
    policy = target.check_overflow(overflow)
    source = _source(x)
    x = x.detach()
    if x.numel() <= CHUNK or x.device.type != "cpu":
        return _rounded(x, source, target, policy)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    parts = zip(torch.split(x.reshape(-1), CHUNK), torch.split(y.view(-1), CHUNK), strict=True)
    for part, place in parts:
        done = _rounded(part, source, target, policy, place)
        if done is not place:
            place.copy_(done)
    return y


def _rounded(
    x: Tensor, source: FloatFormat, target: FloatFormat, policy: str, out: Tensor | None = None
) -> Tensor:
    """A new tensor, or `out` where that saves a pass."""
    if _holds(target, source):
        y = x.clone()
    elif (source, target) in _CASTS:
        y = x.to(_CASTS[source, target]).to(x.dtype)
    elif (target.emin, target.emax) == (source.emin, source.emax):
        y = _round_bits(x, source.precision - target.precision)
    else:
        y = _round_by_magic(x, source, target, out)
    return _overflow_(y, source, target, policy)


def ulp(x: Tensor, fmt: str | FloatFormat) -> Tensor:
    """Spacing of `fmt` at |x|: 2^(max(floor(log2|x|), emin) - p + 1), in x's dtype.

    NaN and ±Inf give NaN. Zero and subnormals give the subnormal spacing; a value beyond the largest finite
    number gives the spacing of the top binade. x itself need not be a value of `fmt`. Shape, strides, device
    and memory as in `round_to`.

    Raises ValueError for an input that is not an FP32 or FP64 tensor, an unknown format, and a format whose
    smallest spacing the dtype cannot hold (fp64 in FP32).
    Source: NUMERICS section 4, ulp(x).
    """
    target = get_format(fmt)
    source = _source(x)
    if target.min_subnormal < source.min_subnormal:
        raise ValueError(f"the spacing of {target.name} underflows in {x.dtype}; pass an FP64 tensor")
    x = x.detach()
    spacing = _binade(x, source, target).mul_(2.0 ** (1 - target.precision))
    return spacing.add_(x - x)  # 0 where x is finite, NaN where it is not


def _source(x: object) -> FloatFormat:
    given = x.dtype if isinstance(x, Tensor) else type(x).__name__
    source = _SOURCES.get(given)
    if source is None:
        raise ValueError(
            f"expected a tensor of dtype torch.float32 or torch.float64, got {given}; "
            "upcast a narrower tensor first (16- and 8-bit values are exact in FP32)"
        )
    return source


def _holds(wide: FloatFormat, narrow: FloatFormat) -> bool:
    """Whether every finite number of `narrow` is one of `wide`."""
    return (
        wide.precision >= narrow.precision
        and wide.min_subnormal <= narrow.min_subnormal
        and wide.max >= narrow.max
    )


def _round_bits(x: Tensor, drop: int) -> Tensor:
    """Drop the low `drop` significand bits of formats that differ in nothing else; ±Inf where that overflows.

    Adding half - 1 + (last kept bit) to the bits carries exactly when nearest-even rounds up; a carry out of
    the significand increments the exponent, which is right from subnormals up to Inf.
    """
    # The carry would turn a NaN into anything, and comparisons are slow, so NaN travels by arithmetic: once
    # Inf is clamped (max rounds back to it), x·0 is a zero of x's sign, or NaN.
    top = torch.finfo(x.dtype).max
    x = x.clamp(-top, top)
    source_bits = x.view(_INTEGERS[x.dtype])
    bits = (source_bits >> drop).bitwise_and_(1).add_((1 << (drop - 1)) - 1).add_(source_bits)
    bits.bitwise_and_(-1 << drop)
    return bits.view(x.dtype).add_(x, alpha=0)


def _round_by_magic(x: Tensor, source: FloatFormat, target: FloatFormat, out: Tensor | None = None) -> Tensor:
    """Round formats of a smaller exponent range by (x + m) - m; the exponent is left unbounded above.

    With 2^e the binade of x (at least 2^emin) and m = 1.5·2^(e + drop), x + m stays in m's binade, whose
    spacing in the source is 2^(e - p + 1), the target's at x. The addition rounds to it, ties to even since
    m is an even multiple, and the subtraction is exact. Subnormals need no case of their own. Above emax,
    the binade is kept at 2^emax: such an x rounds to no less than 2^(emax + 1).
    """
    drop = source.precision - target.precision
    if drop < 2 or target.emin < source.emin or target.emax + drop > source.emax:
        raise ValueError(f"{target.name} cannot be emulated in {source.name}; allowed: a narrower format")
    magic, factor = _binade(x, source, target), 1.5 * 2.0**drop  # times which it is m: exact, fused or not
    y: Tensor = torch.add(x, magic, alpha=factor, out=out)
    y.sub_(magic, alpha=factor)
    # The sum loses the sign of a zero. Two integer passes over owned memory are faster than copysign_.
    integer = _INTEGERS[x.dtype]
    sign = torch.bitwise_and(x.view(integer), -1 << (source.storage_bits - 1), out=magic.view(integer))
    y.view(integer).bitwise_or_(sign)
    return y


def _binade(x: Tensor, source: FloatFormat, target: FloatFormat) -> Tensor:
    """2^floor(log2|x|) clamped to [2^emin, 2^emax] of `target`: the exponent field, read as a number."""
    exponent_field = ((1 << source.exponent_bits) - 1) << (source.precision - 1)
    power = (x.view(_INTEGERS[x.dtype]) & exponent_field).view(x.dtype)
    return power.clamp_(2.0**target.emin, 2.0**target.emax)


def _overflow_(y: Tensor, source: FloatFormat, target: FloatFormat, policy: str) -> Tensor:
    """Apply the policy in place to `y`, rounded without a bound on the exponent. NaN stays."""
    limit = min(source.max, target.max)
    if policy == "saturate":
        return y.clamp_(-limit, limit)
    if policy == "nan":
        # max·scale is finite and the next number's overflows, by a margin of 2^-(p + 2) each; Inf·0 is NaN.
        scale = source.max / limit / (1.0 + 2.0 ** -(target.precision + 1))
        return y.add_(y * scale, alpha=0)
    if target.emax < source.emax:
        # Beyond max means at least 2^(emax + 1), which the scaling sends to Inf; all else returns exactly.
        scale = 2.0 ** (source.emax - target.emax)
        return y.mul_(scale).mul_(1.0 / scale)
    return y
