"""Faults that are there or not: what the output would be if one thing were done wrong, in FP64.

Each is a name, a sentence, and the wrong output of a call. They are made only when something has failed, to name it;
`harness.directions` has those that come in degrees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.formats import get_format
from harness.lies import seen_keys
from harness.operands import Extras
from harness.recipe import Recipe
from harness.rounding import ulp
from harness.spec import AttentionSpec
from harness.truth import reference

BLOCKS = (16, 32, 64, 128)  # of keys, as kernels take them


class Subject:
    """The call that went wrong: q, k, v in FP64, rules and extras, its truth, and the scales of q, k, v where codes
    have them. Rows may be a part of the call's: `start` is the first of them, `length` how many there are in all."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Extras,
        scales: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
        start: int = 0, length: int | None = None,
    ) -> None:  # fmt: skip
        self.start, self.length = start, q.shape[2] if length is None else length
        self.q, self.k, self.v, self.spec, self.extras, self.scales = q, k, v, spec, extras, scales
        self.truth = reference(q, k, v, spec, **extras.as_options())
        self.seen = seen_keys(q.shape[2], k.shape[2], spec, extras).to(q.device)
        if extras.bias is not None:
            self.seen = self.seen & (extras.bias != -math.inf)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def run(
        self, spec: AttentionSpec | None = None, q: Any = None, k: Any = None, v: Any = None, **extras: Any
    ) -> Tensor:  # fmt: skip
        """The output with some of it replaced."""
        options = {**self.extras.as_options(), **extras}
        q, k, v = (
            mine if given is None else given for mine, given in ((self.q, q), (self.k, k), (self.v, v))
        )
        return reference(q, k, v, spec or self.spec, **options).out

    def over(self, seen: Tensor, **changes: Any) -> Tensor:
        """The output over other visible keys, whatever the rules say."""
        bare = replace(self.spec, causal=False, window=None)
        bias = self.extras.bias
        if bias is not None and "bias" not in changes:
            changes["bias"] = torch.where(bias == -math.inf, 0.0, bias)
        return self.run(bare, mask=seen, kv_lens=None, **changes)

    def bias(self) -> Tensor:
        """The bias, or zeros."""
        b = self.extras.bias
        return self.q.new_zeros(1, 1, 1, 1) if b is None else b.double()


Fault = tuple[str, str, Callable[[], Tensor]]


def faults(x: Subject) -> Iterator[Fault]:
    """Every fault that this call could have."""
    for family in (_scales, _positions, _options, _heads, _blocks, _arithmetic, _storage):
        yield from family(x)


def _scales(x: Subject) -> Iterator[Fault]:
    scale, d = x.spec.scale_for(x.q.shape[3]), max(x.q.shape[3], 1)

    def at(value: float) -> Callable[[], Tensor]:
        return lambda: x.run(replace(x.spec, scale=value))

    if scale != 1:
        yield "scale omitted", "the scores are not scaled", at(1.0)
    yield "scale twice", "the softmax scale is applied twice", at(scale * scale)
    yield "scale 1/D", "the scale is 1/D instead of D^-½", at(1 / d)
    yield "scale √D", "the scale is multiplied instead of divided by √D", at(d**0.5)
    yield "exp2 for exp", "exp is taken to base 2", at(scale * math.log(2))
    yield "log2e twice", "log₂e is applied to scores that exp takes to base e", at(scale * math.log2(math.e))
    yield "sign of scores", "the scores have the other sign", at(-scale)


def _positions(x: Subject) -> Iterator[Fault]:
    spec = x.spec
    if spec.causal:
        yield "not causal", "causality is ignored", lambda: x.run(replace(spec, causal=False))
    else:
        yield "causal", "causality is applied where there is none", lambda: x.run(replace(spec, causal=True))
    if spec.causal or spec.window is not None:
        other = "top-left" if spec.align == "bottom-right" else "bottom-right"
        yield "alignment", f"positions are aligned {other}", partial(_aligned, x, other)
        for side, name in ((spec.left, "left"), (spec.right, "right")):
            if side is not None:
                yield f"{name} + 1", f"one key too many is seen on the {name}", partial(_edge, x, name, 1)
                yield f"{name} − 1", f"one key too few is seen on the {name}", partial(_edge, x, name, -1)
    if spec.window is not None:
        yield "no window", "the window is ignored", lambda: x.run(replace(spec, window=None))


