"""One call to be modelled, and the parts it is worked on in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from harness.finite import all_finite, finite_or_zero
from harness.operands import Extras, row_numbers
from harness.spec import AttentionSpec, Shape

ELEMENTS = 2**20  # of one [rows, keys] buffer; about eight live at a time
LARGE = 2**22  # pairs of a call
BLOCK_KEYS = 2**16  # at a time where FP64 is needed
NEGLIGIBLE = (
    -40.0
)  # e^-40 = 4e-18 of the largest weight: below it a key is taken for weightless, its error for 0
CHUNK = 192  # keys or channels that a CPU SGEMM sums in sequence before it adds the chunk's sum (MKL)


def early(t: Tensor) -> Tensor:
    """How much more a term counts for standing at t ∈ [0, 1) of a sequential sum of b.

    With x_j in order, E Σ (partial sums)² is b·a²/3 + Σ_j x_j²·(b(1 − t_j) − b/3); over the places that is b/6 on the
    mean, which is what exchangeable terms get (`partial_sums`). A term that comes late is given no less.
    """
    return (4 - 6 * t).clamp(min=1.0)


@dataclass(frozen=True)
class Problem:
    """One call: stored values, q in FP64, k and v in any type, heads folded to kv heads, `[N = B·Hkv, G, L, D]` and
    `[N, S, D]`."""

    shape: Shape
    spec: AttentionSpec
    extras: Extras
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor  # of the truth, as its row maximum, `[N, G, L, 1]`
    row_max: Tensor
    scales: tuple[Tensor | None, Tensor | None, Tensor | None]
    dtype: torch.dtype
    spaces: dict[str, Tensor] = field(default_factory=dict)

    def space(self, name: str, *size: int) -> Tensor:
        """Room for a matrix of the block at work, the same for all blocks: fresh memory costs as much as an exp."""
        count = math.prod(size)
        if name not in self.spaces or self.spaces[name].numel() < count:
            self.spaces[name] = torch.empty(count, dtype=self.dtype, device=self.q.device)
        return self.spaces[name][:count].view(size)

    @property
    def large(self) -> bool:
        """Whether its pairs are so many that scores in FP64 would cost as much as the truth."""
        return self.shape.batch * self.shape.heads * self.shape.q_len * self.shape.S > LARGE

    def parts(self) -> Iterator[tuple[Heads, slice]]:
        """Heads and rows that are worked on together: many small heads, or a row block of a large one."""
        n, s = self.k.shape[0], max(self.shape.S, 1)
        heads = max(1, ELEMENTS // max(1, self.shape.group * self.shape.q_len * s))
        rows = max(1, min(256, ELEMENTS // (self.shape.group * s))) if heads == 1 else self.shape.q_len
        for first in range(0, n, heads):
            chunk = Heads(self, slice(first, min(first + heads, n)))
            for start in range(0, self.shape.q_len, max(rows, 1)):
                yield chunk, slice(start, min(start + rows, self.shape.q_len))


def _blocks(x: Tensor) -> Iterator[Tensor]:
    """`[n, keys, width]` in FP64, so many keys at a time that a long context needs no copy of itself."""
    for start in range(0, x.shape[1], BLOCK_KEYS):
        yield x[:, start : start + BLOCK_KEYS].double()


class Heads:
    """Keys and values of some heads, prepared once for all their rows."""

    def __init__(self, p: Problem, part: slice) -> None:
        self.p, self.part = p, part
        self.k, v = p.k[part], p.v[part]
        self.k_finite = all_finite(self.k)
        self.v = finite_or_zero(v)
        n, keys, width = v.shape
        # Σ W (v − ω)² = Σ W v² − 2ω Σ W v + ω² Σ W cancels when v is far from 0: v counts from its mean.
        mean = [x.mean(1, keepdim=True) * (x.shape[1] / keys) for x in _blocks(self.v)]
        self.centre = sum(mean[1:], mean[0]) if mean else self.k.new_zeros(n, 1, width, dtype=torch.float64)
        self.mean_square = (
            (self.low * self.low).mean(1, keepdim=True) if keys else self.low.new_zeros(self.centre.shape)
        )
        lengths = [
            torch.linalg.vector_norm(
                x if self.k_finite else torch.where(torch.isfinite(x), x, 0.0), dim=-1
            ).amax(1)
            for x in _blocks(self.k)
        ]
        longest = torch.stack(lengths).amax(0) if lengths else self.k.new_zeros(1)
        self.longest = longest[:, None, None].to(p.dtype)
        self.index = torch.arange(part.start, part.stop, device=v.device)
        self._corners: dict[tuple[int, int, int], Tensor] = {}

    def corner(self, rows: int, keys: int, diagonal: int) -> Tensor:
        """True from a diagonal on. Most blocks of a head have the same one."""
        key = (rows, keys, diagonal)
        if key not in self._corners:
            ones = torch.ones(rows, keys, dtype=torch.bool, device=self.v.device)
            self._corners = {key: ones.triu_(diagonal)}
        return self._corners[key]

    def _made(self, x: Tensor, width: int, make: Callable[[Tensor], Tensor]) -> Tensor:
        """`make` of blocks of `x` in FP64, kept in the model's type."""
        made = torch.empty(*x.shape[:2], width, dtype=self.p.dtype, device=x.device)
        start = 0
        for block in _blocks(x):
            made[:, start : start + block.shape[1]] = make(block)
            start += block.shape[1]
        return made

    @cached_property
    def repeats(self) -> Tensor:
        """How often a key stands among the keys, on average, FP64 `[n, 1, 1]`. Told apart by a number made of a few
        channels: keys that share these and differ elsewhere are counted as one."""
        distinct = 1 + (row_numbers(self.k).sort(-1).values.diff(dim=-1) != 0).sum(-1)
        return (self.k.shape[1] / distinct.double())[:, None, None]

    @cached_property
    def low(self) -> Tensor:
        """v from its mean."""
        return self._made(self.v, self.v.shape[2], lambda x: x - self.centre)

    @cached_property
    def moments(self) -> Tensor:
        """Squares of `low`, itself, and 1: what one product with weights sums."""
        low = self.low
        return torch.cat([low * low, low, low.new_ones(*low.shape[:-1], 1)], -1)

    @cached_property
    def abs_v(self) -> Tensor:
        return self._made(self.v, self.v.shape[2], torch.abs)

    @cached_property
    def squares(self) -> Tensor:
        return self._made(self.v, self.v.shape[2], torch.square)

    @cached_property
    def gross(self) -> tuple[Tensor, Tensor]:
        """Σ_j |v_jc| and Σ_j v_jc² over all keys, FP64 `[n, 1, E]`."""
        total, squares = (x.sum(1, keepdim=True).double() for x in (self.abs_v, self.squares))
        return total, squares

    @cached_property
    def any_v(self) -> Tensor:
        return (self.gross[0] > 0).double()

    @cached_property
    def finite_k(self) -> Tensor:
        return self._made(
            self.k, self.k.shape[2], lambda x: x if self.k_finite else torch.where(torch.isfinite(x), x, 0.0)
        )

    def scale(self, name: str) -> Tensor | None:
        """Scales of q `[n, G, L|1, 1]`, k or v `[n, L|1, 1]` for these heads."""
        x = self.p.scales["qkv".index(name)]
        if x is None:
            return None
        b, h = self.index // self.p.shape.Hkv, self.index % self.p.shape.Hkv
        if name == "q":
            x = x.expand(self.p.shape.batch, self.p.shape.heads, *x.shape[2:])
            return x.reshape(x.shape[0], self.p.shape.Hkv, self.p.shape.group, *x.shape[2:])[b, h]
        return x.expand(self.p.shape.batch, self.p.shape.Hkv, *x.shape[2:])[b, h]

    def scales_rows(self, name: str) -> bool:
        """Whether q or k has a scale that is applied to the scores (one within rows is applied on load)."""
        x = self.p.scales["qkv".index(name)]
        return x is not None and x.shape[3] == 1
