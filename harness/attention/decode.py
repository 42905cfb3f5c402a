"""Decoding with a KV cache: prefill all but the last rows, then one query a step.

Step t appends k_t and v_t and attends with q_t alone over what the cache holds:
    o_t = softmax(scale·q_t K_{≤t}ᵀ) V_{≤t}
which is row t of one-shot causal attention. Where rows see keys to their right (no causality, or a window), those
keys are in the cache before the row is computed, as an encoder's are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from harness.arithmetic import DTYPES, Arithmetic
from harness.attention.algorithm import Algorithm
from harness.attention.kv_cache import KVCache
from harness.attention.naive import attend
from harness.attention.rows import Problem, key_range


def decode_with_cache(ar: Arithmetic, p: Problem, steps: int = 4) -> tuple[Tensor, Tensor]:
    """The last `steps` rows one at a time, the rows before them as one prefill."""
    sh, storage = p.shape, ar.recipe.storage
    cache = KVCache(
        sh.batch, sh.Hkv, sh.S, sh.head_dim, sh.E, DTYPES[storage["k"]], DTYPES[storage["v"]], p.q.device
    )
    prefill = max(0, sh.q_len - steps)
    row_blocks = [slice(0, prefill)] if prefill else []
    row_blocks += [slice(t, t + 1) for t in range(prefill, sh.q_len)]
    parts = []
    for rows in row_blocks:
        keys = key_range(p, rows)
        if keys.stop > cache.length:
            new = slice(cache.length, keys.stop)
            cache.append(p.k[:, :, new], p.v[:, :, new])
        k, v = cache.read(ar.dtype)
        parts.append(attend(ar, replace(p, k=k, v=v), rows, keys))
    if not parts:
        return attend(ar, p, slice(0, 0), slice(0, sh.S))
    return torch.cat([o for o, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


DECODE_WITH_CACHE = Algorithm("decode_with_cache", decode_with_cache, options={"steps": 4})
