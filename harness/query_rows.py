"""Some query rows of a long call, judged for all of them: which, of how many, and how they were chosen.

A row keeps the number it has in the whole call, and with it its position among the keys. The same rows are taken of
every head and sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.spec import AttentionSpec

TILE = 128  # rows that a kernel takes at a time, or a multiple of it
SHARES = (
    0.125,
    0.125,
    0.25,
)  # of the rows: at both ends, at borders of tiles, worst by the model; the rest is drawn
PROBES = 64  # keys that every row is tried against to find the worst
BLOCK = 2**20  # scores at a time
LEAST = 8


@dataclass(frozen=True)
class Rows:
    """Rows `index` `[R]` (int64, ascending) of the `of` rows of a call. `seed` None: named by the caller. `counts`: how
    many stand at the ends, at borders of tiles, are worst by the model, and are drawn.

    Raises ValueError for an index that is empty, not ascending or not of this call.
    """

    index: Tensor
    of: int
    seed: int | None = None
    counts: tuple[int, int, int, int] = (0, 0, 0, 0)
    ends: tuple[int, int] = field(default=(0, 0), compare=False)

    def __post_init__(self) -> None:
        x = self.index
        whole = isinstance(x, Tensor) and x.dim() == 1 and x.dtype is torch.int64 and x.numel() > 0
        if not whole or not isinstance(self.of, int) or isinstance(self.of, bool):
            raise ValueError(
                "rows are no tensor [R] of int64, R ≥ 1, with their number; allowed: harness.Rows"
            )
        first, last = int(x.min()), int(x.max())
        if first < 0 or last >= self.of or bool((x[1:] <= x[:-1]).any()):
            raise ValueError(
                f"rows are {x.numel()} from {first} to {last}; allowed: ascending numbers, 0 to {self.of - 1}"
            )

    def __len__(self) -> int:
        return self.index.numel()

    def to(self, device: torch.device | str) -> Rows:
        """The same on a device."""
        return Rows(self.index.to(device), self.of, self.seed, self.counts, self.ends)

    def take(self, x: Tensor) -> Tensor:
        """These rows of `[B, H, of, …]`."""
        return x.index_select(2, self.index.to(x.device))

    def part(self, rows: slice) -> Rows:
        """Some of them."""
        return Rows(self.index[rows], self.of)

    def chance(self, size: int) -> float:
        """The probability that one of the drawn rows lies in a run of `size` rows that is none of the rows chosen
        otherwise: what a fault confined to such a run is met with."""
        drawn = self.counts[3]
        pool = self.of - (len(self) - drawn)
        if self.seed is None or drawn == 0:
            return 0.0
        if size + drawn > pool:
            return 1.0
        # log of C(pool − size, drawn) / C(pool, drawn)
        missed = sum(
            sign * math.lgamma(n + 1)
            for sign, n in ((1, pool - size), (-1, pool - size - drawn), (-1, pool), (1, pool - drawn))
        )
        return 1 - math.exp(missed)

    def __str__(self) -> str:
        taken = f"{len(self)} of {self.of} rows per head"
        if self.seed is None:
            return f"{taken}, named by the caller"
        if len(self) == self.of:
            return f"{taken}, seed {self.seed}"
        ends, borders, worst, drawn = self.counts
        how = f"{ends} at both ends, {borders} at borders of {TILE} rows, {worst} worst by the model, {drawn} drawn"
        return f"{taken}, seed {self.seed} ({how})"

    @property
    def unseen(self) -> str:
        """What the others may hide."""
        if len(self) == self.of:
            return ""
        said = "a fault in rows that were not taken is not seen"
        if self.seed is None or not self.counts[3]:
            return said
        size = max(1, self.of // 100)
        return f"{said}; one confined to {size} rows is met with probability {self.chance(size):.2f}"


def check_rows(rows: object, q_len: int) -> None:
    """Raises ValueError unless these are `q_len` rows of a call."""
    if not isinstance(rows, Rows) or len(rows) != q_len:
        given = f"{len(rows)} rows" if isinstance(rows, Rows) else repr(type(rows).__name__)
        raise ValueError(f"rows is {given} and q has {q_len}; allowed: harness.Rows, one for each row of q")


def name_rows(index: Any, of: int) -> Rows:
    """Rows that a caller names. Raises ValueError for what is no list of different rows of the call."""
    try:
        x = torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError):
        x = torch.empty(0)
    if x.dim() != 1 or x.numel() == 0 or x.dtype.is_floating_point or x.dtype is torch.bool:
        raise ValueError(
            f"rows is {index!r:.80}; allowed: a number ≥ {LEAST}, a list of row numbers (integers, at least one),"
            " harness.Rows"
        )
    return Rows(x.to("cpu", torch.int64), of)


@torch.no_grad()
def choose_rows(
    q: Tensor, k: Tensor, spec: AttentionSpec | None = None, *, rows: int = 512, seed: int = 0,
    kv_lens: Tensor | None = None,
) -> Rows:  # fmt: skip
    """`rows` of the rows of q `[B, H, L, D]` over k `[B, Hkv, S, D]`, in four parts.

    The first and the last; those on both sides of borders of tiles, powers of two before others; the worst by the
    model, as far as `PROBES` keys tell: of each head those with the largest |score| (what coarse scores err by) and
    those with the largest Σp² (what the rounding of P errs by); the rest drawn. All rows where they are no more.
    Nothing of the output under test decides. NaN and ±Inf of q and k count as 0.

    Raises ValueError for fewer than 8 rows or a seed that is no integer ≥ 0.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < LEAST:
        raise ValueError(f"rows is {rows!r}; allowed: an integer ≥ {LEAST}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed!r:.80}; allowed: an integer ≥ 0 and < 2**63")
    length = q.shape[2]
    if rows >= length:
        return Rows(torch.arange(length), length, seed, (length, 0, 0, 0), (length, length))
    g = torch.Generator().manual_seed(seed)
    ends, borders, worst = (max(2, int(share * rows)) for share in SHARES)
    chosen: dict[int, None] = {}
    counts = []
    half = ends // 2
    for group, most in (
        ([*range(half), *range(length - (ends - half), length)], ends),
        (_borders(length, g), borders),
        (_worst(q, k, spec or AttentionSpec(), worst, kv_lens, g), worst),
        (torch.randperm(length, generator=g).tolist(), rows),
    ):
        new = list(dict.fromkeys(i for i in group if i not in chosen))[: min(most, rows - len(chosen))]
        chosen.update(dict.fromkeys(new))
        counts.append(len(new))
    index = torch.tensor(sorted(chosen), dtype=torch.int64)
    return Rows(index, length, seed, (counts[0], counts[1], counts[2], counts[3]), (half, ends - half))


