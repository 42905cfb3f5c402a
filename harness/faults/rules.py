"""Scales, positions and options that are taken otherwise than the rule says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from harness.faults.subject import BLOCKS, Fault, Subject, scores, softmax, weights
from harness.lies import seen_keys
from harness.operands import Extras


def scales(x: Subject) -> Iterator[Fault]:
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


def positions(x: Subject) -> Iterator[Fault]:
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
    if spec.left is not None and spec.right != spec.left:
        both = replace(spec, causal=False, window=(spec.left, spec.left))
        yield "window on both sides", "the window reaches as far right as left", lambda: x.run(both)
    if not bool(x.seen.all()):
        what = "the softmax is of hidden keys too, which are left out of P·V alone"
        yield "masked after softmax", what, partial(_masked_after, x)
        what = "hidden scores are multiplied by 0, not lowered to −∞"
        yield "mask multiplied", what, partial(_multiplied, x)


def _aligned(x: Subject, align: str) -> Tensor:
    """The output under the other alignment: of rows of a part, whose positions depend on the rows of the whole."""
    spec, extras = replace(x.spec, align=align), Extras(kv_lens=x.extras.kv_lens, rows=x.extras.rows)
    count = x.q.shape[2]
    length, start = (x.length, x.start) if extras.rows is None else (count, 0)
    seen = seen_keys(length, x.k.shape[2], spec, extras)[:, :, start : start + count].to(x.q.device)
    seen = seen if x.extras.mask is None else seen & x.extras.mask
    return x.over(seen if x.extras.bias is None else seen & (x.extras.bias != -math.inf))


def _edge(x: Subject, side: str, by: int) -> Tensor:
    return x.over(_moved(x, side, by))


def _moved(x: Subject, side: str, by: int) -> Tensor:
    """Visible keys when one side's edge lies one key farther out (`by` 1) or in (−1)."""
    spec = x.spec
    if by < 0:
        edge = x.keys <= x.positions + (spec.right or 0) - 1
        return x.seen & (edge if side == "right" else x.keys >= x.positions - (spec.left or 0) + 1)
    left = spec.left if spec.left is None or side == "right" else spec.left + 1
    right = spec.right if spec.right is None or side == "left" else spec.right + 1
    wide = replace(spec, causal=False, window=(left, right))
    seen = seen_keys(x.q.shape[2], x.k.shape[2], wide, x.extras).to(x.q.device)
    return seen if x.extras.bias is None else seen & (x.extras.bias != -math.inf)


def tiles(x: Subject) -> Iterator[Fault]:
    """Blocks of the score matrix on and below the diagonal."""
    if x.spec.right is None:
        return
    for size in BLOCKS:
        if size >= x.k.shape[2]:
            break
        tile, own = x.keys // size, x.positions.div(size, rounding_mode="floor")
        what = f"tiles of {size} × {size} on the diagonal are not masked"
        shown = x.seen | ((tile == own) & (x.keys < x.lengths))
        yield f"diagonal tiles of {size} not masked", what, partial(x.over, shown)
        what = f"in tiles of {size} × {size} on the diagonal, hidden keys count in the softmax and not in P·V"
        yield "masked after softmax", what, partial(_masked_after, x, shown)
        what = f"the {size} keys of a row's own page are the oldest page's"
        yield f"stale page of {size}", what, partial(_stale_page, x, size)
        what = f"the {size} keys before a row's own tile are lost"
        yield f"tile of {size} before the diagonal lost", what, partial(x.over, x.seen & (tile != own - 1))


