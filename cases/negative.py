"""Do rows of deeply negative scores keep their mass?"""

from harness import AttentionSpec, Case, Draw, Shape

CASES = [
    Case(
        "negative", f"depth-{depth}", Shape(heads=1, q_len=64, head_dim=64),
        f"every score lies near −{depth}: {why}", AttentionSpec(causal=True),
        Draw("deep_negative", {"depth": float(depth)}), seeds=1,
    )
    for depth, why in (
        (20, "exp(s) is below FP16's smallest subnormal, the row sum of unsafe softmax is 0 there"),
        (200, "exp(s) is 0 in FP32 too: unsafe softmax divides 0 by 0"),
    )
]  # fmt: skip
