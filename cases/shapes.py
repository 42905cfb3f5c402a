"""Do shapes at the edges of the definition come out right, and every length?"""

from harness import AttentionSpec, Case, Shape

_CAUSAL = AttentionSpec(causal=True)
_FULL = AttentionSpec()
_TOP_LEFT = AttentionSpec(causal=True, align="top-left")


# A shape goes wrong in all formats alike: one recipe a kind is enough.
_RECIPES = ("fp32", "bf16", "fp16", "fp8_e4m3", "bf16_eager")


def _case(name, shape, why, spec=_CAUSAL, recipes=_RECIPES, **more):
    return Case("shapes", name, shape, why, spec, seeds=1, recipes=recipes, **more)


CASES = [
    _case("mqa", Shape(heads=6, kv_heads=1, q_len=65, head_dim=40), "one kv head for six queries"),
    _case("gqa-12-4", Shape(heads=12, kv_heads=4, q_len=33, head_dim=72), "groups of three"),
    _case("batch-3", Shape(batch=3, heads=2, q_len=47, head_dim=63), "odd sizes everywhere"),
    _case(
        "chunk-bottom-right", Shape(heads=2, q_len=17, kv_len=120, head_dim=64),
        "a chunk of prefill: the last query meets the last key",
    ),
    _case(
        "top-left", Shape(heads=2, q_len=50, kv_len=80, head_dim=64),
        "aligned top-left: the first query sees the first key alone, 30 keys are never seen", _TOP_LEFT,
    ),
    _case(
        "more-queries-than-keys", Shape(heads=2, q_len=40, kv_len=24, head_dim=64),
        "aligned bottom-right, the first 16 rows see no key: 0 by declared rule, with lse −∞",
    ),
    _case("wide-v", Shape(heads=2, q_len=48, head_dim=32, value_dim=80), "V wider than Q and K"),
    _case("one-key", Shape(heads=2, q_len=5, kv_len=1, head_dim=8), "the softmax of one key is 1: out is V", _FULL),
    _case("no-keys", Shape(heads=2, q_len=5, kv_len=0, head_dim=8), "an empty cache: every row is empty", _FULL),
    _case("no-queries", Shape(heads=2, q_len=0, kv_len=9, head_dim=8), "nothing to compute", _FULL),
    _case(
        "no-width", Shape(heads=2, q_len=5, kv_len=9, head_dim=0, value_dim=4),
        "D = 0: every score is 0, out is the mean of V (F37)", _FULL,
    ),
    *(
        _case(
            f"d{d}", Shape(heads=2, kv_heads=1, q_len=33, head_dim=d),
            f"head_dim {d}: kernels that read whole vectors meet a width that is none (F34)",
        )
        for d in (1, 8, 40, 63, 64, 72, 96, 128, 256)
    ),
    *(
        _case(
            f"layout-{layout}", Shape(batch=2, heads=4, kv_heads=2, q_len=33, head_dim=40),
            f"{what}: a kernel that assumes strides reads the NaN between the rows", layout=layout, relations=True,
        )
        for layout, what in (
            ("bshd", "heads inside tokens, as projections leave them"), ("padded", "rows farther apart than wide"),
            ("interleaved", "every second element"), ("fused", "cut from one QKV buffer"),
        )
    ),
]  # fmt: skip

_EVERY = range(1, 258)
_AROUND = sorted(
    {n + d for n in (512, 1024, 2048, *range(320, 1025, 64), *range(288, 769, 96)) for d in (-1, 0, 1)}
)


def _square(n):
    """Half of the lengths, and those that blocks divide; the others are the last rows over a cache."""
    return n <= 257 and (n % 2 == 1 or n % 16 == 0)


# Runs where this file is named: the lengths are the sample, so one draw of each.
MORE = [
    _case(
        f"n{n}",
        Shape(heads=2, kv_heads=1, q_len=n if _square(n) else min(n, 5), kv_len=n, head_dim=16),
        "every length, and around powers of two and multiples of 64, 96 and 128: tails of blocks (F35)",
        recipes=("fp32", "bf16", "fp8_e4m3"),  # P kept, P cast, P scaled: a tail is the same in the others
    )
    for n in (*_EVERY, *_AROUND)
]
