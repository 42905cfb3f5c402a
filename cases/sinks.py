"""What does a first key that draws most of the mass (a sink token) do to the small probabilities?"""

from harness import AttentionSpec, Case, Draw, Shape

CASES = [
    Case(
        "sinks", f"heavy-first-key-{shift}", Shape(heads=2, q_len=128, head_dim=64),
        f"q + {shift} and k_0 + {shift}: the first key holds most of every row, the rest of P nears the flush"
        " threshold of FP8", AttentionSpec(causal=True), Draw("heavy_key", {"shift": shift}),
    )
    for shift in (1.0, 1.3)
]  # fmt: skip
