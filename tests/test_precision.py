"""The second answer: what a recipe costs these inputs, and whether its formats' ranges are to blame."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import harness
from harness.docket import Judgement
from harness.floor import NEAR, ONE_BIT
from harness.formats import get_format
from harness.quantize import store
from harness.recipe import Recipe
from harness.records import HazardKind, Status

SPEC = harness.AttentionSpec()


def draw(seed: int = 0, rows: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, rows, 32, generator=g, dtype=torch.float64) for _ in "qkv")
    return q, k, v


def judged(q: Tensor, k: Tensor, v: Tensor, recipe: str | Recipe) -> Judgement:
    out = harness.get("naive_masked").run(q, k, v, SPEC, recipe=recipe, quantize=True).out
    return harness.judge(out, q, k, v, recipe=recipe, quantize=True)


@pytest.mark.parametrize("power", [-24, -20, -17])
def test_values_below_the_normal_range_of_fp16_fail_the_recipe_and_not_the_implementation(power: int) -> None:
    q, k, v = draw()
    found = judged(q, k, v * 2.0**power, "fp16")
    assert found.precision is Status.FAIL
    assert found.status is not Status.FAIL
    (why,) = found.precision_reasons
    assert "·V, which leaves no format's normal range" in why
    assert found.floor == pytest.approx(judged(q, k, v, "fp16").floor, rel=0.1)  # of other draws' roundings


def test_floor_of_small_values_is_that_of_the_same_values_in_mid_range() -> None:
    """Powers of two change no rounding in mid-range, so the two floors are of the same numbers."""
    q, k, v = draw(1)
    v /= 2 * v.abs().max()
    assert judged(q, k, v * 2.0**-19, "fp16").floor == judged(q, k, v, "fp16").floor


@pytest.mark.parametrize("recipe", ["bf16", "fp32"])
def test_formats_with_the_range_of_fp32_pass_small_values(recipe: str) -> None:
    q, k, v = draw(2)
    assert judged(q, k, v * 2.0**-24, recipe).precision is Status.PASS


@pytest.mark.parametrize("recipe", ["fp16", "fp16_eager"])
def test_recipe_passes_small_values_exactly_until_a_bit_is_lost(recipe: str) -> None:
    """At each power of two the measured error, and not the rule's own model, says whether the recipe may pass: with
    less than 1.5 × the error in mid-range it must, and with more than 3 × it may not."""
    q, k, v = draw(3)
    usual = judged(q, k, v, recipe).total_errors
    assert usual is not None
    told = set()
    for power in range(-24, -4):
        found = judged(q, k, v * 2.0**power, recipe)
        assert found.total_errors is not None
        more = found.total_errors.rel_l2 / usual.rel_l2
        if more < 1.5 or more > 3:
            assert found.precision is (Status.PASS if more < 1.5 else Status.FAIL), (power, more)
            told.add(found.precision)
    assert told == {Status.PASS, Status.FAIL}


def test_smallest_output_that_is_not_looked_at_loses_a_quarter_of_a_roundoff_at_most() -> None:
    fp16 = get_format("fp16")
    at = NEAR * 2.0**fp16.emin
    assert fp16.min_subnormal / 2 / at == fp16.unit_roundoff / NEAR < (ONE_BIT - 1) * fp16.unit_roundoff


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp32"])
def test_a_non_finite_input_is_not_held_against_the_recipe(value: float, which: int, recipe: str) -> None:
    tensors = draw(4)
    tensors[which][0, 0, 3, 5] = value
    found = judged(*tensors, recipe)
    assert found.precision is Status.PASS, found
    assert not [h for h in found.hazards if h.kind is HazardKind.OVERFLOW]


def test_scores_beyond_fp16_are_foreseen_beside_an_infinite_one() -> None:
    q, k, v = draw(5)
    q[0, 0, 3, 5], q[0, 1, 2] = math.inf, q[0, 1, 2] * 8000
    found = judged(q, k, v, "fp16_eager")
    (h,) = [h for h in found.hazards if h.kind is HazardKind.OVERFLOW and h.stage == "scores_raw"]
    assert h.where is not None
    assert h.where[:3] == (0, 1, 2)
    assert math.isfinite(h.peak)
    assert found.precision is Status.FAIL


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("recipe", ["fp8_e4m3", "fp8_kv", "fp8_e4m3_unscaled"])
def test_an_infinity_that_storing_makes_finite_is_held_against_the_recipe(which: int, recipe: str) -> None:
    """Stored as ±max times its scale, it looks like any other value."""
    tensors = draw(6)
    tensors[which][0, 0, 5, 3] = math.inf
    found = judged(*tensors, recipe)
    assert found.precision is Status.FAIL
    assert any("NaN or infinite" in why for why in found.precision_reasons)


def one_small(power: int, heads: int = 4, kv_heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """The last of so many kv heads has a V of 2^power."""
    g = torch.Generator().manual_seed(7)
    q = torch.randn(1, heads, 32, 32, generator=g, dtype=torch.float64)
    k, v = (torch.randn(1, kv_heads, 32, 32, generator=g, dtype=torch.float64) for _ in "kv")
    v[:, -1] *= 2.0**power
    return q, k, v


PER_TENSOR = replace(harness.get_recipe("fp8_e4m3"), name="per_tensor", scaling={
    t: harness.Scaling("tensor", "amax") for t in "qkv"})  # fmt: skip


@pytest.mark.parametrize(("recipe", "power"), [("fp16", -24), ("fp8_e4m3_unscaled", -9), (PER_TENSOR, -16)])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_small_head_that_is_lost_does_not_hide_among_the_others(
    recipe: str | Recipe, power: int, kv_heads: int
) -> None:
    found = judged(*one_small(power, kv_heads=kv_heads), recipe)
    assert found.precision is Status.FAIL
    assert found.status is Status.PASS
    (why,) = found.precision_reasons
    assert why.startswith("in head b=0 h="), why
    assert int(why[len("in head b=0 h=")]) >= 4 - 4 // kv_heads
    assert found.floor == pytest.approx(judged(*one_small(0, kv_heads=kv_heads), recipe).floor, rel=0.2)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_kv", "mxfp8"])
@pytest.mark.parametrize("power", [-4, 9])
def test_a_small_or_large_head_that_keeps_its_bits_passes(recipe: str, power: int) -> None:
    assert judged(*one_small(power), recipe).precision is Status.PASS


def test_values_whose_squares_fp64_does_not_hold_are_judged_all_the_same() -> None:
    q, k, v = draw(8)
    found = judged(q, k, v * 1e-170, "fp32")
    assert found.precision is Status.FAIL
    assert found.floor < 1e-6
    assert judged(q, k, v * 1e-170, "fp64").precision is Status.PASS
    assert judged(q, k, v * 1e-310, "bf16").precision is Status.FAIL


def test_floor_of_given_scales_is_that_of_scales_from_amax() -> None:
    """Scales were given for the V as it is; another V has others."""
    q, k, v = draw(9)
    fp8 = harness.get_recipe("fp8_e4m3")
    own = replace(fp8, name="given", at={**fp8.at, "out": "fp16"},
                    scaling={t: harness.Scaling("head", "given") for t in "qkv"})  # fmt: skip
    small = v * 2.0**-24
    scales = tuple(s.scale for s in store((q, k, small), fp8, None, True))
    out = harness.get("naive_masked").run(q, k, small, SPEC, recipe=own, quantize=True, scales=scales).out
    found = harness.judge(out, q, k, small, recipe=own, quantize=True, scales=scales)
    assert found.precision is Status.FAIL
    usual = judged(q, k, v, replace(fp8, name="usual", at=own.at))
    assert found.floor == pytest.approx(usual.floor, rel=0.1)


@given(st.integers(0, 2**20), st.integers(-30, 30), st.sampled_from(["bf16", "fp32", "fp16"]))
def test_errors_by_head_do_not_change_with_the_power_of_two_of_a_head(
    seed: int, power: int, recipe: str
) -> None:
    """As long as the format's range is not left, 2ⁿ·V is as good as V, in any head."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 8, 8, generator=g, dtype=torch.float64) for _ in "qkv")
    v = v.clamp(min=0.25, max=4) * 2.0 ** (power % 8 if recipe == "fp16" else 0)
    moved = (
        v * torch.tensor([1.0, 2.0 ** (-(power % 8) if recipe == "fp16" else power)])[:, None, None].double()
    )
    a, b = judged(q, k, v, recipe), judged(q, k, moved, recipe)
    assert a.precision is b.precision is Status.PASS


