"""The limited accumulator against whole numbers and fractions, and what its recipes promise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import harness
from harness import Accumulator, AttentionSpec, Recipe, Status, get, get_recipe
from harness.arithmetic import Arithmetic
from harness.rounding import round_to
from harness.tensor_core import ELEMENTS, limited_matmul

HOPPER = Accumulator()
LIMITED = [r for r in harness.recipes() if get_recipe(r).accumulator is not None]


# --- the oracle: one dot product in fractions ------------------------------------------------------------------------


def exponent(x: Fraction) -> int:
    """⌊log2|x|⌋ of a non-zero fraction, by whole numbers alone."""
    n, d = abs(x.numerator), x.denominator
    e = n.bit_length() - d.bit_length()
    return e if Fraction(2) ** e <= abs(x) else e - 1


def toward_zero(x: Fraction, unit: Fraction) -> Fraction:
    return math.trunc(x / unit) * unit


def dot(a: Sequence[float], b: Sequence[float], accumulator: Accumulator) -> float:
    """Σ a_i b_i as `Accumulator` says."""
    total, held = np.float32(0), Fraction(0)
    for start in range(0, len(a), accumulator.depth):
        pairs = [(Fraction(x), Fraction(y)) for x, y in zip(a, b, strict=True)][
            start : start + accumulator.depth
        ]
        exponents = [exponent(x) + exponent(y) for x, y in pairs if x and y]
        exponents += [exponent(held)] if held else []
        if exponents:
            unit = Fraction(2) ** (max(exponents) - accumulator.bits)
            held = sum((toward_zero(x * y, unit) for x, y in pairs), toward_zero(held, unit))
        if held:
            held = toward_zero(held, Fraction(2) ** (exponent(held) - accumulator.bits))
        if accumulator.promote and (start + accumulator.depth) % accumulator.promote == 0:
            total, held = np.float32(total + np.float32(float(held))), Fraction(0)
    return float(np.float32(total + np.float32(float(held))))


def dots(a: Tensor, b: Tensor, accumulator: Accumulator) -> Tensor:
    rows = [[dot(x.tolist(), y.tolist(), accumulator) for y in b.mT] for x in a]
    return torch.tensor(rows, dtype=torch.float32)


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got, want)


# --- bit by bit ------------------------------------------------------------------------------------------------------


def test_every_product_of_two_e4m3_numbers_is_truncated_beside_every_kind_of_partner() -> None:
    """All pairs of finite codes, twice each: beside a one, and beside the largest product of the other sign."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    codes = codes[torch.isfinite(codes)]
    tops = (
        2.0 ** codes.abs().clamp(min=2.0**-9).log2().floor()
    )  # exact: log2 of no code is near a whole number above
    pairs, pair_tops = codes[:, None] * codes, tops[:, None] * tops
    for x, y, top in ((1.0, 1.0, 1.0), (448.0, -448.0, 2.0**16)):
        a = torch.stack([torch.full_like(codes, x), codes], -1).float()
        b = torch.stack([torch.full_like(codes, y), codes], 0).float()
        unit = pair_tops.clamp(min=top) * 2.0**-13
        held = (torch.trunc(x * y / unit) + torch.trunc(pairs / unit)) * unit
        bits = 2.0 ** (held.abs().clamp(min=2.0**-40).log2().floor() - 13)
        want = torch.trunc(held / bits) * bits
        assert same(limited_matmul(a, b, HOPPER).double(), want)
        assert bool((want != x * y + pairs).any())  # something was truncated


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32), bits=st.integers(1, 23), depth=st.sampled_from([1, 3, 4, 32]),
    steps=st.sampled_from([None, 1, 2]), n=st.integers(0, 70),
    fmt=st.sampled_from(["fp8_e4m3", "fp16", "bf16", "fp32"]),
)  # fmt: skip
def test_a_sum_is_that_of_fractions_bit_by_bit(
    seed: int, bits: int, depth: int, steps: int | None, n: int, fmt: str
) -> None:
    accumulator = Accumulator(bits, depth, None if steps is None else steps * depth)
    rng = np.random.default_rng(seed)
    wide = rng.choice([0, 3, 12])
    a, b = (
        round_to(
            torch.from_numpy(rng.standard_normal(size) * 2.0 ** rng.integers(-wide, wide + 1, size)), fmt
        ).float()
        for size in ((3, n), (n, 2))
    )
    if seed % 3 == 0:
        a.masked_fill_(torch.from_numpy(rng.random((3, n)) < 0.5), 0.0)
    if seed % 5 == 0:  # what cancels leaves small sums beside large products
        a[:, n // 2 : 2 * (n // 2)], b[n // 2 : 2 * (n // 2)] = -a[:, : n // 2], b[: n // 2]
    assert same(limited_matmul(a, b, accumulator), dots(a, b, accumulator))


def test_many_rows_and_heads_are_those_of_each_alone() -> None:
    g = torch.Generator().manual_seed(0)
    width = ELEMENTS // 32 // 6
    a, b = torch.randn(2, 3, 5, 40, generator=g), torch.randn(2, 3, 40, width, generator=g)
    got = limited_matmul(a, b, HOPPER)  # more than one block of rows
    for i, j in itertools.product(range(2), range(3)):
        assert same(got[i, j], limited_matmul(a[i, j], b[i, j], HOPPER))
    assert same(limited_matmul(a[:, :1], b, HOPPER)[:, 2], limited_matmul(a[:, 0], b[:, 2], HOPPER))
    assert limited_matmul(a[..., :0], b[..., :0, :], HOPPER).abs().max() == 0
    assert limited_matmul(a[:, :, :0], b, HOPPER).shape == (2, 3, 0, width)


def test_what_is_small_beside_the_sum_is_lost_until_it_is_promoted() -> None:
    """1 then 4095 products of 2^-14: below the unit of 1, which is 2^-13."""
    a = torch.full((1, 4096), 2.0**-14)
    a[0, 0] = 1.0
    ones = torch.ones(4096, 1)
    assert float(limited_matmul(a, ones, HOPPER)) == 1.0
    assert float(limited_matmul(a, ones, Accumulator(promote=128))) == 1.0 + (4096 - 128) * 2.0**-14
    assert (
        float(limited_matmul(a, ones, Accumulator(bits=14))) == 1.0 + 31 * 2.0**-14 + (4096 - 32) * 2.0**-14
    )


def test_sums_shrink_toward_zero_on_both_sides() -> None:
    g = torch.Generator().manual_seed(1)
    a, b = torch.rand(8, 512, generator=g), torch.rand(512, 8, generator=g)
    up, down = limited_matmul(a, b, HOPPER), limited_matmul(-a, b, HOPPER)
    assert same(up, -down)
    assert bool((up.double() < a.double() @ b.double()).all())


def test_nan_and_infinities_pass_and_leave_other_elements_alone() -> None:
    a, b = torch.ones(4, 40), torch.ones(40, 3)
    a[1, 3], a[2, 5], a[3, 7], b[7, 1] = math.nan, math.inf, math.inf, 0.0
    got = limited_matmul(a, b, HOPPER)
    assert got[0].tolist() == [40.0, 39.0, 40.0]
    assert torch.isnan(got[1]).all()
    assert got[2].tolist() == [math.inf] * 3
    assert torch.isnan(got[3, 1])
    assert got[3, [0, 2]].tolist() == [math.inf] * 2
    assert float(limited_matmul(torch.full((1, 2), 3e38), torch.ones(2, 1), HOPPER)) == math.inf


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 300), promote=st.sampled_from([None, 32, 128]))
def test_no_sum_loses_more_than_the_bound(seed: int, n: int, promote: int | None) -> None:
    rng = np.random.default_rng(seed)
    accumulator = Accumulator(promote=promote)
    a, b = (torch.from_numpy(rng.standard_normal(s) + seed % 2).float() for s in ((4, n), (n, 4)))
    error = (limited_matmul(a, b, accumulator).double() - a.double() @ b.double()).abs()
    added = a.double().abs() @ b.double().abs()
    fp32 = 2.0**-24 * (n // (promote or n + 1) + 2)  # the promotions' own roundings
    assert bool((error <= (accumulator.loss(n) + fp32) * added).all())


# --- in recipes ------------------------------------------------------------------------------------------------------


def test_arithmetic_adds_up_as_its_recipe_says_and_rounds_once_more() -> None:
    g = torch.Generator().manual_seed(2)
    a, b = torch.randn(5, 200, generator=g), torch.randn(200, 3, generator=g)
    recipe = Recipe("x", at={"acc": "bf16"}, accumulator=HOPPER)
    ar = Arithmetic(recipe)
    assert same(ar.matmul(a, b, "acc"), round_to(limited_matmul(a, b, HOPPER), "bf16"))
    assert same(ar.matmul(a, b, "scores_raw"), limited_matmul(a, b, HOPPER))
    assert ar.flops == 2 * 2 * 5 * 200 * 3


def test_promotion_keeps_what_the_limited_sum_loses() -> None:
    """Attention over 2,048 keys: seen 2.3e-2 against 3.5e-4, relative to what FP32 sums give."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, n, 32, generator=g, dtype=torch.float64) for n in (16, 2048, 2048))
    out = {
        r: get("naive_masked").run(
            q, k, v + 1, recipe=replace(get_recipe(r), at={"probs": "fp8_e4m3"}), quantize=True
        )
        for r in ("fp8_e4m3", *LIMITED)
    }
    whole = out["fp8_e4m3"].out.double()
    limited, promoted = (float((out[r].out.double() - whole).norm() / whole.norm()) for r in LIMITED)
    assert limited > 10 * promoted > 0


@pytest.mark.parametrize("recipe", LIMITED)
def test_an_honest_kernel_is_inconclusive_and_a_gross_error_exceeds_the_ceiling(recipe: str) -> None:
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 2, 128, 32, generator=g, dtype=torch.float64) for _ in range(3))
    out = get("online_softmax").run(q, k, v, AttentionSpec(), recipe=recipe, quantize=True).out
    said = harness.judge(out, q, k, v, recipe=recipe, quantize=True)
    assert said.status is Status.INCONCLUSIVE
    assert "an accumulator that truncates" in " ".join(said.reasons)
    wrong = out.clone()
    wrong[0, 1, 5] += 2.0
    assert harness.judge(wrong, q, k, v, recipe=recipe, quantize=True).status is Status.FAIL


WRONG = [
    ({"bits": 0}, "accumulator bits is 0; allowed: an integer, 1 to 23"),
    ({"bits": 24}, "accumulator bits is 24; allowed"),
    ({"bits": 13.0}, "accumulator bits is 13.0; allowed"),
    ({"depth": True}, "accumulator depth is True; allowed: an integer, 1 to 1024"),
    ({"promote": 100}, "accumulator promote is 100; allowed: a multiple of the depth, 32, or None"),
    ({"promote": 0}, "accumulator promote is 0; allowed"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_a_wrong_accumulator_is_refused_in_one_line(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Accumulator(**fields)
    assert "\n" not in str(caught.value)
