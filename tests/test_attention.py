"""The algorithms in their precisions, at their edges, and against the rules of the public call. That all of them agree
with the truth on every combination of options is in `test_agreement`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import AttentionSpec, Recipe, Scaling, Shape, get, get_recipe, reference
from harness.compare import compare
from harness.formats import FP32, get_format
from harness.hazards import RangeLedger, predict
from harness.quantize import quantize
from harness.recipe import TENSORS
from harness.records import HazardKind

ALGORITHMS = (
    "naive_masked", "lower_triangle", "online_softmax", "decode_with_cache", "chunked_decode", "paged_decode",
    "split_kv",
)  # fmt: skip
RECIPES = ("fp32", "fp16", "bf16", "fp8_e4m3")
ALGORITHM = pytest.mark.parametrize("name", ALGORITHMS)
CAUSAL = AttentionSpec(causal=True)


def normal(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape.tensor(t), generator=g, dtype=torch.float64).to(dtype) for t in TENSORS)
    return q, k, v


def stored_values(qkv: tuple[Tensor, ...], recipe: str | Recipe) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (quantize(x, t, get_recipe(recipe)).values for x, t in zip(qkv, TENSORS, strict=True))
    return q, k, v


# --- axes of size 0 -------------------------------------------------------------------------------------------------


@ALGORITHM
@pytest.mark.parametrize("empty", ["batch", "q_len", "kv_len", "head_dim", "value_dim"])
@pytest.mark.parametrize("recipe", ["fp64", "bf16_eager", "fp8_e4m3"])
def test_an_empty_axis_is_no_error(name: str, empty: str, recipe: str) -> None:
    shape = replace(Shape(2, 4, 3, 6, kv_heads=2, kv_len=5, value_dim=7), **{empty: 0})
    q, k, v = normal(shape)
    sinks = torch.zeros(4)
    ledger = RangeLedger(shape, get_recipe(recipe))
    result = get(name).run(q, k, v, CAUSAL, recipe=recipe, sinks=sinks, quantize=True, watch=ledger)
    truth = reference(*stored_values((q, k, v), recipe), CAUSAL, sinks=sinks)
    assert result.out.shape == shape.tensor("out")
    assert not compare(result.out, truth.out, "bf16").class_mismatch
    if empty == "kv_len":  # the sink alone: exact
        assert torch.equal(result.out.double(), truth.out)
        assert torch.equal(result.lse.double(), truth.lse)


# --- what is not a number -----------------------------------------------------------------------------------------


HIDING: dict[str, dict[str, Any]] = {
    "causality": {"spec": CAUSAL},
    "a window": {"spec": AttentionSpec(window=(None, 0))},
    "a mask": {"mask": torch.arange(8) < 7},
    "a length": {"kv_lens": torch.tensor([7]), "spec": AttentionSpec(align="top-left")},
    "a bias of −∞": {"bias": torch.zeros(8).masked_fill(torch.arange(8) == 7, -math.inf)},
}


@ALGORITHM
@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("recipe", ["fp64", "fp16", "bf16_eager", "fp8_e4m3"])
def test_a_hidden_key_has_no_effect_whatever_it_holds(name: str, how: str, recipe: str) -> None:
    hiding = dict(HIDING[how])
    spec = hiding.pop("spec", AttentionSpec())
    if get(name).causal_only:
        spec = replace(spec, causal=True)
    q, k, v = normal(Shape(1, 4, 8, 16, kv_heads=2))
    rows = (
        slice(None) if how in ("a mask", "a length", "a bias of −∞") else slice(0, 7)
    )  # those blind to key 7
    values = stored_values((q, k, v), recipe)
    scales = [quantize(x, t, get_recipe(recipe)).scale for x, t in zip((q, k, v), TENSORS, strict=True)]
    clean = get(name).run(*values, spec, recipe=recipe, scales=scales, **hiding)
    poisoned = [values[0], values[1].clone(), values[2].clone()]
    poisoned[1][:, :, 7], poisoned[2][:, :, 7] = math.nan, math.nan
    dirty = get(name).run(*poisoned, spec, recipe=recipe, scales=scales, **hiding)
    # Equal as numbers; a poisoned V takes the path that leaves hidden values out, the products are the same.
    assert torch.equal(clean.out[:, :, rows], dirty.out[:, :, rows])
    assert torch.equal(clean.lse[:, :, rows], dirty.lse[:, :, rows])


@ALGORITHM
def test_infinities_of_v_pass_and_opposite_ones_cancel_to_nan(name: str) -> None:
    q, k, v = normal(Shape(1, 1, 4, 8))
    v[0, 0, 1, 0], v[0, 0, 2, 0], v[0, 0, 2, 1] = math.inf, -math.inf, math.nan
    out = get(name).run(q, k, v, CAUSAL, recipe="fp64").out[0, 0]
    assert torch.isfinite(out[0]).all()
    assert out[1, 0] == math.inf
    assert torch.isnan(out[2:, :2]).all()
    assert torch.isfinite(out[:, 2:]).all()


@ALGORITHM
@pytest.mark.parametrize("recipe", ["fp64", "fp32", "fp16_eager", "fp8_e4m3"])
def test_a_row_that_sees_nothing_follows_the_declared_rule(name: str, recipe: str) -> None:
    q, k, v = normal(Shape(1, 2, 5, 8, kv_len=3))
    for rule, value, lse in (("zero", 0.0, -math.inf), ("nan", math.nan, math.nan)):
        spec = AttentionSpec(causal=True, empty_row=rule)  # rows 0 and 1 lie before the first key
        result = get(name).run(q, k, v, spec, recipe=recipe, quantize=True)
        torch.testing.assert_close(
            result.out[:, :, :2].double(),
            torch.full((1, 2, 2, 8), value).double(),
            rtol=0,
            atol=0,
            equal_nan=True,
        )
        torch.testing.assert_close(
            result.lse[:, :, :2].double(), torch.full((1, 2, 2), lse).double(), rtol=0, atol=0, equal_nan=True
        )
        assert torch.isfinite(result.out[:, :, 2:].double()).all()


@ALGORITHM
def test_a_row_that_sees_only_a_sink_is_zero_with_the_sinks_lse(name: str) -> None:
    q, k, v = normal(Shape(1, 2, 5, 8, kv_len=3))
    sinks = torch.tensor([1.5, -2.0], dtype=torch.float64)
    result = get(name).run(q, k, v, AttentionSpec(causal=True, empty_row="nan"), recipe="fp64", sinks=sinks)
    assert torch.equal(result.out[:, :, :2], torch.zeros(1, 2, 2, 8).double())
    assert torch.equal(result.lse[0, :, :2], sinks[:, None].expand(2, 2))


@ALGORITHM
@pytest.mark.parametrize("kv_len", [0, 3], ids=["no_keys", "keys"])
@pytest.mark.parametrize("sink", [math.inf, math.nan, -math.inf])
def test_a_sink_that_is_not_finite_counts_as_a_score_of_its_value(
    name: str, kv_len: int, sink: float
) -> None:
    """Online softmax once gave 0 and an lse of +∞ for a sink of +∞ in a row that sees no key."""
    q, k, v = normal(Shape(1, 2, 2, 8, kv_len=kv_len))
    sinks = torch.tensor([sink, 0.5], dtype=torch.float64)
    truth = reference(q, k, v, CAUSAL, sinks=sinks)
    assert bool(torch.isnan(truth.out[:, 0]).all()) == (sink != -math.inf)
    result = get(name).run(q, k, v, CAUSAL, recipe="fp64", sinks=sinks)
    assert not compare(result.out, truth.out, "fp64").class_mismatch
    assert not compare(result.lse[..., None], truth.lse[..., None], "fp64").class_mismatch


# --- errors that make sense ---------------------------------------------------------------------------------------

BANDS = {"fp32": (1e-8, 1e-6), "fp16": (5e-5, 1e-3), "bf16": (1e-3, 1e-2)}
MAIN = Shape(1, 4, 256, 64)


@pytest.mark.parametrize("spec", [CAUSAL, AttentionSpec()], ids=["causal", "full"])
@pytest.mark.parametrize("recipe", BANDS)
def test_errors_on_normal_input_are_of_their_precision(recipe: str, spec: AttentionSpec) -> None:
    values = stored_values(normal(MAIN), recipe)
    truth = reference(*values, spec)
    low, high = BANDS[recipe]
    for name in ALGORITHMS:
        if not get(name).refusals(spec, MAIN, recipe):
            error = compare(get(name).run(*values, spec, recipe=recipe).out, truth.out, recipe).rel_l2
            assert low <= error <= high, (name, error)


def test_total_errors_of_e4m3_on_normal_input_are_of_its_precision() -> None:
    inputs = normal(MAIN)
    exact = reference(*inputs, CAUSAL)
    stored = reference(*stored_values(inputs, "fp8_e4m3"), CAUSAL)
    for name in ALGORITHMS:
        out = get(name).run(*inputs, CAUSAL, recipe="fp8_e4m3", quantize=True).out
        total, kernel = compare(out, exact.out, "bf16").rel_l2, compare(out, stored.out, "bf16").rel_l2
        assert 2e-2 <= total <= 1e-1, (name, total)
        assert kernel < total, (name, kernel, total)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_four_algorithms_agree_within_their_precision(recipe: str) -> None:
    """Roundings of two algorithms are independent or shared, never opposed: their distance is at most the root sum
    of squares of their errors, times NUMERICS' slack of 1.25 for chance. (The plain sum holds for any two vectors.)"""
    inputs = normal(MAIN)
    truth = reference(*stored_values(inputs, recipe), CAUSAL).out
    outs = {n: get(n).run(*inputs, CAUSAL, recipe=recipe, quantize=True).out.double() for n in ALGORITHMS}
    errors = {n: float((x - truth).norm()) for n, x in outs.items()}
    for a, b in itertools.combinations(ALGORITHMS, 2):
        assert float((outs[a] - outs[b]).norm()) <= 1.25 * math.hypot(errors[a], errors[b]), (a, b)


