"""The second answer: what a recipe costs these inputs, and whether its formats' ranges are to blame."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import harness
from harness.docket import Judgement
from harness.formats import get_format
from harness.precision import NEAR, ONE_BIT
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
