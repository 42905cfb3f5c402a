"""Is a decode step as accurate as the prefill it continues, however it is cut?"""

from harness import AttentionSpec, Case, Draw, Shape

_CAUSAL = AttentionSpec(causal=True)
_RECIPES = ("fp32", "bf16", "fp16", "fp8_e4m3", "bf16_eager", "fp16_eager")

CASES = [
    Case(
        "decode", "one-query-n1024", Shape(heads=4, kv_heads=2, q_len=1, kv_len=1024, head_dim=64),
        "one decode step over a thousand cached keys", _CAUSAL,
        relations=True, recipes=_RECIPES,
    ),
    Case(
        "decode", "continue-n256", Shape(heads=2, q_len=16, kv_len=256, head_dim=64),
        "the last 16 steps after 240 cached tokens", _CAUSAL,
        relations=True, recipes=_RECIPES,
    ),
    Case(
        "decode", "prefill-n96", Shape(batch=2, heads=2, kv_heads=1, q_len=96, head_dim=64),
        "a prefill, its last rows step by step, and each sequence alone (F48, F50)", _CAUSAL,
        relations=True, recipes=_RECIPES, seeds=1,
    ),
    Case(
        "decode", "hot-key-n139", Shape(heads=1, q_len=52, kv_len=139, head_dim=64),
        "key 96 is heavy, just past a block of 96: P in FP8 depends on the block (F49)", _CAUSAL,
        Draw("heavy_key", {"shift": 1.0, "key": 96}),
        relations=True, recipes=_RECIPES, seeds=1,
    ),
    Case(
        "decode", "window-16", Shape(heads=2, q_len=24, kv_len=120, head_dim=64),
        "steps over a sliding window of 16 keys", AttentionSpec(causal=True, window=(15, 0)),
        relations=True, recipes=_RECIPES, seeds=1,
    ),
    Case(
        "decode", "ragged", Shape(batch=3, heads=2, q_len=4, kv_len=80, head_dim=64),
        "a batch of sequences of different lengths, one of them shorter than the rows", _CAUSAL,
        extras={"kv_lens": Draw("values", {"values": [80, 33, 2]})},
        relations=True, recipes=_RECIPES, seeds=1,
    ),
    Case(
        "decode", "short-over-splits", Shape(heads=2, q_len=1, kv_len=3, head_dim=64),
        "three keys over more splits than keys: empty splits weigh nothing (F43)", _CAUSAL,
        relations=True, recipes=_RECIPES, seeds=1,
    ),
]  # fmt: skip
