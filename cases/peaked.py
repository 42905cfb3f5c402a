"""What happens when few keys hold all the mass?"""

from harness import AttentionSpec, Case, Draw, Shape

_CAUSAL = AttentionSpec(causal=True)

CASES = [
    *(
        Case(
            "peaked", f"q×{factor}", Shape(heads=2, q_len=128, head_dim=64),
            f"queries {factor} times larger: the largest probability nears 1 and errors of scores dominate",
            _CAUSAL, Draw("normal", {"q": float(factor)}),
        )
        for factor in (3, 8)
    ),
]  # fmt: skip
