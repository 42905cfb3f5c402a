"""At which size of the scores does each format break? A ladder up to FP16's edge and past it."""

from harness import AttentionSpec, Case, Draw, Shape

_SHAPE = Shape(heads=1, q_len=64, head_dim=64)
_CAUSAL = AttentionSpec(causal=True)

CASES = [
    *(
        Case(
            "magnitude", f"score-{score}", _SHAPE, f"largest |s| = {score}: {why}", _CAUSAL,
            Draw("amplitude", {"score": float(score)}), seeds=1,
        )
        for score, why in (
            (11, "exp(s) just fits FP16 (11.09 overflows)"),
            (12, "exp(s) leaves FP16, so softmax without max subtraction overflows there"),
            (85, "exp(s) still fits FP32 and BF16 (88.72 overflows), and so does P V"),
            (90, "exp(s) leaves FP32 and BF16 too"),
        )
    ),
    *(
        Case(
            "magnitude", f"raw-{raw}", _SHAPE, f"largest |q·k| = {raw}: {why}", _CAUSAL,
            Draw("amplitude", {"raw": float(raw)}), seeds=1,
        )
        for raw, why in (
            (50000, "nothing overflows FP16, but one ulp of a score is 32 before scaling: resolution is gone"),
            (65472, "one ulp (32) below FP16's max: the last score that is finite there"),
            (80000, "past FP16's edge: scores stored before scaling become infinite"),
        )
    ),
    *(
        Case(
            "magnitude", f"uniform-{centre}", Shape(heads=1, q_len=64, head_dim=128),
            f"q and k uniform around {centre} (PASA, arXiv 2503.01873): {why}", _CAUSAL,
            Draw("uniform", {"centre": float(centre), "half_width": 10.0}), seeds=1,
        )
        for centre, why in ((20, "raw scores near 51,200 still fit FP16"), (25, "raw scores near 80,000 do not"))
    ),
]  # fmt: skip
