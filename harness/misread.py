"""Which values were not read as they stand: a block of keys whose V is another's, zeros, or in another order.

The output is linear in V: other values V + X of a block's keys move it by P·X, P the weights of those keys. So X can be
fitted, by least squares over all rows that share the keys, and says whether the block explains the error at all.
Arrangements that kernels get wrong are then tried on the block alone. Wrong keys change weights row by row; where few
of them are wrong, other values can stand for most of that, so that a block whose values are in no known arrangement
may have wrong keys instead, and both are said.

With n keys and r rows a fit explains n/r of any error by chance, which is taken off; fewer than `ROWS`·n rows say
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.directions import Call
from harness.faults.subject import softmax, weights
from harness.part import LONG, of_one_head
from harness.records import Diagnosis
from harness.suspects import Setting, Trial

SIZES = (1, 16, 32, 64, 128)  # keys of a block, as kernels load them
ROWS = 3.0
ENOUGH = 384  # rows for blocks of 128
MOST = 0.99  # of the error that a block must explain, chance and the recipe's own errors taken off
HONEST = 2.0  # error² ÷ variance of the difference of two honest runs
ALL = 0.95  # of what other values at best explain, that an arrangement must
SHIFTS = (1, 2, 4, 8)
LEAST = 1e-9  # of a block's largest weight, relative: keys that nothing reads say nothing


@dataclass(frozen=True, eq=False)
class _Heads:
    """The error of the query heads that share a kv head of a sequence: `p` `[r, S]` and `e` `[r, E]`, each row times
    its weight, V `[S, E]`, and that of the kv heads beside it."""

    p: Tensor
    e: Tensor
    v: Tensor
    beside: list[tuple[str, Tensor]]

    @property
    def energy(self) -> float:
        return float(self.e.square().sum())


def misread(call: Call, out: Tensor, trial: Trial) -> Diagnosis | None:
    """The block of keys whose values were read as others, if one explains the error of `out`. Where the trial's part
    has too few rows to tell, those of one kv head are taken."""
    part, group = trial.setting.part, call.shape.group
    if (part.rows.stop - part.rows.start) * group < ENOUGH and call.shape.S <= LONG:
        part = of_one_head(call, out, -(-ENOUGH // group))
        trial = Trial(Setting(part, call, trial.setting.whole), out)
    heads = [x for x in _heads(trial) if x.energy > 0]
    total = sum(x.energy for x in heads)
    if not total or not heads[0].p.shape[1]:
        return None
    best: tuple[float, slice] | None = None
    for size in SIZES:  # the smallest: a larger block explains what one within it does
        for keys in _blocks(heads, size):
            share = _share(heads, keys, total)
            if share >= MOST and (best is None or share > best[0]):
                best = (share, keys)
        if best is not None:
            break
    if best is None:
        return None
    share, keys = best
    what, explained = _arranged(heads, keys, total, share)
    start, last = keys.start + part.keys.start, keys.stop - 1 + part.keys.start
    if start == last:
        single = what.replace("the keys themselves", "the key itself")
        told = f"the value of key {start} {single.replace('are ', 'is ', 1).replace('have ', 'has ', 1)}"
    else:
        told = f"the values of keys {start} to {last} {what}"
    name = "V of a key misread" if start == last else "V of a block misread"
    return Diagnosis(name, told, 1.0, (explained * trial.total) ** 0.5, explained)


def _heads(trial: Trial) -> Iterator[_Heads]:
    """Rows with one weight each: the mean of its channels'."""
    x, part, whole = trial.subject, trial.setting.part, trial.setting.of
    p, (batch, count) = softmax(x, weights(x)[0]), x.k.shape[:2]
    w = trial.weight.mean(-1, keepdim=True).sqrt()
    p, e = (p * w, trial.e * w)
    for b in range(batch):
        for kv in range(count):
            own = slice(kv * x.group, (kv + 1) * x.group)
            beside = [
                (name, whole.values("v", slice(n, n + 1))[part.batches[b], 0, part.keys])
                for name, by in (("previous", -1), ("next", 1))
                for n in ((part.kv.start + kv + by) % whole.shape.Hkv,)
                if whole.shape.Hkv > 1
            ]
            yield _Heads(p[b, own].flatten(0, 1), e[b, own].flatten(0, 1), x.v[b, kv], beside)


