"""Do shapes at the edges of the definition come out right?"""

from harness import AttentionSpec, Case, Shape

_CAUSAL = AttentionSpec(causal=True)
_TOP_LEFT = AttentionSpec(causal=True, align="top-left")

CASES = [
    Case("shapes", "mqa", Shape(heads=6, kv_heads=1, q_len=65, head_dim=40), "one kv head for six queries", _CAUSAL),
    Case("shapes", "gqa-12-4", Shape(heads=12, kv_heads=4, q_len=33, head_dim=72), "groups of three", _CAUSAL),
    Case("shapes", "batch-3", Shape(batch=3, heads=2, q_len=47, head_dim=63), "odd sizes everywhere", _CAUSAL),
    Case(
        "shapes", "chunk-bottom-right", Shape(heads=2, q_len=17, kv_len=120, head_dim=64),
        "a chunk of prefill: the last query meets the last key", _CAUSAL,
    ),
    Case(
        "shapes", "top-left", Shape(heads=2, q_len=50, kv_len=80, head_dim=64),
        "aligned top-left: the first query sees the first key alone, 30 keys are never seen", _TOP_LEFT,
    ),
    Case(
        "shapes", "more-queries-than-keys", Shape(heads=2, q_len=40, kv_len=24, head_dim=64),
        "aligned bottom-right, the first 16 rows see no key: 0 by declared rule, with lse −∞", _CAUSAL,
    ),
    Case("shapes", "wide-v", Shape(heads=2, q_len=48, head_dim=32, value_dim=80), "V wider than Q and K", _CAUSAL),
    Case("shapes", "one-key", Shape(heads=2, q_len=5, kv_len=1, head_dim=8), "the softmax of one key is 1: out is V"),
]  # fmt: skip
