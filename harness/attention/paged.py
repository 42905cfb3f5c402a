"""A paged KV cache: token t of sequence b lies in slot t mod n of physical block table[b, ⌊t / n⌋].

Blocks come from one pool by a free list (Kwon et al. 2023, PagedAttention). Block 0 is never handed out: entries of
the table that are not in use point to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.attention.cache import as_codes, bits, poisoned


class PagedCache:
    """Room for `capacity` tokens of each of `batch` sequences, `block_size` tokens to a block.

    The pool starts as NaN codes, and only written tokens are ever gathered: neither the unwritten tail of a last block
    nor a stale table entry is read. `seed` shuffles the free list, so that tables are not the identity; None takes
    blocks in order. Raises ValueError for a `block_size` that is no integer ≥ 1.
    """

    def __init__(
        self, batch: int, heads: int, capacity: int, k_dim: int, v_dim: int,
        k_dtype: torch.dtype, v_dtype: torch.dtype, device: torch.device | str = "cpu",
        *, block_size: int = 16, seed: int | None = None,
    ) -> None:  # fmt: skip
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size is {block_size!r}; allowed: an integer ≥ 1")
        self.block_size, self.capacity, self.length = block_size, capacity, 0
        per_sequence = -(-capacity // block_size)
        blocks = batch * per_sequence
        self._sizes = {"k": (batch, heads, k_dim), "v": (batch, heads, v_dim)}
        self.k_pool = poisoned((blocks + 1, block_size, heads, k_dim), k_dtype, device)
        self.v_pool = poisoned((blocks + 1, block_size, heads, v_dim), v_dtype, device)
        self.table = torch.zeros(batch, per_sequence, dtype=torch.int64, device=device)
        order = (
            torch.arange(blocks)
            if seed is None
            else torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
        )
        self._free: list[int] = (order + 1).flip(0).tolist()

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens written so far."""
        each = sum(x[0, 0].numel() * x.element_size() for x in (self.k_pool, self.v_pool))
        return self.table.shape[0] * self.length * each

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add tokens `[B, Hkv, n, ·]` to every sequence; new blocks come from the free list.

        Raises ValueError when they do not fit the cache or are no codes of its dtypes.
        """
        codes = {
            "k": as_codes(k, "k", self._sizes["k"], self.k_pool.dtype),
            "v": as_codes(v, "v", self._sizes["v"], self.v_pool.dtype),
        }
        if k.shape[2] != v.shape[2]:
            raise ValueError(f"k has {k.shape[2]} tokens and v {v.shape[2]}; allowed: one number for both")
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(
                f"{k.shape[2]} tokens after {self.length} exceed the cache of {self.capacity}; make a larger one"
            )
        self._allocate(end)
        place = self._place(self.length, end)
        for pool, new in ((self.k_pool, codes["k"]), (self.v_pool, codes["v"])):
            bits(pool)[place] = bits(new.transpose(1, 2).contiguous())
        self.length = end

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All tokens so far, as `dtype`, contiguous."""
        k, v = (self._gather(pool).to(dtype).contiguous() for pool in (self.k_pool, self.v_pool))
        return k, v

    def _gather(self, pool: Tensor) -> Tensor:
        return bits(pool)[self._place(0, self.length)].view(pool.dtype).transpose(1, 2)

    def _place(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Physical block `[B, n]` and slot `[n]` of these tokens."""
        token = torch.arange(start, stop, device=self.table.device)
        return self.table[:, token // self.block_size], token % self.block_size

    def _allocate(self, tokens: int) -> None:
        """Blocks for `tokens` tokens of each sequence: the sequences take turns at the free list."""
        have, need = -(-self.length // self.block_size), -(-tokens // self.block_size)
        for column in range(have, need):
            for sequence in range(self.table.shape[0]):
                self.table[sequence, column] = self._free.pop()
