"""Does everything run, and are the errors of the size the formats promise? Small enough for every commit."""

from harness import AttentionSpec, Case, Draw, Shape

_BASICS = "source note on basics, section 8: three tokens worked through by hand"
_EXAMPLE = Draw(
    "values",
    {"q": [[[[1, 0], [0, 1], [1, 1]]]], "k": [[[[1, 1], [0, 1], [1, 0]]]], "v": [[[[1, 0], [0, 1], [1, 1]]]]},
)

CASES = [
    Case("smoke", "worked-example", Shape(q_len=3, head_dim=2), _BASICS, draw=_EXAMPLE),
    Case(
        "smoke", "worked-example-causal", Shape(q_len=3, head_dim=2), _BASICS + ", with the causal mask",
        AttentionSpec(causal=True), _EXAMPLE,
    ),
    Case("smoke", "normal", Shape(heads=2, q_len=96, head_dim=64), "the plain square case"),
    Case(
        "smoke", "causal-gqa", Shape(heads=4, kv_heads=2, q_len=77, head_dim=40),
        "causality, grouped heads and sizes that divide nothing, together", AttentionSpec(causal=True),
    ),
]  # fmt: skip
