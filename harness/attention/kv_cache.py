"""A contiguous KV cache: codes in the storage dtype, appended as tokens arrive.

There is no Q cache: step t multiplies q_t alone with every cached k_j, and no later step looks at q_t again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.attention.cache import as_codes


class KVCache:
    """Room for `capacity` tokens of K `[B, Hkv, N, D]` and V `[B, Hkv, N, E]`, in the storage formats' own dtypes."""

    def __init__(
        self, batch: int, heads: int, capacity: int, k_dim: int, v_dim: int,
        k_dtype: torch.dtype, v_dtype: torch.dtype, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self._k = torch.empty(batch, heads, capacity, k_dim, dtype=k_dtype, device=device)
        self._v = torch.empty(batch, heads, capacity, v_dim, dtype=v_dtype, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self._k.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens written so far."""
        return sum(x[:, :, : self.length].numel() * x.element_size() for x in (self._k, self._v))

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add tokens `[B, Hkv, n, ·]`. The codes must be values of the storage dtype, so that storing is exact.

        Raises ValueError when they do not fit the cache or are no such values.
        """
        new_k, new_v = (
            as_codes(new, name, (held.shape[0], held.shape[1], held.shape[3]), held.dtype)
            for name, new, held in (("k", k, self._k), ("v", v, self._v))
        )
        if new_k.shape[2] != new_v.shape[2]:
            raise ValueError(
                f"{new_k.shape[2]} tokens of k and {new_v.shape[2]} of v; allowed: as many of both"
            )
        end = self.length + new_k.shape[2]
        if end > self.capacity:
            raise ValueError(
                f"{k.shape[2]} tokens after {self.length} exceed the cache of {self.capacity}; make a larger one"
            )
        self._k[:, :, self.length : end] = new_k
        self._v[:, :, self.length : end] = new_v
        self.length = end

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All tokens so far, as `dtype`."""
        return self._k[:, :, : self.length].to(dtype), self._v[:, :, : self.length].to(dtype)