@pytest.mark.parametrize("recipe", [*BANDS, "bf16_eager", "fp16_eager"])
def test_online_softmax_keeps_its_precision_at_every_block_size(recipe: str) -> None:
    values = stored_values(normal(Shape(1, 2, 96, 32)), recipe)
    truth = reference(*values, CAUSAL).out
    low, high = BANDS[recipe.removesuffix("_eager")]
    for block, q_block in ((1, 96), (7, 5), (16, 32), (33, 96), (64, 1), (96, 96), (1000, 1000)):
        run = get("online_softmax").run(*values, CAUSAL, recipe=recipe, block=block, q_block=q_block)
        error = compare(run.out, truth, get_recipe(recipe).out_format).rel_l2
        # Every block rounds O and l again where stages are rounded: one more rounding per block, by the root.
        steps = math.sqrt(1 + 96 / block) if recipe.endswith("_eager") else 1.0
        assert low <= error <= high * steps, (block, q_block, error)


@pytest.mark.parametrize("recipe", ["fp64", *RECIPES])
def test_one_block_of_online_softmax_is_the_full_matrix_bit_for_bit(recipe: str) -> None:
    """a = exp(−∞ − m) = 0 in the only block, and 0·0 + x is x."""
    inputs = normal(Shape(1, 4, 48, 32, kv_heads=2))
    one = get("online_softmax").run(*inputs, recipe=recipe, quantize=True, block=48, q_block=48)
    whole = get("naive_masked").run(*inputs, recipe=recipe, quantize=True)
    assert torch.equal(one.out, whole.out)
    assert torch.equal(one.lse, whole.lse)


