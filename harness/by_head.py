"""Long contexts a kv head at a time: K and V stay in their storage format, and FP64 copies are of one head.

A million keys of 64 channels are 512 MiB in FP64 and 128 in BF16; what is computed of a head may be kept, what it is
computed from may not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.error_model import Expectation, Form, expectations
from harness.formats import FloatFormat, get_format
from harness.hazards import storage_hazards
from harness.operands import Extras
from harness.quantize import Stored, admit, amax_scale, prepare, quantize
from harness.recipe import Recipe
from harness.records import Hazard
from harness.spec import AttentionSpec, Shape
from harness.truth import Truth, reference

BLOCK_TOKENS = 2**16  # that are stored at a time
ELEMENTS = 2**24  # of K and V; a call with no more is taken whole (128 MiB each in FP64)
_NARROW = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
Heads = tuple[slice, slice]


def is_long(k: Tensor, v: Tensor) -> bool:
    """Whether K and V are so many numbers that a head is worked on at a time."""
    return max(k.numel(), v.numel()) > ELEMENTS


def holds(stored: Stored, x: Tensor) -> bool:
    """Whether storing `x` changed nothing."""
    if stored.scale is None and stored.codes.dtype == x.dtype:
        return torch.equal(stored.codes, x)
    return all(
        torch.equal(
            scaled(stored.codes[b : b + 1], _of_sequence(stored.scale, b), slice(h, h + 1)),
            x[b : b + 1, h : h + 1].double(),
        )
        for b in range(x.shape[0])
        for h in range(x.shape[1])
    )


def _of_sequence(scale: Tensor | None, b: int) -> Tensor | None:
    return scale if scale is None or scale.shape[0] == 1 else scale[b : b + 1]


def head_parts(shape: Shape) -> list[Heads]:
    """Query heads and kv heads that are worked on together."""
    all_of_k = shape.batch * shape.Hkv * shape.S * max(shape.head_dim, shape.E)
    if all_of_k <= ELEMENTS:
        return [(slice(0, shape.heads), slice(0, shape.Hkv))]
    g = shape.group
    return [(slice(n * g, (n + 1) * g), slice(n, n + 1)) for n in range(shape.Hkv)]


def of_heads(extras: Extras, heads: slice) -> Extras:
    """What these query heads see of the extras."""

    def cut(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[1] == 1 else x[:, heads]

    sinks = None if extras.sinks is None else extras.sinks[heads]
    return replace(extras, mask=cut(extras.mask), bias=cut(extras.bias), sinks=sinks)


def scaled(codes: Tensor, scale: Tensor | None, heads: slice) -> Tensor:
    """code · scale of these heads, FP64."""
    x = codes[:, heads]
    return x.double() if scale is None else x.to(torch.float64, copy=True).mul_(_cut(scale, heads))


def _cut(scale: Tensor, heads: slice) -> Tensor:
    return scale if scale.shape[1] == 1 else scale[:, heads]


def holder(fmt: FloatFormat) -> torch.dtype:
    """The narrowest type that holds every value of a format and has arithmetic."""
    for dtype, name in _NARROW.items():
        other = get_format(name)
        if (
            fmt.precision <= other.precision
            and fmt.max <= other.max
            and fmt.min_subnormal >= other.min_subnormal
        ):
            return dtype
    return torch.float64


def store_narrow(
    x: Tensor, name: str, recipe: Recipe, scale: Tensor | float | None, round_first: bool
) -> Stored:
    """`quantize` or `admit`, a head of a sequence at a time, codes kept in `holder`'s type. Values that are in it
    already, as a BF16 cache is under a BF16 recipe, are not copied.

    Raises ValueError as those do.
    """
    fmt, scaling = get_format(recipe.storage[name]), recipe.scaling.get(name)
    dtype = holder(fmt)
    same = x.dtype is dtype and _NARROW.get(dtype) == fmt.name and scaling is None and scale is None
    if same and not (round_first and (recipe.inputs is not None or recipe.rotates(name))):
        return Stored(x.detach())
    if scaling is not None and scaling.granularity == "tensor" and scaling.source == "amax" and scale is None:
        whole = quantize(x, name, recipe) if round_first else admit(x, name, recipe, scale)
        return replace(whole, codes=whole.codes.to(dtype))
    codes = x.new_empty(x.shape, dtype=dtype)
    scales: list[list[Tensor | None]] = []
    zero = blocks = 0
    for b in range(x.shape[0]):
        scales.append([])
        for h in range(x.shape[1]):
            given = _one(scale, b, h)
            part = x[b : b + 1, h : h + 1]
            try:
                found = _stored_head(part, name, recipe, given, round_first, dtype)
            except ValueError as error:
                raise ValueError(f"{error} (indices within b={b} h={h})") from None
            codes[b, h] = found.codes[0, 0].to(dtype)
            scales[-1].append(found.scale)
            zero, blocks = zero + found.zero_blocks, blocks + found.blocks
    if not scales or not scales[0] or scales[0][0] is None:
        return Stored(codes, None, zero, blocks)
    joined = torch.cat([torch.cat([s for s in row if s is not None], 1) for row in scales], 0)
    return Stored(codes, joined, zero, blocks)


def _stored_head(
    x: Tensor, name: str, recipe: Recipe, scale: Tensor | float | None, round_first: bool, dtype: torch.dtype
) -> Stored:
    """One head, so many tokens at a time where each is stored by itself, or by one scale of the head."""
    scaling, size = recipe.scaling.get(name), BLOCK_TOKENS
    take = quantize if round_first else admit
    own = scaling is None or (scaling.granularity == "head" and scaling.source != "given")
    if x.shape[2] <= size or not own or isinstance(scale, Tensor):
        return take(x, name, recipe, scale)
    blocks = [x[:, :, i : i + size] for i in range(0, x.shape[2], size)]
    zero = 0
    if scaling is not None and scaling.source == "amax" and scale is None and round_first:
        tops = [_finite_top(prepare(part, name, recipe)) for part in blocks]
        scale, zero = amax_scale(torch.stack(tops).amax(0), scaling, get_format(recipe.storage[name]), name)
    found = [take(part, name, recipe, scale) for part in blocks]
    kept = torch.cat([part.codes.to(dtype) for part in found], 2)
    return Stored(kept, found[0].scale, zero, found[0].blocks)


def _finite_top(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, 0.0).abs().amax((2, 3), keepdim=True)


def _one(scale: Tensor | float | None, b: int, h: int) -> Tensor | float | None:
    """The part of a given scale that is a head's."""
    if not isinstance(scale, Tensor) or scale.dim() < 3:
        return scale
    return _one_scale(scale[None] if scale.dim() == 3 else scale, b, h)


