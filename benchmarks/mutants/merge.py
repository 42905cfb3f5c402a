"""Wrong merges: split-KV parts, their weights, edges and precision."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.mutants.attention import Attention
from benchmarks.mutants.table import Edit, Family
from harness.rounding import round_to

FAMILY = Family("merge")
add = FAMILY.add
SPLIT = "split/full split/causal"


def _weights(change: Any) -> Edit:
    return {"weights": lambda self, lses: change(self, lses)}


def _parts(change: Any) -> Edit:
    return {"parts": lambda self: change(Attention.parts(self))}


def _mean(self: Attention, lses: Tensor) -> Tensor:
    return (lses > -math.inf).to(lses)


def _of_next(self: Attention, lses: Tensor) -> Tensor:
    return Attention.weights(self, lses.roll(-1, 0))


def _l_of_parts(self: Attention, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """lse = log l: the max is left out."""
    m, l, o = self.stream(rows, keys, keys.stop - keys.start)
    out, _ = self.divided((m, l, o))
    return out, l.log()[..., 0]


def _partial_in(fmt: str) -> Edit:
    def partial(self: Attention, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        o, lse = Attention.partial(self, rows, keys)
        return round_to(o, fmt), lse

    return {"partial": partial}


def _lse_in(fmt: str) -> Edit:
    return _weights(lambda self, lses: Attention.weights(self, round_to(lses, fmt)))


def _sink_each(self: Attention, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """Every part has the sink in its denominator."""
    o, lse = Attention.partial(self, rows, keys)
    sink = self.sink()
    assert sink is not None
    total = torch.logaddexp(lse, sink[..., 0].expand_as(lse))
    return o * torch.exp(lse - total)[..., None], total


def _sink_is_in(self: Attention, lses: Tensor) -> Tensor:
    w = Attention.weights(self, lses)
    w[-1] = 0.0
    return w


def _last_lse(self: Attention, lses: Tensor) -> Tensor:
    return lses[-1]


# fmt: off
add("parts averaged", "parts are averaged with equal weights", SPLIT, _weights(_mean),
    "parts averaged, 4 parts")
add("weights one part off", "parts take the lse of the next one", SPLIT, _weights(_of_next),
    "weights one part off, 4 parts")
add("max left out of lse", "parts are weighed by l without their max", SPLIT, {"partial": _l_of_parts},
    "max left out of lse, 4 parts")
add("lse to base 2", "a lse to base e is merged as one to base 2", SPLIT,
    _weights(lambda self, lses: torch.exp2(lses - lses.amax(0).masked_fill(lses.amax(0) == -math.inf, 0.0))),
    "lse to base 2, 4 parts")
add("last part lost", "the last part is not merged", SPLIT, _parts(lambda p: p[:-1]), "last block of 64 lost")
add("part merged twice", "the first part is merged twice", SPLIT, _parts(lambda p: [p[0], *p]),
    "first block of 64 twice")
add("key at the border twice", "the last key of a part is in the next one too", SPLIT,
    _parts(lambda p: [p[0], *(slice(x.start - 1, x.stop) for x in p[1:])]), "keys at borders twice, 4 parts")
add("key at the border lost", "the first key of a part is lost", SPLIT,
    _parts(lambda p: [p[0], *(slice(x.start + 1, x.stop) for x in p[1:])]), "keys at borders lost, 4 parts")
add("partials in BF16", "partial outputs are stored in BF16", "split/full split/mean split/causal",
    _partial_in("bf16"), "partials in bf16, 4 parts", random=True)
add("partials in FP16", "partial outputs are stored in FP16", "split/full split/mean", _partial_in("fp16"),
    "partials in fp16, 4 parts", random=True)
add("lse in BF16", "lse of the parts is stored in BF16", "split/full split/causal", _lse_in("bf16"),
    "lse in bf16, 4 parts", random=True)
add("lse in FP16", "lse of the parts is stored in FP16", "split/full split/causal", _lse_in("fp16"),
    "lse in fp16, 4 parts", random=True)
add("sink in every part", "every part counts the sink", "split/sinks",
    {"partial": _sink_each, "weights": _sink_is_in}, "sink twice; sink")
add("lse not merged", "the lse that is returned is the last part's", SPLIT, {"merged_lse": _last_lse}, of_lse=True)
add("lse returned to base 2", "the lse that is returned is to base 2", SPLIT,
    {"merged_lse": lambda self, lses: Attention.merged_lse(self, lses) / math.log(2)}, of_lse=True)
# fmt: on
