"""Attribution: single roundings against independent computations, shares against theory, and what is said of them."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import (
    Accumulator,
    AttentionSpec,
    Case,
    Draw,
    Recipe,
    Shape,
    get,
    get_recipe,
    load_cases,
    reference,
)
from harness.attribution import attribute, attributions
from harness.error_model import WHOLE, expectations
from harness.evidence import Attribution
from harness.inputs import make_inputs
from harness.quantize import quantize
from harness.recipe import RECIPES, STAGES, TENSORS
from harness.rounding import ulp
from harness.shares import GROUPS, Sums, balance
from harness.switchboard import ACCUMULATION, PLACES, arithmetic, switched

CAUSAL = AttentionSpec(causal=True)
LONG = Case("here", "long", Shape(heads=2, q_len=144, head_dim=8), "more than a block of keys", CAUSAL)
NORMAL = Case("here", "normal", Shape(heads=4, kv_heads=2, q_len=64, head_dim=16), "plain data", CAUSAL)


@functools.cache
def attributed(
    recipe: str, implementation: str = "online_softmax", case: Case = NORMAL, seeds: int = 3
) -> Attribution:
    return attribute(case, implementation, recipe, seeds)


def stage(found: Attribution, name: str) -> Any:
    return next(s for s in found.stages if s.stage == name)


# ---- one rounding against an independent computation ------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["naive_masked", "online_softmax", "split_kv"])
@pytest.mark.parametrize("place", [*TENSORS, *STAGES])
def test_a_recipe_of_one_rounding_gives_it_the_whole_error(implementation: str, place: str) -> None:
    where = {"storage": {place: "bf16"}} if place in TENSORS else {"at": {place: "bf16"}}
    found = attribute(LONG, implementation, Recipe("one", base="fp64", **where), seeds=1)  # type: ignore[arg-type]
    if not found.stages:
        assert place in ("rescale", "block_out"), "a stage that this algorithm does not have"
        assert implementation == "naive_masked"
        return
    (only,) = found.stages
    assert (only.stage, only.format, found.best) == (place, "bf16", place)
    assert only.alone_share == found.sum_of_shares == 1.0
    # Off, what is left is FP64's: at most 2^-40 of a BF16 rounding of size 2^-9, in square.
    assert 1 - 2.0**-80 <= only.without_share <= 1.0


@pytest.mark.parametrize("name", TENSORS)
def test_a_cast_of_one_input_is_what_plain_torch_says(name: str) -> None:
    """Softmax in FP64 by torch on inputs of which one is rounded by torch's own cast; seeds pool by mean square."""
    square = power = 0.0
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    for seed in range(2):
        exact = dict(zip(TENSORS, make_inputs(NORMAL, seed).tensors, strict=True))
        outs = []
        for x in (exact, exact | {name: exact[name].float().bfloat16().double()}):
            k, v = (x[t].repeat_interleave(2, 1) for t in "kv")
            scores = (x["q"] @ k.mT / 4).masked_fill(~mask, -math.inf)
            outs.append(scores.softmax(-1) @ v)
        square += float((outs[1] - outs[0]).square().sum())
        power += float(outs[0].square().sum())
    found = stage(attributed("bf16", seeds=2), name)
    assert found.alone_rel_l2 == pytest.approx(
        math.sqrt(square / power), rel=1e-9
    )  # FP64 twice, errors of 2^-9


def test_the_output_cast_has_the_variance_of_uniform_rounding() -> None:
    """Σ ulp²/12, with a standard deviation of √(Σ ulp⁴/180): that of the square of a uniform number."""
    truths = [reference(*make_inputs(NORMAL, seed).tensors, CAUSAL).out for seed in range(3)]
    spacing = torch.cat([ulp(t, "bf16").flatten() for t in truths])
    power = sum(float(t.square().sum()) for t in truths)
    found = stage(attributed("bf16"), "out").alone_rel_l2 ** 2 * power
    expected, sd = float((spacing**2).sum() / 12), float((spacing**4).sum() / 180) ** 0.5
    assert abs(found - expected) <= 5 * sd


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3"])
def test_the_cast_of_p_has_the_variance_of_the_error_model(name: str) -> None:
    """Within 10 % in RMSE: docs/error-model.md has 0.95 to 1.03 over seeds on normal data."""
    recipe = get_recipe(name)
    only = Recipe("p", base="fp64", at={"probs": recipe.at["probs"]}, p_scale=recipe.p_scale)
    square = variance = 0.0
    for seed in range(3):
        q, k, v = make_inputs(NORMAL, seed).tensors
        truth = reference(q, k, v, CAUSAL)
        variance += float(expectations(truth, q, k, v, CAUSAL, [(only, WHOLE)])[0].variance.sum())
        square += float(truth.out.square().sum())
    found = stage(attributed(name, "naive_masked"), "probs")
    assert found.alone_rel_l2 == pytest.approx(math.sqrt(variance / square), rel=0.1)


