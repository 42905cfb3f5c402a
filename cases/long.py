"""Does it stay right over long contexts? Judged by some rows of each head: see docs/long-contexts.md.

By name alone: each takes a minute or so of two cores, and up to 4 GiB.
"""

from harness import AttentionSpec, Case, Draw, Shape

_CAUSAL = AttentionSpec(causal=True)

CASES: list[Case] = []

MORE = [
    Case(
        "long", "prefill-4k", Shape(heads=8, kv_heads=2, q_len=4096, head_dim=64),
        "small enough to be judged whole as well: what some rows say is what all say", _CAUSAL,
        seeds=1, rows=512, recipes=("fp32", "bf16", "fp8_e4m3"),
    ),
    Case(
        "long", "prefill-128k", Shape(heads=8, kv_heads=2, q_len=2**17, head_dim=64),
        "sums of up to 131,072 keys: running sums stagnate, tiles are many, indices pass 2^23", _CAUSAL,
        seeds=1, rows=512, recipes=("bf16",),
    ),
    Case(
        "long", "sink-64k", Shape(heads=4, kv_heads=1, q_len=2**16, head_dim=64),
        "one heavy first key and 65,535 light ones, which FP8 flushes and a narrow sum loses", _CAUSAL,
        Draw("heavy_key", {"shift": 1.0}),
        seeds=1, rows=256, recipes=("bf16", "fp8_e4m3"),
    ),
    Case(
        "long", "decode-1m", Shape(heads=8, kv_heads=1, q_len=1, kv_len=2**20, head_dim=64),
        "one step over 1,048,576 cached keys: each weighs 1e-6, far below what FP8 resolves without P's scale",
        _CAUSAL, seeds=1, rows=8, recipes=("bf16", "fp8_e4m3"),
    ),
    Case(
        "long", "window-128k", Shape(heads=8, kv_heads=2, q_len=2**17, head_dim=64),
        "a window of 1,024 keys that has moved on by 130,000: its left edge is taken from the right row",
        AttentionSpec(causal=True, window=(1023, 0)),
        seeds=1, rows=512, recipes=("bf16",),
    ),
]  # fmt: skip
