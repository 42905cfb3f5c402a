"""Paired comparisons: the rule on numbers whose answer is known, and clocks that no test reads a time from."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import benchmarks.test_throughput as throughput
import harness
from harness import registry
from harness.case import Case
from harness.clock import pinned, seconds
from harness.inputs import make_inputs
from harness.quantize import store
from harness.recipe import get_recipe
from harness.result import Result
from harness.spec import AttentionSpec, Shape, parse_shape
from harness.timing.ceilings import product_rate
from harness.timing.pairs import Paired, paired, repeated
from harness.timing.rule import (
    ALPHA,
    LOOKS,
    Interval,
    Speed,
    fewest,
    interval,
    looks,
    rank,
    tail_of,
    verdict,
)

ROOT = Path(__file__).resolve().parent.parent
ODD = (11, 13, 19, 29, 43, 65, 99, 149, 223)


def passed(n: int, k: int) -> float:
    """The chance that the median of n independent values lies below the k-th of them."""
    return sum(math.comb(n, j) for j in range(k)) / 2**n


# --- the interval --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", ODD)
@pytest.mark.parametrize("tail", [0.025, 0.00125, 0.0002])
def test_an_end_of_the_interval_is_passed_with_at_most_its_tail(n: int, tail: float) -> None:
    k = rank(n, tail)
    assert passed(n, k) <= tail
    assert (k == 0) == (n < fewest(tail))


@pytest.mark.parametrize("n", [99, 223])
def test_the_interval_is_no_wider_than_both_the_sign_test_and_the_bootstrap_ask(n: int) -> None:
    k = rank(n, 0.00125)
    # The next rank is too far in for the sign test, or beyond where resampled medians reach the tail.
    resampled = sum(
        math.comb(n, j) * (k / n) ** j * (1 - k / n) ** (n - j) for j in range((n + 1) // 2, n + 1)
    )
    assert passed(n, k + 1) > 0.00125 or resampled >= 0.00125


def test_the_bootstrap_in_closed_form_is_what_resampling_gives() -> None:
    n, k, draws = 13, 4, 40_000
    g = np.random.default_rng(0)
    medians = np.sort(g.integers(1, n + 1, (draws, n)), axis=1)[:, n // 2]
    p = sum(math.comb(n, j) * (k / n) ** j * (1 - k / n) ** (n - j) for j in range((n + 1) // 2, n + 1))
    # 5 standard deviations of a share of `draws`
    assert abs(float((medians <= k).mean()) - p) <= 5 * math.sqrt(p * (1 - p) / draws)


def test_median_and_ends_are_order_statistics() -> None:
    values = [float(x) for x in range(1, 30)]
    k = rank(29, 0.00125)
    assert interval(values[::-1], 0.00125) == Interval(15.0, float(k), float(30 - k))


def test_an_even_number_of_values_leaves_the_first_out() -> None:
    assert interval([1000.0, 1.0, 2.0, 3.0], 0.2) == interval([1.0, 2.0, 3.0], 0.2)


def test_too_few_values_have_a_median_and_no_interval() -> None:
    assert interval([2.0, 1.0, 3.0], 0.001) == Interval(2.0, 0.0, math.inf)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [math.nan], [math.inf]])
def test_values_that_are_no_times_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        interval(values, 0.1)


def test_looks_grow_and_the_first_can_decide() -> None:
    for comparisons in (1, 6, 100):
        tail = tail_of(comparisons)
        schedule = looks(tail)
        assert len(schedule) == LOOKS
        assert schedule[0] >= fewest(tail)
        assert list(schedule) == sorted(set(schedule))
        assert all(n % 2 for n in schedule)


# --- the verdict ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.051, 1.2, Speed.SLOWER),
        (1.05, 1.2, Speed.UNDECIDED),
        (0.8, 0.95, Speed.FASTER),
        (0.8, 0.953, Speed.UNDECIDED),
        (0.96, 1.04, Speed.SAME),
        (0.9, 1.1, Speed.UNDECIDED),
        (0.0, math.inf, Speed.UNDECIDED),
    ],
)
def test_verdict_needs_the_whole_interval(low: float, high: float, expected: Speed) -> None:
    assert verdict(Interval((low + high) / 2 if high < math.inf else 1.0, low, high), 0.05) is expected


def noisy(g: np.random.Generator, size: float) -> Callable[[int], float]:
    """A clock whose every second span other work lengthens, by up to ten times."""
    return lambda calls: calls * size * (1 + 0.02 * g.random() + (g.random() < 0.5) * 9 * g.random())


def simulated(ratio: float, seed: int) -> Paired:
    g = np.random.default_rng(seed)
    return paired(noisy(g, 1e-3), noisy(g, ratio * 1e-3), budget_s=60)


def test_a_slow_down_at_the_threshold_itself_is_seldom_called_one() -> None:
    trials, most = 60, 5
    alarms = sum(simulated(1.05, seed).verdict is Speed.SLOWER for seed in range(trials))
    # More than 5 of 60 at 1 % each have a probability of 3e-5; seeds are fixed.
    over = sum(
        math.comb(trials, j) * ALPHA**j * (1 - ALPHA) ** (trials - j) for j in range(most + 1, trials + 1)
    )
    assert over < 5e-5
    assert alarms <= most


def test_a_tenth_more_is_found_under_load_and_the_other_way_round() -> None:
    assert {simulated(1.1, seed).verdict for seed in range(10)} == {Speed.SLOWER}
    assert {simulated(1 / 1.1, seed).verdict for seed in range(10)} == {Speed.FASTER}


def test_equal_clocks_are_the_same_and_stop_at_the_first_look() -> None:
    found = paired(lambda n: n * 1e-3, lambda n: n * 1e-3, budget_s=60)
    assert (found.verdict, found.rounds) == (Speed.SAME, looks(tail_of(1))[0])
    assert found.ratio == Interval(1.0, 1.0, 1.0)


def test_drift_of_the_machine_is_no_difference() -> None:
    spans = iter(range(10**6))
    clock = lambda calls: calls * 1e-3 * 1.002 ** next(spans)  # noqa: E731 — one clock, shared by both sides
    assert paired(clock, clock, budget_s=60).verdict is Speed.SAME


def test_a_budget_that_ends_first_decides_nothing() -> None:
    found = paired(lambda n: n * 1e-3, lambda n: n * 1.0, budget_s=1e-9)
    assert (found.verdict, found.rounds) == (Speed.UNDECIDED, 1)
    assert found.ratio.high == math.inf


def test_short_calls_are_timed_many_together() -> None:
    asked = []
    found = paired(lambda n: asked.append(n) or n * 1e-5, lambda n: n * 1e-2, budget_s=60)
    assert found.calls == (100, 1)
    assert found.a_s.median == pytest.approx(1e-5)
    assert set(asked) == {1, 100}


# --- the clock -----------------------------------------------------------------------------------------------


def test_pinning_is_undone_and_too_many_threads_are_refused() -> None:
    def state() -> tuple[object, int]:
        return (
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        ), torch.get_num_threads()

    before = state()
    with pinned(1) as how:
        assert "1 thread" in how
        assert torch.get_num_threads() == 1
        if hasattr(os, "sched_getaffinity"):
            assert len(os.sched_getaffinity(0)) == 1
    assert state() == before
    with pytest.raises(ValueError, match="threads is 100000; allowed: 1 to"), pinned(100_000):
        pass


def test_the_clock_counts_calls_and_leaves_the_collector_as_it_was() -> None:
    calls: list[bool] = []
    assert seconds(lambda: calls.append(gc.isenabled()), 3) > 0
    assert calls == [False] * 3
    assert gc.isenabled()


@pytest.mark.parametrize(("threads", "waits", "took"), [(1, 0, 2.0), (1, 1, 5.0), (2, 0, 5.0)])
def test_time_that_others_had_the_core_is_not_counted_where_it_is_known(
    threads: int, waits: int, took: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A span of 5 s in which the thread ran for 2: stopped by others, or waiting of its own accord."""
    import harness.clock as clock

    now = {"cpu": 0.0, "wall": 0.0, "waits": 0}

    def call() -> None:
        now.update(cpu=now["cpu"] + 2, wall=now["wall"] + 5, waits=now["waits"] + waits)

    monkeypatch.setattr(clock.time, "thread_time", lambda: now["cpu"])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(clock, "_waits", lambda: now["waits"])
    monkeypatch.setattr(clock.torch, "get_num_threads", lambda: threads)
    assert seconds(call, 1) == took