def _aligned(x: Subject, align: str) -> Tensor:
    """The output under the other alignment: of rows of a part, whose positions depend on the rows of the whole."""
    spec, extras = replace(x.spec, align=align), Extras(kv_lens=x.extras.kv_lens)
    seen = seen_keys(x.length, x.k.shape[2], spec, extras)[:, :, x.start : x.start + x.q.shape[2]].to(
        x.q.device
    )
    seen = seen if x.extras.mask is None else seen & x.extras.mask
    return x.over(seen if x.extras.bias is None else seen & (x.extras.bias != -math.inf))


def _edge(x: Subject, side: str, by: int) -> Tensor:
    return x.over(_moved(x, side, by))


def _moved(x: Subject, side: str, by: int) -> Tensor:
    """Visible keys when one side's edge lies one key farther out (`by` 1) or in (−1)."""
    spec, (length, keys) = x.spec, (x.q.shape[2], x.k.shape[2])
    if by > 0:
        left = spec.left if spec.left is None or side == "right" else spec.left + 1
        right = spec.right if spec.right is None or side == "left" else spec.right + 1
        wide = replace(spec, causal=False, window=(left, right))
        return seen_keys(length, keys, wide, x.extras).to(x.q.device)
    inner = x.seen.roll(-1 if side == "right" else 1, -1)
    if keys:
        inner[..., -1 if side == "right" else 0] = False
    return x.seen & inner


def _options(x: Subject) -> Iterator[Fault]:
    spec, extras = x.spec, x.extras
    if spec.softcap is not None:
        yield "no softcap", "the softcap is ignored", lambda: x.run(replace(spec, softcap=None))
    if extras.bias is not None:
        b, scale = extras.bias, spec.scale_for(x.q.shape[3])
        finite = torch.where(torch.isfinite(b), b, 0.0)
        yield "no bias", "the bias is ignored", lambda: x.run(bias=None)
        yield (
            "bias scaled",
            "the bias is scaled with the scores",
            lambda: x.run(bias=b * scale if scale > 0 else b),
        )
        yield (
            "bias unscaled",
            "the bias is divided by the scale",
            lambda: x.run(bias=b / scale if scale > 0 else b),
        )
        yield (
            "sign of bias",
            "the bias has the other sign",
            lambda: x.run(bias=torch.where(torch.isfinite(b), -b, b)),
        )
        yield "bias twice", "the bias is added twice", lambda: x.run(bias=b + finite)
        if b.shape[1] > 1:
            yield "bias of head 0", "all heads take the bias of head 0", lambda: x.run(bias=b[:, :1])
    if extras.mask is not None:
        m = extras.mask
        yield "no mask", "the mask is ignored", lambda: x.run(mask=None)
        yield "mask inverted", "the mask has the other polarity", lambda: x.run(mask=~m)
        if m.shape[1] > 1:
            yield "mask of head 0", "all heads take the mask of head 0", lambda: x.run(mask=m[:, :1])
        if m.shape[0] > 1:
            yield "mask of sequence 0", "all sequences take the mask of the first", lambda: x.run(mask=m[:1])
    if extras.kv_lens is not None:
        yield "no kv_lens", "the sequences' lengths are ignored", lambda: x.run(kv_lens=None)
    if extras.sinks is not None:
        sinks, scale = extras.sinks.double(), spec.scale_for(x.q.shape[3])
        yield "no sink", "the sink is ignored", lambda: x.run(sinks=None)
        yield "sink twice", "the sink is counted twice", lambda: x.run(sinks=sinks + math.log(2))
        yield "sink scaled", "the sink is scaled with the scores", lambda: x.run(sinks=sinks * scale)


def _heads(x: Subject) -> Iterator[Fault]:
    o, k, v, heads = x.truth.out, x.k, x.v, x.k.shape[1]
    if o.shape[1] > 1:
        yield "next head", "each head has its neighbour's output", lambda: o.roll(-1, 1)
        yield "previous head", "each head has its other neighbour's output", lambda: o.roll(1, 1)
        yield "heads swapped", "neighbouring heads are swapped", lambda: _swapped(o)
        yield "heads reversed", "the heads are in reverse order", lambda: o.flip(1)
    if x.group > 1 and heads > 1:
        index = torch.arange(o.shape[1], device=o.device) % heads
        yield (
            "GQA interleaved", "query head h reads kv head h mod Hkv instead of ⌊h / group⌋",
            lambda: x.run(k=k[:, index], v=v[:, index]),
        )  # fmt: skip
    if heads > 1:
        yield "kv head 0", "all heads read kv head 0", lambda: x.run(k=k[:, :1], v=v[:, :1])
        yield "V of another head", "V is taken from the next kv head", lambda: x.run(v=v.roll(-1, 1))
        yield "K of another head", "K is taken from the next kv head", lambda: x.run(k=k.roll(-1, 1))
    if o.shape[0] > 1:
        yield "next sequence", "each sequence has the next one's output", lambda: o.roll(-1, 0)
    if o.shape[2] > 1:
        yield "next row", "each row has the next one's output", lambda: o.roll(-1, 2)
        yield "previous row", "each row has the previous one's output", lambda: o.roll(1, 2)
    half = 1 << max(0, x.q.shape[3] - 1).bit_length() - 1 if x.q.shape[3] > 1 else 0
    if half:
        yield (
            "head_dim cut", f"only the first {half} of {x.q.shape[3]} channels of q and k are read",
            lambda: x.run(_same_scale(x), q=x.q[..., :half], k=k[..., :half]),
        )  # fmt: skip


