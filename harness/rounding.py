"""One correct rounding (nearest, ties to even) of FP32 and FP64 tensors to any `FloatFormat`.

The definition is `ldexp(rint(ldexp(x, -e)), e)` with e = max(floor(log2|x|), emin) - (p - 1): NUMERICS
section 1. Library casts are used only where they are that definition (FP64 -> FP32, FP32 -> FP16): torch
rounds FP64 to 16 and 8 bits twice, its BF16 cast may flush subnormals (AVX512-BF16), and its E4M3 cast has
changed its overflow policy between releases.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from harness.formats import FP16, FP32, FP64, FloatFormat, get_format

_SOURCES: dict[object, FloatFormat] = {torch.float32: FP32, torch.float64: FP64}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
# Conversions of IEEE 754-2019 section 5.4.2, which the hardware rounds once, subnormals included.
_CASTS = {(FP64, FP32): torch.float32, (FP32, FP16): torch.float16}
CHUNK = 2**18  # elements: a rounding takes seven passes, all but the first of which then find them in cache


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
    _round_chunks(x.reshape(-1), y.view(-1), source, target, policy)
    return y


def round_own(x: Tensor, fmt: str | FloatFormat, overflow: str | None = None) -> Tensor:
    """`round_to` of an x that nothing else reads: computed in its memory where that has no gaps or overlaps."""
    target = get_format(fmt)
    policy = target.check_overflow(overflow)
    source = _source(x)
    x = x.detach()
    if not x.is_contiguous():
        return round_to(x, target, policy)
    if x.numel() <= CHUNK or x.device.type != "cpu":
        return _rounded(x, source, target, policy, x)
    _round_chunks(x.view(-1), x.view(-1), source, target, policy)
    return x


def _round_chunks(x: Tensor, y: Tensor, source: FloatFormat, target: FloatFormat, policy: str) -> None:
    """x rounded into y, which may be x."""
    spare = x.new_empty(CHUNK, dtype=_CASTS.get((source, target)))
    for part, place in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True):
        _rounded(part, source, target, policy, place, spare[: part.numel()])


def _rounded(
    x: Tensor, source: FloatFormat, target: FloatFormat, policy: str,
    out: Tensor | None = None, spare: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`out`, which may be x, or a new tensor. `spare` is memory to compute in: of the narrow dtype for a cast."""
    if holds(target, source):
        y = x.clone() if out is None else out.copy_(x)
    elif narrow := _CASTS.get((source, target)):
        cast = x.to(narrow) if spare is None else spare.copy_(x)
        y = cast.to(x.dtype) if out is None else out.copy_(cast)
        if policy == "inf":
            return y  # as the cast has it
    elif (target.emin, target.emax) == (source.emin, source.emax):
        y = _round_bits(x, source.precision - target.precision, out, spare)
    else:
        y = _round_by_spacing(x, source, target, out, spare)
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
    return _spacing(x, source, target).add_(x - x)  # 0 where x is finite, NaN where it is not


def _source(x: object) -> FloatFormat:
    given = x.dtype if isinstance(x, Tensor) else type(x).__name__
    source = _SOURCES.get(given)
    if source is None:
        raise ValueError(
            f"expected a tensor of dtype torch.float32 or torch.float64, got {given}; "
            "upcast a narrower tensor first (16- and 8-bit values are exact in FP32)"
        )
    return source


def holds(wide: FloatFormat, narrow: FloatFormat) -> bool:
    """Whether every finite number of `narrow` is one of `wide`."""
    return (
        wide.precision >= narrow.precision
        and wide.min_subnormal <= narrow.min_subnormal
        and wide.max >= narrow.max
    )


def _round_bits(x: Tensor, drop: int, out: Tensor | None, spare: Tensor | None) -> Tensor:
    """Drop the low `drop` significand bits of formats that differ in nothing else; ±Inf where that overflows.

    Adding half - 1 + (last kept bit) to the bits carries exactly when nearest-even rounds up; a carry out of
    the significand increments the exponent, which is right from subnormals up to Inf.
    """
    # The carry would turn a NaN into anything, and comparisons are slow, so NaN travels by arithmetic: once
    # Inf is clamped (max rounds back to it), x·0 is a zero of x's sign, or NaN.
    integer, top = _INTEGERS[x.dtype], torch.finfo(x.dtype).max
    y = torch.clamp(x, -top, top, out=out)
    source_bits = y.view(integer)
    bits = torch.bitwise_right_shift(
        source_bits, _constant(drop, integer), out=None if spare is None else spare.view(integer)
    )
    bits.bitwise_and_(_constant(1, integer)).add_((1 << (drop - 1)) - 1).add_(source_bits)
    bits.bitwise_and_(_constant(-1 << drop, integer))
    return torch.add(bits.view(x.dtype), y, alpha=0, out=y)


def _round_by_spacing(
    x: Tensor, source: FloatFormat, target: FloatFormat, out: Tensor | None, spare: Tensor | None
) -> Tensor:
    """Round formats of a smaller exponent range to integers times the spacing at x; no bound on the exponent above.

    The spacing is a power of two that the source holds, so the quotient is exact but where it overflows (to ±Inf, as
    it should) or is so small that it rounds to a zero of its sign anyhow; so is the product. Subnormals need no case
    of their own. Above emax, the binade is kept at 2^emax: such an x rounds to no less than 2^(emax + 1).
    """
    drop = source.precision - target.precision
    if drop < 2 or target.emin < source.emin or target.emax + drop > source.emax:
        raise ValueError(f"{target.name} cannot be emulated in {source.name}; allowed: a narrower format")
    spacing = _spacing(x, source, target, spare)
    y: Tensor = torch.div(x, spacing, out=out)
    return y.round_().mul_(spacing)


def _spacing(x: Tensor, source: FloatFormat, target: FloatFormat, spare: Tensor | None = None) -> Tensor:
    """2^(1 - p) times 2^floor(log2|x|), clamped to [2^emin, 2^emax] of `target`: the exponent field, read as a
    number."""
    integer = _INTEGERS[x.dtype]
    field = _constant(((1 << source.exponent_bits) - 1) << (source.precision - 1), integer)
    bits = torch.bitwise_and(x.view(integer), field, out=None if spare is None else spare.view(integer))
    power = bits.view(x.dtype).clamp_(2.0**target.emin, 2.0**target.emax)
    return power.mul_(_constant(2.0 ** (1 - target.precision), x.dtype))


@cache
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor without axes: torch makes one of a Python number in each call, which costs as much as a
    pass over some thousand elements."""
    return torch.tensor(value, dtype=dtype, device="cpu")


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
        return y.mul_(_constant(scale, y.dtype)).mul_(_constant(1.0 / scale, y.dtype))
    return y