def _blocks(heads: list[_Heads], size: int) -> Iterator[slice]:
    """Blocks of so many keys that may explain most: a single key by what it alone can, others all."""
    n = heads[0].p.shape[1]
    if size >= n:
        return
    if size > 1:
        yield from (slice(at, min(at + size, n)) for at in range(0, n, size))
        return
    gain = sum(_alone(x) for x in heads)
    key = int(torch.as_tensor(gain).argmax())
    yield slice(key, key + 1)


def _alone(x: _Heads) -> Tensor:
    """What each key's own values can explain, `[S]`."""
    power = x.p.square().sum(0)
    cross = (x.p.mT @ x.e).square().sum(-1)
    return torch.where(power > 0, cross / power.clamp(min=1e-300), 0.0)


def _fit(x: _Heads, keys: slice) -> float:
    """What is left of the error with the best other values of these keys."""
    p = x.p[:, keys]
    moved = torch.linalg.lstsq(p, x.e, rcond=1e-12, driver="gelsd").solution
    return float((x.e - p @ moved).square().sum())


def _share(heads: list[_Heads], keys: slice, total: float) -> float:
    """The share of the error that other values of these keys explain, what a fit finds in anything taken off."""
    size, left, chance = keys.stop - keys.start, 0.0, 0.0
    for x in heads:
        p = x.p[:, keys]
        rows = int((p.abs().amax(-1) > LEAST * p.abs().max()).sum()) if p.numel() else 0
        if rows < ROWS * size:
            return 0.0
        left += _fit(x, keys)
        chance += x.energy * size / rows
    noise = HONEST * sum(x.e.numel() for x in heads)
    found, free = 1 - max(left - noise, 0.0) / max(total - noise, 1e-300), chance / total
    return (found - free) / (1 - free)


def _arranged(heads: list[_Heads], keys: slice, total: float, share: float) -> tuple[str, float]:
    """What was read in place of these values, and the share of the error that it explains: the arrangement that
    explains nearly all that any values can."""
    left: dict[str, float] = {}
    for x in heads:
        for name, other in _arrangements(x, keys):
            e = x.e - x.p[:, keys] @ (other - x.v[keys])
            left[name] = left.get(name, 0.0) + float(e.square().sum())
    name = min(left, key=lambda n: left[n])
    if 1 - left[name] / total >= ALL * share:
        return name, 1 - left[name] / total
    return "(or the keys themselves) are not as given, nor rearranged in a way that is known", share


def _arrangements(x: _Heads, keys: slice) -> Iterator[tuple[str, Tensor]]:
    """What kernels read instead, each with the values `[n, E]`. The same names for all heads."""
    v, own, size, n = x.v, x.v[keys], keys.stop - keys.start, x.v.shape[0]
    yield "are taken as 0, and what they weigh counts", 0 * own
    yield "are doubled", 2 * own
    yield "have the other sign", -own
    for by in SHIFTS:
        for sign in (by, -by):
            if size > by:
                yield f"are rotated by {sign} among themselves, or their keys by {-sign}", own.roll(sign, 0)
            index = (torch.arange(keys.start, keys.stop, device=v.device) + sign).clamp(0, n - 1)
            yield f"are those {by} key{'s' * (by > 1)} {'on' if sign > 0 else 'back'}", v[index]
    if size > 1:
        yield "are in reverse order, or their keys are", own.flip(0)
        yield "are all the first of them", own[:1].expand_as(own)
    yield from _channels(own)
    for at in range(0, n - size + 1, size):
        if at != keys.start:
            yield (
                f"are those of key{'s' * (size > 1)} {at}" + f" to {at + size - 1}" * (size > 1),
                v[at : at + size],
            )
    for name, there in x.beside:
        yield f"are those of the {name} kv head", there[keys]


def _channels(own: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same keys with their channels in another order."""
    size, width = own.shape
    if size == width > 1:
        yield "are transposed, key and channel exchanged", own.mT
    if width % 2 == 0:
        yield (
            "have neighbouring channels exchanged",
            own.view(size, width // 2, 2).flip(2).reshape(size, width),
        )
        yield "have the halves of their channels exchanged", own.roll(width // 2, 1)
        for name, part in (("first", slice(0, width // 2)), ("second", slice(width // 2, width))):
            half = own.clone()
            half[:, part] = 0
            yield f"are 0 in the {name} half of their channels", half
    for by in (1, -1):
        yield f"have their channels rotated by {by}", own.roll(by, 1)
    yield "have their channels in reverse order", own.flip(1)
