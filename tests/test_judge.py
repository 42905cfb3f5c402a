"""`judge` from outside: what passes, what never does, what is not told apart, and what a wrong argument is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import KINDS, RECIPES, Kernel, Made, made
from problems import problems
from torch import Tensor

import harness
from benchmarks import odd_inputs
from harness import AttentionSpec, Recipe, Status
from harness.docket import Docket
from harness.error_model import BLACK_BOX, WHOLE, Form, form_of
from harness.operands import Extras
from harness.significance import ratio_limit

SMALL = (1, 2, 64, 32)
# A limited accumulator is promised no variance: tests/test_tensor_core.py.
ALL = tuple(r for r in harness.recipes() if r != "fp64" and harness.get_recipe(r).accumulator is None)


# --- honest kernels --------------------------------------------------------------------------------------------------


SEEDS = 20  # benchmarks/false_alarms.py does 500


def statuses(c: Made, outs: Sequence[Tensor], forms: Sequence[Form]) -> list[str]:
    """What each output of one call is judged, with its reasons where it does not pass."""
    found = Docket(c.stored, c.spec, Extras(), c.recipe).verdicts(outs, forms)
    return [v.status.value + ("" if v.status is Status.PASS else f": {v.reasons}") for v in found]


@pytest.mark.parametrize("recipe", ALL)
def test_online_softmax_with_other_blocks_than_a_twins_passes(recipe: str) -> None:
    for seed in range(SEEDS if recipe in RECIPES else len(KINDS)):
        c = made((1, 2, 112, 32), recipe, seed, causal=bool(seed % 2), kind=KINDS[seed % len(KINDS)])
        online = harness.get("online_softmax")
        outs = [
            online.run_stored(c.stored, c.spec, c.recipe, Extras(), block=block).out for block in (48, 96)
        ]
        assert statuses(c, outs, [Form("stream", 48), BLACK_BOX]) == ["PASS", "PASS"], (seed, c.spec)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_kernel_of_torch_passes(recipe: str, causal: bool) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe]
    for seed in range(SEEDS):
        c = made((1, 2, 144, 32), recipe, seed, causal=causal, kind=KINDS[seed % len(KINDS)])
        q, k, v = (x.values.to(dtype) for x in c.stored)
        got = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert statuses(c, [got], [BLACK_BOX]) == ["PASS"], (seed, c.spec)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_that_shares_nothing_with_the_harness_passes(recipe: str, kind: str) -> None:
    c = made(SMALL, recipe, causal=True, kind=kind, extras={"sinks": torch.tensor([1.0, -2.0])}, softcap=20.0)
    j = c.judge(Kernel(block=40)(c))
    assert j.status is Status.PASS, str(j)


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_rounded_key_that_is_exact_in_a_twins_block_is_no_fault(recipe: str) -> None:
    # The largest score stands in the second block of 128 keys; the first block's own, all but as large, is cast to 1
    # there, and rounded where all keys are one block.
    c = made((1, 2, 256, 64), recipe, 0, causal=True, kind="peaked")
    j = c.judge(Kernel(block=256)(c))
    assert j.status is Status.PASS, str(j)


@pytest.mark.parametrize("recipe", RECIPES)
def test_status_and_size_are_those_of_permuted_heads_and_sequences(recipe: str) -> None:
    c = made((2, 4, 40, 16), recipe, causal=True, kv_heads=2)
    wrong = Kernel(scale=1.02)(c)
    first = c.judge(wrong)
    q, k, v = (x.flip(1).flip(0) for x in c.exact)
    second = harness.judge(wrong.flip(1).flip(0), q, k, v, spec=c.spec, recipe=c.recipe, quantize=True)
    assert first.status is second.status is Status.FAIL
    assert first.diagnosis is not None
    assert second.diagnosis is not None
    assert first.diagnosis.fault == second.diagnosis.fault
    # The twins are FP32, and BLAS may add up other heads in another order.
    assert second.diagnosis.size == pytest.approx(first.diagnosis.size, rel=2.0**-23)
    assert second.margins.ratio == pytest.approx(first.margins.ratio, rel=1e-9)


# --- what never passes ---------------------------------------------------------------------------------------------


def zeros(c: Any) -> Tensor:
    return torch.zeros(*c.exact[0].shape[:3], c.exact[2].shape[3])


def mean_of_v(c: Any) -> Tensor:
    v = c.stored[2].values
    return v.repeat_interleave(c.exact[0].shape[1] // v.shape[1], 1).mean(2, keepdim=True).expand_as(zeros(c))


def nan(c: Any) -> Tensor:
    return torch.full_like(zeros(c), math.nan)


@pytest.mark.parametrize("wrong", [zeros, mean_of_v, nan])
@pytest.mark.parametrize("recipe", ALL)
def test_constant_outputs_never_pass(wrong: Callable[[Any], Tensor], recipe: str) -> None:
    for kind in KINDS:
        c = made((1, 2, 48, 32), recipe, kind=kind)
        (told,) = statuses(c, [wrong(c)], [BLACK_BOX])
        assert told.startswith("FAIL"), (kind, told)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_of_another_class_fails(recipe: str, value: float) -> None:
    c = made((1, 2, 48, 32), recipe)
    out = Kernel()(c)
    out[0, 1, 5, 7] = value
    j = c.judge(out)
    assert j.status is Status.FAIL
    assert any("classes differ" in r for r in j.reasons)
    assert j.diagnosis is not None


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_wrong_element_fails(recipe: str) -> None:
    c = made((1, 2, 48, 32), recipe)
    out = Kernel()(c)
    out[0, 1, 5, 7] += 1.0
    j = c.judge(out)
    assert j.status is Status.FAIL
    assert any("i=5" in r or "5, 7" in r for r in j.reasons)


def test_lse_beyond_its_ceiling_fails_whatever_the_output() -> None:
    c = made((1, 2, 48, 32), "bf16")
    got = harness.get("online_softmax").run_stored(c.stored, c.spec, c.recipe, Extras())
    assert c.judge(got.out, lse=got.lse).status is Status.PASS
    for lse in (got.lse + 0.01, got.lse * math.nan, got.lse.log2()):
        j = c.judge(got.out, lse=lse)
        assert j.status is Status.FAIL
        assert j.reasons[0].startswith("lse")


# --- inputs that cannot tell ----------------------------------------------------------------------------------------


def test_useless_yardstick_is_inconclusive() -> None:
    # P of 8,192 keys, normalised before a cast without a scale: nearly all of it flushes.
    recipe = Recipe(
        "flushed", storage=dict.fromkeys("qkv", "fp8_e4m3"), at={"probs": "fp8_e4m3", "out": "bf16"},
        normalise="early",
    )  # fmt: skip
    c = made((1, 1, 16, 32), recipe, kv_len=8192)
    out = harness.get("naive_masked").run_stored(c.stored, c.spec, c.recipe, Extras()).out
    j = c.judge(out, form=WHOLE)
    assert j.status is Status.INCONCLUSIVE, str(j)
    assert any("yardstick" in r for r in j.reasons)


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_are_inconclusive(rows: int) -> None:
    c = made((1, 1, rows, 32), "bf16", kv_len=40)
    j = c.judge(Kernel()(c))
    assert j.status is Status.INCONCLUSIVE
    assert "independent rows" in j.reasons[0]


def test_equal_rows_count_as_one() -> None:
    c = made((1, 1, 1, 32), "bf16", kv_len=40)
    q = c.exact[0].expand(1, 1, 64, 32)
    out = Kernel()(c).expand(1, 1, 64, 32)
    j = harness.judge(out, q, *c.exact[1:], recipe="bf16", quantize=True)
    assert j.status is Status.INCONCLUSIVE


@pytest.mark.parametrize(
    ("size", "keys", "width"),
    [
        ((1, 2, 0, 4), 5, 4),
        ((1, 2, 5, 4), 0, 4),
        ((1, 2, 5, 0), 6, 4),
        ((1, 2, 5, 4), 6, 0),
        ((0, 2, 5, 4), 6, 4),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_empty_shapes_are_judged_without_a_crash(
    size: tuple[int, ...], keys: int, width: int, recipe: str
) -> None:
    b, h, n, d = size
    q, k, v = torch.ones(b, h, n, d), torch.ones(b, h, keys, d), torch.ones(b, h, keys, width)
    out = torch.zeros(b, h, n, width) if keys == 0 else torch.ones(b, h, n, width)
    j = harness.judge(out, q, k, v, recipe=recipe, quantize=True)
    assert j.status in (Status.PASS, Status.INCONCLUSIVE), str(j)
    if out.numel():
        assert harness.judge(out + 1, q, k, v, recipe=recipe, quantize=True).status is Status.FAIL


def test_empty_rows_are_held_to_their_rule() -> None:
    c = made((1, 2, 40, 32), "bf16", kv_len=24, causal=True)  # the first 16 rows see nothing
    out = Kernel()(c)
    assert c.judge(out).status is Status.PASS
    out[:, :, :16] = math.nan
    j = c.judge(out)
    assert j.status is Status.FAIL
    assert j.diagnosis is not None
    assert j.diagnosis.fault == "empty rows"


@given(problem=problems(special=True), recipe=st.sampled_from(ALL))
@settings(max_examples=15)
def test_no_input_makes_it_crash(problem: Any, recipe: str) -> None:
    q, k, v = (torch.from_numpy(x) for x in problem.tensors)
    spec = AttentionSpec(**problem.rules)
    extras = {n: torch.as_tensor(x) for n, x in problem.extras.items()}
    if (
        any(x.numel() and not bool(torch.isfinite(x).all()) for x in (q, k, v))
        and recipe == "fp8_e4m3_hadamard"
    ):
        return  # a rotation spreads a NaN: another test's business
    got = harness.get("naive_masked").run(q, k, v, spec, recipe=recipe, quantize=True, **extras)
    j = harness.judge(got.out, q, k, v, spec=spec, recipe=recipe, quantize=True, lse=got.lse, **extras)
    assert str(j)
    zero = harness.judge(got.out * 0 + 77, q, k, v, spec=spec, recipe=recipe, quantize=True, **extras)
    assert str(zero)


# --- the recipe ---------------------------------------------------------------------------------------------------


def test_unit_scale_on_large_keys_is_the_recipes_failure_alone() -> None:
    c = made((1, 2, 64, 32), "fp8_e4m3_unscaled")
    q, k, v = c.exact
    k = k * 400  # beyond 448: stored saturated
    got = harness.get("online_softmax").run(q, k, v, recipe="fp8_e4m3_unscaled", quantize=True)
    j = harness.judge(got.out, q, k, v, recipe="fp8_e4m3_unscaled", quantize=True)
    assert (j.status, j.precision) == (Status.PASS, Status.FAIL), str(j)
    assert any("saturation in k" in r for r in j.precision_reasons), j.precision_reasons


def test_finite_input_stored_as_infinite_is_the_recipes_failure_alone() -> None:
    q, k, v = made((1, 2, 64, 32), "fp16").exact
    v = v.clone()
    v[0, 0, 3, 5] = 1e5
    got = harness.get("online_softmax").run(q, k, v, recipe="fp16", quantize=True)
    j = harness.judge(got.out, q, k, v, recipe="fp16", quantize=True)
    assert (j.status, j.precision) == (Status.PASS, Status.FAIL), str(j)
    assert any(" in v" in r for r in j.precision_reasons), j.precision_reasons


def test_precision_is_unknown_without_the_exact_inputs_and_held_to_a_budget_with_them() -> None:
    c = made((1, 2, 64, 32), "bf16")
    out, values = Kernel()(c), [x.values for x in c.stored]
    assert harness.judge(out, *values, recipe="bf16").precision is Status.INCONCLUSIVE
    assert harness.judge(out, *values, recipe="bf16", exact=c.exact).precision is Status.PASS
    assert c.judge(out, budget=1.0).precision is Status.PASS
    j = c.judge(out, budget=1e-9)
    assert (j.status, j.precision) == (Status.PASS, Status.FAIL)
    assert "over the budget" in j.precision_reasons[-1]


# --- arguments ----------------------------------------------------------------------------------------------------

X = torch.ones(1, 2, 6, 4)
WRONG: list[dict[str, Any]] = [
    {"out": None}, {"out": X[..., :3]}, {"out": X[:, :1]}, {"out": X.int()}, {"out": X.tolist()}, {"out": X.to("meta")},
    {"q": None}, {"q": X[0]}, {"q": X.int()}, {"q": X.bool()}, {"q": 3}, {"k": X[..., :3]}, {"k": X[:, :, :3]},
    {"k": X.to("meta")}, {"v": X[:, :1]}, {"v": torch.cat([X, X])}, {"k": X.to(torch.float8_e4m3fn)},
    {"spec": "causal"}, {"spec": True}, {"recipe": "bf17"}, {"recipe": None}, {"recipe": 3}, {"lse": X},
    {"lse": X[..., 0].int()}, {"lse": 1.0}, {"mask": X}, {"mask": torch.ones(7, dtype=torch.bool)},
    {"bias": torch.ones(7)}, {"bias": X.bool()}, {"sinks": torch.ones(3)}, {"sinks": "x"}, {"kv_lens": [7]},
    {"kv_lens": [1.5]}, {"kv_lens": [-1]}, {"scales": 1.0}, {"scales": (1.0, 2.0)}, {"scales": "abc"},
    {"scales": (1.0, None, None)}, {"exact": X}, {"exact": (X, X)}, {"exact": (X, X, X[..., :2])},
    {"exact": (X, X, None)},
    {"exact": (X.int(),) * 3}, {"exact": 3}, {"budget": 0}, {"budget": -1.0}, {"budget": math.nan}, {"budget": "1"},
    {"budget": True}, {"q": X + 1e-3}, {"form": "stream"}, {"form": None},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: f"{next(iter(w))}={str(next(iter(w.values())))[:20]}")
def test_wrong_argument_is_told_in_one_line_what_is_allowed(wrong: dict[str, Any]) -> None:
    arguments = {"out": X, "q": X, "k": X, "v": X, **wrong}
    with pytest.raises(ValueError, match=r"allowed|cannot|leave it out") as caught:
        harness.judge(**arguments)
    assert "\n" not in str(caught.value)


def test_judgement_reads_as_a_page() -> None:
    c = made((1, 2, 128, 32), "bf16", causal=True)
    good, bad = str(c.judge(Kernel()(c))), str(c.judge(Kernel(scale=1.05)(c)))
    assert good.startswith("implementation: PASS\n  error ")
    assert "recipe: PASS" in good
    assert bad.startswith("implementation: FAIL\n")
    assert "likeliest: the softmax scale is off: size +0.0" in bad
    assert max(len(line) for line in (good + bad).splitlines()) < 240


# --- what a review found ---------------------------------------------------------------------------------------------


def test_rows_that_nobody_judged_are_no_pass() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 64, 64, generator=g) for _ in range(3))
    q[:, :, :30] *= 200  # scores so coarse in BF16 that the winner may change: no error can be expected there
    out = harness.get("naive_masked").run(q, k, v, recipe="bf16_eager", quantize=True).out.clone()
    out[:, :, :30] = 0
    j = harness.judge(out, q, k, v, recipe="bf16_eager", quantize=True)
    assert (j.status, j.precision) == (Status.INCONCLUSIVE, Status.INCONCLUSIVE)
    assert "rows were not judged" in j.reasons[0]


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20], ids=str)
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8_e4m3"])
def test_size_of_v_does_not_matter(recipe: str, size: float) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 64, 64, generator=g) for _ in range(3))
    out = harness.get("online_softmax").run(q, k, v * size, recipe=recipe, quantize=True, block=48).out
    assert harness.judge(out, q, k, v * size, recipe=recipe, quantize=True).status is Status.PASS
    assert harness.judge(1.05 * out, q, k, v * size, recipe=recipe, quantize=True).status is Status.FAIL


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("equal", ["queries", "keys"])
def test_equal_rows_are_one_sample_and_raise_no_alarm(equal: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 4, 96, 64, generator=g).bfloat16() for _ in range(3))
    q, k = (q[:, :, :1].expand_as(q), k) if equal == "queries" else (q, k[:, :, :1].expand_as(k))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert harness.judge(out, q, k, v, recipe="bf16").status is not Status.FAIL


def test_output_without_elements_is_no_pass() -> None:
    x, empty = torch.randn(1, 1, 4, 8), torch.zeros(1, 1, 4, 0)
    assert harness.judge(empty, x, x, empty, recipe="fp32").status is Status.INCONCLUSIVE


def test_sparse_output_and_scales_of_text_are_refused_in_one_line() -> None:
    for wrong in ({"out": X.to_sparse()}, {"scales": ("a", "b", "c"), "recipe": "fp8_e4m3"}):
        with pytest.raises(ValueError, match="allowed") as caught:
            harness.judge(**{"out": X, "q": X, "k": X, "v": X, **wrong})
        assert "\n" not in str(caught.value)


def test_zeros_where_everything_is_zero_are_inconclusive() -> None:
    zero = torch.zeros(1, 8, 16, 8)
    j = harness.judge(zero, zero, zero, zero, recipe="bf16")
    assert j.status is Status.INCONCLUSIVE
    assert "the truth is 0 everywhere" in str(j)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("low", [-1e4, -1e9, float(torch.finfo(torch.float32).min)])
def test_a_mask_of_large_negative_numbers_is_judged_like_one_of_infinities(recipe: str, low: float) -> None:
    hidden = torch.ones(48, 48).triu(1).bool()
    c = made((1, 4, 48, 16), recipe)
    bias = torch.zeros(1, 1, 48, 48).masked_fill(hidden, low)
    q, k, v = c.exact
    given = {"recipe": recipe, "quantize": True, "bias": bias}
    out = harness.get("online_softmax").run(q, k, v, block=16, **given).out
    assert harness.judge(out, q, k, v, **given).status is Status.PASS
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    assert harness.judge(noise, q, k, v, **given).status is Status.FAIL


def test_a_budget_without_exact_inputs_is_refused() -> None:
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"budget is 0\.1, but the exact inputs were not given"):
        harness.judge(x, x, x, x, budget=0.1)


@pytest.mark.parametrize("recipe", ["fp8_e4m3", "fp8_e4m3_unscaled"])
def test_probabilities_that_all_vanish_for_want_of_the_max_are_no_pass(recipe: str) -> None:
    (case,) = (c for c in harness.load_cases("negative") if c.id == "negative/depth-20")
    (found,) = harness.run([case], ["naive_unsafe"], [recipe], seeds=1)
    assert found.errors is not None
    assert found.errors.rel_l2 == 1.0  # zeros
    assert found.status is Status.FAIL


def test_flat_attention_under_fp8_is_no_failure() -> None:
    """All weights of a row lie in one cell of E4M3 and are moved alike: with V beside 0 their errors add up."""
    for seed, (std, mean) in enumerate(((0.003, 1.0), (0.01, 5.0), (0.02, 1.0))):
        g = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 4, 128, 64, generator=g) for _ in "qkv")
        q, v = q * std, v + mean
        for name in ("online_softmax", "naive_masked"):
            out = harness.get(name).run(q, k, v, recipe="fp8_e4m3", quantize=True).out
            judged = harness.judge(out, q, k, v, recipe="fp8_e4m3", quantize=True, form=form_of(name))
            assert judged.status is Status.PASS, (std, mean, name, str(judged))
            # As over so many independent rows, either way: the expectation is no more too wide than too narrow.
            assert abs(judged.margins.ratio - 1) < ratio_limit(4 * 128, 1, 1.0) - 1


@pytest.mark.parametrize(("name", "recipe"), [
    *(("online_softmax", r) for r in ("fp32", "bf16", "bf16_eager", "fp16_eager", "fp8_e4m3", "mxfp8")),
    *(("split_kv", r) for r in ("fp32", "bf16", "fp8_e4m3", "mxfp8"))])  # fmt: skip
def test_repeated_keys_are_no_failure(name: str, recipe: str) -> None:
    """Equal keys have equal scores and weights, which every format moves alike, and equal addends."""
    for seed, width in enumerate((8, 64)):
        g = torch.Generator().manual_seed(seed)
        q, base = (torch.randn(1, 2, n, width, generator=g) for n in (256, 3))
        which = torch.randint(0, 3, (512,), generator=g)
        k = 1.5 * base[:, :, which]
        v = 0.2 * torch.randn(1, 2, 512, width, generator=g) + base.flip(2)[:, :, which]
        out = harness.get(name).run(q, k, v, recipe=recipe, quantize=True).out
        judged = harness.judge(out, q, k, v, recipe=recipe, quantize=True, form=form_of(name))
        assert judged.status is Status.PASS, (recipe, str(judged))


@pytest.mark.parametrize(("rows", "flat"), [(256, (100, 132)), (1024, (500, 516))])
@pytest.mark.parametrize("recipe", ["fp8_e4m3", "mxfp8"])
def test_a_few_flat_rows_among_others_are_no_failure(rows: int, flat: tuple[int, int], recipe: str) -> None:
    """The mean of a head does not show them, and its yardstick looks at 32 rows and at each."""
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 2, rows, 64, generator=g) for _ in "qkv")
        q[:, :, slice(*flat)] *= 0.01
        v = v + 1
        out = harness.get("online_softmax").run(q, k, v, recipe=recipe, quantize=True).out
        for form in ({"form": form_of("online_softmax")}, {}):
            judged = harness.judge(out, q, k, v, recipe=recipe, quantize=True, **form)
            assert judged.status is Status.PASS, str(judged)


@pytest.mark.parametrize("name", ["naive_masked", "split_kv", "online_softmax"])
@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_an_accumulator_in_subnormals_is_held_to_their_spacing(name: str, size: float) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 128, 8, generator=g) for _ in "qkv")
    out = harness.get(name).run(q, k, v * size, recipe="fp16_eager", quantize=True).out
    for form in ({"form": form_of(name)}, {}):
        judged = harness.judge(out, q, k, v * size, recipe="fp16_eager", quantize=True, **form)
        assert judged.status is Status.PASS, str(judged)


def test_a_kernel_that_merges_parts_is_right_without_saying_so() -> None:
    for seed, recipe in enumerate(("fp8_e4m3", "mxfp8", "fp8_e4m3_hadamard")):
        g = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 2, 256, 64, generator=g) for _ in "qkv")
        q, v = q * 0.01, v + 1
        out = harness.get("split_kv").run(q, k, v, recipe=recipe, quantize=True).out
        judged = harness.judge(out, q, k, v, recipe=recipe, quantize=True)
        assert judged.status is Status.PASS, str(judged)


@pytest.mark.parametrize("tiny", [1e-19, 1e-30])
@pytest.mark.parametrize("where", ["head", "channel", "key"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_a_tiny_head_channel_or_key_is_judged_by_its_own_size(tiny: float, where: str, recipe: str) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 64, 64, generator=g) for _ in "qkv")
    part: dict[str, Any] = {"head": (0, 1), "channel": (..., 3), "key": (0, slice(None), 0)}
    v[part[where]] *= tiny
    spec = AttentionSpec(causal=True)
    out = harness.get("online_softmax").run(q, k, v, spec, recipe=recipe, quantize=True).out
    judged = harness.judge(
        out, q, k, v, spec=spec, recipe=recipe, quantize=True, form=form_of("online_softmax")
    )
    assert judged.status is Status.PASS, str(judged)


def test_a_twin_that_overflows_says_nothing_and_breaks_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 256, 64, generator=g) for _ in "qkv")
    q, v = q * 0.1, v.abs() * 1000
    truth = harness.reference(q.half(), k.half(), v.half())
    judged = harness.judge((truth.out * 1.01).half(), q, k, v, recipe="fp16_eager", quantize=True)
    assert judged.status is Status.FAIL


@pytest.mark.parametrize(
    ("rows", "width", "recipe"), [(256, 1, "fp8_e4m3"), (512, 4, "fp16"), (512, 2, "bf16")]
)
def test_nearly_equal_rows_of_few_channels_are_one_sample(rows: int, width: int, recipe: str) -> None:
    """Their outputs lie in one cell of the output's format and are rounded alike: two of 270 right runs failed."""
    for seed in range(12):
        g = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(1, 1, rows, 16, generator=g) for _ in "qk")
        q, v = q * 1e-3, torch.randn(1, 1, rows, width, generator=g) + 1
        out = harness.get("naive_masked").run(q, k, v, recipe=recipe, quantize=True).out
        judged = harness.judge(out, q, k, v, recipe=recipe, quantize=True, form=form_of("naive_masked"))
        assert judged.status is not Status.FAIL, str(judged)
        wrong = harness.judge(out * 1.25, q, k, v, recipe=recipe, quantize=True, form=form_of("naive_masked"))
        assert wrong.status is Status.FAIL


def test_honest_implementations_pass_on_odd_inputs() -> None:
    """The first of the calls of `reports/odd-inputs.md`, where 3 of 2,500 fail."""
    for seed in range(60):
        status, line = odd_inputs.judged(seed)
        assert status != "FAIL", line
