"""Floating-point formats as data: a few stored facts each, everything else derived.

Sources: IEEE 754-2019 table 3.5 (FP64, FP32, FP16); OCP 8-bit Floating Point Specification (OFP8) 1.0,
table 1 (E4M3, E5M2); the NVIDIA A100 white paper (TF32: 8 exponent and 10 fraction bits); for E4M3FNUZ 2206.02915,
section 2, and AMD's CDNA 3 instruction set manual. BF16 is FP32 with a 7-bit fraction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

OVERFLOW_POLICIES = ("saturate", "nan", "inf")


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    `precision` counts the hidden bit. `infinities` is False for OCP E4M3 ("FN"): its top exponent holds
    numbers, and only the all-ones significand there is NaN. `signed_zero` is False for FNUZ, whose one NaN has the
    bits of −0, so that the all-ones significand is a number (rounding to it keeps a zero's sign: its value is 0).
    `storage_bits` is what a value occupies in memory (TF32 lives in 32 bits).
    """

    name: str
    precision: int
    exponent_bits: int
    bias: int
    infinities: bool
    storage_bits: int
    signed_zero: bool = True

    @cached_property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        return (1 << self.exponent_bits) - (2 if self.infinities else 1) - self.bias

    @cached_property
    def unit_roundoff(self) -> float:
        """Largest relative error of one rounding to nearest in the normal range, 2^-p."""
        return 2.0**-self.precision

    @cached_property
    def max(self) -> float:
        """Largest finite number: one ulp lower where the all-ones significand is NaN."""
        top = 2.0 - 2.0 ** (1 - self.precision) * (2 if self.nan_at_top else 1)
        return top * 2.0**self.emax

    @property
    def nan_at_top(self) -> bool:
        """Whether the all-ones significand of the top exponent is NaN among numbers: max then has an even one."""
        return not self.infinities and self.signed_zero

    @cached_property
    def overflow_threshold(self) -> float:
        """Midpoint between max and the next step: beyond it rounding leaves the finite range (E4M3: 464, FP16: 65520).

        At the midpoint itself the tie goes to even: infinity where the format has one, max in E4M3, beyond in E4M3FNUZ.
        """
        return self.max + 2.0 ** (self.emax - self.precision)

    @cached_property
    def min_normal(self) -> float:
        return 2.0**self.emin

    @cached_property
    def min_subnormal(self) -> float:
        """Spacing of the subnormals (η in NUMERICS)."""
        return 2.0 ** (self.emin - self.precision + 1)

    @cached_property
    def bytes(self) -> int:
        return self.storage_bits // 8

    @cached_property
    def default_overflow(self) -> str:
        """The declared policy where none is given: infinity where the format has one, else saturation."""
        return "inf" if self.infinities else "saturate"

    def check_overflow(self, policy: str | None) -> str:
        """The policy to use. Raises ValueError for an unknown one, and for `inf` without an infinity."""
        if policy is None:
            return self.default_overflow
        if policy not in OVERFLOW_POLICIES:
            raise ValueError(f"unknown overflow policy {policy!r}; allowed: {', '.join(OVERFLOW_POLICIES)}")
        if policy == "inf" and not self.infinities:
            raise ValueError(f"{self.name} has no infinity; allowed overflow policies: saturate, nan")
        return policy


FP64 = FloatFormat("fp64", precision=53, exponent_bits=11, bias=1023, infinities=True, storage_bits=64)
FP32 = FloatFormat("fp32", precision=24, exponent_bits=8, bias=127, infinities=True, storage_bits=32)
TF32 = FloatFormat("tf32", precision=11, exponent_bits=8, bias=127, infinities=True, storage_bits=32)
BF16 = FloatFormat("bf16", precision=8, exponent_bits=8, bias=127, infinities=True, storage_bits=16)
FP16 = FloatFormat("fp16", precision=11, exponent_bits=5, bias=15, infinities=True, storage_bits=16)
FP8_E4M3 = FloatFormat("fp8_e4m3", precision=4, exponent_bits=4, bias=7, infinities=False, storage_bits=8)
FP8_E5M2 = FloatFormat("fp8_e5m2", precision=3, exponent_bits=5, bias=15, infinities=True, storage_bits=8)
FP8_E4M3FNUZ = FloatFormat(
    "fp8_e4m3fnuz", precision=4, exponent_bits=4, bias=8, infinities=False, storage_bits=8, signed_zero=False
)

FORMATS: dict[str, FloatFormat] = {
    f.name: f for f in (FP64, FP32, TF32, BF16, FP16, FP8_E4M3, FP8_E5M2, FP8_E4M3FNUZ)
}


def get_format(fmt: str | FloatFormat) -> FloatFormat:
    """A format by name (or itself). Raises ValueError naming the valid ones."""
    if isinstance(fmt, FloatFormat):
        return fmt
    try:
        return FORMATS[fmt]
    except (KeyError, TypeError):
        raise ValueError(f"unknown format {fmt!r}; allowed: {', '.join(FORMATS)}") from None
