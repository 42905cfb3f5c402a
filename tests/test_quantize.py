"""Storing inputs: scales from amax, given and unit, against an independent NumPy oracle; no value is ever lost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from harness import Recipe, Scaling
from harness.arithmetic import DTYPES
from harness.formats import FP32, get_format
from harness.quantize import admit, amax_scale, quantize
from harness.recipe import TENSORS
from harness.rounding import ulp

STORAGE = ["fp8_e4m3", "fp8_e5m2", "fp16", "bf16"]
AXES = {"tensor": (0, 1, 2, 3), "head": (2, 3), "token": (3,)}
COARSE = tuple(AXES)  # scales of blocks: test_block_scales.py
GRANULARITY = pytest.mark.parametrize("granularity", COARSE)


def recipe(fmt: str, granularity: str = "head", source: str = "amax", power_of_two: bool = False) -> Recipe:
    scaling = Scaling(granularity, source, power_of_two)
    return Recipe("r", storage=dict.fromkeys(TENSORS, fmt), scaling=dict.fromkeys(TENSORS, scaling))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def oracle_scale(x: np.ndarray, granularity: str, top: float, power_of_two: bool) -> np.ndarray:
    """amax / top per block, kept as FP32 (rounded there once, or up to a power of two)."""
    amax = np.abs(np.where(np.isfinite(x), x, 0.0)).max(AXES[granularity], keepdims=True)
    scale = np.maximum(amax / top, float(np.finfo(np.float32).tiny))
    scale = 2.0 ** np.ceil(np.log2(scale)) if power_of_two else scale.astype(np.float32).astype(np.float64)
    return np.where(amax == 0, 1.0, scale)


@GRANULARITY
@pytest.mark.parametrize("fmt", STORAGE)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_amax_scales_are_the_oracles(granularity: str, fmt: str, power_of_two: bool) -> None:
    x = normal(2, 3, 5, 8)
    x[1, 2] *= 1000
    x[0, 1, 3] *= 1e-12
    got = quantize(x, "k", recipe(fmt, granularity, power_of_two=power_of_two))
    want = oracle_scale(x.numpy(), granularity, get_format(fmt).max, power_of_two)
    assert got.scale is not None
    assert got.scale.shape == want.shape
    assert np.array_equal(got.scale.numpy(), want)
    assert torch.equal(got.scale, got.scale.float().double())
    assert got.zero_blocks == 0


@GRANULARITY
@pytest.mark.parametrize("fmt", STORAGE)
def test_the_largest_value_of_every_block_meets_the_formats_max(granularity: str, fmt: str) -> None:
    """Not beyond it by more than the scale's own rounding: 2⁻²⁴ is less than half an ulp of any code. (The factor keeps
    BF16's scales, amax / 3.4e38, above FP32's smallest normal.)"""
    stored = quantize(normal(2, 3, 4, 8) * 1e6, "q", recipe(fmt, granularity))
    tops = stored.codes.abs().amax(AXES[granularity])
    assert torch.equal(tops, torch.full_like(tops, get_format(fmt).max))


def test_an_amax_scale_is_over_the_finite_values_and_the_rest_follows_the_policy() -> None:
    x = normal(1, 2, 4, 8)
    clean = quantize(x, "v", recipe("fp8_e4m3"))
    x[0, 0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    x[0, 1] = math.nan
    got = quantize(x, "v", recipe("fp8_e4m3"))
    assert got.scale is not None
    assert torch.isnan(got.codes[0, 0, 0, 0])
    assert got.codes[0, 0, 0, 1:3].tolist() == [448.0, -448.0]  # E4M3 has no infinity: the default saturates
    assert got.scale[0, 1, 0, 0] == 1.0  # nothing finite to scale by
    assert got.zero_blocks == 1
    assert torch.isnan(got.values[0, 1]).all()
    fp16 = quantize(x, "v", recipe("fp16"))
    assert fp16.values[0, 0, 0, 1:3].tolist() == [math.inf, -math.inf]
    assert clean.zero_blocks == 0


@GRANULARITY
@pytest.mark.parametrize("fmt", STORAGE)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_of_zeros_give_zeros_with_scale_one(granularity: str, fmt: str, power_of_two: bool) -> None:
    x = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    stored = quantize(x, "q", recipe(fmt, granularity, power_of_two=power_of_two))
    assert stored.scale is not None
    assert torch.equal(stored.scale, torch.ones_like(stored.scale))
    assert torch.equal(stored.values, x)
    assert stored.zero_blocks == stored.scale.numel() == {"tensor": 1, "head": 6, "token": 24}[granularity]


def test_an_empty_tensor_has_scale_one_and_no_blocks() -> None:
    for shape in ((0, 1, 2, 3), (1, 1, 0, 3), (1, 1, 2, 0)):
        stored = quantize(torch.zeros(shape), "q", recipe("fp8_e4m3"))
        assert stored.values.shape == shape
        assert stored.zero_blocks == 0


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("amax", [2.0**-126 * 448 / 3, 1e-40, 5e-324, 2.0**-126])
def test_a_tiny_amax_keeps_a_normal_scale_and_never_makes_nan(amax: float, power_of_two: bool) -> None:
    x = torch.tensor([[[[amax, -amax / 2, 0.0]]]], dtype=torch.float64)
    stored = quantize(x, "k", recipe("fp8_e4m3", power_of_two=power_of_two))
    assert stored.scale is not None
    assert stored.scale.item() == 2.0**-126  # raised: amax / 448 lies below FP32's smallest normal
    assert torch.isfinite(stored.values).all()
    assert bool(((stored.values - x).abs() <= ulp(x / stored.scale, "fp8_e4m3") / 2 * stored.scale).all())


@GRANULARITY
def test_unit_scales_store_the_codes_alone(granularity: str) -> None:
    x = normal(1, 2, 4, 8) * 300
    stored = quantize(x, "q", recipe("fp8_e4m3", granularity, "unit"))
    plain = quantize(x, "q", Recipe("plain", storage={"q": "fp8_e4m3"}))
    assert stored.scale is None
    assert torch.equal(stored.values, plain.values)
    assert float(stored.codes.abs().max()) == 448.0


@GRANULARITY
def test_given_scales_are_taken_as_fp32_and_what_is_beyond_them_saturates(granularity: str) -> None:
    shape = {"tensor": (1, 1, 1, 1), "head": (2, 3, 1, 1), "token": (2, 3, 4, 1)}[granularity]
    scale = torch.full(shape, 0.1, dtype=torch.float64)
    x = normal(2, 3, 4, 5)
    x[0, 0, 0, 0] = 1000.0
    stored = quantize(x, "v", recipe("fp8_e4m3", granularity, "given"), scale)
    assert stored.scale is not None
    assert torch.equal(stored.scale, scale.float().double())
    assert stored.values[0, 0, 0, 0] == 448 * float(np.float32(0.1))
    with pytest.raises(ValueError, match="takes given scales; pass one for v"):
        quantize(x, "v", recipe("fp8_e4m3", granularity, "given"))


@pytest.mark.parametrize("source", ["unit", None])
def test_a_scale_where_the_recipe_has_none_is_refused(source: str | None) -> None:
    x = torch.ones(1, 1, 1, 1)
    r = recipe("fp16", source=source) if source else Recipe("r", storage={"q": "fp16"})
    for take in (quantize, admit):
        with pytest.raises(ValueError, match="a scale for q was given; recipe r takes none: leave it out"):
            take(x, "q", r, 2.0)


@pytest.mark.parametrize("fmt", STORAGE)
def test_code_times_scale_is_exact_in_fp64(fmt: str) -> None:
    """A code has ≤ 11 bits and a scale 24: the product's exact rational is the FP64 value."""
    stored = quantize(normal(1, 2, 16, 8), "k", recipe(fmt, "token"))
    assert stored.scale is not None
    scale = stored.scale.expand_as(stored.codes)
    for code, s, value in zip(
        *(t.flatten().tolist() for t in (stored.codes, scale, stored.values)), strict=True
    ):
        (a, b), (c, d), (e, f) = (n.as_integer_ratio() for n in (code, s, value))
        assert a * c * f == e * b * d


