"""Sums, rescales and merges that go wrong, and outputs that are no attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from harness.faults.subject import BLOCKS, Fault, Subject, running_max, weights
from harness.rounding import round_to

SPLITS = (2, 4, 8)  # parts of the keys, as kernels merge them


def rescales(x: Subject) -> Iterator[Fault]:
    """Online softmax whose sums are not what the new max makes of them."""
    n = x.k.shape[2]
    for size in BLOCKS:
        if n <= size:
            break
        end = f", blocks of {size}"
        for both, name in ((True, "sums are"), (False, "O is")):
            what = f"blocks of {size} keys: {name} not rescaled when the max grows"
            yield (
                f"{'no rescale' if both else 'O not rescaled'}{end}",
                what,
                partial(_unscaled, x, size, both),
            )
        yield (
            f"l not rescaled{end}",
            f"blocks of {size} keys: l is not rescaled when the max grows",
            partial(_l_unscaled, x, size),
        )
        for name, factor in (("rescale to base 2", math.log(2)), ("rescale twice", 2.0)):
            what = f"blocks of {size} keys: the {name.replace('rescale', 'rescale is taken')}"
            yield f"{name}{end}", what, partial(_rescaled, x, size, factor)
    for size in BLOCKS:
        if rest := -n % size:
            what = f"the {rest} keys that fill the last block of {size} count in l with scores of 0"
            yield f"padding to {size} in the sum", what, partial(_padded, x, rest)


def _l_unscaled(x: Subject, size: int) -> Tensor:
    s, v = weights(x)
    own = running_max(s, size)
    if x.extras.sinks is not None:
        own = torch.maximum(own, x.extras.sinks.double().view(1, -1, 1, 1))
    top = torch.where(torch.isfinite(own[..., -1:]), own[..., -1:], 0.0)
    l = torch.exp(s - torch.where(torch.isfinite(own), own, 0.0)).sum(-1, keepdim=True)  # noqa: E741
    if x.extras.sinks is not None:
        l = l + 1.0  # noqa: E741
    return torch.exp(s - top) @ v / l.clamp(min=1e-300)


def _rescaled(x: Subject, size: int, factor: float) -> Tensor:
    """Each step's a = exp(factor·(m_old − m_new)), of O and l."""
    s, v = weights(x)
    own, sink = running_max(s, size), None
    if x.extras.sinks is not None:
        sink = x.extras.sinks.double().view(1, -1, 1, 1)
        own = torch.maximum(own, sink)
    own = torch.where(torch.isfinite(own), own, 0.0)
    top = own[..., -1:]
    p = torch.exp(s - own + factor * (own - top))
    l = p.sum(-1, keepdim=True)  # noqa: E741
    if sink is not None:
        l = l + torch.exp(factor * (sink - top))  # noqa: E741
    return p @ v / l.clamp(min=1e-300)


def _padded(x: Subject, count: int) -> Tensor:
    lse = x.truth.lse[..., None]
    return x.truth.out * torch.sigmoid(torch.where(torch.isfinite(lse), lse, 0.0) - math.log(count))