def test_system_that_does_not_count_waits_has_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    import harness.clock as clock

    monkeypatch.setattr(clock, "_THREAD", None)
    monkeypatch.setattr(clock.time, "thread_time", lambda: 0.0)
    assert seconds(lambda: time.sleep(0.01), 1) >= 0.01


def test_a_call_that_sleeps_takes_as_long_as_it_sleeps() -> None:
    """Its CPU time is nothing, but nobody else is to blame."""
    assert seconds(lambda: time.sleep(0.02), 2) >= 0.04


@pytest.mark.parametrize(
    ("found", "verdict", "started"),
    [
        ([Speed.SAME], Speed.SAME, 0),
        ([Speed.UNDECIDED], Speed.UNDECIDED, 0),
        ([Speed.SLOWER, Speed.SLOWER], Speed.SLOWER, 1),
        ([Speed.SLOWER, Speed.SAME], Speed.UNDECIDED, 1),
        ([Speed.SLOWER, Speed.FASTER], Speed.UNDECIDED, 1),
        ([Speed.FASTER, Speed.FASTER], Speed.FASTER, 1),
    ],
)
def test_what_does_not_repeat_in_fresh_processes_is_undecided(
    found: list[Speed], verdict: Speed, started: int
) -> None:
    near, starts, left = Interval(1.0, 0.9, 1.1), [], list(found)

    def measure() -> Paired:
        return Paired(near, near, near, left.pop(0), 13, (1, 1), 13, 500)

    given = repeated(measure, lambda: starts.append(1))
    assert given.verdict is verdict
    assert given.unrepeated is (started == 1 and verdict is Speed.UNDECIDED)
    assert (len(starts), left) == (started, [])


