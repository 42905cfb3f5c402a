"""Do tied maxima bias the sum?"""

from harness import AttentionSpec, Case, Draw, Shape

CASES = [
    Case(
        "ties", f"{ties}-equal-maxima", Shape(heads=1, q_len=64, head_dim=64),
        f"{ties} keys share the row maximum, so P = 1 there exactly, and V is negative throughout: rounding of P V is"
        " biased rather than random (arXiv 2510.04212)",
        AttentionSpec(), Draw("tied", {"ties": ties}), seeds=1,
    )
    for ties in (2, 4)
]  # fmt: skip
