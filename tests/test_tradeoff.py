"""Accuracy beside cost: the errors are the tables', the costs those of `harness.cost`, and nothing is guessed."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from record_factory import record, reviewed

from harness.cost.models import get_model
from harness.cost.phases import decode_step
from harness.formats import get_format
from harness.recipe import RECIPES
from harness.records import Record
from harness.report import Report, summary, to_markdown, to_text, words, write_report


def made(recipe: str, case: str = "real/a", **changes: object) -> Record:
    digest = RECIPES[recipe].digest if recipe in RECIPES else "base=fp32"
    return record(case, recipe=recipe, **{"recipe_digest": digest, **changes})


def report_of(*records: Record) -> Report:
    return summary(records, reviewed(records))


def shown(report: Report) -> dict[str, list[str]]:
    assert report.tradeoff is not None
    return {row.recipe: words.tradeoff(row, report.tradeoff)[1:] for row in report.tradeoff.rows}


def test_a_recipe_stands_with_its_total_error_and_what_its_cache_weighs_in_the_stated_model():
    # Llama 3.1 8B: 2 · 32 layers · 1024 values a token, 2 bytes or 1 and the scales of 32K tokens; bf16
    # weights are read whole but for the embedding, 2 TB/s.
    rows = shown(report_of(made("bf16", rel=1e-3), made("fp8_e4m3", rel=2e-3), made("mxfp8")))
    assert rows["bf16"] == ["2.0e-3", "128 KiB", "1.000", "9.66 ms"]
    assert rows["fp8_e4m3"][:3] == ["4.0e-3", "64.0 KiB", "0.500"]
    assert rows["mxfp8"][1:3] == ["66.0 KiB", f"{33 / 64:.3f}"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_modelled_step_is_the_one_that_the_cost_command_tells(recipe: str):
    report = report_of(made(recipe))
    assert report.tradeoff is not None
    (row,) = report.tradeoff.rows
    work = decode_step(get_model("llama-3.1-8b"), RECIPES[recipe], get_format("bf16"), 32768)
    assert (row.kv_bytes, row.decode_s) == (work.kv_cache / 32768, work.moved / 2e12)


def test_what_the_model_is_stands_above_the_table_in_both_reports():
    report = report_of(made("bf16"))
    for text in (" ".join(to_text(report).split()), to_markdown(report)):
        assert (
            "modelled, not measured: llama-3.1-8b, one sequence of 32K keys, weights in bf16, 2.00 TB/s"
            in text
        )
        assert "over 1 case of real" in text


def test_real_cases_stand_for_accuracy_and_else_the_first_group():
    both = report_of(made("bf16", "smoke/a", rel=5e-1), made("bf16", "real/a", rel=1e-3))
    assert shown(both)["bf16"][0] == "2.0e-3"
    alone = report_of(made("bf16", "smoke/a", rel=5e-2), made("bf16", "masks/a", rel=1e-3))
    assert alone.tradeoff is not None
    assert alone.tradeoff.group == "smoke"
    assert report_of().tradeoff is None
    assert "beside cost" not in to_text(report_of())


def test_a_users_recipe_has_no_cost_even_under_a_built_in_name():
    rows = shown(report_of(made("mine", rel=1e-3), made("fp16", recipe_digest="base=fp32 q=fp32")))
    assert rows == {"fp16": ["2.0e-3", "–", "–", "–"], "mine": ["2.0e-3", "–", "–", "–"]}


def test_the_plot_is_written_beside_the_report_which_shows_it(tmp_path: Path):
    records = [made("bf16"), made("fp8_e4m3", rel=2e-3), made("mine")]
    report = write_report(records, reviewed(records), tmp_path)
    assert report.tradeoff is not None
    assert report.tradeoff.figure == "tradeoff.svg"
    svg = (tmp_path / "tradeoff.svg").read_text(encoding="utf-8")
    assert "fp8_e4m3</text>" in svg
    assert "mine" not in svg
    assert "](tradeoff.svg)" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_one_recipe_is_no_trade_off_and_an_earlier_plot_goes(tmp_path: Path):
    (tmp_path / "tradeoff.svg").write_text("old")
    report = write_report([made("bf16")], reviewed([made("bf16")]), tmp_path)
    assert report.tradeoff is not None
    assert (report.tradeoff.figure, report.tradeoff.note) == ("", "")
    assert not (tmp_path / "tradeoff.svg").exists()
    assert ".svg" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_without_matplotlib_the_table_stands_alone_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    records = [made("bf16"), made("fp8_e4m3")]
    report = write_report(records, reviewed(records), tmp_path)
    assert report.tradeoff is not None
    assert report.tradeoff.note == (
        "the trade-off plot needs matplotlib, which is not installed: pip install 'attention-harness[report]'"
    )
    told = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "9.66 ms" in told
    assert "needs matplotlib" in told
    assert not (tmp_path / "tradeoff.svg").exists()


def test_errors_that_no_figure_covers_leave_their_recipe_out_of_the_plot(tmp_path: Path):
    records = [made("bf16"), made("fp16", total_errors=None), made("fp32")]
    report = write_report(records, reviewed(records), tmp_path)
    assert report.tradeoff is not None
    assert math.isnan(next(r for r in report.tradeoff.rows if r.recipe == "fp16").total.rel_l2)
    assert "fp16</text>" not in (tmp_path / "tradeoff.svg").read_text(encoding="utf-8")


def test_a_report_without_plots_says_how_to_draw_one_and_keeps_that_of_the_same_figures(tmp_path: Path):
    records = [made("bf16"), made("fp8_e4m3", rel=2e-3)]
    svg, told = tmp_path / "tradeoff.svg", tmp_path / "report.md"

    def written(*given: Record, plots: bool) -> Report:
        return write_report(given, reviewed(list(given)), tmp_path, plots=plots)

    report = written(*records, plots=False)
    assert report.tradeoff is not None
    assert report.tradeoff.note.endswith("--plots draws it")
    assert "--plots draws it" in told.read_text(encoding="utf-8")
    assert not svg.exists()
    drawn = written(*records, plots=True)
    then = svg.read_bytes(), told.read_bytes()
    assert written(*records, plots=False).tradeoff == drawn.tradeoff
    assert (svg.read_bytes(), told.read_bytes()) == then
    other = written(records[0], made("fp8_e4m3", rel=3e-3), plots=False)  # the plot would tell other figures
    assert other.tradeoff is not None
    assert other.tradeoff.figure == ""
    assert not svg.exists()