def _one_scale(scale: Tensor | None, b: int, h: int) -> Tensor | None:
    """The same of scales of stored inputs, `[B|1, H|1, …]`."""
    if scale is None:
        return None
    return _cut(scale[b : b + 1] if scale.shape[0] > 1 else scale, slice(h, h + 1))


def shape_of(stored: Sequence[Stored]) -> Shape:
    (b, h, n, d), (_, hk, s, e) = stored[0].codes.shape, stored[2].codes.shape
    return Shape(b, h, n, d, kv_heads=hk, kv_len=s, value_dim=e)


def parts_of(
    stored: tuple[Stored, Stored, Stored], extras: Extras
) -> Iterator[tuple[slice, tuple[Stored, Stored, Stored], Extras]]:
    """Query heads, and the call of them alone."""
    for heads, kv in head_parts(shape_of(stored)):
        q, k, v = (
            replace(x, codes=x.codes[:, own], scale=None if x.scale is None else _cut(x.scale, own))
            for x, own in zip(stored, (heads, kv, kv), strict=True)
        )
        yield heads, (q, k, v), of_heads(extras, heads)


def truth_by_head(
    stored: tuple[Stored, Stored, Stored], spec: AttentionSpec, extras: Extras, ranges: bool = False
) -> Truth:
    """The FP64 truth of stored values."""
    parts = []
    for heads, own, rest in parts_of(stored, extras):
        q, k, v = (x.values for x in own)
        parts.append((heads, reference(q, k, v, spec, ranges=ranges, **rest.as_options())))
        del q, k, v
    if len(parts) == 1:
        return parts[0][1]
    noted = None
    for heads, truth in parts:
        if truth.ranges is not None:
            noted = (
                truth.ranges.of_heads(heads.start)
                if noted is None
                else noted.joined(truth.ranges.of_heads(heads.start))
            )
    out, lse, row_max = (torch.cat([getattr(t, n) for _, t in parts], 1) for n in ("out", "lse", "row_max"))
    return Truth(out, lse, row_max, noted)


def expectations_by_head(
    truth: Truth, stored: tuple[Stored, Stored, Stored], spec: AttentionSpec, extras: Extras, recipe: Recipe,
    forms: Sequence[Form],
) -> list[Expectation]:  # fmt: skip
    """What each form should show."""
    found: list[tuple[Expectation, ...]] = []
    for heads, own, rest in parts_of(stored, extras):
        part = Truth(truth.out[:, heads], truth.lse[:, heads], truth.row_max[:, heads])
        # The model needs no more than FP32 of them, but for small calls, which stay as they are.
        q, k, v = (
            x.values if x.codes.dtype in (torch.float64, torch.bfloat16) else x.values.float() for x in own
        )
        found.append(
            expectations(
                part, q, k, v, spec, [(recipe, f) for f in forms], **rest.as_options(),
                scales=tuple(x.scale for x in own),  # type: ignore[arg-type]
            )
        )  # fmt: skip
        del q, k, v
    names = ("variance", "ceiling", "lse_variance", "lse_ceiling")
    return [
        Expectation(*(torch.cat([getattr(part[i], n) for part in found], 1) for n in names))
        for i in range(len(forms))
    ]


def hazards_by_head(exact: Sequence[Tensor], stored: Sequence[Stored], recipe: Recipe) -> tuple[Hazard, ...]:
    """What storing did, a head of one tensor at a time; each kind once, placed where its peak is."""
    found: dict[tuple[str, str, str], Hazard] = {}
    for place, (x, kept) in enumerate(zip(exact, stored, strict=True)):
        for b in range(x.shape[0]):
            for h in range(x.shape[1]):
                own = Stored(_part(kept.codes, b, h).double(), _one_scale(kept.scale, b, h))
                for hazard in storage_hazards(
                    tuple(_part(x, b, h) if n == place else _nothing(x) for n in range(3)),
                    tuple(own if n == place else Stored(_nothing(x)) for n in range(3)), recipe,
                ):  # fmt: skip
                    _add(found, hazard, b, h)
    return tuple(found.values())


def _part(x: Tensor, b: int, h: int) -> Tensor:
    return x[b : b + 1, h : h + 1]


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(1, 1, 0, x.shape[3], dtype=torch.float64)


def _add(found: dict[tuple[str, str, str], Hazard], h: Hazard, batch: int, head: int) -> None:
    where = h.where if h.where is None else (batch, head, *h.where[2:])
    h = replace(h, where=where)
    key = (h.kind.value, h.stage, h.format)
    if key not in found:
        found[key] = h
        return
    old = found[key]
    worst = h if h.peak > old.peak else old
    found[key] = replace(worst, count=old.count + h.count, total=old.total + h.total)
