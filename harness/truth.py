"""The FP64 truth: attention in double precision, by its own code.

It shares nothing with the algorithms under test: its own visibility rule, its own softmax (two passes over a whole
row, no running maximum), no `Arithmetic`. One head of one sequence at a time, a block of query rows against all the
keys they can see, in buffers made once for all blocks (`_Room`): memory beyond inputs and outputs is one head's keys
and values and `BUFFER_BYTES` of scores.

In the same pass it notes the ranges that the hazards are predicted from (`Ranges`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.finite import all_finite
from harness.operands import Extras, check, slice_rows_keys
from harness.query_rows import Rows
from harness.ranges import COUNTED_PAIRS, Place, Ranges
from harness.spec import AttentionSpec, Shape, rules_in_spec

BUFFER_BYTES = (
    16 * 2**20
)  # of the score block; without a mask, a bias or NaN in V nothing of its size lives beside it


CORNERS = 8  # masks of at most 256² places, kept
FUSED = (
    2.0**-64,
    1.0,
)  # |scale| that may go into the product: nothing that matters under- or overflows by it


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
    room = _Room(shape, q.device)
    for b in range(shape.batch):
        for kv_head in range(shape.Hkv):
            room.k.copy_(k[b, kv_head])
            room.v.copy_(v[b, kv_head])
            finite = all_finite(room.v.T)  # as it lies in memory: else aminmax makes a copy
            for h in range(kv_head * shape.group, (kv_head + 1) * shape.group):
                head = _Head(b, h, q[b, h], room, finite, shape, spec, extras, noted)
                for block in _row_blocks(shape):
                    head.attend(block, out[b, h, block], lse[b, h, block], row_max[b, h, block])
    return Truth(out, lse, row_max, noted)


class _Room:
    """Buffers that every block works in. Operands are copied here: a GEMM's last bits depend on their strides and
    addresses, and a fresh allocation for each block costs as much as its exp. V is held by channels, `[E, S]`, from
    which MKL's P·V is a fifth faster."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=torch.float64, device=device)

        rows = min(_rows_in_block(shape), shape.q_len)
        self.k, self._v = empty(shape.S, shape.head_dim), empty(shape.E, shape.S)
        self._q, self._out = empty(rows, shape.head_dim), empty(rows, shape.E)
        self._scores = empty(rows * shape.S)
        self._corners: dict[tuple[int, int, int, bool], Tensor] = {}

    @property
    def v(self) -> Tensor:
        return self._v.T

    def q(self, x: Tensor) -> Tensor:
        return self._q[: x.shape[0]].copy_(x)

    def out(self, rows: int) -> Tensor:
        return self._out[:rows]

    def scores(self, rows: int, keys: int) -> Tensor:
        return self._scores[: rows * keys].view(rows, keys)

    def corner(self, rows: int, keys: int, diagonal: int, upper: bool) -> Tensor:
        """True from a diagonal on, or up to it. Most blocks of a call have the same one."""
        key = (rows, keys, diagonal, upper)
        if key not in self._corners:
            if len(self._corners) == CORNERS:
                self._corners.clear()
            ones = torch.ones(rows, keys, dtype=torch.bool, device=self.k.device)
            self._corners[key] = ones.triu_(diagonal) if upper else ones.tril_(diagonal)
        return self._corners[key]


def _row_blocks(shape: Shape) -> Iterator[slice]:
    size = _rows_in_block(shape)
    for start in range(0, shape.q_len, size):
        yield slice(start, min(start + size, shape.q_len))