def merges(x: Subject) -> Iterator[Fault]:
    """Parts of the keys attended apart and merged wrongly."""
    n = x.k.shape[2]
    for splits in SPLITS:
        size = -(-n // splits)
        if size == 0 or -(-n // size) != splits:
            continue
        made: list[tuple[Tensor, Tensor, Tensor]] = []

        def parts(
            made: list[tuple[Tensor, Tensor, Tensor]] = made, size: int = size
        ) -> tuple[Tensor, Tensor, Tensor]:
            if not made:
                made.append(_parts(x, size))
            return made[0]

        def merged(weigh: str, parts: Callable[[], tuple[Tensor, Tensor, Tensor]] = parts) -> Tensor:
            return _merged(x, *parts(), weigh)

        end = f", {splits} parts"
        for name, what in _WRONG_WEIGHTS.items():
            yield f"{name}{end}", f"{splits} parts of the keys: {what}", partial(merged, name)
        starts = range(size, n, size)
        extra = x.q.new_zeros(1, 1, 1, n)
        extra[..., [s - 1 for s in starts]] = math.log(2)
        yield (
            f"keys at borders twice{end}",
            "the last key of a part is in the next one too",
            partial(x.run, bias=x.bias() + extra),
        )
        lost = x.seen.expand(*x.seen.shape[:3], n).clone()
        lost[..., list(starts)] = False
        yield f"keys at borders lost{end}", "the first key of a part is lost", partial(x.over, lost)


_WRONG_WEIGHTS = {
    "parts averaged": "they are averaged with equal weights",
    "weights one part off": "each takes the lse of the next one",
    "max left out of lse": "they are weighed by l without their max",
    "lse to base 2": "a lse to base e is merged as one to base 2",
    "lse in bf16": "their lse is stored in BF16",
    "lse in fp16": "their lse is stored in FP16",
    "partials in bf16": "their outputs are stored in BF16",
    "partials in fp16": "their outputs are stored in FP16",
}


def _parts(x: Subject, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs `[parts, B, H, L, E]`, lse and max `[parts, B, H, L, 1]` of parts of `size` keys, the sink in none."""
    s, v = weights(x)
    outs, lses, tops = [], [], []
    for first in range(0, s.shape[-1], size):
        own, values = s[..., first : first + size], v[:, :, first : first + size]
        lse = torch.logsumexp(own, -1, keepdim=True)
        p = torch.where(torch.isfinite(lse), torch.exp(own - lse.nan_to_num(0.0, 0.0, 0.0)), 0.0)
        outs.append(p @ values)
        lses.append(lse)
        tops.append(own.amax(-1, keepdim=True))
    return torch.stack(outs), torch.stack(lses), torch.stack(tops)


def _merged(x: Subject, outs: Tensor, lse: Tensor, top: Tensor, how: str) -> Tensor:
    for fmt in ("bf16", "fp16"):
        if how == f"lse in {fmt}":
            lse = round_to(lse, fmt)
        if how == f"partials in {fmt}":
            outs = round_to(outs, fmt)
    if how == "weights one part off":
        lse = lse.roll(-1, 0)
    elif how == "max left out of lse":
        lse = torch.where(torch.isfinite(lse), lse - top, -math.inf)
    elif how == "parts averaged":
        lse = torch.where(torch.isfinite(lse), 0.0, -math.inf)
    elif how == "lse to base 2":
        lse = lse * math.log(2)
    if x.extras.sinks is not None:
        sink = x.extras.sinks.double().view(1, 1, -1, 1, 1).expand_as(lse[:1])
        lse, outs = torch.cat([lse, sink]), torch.cat([outs, torch.zeros_like(outs[:1])])
    most = lse.amax(0, keepdim=True)
    w = torch.exp(lse - torch.where(torch.isfinite(most), most, 0.0))
    return (w * outs).sum(0) / w.sum(0).clamp(min=1e-300)


def _unscaled(x: Subject, size: int, both: bool) -> Tensor:
    """Online softmax that forgets a = exp(m_old − m_new) for O, or for O and l."""
    s, v = weights(x)
    own, sink = running_max(s, size), None
    if x.extras.sinks is not None:  # the first of all keys: the running max begins with it
        sink = x.extras.sinks.double().view(1, -1, 1, 1)
        own = torch.maximum(own, sink)
    top = torch.where(torch.isfinite(own[..., -1:]), own[..., -1:], 0.0)
    p = torch.exp(s - torch.where(torch.isfinite(own), own, 0.0))
    l = (p if both else torch.exp(s - top)).sum(-1, keepdim=True)  # noqa: E741
    if sink is not None:
        l = l + ((sink > -math.inf).double() if both else torch.exp(sink - top))  # noqa: E741
    return p @ v / l.clamp(min=1e-300)


def nothing(x: Subject) -> Iterator[Fault]:
    yield "all zeros", "the output is zero", lambda: torch.zeros_like(x.truth.out)


def arithmetic(x: Subject) -> Iterator[Fault]:
    o, truth = x.truth.out, x.truth
    l = torch.exp(truth.lse - truth.row_max)[..., None]  # noqa: E741
    l = torch.where(torch.isfinite(l), l, 1.0)  # noqa: E741
    what = "the denominator holds one exp(0) too many, as softmax off by one does"
    yield "off-by-one softmax", what, partial(_one_more, x)
    yield "not normalised", "the sum over keys is not divided by the denominator", lambda: o * l
    yield "normalised twice", "the sum over keys is divided by the denominator twice", lambda: o / l
    yield "mean of V", "the output is the mean of the visible values", lambda: _mean(x)
    yield "mean of all V", "the output is the mean of all values, hidden ones too", lambda: _mean_of_all(x)
    yield "sign of the output", "the output has the other sign", lambda: -o
    yield "hard max", "the output is the value of the largest score", lambda: _hard_max(x)
    yield "copy of V", "row i is value i", lambda: _value_rows(x)


def _one_more(x: Subject) -> Tensor:
    lse = torch.where(torch.isfinite(x.truth.lse), x.truth.lse, 0.0)[..., None]
    return x.truth.out * torch.sigmoid(lse)


def _mean(x: Subject) -> Tensor:
    return x.over(x.seen, q=torch.zeros_like(x.q), bias=None, sinks=None)


def _mean_of_all(x: Subject) -> Tensor:
    v = x.v.repeat_interleave(x.group, 1)
    return v.mean(2, keepdim=True).expand_as(x.truth.out) if v.shape[2] else x.truth.out


def _hard_max(x: Subject) -> Tensor:
    s, v = weights(x)
    return (
        (torch.nn.functional.one_hot(s.argmax(-1), s.shape[-1]).double() @ v) if s.shape[-1] else x.truth.out
    )


def _value_rows(x: Subject) -> Tensor:
    v = x.v.repeat_interleave(x.group, 1)
    index = (x.start + torch.arange(x.q.shape[2], device=v.device)).clamp(max=max(v.shape[2] - 1, 0))
    return v[:, :, index] if v.shape[2] else torch.zeros_like(x.truth.out)
