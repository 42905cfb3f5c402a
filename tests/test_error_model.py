"""The error model against measured errors: the ceiling holds everywhere, and the expected size is the measured one."""

from __future__ import annotations

import math
from typing import Any

import error_study
import pytest
import torch
from error_study import measure, used
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem, problems
from torch import Tensor

import harness.error_model.problem as sizes
from harness import Accumulator, AttentionSpec, Recipe, get, get_recipe, implementations, recipes
from harness.error_model import BLACK_BOX, WHOLE, Form, expect, expectations, form_of
from harness.operands import check
from harness.quantize import quantize
from harness.recipe import STAGES, TENSORS
from harness.truth import reference

SAFE = [name for name in implementations() if name in error_study.ALGORITHMS]
FORMS = (WHOLE, BLACK_BOX, Form("stream", 16), Form("split", 3))


def normals(*sizes: tuple[int, ...], seed: int = 0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(s, generator=g, dtype=torch.float64) for s in sizes)


def qkv(length: int = 24, keys: int = 40, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = normals((1, 4, length, 16), (1, 2, keys, 16), (1, 2, keys, 8), seed=seed)
    return q, k, v


@pytest.mark.parametrize("data", ["normal", "q × 8", "heavy first key"])
@pytest.mark.parametrize(("n", "causal"), [(64, True), (512, False)])
def test_measured_rmse_is_near_the_expected_one(data: str, n: int, causal: bool) -> None:
    names = ("fp32", "bf16", "fp16", "fp8_e4m3", "bf16_eager", "fp16_eager")
    top = {"normal": 1.25, "q × 8": 1.6, "heavy first key": 1.8}[data]
    for key, (out, lse) in measure(data, n, causal, names, error_study.ALGORITHMS[:3], seeds=2).items():
        assert out.used <= 1, f"{key}: ceiling of out used {out.used}"
        assert lse.used <= 1, f"{key}: ceiling of lse used {lse.used}"
        assert out.ratio <= top, f"{key}: ratio of out is {out.ratio}, should be ≤ {top}"
        assert lse.ratio <= 1.6, f"{key}: ratio of lse is {lse.ratio}, should be ≤ 1.6"
        if data == "normal":
            assert out.ratio >= 0.7, f"{key}: ratio of out is {out.ratio}, should be ≥ 0.7"


@pytest.mark.parametrize("name", SAFE)
def test_forms_of_registered_algorithms_expect_what_they_show(name: str) -> None:
    for recipe, (out, _) in measure("normal", 128, True, ("bf16", "bf16_eager"), [name], seeds=2).items():
        assert 0.8 <= out.ratio <= 1.2, f"{recipe}: {out.ratio}"


def run_all(
    tensors: tuple[Tensor, ...], spec: AttentionSpec, extras: dict[str, Any], recipe: Recipe, names: list[str]
) -> None:
    """No ceiling violated, no variance negative or NaN where the truth is finite."""
    shape, drawn = check(*tensors, spec, **extras)
    names = [a for a in names if not get(a).refusals(spec, shape, recipe, drawn.given)]
    assert names, "an algorithm that takes everything is among them"
    stored = tuple(quantize(x, t, recipe) for x, t in zip(tensors, TENSORS, strict=True))
    values = tuple(x.values for x in stored)
    truth = reference(*values, spec, **extras)
    pairs = [(recipe, form_of(a, get(a).options)) for a in names]
    scales = tuple(x.scale for x in stored)
    for a, found in zip(
        names, expectations(truth, *values, spec, pairs, scales=scales, **extras), strict=True
    ):
        y = get(a).run(*values, spec, recipe=recipe, scales=scales, **extras)
        for what, got, want, variance, ceiling in (
            ("out", y.out, truth.out, found.variance, found.ceiling),
            ("lse", y.lse, truth.lse, found.lse_variance, found.lse_ceiling),
        ):
            share = used(got.double() - want, want, ceiling)
            assert share <= 1, f"{a} {what} uses {share} of its ceiling under {recipe.digest}"
            told = torch.isfinite(want)
            assert bool((variance[told] >= 0).all()), f"{a} {what}: variance below 0 or NaN"
            assert bool(torch.isnan(variance[~told & torch.isnan(want)]).all())


@settings(max_examples=25, deadline=None)
@given(problem=problems(), name=st.sampled_from([r for r in recipes() if r != "fp64"]))
def test_no_error_exceeds_the_ceiling_on_any_option(problem: Problem, name: str) -> None:
    tensors, spec, extras = problem.call()
    names = [a for a in SAFE if spec.causal or a not in error_study.CAUSAL_ONLY]
    run_all(tensors, spec, extras, get_recipe(name), names)


FORMATS = st.sampled_from(["bf16", "fp16"])


@st.composite
def drawn_recipes(draw: st.DrawFn) -> Recipe:
    """Any stages in BF16 or FP16, inputs in either, sums in FP32 or few bits."""
    stages = draw(st.lists(st.sampled_from(STAGES), unique=True))
    fmt = draw(FORMATS)
    return Recipe(
        "drawn", storage=dict.fromkeys(TENSORS, fmt), at={s: draw(FORMATS) for s in stages},
        normalise=draw(st.sampled_from(["late", "early"])), p_scale=draw(st.sampled_from([1.0, 16.0, 3.0])),
        accumulator=draw(st.sampled_from([None, None, Accumulator(), Accumulator(6, 4), Accumulator(9, 8, 16)])),
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(recipe=drawn_recipes(), seed=st.integers(0, 99), n=st.integers(1, 70), causal=st.booleans())
def test_no_error_exceeds_the_ceiling_under_any_recipe(
    recipe: Recipe, seed: int, n: int, causal: bool
) -> None:
    names = [a for a in SAFE if causal or a not in error_study.CAUSAL_ONLY]
    run_all(qkv(min(n, 20), n, seed), AttentionSpec(causal=causal), {}, recipe, names)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8_e4m3", "fp16_eager"])
def test_expectation_does_not_depend_on_how_it_is_cut(
    name: str, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv()
    _, at_once = expect(q, k, v, AttentionSpec(causal=True), name, form)
    monkeypatch.setattr(sizes, "ELEMENTS", 40 * 2 * 5)  # 5 rows of one kv head
    _, cut = expect(q, k, v, AttentionSpec(causal=True), name, form)
    for field in ("variance", "ceiling", "lse_variance", "lse_ceiling"):
        torch.testing.assert_close(getattr(cut, field), getattr(at_once, field), rtol=1e-3, atol=1e-30)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_eager"])
def test_doubling_v_doubles_every_error_of_out(name: str, form: Form) -> None:
    q, k, v = qkv()
    _, once = expect(q, k, v, None, name, form)
    _, twice = expect(q, k, 2 * v, None, name, form)
    torch.testing.assert_close(twice.variance, 4 * once.variance, rtol=1e-4, atol=1e-30)
    torch.testing.assert_close(twice.ceiling, 2 * once.ceiling, rtol=1e-4, atol=1e-20)
    torch.testing.assert_close(twice.lse_variance, once.lse_variance, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_eager"])
def test_doubling_k_at_half_the_scale_changes_nothing(name: str) -> None:
    q, k, v = qkv()
    _, a = expect(q, k, v, AttentionSpec(scale=0.25), name)
    _, b = expect(q, 2 * k, v, AttentionSpec(scale=0.125), name)
    torch.testing.assert_close(b.variance, a.variance, rtol=1e-4, atol=1e-30)
    torch.testing.assert_close(b.ceiling, a.ceiling, rtol=1e-3, atol=1e-20)


@pytest.mark.parametrize("name", ["fp32", "fp8_e4m3", "bf16_eager"])
def test_row_of_one_key_has_the_error_of_its_output_cast_alone(name: str) -> None:
    q, k, v = qkv(40, 40)
    truth, found = expect(q, k, v, AttentionSpec(causal=True), name)
    u = 0.0 if name == "fp32" else get_recipe(name).out_format == "bf16" and 2.0**-8
    want = (u * truth.out[:, :, 0]) ** 2 / (8 * math.log(2))
    torch.testing.assert_close(found.variance[:, :, 0], want, rtol=1e-9, atol=1e-80)


def test_row_that_sees_no_key_has_no_error() -> None:
    q, k, v = qkv(10, 4)
    _, found = expect(q, k, v, AttentionSpec(causal=True), "bf16")  # rows 0 to 5 end before the first key
    for x in (found.variance, found.ceiling, found.lse_variance, found.lse_ceiling):
        assert bool((x[:, :, :6] == 0).all())
        assert bool((x[:, :, 6:] >= 0).all())


def test_nan_of_a_visible_key_is_nan_and_of_a_hidden_one_changes_nothing() -> None:
    q, k, v = qkv(20, 20)
    mask = torch.ones(20, 20, dtype=torch.bool)
    mask[:, 3] = False
    _, clean = expect(q, k, v, None, "fp32", mask=mask)
    k[:, :, 3] = math.nan
    _, poisoned = expect(q, k, v, None, "fp32", mask=mask)
    torch.testing.assert_close(poisoned.variance, clean.variance)
    _, seen = expect(q, k, v, None, "fp32")
    assert bool(torch.isnan(seen.variance).all())
    assert bool(torch.isnan(seen.ceiling).all())


def test_scores_that_may_overflow_promise_nothing() -> None:
    q, k, v = qkv()
    _, found = expect(q * 300, k * 300, v, None, "fp16_eager")
    assert bool(torch.isinf(found.variance).all())
    assert bool(torch.isinf(found.ceiling).all())
    _, flash = expect(q * 300, k * 300, v, None, "fp16")
    assert bool(torch.isfinite(flash.variance).all())


@pytest.mark.parametrize("recipe", ["bf16", "fp32", "bf16_eager"])
def test_one_visible_key_has_a_ceiling_whatever_its_score(recipe: str) -> None:
    """Scores of 1e11, whose rounding is beyond any exp: the softmax of one key is 1."""
    q, k, v = normals((1, 4, 3, 64), (1, 4, 1, 64), (1, 4, 1, 64))
    tensors = tuple(133120.0 * x.bfloat16().double() for x in (q, k, v))
    stored = tuple(x.bfloat16().double() for x in tensors)
    _, found = expect(*stored, AttentionSpec(), recipe, WHOLE)
    assert bool((found.ceiling < 0.02 * stored[2].abs()).all())
    run_all(stored, AttentionSpec(), {}, get_recipe(recipe), [n for n in SAFE if n != "naive_unsafe"])
    two = (stored[0], stored[1].repeat(1, 1, 2, 1), stored[2].repeat(1, 1, 2, 1))
    assert bool(torch.isinf(expect(*two, AttentionSpec(), recipe, WHOLE)[1].ceiling).all())


@pytest.mark.parametrize("name", ["naive_masked", "online_softmax", "split_kv", "decode_with_cache"])
@pytest.mark.parametrize("exponent", [-120, -126, -130, -136])
def test_subnormal_sums_of_the_base_are_expected(name: str, exponent: int) -> None:
    """Never beyond the ceiling, and no larger than FP32 is allowed elsewhere: 1.6 times."""
    for seed in range(4):
        q, k, v = qkv(seed=seed)
        stored = tuple(x.float().double() for x in (q, k, v * 2.0**exponent))
        truth, found = expect(*stored, AttentionSpec(), "fp32", form_of(name))
        error = get(name).run(*stored, AttentionSpec(), recipe="fp32").out.double() - truth.out
        assert used(error, truth.out, found.ceiling) <= 1
        scale = 2.0**-exponent  # squares of the errors themselves are near FP64's own subnormals
        ratio = float((error * scale).square().sum() / (found.variance * scale**2).sum()) ** 0.5
        assert ratio <= 1.6


def test_pairs_share_one_pass_and_keep_their_order() -> None:
    q, k, v = qkv()
    spec = AttentionSpec()
    truth = reference(q, k, v, spec)
    pairs = [("bf16", WHOLE), ("fp32", BLACK_BOX), ("bf16", WHOLE)]
    found = expectations(truth, q, k, v, spec, pairs)
    assert found[0] is found[2]
    torch.testing.assert_close(found[1].variance, expect(q, k, v, spec, "fp32")[1].variance)


@pytest.mark.parametrize("wrong", [{"arrangement": "tree"}, {"size": 0}, {"subtract_max": False}])
def test_form_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Form(**wrong)


def test_unknown_kernel_is_taken_for_a_flash_kernel() -> None:
    assert form_of("a_kernel_of_mine") == BLACK_BOX
    assert form_of("online_softmax", {"block": 32}) == Form("stream", 32)
    assert form_of("split_kv", {"splits": 7}) == Form("split", 7)


@pytest.mark.parametrize("name", implementations())
def test_form_without_options_is_that_of_the_registered_defaults(name: str) -> None:
    assert form_of(name) == form_of(name, get(name).options)
