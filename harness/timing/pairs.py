"""Two things timed by turns, until the interval of their ratio decides."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.timing.rule import Interval, Speed, interval, looks, tail_of, verdict

ORDER = (0, 1, 1, 0, 1, 0, 0, 1)
Clock = Callable[[int], float]  # seconds that so many calls take
SPAN_S = (
    1e-3  # of calls that are timed together: a thousand times what the clock and the loop around a call take
)
WARM_S = 0.05  # of warm-up, and at least this many calls
WARM_CALLS = 2
NARROW = 0.5  # of the threshold: once decided, with half the ratio's interval below that, no more rounds are needed
BUDGET_S = 10.0
THRESHOLD = 0.05


@dataclass(frozen=True)
class Paired:
    """`ratio`: B ÷ A. `a_s`, `b_s`: seconds a call, of the quickest spans alone, as in the ratio; their intervals are
    wider than its where both sides were disturbed. `calls` of A and of B make a span. `fewest`, `most`:
    rounds that an interval needs, and that there may be. `unrepeated`: fresh processes did not say the same."""

    ratio: Interval
    a_s: Interval
    b_s: Interval
    verdict: Speed
    rounds: int
    calls: tuple[int, int]
    fewest: int
    most: int
    unrepeated: bool = False


def paired(
    a: Clock, b: Clock, budget_s: float = BUDGET_S, threshold: float = THRESHOLD, comparisons: int = 1
) -> Paired:  # fmt: skip
    """Compare by the rule of `harness.timing.rule`. The budget is for warm-up and rounds; the round that it ends in is
    finished. Without the first look's rounds there is no verdict, only UNDECIDED."""
    tail = tail_of(comparisons)
    until, end = looks(tail), time.perf_counter() + budget_s
    calls = (_calls(a), _calls(b))
    times: tuple[list[float], list[float]] = ([], [])
    for look in until:
        while len(times[0]) < look and (not times[0] or time.perf_counter() < end):
            _round(a, b, calls, times, len(times[0]))
        found = _found(times, tail, threshold, calls, until)
        decided = found.verdict is not Speed.UNDECIDED and _half(found.ratio) <= NARROW * threshold
        if decided or time.perf_counter() >= end:
            break
    return found


def repeated(measure: Callable[[], Paired], renew: Callable[[], None]) -> Paired:
    """`measure`, and where it calls one side slower or faster, once more after `renew` has started both anew: what does
    not repeat is UNDECIDED.

    Two processes of the same code differ by where the system has put their memory, by 5 % and more where a call's
    matrices fill a cache, for as long as they live: rounds cannot tell that from code, and other processes can.
    """
    first = measure()
    if first.verdict not in (Speed.SLOWER, Speed.FASTER):
        return first
    renew()
    again = measure()
    return (
        again if again.verdict is first.verdict else replace(again, verdict=Speed.UNDECIDED, unrepeated=True)
    )


def _calls(clock: Clock) -> int:
    """Warm up, and say how many calls make a span."""
    took: list[float] = []
    while len(took) < WARM_CALLS or sum(took) < WARM_S:
        took.append(clock(1))
    return max(1, math.ceil(SPAN_S / max(min(took), 1e-9)))


def _round(
    a: Clock, b: Clock, calls: tuple[int, int], times: tuple[list[float], list[float]], turn: int
) -> None:
    """A B B A B A A B, or its mirror every second time; the quickest of a side counts."""
    took: tuple[list[float], list[float]] = ([], [])
    for side in ORDER if turn % 2 == 0 else ORDER[::-1]:
        took[side].append((a, b)[side](calls[side]) / calls[side])
    for side in (0, 1):
        times[side].append(max(min(took[side]), 1e-12))


def _found(
    times: tuple[list[float], list[float]], tail: float, threshold: float, calls: tuple[int, int],
    until: tuple[int, ...],
) -> Paired:  # fmt: skip
    ratio = interval([y / x for x, y in zip(*times, strict=True)], tail)
    a_s, b_s = (interval(x, tail) for x in times)
    return Paired(ratio, a_s, b_s, verdict(ratio, threshold), len(times[0]), calls, until[0], until[-1])


def _half(x: Interval) -> float:
    return (x.high - x.low) / (2 * x.median)
