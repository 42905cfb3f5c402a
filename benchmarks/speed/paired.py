"""Two pieces of work compared in one run: interleaved ABBA, so that what else the machine does meets both."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DRAWS = 2000
Work = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """Median over rounds of a ÷ b and the 95 % bootstrap interval of that median; median CPU seconds of each."""

    value: float
    low: float
    high: float
    a_s: float
    b_s: float
    rounds: int

    @property
    def inverse(self) -> Ratio:
        """b ÷ a: how many times faster a is."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low, self.b_s, self.a_s, self.rounds)

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} … {self.high:.2f})"


def paired(a: Work, b: Work, rounds: int, clock: Callable[[], float] = time.process_time) -> Ratio:
    """a ÷ b by CPU time of this process, all threads; each round is a b b a. Both have run once before."""

    def seconds(work: Work) -> float:
        start = clock()
        work()
        return clock() - start

    a(), b()
    found = []
    for _ in range(rounds):
        a1, b1, b2, a2 = seconds(a), seconds(b), seconds(b), seconds(a)
        found.append(((a1 + a2) / 2, (b1 + b2) / 2))
    return summary([x / y for x, y in found], [x for x, _ in found], [y for _, y in found])


def summary(ratios: Sequence[float], a_s: Sequence[float], b_s: Sequence[float]) -> Ratio:
    """Median and interval; the same draws in every run."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    low, high = medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS)]
    value = statistics.median(ratios)
    return Ratio(value, low, high, statistics.median(a_s), statistics.median(b_s), len(ratios))
