"""Growth with the length: what is fitted, what is counted, and what the measurements see. No test looks at a time."""

from __future__ import annotations

import math
import os
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.scaling import __main__ as session
from benchmarks.scaling.fit import T_95, exponent
from benchmarks.scaling.page import figure, markdown, text
from benchmarks.scaling.points import (
    ALGORITHMS,
    HEADS,
    Point,
    allocator_peak,
    apart,
    prepared,
    resident_growth,
)
from harness.attention.algorithm import Result

LENGTHS = [256, 512, 1024, 2048, 4096]
BY_NAME = {a.name: a for a in ALGORITHMS}
NAIVE, ONLINE = BY_NAME["naive_masked"], BY_NAME["online_softmax"]


def scores_bytes(length: int) -> int:
    """FP32 scores of all heads, L × L."""
    return HEADS * length**2 * 4


# --- the fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.5, 1, 2, 3])
def test_a_power_is_fitted_as_itself_without_a_spread(power: float) -> None:
    fitted = exponent(LENGTHS, [7 * n**power for n in LENGTHS])
    rounding = (
        5 * 64 * 2.0**-53
    )  # five logarithms, each below 64 and rounded once, over a spread of more than 1
    assert (fitted.value, fitted.last) == (pytest.approx(power, abs=rounding),) * 2
    assert fitted.half == pytest.approx(0, abs=T_95[2] * rounding)


def test_slope_is_numpys() -> None:
    values = [3.0, 5.0, 40.0, 41.0, 300.0]
    want = np.polyfit(np.log(LENGTHS), np.log(values), 1)[0]
    assert exponent(LENGTHS, values).value == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("freedom", "t"), list(enumerate(T_95, 1)))
def test_quantiles_leave_a_fortieth_on_either_side(freedom: int, t: float) -> None:
    """Student's density, integrated from 0 to t: printed to three digits, so to a density times half of the last."""
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    x = np.linspace(0, t, 200_001)
    density = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    area = (density[1:] + density[:-1]).sum() / 2 * (x[1] - x[0])
    assert abs(area - 0.475) <= density[-1] * 0.5e-3 + 1e-9


def test_interval_covers_the_exponent_in_95_of_100_draws() -> None:
    draw = random.Random(0)
    covered = 0
    for _ in range(4000):
        fitted = exponent(LENGTHS, [n**1.5 * math.exp(draw.gauss(0, 0.1)) for n in LENGTHS])
        covered += abs(fitted.value - 1.5) <= fitted.half
    assert abs(covered / 4000 - 0.95) <= 4 * math.sqrt(0.95 * 0.05 / 4000)


def test_two_points_have_a_slope_and_no_interval() -> None:
    fitted = exponent([256, 1024], [1.0, 16.0])
    assert (str(fitted), fitted.half) == ("2.00", math.inf)


