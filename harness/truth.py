"""The FP64 truth: attention in double precision, by its own code.

It shares nothing with the algorithms under test: its own visibility rule, its own softmax (two passes over a whole
row, no running maximum), no `Arithmetic`. One head of one sequence at a time, a block of query rows against all the
keys they can see, so that memory beyond inputs and outputs is rows · S · 8 bytes for a few buffers (`BUFFER_BYTES`).

In the same pass it notes the ranges that the hazards are predicted from (`Ranges`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.operands import Extras, check, slice_rows_keys
from harness.query_rows import Rows
from harness.ranges import COUNTED_PAIRS, Place, Ranges
from harness.spec import AttentionSpec, Shape, rules_in_spec

BUFFER_BYTES = 16 * 2**20  # of one score block; about four such buffers live at a time


@dataclass(frozen=True)
class Truth:
    """`out` `[B, H, L, E]`, `lse` and `row_max` `[B, H, L]`, FP64. `row_max` is over visible keys, without the sink.

    A row that sees no key has out 0, lse and row_max −∞ (lse is the sink's where there is one).
    """

    out: Tensor
    lse: Tensor
    row_max: Tensor
    ranges: Ranges | None = None


@torch.no_grad()
@rules_in_spec
def reference(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec | None = None, *, mask: Tensor | None = None,
    bias: Tensor | None = None, sinks: Tensor | None = None, kv_lens: Tensor | None = None, rows: Rows | None = None,
    ranges: bool = False,
) -> Truth:  # fmt: skip
    """Attention in FP64 on the values given: q `[B, H, L, D]`, k `[B, Hkv, S, D]`, v `[B, Hkv, S, E]`.

    NaN and ±Inf of visible keys and of the query propagate; hidden ones have no effect, and a bias of −∞ hides. A
    visible score of +Inf gives NaN (∞ − ∞); one of −Inf weighs 0 and its value has no effect. A row without any weight
    is 0 with lse −∞, or NaN under `empty_row="nan"`. Runs on q's device in FP64 whatever the inputs' dtype, keeps no
    gradient, and gives the same bits whatever the inputs' strides. `rows`: q holds these rows of a longer call alone,
    each seeing what it sees there. `ranges` also collects the ranges.

    Raises ValueError for shapes, types or options that do not fit.
    """
    spec = spec or AttentionSpec()
    shape, extras = check(q, k, v, spec, mask, bias, sinks, kv_lens, rows)
    out = torch.zeros(shape.tensor("out"), dtype=torch.float64, device=q.device)
    lse = torch.full(out.shape[:3], -math.inf, dtype=torch.float64, device=q.device)
    row_max = lse.clone()
    noted = Ranges() if ranges else None
    for b in range(shape.batch):
        for kv_head in range(shape.Hkv):
            keys, values = _plain(k[b, kv_head]), _plain(v[b, kv_head])
            for h in range(kv_head * shape.group, (kv_head + 1) * shape.group):
                head = _Head(b, h, q[b, h], keys, values, shape, spec, extras, noted)
                for block in _row_blocks(shape):
                    out[b, h, block], lse[b, h, block], row_max[b, h, block] = head.attend(block)
    return Truth(out, lse, row_max, noted)


def _plain(x: Tensor) -> Tensor:
    """An FP64 copy, contiguous and aligned: a GEMM's last bits depend on its operands' strides and addresses."""
    return x.to(torch.float64, memory_format=torch.contiguous_format, copy=True)


def _row_blocks(shape: Shape) -> Iterator[slice]:
    size = _rows_in_block(shape)
    for start in range(0, shape.q_len, size):
        yield slice(start, min(start + size, shape.q_len))


def _rows_in_block(shape: Shape) -> int:
    return max(1, min(256, BUFFER_BYTES // (8 * max(shape.S, 1))))


@dataclass
class _Head:
    """One head of one sequence: q `[L, D]`, k `[S, D]` and v `[S, E]`, the last two in FP64."""

    b: int
    h: int
    q: Tensor
    k: Tensor
    v: Tensor
    shape: Shape
    spec: AttentionSpec
    extras: Extras
    noted: Ranges | None

    def __post_init__(self) -> None:
        self.length = self.shape.S if self.extras.kv_lens is None else int(self.extras.kv_lens[self.b])
        self.shift = self.spec.shift(self.extras.length(self.shape.q_len), self.length)
        self.scale = self.spec.scale_for(self.shape.head_dim)
        self.sink = -math.inf if self.extras.sinks is None else float(self.extras.sinks[self.h].double())
        self.finite = bool(torch.isfinite(self.v).all())

    def attend(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """out `[rows, E]`, lse and row max `[rows]`."""
        keys = self._keys(rows)
        s = self._scores(rows, keys)
        top = s.amax(-1) if s.shape[-1] else s.new_full((s.shape[0],), -math.inf)
        m = top if self.sink == -math.inf else top.clamp(min=self.sink)
        empty = m == -math.inf
        base = m.masked_fill(empty, 0.0)
        p = torch.exp_(s.sub_(base[:, None])) if self.finite else torch.exp(s - base[:, None])
        total = p.sum(-1) + torch.exp(self.sink - base)
        out = (p @ self.v[keys] if self.finite else self._special(p, s, self.v[keys])) / total[:, None]
        lse = base + total.log()
        rule = 0.0 if self.spec.empty_row == "zero" else math.nan
        if self.noted is not None:  # last: it uses p up
            self.noted.note_probs(p, total, self._place(rows, keys), self._counts(rows))
        return (
            out.masked_fill(empty[:, None], rule),
            lse.masked_fill(empty, -math.inf if rule == 0 else rule),
            top,
        )

    def _keys(self, rows: slice) -> slice:
        """Keys inside which lies everything these rows see; `_hidden` decides within it."""
        start, stop = 0, self.length
        first, last = self.extras.ends(rows)
        if self.spec.left is not None:
            start = max(start, first + self.shift - self.spec.left)
        if self.spec.right is not None:
            stop = min(stop, last + self.shift + self.spec.right)
        start = min(start, self.length)
        return slice(start, max(stop, start))

    def _scores(self, rows: slice, keys: slice) -> Tensor:
        """`[rows, keys]`, −∞ where hidden."""
        s = _plain(self.q[rows]) @ self.k[keys].T
        hidden = self._hidden(rows, keys)
        plain = self.spec.softcap is None and self.extras.bias is None
        if self.noted is not None:
            scale = self.scale if plain else None
            self.noted.note_raw(s, hidden, scale, self._place(rows, keys), self._counts(rows))
        s *= self.scale
        if self.spec.softcap is not None:
            s = self.spec.softcap * torch.tanh(s / self.spec.softcap)
        if self.extras.bias is not None:
            s = s + self._of_head(self.extras.bias, rows, keys).double()
        if self.noted is not None and not plain:
            self.noted.note_scores(s, hidden, self._place(rows, keys), self._counts(rows))
        return s if hidden is None else s.masked_fill_(hidden, -math.inf)

    def _place(self, rows: slice, keys: slice) -> Place:
        return Place(self.b, self.h, rows.start, keys.start)

    def _counts(self, rows: slice) -> bool:
        """Whether the histograms take this block: of a large head evenly spaced ones, and the last."""
        every = max(1, self.shape.q_len * self.shape.S // COUNTED_PAIRS)
        block = rows.start // _rows_in_block(self.shape)
        return bool(block % every == 0 or rows.stop == self.shape.q_len)

    def _of_head(self, x: Tensor, rows: slice, keys: slice) -> Tensor:
        """This head's part of a broadcast tensor, `[rows|1, keys|1]`."""
        b, h = min(self.b, x.shape[0] - 1), min(self.h, x.shape[1] - 1)
        return slice_rows_keys(x[b : b + 1, h : h + 1], rows, keys)[0, 0]

    def _hidden(self, rows: slice, keys: slice) -> Tensor | None:
        """Pairs hidden by causality, window, mask or bias; None when there are none. Diagonals of triu and tril count
        from the block's corner, where the offset key − position is `origin`."""
        size = (rows.stop - rows.start, keys.stop - keys.start)
        origin = keys.start - (rows.start + self.shift)
        hidden = None
        if self.extras.rows is not None:
            hidden = self._apart(rows, keys)
        elif self.spec.right is not None and origin + size[1] - 1 > self.spec.right:
            hidden = self._ones(size).triu(self.spec.right - origin + 1)
        if (
            self.extras.rows is None
            and self.spec.left is not None
            and origin - (size[0] - 1) < -self.spec.left
        ):
            before = self._ones(size).tril(-self.spec.left - origin - 1)
            hidden = before if hidden is None else hidden | before
        if self.extras.mask is not None:
            masked = ~self._of_head(self.extras.mask, rows, keys)
            hidden = masked.expand(size) if hidden is None else hidden | masked
        if self.extras.bias is not None:
            biased = self._of_head(self.extras.bias, rows, keys) == -math.inf
            hidden = biased.expand(size) if hidden is None else hidden | biased
        return hidden

    def _apart(self, rows: slice, keys: slice) -> Tensor | None:
        """Pairs hidden by causality or window from rows that are no neighbours."""
        at = self.extras.at(rows, self.q.device)[:, None] + self.shift
        j = torch.arange(keys.start, keys.stop, device=self.q.device)
        hidden = None
        if self.spec.right is not None:
            far = min(
                max(0, int(at[0]) + self.spec.right + 1 - keys.start), len(j)
            )  # what the first row sees, all see
            hidden = torch.zeros(at.shape[0], len(j), dtype=torch.bool, device=j.device)
            hidden[:, far:] = j[far:] > at + self.spec.right
        if self.spec.left is not None:
            before = j < at - self.spec.left
            hidden = before if hidden is None else hidden | before
        return hidden

    def _ones(self, size: tuple[int, int]) -> Tensor:
        return torch.ones(size, dtype=torch.bool, device=self.q.device)

    @staticmethod
    def _special(p: Tensor, s: Tensor, v: Tensor) -> Tensor:
        """P·V where V holds NaN or ±Inf: a key of weight > 0 passes its own on, however small FP64 finds the weight."""
        weighs = (s != -math.inf).double()
        out = p @ v.masked_fill(~torch.isfinite(v), 0.0)
        up, down = ((weighs @ (v == sign * math.inf).double()) > 0 for sign in (1, -1))
        nan = (weighs @ torch.isnan(v).double()) > 0
        out = torch.where(up, math.inf, torch.where(down, -math.inf, out))
        return torch.where(nan | (up & down) | torch.isnan(p).any(-1, keepdim=True), math.nan, out)
