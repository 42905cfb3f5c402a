"""The decision: is B slower than A, faster, or the same within a threshold?

**A round** is A B B A B A A B, and counts the quickest of each side's four:

    x = ln min(b₁ … b₄) − ln min(a₁ … a₄).

Other work on the machine only ever adds time, and seldom to all four; what drifts evenly over a round favours the side
that comes first, so every second round begins with B. On two cores with a load of 5, medians of 40 rounds A B B A of
0.8 ms calls scattered by 24 % when x took the mean of a side, by 0.6 % when it took the quicker; with a load of 13,
twice as many spans in half as many rounds halved the interval once more, and four times as many did not. The estimate
of ln(B/A) is the median of the rounds, which disturbances of fewer than half of them move little.

**Its interval** runs between two order statistics, x₍ₖ₎ and x₍ₙ₊₁₋ₖ₎, n odd, for a chance `tail` on either side:

* the percentile bootstrap's k. A resample's median is ≤ x₍ₖ₎ where (n + 1)/2 or more of its n draws are, each with
  probability k/n. So the distribution that resampling tends to is P(Bin(n, k/n) ≥ (n + 1)/2), and is computed; nothing
  is drawn at random. x₍ₖ₎ is its `tail` quantile for the smallest k at which that reaches `tail`.
* the sign test's k, the largest with P(Bin(n, ½) ≤ k − 1) ≤ tail: right for every distribution of independent rounds,
  where the bootstrap's tails are too thin when n is small (n = 13, tail 0.125 %: it takes k = 2, which the median is
  below with 0.17 %).

The wider counts. A tail that n rounds cannot have, 2⁻ⁿ > tail, gives no interval.

**The verdict**, for a threshold t: slower where the whole interval is above 1 + t, faster where it is below 1/(1 + t),
the same where it lies between; else the rounds have not decided. Rounds go on until one of these holds and the interval
is narrow, at most LOOKS times looked at; Bonferroni over looks and over all comparisons of one command:

    tail = ALPHA / (LOOKS · comparisons).

So a command raises an alarm on equal speeds, or on any that differ by less than t, with a probability of at most ALPHA,
however long it went on — as far as rounds are independent, which `benchmarks/compare_study.py` puts to the test under
load. What no rounds see is what stays the same during all of them: where a process' memory happens to lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np

ALPHA = 0.01  # chance of a false alarm, of one command
LOOKS = 8
FIRST_LOOK = 13  # rounds
GROWTH = 1.5  # from one look to the next


class Speed(Enum):
    """What a comparison found about B."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "no difference"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Interval:
    """A median between its bounds; bounds are 0 and ∞ where there were too few values."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def looks(tail: float) -> tuple[int, ...]:
    """Rounds after which the interval is looked at: odd, LOOKS of them, the first with enough for its tail."""
    first = max(FIRST_LOOK, fewest(tail))
    return tuple(int(first * GROWTH**i) | 1 for i in range(LOOKS))


def tail_of(comparisons: int, alpha: float = ALPHA) -> float:
    """Of each side of each interval."""
    return alpha / (LOOKS * comparisons)


def fewest(tail: float) -> int:
    """Values below which a median has no interval with such tails: all n may lie on one side, with 2⁻ⁿ."""
    return math.ceil(-math.log2(tail))


@lru_cache(1024)
def rank(n: int, tail: float) -> int:
    """k, from 1, of the interval's lower end; 0 where there is none. n odd."""
    sign, k, passed = 0, 0, 0.0
    while True:
        passed += math.exp(_log_choose(n, k) - n * math.log(2))  # P(Bin(n, ½) ≤ k)
        if passed > tail or k >= n // 2:
            break
        sign, k = k + 1, k + 1
    resampled = next(k for k in range(1, n + 1) if _at_least(n, k / n, (n + 1) // 2) >= tail)
    return min(sign, resampled)


def _at_least(n: int, p: float, least: int) -> float:
    """P(Bin(n, p) ≥ least)."""
    if p >= 1:
        return 1.0
    logs = (_log_choose(n, j) + j * math.log(p) + (n - j) * math.log1p(-p) for j in range(least, n + 1))
    return math.fsum(map(math.exp, logs))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def interval(values: Sequence[float], tail: float) -> Interval:
    """The median of positive values and its interval; of an even number of values the first is left out."""
    if not values or not all(0 < v < math.inf for v in values):
        raise ValueError(
            f"{len(values)} values, {min(values, default=math.nan)} the least; allowed: positive ones"
        )
    ordered = np.sort(np.asarray(values[1 - len(values) % 2 :], dtype=np.float64))
    n = len(ordered)
    middle, k = float(ordered[n // 2]), rank(n, tail)
    if not k:
        return Interval(middle, 0.0, math.inf)
    return Interval(middle, float(ordered[k - 1]), float(ordered[n - k]))


def verdict(ratio: Interval, threshold: float) -> Speed:
    """About B, from the interval of B ÷ A."""
    over, under = 1 + threshold, 1 / (1 + threshold)
    if ratio.low > over:
        return Speed.SLOWER
    if ratio.high < under:
        return Speed.FASTER
    return Speed.SAME if under <= ratio.low and ratio.high <= over else Speed.UNDECIDED
