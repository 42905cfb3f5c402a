"""A random-sign Hadamard rotation of q and k, which spreads outliers over channels and changes no q·k.

    x ↦ x · diag(σ) · H/√n,  σ_c = ±1,  H the Sylvester Hadamard matrix of n = 2^m:  H_ij = (−1)^popcount(i & j)

diag(σ)·H/√n is orthonormal, so (q R)·(k R) = q·k. Where head_dim is no power of two, n is the largest one that
divides it and channels are rotated in blocks of n: 96 = 3 · 32 gives three blocks of 32, among which nothing is
spread. An odd head_dim has blocks of one channel: only signs change, and no outlier is spread at all.
Source: QuIP# (2402.04396), section 3; FlashAttention-3 (2407.08608), section 3.3.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

SIGN_KEY = 0x48616461  # fixed for good: other signs store other values


def block_size(head_dim: int) -> int:
    """The largest power of two that divides head_dim: channels that one rotation mixes (1 for head_dim 0)."""
    return head_dim & -head_dim or 1


def signs(head_dim: int) -> Tensor:
    """σ `[head_dim]`, FP64 ±1: one set for q and k, all heads, seeds and cases.

    Channel c is negative where the top bit of word c of Philox4x64 with key (SIGN_KEY, head_dim), counter 0, is set.
    Raw words, because NumPy keeps a bit generator's stream for ever and a distribution's not.
    """
    words = np.random.Philox(key=np.array([SIGN_KEY, head_dim], np.uint64)).random_raw(head_dim)
    return torch.from_numpy(1.0 - 2.0 * (np.asarray(words, np.uint64) >> np.uint64(63)).astype(np.float64))


def rotate(x: Tensor) -> Tensor:
    """`x` `[…, D]` rotated along its last axis, in FP64 and returned so, whatever dtype comes in.

    A NaN makes its whole block of n channels NaN; an infinity makes it ±Inf, two of them NaN where their signs
    oppose; sums beyond FP64's range become infinite. Rounding: ≤ log2(n) + 1 of them per value, all elementwise, so
    that bits do not depend on the device.
    """
    x = x.detach().double()
    n = block_size(x.shape[-1])
    y = (x * signs(x.shape[-1]).to(x.device)).reshape(*x.shape[:-1], x.shape[-1] // n, n)
    width = 1
    while width < n:  # butterflies: H_2w = [[H_w, H_w], [H_w, −H_w]]
        pairs = y.reshape(*x.shape[:-1], x.shape[-1] // (2 * width), 2, width)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), -2)
        width *= 2
    return y.reshape(x.shape) * (1.0 / math.sqrt(n))