def _stale_page(x: Subject, size: int) -> Tensor:
    """Keys and values of the block in which a row stands are those of the first block."""
    s, v = scores(x)
    own = x.positions.div(size, rounding_mode="floor")
    index = torch.where(x.keys // size == own, x.keys % size, x.keys).expand_as(s)
    p = softmax(x, s.gather(-1, index).masked_fill(~x.seen, -math.inf))
    return torch.zeros_like(p).scatter_add_(-1, index, p) @ v


def _masked_after(x: Subject, counted: Tensor | None = None) -> Tensor:
    """The softmax is of all keys, or of those `counted`, and hidden ones are left out of P·V alone."""
    s, v = scores(x)
    s = s if counted is None else s.masked_fill(~counted, -math.inf)
    return (softmax(x, s) * x.seen) @ v


def _multiplied(x: Subject) -> Tensor:
    """Hidden keys weigh exp(0)."""
    s, v = scores(x)
    return softmax(x, s * x.seen) @ v


def leak(x: Subject) -> Tensor:
    """What the output moves by, to first order, per unit of the weight that hidden keys keep."""
    s, v = scores(x)
    lse = torch.where(torch.isfinite(x.truth.lse), x.truth.lse, math.inf)[..., None]
    p = torch.exp((s - lse).clamp(max=20.0)).masked_fill(x.seen, 0.0)
    return p @ v - p.sum(-1, keepdim=True) * x.truth.out


def options(x: Subject) -> Iterator[Fault]:
    spec, extras = x.spec, x.extras
    if spec.softcap is not None:
        yield "no softcap", "the softcap is ignored", lambda: x.run(replace(spec, softcap=None))
        clamp, bare = (lambda s, cap: s.clamp(-cap, cap)), (lambda s, cap: torch.tanh(s / cap))
        yield "softcap as a clamp", "scores are clamped to ± the softcap", partial(_capped, x, clamp)
        what = "tanh(s / softcap) is not multiplied by the softcap"
        yield "softcap not multiplied back", what, partial(_capped, x, bare)
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
        if b.shape[2] == b.shape[3] > 1:
            yield "bias transposed", "row and key of the bias are exchanged", lambda: x.run(bias=b.mT)
        if b.shape[1] > 1:
            yield "bias of head 0", "all heads take the bias of head 0", lambda: x.run(bias=b[:, :1])
    if extras.mask is not None:
        m = extras.mask
        yield "no mask", "the mask is ignored", lambda: x.run(mask=None)
        yield "mask inverted", "the mask has the other polarity", lambda: x.run(mask=~m)
        if m.shape[3] > 1:
            for by in (1, -1):
                yield "mask one key off", "the mask is shifted by one key", partial(_shifted, x, by)
        if m.shape[2] == m.shape[3] > 1:
            yield "mask transposed", "row and key of the mask are exchanged", lambda: x.run(mask=m.mT)
        if m.shape[1] > 1:
            yield "mask of head 0", "all heads take the mask of head 0", lambda: x.run(mask=m[:, :1])
        if m.shape[0] > 1:
            yield "mask of sequence 0", "all sequences take the mask of the first", lambda: x.run(mask=m[:1])
    if extras.kv_lens is not None:
        n = extras.kv_lens
        yield "no kv_lens", "the sequences' lengths are ignored", lambda: x.run(kv_lens=None)
        for by, name in ((1, "kv_lens + 1"), (-1, "kv_lens − 1")):
            what = f"each sequence is taken for one key {'longer' if by > 0 else 'shorter'}"
            yield name, what, partial(x.run, kv_lens=(n + by).clamp(0, x.k.shape[2]))
        if len(n) > 1:
            what = "all sequences have the first one's length"
            yield "kv_lens of sequence 0", what, lambda: x.run(kv_lens=n[:1].expand_as(n).clone())
    if extras.sinks is not None:
        sinks, scale = extras.sinks.double(), spec.scale_for(x.q.shape[3])
        yield "no sink", "the sink is ignored", lambda: x.run(sinks=None)
        yield "sink twice", "the sink is counted twice", lambda: x.run(sinks=sinks + math.log(2))
        yield "sink scaled", "the sink is scaled with the scores", lambda: x.run(sinks=sinks * scale)
        if len(sinks) > 1:
            what = "all heads take the sink of head 0"
            yield "sink of head 0", what, lambda: x.run(sinks=sinks[:1].expand_as(sinks).clone())
            what = "the heads' sinks are in reverse order"
            yield "sinks reversed", what, lambda: x.run(sinks=sinks.flip(0))
            yield (
                "sink of another head",
                "each head takes the next one's sink",
                lambda: x.run(sinks=sinks.roll(-1)),
            )
        what = "the sink is a key of value 1 and not 0"
        yield "sink with a value", what, partial(_valued_sink, x)


def _capped(x: Subject, cap: Callable[[Tensor, float], Tensor]) -> Tensor:
    s, v = weights(x, cap)
    return softmax(x, s) @ v


def _shifted(x: Subject, by: int) -> Tensor:
    mask = x.extras.mask
    assert mask is not None
    return x.run(mask=mask.roll(by, 3))


def _valued_sink(x: Subject) -> Tensor:
    s, v = weights(x)
    p = softmax(x, s)
    return p @ v + 1 - p.sum(-1, keepdim=True)
