"""Heads, sequences, rows, channels and blocks of keys that are not where they belong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from harness.faults.subject import BLOCKS, Fault, Subject, softmax, weights
from harness.spec import AttentionSpec


def heads_and_rows(x: Subject) -> Iterator[Fault]:
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
        what = "kv heads are read in reverse order"
        yield "kv heads reversed", what, lambda: x.run(k=k.flip(1), v=v.flip(1))
    if o.shape[0] > 1:
        yield "next sequence", "each sequence has the next one's output", lambda: o.roll(-1, 0)
        k0, v0 = k[:1].expand_as(k), v[:1].expand_as(v)
        yield "cache of sequence 0", "all sequences read the first one's K and V", lambda: x.run(k=k0, v=v0)
        yield "V of sequence 0", "all sequences read the first one's V", lambda: x.run(v=v0)
    if o.shape[2] > 1 and x.neighbours:
        yield "next row", "each row has the next one's output", lambda: o.roll(-1, 2)
        yield "previous row", "each row has the previous one's output", lambda: o.roll(1, 2)
        yield "rows reversed", "the rows are in reverse order", lambda: o.flip(2)
        for size in BLOCKS:
            if size < o.shape[2]:
                what = f"rows of the second {size} have the outputs of the first"
                yield f"rows of the first {size}", what, partial(_repeated_rows, o, size)
    if o.shape[3] > 1:
        yield "last channel zero", "the last channel is not written", lambda: _without_last(o)
        for by in (1, -1):
            yield "channels rotated", "channels are one off", partial(o.roll, by, 3)
        if o.shape[3] % 2 == 0:
            what = "the two halves of the channels are exchanged"
            yield "channel halves swapped", what, partial(o.roll, o.shape[3] // 2, 3)
            what = "neighbouring channels are exchanged, as where pairs are rotated in halves"
            yield "channel pairs swapped", what, lambda: _pairs_swapped(o)
    if k.shape[2] > 1:
        late = {n: torch.cat([t[:, :, 1:2], t[:, :, 1:]], 2) for n, t in (("k", k), ("v", v))}
        what = "the oldest key is overwritten by the next"
        yield "first key is the second", what, lambda: x.run(k=late["k"], v=late["v"])
        for by in (-1, 1):
            yield "V one key off", "V is read one key off", partial(x.run, v=v.roll(by, 2))
        for by in (-1, 1):  # every row sees every key: V the other way
            yield "K one key off", "K is read one key off", partial(x.run, k=k.roll(by, 2))
        yield (
            "V of the last key missing",
            "the key a row stands at counts in the denominator alone",
            partial(_no_last_v, x),
        )
    half = 1 << max(0, x.q.shape[3] - 1).bit_length() - 1 if x.q.shape[3] > 1 else 0
    if half:
        yield (
            "head_dim cut", f"only the first {half} of {x.q.shape[3]} channels of q and k are read",
            lambda: x.run(_same_scale(x), q=x.q[..., :half], k=k[..., :half]),
        )  # fmt: skip


def _repeated_rows(o: Tensor, size: int) -> Tensor:
    rest = o[:, :, size : 2 * size].shape[2]
    return torch.cat([o[:, :, :size], o[:, :, :rest], o[:, :, size + rest :]], 2)


def _pairs_swapped(o: Tensor) -> Tensor:
    return o.reshape(*o.shape[:3], o.shape[3] // 2, 2).flip(4).reshape(o.shape)


def _without_last(o: Tensor) -> Tensor:
    return torch.cat([o[..., :-1], torch.zeros_like(o[..., -1:])], -1)


def _no_last_v(x: Subject) -> Tensor:
    """Each row's last visible key weighs, and its value is 0."""
    s, v = weights(x)
    n = s.shape[-1]
    last = n - 1 - x.seen.expand_as(s).flip(-1).to(torch.int8).argmax(-1, keepdim=True)
    p = softmax(x, s)
    own = torch.gather(p, -1, last)
    return p @ v - own * v.gather(2, last.expand(*last.shape[:-1], v.shape[-1]))


def _swapped(o: Tensor) -> Tensor:
    even = o.shape[1] // 2 * 2
    return torch.cat(
        [o[:, :even].reshape(o.shape[0], -1, 2, *o.shape[2:]).flip(2).flatten(1, 2), o[:, even:]], 1
    )


def _same_scale(x: Subject) -> AttentionSpec:
    return replace(x.spec, scale=x.spec.scale_for(x.q.shape[3]))