def test_a_product_of_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fp4.*allowed: fp64, fp32"):
        product_rate("fp4")
    assert product_rate("fp32", each_s=0) > 0


# --- what is timed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "recipe"),
    [(name, r) for name in ("naive_masked", "lower_triangle", "online_softmax", "decode_with_cache", "split_kv",
                            "chunked_decode", "paged_decode") for r in ("fp32", "fp8_e4m3")]
    + [("sdpa_math", "bf16"), ("sdpa_flash", "fp32"), ("scaled_mm", "fp8_e4m3")],
)  # fmt: skip
def test_what_is_timed_computes_what_was_judged_to_the_bit(name: str, recipe: str) -> None:
    case = Case(
        "t", "t", Shape(heads=4, kv_heads=2, q_len=33, head_dim=16), "timed", AttentionSpec(causal=True)
    )
    chosen, implementation = get_recipe(recipe), harness.get(name)
    stored = store(make_inputs(case, 0).tensors, chosen, round_first=True)
    want = implementation.run_stored(stored, case.spec, chosen).out
    call = implementation.ready(stored, case.spec, chosen)
    for _ in range(2):  # a second call meets the same inputs
        found = call()
        out = getattr(found, "out", found[0] if isinstance(found, tuple) else found)
        assert torch.equal(out.to(want.dtype), want)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1,8,2048,64", Shape(1, 8, 2048, 64)),
        ("2,8/2,1,4096,64", Shape(2, 8, 1, 64, kv_heads=2, kv_len=4096)),
    ],
)
def test_shapes_are_read_as_they_are_written(text: str, shape: Shape) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize(
    "text", ["", "1,8,64", "1,8,a,64", "1,8,1,2,3,4", "1,8/3,4,64", "1,8/,4,64", "-1,8,4,64"]
)
def test_a_shape_that_is_none_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="allowed") as error:
        parse_shape(text)
    assert "\n" not in str(error.value)


# --- the throughput session ----------------------------------------------------------------------------------


class Benchmark:
    """pytest-benchmark's fixture, as far as the session uses it: seven rounds, all equal."""

    def __init__(self) -> None:
        self.extra_info: dict[str, object] = {}
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[0.5] * 7))
        self.calls = 0

    def __call__(self, call: Callable[[], object]) -> None:
        call()
        self.calls += 1


def test_every_cell_is_done_by_its_implementation_and_emulators_stay_short() -> None:
    names = [
        e.name
        for e in registry.table().values()
        if not registry.unavailable(e) and e.name != "flex_attention"
    ]
    cells = throughput.cells(names)
    assert len(cells) == len(set(cells))
    assert {i for _, i, _ in cells} >= {"naive_masked", "online_softmax", "sdpa_flash", "scaled_mm"}
    long = {c.name for c in throughput.LONG}
    assert {c for c, _, _ in cells} == set(throughput.CASES)
    assert not [x for x in cells if x[0] in long and throughput.is_emulated(x[1], get_recipe(x[2]))]
    assert not any(r.startswith("fp8_e4m3") for _, i, r in cells if i == "sdpa_flash")


def test_a_cell_that_passes_is_timed_with_all_that_the_report_needs() -> None:
    bench = Benchmark()
    throughput.test_throughput(bench, [], "prefill-256", "sdpa_flash", "bf16")
    info = bench.extra_info
    assert bench.calls == 1
    assert (info["format"], info["emulated"], info["low_s"], info["high_s"]) == ("bf16", False, 0.5, 0.5)
    # 4 heads of 256·257/2 visible pairs, 2·(64 + 64) FLOPs each; q, k, v and out of 2 bytes
    assert info["flops"] == 4 * 256 * 257 // 2 * 2 * 128
    assert info["bytes"] == 4 * 4 * 256 * 64 * 2
    assert 0 < info["ratio"] < 1.5  # type: ignore[operator]


def test_a_cell_that_fails_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def run_stored(self, *given: Any) -> Result:
            return Result(right.run_stored(*given).out * 1.02)

    get, right = registry.get, registry.get("sdpa_flash")
    monkeypatch.setattr(registry, "get", lambda name: Wrong() if name == "sdpa_flash" else get(name))
    bench, left = Benchmark(), []
    with pytest.raises(pytest.skip.Exception, match="not timed: FAIL"):
        throughput.test_throughput(bench, left, "prefill-256", "sdpa_flash", "bf16")
    assert bench.calls == 0
    assert (left[0]["status"], left[0]["implementation"]) == ("FAIL", "sdpa_flash")
    assert left[0]["reason"]
