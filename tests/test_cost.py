"""Operations and bytes against their definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cost import attention_flops, kv_bytes_per_token, visible_pairs
from harness.recipe import Recipe, Scaling, get_recipe
from harness.spec import AttentionSpec, Shape

SIDE = st.none() | st.integers(0, 12)


def visible(spec: AttentionSpec, i: int, j: int, q_len: int, kv_len: int) -> bool:
    """The definition, a pair at a time."""
    position = i + (kv_len - q_len if spec.align == "bottom-right" else 0)
    left, right = spec.window or (None, None)
    return not (
        (spec.causal and j > position)
        or (left is not None and j < position - left)
        or (right is not None and j > position + right)
    )


@given(
    st.integers(0, 12), st.integers(0, 12), st.booleans(), st.sampled_from(["bottom-right", "top-left"]),
    st.none() | st.tuples(SIDE, SIDE),
)  # fmt: skip
def test_visible_pairs_are_those_of_the_definition(
    q_len: int, kv_len: int, causal: bool, align: str, window: tuple[int | None, int | None] | None
) -> None:
    spec = AttentionSpec(causal=causal, align=align, window=window)
    pairs = sum(visible(spec, i, j, q_len, kv_len) for i in range(q_len) for j in range(kv_len))
    assert visible_pairs(Shape(q_len=q_len, kv_len=kv_len), spec) == pairs


@pytest.mark.parametrize(
    ("batch", "heads", "length", "width"), [(1, 1, 1, 1), (2, 3, 128, 64), (1, 8, 33, 40)]
)
def test_full_attention_takes_4_l_squared_d(batch: int, heads: int, length: int, width: int) -> None:
    shape = Shape(batch, heads, length, width)
    assert attention_flops(shape, AttentionSpec()) == 4 * batch * heads * length**2 * width


@pytest.mark.parametrize("length", [1, 2, 64, 1000])
def test_causality_leaves_half_and_the_diagonal(length: int) -> None:
    shape, causal = Shape(q_len=length), AttentionSpec(causal=True)
    assert visible_pairs(shape, causal) == length * (length + 1) // 2
    ratio = attention_flops(shape, causal) / attention_flops(shape, AttentionSpec())
    assert ratio == pytest.approx(0.5 * (1 + 1 / length))


def test_one_query_sees_the_whole_cache_and_v_may_be_wider() -> None:
    shape = Shape(heads=4, kv_heads=2, q_len=1, kv_len=2048, head_dim=64, value_dim=80)
    assert attention_flops(shape, AttentionSpec(causal=True)) == 2 * 4 * 2048 * (64 + 80)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "bf16_eager", "fp64"])
def test_unscaled_cache_takes_two_times_heads_times_width_times_bytes(name: str) -> None:
    width = {"fp64": 8, "fp32": 4}.get(name, 2)
    shape = Shape(heads=8, kv_heads=2, q_len=16, head_dim=64)
    assert kv_bytes_per_token(shape, get_recipe(name)) == 2 * 2 * 64 * width


@pytest.mark.parametrize(
    (
        "granularity",
        "scales",
    ),  # FP32 scales of K and of V, spread over 16 tokens unless each token has its own
    [("tensor", 2 * 4 / 16), ("head", 2 * 2 * 4 / 16), ("token", 2 * 2 * 4)],
)
def test_scales_of_the_cache_are_counted(granularity: str, scales: float) -> None:
    recipe = Recipe(
        "mine",
        storage=dict.fromkeys("qkv", "fp8_e4m3"),
        scaling=dict.fromkeys("kv", Scaling(granularity, "amax")),
    )
    shape = Shape(heads=8, kv_heads=2, q_len=1, kv_len=16, head_dim=64)
    assert kv_bytes_per_token(shape, recipe) == 2 * 2 * 64 + scales


@pytest.mark.parametrize(
    (
        "scaling",
        "scales",
    ),  # bytes of K's and V's scales in one sequence of 40 keys, 2 kv heads, D = 80, E = 48
    [
        (Scaling("block", rows=16), 2 * 2 * 3 * 4),
        (Scaling("block"), 2 * 2 * 1 * 4),
        (Scaling("mx", "amax", True), 2 * 40 * 3 + 2 * 48 * 2),
        (Scaling("mx", "given", "floor"), 2 * 40 * 3 + 2 * 48 * 2),
    ],
)
def test_scales_of_blocks_are_counted_with_short_ones_and_in_their_own_bytes(
    scaling: Scaling, scales: int
) -> None:
    fp8 = dict.fromkeys("qkv", "fp8_e4m3")
    recipe = Recipe("mine", storage=fp8, scaling=dict.fromkeys("kv", scaling))
    shape = Shape(heads=8, kv_heads=2, q_len=1, kv_len=40, head_dim=80, value_dim=48)
    assert kv_bytes_per_token(shape, recipe) == pytest.approx(2 * (80 + 48) + scales / 40, rel=2.0**-50)


def test_scales_of_q_and_unit_scales_cost_the_cache_nothing() -> None:
    recipe = Recipe(
        "mine",
        storage=dict.fromkeys("qkv", "fp8_e4m3"),
        scaling={"q": Scaling("token"), "k": Scaling("token", "unit")},
    )
    assert kv_bytes_per_token(Shape(q_len=16), recipe) == 2 * 64


def test_empty_cache_has_a_cost_per_token_still() -> None:
    assert kv_bytes_per_token(Shape(kv_len=0), get_recipe("fp8_e4m3")) == 2 * 64 + 8