def _swapped(o: Tensor) -> Tensor:
    even = o.shape[1] // 2 * 2
    return torch.cat(
        [o[:, :even].reshape(o.shape[0], -1, 2, *o.shape[2:]).flip(2).flatten(1, 2), o[:, even:]], 1
    )


def _same_scale(x: Subject) -> AttentionSpec:
    return replace(x.spec, scale=x.spec.scale_for(x.q.shape[3]))


def _blocks(x: Subject) -> Iterator[Fault]:
    n = x.k.shape[2]
    for size in BLOCKS:
        if n <= size:
            break
        last, rest = (n - 1) // size * size, n % size
        places = {"first": slice(0, size), "last": slice(last, n), "second": slice(size, min(2 * size, n))}
        for name, keys in places.items():
            what = f"the {name} block of {size} keys"
            yield f"{name} block of {size} lost", f"{what} is lost", partial(_lost, x, keys)
            yield f"{name} block of {size} twice", f"{what} is counted twice", partial(doubled, x, keys)
        if rest:
            what = f"the last {rest} keys, no whole block of {size}, are lost"
            yield f"tail of {size} lost", what, partial(_lost, x, slice(n - rest, n))
        yield from _misplaced(x, size, last)
        for both, name in ((True, "sums are"), (False, "O is")):
            what = f"blocks of {size} keys: {name} not rescaled when the max grows"
            yield (
                f"{'no rescale' if both else 'O not rescaled'}, blocks of {size}",
                what,
                partial(_unscaled, x, size, both),
            )


def _misplaced(x: Subject, size: int, last: int) -> Iterator[Fault]:
    """Blocks of keys and values that are not where they belong."""
    n = x.k.shape[2]
    if last >= size:
        k, v = (torch.cat([t[:, :, :last], t[:, :, last - size : n - size]], 2) for t in (x.k, x.v))
        what = f"the last block of {size} values is the one before it"
        yield f"stale V block of {size}", what, partial(x.run, v=v)
        what = f"the last block of {size} keys and values is the one before it"
        yield f"stale block of {size}", what, partial(x.run, k=k, v=v)
    k, v = (torch.cat([t[:, :, size:], t[:, :, :size]], 2) for t in (x.k, x.v))
    yield f"V rotated by {size}", f"V is rotated by a block of {size}", partial(x.run, v=v)
    yield f"K rotated by {size}", f"K is rotated by a block of {size}", partial(x.run, k=k)


def _lost(x: Subject, keys: slice) -> Tensor:
    return x.over(without(x, keys))


def without(x: Subject, keys: slice) -> Tensor:
    seen = x.seen.expand(*x.seen.shape[:3], x.k.shape[2]).clone()
    seen[..., keys] = False
    return seen


def doubled(x: Subject, keys: slice) -> Tensor:
    extra = x.q.new_zeros(1, 1, 1, x.k.shape[2])
    extra[..., keys] = math.log(2)
    return x.run(bias=x.bias() + extra)


def _weights(x: Subject) -> tuple[Tensor, Tensor]:
    """Scores −∞ where hidden, `[B, H, L, S]`, and V of every query head."""
    k, v = (t.repeat_interleave(x.group, 1) for t in (x.k, x.v))
    s = x.spec.scale_for(x.q.shape[3]) * (x.q @ k.mT)
    if x.spec.softcap is not None:
        s = x.spec.softcap * torch.tanh(s / x.spec.softcap)
    return (s + x.bias()).masked_fill(~x.seen, -math.inf), v


