"""Every figure of `compare` against NumPy and `math.fsum`, and what it does with classes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.compare import compare
from harness.finite import argmax
from harness.formats import FORMATS, get_format
from harness.records import Errors

FIGURES = [f.name for f in dataclasses.fields(Errors) if f.type == "float"]
U = 2.0**-53


def spacing(t: float, name: str) -> float:
    fmt = get_format(name)
    exponent = math.frexp(t)[1] - 1 if t else fmt.emin
    return math.ldexp(1.0, min(max(exponent, fmt.emin), fmt.emax) - fmt.precision + 1)


def decibel(power: float, square: float) -> float:
    if not square:
        return math.inf
    return 10 * math.log10(power / square) if power else -math.inf


def quotient(a: float, b: float) -> float:
    return a / b if b else (math.copysign(math.inf, a) if a else 0.0)


def expected(x: np.ndarray, t: np.ndarray, name: str) -> dict[str, Any]:
    """The definitions of NUMERICS section 3, over the elements finite in both."""
    both = np.isfinite(x) & np.isfinite(t)
    classes = {
        "nan_mismatch": int((np.isnan(x) ^ np.isnan(t)).sum()),
        "posinf_mismatch": int((np.isposinf(x) ^ np.isposinf(t)).sum()),
        "neginf_mismatch": int((np.isneginf(x) ^ np.isneginf(t)).sum()),
        "count": int(both.sum()),
    }
    if not both.any():
        return {**classes, **dict.fromkeys(FIGURES, math.nan), "worst": None}
    a, b = x[both], t[both]
    delta = a - b
    square, power, own, cross = (math.fsum(m) for m in (delta * delta, b * b, a * a, a * b))
    ulps = np.array([d / spacing(y, name) for d, y in zip(delta, b, strict=True)])
    rank = (99 * len(ulps) + 99) // 100  # nearest rank: the least that 99 % do not exceed
    return {
        **classes,
        "max_abs": float(np.abs(delta).max()),
        "rmse": math.sqrt(square / len(a)),
        "rel_l2": quotient(math.sqrt(square), math.sqrt(power)),
        "rel_l1": quotient(math.fsum(np.abs(delta)), math.fsum(np.abs(b))),
        "cosine": quotient(cross, math.sqrt(own * power)) if own or power else 1.0,
        "sqnr_db": decibel(power, square),
        "max_ulp": float(np.abs(ulps).max()),
        "p99_ulp": float(np.sort(np.abs(ulps))[rank - 1]),
        "bias_ulp": math.fsum(ulps) / len(ulps),
        "slope": quotient(math.fsum(delta * b), power),
        "truth_rms": math.sqrt(power / len(b)),
    }


def assert_expected(x: np.ndarray, t: np.ndarray, name: str) -> Errors:
    """A sum of n terms in FP64 is within γ_n of Σ|terms|; roots, quotients and logs add a few roundings (8 here)."""
    got, want = compare(torch.from_numpy(x), torch.from_numpy(t), name), expected(x, t, name)
    tol = (x.size + 8) * U * 1.01
    both = np.isfinite(x) & np.isfinite(t)
    scale = dict.fromkeys(FIGURES, 0.0)
    if both.any():
        a, b = x[both], t[both]
        delta, power = a - b, math.fsum(b * b)
        scale["bias_ulp"] = float(np.mean([abs(d) / spacing(y, name) for d, y in zip(delta, b, strict=True)]))
        scale["slope"] = math.fsum(np.abs(delta * b)) / power if power else 0.0
        scale["cosine"] = 2.0  # of terms that may cancel: Σ|x·t| ≤ ‖x‖‖t‖
        scale["sqnr_db"] = 20 / math.log(10) + 100.0
    for key in ("count", "nan_mismatch", "posinf_mismatch", "neginf_mismatch"):
        assert getattr(got, key) == want[key], key
    for key in FIGURES:
        mine, theirs = getattr(got, key), want[key]
        if math.isfinite(theirs):
            assert abs(mine - theirs) <= tol * (abs(theirs) + scale[key]), (key, mine, theirs)
        else:
            assert mine == theirs or (math.isnan(mine) and math.isnan(theirs)), (key, mine, theirs)
    return got


VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.5, 3.0, 1e-8, 6e4, -448.0, math.nan, math.inf, -math.inf])


@settings(max_examples=300)
@given(st.data())
def test_every_figure_is_what_numpy_computes(data: st.DataObject) -> None:
    size = tuple(data.draw(st.integers(0, 4), label="size") for _ in range(4))
    name = data.draw(st.sampled_from([f for f in FORMATS if f != "fp64"]), label="format")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    t = rng.standard_normal(size) * 10.0 ** data.draw(st.integers(-6, 4), label="magnitude")
    x = t * (
        1 + rng.standard_normal(size) * data.draw(st.sampled_from([0.0, 1e-12, 1e-3, 1.0]), label="noise")
    )
    for array in (x, t):
        for _ in range(data.draw(st.integers(0, 3)) if array.size else 0):
            array.flat[data.draw(st.integers(0, array.size - 1))] = data.draw(VALUES)
    got = assert_expected(x, t, name)
    if got.count:
        both = np.isfinite(x) & np.isfinite(t)
        assert got.worst is not None
        assert both[got.worst] or got.max_abs == 0
        assert got.max_abs == 0 or abs(x[got.worst] - t[got.worst]) == got.max_abs


def test_figures_in_ulps_of_fp64_are_what_numpy_computes() -> None:
    rng = np.random.default_rng(0)  # no zeros: an error of 1 is more fp64 spacings at 0 than FP64 can count
    t = rng.standard_normal((2, 3, 4, 5))
    assert_expected(t * (1 + 1e-14 * rng.standard_normal(t.shape)), t, "fp64")


@pytest.mark.parametrize("count", [1, 99, 100, 101, 200, 700, 1000])
def test_p99_is_the_least_error_that_99_percent_do_not_exceed(count: int) -> None:
    error = np.random.default_rng(count).permutation(count).astype(float).reshape(1, 1, 1, count)
    got = compare(
        torch.from_numpy(1.0 + error * 2.0**-7), torch.ones(1, 1, 1, count, dtype=torch.float64), "bf16"
    )
    assert sum(e <= got.p99_ulp for e in range(count)) * 100 >= 99 * count
    assert sum(e <= got.p99_ulp - 1 for e in range(count)) * 100 < 99 * count


SPECIAL = [math.nan, math.inf, -math.inf, 2.0]


@pytest.mark.parametrize("x", SPECIAL)
@pytest.mark.parametrize("t", SPECIAL)
def test_each_pair_of_classes_is_counted_and_kept_from_the_figures(x: float, t: float) -> None:
    """A second element, off by ½, is all that the figures see (with the pair of 2s where both are finite)."""
    out = torch.tensor([[[[x, 1.5]]]], dtype=torch.float64)
    truth = torch.tensor([[[[t, 1.0]]]], dtype=torch.float64)
    got = compare(out, truth, "fp32")
    same = x == t or (math.isnan(x) and math.isnan(t))
    assert got.nan_mismatch == (math.isnan(x) != math.isnan(t))
    assert got.posinf_mismatch == ((x == math.inf) != (t == math.inf))
    assert got.neginf_mismatch == ((x == -math.inf) != (t == -math.inf))
    assert (got.class_mismatch == 0) == same
    assert got.count == 1 + (x == t == 2.0)
    assert got.max_abs == 0.5
    assert got.worst == (0, 0, 0, 1)


def test_nothing_finite_gives_no_figures() -> None:
    x = torch.full((1, 2, 1, 3), math.nan, dtype=torch.float64)
    got = compare(x, x, "bf16")
    assert (got.count, got.class_mismatch, got.worst) == (0, 0, None)
    assert all(math.isnan(getattr(got, name)) for name in FIGURES)


@pytest.mark.parametrize("size", [(0, 1, 2, 3), (1, 1, 0, 3), (1, 1, 2, 0)])
def test_an_empty_output_gives_no_figures_and_no_mismatch(size: tuple[int, ...]) -> None:
    got = compare(torch.zeros(size), torch.zeros(size, dtype=torch.float64), "bf16")
    assert (got.count, got.class_mismatch, got.worst) == (0, 0, None)
    assert all(math.isnan(getattr(got, name)) for name in FIGURES)


def test_zeros_of_either_sign_are_equal() -> None:
    got = compare(
        torch.tensor([[[[-0.0, 0.0]]]]), torch.tensor([[[[0.0, -0.0]]]], dtype=torch.float64), "fp16"
    )
    assert (got.max_abs, got.max_ulp, got.bias_ulp, got.class_mismatch, got.cosine) == (0, 0, 0, 0, 1.0)
    assert got.sqnr_db == math.inf


def test_an_error_on_a_zero_truth_is_infinite_in_relative_figures() -> None:
    got = compare(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2, dtype=torch.float64), "fp32")
    assert got.rel_l2 == got.rel_l1 == math.inf
    assert got.sqnr_db == -math.inf
    assert (got.cosine, got.slope, got.rmse) == (0.0, 0.0, 1.0)
    assert got.max_ulp == 2.0**149


@pytest.mark.parametrize("value", [1e200, -1e300, 1.7e308])
def test_squares_beyond_fp64_give_infinite_figures_and_no_crash(value: float) -> None:
    got = compare(
        torch.full((1, 1, 1, 2), value, dtype=torch.float64), torch.ones(1, 1, 1, 2).double(), "fp32"
    )
    assert got.max_abs == abs(value)
    assert got.rmse == got.rel_l2 == math.inf
    assert got.sqnr_db == -math.inf


def test_a_quotient_below_fp64_still_has_its_decibels() -> None:
    t = torch.tensor([[[[1e-150]]]], dtype=torch.float64)
    x = torch.full_like(t, 1e100)
    assert abs(compare(x, t, "fp32").sqnr_db + 5000) <= 5000 * 8 * U


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_an_output_of_any_float_type_counts_by_its_values(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    t = torch.from_numpy(rng.standard_normal((1, 2, 3, 4)))
    x = t.float().to(dtype)
    assert compare(x, t, "bf16") == compare(x.double(), t, "bf16")


def test_layout_of_the_output_does_not_move_the_worst_index() -> None:
    t = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    x = torch.zeros(2, 4, 3, 5).transpose(1, 2)
    x[1, 2, 3, 4] = -1.0
    assert compare(x, t, "fp32").worst == (1, 2, 3, 4)


def test_an_output_that_needs_a_gradient_is_compared_without_it() -> None:
    assert (
        compare(torch.ones(1, 1, 1, 2, requires_grad=True), torch.ones(1, 1, 1, 2).double(), "fp32").max_abs
        == 0
    )


def test_other_shapes_are_a_mistake_even_where_they_broadcast() -> None:
    message = r"output is \(1, 1, 2, 3\) and truth \(1, 1, 1, 3\); allowed: one shape"
    with pytest.raises(ValueError, match=message):
        compare(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 1, 3, dtype=torch.float64), "fp32")


@pytest.mark.parametrize("special", [[], [math.nan], [math.inf, math.nan], [math.inf, -math.inf]])
def test_place_of_the_largest_is_torchs(special: list[float]) -> None:
    x = torch.tensor([1.0, 3.0, *special, 3.0, 2.0, *special], dtype=torch.float64)
    assert argmax(x) == int(x.argmax())
    assert argmax(x.view(2, -1).mT) == int(x.view(2, -1).mT.argmax())