def _rows_in_block(shape: Shape) -> int:
    return max(1, min(256, BUFFER_BYTES // (8 * max(shape.S, 1))))


Hidden = tuple[slice, Tensor]  # some columns of a block, and which of their places are hidden


def _fill(s: Tensor, hidden: list[Hidden], value: float) -> Tensor:
    for columns, where in hidden:
        s[:, columns].masked_fill_(where, value)
    return s


def _exact(scale: float) -> bool:
    """Whether a product times it is exact, so that it may go into the product: a power of two, and none so small or
    large that anything that matters under- or overflows by it."""
    return abs(math.frexp(scale)[0]) == 0.5 and 2.0**-64 <= abs(scale) <= 1.0


def _seen(hidden: list[Hidden], s: Tensor, rows: slice) -> int:
    """How many pairs of these rows of a block are not hidden."""
    return s[rows].numel() - sum(int(torch.count_nonzero(x[rows])) for _, x in hidden)


@dataclass
class _Head:
    """One head of one sequence: q `[L, D]`; its keys and values, whether finite or not, are in the room."""

    b: int
    h: int
    q: Tensor
    room: _Room
    finite: bool
    shape: Shape
    spec: AttentionSpec
    extras: Extras
    noted: Ranges | None

    def __post_init__(self) -> None:
        self.length = self.shape.S if self.extras.kv_lens is None else int(self.extras.kv_lens[self.b])
        self.shift = self.spec.shift(self.extras.length(self.shape.q_len), self.length)
        self.scale = self.spec.scale_for(self.shape.head_dim)
        self.sink = -math.inf if self.extras.sinks is None else float(self.extras.sinks[self.h].double())

    def attend(self, rows: slice, out: Tensor, lse: Tensor, row_max: Tensor) -> None:
        """Fills out `[rows, E]`, lse and row max `[rows]`."""
        keys = self._keys(rows)
        s = self._scores(rows, keys)
        if s.shape[-1]:
            torch.amax(s, -1, out=row_max)
        m = row_max if self.sink == -math.inf else row_max.clamp(min=self.sink)
        empty = m == -math.inf if bool((m == -math.inf).any()) else None
        base = m if empty is None else m.masked_fill(empty, 0.0)
        p = s.sub_(base[:, None]).exp_() if self.finite else torch.exp(s - base[:, None])
        total = p.sum(-1)
        if self.sink != -math.inf:
            total += torch.exp(self.sink - base)
        v = self.room.v[keys]
        o = torch.mm(p, v, out=self.room.out(p.shape[0])) if self.finite else self._special(p, s, v)
        torch.div(o, total[:, None], out=out)
        torch.add(base, total.log(), out=lse)
        if empty is not None:
            rule = 0.0 if self.spec.empty_row == "zero" else math.nan
            out.masked_fill_(empty[:, None], rule)
            lse.masked_fill_(empty, -math.inf if rule == 0 else rule)
        if self.noted is not None:  # last: it uses p up
            self.noted.note_probs(p, total, self._counted(rows), self._place(rows, keys))

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
        q, k = self.room.q(self.q[rows]), self.room.k[keys].T
        s = self.room.scores(q.shape[0], k.shape[1])
        hidden = self._hidden(rows, keys)
        plain = self.spec.softcap is None and self.extras.bias is None
        fused = plain and _exact(self.scale)
        if fused:
            torch.addmm(s, q, k, beta=0, alpha=self.scale, out=s)
        else:
            torch.mm(q, k, out=s)
        noted, at, counted = self.noted, self._place(rows, keys), self._counted(rows)
        if noted is not None:
            seen = _seen(hidden, s, slice(0, s.shape[0])), _seen(hidden, s, counted)
            extremes = noted.note_raw(_fill(s, hidden, 0.0), self.scale if fused else 1.0, seen, at)
        if not fused:
            s *= self.scale
        if self.spec.softcap is not None:
            s.div_(self.spec.softcap).tanh_().mul_(self.spec.softcap)
        if self.extras.bias is not None:
            s += self._of_head(self.extras.bias, rows, keys)
        if noted is not None:
            if self.extras.bias is not None:
                _fill(s, hidden, 0.0)
            if plain and not fused and extremes is not None:
                low, high = sorted(x * self.scale for x in extremes)
                extremes = low, high
            noted.note_scores(s, extremes if plain else None, seen[1], counted, at)
        return _fill(s, hidden, -math.inf)

    def _place(self, rows: slice, keys: slice) -> Place:
        return Place(self.b, self.h, rows.start, keys.start)

    def _counted(self, rows: slice) -> slice:
        """The rows of a block that the histograms take: all, or of a large head evenly spaced ones."""
        length = self.shape.q_len
        every = max(1, min(length, length * self.shape.S // COUNTED_PAIRS))
        return slice((-rows.start - 1) % every, rows.stop - rows.start, every)

    def _of_head(self, x: Tensor, rows: slice, keys: slice) -> Tensor:
        """This head's part of a broadcast tensor, `[rows|1, keys|1]`."""
        b, h = min(self.b, x.shape[0] - 1), min(self.h, x.shape[1] - 1)
        return slice_rows_keys(x[b : b + 1, h : h + 1], rows, keys)[0, 0]

    def _hidden(self, rows: slice, keys: slice) -> list[Hidden]:
        """Pairs hidden by causality, window, mask or bias, none of them twice. Diagonals of triu and tril count from
        the block's corner, where the offset key − position is `origin`."""
        n, width = rows.stop - rows.start, keys.stop - keys.start
        origin = keys.start - (rows.start + self.shift)
        parts: list[Hidden] = []
        right, left = self.spec.right, self.spec.left
        if self.extras.rows is not None:
            if right is not None or left is not None:
                parts.append((slice(0, width), self._apart(rows, keys)))
            right = left = None
        if right is not None and origin + width - 1 > right:
            first = min(width, max(0, right - origin + 1))
            corner = self.room.corner(n, width - first, right - origin + 1 - first, True)
            parts.append((slice(first, width), corner))
        if left is not None and origin - (n - 1) < -left:
            last = max(0, min(width, n - 1 - left - origin))
            parts.append((slice(0, last), self.room.corner(n, last, -left - origin - 1, False)))
        if self.extras.mask is None and self.extras.bias is None:
            return parts
        hidden = torch.zeros(n, width, dtype=torch.bool, device=self.q.device)
        for columns, corner in parts:
            hidden[:, columns] |= corner
        if self.extras.mask is not None:
            hidden |= ~self._of_head(self.extras.mask, rows, keys)
        if self.extras.bias is not None:
            hidden |= self._of_head(self.extras.bias, rows, keys) == -math.inf
        return [(slice(0, width), hidden)]

    def _apart(self, rows: slice, keys: slice) -> Tensor:
        """Pairs hidden by causality or window from rows that are no neighbours."""
        at = self.extras.at(rows, self.q.device)[:, None] + self.shift
        j = torch.arange(keys.start, keys.stop, device=self.q.device)
        hidden = torch.zeros(at.shape[0], len(j), dtype=torch.bool, device=j.device)
        if self.spec.right is not None:
            # What the first row sees, all see.
            far = min(max(0, int(at[0]) + self.spec.right + 1 - keys.start), len(j))
            hidden[:, far:] = j[far:] > at + self.spec.right
        if self.spec.left is not None:
            hidden |= j < at - self.spec.left
        return hidden

    @staticmethod
    def _special(p: Tensor, s: Tensor, v: Tensor) -> Tensor:
        """P·V where V holds NaN or ±Inf: a key of weight > 0 passes its own on, however small FP64 finds the weight."""
        weighs = (s != -math.inf).double()
        out = p @ v.masked_fill(~torch.isfinite(v), 0.0)
        up, down = ((weighs @ (v == sign * math.inf).double()) > 0 for sign in (1, -1))
        nan = (weighs @ torch.isnan(v).double()) > 0
        out = torch.where(up, math.inf, torch.where(down, -math.inf, out))
        return torch.where(nan | (up & down) | torch.isnan(p).any(-1, keepdim=True), math.nan, out)
