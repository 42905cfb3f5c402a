"""The report's figures: what they show, and that they carry nothing a reader's browser would run or fetch."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import pytest

from harness.optional import EXTRAS, MissingExtra, need
from harness.report.plots import TradeoffPoint, tradeoff_svg

SVG = "{http://www.w3.org/2000/svg}"
POINTS = [
    TradeoffPoint("bf16", 3.9e-3, 131072.0, 9.7e-3),
    TradeoffPoint("fp8_e4m3", 5.2e-2, 65536.0, 8.5e-3),
    TradeoffPoint("mine", 4.0e-3, 98304.0),
]


def _texts(svg: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_trade_off_names_every_point_in_each_panel_that_it_has_a_figure_for():
    texts = _texts(tradeoff_svg(POINTS))
    assert [texts.count(name) for name in ("bf16", "fp8_e4m3", "mine")] == [2, 2, 1]
    assert "KV bytes a token" in texts
    assert "modelled decode step" in texts


def test_without_times_there_is_one_panel():
    texts = _texts(tradeoff_svg([TradeoffPoint("bf16", 3.9e-3, 131072.0)]))
    assert "modelled decode step" not in texts
    assert texts.count("bf16") == 1


def test_colours_and_markers_both_differ():
    svg = tradeoff_svg(POINTS)
    assert len(set(re.findall(r"#0072b2|#d55e00|#009e73", svg))) == 3
    markers = {d for d in re.findall(r'<path id="m[0-9a-f]+" d="([^"]+)"', svg) if d.count("\n") > 2}
    assert len(markers) >= 3  # a circle, a square, a diamond


def test_a_figure_is_the_same_text_each_time_and_fetches_nothing():
    svg = tradeoff_svg(POINTS)
    assert svg == tradeoff_svg(POINTS)
    assert not re.search(r'(href|src)="(?!#)|url\((?!#)|@import|<script', svg)


def test_names_from_records_are_text_in_a_figure():
    name = "<script>alert(1)</script>$x$\x1b[31m"
    svg = tradeoff_svg([TradeoffPoint(name, 1e-3, 1.0)], title="<b>&")
    assert "<script" not in svg
    assert "<script>alert(1)</script>$x$?[31m" in _texts(svg)


def test_what_a_log_axis_cannot_show_is_left_out_and_nothing_left_is_an_error():
    odd = [TradeoffPoint(f"odd{i}", x, 1.0) for i, x in enumerate((0.0, float("nan"), float("inf"), -1.0))]
    assert not any(t.startswith("odd") for t in _texts(tradeoff_svg([*odd, *POINTS])))
    with pytest.raises(ValueError, match="nothing to plot"):
        tradeoff_svg(odd)


def test_labels_of_equal_points_stand_apart():
    same = [TradeoffPoint(f"r{i}", 1e-3, 65536.0) for i in range(12)]
    root = ElementTree.fromstring(tradeoff_svg(same))
    named = [float(t.get("y", "nan")) for t in root.iter(f"{SVG}text") if re.fullmatch(r"r\d+", t.text or "")]
    assert len(named) == 12
    assert min(b - a for a, b in zip(sorted(named), sorted(named)[1:], strict=False)) >= 9  # the font's size


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_absent_extra_is_one_line_with_its_command(extra: str, monkeypatch: pytest.MonkeyPatch):
    for name in EXTRAS[extra]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra) as caught:
        need("this", extra)
    assert f"pip install 'attention-harness[{extra}]'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plot_without_matplotlib_says_so_before_it_draws(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        MissingExtra, match=r"needs matplotlib, which is not installed: pip install .*\[report\]"
    ):
        tradeoff_svg(POINTS)
