"""Every derived property against published constants and against ml_dtypes."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from harness.formats import (
    FORMATS,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    OVERFLOW_POLICIES,
    FloatFormat,
    get_format,
)


class Published(NamedTuple):
    max: float
    min_normal: float
    min_subnormal: float
    emin: int
    emax: int
    unit_roundoff: float
    bytes: int
    default_overflow: str


# IEEE 754-2019 tables 3.5 and 3.6; OCP OFP8 1.0 table 1 (448 = 1.75·2^8 and 57344 = 1.75·2^15);
# BF16 and TF32: FP32's exponents with 7 and 10 fraction bits.
PUBLISHED = {
    "fp64": Published(
        1.7976931348623157e308, 2.2250738585072014e-308, 5e-324, -1022, 1023, 2.0**-53, 8, "inf"
    ),
    "fp32": Published(
        3.4028234663852886e38, 1.1754943508222875e-38, 1.401298464324817e-45, -126, 127, 2.0**-24, 4, "inf"
    ),
    "tf32": Published(
        float.fromhex("0x1.ffcp127"), 1.1754943508222875e-38, 2.0**-136, -126, 127, 2.0**-11, 4, "inf"
    ),
    "bf16": Published(
        3.3895313892515355e38, 1.1754943508222875e-38, 9.183549615799121e-41, -126, 127, 2.0**-8, 2, "inf"
    ),
    "fp16": Published(65504.0, 6.103515625e-05, 5.960464477539063e-08, -14, 15, 2.0**-11, 2, "inf"),
    "fp8_e4m3": Published(448.0, 2.0**-6, 2.0**-9, -6, 8, 2.0**-4, 1, "saturate"),
    "fp8_e5m2": Published(57344.0, 2.0**-14, 2.0**-16, -14, 15, 2.0**-3, 1, "inf"),
    # 2206.02915, section 2 (bias 8): 240 = 1.875·2^7; CDNA 3 manual: 0x80 is the one NaN
    "fp8_e4m3fnuz": Published(240.0, 2.0**-7, 2.0**-10, -7, 7, 2.0**-4, 1, "saturate"),
}
DTYPES = {
    "fp64": np.float64,
    "fp32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
}
NAMES = list(FORMATS)


def test_the_table_holds_the_eight_formats_under_their_own_names() -> None:
    assert list(PUBLISHED) == NAMES
    assert all(name == fmt.name for name, fmt in FORMATS.items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", Published._fields)
def test_derived_property_equals_the_published_constant(name: str, field: str) -> None:
    assert getattr(FORMATS[name], field) == getattr(PUBLISHED[name], field)


@pytest.mark.parametrize("name", DTYPES)
def test_derived_properties_equal_those_of_ml_dtypes(name: str) -> None:
    fmt, info = FORMATS[name], ml_dtypes.finfo(DTYPES[name])
    assert float(info.max) == fmt.max
    assert float(info.min) == -fmt.max
    assert float(info.smallest_normal) == fmt.min_normal
    assert float(info.smallest_subnormal) == fmt.min_subnormal
    assert float(info.eps) == 2 * fmt.unit_roundoff
    assert info.nmant == fmt.precision - 1
    assert info.minexp == fmt.emin
    assert info.bits == fmt.storage_bits == 8 * fmt.bytes
    assert info.iexp == fmt.exponent_bits


@pytest.mark.parametrize(
    ("name", "midpoint"),
    [
        ("fp8_e4m3", 464.0),
        ("fp8_e5m2", 61440.0),
        ("fp8_e4m3fnuz", 248.0),
        ("fp16", 65520.0),
        ("bf16", float.fromhex("0x1.ffp127")),
        ("tf32", float.fromhex("0x1.ffep127")),
        ("fp32", float.fromhex("0x1.ffffffp127")),
        ("fp64", math.inf),  # 2^1024 - 2^970 is no FP64 number
    ],
)
def test_the_overflow_threshold_is_the_midpoint_beyond_max(name: str, midpoint: float) -> None:
    assert FORMATS[name].overflow_threshold == midpoint


@pytest.mark.parametrize("name", NAMES)
def test_sign_exponent_and_fraction_fill_the_storage(name: str) -> None:
    fmt = FORMATS[name]
    padding = 13 if name == "tf32" else 0  # TF32 lives in 32 bits
    assert 1 + fmt.exponent_bits + fmt.precision - 1 + padding == fmt.storage_bits
    assert fmt.bias == 2 ** (fmt.exponent_bits - 1) - (1 if fmt.signed_zero else 0)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz"])
def test_codes_hold_an_infinity_exactly_where_the_format_says_so(name: str) -> None:
    bits = FORMATS[name].storage_bits
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the codes
        values = np.arange(2**bits, dtype=f"uint{bits}").view(DTYPES[name]).astype(np.float64)
    assert np.isinf(values).any() == FORMATS[name].infinities
    assert np.max(values[np.isfinite(values)]) == FORMATS[name].max
    assert np.min(values[values > 0]) == FORMATS[name].min_subnormal


def test_e4m3_has_two_nan_codes_and_a_single_negative_zero() -> None:
    """OFP8 1.0 table 1: S.1111.111 is NaN. Under FNUZ, 0x80 would be the only NaN and max would be 240."""
    values = np.arange(256, dtype=np.uint8).view(DTYPES["fp8_e4m3"]).astype(np.float64)
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x7F, 0xFF]
    assert values[0x80] == 0.0
    assert math.copysign(1.0, values[0x80]) == -1.0
    assert FP8_E4M3.max != 240.0


def test_e4m3fnuz_has_one_nan_code_in_the_place_of_negative_zero() -> None:
    values = np.arange(256, dtype=np.uint8).view(DTYPES["fp8_e4m3fnuz"]).astype(np.float64)
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x80]
    assert values[0x7F] == FORMATS["fp8_e4m3fnuz"].max == 240.0


@pytest.mark.parametrize("name", NAMES)
def test_get_format_finds_a_name_and_returns_a_format_as_it_is(name: str) -> None:
    assert get_format(name) is FORMATS[name]
    assert get_format(FORMATS[name]) is FORMATS[name]


@pytest.mark.parametrize("unknown", ["float16", "FP16", "", "fp8", None, 16, ["fp16"]])
def test_an_unknown_format_is_refused_with_the_valid_names(unknown: object) -> None:
    with pytest.raises(ValueError, match="unknown format") as caught:
        get_format(unknown)  # type: ignore[arg-type]
    assert repr(unknown) in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", [None, *OVERFLOW_POLICIES])
def test_every_policy_is_accepted_except_inf_without_an_infinity(name: str, policy: str | None) -> None:
    if name.startswith("fp8_e4m3") and policy == "inf":
        with pytest.raises(ValueError, match=rf"{name} has no infinity; allowed .*: saturate, nan"):
            FORMATS[name].check_overflow(policy)
    else:
        assert FORMATS[name].check_overflow(policy) == (policy or PUBLISHED[name].default_overflow)


@pytest.mark.parametrize("fmt", [FP16, FP8_E4M3, FP8_E5M2])
def test_an_unknown_policy_is_refused_with_the_valid_ones(fmt: FloatFormat) -> None:
    with pytest.raises(ValueError, match="unknown overflow policy 'clip'; allowed: saturate, nan, inf"):
        fmt.check_overflow("clip")


def test_a_format_is_frozen_hashable_and_equal_after_pickling() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FP32.precision = 11  # type: ignore[misc]
    assert {pickle.loads(pickle.dumps(fmt)) for fmt in FORMATS.values()} == set(FORMATS.values())
