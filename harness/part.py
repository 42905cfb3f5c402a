"""A part of a call, small enough to be computed a hundred times: some rows of some heads and sequences.

Many faults take one head's, sequence's or block's numbers for another's, so whole heads and all keys are kept where
they fit. The rows are those at the aligned end, where positions mean what they mean in the whole, or a block that errs
where those do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.directions import Call
from harness.operands import Extras
from harness.quantize import Stored
from harness.query_rows import Rows
from harness.spec import AttentionSpec
from harness.truth import Truth

PAIRS = 2**18  # scores of it
LEAST = 16  # rows of it
LONG, LONG_PAIRS = 2**15, 2**21  # keys of a long context, and scores of a part of one
NORMAL = 2.0  # error² ÷ variance of rows that show nothing; others are looked for that show twice as much


@dataclass(frozen=True)
class Part:
    """Which sequences, query heads, kv heads, rows and keys, and the rule under which their positions are the same."""

    batches: Tensor
    heads: slice
    kv: slice
    rows: slice
    keys: slice
    spec: AttentionSpec
    of: Rows | None = None  # where the call's own rows are some of a longer one

    def number(self, i: int) -> int:
        """What its row i is called in the whole call."""
        i += self.rows.start
        return i if self.of is None else int(self.of.index[i])

    @property
    def key(self) -> str:
        """Equal for equal parts of one call."""
        return f"{self.batches.tolist()} {self.heads} {self.rows} {self.keys}"

    def outputs(self, x: Tensor) -> Tensor:
        """Its part of `[B, H, L, …]`."""
        return x[self.batches][:, self.heads, self.rows]

    def broadcast(self, x: Tensor | None) -> Tensor | None:
        """Its part of `[B|1, H|1, L|1, S|1]`."""
        if x is None:
            return None
        x = x[self.batches] if x.shape[0] > 1 else x
        x = x[:, self.heads] if x.shape[1] > 1 else x
        x = x[:, :, self.rows] if x.shape[2] > 1 else x
        return x[..., self.keys] if x.shape[3] > 1 else x

    def stored(self, x: Stored, name: str) -> Stored:
        """Its part of a stored q, k or v, scales included."""
        heads, tokens = (self.heads, self.rows) if name == "q" else (self.kv, self.keys)

        def cut(t: Tensor) -> Tensor:
            t = t[self.batches] if t.shape[0] > 1 else t
            t = t[:, heads] if t.shape[1] > 1 else t
            return t[:, :, tokens] if t.shape[2] > 1 else t

        return replace(x, codes=cut(x.codes).double(), scale=None if x.scale is None else cut(x.scale))

    def call(self, call: Call) -> Call:
        """The call that it is."""
        extras = call.extras
        own = Extras(
            self.broadcast(extras.mask), self.broadcast(extras.bias),
            None if extras.sinks is None else extras.sinks[self.heads],
            None if extras.kv_lens is None else extras.kv_lens[self.batches],
            None if extras.rows is None else extras.rows.part(self.rows),
        )  # fmt: skip
        out, lse, row_max = (self.outputs(x) for x in (call.truth.out, call.truth.lse, call.truth.row_max))
        truth = Truth(out, lse, row_max)
        k, v = (call.values(n, self.kv)[self.batches][:, :, self.keys] for n in "kv")
        return Call(
            self.outputs(call.q), k, v, self.spec, own, call.recipe, truth, self.outputs(call.variance)
        )


def choose(call: Call, out: Tensor) -> Part:
    """The part in which `out` `[B, H, L, E]` is to be explained: as many rows as fit with all heads, or `LEAST` rows
    of the sequences, then of the neighbouring kv heads, that err most."""
    shape = call.shape
    row = max(1, shape.S)
    if row > LONG:  # one kv head and so few rows that a hundred suspects take a minute
        return of_one_head(call, out, max(1, LONG_PAIRS // (shape.S * shape.group)))
    count = min(shape.q_len, max(LEAST, PAIRS // (row * max(1, shape.batch * shape.heads))))
    share = _share(call, out)
    rows = _rows(call, share, count)
    keys, spec = _keys(call, rows)
    fit = PAIRS // (row * max(1, count))  # heads, of all sequences
    e = (out.double() - call.truth.out)[:, :, rows].square().nan_to_num(0.0, 0.0, 0.0).sum((2, 3))
    batches = e.sum(1).topk(min(shape.batch, max(1, fit // shape.heads))).indices.sort().values
    kv = min(shape.Hkv, max(2, fit // shape.group))
    worst = e[batches].sum(0).reshape(shape.Hkv, shape.group).sum(1)
    first = min(int(worst.argmax()) // kv * kv, shape.Hkv - kv) if worst.numel() else 0
    heads = slice(first * shape.group, (first + kv) * shape.group)
    return Part(batches, heads, slice(first, first + kv), rows, keys, spec, call.extras.rows)


def of_one_head(call: Call, out: Tensor, count: int) -> Part:
    """So many rows of the sequence and kv head that err most, all keys with them."""
    shape = call.shape
    count = min(shape.q_len, count)
    e = (out.double() - call.truth.out).square().nan_to_num(0.0, 0.0, 0.0).sum((2, 3))
    b, h = divmod(int(e.argmax()), shape.heads)
    kv = h // shape.group
    heads = slice(kv * shape.group, (kv + 1) * shape.group)
    rows = _rows(call, _share(call, out), count)
    keys, spec = _keys(call, rows)
    return Part(
        torch.tensor([b], device=call.q.device), heads, slice(kv, kv + 1), rows, keys, spec, call.extras.rows
    )


def _share(call: Call, out: Tensor) -> Tensor:
    """Error² ÷ variance of each row, all heads and sequences, `[L]`."""
    variance = call.variance.nan_to_num(0.0, 0.0, 0.0).sum(-1)
    e = (out.double() - call.truth.out).square().nan_to_num(0.0, 0.0, 0.0).sum(-1)
    ratio = torch.where(variance > 0, e / variance.clamp(min=1e-300), 0.0)
    return ratio.amax((0, 1)) if ratio.numel() else ratio.new_zeros(call.shape.q_len)


def _rows(call: Call, share: Tensor, count: int) -> slice:
    length = call.shape.q_len
    bottom = call.spec.align == "bottom-right"
    rows = slice(length - count, length) if bottom else slice(0, count)
    if count == length or not _movable(call):
        return rows
    worst = int(share.argmax())
    if float(share[worst]) <= 2 * max(NORMAL, float(share[rows].amax())):
        return rows
    start = min(max(0, worst - count // 2), length - count)
    return slice(start, start + count)


def _movable(call: Call) -> bool:
    """Whether rows of the middle can be a call of their own: keys after the last that they see are left out, and the
    last row then meets the last key."""
    spec, extras = call.spec, call.extras
    if extras.rows is not None:  # they keep their positions wherever they are
        return True
    free = spec.left is None and spec.right is None
    return extras.kv_lens is None and (free or spec.right == 0)


def _keys(call: Call, rows: slice) -> tuple[slice, AttentionSpec]:
    shape, spec = call.shape, call.spec
    if call.extras.rows is not None:
        return slice(0, shape.S), spec
    at_end = rows.stop == shape.q_len if spec.align == "bottom-right" else rows.start == 0
    if at_end or (spec.left is None and spec.right is None):
        return slice(0, shape.S), spec
    stop = min(shape.S, max(0, rows.stop + spec.shift(shape.q_len, shape.S)))
    if stop - (rows.stop - rows.start) != rows.start + spec.shift(shape.q_len, shape.S):
        return slice(0, shape.S), spec  # rows beyond the keys
    return slice(0, stop), replace(spec, align="bottom-right")