def _borders(length: int, g: torch.Generator) -> list[int]:
    """Rows on both sides of tile borders: powers of two from the largest down, then others as drawn."""
    powers = [TILE << n for n in range(40) if TILE << n < length]
    others = (TILE * (1 + torch.randperm(max(0, (length - 1) // TILE), generator=g))).tolist()
    return [i for border in (*reversed(powers), *others) for i in (border - 1, border)]


def _worst(
    q: Tensor, k: Tensor, spec: AttentionSpec, count: int, kv_lens: Tensor | None, g: torch.Generator
) -> list[int]:
    """Rows in turn: the worst of each head by each measure, then the second worst, …"""
    (batch, heads, length, dim), keys = q.shape, k.shape[2]
    if not keys or not dim or not batch:
        return []
    probes = torch.randperm(keys, generator=g)[:PROBES].sort().values.to(q.device)
    size = max(1, BLOCK // len(probes))
    ranked = []
    for b in range(batch):
        n = keys if kv_lens is None else int(kv_lens[b])
        for h in range(heads):
            tried = _finite(k[b, h // (heads // k.shape[1])][probes])
            parts = [
                _measures(_finite(q[b, h, first : first + size]), first, tried, probes, spec, length, n)
                for first in range(0, length, size)
            ]
            ranked += [
                x.topk(min(count, length)).indices.tolist()
                for x in (torch.cat(p) for p in zip(*parts, strict=True))
            ]
    return [row for place in zip(*ranked, strict=True) for row in place]


def _finite(x: Tensor) -> Tensor:
    return x.float().nan_to_num(0.0, 0.0, 0.0)


def _measures(
    q: Tensor, first: int, k: Tensor, at: Tensor, spec: AttentionSpec, length: int, keys: int
) -> tuple[Tensor, Tensor]:
    """The largest |score| and Σp² of each row over the keys it was tried against and sees."""
    s = spec.scale_for(q.shape[1]) * (q @ k.T)
    position = torch.arange(first, first + q.shape[0], device=q.device)[:, None] + spec.shift(length, keys)
    hidden = (at >= keys).expand(s.shape)
    if spec.right is not None:
        hidden = hidden | (at > position + spec.right)
    if spec.left is not None:
        hidden = hidden | (at < position - spec.left)
    low = s.masked_fill(hidden, 0.0).amin(-1)
    top = s.masked_fill_(hidden, -math.inf).amax(-1, keepdim=True)
    p = s.sub_(top.masked_fill(top == -math.inf, 0.0)).exp_()
    total = p.sum(-1)
    # Few tried keys seen say little of Σp²: a row that sees one would always come first.
    seen = s.shape[1] - hidden.sum(-1)
    share = torch.where(seen >= LEAST, p.square().sum(-1) / total.square().clamp(min=1e-30), 0.0)
    return torch.maximum(top[:, 0], -low), share * seen