@pytest.mark.parametrize(("batch", "heads", "recipe", "power"), [
    (5, 32, "fp8_e4m3_unscaled", -20), (1, 256, "fp8_e4m3_unscaled", -20), (1, 32, "fp16", -17)])  # fmt: skip
def test_a_lost_head_shows_however_many_there_are(batch: int, heads: int, recipe: str, power: int) -> None:
    """The mean square over N heads would let one of them err by √(3N) times its floor."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, heads, n, 64, generator=g) for n in (8, 64, 64))
    v[0, 5] *= 2.0**power
    found = judged(q, k, v, recipe)
    assert found.precision is Status.FAIL
    assert found.precision_reasons[0].startswith("in head b=0 h=5, which the whole hides")


@pytest.mark.parametrize("mode", ["flat", "constant"])
def test_rows_that_share_what_storing_v_cost_are_one_draw(mode: str) -> None:
    """By the luck of one draw of a few roundings no bit is lost."""
    width = 1 if mode == "flat" else 8
    for seed in range(15):
        g = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 8, 64, n, generator=g) for n in (16, 16, width))
        q, v = (q * 0.01, v) if mode == "flat" else (q, v[:, :, :1].expand(-1, -1, 64, -1).contiguous())
        assert judged(q, k, v, "fp8_e4m3_unscaled").precision is not Status.FAIL
