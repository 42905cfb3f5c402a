"""What do outliers in Q, K and V cost?"""

from harness import AttentionSpec, Case, Draw, Shape

CASES = [
    Case(
        "outliers", "fa3", Shape(heads=2, q_len=192, head_dim=128),
        "N(0, 1) + N(0, 100)·Bernoulli(0.001), the setting of FlashAttention-3's Table 3 (arXiv 2407.08608)",
        draw=Draw("outliers"),
    ),
    Case(
        "outliers", "k-channel×30", Shape(heads=2, q_len=128, head_dim=64),
        "one channel of K thirty times the rest, as trained models show", AttentionSpec(causal=True),
        Draw("channel_outliers"),
    ),
]  # fmt: skip
