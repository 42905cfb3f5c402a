"""What do sinks do: a first key that draws most of the mass, and learned logits in the denominator?"""

from harness import AttentionSpec, Case, Draw, Shape

_CAUSAL = AttentionSpec(causal=True)

CASES = [
    *(
        Case(
            "sinks", f"heavy-first-key-{shift}", Shape(heads=2, q_len=128, head_dim=64),
            f"q + {shift} and k_0 + {shift}: the first key holds most of every row, the rest of P nears the flush"
            " threshold of FP8", _CAUSAL, Draw("heavy_key", {"shift": shift}),
        )
        for shift in (1.0, 1.3)
    ),
    Case(
        "sinks", "learned", Shape(heads=4, kv_heads=2, q_len=96, head_dim=64),
        "a learned sink of each head joins the denominator once (F45)", _CAUSAL,
        extras={"sinks": Draw("values", {"values": [0.0, 2.0, 5.0, -3.0]})}, seeds=1,
    ),
    Case(
        "sinks", "learned-heavy", Shape(heads=2, q_len=96, head_dim=64),
        "sinks above every score take nearly all the mass: the output is small and P far below 1", _CAUSAL,
        extras={"sinks": Draw("values", {"values": [12.0, 20.0]})}, seeds=1,
    ),
    Case(
        "sinks", "learned-window", Shape(heads=2, q_len=96, head_dim=64),
        "a sink beside a sliding window, as GPT-OSS has it", AttentionSpec(causal=True, window=(15, 0)),
        extras={"sinks": Draw("normal")}, seeds=1,
    ),
    Case(
        "sinks", "learned-empty-rows", Shape(heads=2, q_len=40, kv_len=24, head_dim=32),
        "rows that see the sink alone are 0 with lse = sink", _CAUSAL, extras={"sinks": Draw("normal")}, seeds=1,
    ),
]  # fmt: skip