FINITE = st.floats(-1e30, 1e30, allow_nan=False, allow_infinity=False)
ARRAYS = hnp.arrays(np.float64, hnp.array_shapes(min_dims=4, max_dims=4, max_side=4), elements=FINITE)


@given(ARRAYS, st.sampled_from(STORAGE), st.sampled_from(COARSE), st.booleans())
@settings(max_examples=300)
def test_a_stored_value_is_within_half_an_ulp_of_its_code(
    x: np.ndarray, fmt: str, granularity: str, power_of_two: bool
) -> None:
    """|stored − x| ≤ ½ ulp(code)·scale; the division and the final subtraction, in FP64, add 2⁻⁵² of |x| each."""
    exact = torch.from_numpy(x)
    stored = quantize(exact, "k", recipe(fmt, granularity, power_of_two=power_of_two))
    assert stored.scale is not None
    bound = ulp(exact / stored.scale, fmt) / 2 * stored.scale + 2.0**-51 * exact.abs() + 5e-324
    assert torch.isfinite(stored.values).all()
    assert bool(((stored.values - exact).abs() <= bound).all())
    # Stored again, nothing moves: a code is a fixed point of its own scale.
    again = admit(stored.values, "k", recipe(fmt, granularity), stored.scale)
    assert torch.equal(again.codes, stored.codes)