@pytest.mark.parametrize(
    ("lengths", "values"), [([256], [1.0]), ([256, 256], [1.0, 2.0]), ([256, 512], [1.0]), ([1, 2], [1.0, 0.0])]
)  # fmt: skip
def test_what_has_no_slope_is_refused(lengths: list[int], values: list[float]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        exponent(lengths, values)


# --- what is measured ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_NAME)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    run = prepared(BY_NAME[name], 320)
    with FlopCounterMode(display=False) as counter:
        flops = run().flops
    assert flops == counter.get_total_flops()


def test_peak_of_the_allocator_is_what_was_held_at_once() -> None:
    def run() -> Result:
        first = torch.empty(2**20)
        second = torch.empty(2**21)
        del first
        third = torch.empty(2**19)
        return Result(second[:1] + third[:1])

    assert allocator_peak(run)[0] == 4 * (2**20 + 2**21)
    assert allocator_peak(run)[0] == allocator_peak(run)[0]


def test_naive_holds_its_scores_and_online_softmax_does_not() -> None:
    """O(L²): at least one L × L matrix, and 16 times that over 4 times the length. O(L): at most 4 times as much over
    4 times the length, once a block of rows is full (512), and less than the one matrix."""
    naive, online = ({n: allocator_peak(prepared(a, n))[0] for n in (512, 2048)} for a in (NAIVE, ONLINE))
    assert all(naive[n] >= scores_bytes(n) for n in naive)
    assert naive[2048] > 4 * naive[512]
    assert online[2048] <= 4 * online[512]
    assert online[2048] < scores_bytes(2048)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
def test_resident_memory_of_a_fresh_process_sees_the_scores_too() -> None:
    naive, online = (apart(resident_growth, a, 1024) for a in (NAIVE, ONLINE))
    assert naive is not None
    assert online is not None
    assert naive >= scores_bytes(1024)
    assert online < naive


def fails(run: Callable[[], Result]) -> None:
    raise ValueError(f"seen {run().out.shape[2]} rows")


def dies(run: Callable[[], Result]) -> None:
    os._exit(9)


def test_process_that_fails_says_what_it_said() -> None:
    with pytest.raises(RuntimeError, match=r"online_softmax at L = 256 (?s:.*)ValueError: seen 256 rows"):
        apart(fails, ONLINE, 256)


def test_process_that_dies_is_named_with_its_code() -> None:
    with pytest.raises(RuntimeError, match=r"online_softmax at L = 256 ended with code 9\.$"):
        apart(dies, ONLINE, 256)


# --- the pages ----------------------------------------------------------------------------------------------


def points(name: str, power: int, lengths: list[int] = LENGTHS) -> list[Point]:
    return [Point(name, n, 2e-6 * n**power, 9 * n**power, None, 8 * n**power, 4 * n**power) for n in lengths]


FOUND = {"naive_masked": points("naive_masked", 2), "online_softmax": points("online_softmax", 1)}


def test_page_gives_times_as_ratios_and_a_wide_line_nowhere() -> None:
    page = markdown(FOUND, ["x at L = 8192: too large"], "a command", "scaling.svg", 12.0)
    prose = [line for line in page.splitlines() if not line.startswith(("|", "!"))]
    assert max(map(len, prose)) <= 120
    assert max(map(len, text(FOUND, ["a note " * 40]).splitlines())) <= 100
    assert "| naive_masked | 256 | 1.00 |" in page
    assert "| naive_masked | 4096 | 256 |" in page
    assert "| naive_masked | 2.00 ± 0.00 (2.00) | 2.00 ± 0.00 (2.00) |  | 2.00 ± 0.00 (2.00) |" in page
    assert "* x at L = 8192: too large" in page
    assert not re.search(r"\d (ms|µs|ns)\b", page)


def test_figure_is_whole_in_itself_and_has_every_point() -> None:
    drawn = figure(FOUND)
    root = ET.fromstring(drawn)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags == {"svg", "title", "rect", "path", "text"}
    assert "href" not in drawn
    assert "url(" not in drawn
    markers = [e for e in root.iter() if e.get("stroke") == "white"]
    assert len(markers) == 3 * 2 * len(LENGTHS) + 2  # and one each in the legend
    told = {e.text for e in root.iter() if e.text}
    assert {"naive_masked", "online_softmax", "256", "4096", "∝ L²"} <= told


def test_lines_of_a_power_are_straight_in_the_figure() -> None:
    lines = re.findall(r'd="M([\d. L-]+)" stroke="#\w+" stroke-width', figure(FOUND))
    assert len(lines) == 6
    for line in lines:
        xy = [tuple(map(float, pair.split())) for pair in line.split("L")]
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(xy)]
        # Drawn to a tenth of a pixel, over steps of 30 pixels or more: 0.1 in both, of a slope below 4.
        assert max(slopes) - min(slopes) <= 2 * (0.1 + 4 * 0.1) / 30


def test_session_measures_and_writes_what_it_is_asked_for(tmp_path: Path) -> None:
    page = tmp_path / "o" / "page.md"
    assert session.main(["--max", "512", "--only", "one decode step", "--out", str(page)]) == 0
    assert "(page.svg)" in page.read_text(encoding="utf-8")
    assert page.with_suffix(".svg").read_text(encoding="utf-8").startswith("<svg ")
    rows = [
        line.split("|")
        for line in page.read_text(encoding="utf-8").splitlines()
        if "one decode step |" in line
    ]
    assert [r[2].strip() for r in rows[1:]] == ["256", "512"]
    assert {r[-2].strip() for r in rows[1:]} == {"1.00"}  # FLOPs: all that are visible and no more


def test_length_that_memory_does_not_hold_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "available", lambda: 2**20)
    monkeypatch.setattr(session, "measure", lambda a, n: points(a.name, 2, [n])[0])
    page = tmp_path / "page.md"
    assert session.main(["--only", "naive_masked", "--out", str(page)]) == 0
    said = (
        "naive_masked at L = 512: up to 2.25 MiB are needed, and of 1.00 MiB that are free it may take half"
    )
    assert f"* {said}" in page.read_text(encoding="utf-8")
    assert " ".join(capsys.readouterr().out.split()).count(said) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nope"], "allowed: naive_masked"), (["--max", "511"], "an integer ≥ 512"), (["--max", "x"], "'x'"),
    ],
)  # fmt: skip
def test_wrong_use_is_told_what_is_allowed(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        session.main(arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
