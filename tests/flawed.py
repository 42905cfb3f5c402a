"""A small fused kernel on torch alone, with a switch for every mistake that the probes are to catch.

Codes in the storage dtype and scales in, blocks of keys under a running max in FP32, P rounded to the storage dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.operands import NO_EXTRAS, Extras
from harness.spec import AttentionSpec, Shape

BLOCK = 8


@dataclass(frozen=True)
class Setting:
    recipe: str
    spec: AttentionSpec
    extras: Extras
    shape: Shape
    out: torch.dtype


@dataclass(frozen=True)
class Fault:
    """`what` it is in words, the setting it is tried in, and probes that must catch it."""

    what: str
    setting: str
    caught_by: tuple[str, ...]


_SHAPE = Shape(2, 4, 17, 12, kv_heads=2)
_LONG = Shape(2, 4, 9, 12, kv_heads=2, kv_len=17)
_MASK = torch.rand(2, 1, 17, 17, generator=torch.Generator().manual_seed(3)) < 0.6
_MASK[..., 0], _MASK[..., 5] = True, False
_LENS, _SINKS = torch.tensor([17, 11]), torch.tensor([0.5, 1.0, -1.0, 2.0])
_BIAS = -torch.arange(17.0).expand(1, 1, 17, 17) / 4
SETTINGS = {
    "plain": Setting("bf16", AttentionSpec(), NO_EXTRAS, _SHAPE, torch.bfloat16),
    "causal": Setting("bf16", AttentionSpec(causal=True), NO_EXTRAS, _LONG, torch.bfloat16),
    "window": Setting("bf16", AttentionSpec(window=(3, 2)), NO_EXTRAS, _SHAPE, torch.bfloat16),
    "mask": Setting("bf16", AttentionSpec(), Extras(mask=_MASK), _SHAPE, torch.bfloat16),
    "bias": Setting("bf16", AttentionSpec(), Extras(bias=_BIAS), _SHAPE, torch.bfloat16),
    "lengths": Setting("bf16", AttentionSpec(causal=True), Extras(kv_lens=_LENS), _LONG, torch.bfloat16),
    "sinks": Setting("bf16", AttentionSpec(), Extras(sinks=_SINKS), _SHAPE, torch.bfloat16),
    "softcap": Setting("bf16", AttentionSpec(softcap=2.0), NO_EXTRAS, _SHAPE, torch.bfloat16),
    "fp32": Setting("fp32", AttentionSpec(), NO_EXTRAS, _SHAPE, torch.float32),
    "fp8": Setting("fp8_e4m3", AttentionSpec(), NO_EXTRAS, _SHAPE, torch.bfloat16),
}  # fmt: skip

FAULTS = {
    "no_max": Fault("no max is subtracted", "plain", ("scores + c",)),
    "max_from_zero": Fault("the running max starts at 0", "plain", ("scores − c",)),
    "lost_mass": Fault("the last key counts in l alone", "plain", ("ones", "last element")),
    "last_key": Fault("the last key is never read", "plain", ("identity", "last element")),
    "last_channel": Fault("the last value channel is never written", "plain", ("ones", "last element")),
    "power_of_two": Fault("head_dim is cut to a power of two", "plain", ("last element", "identity")),
    "no_rescale_o": Fault("O is not rescaled when the max grows", "plain", ("ones",)),
    "no_rescale": Fault("neither O nor l is rescaled", "plain", ("identity",)),
    "interleaved": Fault("kv heads are tiled, not repeated", "plain", ("head tags",)),
    "next_batch": Fault("V comes from the first sequence", "plain", ("head tags", "sequence alone")),
    "scale_width": Fault("the scale is taken from a padded width", "plain", ("identity",)),
    "fixed_scale": Fault("a given scale is ignored", "plain", ("4K, scale/4",)),
    "added_floor": Fault("1e-4 is added to the denominator", "fp32", ("ones",)),
    "clipped_v": Fault("values are clipped at 3", "plain", ("2V", "one-hot")),
    "position_leaks": Fault("a slope over key positions is added", "plain", ("permuted keys", "identity")),
    "wrong_lse": Fault("lse is in base 2", "plain", ("lse", "split keys")),
    "lse_without_max": Fault("lse is ln l, without m", "plain", ("lse", "split keys")),
    "raises": Fault("a length that is no multiple of the block raises", "plain", ("ones",)),
    "top_left": Fault("top-left where bottom-right is asked", "causal", ("identity", "row alone", "chunked")),
    "next_key": Fault("causality is off by one", "causal", ("identity", "unseen changed")),
    "nan_leaks": Fault("hidden P = 0 times NaN", "causal", ("unseen poisoned",)),
    "wide_window": Fault("w keys to the left are w + 1", "window", ("identity", "unseen changed")),
    "no_window": Fault("the window is ignored", "window", ("identity",)),
    "polarity": Fault("the mask's True hides", "mask", ("identity",)),
    "first_head_mask": Fault("the mask of the first sequence serves all", "mask", ("sequence alone", "identity")),
    "mask_nan_leaks": Fault("a masked P = 0 times NaN", "mask", ("hidden poisoned",)),
    "scaled_bias": Fault("the bias is scaled with the scores", "bias", ("identity",)),
    "past_length": Fault("one key beyond the length is read", "lengths", ("identity", "padded keys")),
    "no_lengths": Fault("kv_lens is ignored", "lengths", ("identity", "padded keys")),
    "no_sink": Fault("the sink is dropped", "sinks", ("ones",)),
    "sink_per_block": Fault("the sink counts once a block", "sinks", ("ones",)),
    "cap_as_clip": Fault("softcap clips", "softcap", ("identity",)),
    "bf16_scores": Fault("scores are held in BF16", "fp32", ("identity",)),
    "tf32_values": Fault("V is cut to BF16", "fp32", ("row alone", "chunked")),
    "no_v_scale": Fault("V is not descaled", "fp8", ("ones",)),
    "no_k_scale": Fault("K is not descaled", "fp8", ("identity",)),
    "first_scale": Fault("the scale of the first head serves all", "fp8", ("head tags",)),
    "p_saturates": Fault("P × 512 saturates", "fp8", ("ones",)),
}  # fmt: skip


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, align: str, window: tuple[int | None, int | None] | None,
    scale: float, softcap: float | None, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    kv_lens: Tensor | None, scales: tuple[Tensor | None, ...], fault: str, out: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    storage, (length, s, d) = q.dtype, (*q.shape[2:3], *k.shape[2:])
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.float() for x in (q, k, v))
    if fault == "raises" and s % BLOCK:
        raise RuntimeError(f"{s} keys are no multiple of {BLOCK}")
    if fault == "power_of_two" and d:
        q, k = (x[..., : 1 << (d.bit_length() - 1)] for x in (q, k))
    if fault == "scale_width":
        scale = 16.0**-0.5
    if fault == "fixed_scale":
        scale = d**-0.5
    if fault == "clipped_v":
        v = v.clamp(-3, 3)
    if fault == "tf32_values":
        v = v.bfloat16().float()
    if fault == "next_batch":
        v = v[:1].expand_as(v)
    q, k, v = _descaled(q, k, v, scales, fault)
    heads = torch.arange(q.shape[1])
    heads = heads % k.shape[1] if fault == "interleaved" else heads // group
    k, v = k[:, heads], v[:, heads]
    x = (q @ k.mT) * scale
    if softcap is not None:
        x = x.clamp(-softcap, softcap) if fault == "cap_as_clip" else softcap * torch.tanh(x / softcap)
    if bias is not None:
        x = x + bias.float() * (scale if fault == "scaled_bias" else 1.0)
    if fault == "position_leaks":
        x = x + 0.1 * torch.arange(s)
    if fault == "bf16_scores":
        x = x.bfloat16().float()
    seen = _seen(length, s, causal, align, window, mask, kv_lens, fault).expand_as(x)
    x = x.masked_fill(~seen, -math.inf)
    result, lse = _stream(x, v, seen, sinks, storage, fault)
    if fault == "last_channel" and result.shape[-1]:
        result[..., -1] = 0.0
    return result.to(out), lse


def _descaled(
    q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor | None, ...], fault: str
) -> tuple[Tensor, ...]:
    parts = []
    for name, x, scale in zip("qkv", (q, k, v), scales, strict=True):
        if scale is None or fault == f"no_{name}_scale":
            parts.append(x)
            continue
        first = scale[:, :1].expand_as(scale) if fault == "first_scale" else scale
        parts.append(x * first.float())
    return tuple(parts)


def _seen(
    length: int, s: int, causal: bool, align: str, window: tuple[int | None, int | None] | None,
    mask: Tensor | None, kv_lens: Tensor | None, fault: str,
) -> Tensor:  # fmt: skip
    n = torch.tensor([s]) if kv_lens is None or fault == "no_lengths" else kv_lens
    n = n.view(-1, 1, 1, 1)
    i, j = torch.arange(length)[:, None], torch.arange(s)
    bottom = align == "bottom-right" and fault != "top_left"
    position = i + (n - length) if bottom else i.expand(1, 1, -1, -1)
    seen = j < (n + 1 if fault == "past_length" else n)
    if causal:
        seen = seen & (j <= position + int(fault in ("next_key", "past_length")))
    left, right = (None, None) if window is None or fault == "no_window" else window
    if left is not None:
        seen = seen & (j >= position - left - int(fault == "wide_window"))
    if right is not None:
        seen = seen & (j <= position + right)
    if mask is not None:
        mask = mask[:1] if fault == "first_head_mask" else mask
        seen = seen & (~mask if fault == "polarity" else mask)
    if fault == "last_key" and s > 1:
        seen = seen & (j < s - 1)
    return seen


def _stream(
    x: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None, storage: torch.dtype, fault: str
) -> tuple[Tensor, Tensor]:
    rows = x.shape[:3]
    p_scale = 1.0 if storage.itemsize > 1 else 512.0 if fault == "p_saturates" else 256.0
    m = torch.full((*rows, 1), -math.inf)
    if fault in ("max_from_zero", "no_max"):
        m = torch.zeros_like(m)
    l, o = torch.zeros(*rows, 1), torch.zeros(*rows, v.shape[-1])  # noqa: E741
    sink = None if sinks is None or fault == "no_sink" else sinks.float().view(1, -1, 1, 1).expand_as(m)
    if sink is not None:
        m = torch.maximum(m, sink)
        l = torch.exp(sink - m)  # noqa: E741
    for start in range(0, x.shape[-1], BLOCK):
        part, values = x[..., start : start + BLOCK], v[:, :, start : start + BLOCK]
        top = m if fault == "no_max" else torch.maximum(m, part.amax(-1, keepdim=True))
        base = top.masked_fill(top == -math.inf, 0.0)
        a, e = torch.exp(m - base), torch.exp(part - base)
        w = (e * p_scale).clamp(max=448.0 if storage.itemsize == 1 else math.inf).to(
            storage
        ).float() / p_scale
        l = l * (1.0 if fault == "no_rescale" else a) + e.sum(-1, keepdim=True)  # noqa: E741
        if sink is not None and fault == "sink_per_block" and start:
            l = l + torch.exp(sink - base)  # noqa: E741
        if fault == "lost_mass" and start + BLOCK >= x.shape[-1]:
            w = torch.cat([w[..., :-1], torch.zeros_like(w[..., :1])], -1)
        if fault not in ("nan_leaks", "mask_nan_leaks"):
            values = torch.where(seen[..., start : start + BLOCK].any(2)[..., None], values, 0.0)
        o = o * (1.0 if fault in ("no_rescale", "no_rescale_o") else a) + _product(w, values, part, fault)
        m = top
    if fault == "added_floor":
        l = l + 1e-4  # noqa: E741
    empty = (l == 0) & ~seen.any(-1, keepdim=True)
    out = (o / l.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
    lse = (l.log() if fault == "lse_without_max" else m + l.log())[..., 0]
    return out, lse / math.log(2) if fault == "wrong_lse" else lse


def _product(w: Tensor, v: Tensor, x: Tensor, fault: str) -> Tensor:
    """P·V; a value that is not finite reaches the rows that see it."""
    finite = torch.isfinite(v)
    if fault in ("nan_leaks", "mask_nan_leaks") or bool(finite.all()):
        return w @ v
    bad = ((x != -math.inf).float() @ (~finite).float()) > 0
    return (w @ v.masked_fill(~finite, 0.0)).masked_fill(bad, math.nan)