def cut_p(x: Subject, recipe: Recipe, size: int | None = None) -> Tensor:
    """What the output moves by when P is cut to its format and not rounded: whole rows, or blocks of `size` keys under
    their running max."""
    s, v = _weights(x)
    fmt, late = get_format(recipe.format_of("probs")), recipe.normalise == "late"
    end = x.truth.row_max if late else x.truth.lse
    end = torch.where(torch.isfinite(end), end, 0.0)[..., None]
    top = end
    if size is not None and late:
        top = _running_max(s, size)
        top = torch.where(torch.isfinite(top), top, 0.0)
    p = torch.exp(s - top) * recipe.p_scale
    spacing = ulp(p, fmt)
    moved = torch.floor(p / spacing) - torch.round(p / spacing)  # exact in FP64
    moved = moved * spacing * torch.exp(top - end) / recipe.p_scale
    if not late:
        return moved @ v
    l = torch.exp(x.truth.lse[..., None] - end)  # noqa: E741
    if recipe.row_sum == "after":
        return (moved @ v - x.truth.out * moved.sum(-1, keepdim=True)) / l.clamp(min=1e-300)
    return moved @ v / l.clamp(min=1e-300)


def _running_max(s: Tensor, size: int) -> Tensor:
    """The largest score up to the end of each key's block of `size`."""
    blocks = -(-s.shape[-1] // size)
    padded = torch.nn.functional.pad(s, (0, blocks * size - s.shape[-1]), value=-math.inf)
    running = padded.reshape(*s.shape[:-1], blocks, size).amax(-1).cummax(-1).values
    return running.repeat_interleave(size, -1)[..., : s.shape[-1]]


def _unscaled(x: Subject, size: int, both: bool) -> Tensor:
    """Online softmax that forgets a = exp(m_old − m_new) for O, or for O and l."""
    s, v = _weights(x)
    own, sink = _running_max(s, size), None
    if x.extras.sinks is not None:  # the first of all keys: the running max begins with it
        sink = x.extras.sinks.double().view(1, -1, 1, 1)
        own = torch.maximum(own, sink)
    top = torch.where(torch.isfinite(own[..., -1:]), own[..., -1:], 0.0)
    p = torch.exp(s - torch.where(torch.isfinite(own), own, 0.0))
    l = (p if both else torch.exp(s - top)).sum(-1, keepdim=True)  # noqa: E741
    if sink is not None:
        l = l + ((sink > -math.inf).double() if both else torch.exp(sink - top))  # noqa: E741
    return p @ v / l.clamp(min=1e-300)


def _arithmetic(x: Subject) -> Iterator[Fault]:
    o, truth = x.truth.out, x.truth
    l = torch.exp(truth.lse - truth.row_max)[..., None]  # noqa: E741
    l = torch.where(torch.isfinite(l), l, 1.0)  # noqa: E741
    yield "all zeros", "the output is zero", lambda: torch.zeros_like(o)
    yield "not normalised", "the sum over keys is not divided by the denominator", lambda: o * l
    yield "normalised twice", "the sum over keys is divided by the denominator twice", lambda: o / l
    yield "mean of V", "the output is the mean of the visible values", lambda: _mean(x)
    yield "mean of all V", "the output is the mean of all values, hidden ones too", lambda: _mean_of_all(x)
    yield "sign of the output", "the output has the other sign", lambda: -o
    yield "hard max", "the output is the value of the largest score", lambda: _hard_max(x)
    yield "copy of V", "row i is value i", lambda: _value_rows(x)


def _mean(x: Subject) -> Tensor:
    return x.over(x.seen, q=torch.zeros_like(x.q), bias=None, sinks=None)


def _mean_of_all(x: Subject) -> Tensor:
    v = x.v.repeat_interleave(x.group, 1)
    return v.mean(2, keepdim=True).expand_as(x.truth.out) if v.shape[2] else x.truth.out


def _hard_max(x: Subject) -> Tensor:
    s, v = _weights(x)
    return (
        (torch.nn.functional.one_hot(s.argmax(-1), s.shape[-1]).double() @ v) if s.shape[-1] else x.truth.out
    )


def _value_rows(x: Subject) -> Tensor:
    v = x.v.repeat_interleave(x.group, 1)
    index = (x.start + torch.arange(x.q.shape[2], device=v.device)).clamp(max=max(v.shape[2] - 1, 0))
    return v[:, :, index] if v.shape[2] else torch.zeros_like(x.truth.out)


def _storage(x: Subject) -> Iterator[Fault]:
    for name, t, scale in zip("qkv", (x.q, x.k, x.v), x.scales, strict=True):
        if scale is None:
            continue

        def stored(n: str, value: Tensor) -> Callable[[], Tensor]:
            return partial(x.run, None, **{n: value})

        yield f"{name} not descaled", f"the scale of {name} is not applied", stored(name, t / scale)
        yield f"{name} descaled twice", f"the scale of {name} is applied twice", stored(name, t * scale)
        if scale.shape[1] > 1:
            what = f"all heads take the scale of {name} of head 0"
            yield f"scale of {name} of head 0", what, stored(name, t / scale * scale[:, :1])
