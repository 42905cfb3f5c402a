"""Split-KV attention (flash-decoding): parts of the keys apart, merged by their log-sum-exp.

    part i:  o_i, lse_i = attention over the keys of part i
    m = max_i lse_i      w_i = exp(lse_i − m)      l = Σ w_i
    O = Σ w_i o_i / l    lse = m + ln l

A part without a visible key has o_i = 0, lse_i = −∞ and weight 0; when all are empty the row is 0 with lse −∞. A sink
is one more part, with value 0 and the sink's logit for lse: so it counts once, however many parts there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Block
from harness.attention.algorithm import Algorithm
from harness.attention.naive import attend
from harness.attention.rows import Problem, key_range, sink_logits


def merge_partials(ar: Arithmetic, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """outs `[..., E]` and lses `[...]` of disjoint key sets → those of their union, in the base dtype.

    A part with lse −∞ is left out whatever its out holds, NaN included. A weight that underflows to 0 makes 0·∞ = NaN.
    The sum is stored at `acc`, weights at `rescale`, their sum at `row_sum`, the quotient at `out`. Raises ValueError
    when there are no parts or their numbers differ.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"{len(outs)} outputs and {len(lses)} lses; allowed: one of each per part, at least one part"
        )
    logs = [x.unsqueeze(-1) for x in lses]
    m = torch.stack(logs).amax(0)
    empty = m == -math.inf
    base = m.masked_fill(empty, 0.0)
    o, l = torch.zeros_like(outs[0]), torch.zeros_like(base)
    for part, log in zip(outs, logs, strict=True):
        w = ar.exp(ar.sub(log, base, "shifted"), "rescale")
        o = ar.rescale_add(w, part.masked_fill(log == -math.inf, 0.0), o, "acc")
        l = ar.add(l, w, "row_sum")
    out = ar.cast(o / l.masked_fill(empty, 1.0), "out")
    return out, (m + l.log()).masked_fill(empty, -math.inf).squeeze(-1)


def key_parts(keys: slice, splits: int) -> list[slice]:
    """`splits` parts of equal size, the last ones short or empty."""
    size = -(-(keys.stop - keys.start) // splits)
    edges = [min(keys.start + i * size, keys.stop) for i in range(splits + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def split_kv(ar: Arithmetic, p: Problem, splits: int = 4) -> tuple[Tensor, Tensor]:
    """All rows over `splits` parts of the keys that some of them see."""
    return _split(ar, p, slice(0, p.shape.q_len), splits)


def _split(ar: Arithmetic, p: Problem, rows: slice, splits: int) -> tuple[Tensor, Tensor]:
    bare = replace(p, spec=replace(p.spec, empty_row="zero"), extras=replace(p.extras, sinks=None))
    partial = ar.for_partials()
    outs, lses = [], []
    for keys in key_parts(key_range(p, rows), splits):
        out, lse = attend(partial, bare, rows, keys)
        outs.append(p.fold(out))
        lses.append(p.fold(lse[..., None])[..., 0])
    ar.flops += partial.flops
    sink = sink_logits(ar, p, rows)
    if sink is not None:
        outs.append(torch.zeros_like(outs[0]))
        lses.append(sink[..., 0].expand_as(lses[0]))
    ar.block = Block(rows.start, rows.stop - rows.start)
    out, lse = merge_partials(ar, outs, lses)
    if p.spec.empty_row == "nan":
        empty = lse == -math.inf
        out, lse = out.masked_fill(empty[..., None], math.nan), lse.masked_fill(empty, math.nan)
    return p.unfold(out), p.unfold(lse[..., None])[..., 0]


SPLIT_KV = Algorithm("split_kv", split_kv, _split, options={"splits": 4})
