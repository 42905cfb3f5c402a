"""Growth exponents: y ∝ L^b by least squares on logarithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, two-sided 95 %, by degrees of freedom 1 … 10 (NIST/SEMATECH e-Handbook, section 1.3.6.7.2).
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Exponent:
    """`value` ± `half` is the 95 % interval if y is a power of L and the residuals are noise. Where they are a bend (a
    constant beside the power, say), the interval is about as wide as the bend, and `last`, between the two largest
    lengths, tells where it goes. `half` is infinite for two points."""

    value: float
    half: float
    last: float

    def __str__(self) -> str:
        spread = f" ± {self.half:.2f}" if math.isfinite(self.half) else ""
        return f"{self.value:.2f}{spread}"


def exponent(lengths: Sequence[int], values: Sequence[float]) -> Exponent:
    """Raises ValueError for fewer than two lengths and for values that are not above 0."""
    if len(lengths) != len(values) or len(set(lengths)) < 2:
        raise ValueError(
            f"lengths are {list(lengths)} for {len(values)} values; allowed: two lengths or more"
        )
    if not all(v > 0 for v in values):
        raise ValueError(f"values are {list(values)}; allowed: numbers > 0")
    x, y = [math.log(n) for n in lengths], [math.log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    freedom = len(x) - 2
    half = T_95[min(freedom, len(T_95)) - 1] * math.sqrt(rest / freedom / spread) if freedom else math.inf
    return Exponent(slope, half, (y[-1] - y[-2]) / (x[-1] - x[-2]))