# --- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*RECIPES, "bf16_eager", "fp16_eager", "fp8_kv"])
def test_decoded_rows_are_the_last_rows_of_prefill_within_the_precision(recipe: str) -> None:
    inputs = normal(Shape(2, 4, 40, 32, kv_heads=2))
    truth = reference(*stored_values(inputs, recipe), CAUSAL).out[:, :, -8:]
    prefill = get("naive_masked").run(*inputs, CAUSAL, recipe=recipe, quantize=True).out.double()[:, :, -8:]
    decoded = (
        get("decode_with_cache").run(*inputs, CAUSAL, recipe=recipe, quantize=True, steps=8).out.double()
    )
    error, own = float((decoded[:, :, -8:] - truth).norm()), float((prefill - truth).norm())
    # Both errors have one expected size; over 4,096 values their ratio strays by percents: the slack is NUMERICS'.
    assert error <= 1.25 * own
    assert own <= 1.25 * error


@pytest.mark.parametrize("recipe", [*RECIPES, "bf16_eager"])
def test_a_decoded_row_has_the_same_bits_however_many_were_prefilled(recipe: str) -> None:
    inputs = normal(Shape(1, 4, 40, 32, kv_heads=2))
    few, many = (
        get("decode_with_cache").run(*inputs, CAUSAL, recipe=recipe, quantize=True, steps=n) for n in (3, 40)
    )
    assert torch.equal(few.out[:, :, -3:], many.out[:, :, -3:])
    assert torch.equal(few.lse[:, :, -3:], many.lse[:, :, -3:])