def test_a_limited_accumulator_counts_as_accumulation() -> None:
    """Small integers are exact in E4M3 and their products in FP32: nothing but the sums, and FP32's softmax, err."""
    whole = [[[[float((3 * i * i + j * (i + 2)) % 7 - 3) for j in range(16)] for i in range(40)]]]
    case = Case(
        "here", "integers", Shape(heads=1, q_len=40, head_dim=16), "exact in FP8", CAUSAL,
        Draw("values", {"q": whole, "k": whole, "v": whole}),
    )  # fmt: skip
    stored = dict.fromkeys(TENSORS, "fp8_e4m3")
    found = attribute(case, "naive_masked", Recipe("short", storage=stored, accumulator=Accumulator(bits=5)))
    assert found.best == ACCUMULATION
    assert stage(found, ACCUMULATION).format == "5bits/32"
    # Nothing but what FP64 itself errs by, 2^-53 of each of some 2^6 sums, next to errors of 2^-6: in square 2^-82.
    assert max(stage(found, t).alone_share for t in TENSORS) < 2.0**-80
    # FP32's own roundings are 2^-18 of those at 5 bits: in square 2^-36, and twice their root where they cross.
    assert found.sum_of_shares == pytest.approx(1.0, abs=2.0**-16)


# ---- all of them together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "implementation", ["naive_masked", "online_softmax", "lower_triangle", "decode_with_cache"]
)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "bf16_eager", "fp16_eager"])
def test_with_everything_on_it_is_the_recipe_bit_for_bit(name: str, implementation: str) -> None:
    """Without scales and with a power of two for D^-½ there is no rounding outside the stages but that of sums."""
    recipe, algorithm = get_recipe(name), get(implementation)
    q, k, v = (quantize(x, t, recipe) for x, t in zip(make_inputs(NORMAL, 0).tensors, TENSORS, strict=True))
    on = frozenset(PLACES)
    own = algorithm.run_stored(
        (q, k, v), CAUSAL, switched(recipe, on), arithmetic=arithmetic(recipe, on)
    ).out  # fmt: skip
    assert torch.equal(own.double(), algorithm.run_stored((q, k, v), CAUSAL, recipe).out.double())


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3", "fp8_kv", "mxfp8", "fp8_e4m3_hadamard"])
def test_shares_of_independent_roundings_add_up(name: str) -> None:
    found = attributed(name)
    assert found.additive, found.statement
    assert "roundings err independently" in found.statement
    assert stage(found, found.best).without_rel_l2 == found.best_rel_l2 < found.rel_l2


def test_fp32_errs_by_its_own_stages_and_sums() -> None:
    found = attributed("fp32")
    assert {s.format for s in found.stages} == {"fp32"}
    assert found.left_rel_l2 == stage(found, ACCUMULATION).alone_rel_l2 > 0


def test_one_rounding_done_twice_is_told_apart() -> None:
    """D^-½ is a power of two: `scores` stores what `scores_raw` has rounded already."""
    found = attributed("bf16_eager", "naive_masked")
    assert stage(found, "scores").alone_share == stage(found, "scores_raw").alone_share
    assert stage(found, "scores").without_share == pytest.approx(0.0, abs=1e-12)
    assert not found.additive
    assert (
        "scores_raw and scores; acc and out round the same numbers alike, and counted once" in found.statement
    )


def test_a_value_that_is_the_output_is_rounded_once() -> None:
    """A key that holds nearly all of every row: its value is rounded as V is stored, and is the output then."""
    case = next(c for c in load_cases("sinks") if c.name == "heavy-first-key-1.3")
    found = attribute(case, "naive_masked", "bf16", seeds=1)
    assert not found.additive
    assert "v and out round in part the same numbers one after the other" in found.statement


def test_what_is_not_finite_takes_no_part_and_is_counted() -> None:
    """Raw scores beyond FP16: rows of NaN, as the accuracy run reports them."""
    case = next(c for c in load_cases("magnitude") if c.name == "raw-80000")
    found = attribute(case, "naive_masked", "fp16_eager")
    out = (
        get("naive_masked")
        .run(*make_inputs(case, 0).tensors, case.spec, recipe="fp16_eager", quantize=True)
        .out
    )
    assert found.lost == int((~torch.isfinite(out)).sum()) > 0
    assert not found.additive
    assert f"{found.lost} of {out.numel()} output elements are not" in found.statement
    assert (found.best, stage(found, "scores_raw").without_lost) == ("scores_raw", 0)
    assert all(math.isfinite(s.alone_share) for s in found.stages)


def test_where_nothing_is_finite_there_is_nothing_to_share() -> None:
    case = replace(NORMAL, name="huge", draw=Draw("normal", {"q": 1e4, "k": 1e4}))
    found = attribute(case, "naive_unsafe", "fp16_eager", seeds=1)
    assert found.rel_l2 == math.inf
    assert "No output element is finite in every run" in found.statement
    assert all(math.isnan(s.alone_share) for s in found.stages)


