"""One rounding against the definition, gfloat, ml_dtypes and itself; every 8- and 16-bit code is tried."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from harness import rounding
from harness.formats import FORMATS, FP32, FP64, FloatFormat
from harness.rounding import round_own, round_to, ulp

NAMES = list(FORMATS)
FNUZ = dataclasses.replace(
    gfloat.formats.format_info_ocp_e4m3, name="e4m3fnuz", bias=8, has_nz=False, num_high_nans=0
)
SMALL = {
    "bf16": (ml_dtypes.bfloat16, gfloat.formats.format_info_bfloat16),
    "fp16": (np.float16, gfloat.formats.format_info_binary16),
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, gfloat.formats.format_info_ocp_e4m3),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, gfloat.formats.format_info_ocp_e5m2),
    "fp8_e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, FNUZ),
}
SOURCES = {np.float32: FP32, np.float64: FP64}
SOURCE = pytest.mark.parametrize("source", SOURCES, ids=["from_fp32", "from_fp64"])
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
POLICIES = [(n, p) for n in NAMES for p in ("saturate", "nan", "inf") if p != "inf" or "e4m3" not in n]
POLICY = pytest.mark.parametrize(("name", "policy"), POLICIES)
FORMAT = pytest.mark.parametrize("name", NAMES)
SPECIAL_BITS = {
    np.float32: np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000], np.uint32),
    np.float64: np.array([2**63 - 1, 2**64 - 1, 0x7FF0000000000001, 0xFFF0000000000001], np.uint64),
}


def definition(x: np.ndarray, fmt: FloatFormat, policy: str | None = None) -> np.ndarray:
    """ldexp(rint(ldexp(x, -e)), e) in FP64, then the policy; `x` of either dtype. NUMERICS section 1."""
    limit = min(fmt.max, float(np.finfo(x.dtype).max))
    with np.errstate(all="ignore"):
        x64 = x.astype(np.float64)
        e = np.maximum(np.frexp(x64)[1] - 1, fmt.emin) - (fmt.precision - 1)
        rounded = np.where(np.isfinite(x64), np.ldexp(np.rint(np.ldexp(x64, -e)), e), x64)
        beyond = {"saturate": limit, "nan": math.nan, "inf": math.inf}[policy or fmt.default_overflow]
        return np.where(np.abs(rounded) > limit, np.copysign(beyond, x64), rounded)


def convert(x: np.ndarray, dtype: Any) -> np.ndarray:
    """`astype` without the warnings: signalling NaNs, overflow and underflow are among the cases."""
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def rounded(x: np.ndarray, fmt: str | FloatFormat, policy: str | None = None) -> np.ndarray:
    return round_to(torch.from_numpy(x), fmt, policy).numpy()


def assert_same(given_: np.ndarray, expected: np.ndarray, x: np.ndarray, call: str) -> None:
    """Equal bit for bit, except that every NaN is the same NaN."""
    got, want = convert(given_, np.float64), convert(expected, np.float64)
    same = np.where(np.isnan(want), np.isnan(got), (got == want) & (np.signbit(got) == np.signbit(want)))
    if not same.all():
        i = int(np.argmin(same))
        raise AssertionError(
            f"{got[i]!r}, but should be {want[i]!r} [{call} of {x[i]!r}; {np.sum(~same)} differ]"
        )


def finite_values(name: str) -> np.ndarray:
    """All non-negative finite values in ascending order, FP64 (TF32: the top 19 bits of FP32)."""
    if name == "tf32":
        values = (np.arange(2**18, dtype=np.uint32) << 13).view(np.float32)
    else:
        bits = FORMATS[name].storage_bits
        values = np.arange(2 ** (bits - 1), dtype=f"uint{bits}").view(SMALL[name][0])
    values = convert(values, np.float64)
    return values[np.isfinite(values)]


def around_midpoints(name: str, source: type) -> np.ndarray:
    """Every midpoint, the one beyond max included, with both neighbours in `source`; both signs."""
    values = finite_values(name)
    values = np.append(values, values[-1] + (values[-1] - values[-2]))
    with np.errstate(under="ignore"):  # the midpoint of 0 and the smallest subnormal may be a subnormal
        exact = (values[:-1] + values[1:]) / 2
        middle = exact.astype(source)
        assert np.array_equal(middle, exact)
        neighbours = [np.nextafter(middle, source(math.inf)), np.nextafter(middle, source(0))]
    points = np.concatenate([middle, *neighbours])
    return np.concatenate([points, -points])


def any_bits(source: type, n: int, seed: int) -> np.ndarray:
    """Half uniform bit patterns, half within 2^±40 (where the narrow formats are); specials at the end."""
    rng = np.random.default_rng(seed)
    width = np.uint32 if source is np.float32 else np.uint64
    patterns = rng.integers(0, np.iinfo(width).max, n // 2, dtype=width, endpoint=True).view(source)
    scaled = np.ldexp(rng.standard_normal(n // 2), rng.integers(-40, 40, n // 2)).astype(source)
    special = np.array([0.0, -0.0, math.inf, -math.inf], source)
    return np.concatenate([patterns, scaled, special, SPECIAL_BITS[source].view(source)])


@st.composite
def bit_patterns(draw: st.DrawFn, source: type) -> np.ndarray:
    """64 patterns: all are possible, and some are moved into the range of the narrow formats."""
    width = np.uint32 if source is np.float32 else np.uint64
    x = draw(hnp.arrays(width, 64, elements=st.integers(0, int(np.iinfo(width).max)))).view(source)
    if draw(st.booleans()):
        significand, _ = np.frexp(np.where(np.isfinite(x), x, source(1)))
        exponent = draw(hnp.arrays(np.int32, 64, elements=st.integers(-30, 18)))
        x = np.ldexp(significand, exponent).astype(source)
    return x


@SOURCE
@pytest.mark.parametrize("name", [*SMALL, "tf32"])
def test_every_code_of_a_narrow_format_is_a_fixed_point(name: str, source: type) -> None:
    if name == "tf32":
        codes = (np.arange(2**19, dtype=np.uint32) << 13).view(np.float32)
    else:
        bits = FORMATS[name].storage_bits
        codes = np.arange(2**bits, dtype=f"uint{bits}").view(SMALL[name][0])
    x = convert(codes, source)
    assert_same(rounded(x, name), x, x, f"round_to {name}")


@SOURCE
@pytest.mark.parametrize("name", [*SMALL, "tf32"])
def test_every_midpoint_and_its_neighbours_round_as_the_definition_says(name: str, source: type) -> None:
    x = around_midpoints(name, source)
    assert_same(rounded(x, name), definition(x, FORMATS[name]), x, f"round_to {name}")


def signed(values: np.ndarray, x: np.ndarray, name: str) -> np.ndarray:
    """FNUZ has no −0, but a zero rounded to it keeps its sign here: its value is the same."""
    return values if FORMATS[name].signed_zero else np.where(values == 0, np.copysign(0.0, x), values)


@pytest.mark.parametrize("name", SMALL)
def test_every_fp32_midpoint_and_its_neighbours_round_as_in_ml_dtypes(name: str) -> None:
    x = around_midpoints(name, np.float32)
    expected = signed(convert(convert(x, SMALL[name][0]), np.float64), x, name)
    assert_same(rounded(x, name, "nan" if "e4m3" in name else "inf"), expected, x, f"round_to {name}")


@pytest.mark.parametrize("name", SMALL)
def test_every_fp64_midpoint_and_its_neighbours_round_as_in_gfloat(name: str) -> None:
    x = around_midpoints(name, np.float64)
    for policy, sat in (("nan" if "e4m3" in name else "inf", False), ("saturate", True)):
        expected = signed(gfloat.round_ndarray(SMALL[name][1], x, sat=sat), x, name)
        assert_same(rounded(x, name, policy), expected, x, f"round_to {name} {policy}")


@SOURCE
@POLICY
def test_a_hundred_thousand_patterns_round_as_the_definition_says(
    name: str, policy: str, source: type
) -> None:
    x = any_bits(source, 100_000, seed=1)
    assert_same(
        rounded(x, name, policy), definition(x, FORMATS[name], policy), x, f"round_to {name} {policy}"
    )


@SOURCE
@FORMAT
@settings(max_examples=50)
@given(data=st.data())
def test_any_bit_pattern_rounds_as_the_definition_says(name: str, source: type, data: st.DataObject) -> None:
    x = data.draw(bit_patterns(source))
    assert_same(rounded(x, name), definition(x, FORMATS[name]), x, f"round_to {name}")


def test_fp64_is_rounded_once_and_not_through_fp32() -> None:
    """1 + 2^-8 is a midpoint of BF16; in FP32 the 2^-30 above it is lost and the tie goes down to 1."""
    x = torch.tensor([1 + 2**-8 + 2**-30, 1 + 2**-8, 1 + 2**-8 - 2**-30], dtype=torch.float64)
    assert round_to(x, "bf16").tolist() == [1.0078125, 1.0, 1.0]


# Next number after max, and max, as OFP8 1.0 and IEEE 754 would have it with an unbounded exponent.
@pytest.mark.parametrize(
    ("name", "top", "midpoint", "ties_up"),
    [
        ("fp8_e4m3", 448.0, 464.0, False),
        ("fp8_e5m2", 57344.0, 61440.0, True),
        ("fp16", 65504.0, 65520.0, True),
        ("bf16", float.fromhex("0x1.fep127"), float.fromhex("0x1.ffp127"), True),
        ("tf32", float.fromhex("0x1.ffcp127"), float.fromhex("0x1.ffep127"), True),
    ],
)
@SOURCE
def test_overflow_starts_at_the_midpoint_beyond_max_as_ties_to_even_has_it(
    name: str, top: float, midpoint: float, ties_up: bool, source: type
) -> None:
    beyond = {"saturate": top, "nan": math.nan, "inf": math.inf}
    below = np.nextafter(source(midpoint), source(0))
    above = np.nextafter(source(midpoint), source(np.finfo(source).max))
    x = np.array([top, below, midpoint, above, np.finfo(source).max, math.inf], source)
    for policy in ("saturate", "nan", "inf"):
        if (name, policy) not in POLICIES:
            continue
        over = beyond[policy]
        expected = np.array([top, top, over if ties_up else top, over, over, over])
        assert_same(rounded(x, name, policy), expected, x, f"round_to {name} {policy}")
        assert_same(rounded(-x, name, policy), -expected, -x, f"round_to {name} {policy}")


@DTYPE
def test_e4m3_keeps_464_and_loses_465(dtype: torch.dtype) -> None:
    x = torch.tensor([464.0, 464.0001, 465.0, 479.9, 480.0, 496.0, 512.0, 1e30], dtype=dtype)
    assert round_to(x, "fp8_e4m3").tolist() == [448.0] * 8
    lost = round_to(x, "fp8_e4m3", "nan")
    assert lost[0] == 448.0
    assert lost[1:].isnan().all()


@DTYPE
@FORMAT
def test_the_default_policy_is_that_of_the_format(name: str, dtype: torch.dtype) -> None:
    got = round_to(torch.tensor([math.inf, -math.inf], dtype=dtype), name).tolist()
    assert got == ([FORMATS[name].max, -FORMATS[name].max] if "e4m3" in name else [math.inf, -math.inf])


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_a_format_as_wide_as_the_dtype_changes_infinities_only(name: str) -> None:
    x = any_bits(np.float32, 100_000, seed=2)
    assert_same(rounded(x, name), x, x, f"round_to {name}")
    top = float(np.finfo(np.float32).max)
    assert_same(rounded(x, name, "saturate"), np.clip(x, -top, top), x, f"round_to {name} saturate")
    assert_same(rounded(x, name, "nan"), np.where(np.isinf(x), np.nan, x), x, f"round_to {name} nan")


@SOURCE
@POLICY
def test_nan_stays_nan_whatever_its_payload(name: str, policy: str, source: type) -> None:
    assert np.isnan(rounded(SPECIAL_BITS[source].view(source), name, policy)).all()


@SOURCE
@POLICY
def test_zero_and_what_rounds_to_zero_keep_their_sign(name: str, policy: str, source: type) -> None:
    fmt = FORMATS[name]
    tiny = fmt.min_subnormal / 2 if fmt.min_subnormal > SOURCES[source].min_subnormal else 0.0
    x = np.array([0.0, tiny, tiny / 2], source)
    got = rounded(np.concatenate([x, -x]), name, policy)
    assert not got.any()
    assert np.signbit(got).tolist() == [False] * 3 + [True] * 3


@SOURCE
@POLICY
def test_rounding_is_monotone_idempotent_and_odd(name: str, policy: str, source: type) -> None:
    x = any_bits(source, 50_000, seed=3)
    x = np.sort(x[~np.isnan(x)])
    y = rounded(x, name, policy)
    number = y[~np.isnan(y)]
    assert (number[1:] >= number[:-1]).all()
    assert_same(rounded(y, name, policy), y, y, f"round_to {name} {policy}")
    assert_same(rounded(-x, name, policy), -y, -x, f"round_to {name} {policy}")


@SOURCE
@POLICY
def test_x_is_not_modified_and_shares_no_memory_with_the_result(name: str, policy: str, source: type) -> None:
    x = torch.from_numpy(any_bits(source, 1000, seed=4))
    integer = torch.int32 if source is np.float32 else torch.int64
    before = x.view(integer).clone()
    round_to(x, name, policy).fill_(7.0)
    ulp(x, "bf16").fill_(7.0)
    assert torch.equal(x.view(integer), before)


@SOURCE
@POLICY
def test_parts_and_its_own_memory_round_as_the_whole(
    name: str, policy: str, source: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = any_bits(source, 1000, seed=4)
    whole, call = rounded(x, name, policy), f"round_to {name} {policy}"
    for chunk in (300, 2**18):
        monkeypatch.setattr(rounding, "CHUNK", chunk)
        assert_same(rounded(x, name, policy), whole, x, call)
        own = torch.from_numpy(x.copy())
        assert round_own(own, name, policy).data_ptr() == own.data_ptr()
        assert_same(own.numpy(), whole, x, call)
        spread = torch.stack([torch.from_numpy(x)] * 2, -1)[:, 0]
        assert_same(round_own(spread, name, policy).numpy(), whole, x, call)


@DTYPE
@FORMAT
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (3, 5, 7)])
def test_shape_and_dtype_are_those_of_x(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    y = round_to(torch.ones(shape, dtype=dtype), name)
    assert y.shape == shape
    assert y.dtype == dtype
    assert torch.equal(y, torch.ones(shape, dtype=dtype))


@DTYPE
@FORMAT
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 2),
        lambda x: x[::2, :, 1::3],
        lambda x: x[:1, :, :1].expand(8, 9, 5),
        lambda x: x.flatten()[3:].unfold(0, 4, 2),
        lambda x: x[1, 2, 3],
    ],
    ids=["transposed", "strided", "expanded", "overlapping", "scalar"],
)
def test_strided_views_round_as_their_contiguous_copies(name: str, dtype: torch.dtype, view: Any) -> None:
    x = view(torch.randn(8, 9, 10, dtype=dtype, generator=torch.Generator().manual_seed(5)) * 300)
    for policy in ("saturate", "nan"):
        got, expected = round_to(x, name, policy), round_to(x.contiguous(), name, policy)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    if (name, dtype) != ("fp64", torch.float32):
        assert torch.equal(ulp(x, name), ulp(x.contiguous(), name))


@FORMAT
def test_the_result_carries_no_gradient(name: str) -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert not round_to(x, name).requires_grad
    assert not ulp(x, name).requires_grad


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, dtype=d)
        for d in (torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.complex64)
    ]
    + [1.0, np.ones(2), [1.0], None],
    ids=lambda x: str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__,
)
@pytest.mark.parametrize("function", [round_to, ulp])
def test_what_is_not_an_fp32_or_fp64_tensor_is_refused(function: Any, x: object) -> None:
    given_ = str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__
    with pytest.raises(ValueError, match=r"torch.float32 or torch.float64, got ") as caught:
        function(x, "bf16")
    assert f"got {given_};" in str(caught.value)


def test_unknown_formats_and_policies_and_an_absent_infinity_are_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="unknown format 'int8'"):
        round_to(x, "int8")
    with pytest.raises(ValueError, match="unknown format 'int8'"):
        ulp(x, "int8")
    with pytest.raises(ValueError, match="unknown overflow policy 'wrap'"):
        round_to(x, "fp16", "wrap")
    with pytest.raises(ValueError, match="fp8_e4m3 has no infinity"):
        round_to(x, "fp8_e4m3", "inf")


@SOURCE
@pytest.mark.parametrize(
    "fmt",
    [
        FloatFormat("fp6_e3m2", precision=3, exponent_bits=3, bias=3, infinities=False, storage_bits=6),
        FloatFormat("fp9_e4m4", precision=5, exponent_bits=4, bias=7, infinities=True, storage_bits=9),
        FloatFormat("fp24", precision=17, exponent_bits=7, bias=63, infinities=True, storage_bits=24),
        FloatFormat("fp31", precision=23, exponent_bits=8, bias=127, infinities=True, storage_bits=32),
    ],
    ids=lambda fmt: fmt.name,
)
def test_formats_of_ones_own_round_as_the_definition_says(fmt: FloatFormat, source: type) -> None:
    x = any_bits(source, 50_000, seed=6)
    for policy in ("saturate", "nan", "inf") if fmt.infinities else ("saturate", "nan"):
        assert_same(rounded(x, fmt, policy), definition(x, fmt, policy), x, f"round_to {fmt.name} {policy}")


@pytest.mark.parametrize(
    "fmt",
    [
        FloatFormat("wide", precision=8, exponent_bits=11, bias=1023, infinities=True, storage_bits=19),
        FloatFormat("low", precision=8, exponent_bits=8, bias=150, infinities=True, storage_bits=16),
        FloatFormat("long", precision=23, exponent_bits=6, bias=31, infinities=True, storage_bits=32),
        FloatFormat("fn", precision=8, exponent_bits=8, bias=127, infinities=False, storage_bits=16),
    ],
    ids=lambda fmt: fmt.name,
)
def test_a_format_that_fp32_cannot_emulate_is_refused(fmt: FloatFormat) -> None:
    with pytest.raises(ValueError, match=f"{fmt.name} cannot be emulated in fp32"):
        round_to(torch.ones(2), fmt)


def scalar_ulp(x: float, fmt: FloatFormat) -> float:
    if not math.isfinite(x):
        return math.nan
    exponent = fmt.emin if x == 0 else math.frexp(x)[1] - 1
    return math.ldexp(1.0, min(max(exponent, fmt.emin), fmt.emax) - fmt.precision + 1)


@SOURCE
@FORMAT
def test_ulp_equals_a_scalar_oracle_everywhere(name: str, source: type) -> None:
    if (name, source) == ("fp64", np.float32):
        with pytest.raises(ValueError, match=r"fp64 underflows in torch\.float32; pass an FP64 tensor"):
            ulp(torch.ones(2), name)
        return
    fmt = FORMATS[name]
    edges = np.array([fmt.max, fmt.min_normal, fmt.min_normal / 2, fmt.min_subnormal, 1.0, 2.0], source)
    x = np.concatenate([any_bits(source, 4000, seed=7), edges, -edges])
    got = ulp(torch.from_numpy(x), name).numpy()
    assert got.dtype == source
    assert_same(got, np.array([scalar_ulp(float(v), fmt) for v in x]), x, f"ulp {name}")


@SOURCE
@pytest.mark.parametrize("name", [*SMALL, "tf32"])
def test_ulp_is_the_distance_to_the_next_value_of_the_format(name: str, source: type) -> None:
    values = finite_values(name)
    got = ulp(torch.from_numpy(values[:-1].astype(source)), name).numpy()
    assert_same(got, np.diff(values), values[:-1], f"ulp {name}")


@SOURCE
@FORMAT
def test_the_rounding_error_is_at_most_half_an_ulp(name: str, source: type) -> None:
    x = convert(any_bits(source, 50_000, seed=8), np.float64)
    x = x[np.abs(x) <= min(FORMATS[name].max, float(np.finfo(source).max))]
    error = np.abs(rounded(x.astype(source), name).astype(np.float64) - x)
    assert (2 * error <= ulp(torch.from_numpy(x), name).numpy()).all()


@pytest.mark.gpu
@SOURCE
def test_cuda_rounds_as_the_cpu_does(source: type) -> None:
    x = any_bits(source, 200_000, seed=9)
    for name, policy in POLICIES:
        got = round_to(torch.from_numpy(x).cuda(), name, policy).cpu().numpy()
        assert_same(got, rounded(x, name, policy), x, f"round_to {name} {policy} on CUDA")
