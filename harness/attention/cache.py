"""What a KV cache is to a session: append tokens, read those it holds.

`KVCache` (contiguous), `PagedCache` (blocks and tables) and `SlidingCache` (a ring) all are one. Tokens are codes in
the storage formats' own dtypes, kept exactly.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Cache(Protocol):
    """K `[B, Hkv, N, D]` and V `[B, Hkv, N, E]`, token after token."""

    length: int  # tokens appended so far, whether or not they are still held

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held."""

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add tokens `[B, Hkv, n, ·]`. Raises ValueError when they do not fit."""

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The tokens held, oldest first, the last of them token `length` − 1."""


def bits(x: Tensor) -> Tensor:
    """The same memory as integers: indexing does not exist for every 8-bit float on every device."""
    return x.view(_BITS[x.element_size()])


def poisoned(size: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of NaN codes: what is read before it is written shows."""
    code = bits(torch.tensor([float("nan")]).to(dtype)).item()
    return torch.full(size, int(code), dtype=_BITS[dtype.itemsize], device=device).view(dtype)


def as_codes(x: Tensor, name: str, size: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """`x` `[B, Hkv, n, ·]` in `dtype`, exactly; NaN is a code. `size` is the cache's (B, Hkv, width).

    Raises ValueError for another shape, and for a value that `dtype` does not have.
    """
    if x.dim() != 4 or (*x.shape[:2], x.shape[3]) != size:
        want = f"[B, Hkv, n, ·] = [{size[0]}, {size[1]}, n, {size[2]}]"
        raise ValueError(f"{name} is {tuple(x.shape)}; allowed: {want} for this cache")
    codes = x.to(dtype)
    back = codes.to(x.dtype)
    if torch.equal(back, x):
        return codes
    wrong = ~((back == x) | (torch.isnan(back) & torch.isnan(x)))
    if bool(wrong.any()):
        value = float(x[wrong][0])
        raise ValueError(
            f"{name} holds {value!r}, no value of {dtype}; allowed: codes, rounded before they come here"
        )
    return codes
