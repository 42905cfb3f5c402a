"""What is the error on well-behaved inputs, and how does it move with length, width and the mean of V?"""

from harness import AttentionSpec, Case, Draw, Shape

_CAUSAL = AttentionSpec(causal=True)

CASES = [
    *(
        Case("normal", f"causal-n{n}", Shape(heads=2, q_len=n, head_dim=64), "N(0, 1): error against length", _CAUSAL)
        for n in (32, 128, 256)
    ),
    Case("normal", "full-n128", Shape(heads=2, q_len=128, head_dim=64), "N(0, 1) without a mask"),
    Case("normal", "d128", Shape(heads=2, q_len=128, head_dim=128), "N(0, 1) at the other common head_dim", _CAUSAL),
    Case(
        "normal", "v-mean-1", Shape(heads=2, q_len=128, head_dim=64),
        "V with mean 1: errors of P no longer cancel, and a lost probability shows", _CAUSAL,
        Draw("normal", {"v_mean": 1.0}),
    ),
]  # fmt: skip