def blocks(x: Subject) -> Iterator[Fault]:
    n = x.k.shape[2]
    for size in BLOCKS:
        if n <= size:
            break
        last, rest = (n - 1) // size * size, n % size
        places = {"first": slice(0, size), "last": slice(last, n), "second": slice(size, min(2 * size, n))}
        v = torch.cat([x.v[:, :, :last], torch.zeros_like(x.v[:, :, last:])], 2)
        what = f"the values of the last block of {size} keys are 0, and their weights count"
        yield f"V of the last block of {size} missing", what, partial(x.run, v=v)
        for name, keys in places.items():
            what = f"the {name} block of {size} keys"
            yield f"{name} block of {size} lost", f"{what} is lost", partial(_lost, x, keys)
            yield f"{name} block of {size} twice", f"{what} is counted twice", partial(doubled, x, keys)
        if rest:
            what = f"the last {rest} keys, no whole block of {size}, are lost"
            yield f"tail of {size} lost", what, partial(_lost, x, slice(n - rest, n))
            what = f"the last {rest} keys, no whole block of {size}, count in P·V and not in l"
            yield f"tail of {size} missing in l", what, partial(_not_summed, x, slice(n - rest, n))
        yield from _misplaced(x, size, last)


def _misplaced(x: Subject, size: int, last: int) -> Iterator[Fault]:
    """Blocks of keys and values that are not where they belong."""
    n = x.k.shape[2]
    if last >= size:
        k, v = (torch.cat([t[:, :, :last], t[:, :, last - size : n - size]], 2) for t in (x.k, x.v))
        what = f"the last block of {size} values is the one before it"
        yield f"stale V block of {size}", what, partial(x.run, v=v)
        what = f"the last block of {size} keys and values is the one before it"
        yield f"stale block of {size}", what, partial(x.run, k=k, v=v)
    if n >= 2 * size:
        k, v = (torch.cat([t[:, :, :size], t[:, :, :size], t[:, :, 2 * size :]], 2) for t in (x.k, x.v))
        yield (
            f"stale second V block of {size}",
            f"the second block of {size} values is the first",
            partial(x.run, v=v),
        )
        what = f"the second block of {size} keys and values is the first"
        yield f"stale second block of {size}", what, partial(x.run, k=k, v=v)
        for name, at in (
            (("first", 0), ("last", last - size)) if n > 2 * size else ()
        ):  # else it is a rotation
            what = f"the values of the {name} two blocks of {size} keys are exchanged"
            yield f"{name} V blocks of {size} swapped", what, partial(_exchanged, x, at, size, False)
            what = f"the {name} two blocks of {size} keys and values are exchanged"
            yield f"{name} blocks of {size} swapped", what, partial(_exchanged, x, at, size, True)
    k, v = (torch.cat([t[:, :, size:], t[:, :, :size]], 2) for t in (x.k, x.v))
    yield f"V rotated by {size}", f"V is rotated by a block of {size}", partial(x.run, v=v)
    yield f"K rotated by {size}", f"K is rotated by a block of {size}", partial(x.run, k=k)


def _exchanged(x: Subject, at: int, size: int, both: bool) -> Tensor:
    """Two neighbouring blocks of V, or of K and V, under each other's positions. The second may be cut short."""
    order = torch.arange(x.k.shape[2], device=x.q.device)
    second = order[at + size : at + 2 * size]
    order = torch.cat([order[:at], second, order[at : at + size], order[at + 2 * size :]])
    v = x.v[:, :, order]
    return x.run(k=x.k[:, :, order], v=v) if both else x.run(v=v)


def _lost(x: Subject, keys: slice) -> Tensor:
    return x.over(without(x, keys))


def _not_summed(x: Subject, keys: slice) -> Tensor:
    """The sum over keys as it should be, the denominator without some; a row of these keys alone is left as it is."""
    s, _ = weights(x)
    lost = softmax(x, s)[..., keys].sum(-1, keepdim=True)
    return torch.where(lost < 1, x.truth.out / (1 - lost).clamp(min=1e-300), x.truth.out)


def without(x: Subject, keys: slice) -> Tensor:
    seen = x.seen.expand(*x.seen.shape[:3], x.k.shape[2]).clone()
    seen[..., keys] = False
    return seen


def doubled(x: Subject, keys: slice) -> Tensor:
    extra = x.q.new_zeros(1, 1, 1, x.k.shape[2])
    extra[..., keys] = math.log(2)
    return x.run(bias=x.bias() + extra)


def value_missing(x: Subject, e: Tensor, weight: Tensor) -> tuple[int, Tensor] | None:
    """The key whose own value, as far as it is missing from P·V, explains most of an error `e` weighed by `weight`, and
    what the output moves by where all of it is."""
    s, v = weights(x)
    p = softmax(x, s)
    cross = -((p.mT @ (e * weight)) * v).sum((0, 1, 3))
    power = ((p.square().mT @ weight) * v.square()).sum((0, 1, 3))
    usable = (power > 0) & torch.isfinite(power) & (cross > 0)
    gain = torch.where(usable, cross.square() / power.clamp(min=1e-300), 0.0)
    if not bool(usable.any()):
        return None
    key = int(gain.argmax())
    return key, -p[..., key : key + 1] * v[:, :, key : key + 1]