@given(ARRAYS, st.sampled_from(STORAGE), st.sampled_from(COARSE))
@settings(max_examples=200)
def test_power_of_two_scales_are_powers_of_two_and_never_saturate(
    x: np.ndarray, fmt: str, granularity: str
) -> None:
    exact = torch.from_numpy(x)
    stored = quantize(exact, "k", recipe(fmt, granularity, power_of_two=True))
    assert stored.scale is not None
    assert bool((torch.frexp(stored.scale)[0] == 0.5).all())
    assert bool(((exact / stored.scale).abs() <= get_format(fmt).max).all())
    tight = oracle_scale(x, granularity, get_format(fmt).max, False)
    assert bool((stored.scale <= 2 * torch.from_numpy(tight) * (1 + 2.0**-24)).all())


@pytest.mark.parametrize("exponent", range(-100, 100, 7))
def test_an_amax_that_is_max_times_a_power_of_two_keeps_that_power(exponent: int) -> None:
    x = torch.tensor([[[[448.0 * 2.0**exponent, 1.0]]]], dtype=torch.float64)
    scale, _ = amax_scale(x, Scaling(power_of_two=True), get_format("fp8_e4m3"), "q")
    assert scale.item() == max(
        2.0**exponent, 2.0 ** math.ceil(math.log2(max(1.0, x[0, 0, 0, 0].item()) / 448))
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", [*STORAGE, "fp32"])
def test_every_value_of_the_storage_format_is_admitted_from_any_dtype_that_holds_it(
    dtype: Any, fmt: str
) -> None:
    codes = torch.tensor([0.0, -0.0, 1.0, -1.5, 224.0, 2.0**-6, math.nan], dtype=dtype)[None, None, None]
    stored = admit(codes, "q", Recipe("r", storage={"q": fmt}), None)
    assert torch.equal(stored.values.nan_to_num(nan=9.0), codes.double().nan_to_num(nan=9.0))
    assert torch.equal(torch.signbit(stored.codes[..., :6]), torch.signbit(codes[..., :6]))


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2", "fp16"])
def test_every_finite_code_with_an_awkward_scale_is_found_again(fmt: str) -> None:
    bits = get_format(fmt).storage_bits
    kind = {8: torch.uint8, 16: torch.int16}[bits]
    codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).to(kind).view(DTYPES[fmt]).double()
    codes = codes[torch.isfinite(codes)][None, None, None]
    for scale in (0.1, 1 / 3, 1e-30, 3e20):
        exact = float(np.float32(scale))
        for dtype in (torch.float64, torch.float32):
            x = (codes * exact).to(dtype)
            if dtype is torch.float32 and float(x[x != 0].abs().min()) < FP32.min_normal:
                continue  # FP32's own subnormals no longer tell codes apart
            assert torch.equal(admit(x, "q", recipe(fmt), scale).codes, codes)


def test_quantize_and_admit_drop_gradients_and_leave_their_input() -> None:
    x = normal(1, 1, 2, 3).requires_grad_()
    before = x.detach().clone()
    scale = torch.tensor(0.5, requires_grad=True)
    for stored in (
        quantize(x, "q", recipe("fp8_e4m3")),
        quantize(x, "q", recipe("fp8_e4m3"), scale),
        admit(torch.ones(1, 1, 1, 1, requires_grad=True), "q", recipe("fp8_e4m3"), scale),
    ):
        assert not stored.values.requires_grad
    assert torch.equal(x.detach(), before)
