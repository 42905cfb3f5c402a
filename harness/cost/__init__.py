"""What attention costs, from sizes alone: operations, bytes, and the time they take at given rates.

`attention` counts one call of the harness. `formulas` are the textbook's, one product at a time. `models` are whole
decoders, `phases` the work of their prefill and of a decode step, `roofline` the time of it.
"""

from __future__ import annotations

from harness.cost.attention import (
    SCALE_BYTES,
    attention_bytes,
    attention_flops,
    kv_bytes_per_token,
    kv_cache_bytes,
    visible_pairs,
)

__all__ = [
    "SCALE_BYTES",
    "attention_bytes",
    "attention_flops",
    "kv_bytes_per_token",
    "kv_cache_bytes",
    "visible_pairs",
]