@pytest.mark.parametrize("recipe", ["fp64", *RECIPES, "bf16_eager", "fp16_eager"])
def test_where_every_sum_is_exact_decoding_is_prefill_bit_for_bit(recipe: str) -> None:
    """q = 0 makes every score 0 and every P 1; sums of small integers are exact in any order."""
    shape = Shape(1, 2, 16, 8)
    q, k, v = normal(shape)
    q, v = torch.zeros_like(q), torch.round(v).clamp(-2, 2)
    v[..., 0, :] = 2.0  # each head's amax: its scale is a power of two times 1/448 either way
    recipe_ = replace(get_recipe(recipe), normalise="late", scaling={})
    prefill, decoded = (
        get(n).run(q, k, v, CAUSAL, recipe=recipe_, quantize=True)
        for n in ("naive_masked", "decode_with_cache")
    )
    assert torch.equal(prefill.out, decoded.out)
    assert torch.equal(prefill.lse, decoded.lse)


def test_a_scale_for_each_token_of_v_survives_the_cache() -> None:
    """The cache holds codes; a descaled value is none of the storage format's."""
    recipe = Recipe(
        "tokens",
        storage=dict.fromkeys(TENSORS, "fp8_e4m3"),
        scaling={"k": Scaling("token"), "v": Scaling("token")},
    )
    inputs = normal(Shape(1, 4, 32, 16, kv_heads=2))
    truth = reference(*stored_values(inputs, recipe), CAUSAL).out
    for name in ALGORITHMS:
        run = get(name).run(*inputs, CAUSAL, recipe=recipe, quantize=True)
        assert compare(run.out, truth, "fp32").rel_l2 <= BANDS["fp32"][1], name


# --- the lower triangle -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 16, 32, 64])
def test_the_lower_triangle_does_half_the_products(block: int) -> None:
    inputs = normal(Shape(2, 4, 64, 8, kv_heads=2))
    full = get("naive_masked").run(*inputs, CAUSAL, recipe="fp64").flops
    half = get("lower_triangle").run(*inputs, CAUSAL, recipe="fp64", block=block).flops
    assert full == 4 * 2 * 4 * 64 * 64 * 8
    assert 2 * 64 * half == (64 + block) * full


@pytest.mark.parametrize("block", [3, 5, 48, 100])
def test_a_block_that_does_not_divide_the_length_stays_between_half_and_all(block: int) -> None:
    inputs = normal(Shape(1, 1, 64, 8))
    full = get("naive_masked").run(*inputs, CAUSAL, recipe="fp64").flops
    part = get("lower_triangle").run(*inputs, CAUSAL, recipe="fp64", block=block).flops
    assert full / 2 < part <= full


