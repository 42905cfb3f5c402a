"""A sliding KV cache: token t lies in slot t mod w of a ring, so that the last w tokens are held and no others.

A chunk of n queries at positions p … p + n − 1 with a window (left, 0) needs keys p − left … p + n − 1. Once all are
appended that is left + n ≤ w: a ring of exactly left + 1 tokens takes one token a step after it has filled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.attention.cache import as_codes, bits, poisoned
from harness.spec import AttentionSpec


class SlidingCache:
    """The last `window` tokens of K `[B, Hkv, N, D]` and V `[B, Hkv, N, E]`, in the storage formats' own dtypes.

    `length` counts every token appended; `first` is the position of the oldest one held. The ring starts as NaN codes.
    Raises ValueError for a `window` that is no integer ≥ 1.
    """

    def __init__(
        self, batch: int, heads: int, window: int, k_dim: int, v_dim: int,
        k_dtype: torch.dtype, v_dtype: torch.dtype, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window is {window!r}; allowed: an integer ≥ 1")
        self.window, self.length = window, 0
        self._k = poisoned((batch, heads, window, k_dim), k_dtype, device)
        self._v = poisoned((batch, heads, window, v_dim), v_dtype, device)

    @property
    def first(self) -> int:
        """Position of the oldest token held."""
        return max(0, self.length - self.window)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held."""
        held = self.length - self.first
        return sum(x[:, :, :held].numel() * x.element_size() for x in (self._k, self._v))

    def check(self, spec: AttentionSpec) -> None:
        """Raises ValueError for a spec whose rows see keys older than the ring keeps."""
        if spec.left is None or spec.left >= self.window:
            seen = "every earlier key" if spec.left is None else f"{spec.left} keys before its own"
            raise ValueError(
                f"a row of window={spec.window} sees {seen}, a sliding cache of {self.window} tokens does not hold"
                f" them; allowed: causal with window=(left, 0), left ≤ {self.window - 1}"
            )

    def room(self, left: int) -> int:
        """How many tokens can be appended before a query at the next position would miss a key it sees."""
        return self.window - min(self.length, left)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add tokens `[B, Hkv, n, ·]`, over the oldest ones.

        Raises ValueError when they do not fit the cache or are no codes of its dtypes.
        """
        if k.dim() == v.dim() == 4 and k.shape[2] != v.shape[2]:
            raise ValueError(f"k has {k.shape[2]} tokens and v {v.shape[2]}; allowed: one number for both")
        batch, heads, _, _ = self._k.shape
        codes = [
            as_codes(x, name, (batch, heads, ring.shape[3]), ring.dtype)
            for name, x, ring in (("k", k, self._k), ("v", v, self._v))
        ]
        end = self.length + k.shape[2]
        kept = min(k.shape[2], self.window)
        slots = self._slots(end - kept, end)
        for ring, new in zip((self._k, self._v), codes, strict=True):
            bits(ring)[:, :, slots] = bits(new[:, :, k.shape[2] - kept :].contiguous())
        self.length = end

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tokens `first` … `length` − 1 as `dtype`, contiguous."""
        slots = self._slots(self.first, self.length)
        k, v = (
            bits(ring)[:, :, slots].view(ring.dtype).to(dtype).contiguous() for ring in (self._k, self._v)
        )
        return k, v

    def _slots(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self._k.device) % self.window
