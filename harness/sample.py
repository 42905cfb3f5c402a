"""The rows of a large call that twins and directions are computed for.

A fault that moves every row a little shows in some thousand rows as well as in all of them; one that moves a few rows
shows in the yardstick, which looks at every row and element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.spec import Shape

SCORES = 2**22  # of the rows taken; a call with no more is taken whole
ROWS = 32  # neighbouring ones, of all heads and sequences
FEWEST = 4  # blocks
WORST = 4  # of so many blocks one is where the model expects most error


@dataclass(frozen=True)
class Sample:
    """Blocks of query rows, of all heads and sequences, in order. `blocks` None: every row."""

    rows: int
    blocks: tuple[slice, ...] | None = None

    @property
    def count(self) -> int:
        """How many query rows are taken."""
        return self.rows if self.blocks is None else sum(b.stop - b.start for b in self.blocks)

    @property
    def whole(self) -> bool:
        return self.blocks is None

    def slices(self, scores: int) -> tuple[slice, ...] | None:
        """The blocks, for an algorithm that is to run some rows of so many scores alone; None: all at once."""
        if self.blocks is None and self.rows * scores > SCORES and self.rows > ROWS:
            return tuple(slice(i, min(i + ROWS, self.rows)) for i in range(0, self.rows, ROWS))
        return self.blocks

    def take(self, x: Tensor) -> Tensor:
        """The taken rows of `[B, H, L, …]`."""
        return x if self.blocks is None else torch.cat([x[:, :, b] for b in self.blocks], 2)

    def parts(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Slices of at most `size` rows: of all rows, and of those taken."""
        start = 0
        for block in self.blocks or (slice(0, self.rows),):
            for first in range(block.start, max(block.stop, block.start + 1), size):
                last = min(first + size, block.stop)
                yield slice(first, last), slice(start, start + last - first)
                start += last - first


def choose(shape: Shape, variance: Tensor) -> Sample:
    """The first and the last block of rows, those in which `variance` `[B, H, L, E]` expects most relative to the mean
    of its head, and others drawn with a fixed seed. Nothing of the output under test decides."""
    blocks = -(-shape.q_len // ROWS)
    row = max(1, shape.batch * shape.heads * shape.S)
    wanted = max(FEWEST, SCORES // (row * ROWS))
    if wanted >= blocks:
        return Sample(shape.q_len)
    finite = torch.where(torch.isfinite(variance), variance, 0.0).mean(-1)
    share = (finite / finite.mean(-1, keepdim=True).clamp(min=1e-300)).mean((0, 1))
    padded = torch.nn.functional.pad(share, (0, blocks * ROWS - shape.q_len))
    worst = padded.view(blocks, ROWS).mean(-1).topk(math.ceil(wanted / WORST)).indices.tolist()
    drawn = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
    chosen = list(dict.fromkeys([0, blocks - 1, *worst, *drawn]))[:wanted]
    ends = ((n * ROWS, min((n + 1) * ROWS, shape.q_len)) for n in sorted(chosen))
    return Sample(shape.q_len, tuple(slice(*x) for x in ends))
