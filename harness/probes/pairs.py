"""Probes of two calls that must agree: in every bit where that can be promised, else within one truth's ceiling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.formats import get_format
from harness.operands import Extras
from harness.probes.runs import Tensors
from harness.probes.setting import Finding, NothingToAsk, Setting, cut, same_bits, within
from harness.quantize import Stored

SHIFT = 300.0  # beyond what exp holds in FP32, either way
_PADDED, _CHUNK, _PARTS = 5, 7, 3
_ALL = slice(None)

# --- nothing moves ------------------------------------------------------------------------------------------------


def permuted(s: Setting) -> Finding:
    if s.positioned or s.extras.kv_lens is not None:
        raise NothingToAsk("keys have positions")
    if s.shape.S < 2:
        raise NothingToAsk("there are not two keys")
    order = torch.from_numpy(s.generator("order").permutation(s.shape.S))
    q, k, v = s.base
    truth, expected = s.base_truth
    moved: dict[str, Any] = {n: x[..., order] for n, x in (("mask", s.extras.mask), ("bias", s.extras.bias))
             if x is not None and x.shape[-1] > 1}  # fmt: skip
    extras = replace(s.extras, **moved)
    out = s.call((q, _reordered(k, order), _reordered(v, order)), extras=extras).out
    return within(out, truth.out, expected.ceiling)


def _reordered(x: Stored, order: Tensor) -> Stored:
    scale = x.scale if x.scale is None or x.scale.shape[2] == 1 else x.scale[:, :, order]
    return replace(x, codes=x.codes[:, :, order], scale=scale)


def shifted(s: Setting, sign: float) -> Finding:
    """A channel of q and k, zero in the one call, adds a constant to all scores of a row in the other; sinks follow."""
    scale = s.spec.scale_for(s.shape.head_dim)
    if s.spec.softcap is not None:
        raise NothingToAsk("softcap bounds the scores")
    if not s.shape.head_dim or not scale or not s.shape.S:
        raise NothingToAsk("no channel can move the scores")
    size = 2.0 ** round(math.log2(SHIFT / abs(scale)) / 2)
    q, k, v = s.normal("q", "q"), s.normal("k", "k"), s.normal("v", "v", 0.5)
    q[..., 0], k[..., 0] = size, math.copysign(size, sign * scale)
    stored = s.store(q, k, v)
    added = stored[0].values[:, :, :1, :1] * _per_head(stored[1].values[:, :, :1, :1], s.shape.group) * scale
    if not all(bool((x.values[..., 0] == x.values[:, :, :1, 0]).all()) for x in stored[:2]):
        raise NothingToAsk("the scales of q and k differ from token to token")
    extras = s.extras
    if extras.sinks is not None:
        if not bool((added == added[:1]).all()):
            raise NothingToAsk("sinks are one for all sequences, the shift is not")
        extras = replace(extras, sinks=extras.sinks.double() + added[0, :, 0, 0])
    still = tuple(replace(x, codes=_without_first(x.codes)) for x in stored[:2])
    truth, _ = s.expect((still[0], still[1], stored[2]))
    _, expected = s.expect(stored, extras=extras)
    return within(s.call(stored, extras=extras).out, truth.out, expected.ceiling)


def _per_head(x: Tensor, group: int) -> Tensor:
    return x.repeat_interleave(group, 1)


def _without_first(codes: Tensor) -> Tensor:
    codes = codes.clone()
    codes[..., 0] = 0.0
    return codes


def key_scale(s: Setting) -> Finding:
    """4·K under scale/4 (4, not 2: a kernel may multiply q and k by √scale each)."""
    stored = _coarse(s)
    q, k, v = stored
    spec = replace(s.spec, scale=s.spec.scale_for(s.shape.head_dim) / 4)
    return same_bits(s.call((q, _times(k, 4.0), v), spec).out, s.call(stored).out)


def value_scale(s: Setting) -> Finding:
    stored = _coarse(s)
    q, k, v = stored
    return same_bits(s.call((q, k, _times(v, 2.0))).out, 2.0 * s.call(stored).out)


def _coarse(s: Setting) -> Tensors:
    return s.store(s.coarse("q", "q", -8, 9), s.coarse("k", "k", -8, 9), s.coarse("v", "v", 4, 9))


def _times(x: Stored, power: float) -> Stored:
    """In the codes; a scaled tensor fills its format, so there in the scale."""
    return replace(x, codes=x.codes * power) if x.scale is None else replace(x, scale=x.scale * power)


# --- keys that a row does not see ---------------------------------------------------------------------------------


def future(s: Setting) -> Finding:
    """Other numbers in the last keys, and in the first, change no bit of the rows that see none of them."""
    return _first_failure(
        _changed(s, *unseen, lambda x, keys: torch.where(keys, -x.codes.flip(2), x.codes))
        for unseen in _some_unseen(s)
    )


def future_poisoned(s: Setting) -> Finding:
    return _first_failure(_poisoned(s, *unseen) for unseen in _some_unseen(s))


def _first_failure(found: Iterable[Finding]) -> Finding:
    last = None
    for last in found:
        if not last.ok:
            break
    assert last is not None
    return last


def hidden_poisoned(s: Setting) -> Finding:
    """NaN and infinities at keys that no row sees."""
    shape = s.shape
    keys = ~s.visible.any(2).view(shape.batch, shape.Hkv, shape.group, shape.S).any(2)
    if not bool(keys.any()):
        raise NothingToAsk("every key is seen by some row")
    return _poisoned(s, keys, torch.ones(shape.tensor("out")[:3], dtype=torch.bool))


def _some_unseen(s: Setting) -> list[tuple[Tensor, Tensor]]:
    """Keys `[B, Hkv, S]`, and the rows `[B, H, L]` that see none of them but some other: the last third of the keys
    and the first, or else one key."""
    seen, count = s.visible, s.shape.S
    third = max(1, count // 3)
    found: list[tuple[Tensor, Tensor]] = []
    singles = ((j, j + 1) for j in reversed(range(count)))
    for n, (start, stop) in enumerate(((max(count - third, 0), count), (0, third), *singles)):
        if found and n > 1:  # single keys only where neither third will do
            break
        rows = ~seen[..., start:stop].any(-1) & seen.any(-1)
        if bool(rows.any()):
            keys = torch.zeros(s.shape.batch, s.shape.Hkv, count, dtype=torch.bool)
            keys[..., start:stop] = True
            found.append((keys, rows))
    if not found:
        raise NothingToAsk("every row sees every key, or none")
    return found


def _poisoned(s: Setting, keys: Tensor, rows: Tensor) -> Finding:
    found = None
    for poison in (math.nan, math.inf, -math.inf):
        formats = [get_format(s.recipe.storage[n]) for n in ("k", "v")]
        if math.isinf(poison) and not all(f.infinities for f in formats):
            continue
        found = _changed(s, keys, rows, lambda x, at, p=poison: x.codes.masked_fill(at, p))  # type: ignore[misc]
        if not found.ok:
            return replace(found, detail=f"hidden K and V are {poison}")
    assert found is not None
    return found


def _changed(s: Setting, keys: Tensor, rows: Tensor, change: Callable[[Stored, Tensor], Tensor]) -> Finding:
    q, k, v = s.base
    clean = s.base_output.out
    other = tuple(replace(x, codes=change(x, keys[..., None])) for x in (k, v))
    return same_bits(s.call((q, other[0], other[1])).out, clean, rows)


# --- the same rows in another call --------------------------------------------------------------------------------


def padded(s: Setting) -> Finding:
    """More keys than kv_lens says, huge ones: the same within the ceiling of the call without them."""
    q, k, v = s.base
    truth, expected = s.base_truth
    more = s.shape.S + _PADDED
    lens = s.extras.kv_lens
    lens = torch.full((s.shape.batch,), s.shape.S) if lens is None else lens
    big = (get_format(s.recipe.storage[n]).max / 4 for n in ("k", "v"))
    wide = tuple(_pad(x, size) for x, size in zip((k, v), big, strict=True))
    extras = replace(s.extras, kv_lens=lens)
    for name, fill in (("mask", True), ("bias", 0.0)):
        x = getattr(extras, name)
        if x is not None and x.shape[3] > 1:
            pad = x.new_full((*x.shape[:3], more - x.shape[3]), fill)
            padded: dict[str, Any] = {name: torch.cat([x, pad], 3)}
            extras = replace(extras, **padded)
    return within(s.call((q, wide[0], wide[1]), extras=extras).out, truth.out, expected.ceiling)


def _pad(x: Stored, value: float) -> Stored:
    """More tokens, their scales those of the last one."""
    sizes = list(x.codes.shape)
    sizes[2] = _PADDED
    scale = x.scale
    if scale is not None and scale.shape[2] > 1:
        scale = torch.cat([scale, scale[:, :, -1:].expand(-1, -1, _PADDED, -1)], 2)
    return replace(x, codes=torch.cat([x.codes, x.codes.new_full(sizes, value)], 2), scale=scale)


def row_alone(s: Setting) -> Finding:
    """The last row of a prefill as a decoding step; the first where rows count from the front; else a few."""
    length = s.shape.q_len
    if length < 2:
        raise NothingToAsk("there is one row")
    rows = [0, length // 2, length - 1]
    if s.positioned or s.extras.kv_lens is not None:
        rows = [length - 1] if s.spec.align == "bottom-right" else [0]
    return _parts(s, ((_ALL, _ALL, slice(i, i + 1)) for i in rows))


def sequence_alone(s: Setting) -> Finding:
    if s.shape.batch < 2:
        raise NothingToAsk("there is one sequence")
    return _parts(s, ((slice(b, b + 1), _ALL, _ALL) for b in range(s.shape.batch)))


def head_alone(s: Setting) -> Finding:
    """A kv head with its group of query heads."""
    if s.shape.Hkv < 2:
        raise NothingToAsk("there is one kv head")
    return _parts(s, ((_ALL, slice(h, h + 1), _ALL) for h in range(s.shape.Hkv)))


def chunked(s: Setting) -> Finding:
    """Rows a few at a time, each chunk against the keys up to its last row."""
    length, shift = s.shape.q_len, s.spec.shift(s.shape.q_len, s.shape.S)
    if length <= _CHUNK:
        raise NothingToAsk(f"there are not more than {_CHUNK} rows")
    if s.positioned and (s.spec.align != "bottom-right" or not s.spec.causal or s.extras.kv_lens is not None):
        raise NothingToAsk("a chunk needs causality, bottom-right and one length")
    first = max(0, -shift)  # rows before it stand before the first key
    rows = [slice(a, min(a + _CHUNK, length)) for a in range(first, length, _CHUNK)]
    return _parts(
        s, ((_ALL, _ALL, r) for r in rows), (lambda r: slice(0, r.stop + shift)) if s.spec.causal else None
    )


def _parts(
    s: Setting, parts: Iterable[tuple[slice, slice, slice]], keys: Callable[[slice], slice] | None = None
) -> Finding:
    """Parts of a call, each a call of its own (`keys`: those it is given), against the whole one's ceiling."""
    stored = s.base
    truth, expected = s.base_truth
    whole, equal = s.base_output.out, True
    found = within(whole, truth.out, expected.ceiling)
    if not found.ok:
        return replace(found, detail="in the whole")
    for batch, heads, rows in parts:
        some, extras = cut(
            stored, s.extras, batch=_or_none(batch), heads=_or_none(heads), rows=_or_none(rows),
            keys=None if keys is None else keys(rows),
        )  # fmt: skip
        of_q = heads if heads == _ALL else slice(heads.start * s.shape.group, heads.stop * s.shape.group)
        at = (batch, of_q, rows)
        out = s.call(some, extras=extras).out
        new = within(out, truth.out[at], expected.ceiling[at])
        equal = equal and same_bits(out, whole[at]).ok
        if not new.ok:
            return replace(new, detail=f"in the part {_named(at)}")
    return replace(
        found, detail="; ".join(x for x in (found.detail, "same bits" if equal else "other bits") if x)
    )