def test_a_recipe_that_rounds_nothing_says_so() -> None:
    found = attributed("fp64")
    assert (found.stages, found.best, found.additive) == ((), "", False)
    assert found.statement.startswith("The recipe rounds nothing")
    assert found.rel_l2 == found.best_rel_l2 < 1e-14


# ---- what holds for every recipe --------------------------------------------------------------------------------

FORMATS = ("fp32", "bf16", "fp16", "fp8_e5m2", "fp8_e4m3")
TINY = Case("here", "tiny", Shape(heads=2, kv_heads=1, q_len=5, head_dim=4), "small", CAUSAL)
RANDOM = st.builds(
    lambda storage, at, early, after, p: Recipe(
        "drawn", storage=storage, at=at, normalise="early" if early else "late",
        row_sum="after" if after and not early else "before", p_scale=p,
    ),
    st.dictionaries(st.sampled_from(TENSORS), st.sampled_from(FORMATS)),
    st.dictionaries(st.sampled_from(STAGES), st.sampled_from(FORMATS)),
    st.booleans(), st.booleans(), st.sampled_from([1.0, 16.0, 256.0]),
)  # fmt: skip


@settings(max_examples=12)
@given(RANDOM | st.sampled_from(sorted(RECIPES.values(), key=lambda r: r.name)),
       st.sampled_from(["naive_masked", "online_softmax", "lower_triangle"]))  # fmt: skip
def test_shares_are_finite_and_not_negative_in_the_order_of_the_data(
    recipe: Recipe, implementation: str
) -> None:
    found = attribute(TINY, implementation, recipe, seeds=2)
    if found.lost:
        return  # E4M3 has no infinity: 5·256 is NaN there
    order = [PLACES.index(s.stage) for s in found.stages]
    assert order == sorted(set(order))
    for s in found.stages:
        assert math.isfinite(s.alone_share)
        assert s.alone_share >= 0
        assert s.without_share <= 1
    assert found.sum_of_shares == math.fsum(s.alone_share for s in found.stages)
    assert found.best in ("", *(s.stage for s in found.stages))
    assert found.statement.endswith(".")
    assert "\n" not in found.statement


def test_recipes_that_share_runs_are_told_as_if_alone() -> None:
    names = ("fp32", "bf16", "fp8_e4m3_hopper", "fp8_e4m3", "bf16_eager")
    together = attributions(TINY, ["online_softmax"], [get_recipe(n) for n in names], 1)
    for name, found in zip(names, together, strict=True):
        assert replace(found, created="") == replace(attribute(TINY, "online_softmax", name, 1), created="")


# ---- whether they add up ----------------------------------------------------------------------------------------


def sums(errors: torch.Tensor) -> Sums:
    """Of errors `[groups, n, elements]` that superpose."""
    rows = torch.cat([errors.sum(1, keepdim=True), errors], 1)
    n = errors.shape[1]
    return Sums(rows @ rows.mT, torch.zeros(n), 1.0, 0.0, 1.0, 0, (0,) * n, (0,) * n, 1, 1)


def test_orthogonal_errors_sum_to_one() -> None:
    found = balance(sums(torch.eye(6, dtype=torch.float64).reshape(2, 3, 6)))
    assert found.sum == found.linear == found.once == 1.0
    assert found.adds_up


def test_errors_that_cancel_do_not_add_up_and_the_pair_is_found() -> None:
    x = torch.randn(GROUPS, 1, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.randn(GROUPS, 1, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = balance(sums(torch.cat([x, -0.8 * x + 0.3 * y, y], 1)))
    assert not found.adds_up
    assert min(found.crossed, key=lambda pair: found.crossed[pair]) == (0, 1)
    assert found.linear == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_independent_errors_add_up_within_the_margin(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    errors = (
        torch.randn(GROUPS, 5, 200, dtype=torch.float64, generator=g)
        * torch.tensor([1.0, 0.5, 2.0, 0.1, 1.0])[:, None]
    )
    assert balance(sums(errors)).adds_up


# ---- refusals ---------------------------------------------------------------------------------------------------


def test_a_black_box_is_refused_by_the_names_that_are_allowed() -> None:
    with pytest.raises(ValueError, match=r"sdpa_math has no stages.*allowed: naive_masked, lower_triangle"):
        attribute(NORMAL, "sdpa_math", "bf16")


def test_a_whole_layer_and_a_case_that_is_refused_are_errors() -> None:
    layer = load_cases("layer")[0]
    with pytest.raises(ValueError, match="is a whole layer"):
        attribute(layer, "naive_masked", "bf16")
    with pytest.raises(ValueError, match="computes causal attention alone"):
        attribute(replace(NORMAL, spec=AttentionSpec()), "lower_triangle", "bf16")
    with pytest.raises(ValueError, match="seeds is 0; allowed"):
        attribute(NORMAL, "naive_masked", "bf16", seeds=0)