def test_the_lower_triangle_refuses_what_is_not_causal() -> None:
    assert get("lower_triangle").refusals(AttentionSpec(), MAIN, "fp32")
    with pytest.raises(ValueError, match="causal attention alone"):
        get("lower_triangle").run(*normal(Shape(1, 1, 2, 4)), AttentionSpec(), recipe="fp64")


# --- unsafe softmax and clamping ----------------------------------------------------------------------------------


def one_hot_score(score: float, where: tuple[int, int, int, int] = (0, 2, 1, 3)) -> dict[str, Any]:
    """Four query heads over two kv heads, q = 0, and a bias that is `score` at one pair and 0 elsewhere."""
    shape = Shape(1, 4, 3, 4, kv_heads=2, kv_len=5)
    bias = torch.zeros(1, 4, 3, 5, dtype=torch.float64)
    bias[where] = score
    _, k, v = normal(shape)
    v = v.clamp(-0.5, 0.5)  # P·V must not overflow where P just does not
    return {"shape": shape, "bias": bias, "qkv": (torch.zeros(shape.tensor("q")), k, v)}


# Recipe, stage of the first Inf, format there. The score that overflows is ln of the format's midpoint past max: for
# FP16 ln 65520 = 11.0901 (11.0899 for max itself), for FP32 88.7228, for BF16 88.7209.
UNSAFE = [("fp16", "probs", "fp16"), ("fp32", "exp", "fp32"), ("bf16", "probs", "bf16")]


@pytest.mark.parametrize(("recipe", "stage", "fmt"), UNSAFE)
def test_unsafe_softmax_overflows_exactly_where_predicted(recipe: str, stage: str, fmt: str) -> None:
    edge = math.log(get_format(fmt).overflow_threshold)
    assert edge == pytest.approx({"fp16": 11.0901, "fp32": 88.7228, "bf16": 88.7209}[fmt], abs=1e-4)
    # exp in FP32 errs by 2 ulp, a score near 88 by half an ulp of 2^-17: 3e-5 covers both on either side.
    for score, overflows in ((edge - 3e-5, False), (edge + 3e-5, True)):
        case = one_hot_score(score)
        q, k, v = stored_values(case["qkv"], recipe)
        ledger = RangeLedger(case["shape"], get_recipe(recipe))
        out = get("naive_unsafe").run(q, k, v, recipe=recipe, bias=case["bias"], watch=ledger).out
        truth = reference(q, k, v, bias=case["bias"], ranges=True)
        flags = [
            [(h.kind, h.stage, h.where, h.count) for h in found if h.kind is HazardKind.OVERFLOW]
            for found in (ledger.hazards(), predict(truth, get_recipe(recipe), subtracts_max=False))
        ]
        expected = [(HazardKind.OVERFLOW, stage, (0, 2, 1, 3), 1)] if overflows else []
        observed = [f for f in flags[0] if f[1] == stage]
        assert observed == flags[1] == expected, score
        assert bool(torch.isnan(out[0, 2, 1]).all() | torch.isinf(out[0, 2, 1]).any()) == overflows
        assert torch.isfinite(out[0, [0, 1, 3]]).all()


@pytest.mark.parametrize(
    ("recipe", "below", "above"),
    [("fp16_eager", 11.0859375, 11.09375), ("bf16_eager", 88.5, 89.0)],  # neighbours on the format's own grid
)
def test_unsafe_eager_softmax_overflows_at_exp(recipe: str, below: float, above: float) -> None:
    top = get_format(get_recipe(recipe).out_format)
    assert math.exp(below) < top.overflow_threshold < math.exp(above)
    for score, overflows in ((below, False), (above, True)):
        case = one_hot_score(score)
        ledger = RangeLedger(case["shape"], get_recipe(recipe))
        get("naive_unsafe").run(*case["qkv"], recipe=recipe, bias=case["bias"], watch=ledger, quantize=True)
        first = [h for h in ledger.hazards() if h.kind is HazardKind.OVERFLOW]
        assert [(h.stage, h.where, h.count) for h in first[:1]] == (
            [("exp", (0, 2, 1, 3), 1)] if overflows else []
        )


