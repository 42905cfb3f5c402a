"""Is a decode step as accurate as the prefill it continues?"""

from harness import AttentionSpec, Case, Shape

_CAUSAL = AttentionSpec(causal=True)

CASES = [
    Case(
        "decode", "one-query-n1024", Shape(heads=4, kv_heads=2, q_len=1, kv_len=1024, head_dim=64),
        "one decode step over a thousand cached keys", _CAUSAL,
    ),
    Case(
        "decode", "continue-n256", Shape(heads=2, q_len=16, kv_len=256, head_dim=64),
        "the last 16 steps after 240 cached tokens", _CAUSAL,
    ),
]  # fmt: skip
