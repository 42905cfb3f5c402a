"""The cache that `decode` keeps."""

from __future__ import annotations

import torch
from torch import Tensor

PAGE = 16  # tokens


class Pages:
    """A paged cache: token t in slot t mod 16 of block table[t // 16], blocks in shuffled order. What is not written
    yet holds another request's tokens."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        pages = -(-k.shape[2] // PAGE)
        self.table = torch.randperm(pages, generator=torch.Generator().manual_seed(5))
        self.pool = [torch.nn.functional.pad(x.flip(2), (0, 0, 0, pages * PAGE - x.shape[2])) for x in (k, v)]

    def slots(self, start: int, stop: int) -> Tensor:
        t = torch.arange(start, stop)
        return self.table[t // PAGE] * PAGE + t % PAGE

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        for pool, new in zip(self.pool, (k, v), strict=True):
            pool[:, :, self.slots(start, start + new.shape[2])] = new

    def read(self, stop: int) -> tuple[Tensor, Tensor]:
        k, v = (pool[:, :, self.slots(0, stop)] for pool in self.pool)
        return k, v