@pytest.mark.parametrize(
    ("recipe", "depth"), [("fp16_eager", 18.0), ("fp32", 105.0), ("bf16", 105.0), ("fp64", 746.0)]
)
def test_a_deeply_negative_row_divides_nothing_by_nothing_without_max_subtraction(
    recipe: str, depth: float
) -> None:
    """exp(−18) < 2⁻²⁵, exp(−105) < 2⁻¹⁵⁰, exp(−746) < 2⁻¹⁰⁷⁵: halves of the smallest numbers."""
    q, k, v = normal(Shape(1, 1, 3, 4))
    bias = torch.zeros(3, 3, dtype=torch.float64)
    bias[1] = -depth
    run = {
        n: get(n).run(torch.zeros_like(q), k, v, recipe=recipe, bias=bias, quantize=True)
        for n in ("naive_unsafe", "naive_masked")
    }
    assert torch.isnan(run["naive_unsafe"].out[0, 0, 1]).all()
    assert torch.isfinite(run["naive_unsafe"].out[0, 0, [0, 2]]).all()
    assert torch.isfinite(run["naive_masked"].out).all()


@pytest.mark.parametrize("name", ["naive_masked", "lower_triangle", "online_softmax", "decode_with_cache"])
def test_clamped_scores_stay_finite_where_fp16_gives_nan(name: str) -> None:
    q = torch.full((1, 1, 3, 4), 132.0)
    k = q.clone()  # q·k = 69,696 > 65,520
    v = normal(Shape(1, 1, 3, 4))[2]
    outs = {
        r: get(name).run(q, k, v, CAUSAL, recipe=r, quantize=True).out
        for r in ("fp16_eager", "fp16_eager_clamped")
    }
    assert torch.isnan(outs["fp16_eager"]).all()
    assert torch.isfinite(outs["fp16_eager_clamped"]).all()


# --- the public call ----------------------------------------------------------------------------------------------

WRONG_OPTIONS = [
    ("online_softmax", {"block": 0}, "block=0 for online_softmax; allowed: block, an integer ≥ 1, q_block"),
    ("online_softmax", {"q_block": -1}, "q_block=-1"),
    ("online_softmax", {"block": 2.0}, "block=2.0"),
    ("online_softmax", {"block": True}, "block=True"),
    ("online_softmax", {"block": "8"}, "block='8'"),
    ("lower_triangle", {"blocks": 8}, "blocks=8 for lower_triangle; allowed: block"),
    ("decode_with_cache", {"block": 8}, "block=8 for decode_with_cache; allowed: steps"),
    ("naive_masked", {"block": 8}, "block=8 for naive_masked; allowed: none"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG_OPTIONS)
def test_options_are_checked(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        get(name).run(*normal(Shape(1, 1, 2, 4)), CAUSAL, recipe="fp64", **options)
    assert "\n" not in str(caught.value)


def everything(dtype: torch.dtype = torch.float64) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    shape = Shape(2, 4, 6, 8, kv_heads=2, kv_len=9, value_dim=5)
    g = torch.Generator().manual_seed(1)
    extras = {
        "mask": torch.rand(6, 9, generator=g) > 0.2,
        "bias": torch.randn(4, 1, 9, generator=g, dtype=torch.float64),
        "sinks": torch.randn(4, generator=g, dtype=torch.float64),
        "kv_lens": torch.tensor([9, 7]),
    }
    return normal(shape, dtype=dtype), extras


@pytest.mark.parametrize("name", [*ALGORITHMS, "naive_unsafe"])
@pytest.mark.parametrize("recipe", ["fp64", "fp32", "bf16_eager", "fp8_e4m3"])
def test_a_run_leaves_its_inputs_alone(name: str, recipe: str) -> None:
    tensors, extras = everything()
    before = [x.clone() for x in (*tensors, *extras.values())]
    get(name).run(*tensors, CAUSAL, recipe=recipe, quantize=True, **extras)
    assert all(torch.equal(a, b) for a, b in zip(before, (*tensors, *extras.values()), strict=True))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads after rows": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other channel": lambda x: torch.stack([x, x], -1)[..., 0],
    "columns": lambda x: x.mT.contiguous().mT,
    "an odd offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("name", [*ALGORITHMS, "naive_unsafe"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", ["fp64", "fp32", "fp8_e4m3"])
def test_strides_do_not_change_a_bit(name: str, layout: str, recipe: str) -> None:
    inputs = normal(Shape(2, 4, 33, 24, kv_heads=2))
    plain = get(name).run(*inputs, CAUSAL, recipe=recipe, quantize=True)
    strided = get(name).run(*(LAYOUTS[layout](x) for x in inputs), CAUSAL, recipe=recipe, quantize=True)
    assert torch.equal(plain.out, strided.out)
    assert torch.equal(plain.lse, strided.lse)


@pytest.mark.parametrize("name", [*ALGORITHMS, "naive_unsafe"])
@pytest.mark.parametrize("recipe", ["fp64", "bf16", "fp16_eager", "fp8_e4m3"])
def test_inputs_that_ask_for_gradients_get_none_and_change_nothing(name: str, recipe: str) -> None:
    tensors, extras = everything(torch.float32)
    shape = Shape(2, 4, 6, 8, kv_heads=2, kv_len=9, value_dim=5)
    plain = get(name).run(*tensors, CAUSAL, recipe=recipe, quantize=True, **extras)
    asking = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in extras.items()}
    watch = RangeLedger(shape, get_recipe(recipe))
    run = get(name).run(
        *(x.requires_grad_() for x in tensors), CAUSAL, recipe=recipe, quantize=True, watch=watch, **asking
    )
    list(watch.hazards())
    assert not run.out.requires_grad
    assert not run.lse.requires_grad
    assert torch.equal(run.out, plain.out)