def _named(at: tuple[slice, ...]) -> str:
    parts = zip(("sequence", "head", "row"), at, strict=True)
    return ", ".join(f"{n} {p.start}" if p.stop == p.start + 1 else f"{n}s {p.start} … {p.stop - 1}"
                     for n, p in parts if p != _ALL)  # fmt: skip


def _or_none(part: slice) -> slice | None:
    return None if part == _ALL else part


def other_cache(s: Setting) -> Finding:
    """Contiguous and paged."""
    if s.run.other_cache is None:
        raise NothingToAsk("the implementation keeps no cache")
    return same_bits(s.base_output.out, replace(s, run=s.run.other_cache).base_output.out)


# --- parts of the keys, merged ------------------------------------------------------------------------------------


def merged(s: Setting) -> Finding:
    """Parts of the keys apart, merged by their lse in FP64: o = Σ w_i o_i, w_i = exp(lse_i) / Σ exp(lse_i).

    With |Δo_i| ≤ c_i and |Δlse_i| ≤ δ, weights move by factors within e^±2δ:
        |Δo| ≤ e^2δ·Σ w_i c_i + (e^2δ − 1)·Σ w_i |o_i − o|
    """
    if s.shape.S < _PARTS:
        raise NothingToAsk(f"there are not {_PARTS} keys")
    stored, (truth, _) = s.base, s.base_truth
    edges = [s.shape.S * i // _PARTS for i in range(_PARTS + 1)]
    parts, lse_bounds = [], []
    for n, (a, b) in enumerate(itertools.pairwise(edges)):
        some, extras = _part_of_keys(s, stored, slice(a, b), first=n == 0)
        spec = replace(s.spec, empty_row="zero")
        got = s.call(some, spec, extras)
        if got.lse is None:
            raise NothingToAsk("the implementation gives no lse")
        want, expected = s.expect(some, spec, extras)
        parts.append((got.out, got.lse[..., None], want.out, want.lse[..., None], expected.ceiling))
        lse_bounds.append(expected.lse_ceiling[..., None])
    outs, logs, wants, true_logs, bounds = (torch.stack(x) for x in zip(*parts, strict=True))
    out, w = _merge(outs, logs), _weights(true_logs)
    moved = torch.expm1(2 * torch.stack(lse_bounds).amax(0))
    apart = wants - torch.where(torch.isnan(truth.out), 0.0, truth.out)
    bound = (1 + moved) * (w * bounds).sum(0) + moved * (w * apart.abs()).sum(0)
    whole = torch.where(torch.isneginf(truth.lse)[..., None] | torch.isnan(truth.out), 0.0, truth.out)
    return within(out, whole, bound * (1 + 2.0**-40) + whole.abs() * 2.0**-40)  # the merge itself: FP64


def _part_of_keys(s: Setting, stored: Tensors, keys: slice, first: bool) -> tuple[Tensors, Extras]:
    """Some keys alone: cut out where keys have no position, else by a mask. A sink belongs to the first part."""
    sinks = s.extras.sinks if first else None
    if not s.positioned and s.extras.kv_lens is None:
        part, extras = cut(stored, s.extras, keys=keys)
        return part, replace(extras, sinks=sinks)
    inside = torch.zeros(1, 1, 1, s.shape.S, dtype=torch.bool)
    inside[..., keys] = True
    mask = inside if s.extras.mask is None else inside & s.extras.mask
    return stored, replace(s.extras, mask=mask, sinks=sinks)


def _weights(logs: Tensor) -> Tensor:
    m = logs.amax(0).nan_to_num(neginf=0.0)
    w = torch.exp(logs - m)
    total = w.sum(0)
    return w / torch.where(total == 0, 1.0, total)


def _merge(outs: Tensor, logs: Tensor) -> Tensor:
    empty = logs == -math.inf
    return (_weights(logs) * outs.masked_fill(empty, 0.0)).sum(0)
