"""How far a mean of paired differences may lie from 0 by chance, where bits moved without a fault.

A test compares a mean d̄ with smallest + allowance. Unchanged code has d̄ = s·σ·N(0, 1), with σ from the figures
(`gate.drift`) and a level s that is not known. Two limits hold its chance of passing to α each, for every s ≤ S0, and
the lower one counts: together 2α.

1. **By the level that was measured.** ŝ² = s²·χ²_ν/ν is independent of d̄, so with a = smallest/(S0·σ) the chance of
   d̄ > smallest + z·ŝ·σ is P(N > a + z·√(χ²_ν/ν)) (the tail of Student's t where a = 0), and `factor` gives the z that
   makes it α. ν is small, 4 where two cases have three seeds: z is then 4 to 30, not the normal's 5.
2. **By the level that roundings have at most.** With S0 in place of ŝ the level is known. log rmse is half the
   logarithm of a mean of squares, and of few elements far from normal: d is ½·log F with as many degrees of freedom m
   on both sides as give it the variance (S0·σ)², about 1/m. Of X, Y ~ χ²_m, P(X > e^{2L}·Y) ≤ min_t
   E e^{t(X − e^{2L}Y)} = cosh(L)^−m, which is α at L = arcosh(α^{−1/m}): √(2·ln(1/α))·S0·σ where m is large.

Why S0² = ½: if errors are normal with deviations σ_i, S = Σ e² has Var S = 2·Σ σ_i⁴ ≤ 2·max σ²·E S, where τ, of
`gate.drift`, allows max e²·S. Hence s² ≤ 2·max σ²/max e², and the largest of thirty errors or more is two deviations
or more, of a few hundred three (s ≤ 0.47). Measured with another library's products: 0.35 over all implementations, of
one 0.69 at most. The largest of few errors is less: of n errors of one deviation, m = n, it is about n_eff = S/max²
in units of σ² (drawn: 8 errors have n_eff² = 6, 16 have 14), so that m is about n_eff² there, and 4·n_eff or more
elsewhere (64 errors: 39; 1,000: 350). `unit` makes both one: every rounding drawn anew is at most S0 times
max(τ, 2·√2·τ²).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

S0 = math.sqrt(0.5)
ALARMS = 1e-3  # a gate whose bits moved: the chance that any of its tests passes its limit
_STEPS = 160


@dataclass(frozen=True)
class Level:
    """The measured s with its degrees of freedom, and the α of one limit. Without freedom nothing is known of s: it is
    0, and so is the allowance."""

    scale: float
    freedom: int
    alpha: float

    def allowance(self, smallest: float, sigma: float) -> float:
        if not (self.scale and self.freedom):
            return 0.0
        z = factor(smallest / (S0 * sigma), self.freedom, self.alpha)
        return min(z * self.scale * sigma, ceiling(sigma, self.alpha))


def unit(tau: float) -> float:
    """The deviation of a pair at level 1: τ, and more of the few elements that a τ above 0.35 tells of."""
    return max(tau, 2 * math.sqrt(2) * tau * tau)


def share(tests: int) -> float:
    """α of each limit of a test, so that all of them together alarm with a chance of ALARMS at most (Bonferroni)."""
    return ALARMS / (2 * max(1, tests))


def tail(a: float, z: float, freedom: int) -> float:
    """P(N > a + z·u) with u² = χ²/freedom: an integral over y = log u, about its peak."""
    nu = float(freedom)
    peak = -0.5 * math.log1p(z * z / nu)
    low, high = peak - 30 / nu - 6 / math.sqrt(nu), peak + 2 / math.sqrt(nu) + 8 / math.sqrt(nu + 1)
    constant = math.log(2) + nu / 2 * math.log(nu / 2) - math.lgamma(nu / 2)
    step = (high - low) / _STEPS
    points = (low + (n + 0.5) * step for n in range(_STEPS))
    return step * math.fsum(
        math.exp(constant + nu * y - nu / 2 * math.exp(2 * y)) * _beyond(a + z * math.exp(y)) for y in points
    )


@lru_cache(maxsize=4096)
def factor(a: float, freedom: int, alpha: float) -> float:
    """The z at which `tail` is alpha: by halving, to 1 in 10⁴; 0 where a alone suffices."""
    if _beyond(a) <= alpha:
        return 0.0
    high = 1.0
    while tail(a, high, freedom) > alpha and high < 1e9:
        high *= 2
    low = high / 2 if high > 1 else 0.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(a, middle, freedom) > alpha else (low, middle)
    return high


def ceiling(sigma: float, alpha: float) -> float:
    """L with cosh(L)^−m = alpha."""
    # log cosh L = log(1/α)/m =: g; arcosh(e^g) = g + log(1 + √(1 − e^−2g)), without overflow
    g = -math.log(alpha) * (S0 * sigma) ** 2
    return g + math.log1p(math.sqrt(-math.expm1(-2 * g)))


def _beyond(x: float) -> float:
    """Of a standard normal."""
    return 0.5 * math.erfc(x / math.sqrt(2))