def test_a_value_that_the_storage_cannot_hold_is_named_by_its_first_place() -> None:
    q, k, v = (torch.ones(1, 2, 3, 4) for _ in TENSORS)
    k[0, 1, 2, 3] = 1 + 2.0**-9
    k[0, 1, 2, 1] = 1 + 2.0**-9
    k.requires_grad_()
    with pytest.raises(
        ValueError, match=r"k\[0, 1, 2, 1\] = 1\.001953125 is no value of bf16.*quantize=True"
    ):
        get("naive_masked").run(q, k, v, recipe="bf16")
    get("naive_masked").run(q, k, v, recipe="fp16")  # 1 + 2⁻⁹ has 10 bits
    get("naive_masked").run(q, k, v, recipe="bf16", quantize=True)


@pytest.mark.parametrize("x", [1 + 2.0**-40, 1e-30, 70000.0])
def test_fp64_values_are_not_rounded_on_the_sly(x: float) -> None:
    ones = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"q\[0, 0, 0, 0\]") as caught:
        get("naive_masked").run(ones * x, ones, ones, recipe="fp16")
    assert repr(x) in str(caught.value)


@pytest.mark.parametrize(("recipe", "accepted"), [("fp16", True), ("fp8_e4m3_unscaled", False)])
def test_an_infinity_is_accepted_where_the_format_has_one(recipe: str, accepted: bool) -> None:
    q, k, v = (torch.ones(1, 1, 1, 2) for _ in TENSORS)
    v[..., 0] = math.inf
    if accepted:
        assert get("naive_masked").run(q, k, v, recipe=recipe).out.flatten().tolist() == [math.inf, 1.0]
    else:
        with pytest.raises(ValueError, match="is no value of fp8_e4m3"):
            get("naive_masked").run(q, k, v, recipe=recipe)


