"""Var(q·k) = D: softmax saturates without the scale D^-½ and does not with it.

Compare the `mean_top_prob` of the two rows of each D: with the scale it does not depend on D.
"""

from harness import AttentionSpec, Case, Shape

CASES = [
    Case(
        "scaling", f"d{d}-{'scaled' if scale is None else 'unscaled'}", Shape(heads=1, q_len=128, head_dim=d),
        f"Var(q·k) = D = {d} (source note on basics, 3.1), scale {'D^-½' if scale is None else '1: saturates'}",
        AttentionSpec(causal=True, scale=scale), seeds=1,
    )
    for d in (16, 64, 256)
    for scale in (None, 1.0)
]  # fmt: skip