@ALGORITHM
@pytest.mark.parametrize("recipe", ["fp8_e4m3", "fp8_kv"])
def test_stored_values_and_their_scales_are_what_quantize_makes(name: str, recipe: str) -> None:
    inputs = normal(Shape(2, 4, 12, 16, kv_heads=2))
    stored = [quantize(x, t, get_recipe(recipe)) for x, t in zip(inputs, TENSORS, strict=True)]
    scales = tuple(s.scale for s in stored)
    want = get(name).run(*inputs, CAUSAL, recipe=recipe, quantize=True)
    for dtype in (torch.float64, torch.float32):  # an FP32 caller has code·scale rounded to FP32
        values = [s.values.to(dtype) for s in stored]
        got = get(name).run(*values, CAUSAL, recipe=recipe, scales=scales)
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.lse, want.lse)


WRONG_SCALES: list[tuple[str, Any, str]] = [
    ("fp8_e4m3", (1.0, 1.0), "2 entries; allowed: three"),
    ("fp8_e4m3", 0.5, "scales is a float; allowed: a tuple of three"),
    ("fp8_e4m3", (0.0, None, None), "scale of q is not positive and finite"),
    ("fp8_e4m3", (-1.0, None, None), "scale of q is not positive and finite"),
    ("fp8_e4m3", (1e-60, None, None), "scale of q is not positive and finite"),
    ("fp8_e4m3", (None, math.nan, None), "scale of k is not positive and finite"),
    ("fp8_e4m3", (None, None, math.inf), "scale of v is not positive and finite"),
    (
        "fp8_e4m3",
        (torch.ones(3), None, None),
        r"scale of q has shape \(1, 1, 1, 3\); allowed: \[B, H, L, 1\]",
    ),
    ("fp8_e4m3", (torch.ones(1, 3, 1, 1), None, None), r"scale of q has shape \(1, 3, 1, 1\)"),
    ("fp8_e4m3", (torch.ones(1, 1, 1, 1, 1), None, None), "scale of q has shape"),
    (
        "fp8_e4m3",
        (0.3, None, None),
        r"q\[0, 0, 0, 0\] = 1\.0 is no value of fp8_e4m3 with scale 0\.300000012",
    ),
    ("bf16", (1.0, None, None), "a scale for q was given; recipe bf16 takes none"),
    ("fp8_e4m3_unscaled", (None, None, 2.0), "a scale for v was given"),
    ("fp8_kv", (2.0, None, None), "a scale for q was given"),
]


@pytest.mark.parametrize(("recipe", "scales", "message"), WRONG_SCALES)
def test_wrong_scales_are_refused_in_one_line(recipe: str, scales: Any, message: str) -> None:
    ones = [torch.ones(1, 2, 2, 4) for _ in TENSORS]
    with pytest.raises(ValueError, match=message) as caught:
        get("naive_masked").run(*ones, recipe=recipe, scales=scales)
    assert "\n" not in str(caught.value)


def test_the_output_has_the_recipes_dtype_and_lse_the_bases() -> None:
    inputs = normal(Shape(1, 2, 4, 8))
    expected = {
        "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
        "fp8_e4m3": torch.bfloat16, "fp8_kv": torch.bfloat16, "fp16_eager": torch.float16,
    }  # fmt: skip
    for recipe, dtype in expected.items():
        run = get("naive_masked").run(*inputs, recipe=recipe, quantize=True)
        assert run.out.dtype == dtype, recipe
        assert run.lse.dtype == (torch.float64 if recipe == "fp64" else torch.float32), recipe


def test_the_worked_example_of_the_source_note() -> None:
    """NUMERICS section 8: L = 3, d = 2, non-causal."""
    q = torch.tensor([[1.0, 0], [0, 1], [1, 1]])[None, None]
    k = torch.tensor([[1.0, 1], [0, 1], [1, 0]])[None, None]
    v = torch.tensor([[1.0, 0], [0, 1], [1, 1]])[None, None]
    want = torch.tensor([[0.802, 0.599], [0.599, 0.599], [0.752, 0.497]])
    for name in ("naive_masked", "online_softmax", "decode_with_cache", "naive_unsafe"):
        out = get(name).run(q, k, v, recipe="fp32").out[0, 0]
        assert bool(((out - want).abs() <= 5e-4 + FP32.unit_roundoff).all()), name  # three printed decimals
