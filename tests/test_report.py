"""What a reader is told: counts, pooled figures and their marks, order, and that hostile text stays text."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_factory import (
    IMPLEMENTATIONS,
    MACHINE,
    OVERFLOW,
    deviation,
    errors,
    grid,
    record,
    refused,
    reviewed,
)

from harness.recipe import recipes
from harness.records import HazardKind, Record, Status
from harness.report import (
    Report,
    cells_csv,
    hazards_csv,
    read_timings,
    summary,
    timings_markdown,
    timings_text,
    to_markdown,
    to_text,
    words,
    write_report,
)
from harness.report.markdown import code, code_block, escape

HOSTILE = "a|b`c`<script>\r\n| x | y |\n# <b>\x1b[31m ![i](u) [l](javascript:x) \\| $x$ ‮"
FORMULA = '=cmd()|"A1'


def report_of(*records: Record) -> Report:
    return summary(records, reviewed(records))


def cell_of(*records: Record, truth: str = "kernel") -> str:
    return words.cell(report_of(*records).groups[0].cells[0][0], truth)


def failed(**changes: object) -> Record:
    return record(**{"status": Status.FAIL, "reasons": ("3 NaN",), **changes})


def test_headline_counts_every_record_once_with_known_apart() -> None:
    records = [
        record(), failed(seed=1), failed(seed=2, implementation="naive_unsafe"), refused(seed=3),
        record(seed=4, status=Status.ERROR, errors=None), record(seed=5, status=Status.INCONCLUSIVE),
    ]  # fmt: skip
    review = reviewed(records, deviation(implementation="naive_unsafe"))
    head = summary(records, review).headline
    assert dict(head.labels) == {
        "PASS": 1,
        "FAIL": 1,
        "ERROR": 1,
        "known": 1,
        "REFUSED": 1,
        "INCONCLUSIVE": 1,
    }
    assert sum(n for _, n in head.labels) == head.records == 6
    assert "PASS 1 · FAIL 1 · ERROR 1 · known 1 · REFUSED 1 · INCONCLUSIVE 1" in to_text(
        summary(records, review)
    )


def test_headline_says_how_status_is_decided_and_on_which_machine() -> None:
    text = to_text(report_of(record()))
    assert "decided by classes alone" in text
    assert "not yet judged" in " ".join(text.split())
    for fact in ("cpu: Some CPU", "ISA AVX512", "2 threads", "torch 2.13.0", "commit abc1234"):
        assert fact in text


def test_no_records_say_that_nothing_ran() -> None:
    assert "no records: nothing ran" in to_text(report_of())
    assert "no records: nothing ran" in to_markdown(report_of())
    assert len(cells_csv([], reviewed([])).splitlines()) == len(hazards_csv([]).splitlines()) == 1


def test_one_record_renders_everywhere(tmp_path: Path) -> None:
    write_report([record()], reviewed([record()]), tmp_path / "new" / "folder")
    names = {p.name: p.read_text(encoding="utf-8") for p in (tmp_path / "new" / "folder").iterdir()}
    assert set(names) == {"report.md", "cells.csv", "hazards.csv"}
    assert "1.0e-03" in names["report.md"]


def test_figures_pool_by_mean_square_over_cases_and_seeds() -> None:
    records = [record("g/a", rel=3e-4), record("g/b", rel=4e-4, seed=1)]
    assert cell_of(*records) == "3.5e-04"  # √((9 + 16) / 2) = 3.54; the mean would give 3.5 as well, so:
    assert report_of(*records).groups[0].cells[0][0].kernel.rel_l2 == pytest.approx(math.sqrt(12.5) * 1e-4)
    assert cell_of(*records, truth="total") == "7.1e-04"


@pytest.mark.parametrize(
    "broken",
    [errors(nan_mismatch=1, rel_l2=9.0), errors(posinf_mismatch=1, rel_l2=9.0), errors(rel_l2=math.nan),
     errors(rel_l2=math.inf), errors(neginf_mismatch=2, rel_l2=math.nan)],
)  # fmt: skip
def test_cell_with_a_broken_seed_is_marked_and_does_not_average_it(broken: object) -> None:
    assert cell_of(record(rel=2e-4), record(seed=1, errors=broken)) == "2.0e-04*"
    assert cell_of(record(errors=broken)) == "n/a*"
    assert cell_of(record(errors=broken), truth="total") == "2.0e-03"


def test_cell_shows_the_worst_word_and_its_marks() -> None:
    assert cell_of(record(), failed(seed=1)) == "FAIL 1.0e-03"
    assert cell_of(record(status=Status.ERROR, errors=None)) == "ERROR"
    assert cell_of(refused()) == "–"
    assert cell_of(refused("smoke/b"), record()) == "1.0e-03–"
    assert cell_of(record(status=Status.INCONCLUSIVE)) == "1.0e-03?"
    assert cell_of(record(hazards=(OVERFLOW,))) == "1.0e-03!"
    known = [failed()]
    shown = summary(known, reviewed(known, deviation())).groups[0].cells[0][0]
    assert words.cell(shown, "kernel") == "known 1.0e-03"
    assert words.cell(None, "kernel") == ""


def test_only_observed_hazards_that_change_numbers_are_marked() -> None:
    assert cell_of(record(hazards=(replace(OVERFLOW, source="predicted"),))) == "1.0e-03"
    assert cell_of(record(hazards=(replace(OVERFLOW, kind=HazardKind.RESOLUTION),))) == "1.0e-03"


def test_combination_that_did_not_run_is_blank() -> None:
    report = report_of(record(recipe="bf16"), record(recipe="fp16", implementation="other"))
    assert report.groups[0].cells[0][1] is None


def test_failures_come_before_tables_with_a_command_that_repeats_them() -> None:
    text = to_text(report_of(*grid(["smoke/a"], IMPLEMENTATIONS, ["bf16"]), failed(recipe="fp16", seed=2)))
    assert text.index("Unexpected failures: 1 cell") < text.index("== rel_l2")
    command = text[text.index("python -m harness") : text.index("== rel_l2")].replace("\\\n", "")
    expected = "python -m harness run --cases smoke --only smoke/tiny --implementations naive_masked"
    assert shlex.split(command) == [*expected.split(), "--recipes", "fp16", "--seeds", "3"]


def test_command_names_the_device_unless_it_is_the_default() -> None:
    (failure,) = report_of(failed(machine=replace(MACHINE, device="cuda"))).failures
    assert words.command(failure)[-2:] == ("--device", "cuda")


@given(st.lists(st.text(min_size=1, max_size=300).filter(lambda t: "\0" not in t), min_size=1, max_size=6))
def test_wrapped_command_keeps_its_words_and_its_width(given_words: list[str]) -> None:
    given_words = [words.clean(w) for w in given_words]
    lines = words.command_lines(given_words, 100)
    assert max(map(len, lines)) <= 100
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == given_words


def test_error_shows_the_last_line_of_its_traceback_as_the_reason() -> None:
    broken = record(status=Status.ERROR, errors=None, traceback="Traceback:\n  File x\nRuntimeError: boom\n")
    assert "RuntimeError: boom" in to_text(report_of(broken))
    assert "File x" in to_markdown(report_of(broken))


def test_expired_and_unmatched_deviations_are_problems() -> None:
    records = [record()]
    old = deviation(expires=deviation().expires.replace(year=2020), reason="too old")
    text = to_text(summary(records, reviewed(records, deviation(reason="gone"), old)))
    assert "matches no failure of this run: remove it (gone)" in text
    assert "expired on 2020-01-01" in text


def test_known_failures_show_the_reason_and_are_no_failures() -> None:
    records = [failed()]
    text = to_text(summary(records, reviewed(records, deviation(reason="by design"))))
    assert "1 cell; by design" in text
    assert "Unexpected" not in text


def test_worst_rows_put_unexpected_failures_first_then_distance_from_the_recipes_median() -> None:
    records = [record(f"g/{n}", rel=1e-3, recipe="bf16") for n in range(20)]
    records += [record(f"g/{n}", rel=1e-7, recipe="fp32") for n in range(20)]
    records += [record("g/odd", rel=1e-6, recipe="fp32"), failed(case="g/bad", rel=1e-8)]
    records += [record("g/nan"), record("g/nan", seed=1, errors=errors(nan_mismatch=1))]
    rows = report_of(*records).worst
    assert [r.case for r in rows[:3]] == ["g/bad", "g/nan", "g/odd"]
    assert rows[2].times_median == pytest.approx(10)
    assert len(rows) == 15


def test_known_failures_do_not_crowd_the_worst_rows() -> None:
    records = [*(failed(case=f"g/{n}") for n in range(20)), record("g/pass")]
    assert summary(records, reviewed(records, deviation())).worst[0].case == "g/pass"


def test_worst_row_shows_the_worst_seed_and_nan_is_worse_than_any() -> None:
    records = [
        record(errors=errors(max_ulp=2.0, slope=-3e-3, bias_ulp=0.1, max_abs=1.0, worst=(0, 0, 5, 6))),
        record(seed=1, errors=errors(max_ulp=9.0, slope=1e-3, bias_ulp=math.nan, max_abs=0.5)),
    ]
    (row,) = report_of(*records).worst
    assert (row.max_ulp, row.slope, row.worst) == (9.0, -3e-3, (0, 0, 5, 6))
    assert math.isnan(row.bias_ulp)


def test_exact_cells_stand_at_their_median_and_others_infinitely_above() -> None:
    rows = report_of(*(record(f"g/{n}", rel=0.0) for n in range(3)), record("g/x", rel=1e-9)).worst
    assert [r.times_median for r in rows] == [math.inf, 1.0, 1.0, 1.0]


def test_hazards_group_by_kind_stage_format_and_recipe_with_the_worst_place() -> None:
    deeper = replace(OVERFLOW, headroom_bits=-3.0, where=(0, 0, 1, 2), source="predicted")
    rows = report_of(
        record(hazards=(OVERFLOW,)), record("smoke/b", hazards=(deeper,)),
        record("smoke/b", seed=1, hazards=(deeper,)), record(recipe="fp16", hazards=(OVERFLOW,)),
    ).hazards  # fmt: skip
    assert len(rows) == 2
    both = next(r for r in rows if r.recipe == "bf16")
    assert (both.cells, both.observed, both.predicted, both.case) == (3, 1, 2, "smoke/b")
    assert both.worst.where == (0, 0, 1, 2)


def test_hazards_are_ordered_by_kind_then_observed_then_headroom() -> None:
    hazards = (
        replace(OVERFLOW, kind=HazardKind.ZERO_AMAX, headroom_bits=-9.0),
        replace(OVERFLOW, stage="a", headroom_bits=-1.0), replace(OVERFLOW, stage="b", headroom_bits=-2.0),
        replace(OVERFLOW, stage="c", headroom_bits=math.nan),
        replace(OVERFLOW, stage="d", headroom_bits=-9.0, source="predicted"),
    )  # fmt: skip
    records = [record(seed=n, hazards=(h,)) for n, h in enumerate(hazards)]
    assert [h.stage for h in report_of(*records).hazards] == ["c", "b", "a", "d", "scores"]


def test_what_an_earlier_stage_of_the_run_caused_is_left_out() -> None:
    nan = replace(OVERFLOW, kind=HazardKind.NON_FINITE, stage="shifted")
    flush = replace(OVERFLOW, kind=HazardKind.FLUSH, stage="probs")
    chain = (replace(OVERFLOW, stage="scores_raw"), replace(OVERFLOW, stage="scores"), nan, flush)
    assert [h.stage for h in report_of(record(hazards=chain)).hazards] == ["scores_raw", "probs"]
    assert [h.stage for h in report_of(record(hazards=(nan,))).hazards] == ["shifted"]


@pytest.mark.parametrize("kind", HazardKind)
def test_every_hazard_kind_has_its_place_and_prints_its_advice_once(kind: HazardKind) -> None:
    hazards = tuple(replace(OVERFLOW, kind=kind, stage=s) for s in ("a", "b"))
    text = to_text(report_of(record(hazards=hazards)))
    assert " ".join(text.split()).count(kind.advice) == 1


def test_terminal_says_how_many_hazards_it_leaves_out() -> None:
    records = [record(seed=n, hazards=(replace(OVERFLOW, stage=f"stage{n}"),)) for n in range(40)]
    assert "… and 15 more in report.md" in to_text(report_of(*records))
    assert "stage39" in to_markdown(report_of(*records))


def test_refusals_are_grouped_by_reason_most_frequent_first() -> None:
    records = [refused(seed=s) for s in range(3)] + [refused("smoke/b", reason="no softcap")]
    rows = report_of(*records).refusals
    assert [(r.reason, r.cases, r.records) for r in rows] == [("no window", 1, 3), ("no softcap", 1, 1)]


@pytest.mark.parametrize("length", [1, 12, 40, 130])
def test_terminal_text_fits_100_columns(length: int) -> None:
    name = "x_" * length
    cases, more = [f"smoke/{name}{n}" for n in range(3)], [f"{r}{name}" for r in ("mine", "other")]
    records = grid(cases, [*IMPLEMENTATIONS, name], [*recipes(), *more])
    hazard = replace(OVERFLOW, stage=name, where=(99, 99, 131071, 131071), peak=1e300)
    records += [failed(case=f"{name}/{name}", implementation=name, hazards=(hazard,), recipe=name * 2)]
    records += [refused(reason=name * 5, implementation=name)]
    wide = errors(
        rel_l2=-1.2345e-300, max_ulp=1.234e300, slope=-1e-300, worst=(12, 34, 131071, 255), nan_mismatch=1
    )
    records += [failed(case="smoke/wide", errors=wide, hazards=(hazard,), status=s) for s in Status]
    text = to_text(summary(records, reviewed(records)))
    assert max(map(len, text.split("\n"))) <= 100
    assert name.replace("_", "") in re.sub(r"[\s_]", "", text)  # wrapped, not cut


def test_builtin_recipes_by_builtin_implementations_take_one_block() -> None:
    text = to_text(report_of(*grid(["smoke/a"], IMPLEMENTATIONS, recipes())))
    tables = text[text.index("== rel_l2") : text.index("== Worst")]
    assert sum(line.startswith("fp8_kv ") for line in tables.split("\n")) == 1


def test_flush_is_marked_only_where_it_lost_more_than_rounding_may() -> None:
    flush = replace(OVERFLOW, kind=HazardKind.FLUSH, stage="probs", format="fp8_e4m3")
    for lost, marked in ((2.0**-4, False), (2.0**-3, True)):
        (group,) = report_of(record(hazards=(replace(flush, lost_mass=lost),))).groups
        cell = group.cells[0][0]
        assert cell is not None
        assert cell.flagged is marked


def test_inputs_are_described_once_a_case() -> None:
    facts = {"var_qk_per_dim": 1.0, "score_peak": 4.0, "mean_top_prob": 0.25}
    records = [
        record(seed=n, recipe=r, data={**facts, "score_peak": 4.0 + n})
        for n in (0, 1)
        for r in ("bf16", "fp16")
    ]
    (row,) = report_of(*records).inputs
    assert (row.case, row.score_peak, row.mean_top_prob) == ("smoke/tiny", 4.5, 0.25)


def hostile_report() -> Report:
    hazard = replace(OVERFLOW, stage=HOSTILE, format=HOSTILE)
    names = {"case": HOSTILE, "implementation": HOSTILE, "recipe": HOSTILE, "group": HOSTILE}
    records = [
        record(
            **{**names, "status": Status.ERROR, "reasons": (HOSTILE,), "traceback": f"```\n````\n{HOSTILE}"}
        ),
        refused(reason=HOSTILE, **{k: v for k, v in names.items() if k != "case"}),
        failed(hazards=(hazard,), implementation="known", machine=replace(MACHINE, cpu=HOSTILE)),
    ]
    review = reviewed(records, deviation(implementation="known", reason=HOSTILE, link=HOSTILE))
    return summary(records, review)


def test_hostile_text_cannot_leave_its_line_or_send_controls_to_the_terminal() -> None:
    text = to_text(hostile_report())
    assert "\x1b" not in text
    assert "\r" not in text
    assert "‮" not in text


def test_hostile_text_stays_text_in_markdown() -> None:
    outside = re.sub(
        r"^(`{3,})text\n.*?^\1$", "", to_markdown(hostile_report()), flags=re.MULTILINE | re.DOTALL
    )
    outside = re.sub(r"(`+) .*? \1", "", outside)  # code spans
    assert "<script" not in outside
    assert "\x1b" not in outside
    assert not re.search(r"^# <b>|^\| x \|", outside, re.MULTILINE)
    assert not re.search(r"(?<!\\)\[l(?<!\\)\]\(", outside)
    for block in re.findall(r"(?:^\|.*\n?)+", outside, re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in block.strip().split("\n")}
        assert len(columns) == 1


@given(st.text())
def test_escaped_text_is_one_line_without_active_characters(text: str) -> None:
    shown = escape(text)
    assert shown.isprintable()
    assert not re.search(r"(?<!\\)(\\\\)*(?<!\\)[|`<>*\[\]]", shown)


@given(st.text(alphabet="`a \n"))
def test_code_cannot_be_closed_from_inside(text: str) -> None:
    block = code_block(text).split("\n")
    fence = block[0].removesuffix("text")
    assert not any(line.strip().startswith(fence) for line in block[1:-1])
    span = code(text)
    ticks = re.match("`+", span).group()  # type: ignore[union-attr]
    assert span.count(ticks) >= 2
    assert ticks not in span[len(ticks) : -len(ticks)]


def test_csv_has_every_figure_of_both_truths_and_reads_back() -> None:
    records = [record(lse_errors=errors(), data={"score_max": 3.5}), refused(seed=1)]
    first, second = csv.DictReader(io.StringIO(cells_csv(records, reviewed(records))))
    assert float(first["kernel_rel_l2"]) == 1e-3
    assert float(first["total_rel_l2"]) == 2e-3
    assert first["lse_worst_bhic"] == "0 1 17 3"
    assert (first["kv_bytes_per_token"], first["run_ms"], first["isa"]) == ("256.0", "1.0", "AVX512")
    assert (first["data_score_max"], second["data_score_max"]) == ("3.5", "")
    assert (second["status"], second["reasons"], second["kernel_rmse"]) == ("REFUSED", "no window", "")


def test_csv_writes_non_finite_figures_as_words() -> None:
    records = [record(errors=errors(rel_l2=math.nan, rmse=math.inf, slope=-math.inf))]
    (row,) = csv.DictReader(io.StringIO(cells_csv(records, reviewed(records))))
    assert (row["kernel_rel_l2"], row["kernel_rmse"], row["kernel_slope"]) == ("nan", "inf", "-inf")


def test_csv_text_cannot_be_a_formula_and_numbers_stay_numbers() -> None:
    records = [
        failed(case=text, reasons=(text,), why=text, machine=replace(MACHINE, cpu=text), hazards=(OVERFLOW,),
               data={"x": -1.0})
        for text in (FORMULA, "+1", "-1", "@x", "\t=1", "\r=1", " =1", "＝1")
    ]  # fmt: skip
    for row in csv.DictReader(io.StringIO(cells_csv(records, reviewed(records)))):
        assert all(row[name].startswith("'") for name in ("case", "reasons", "why", "cpu"))
        assert row["kernel_slope"] == "-0.0001"
        assert row["data_x"] == "-1.0"
    for row in csv.DictReader(io.StringIO(hazards_csv(records))):
        assert row["case"].startswith("'")
        assert (row["headroom_bits"], row["where_bhij"]) == ("-0.61", "0 1 17 9")


def test_csv_names_the_reason_of_known_failures() -> None:
    records = [failed()]
    (row,) = csv.DictReader(io.StringIO(cells_csv(records, reviewed(records, deviation(reason="by design")))))
    assert row["known"] == "by design"


def test_lone_surrogates_do_not_stop_a_report(tmp_path: Path) -> None:
    records = [failed(case="g/\ud800", reasons=("\udfff",))]
    write_report(records, reviewed(records), tmp_path)


def test_markdown_explains_the_figures_and_both_truths() -> None:
    shown = to_markdown(report_of(record()))
    assert "‖Δ‖ / ‖o‖" in shown
    assert "stored truth" in shown
    assert "exact truth" in shown


def benchmark(**changes: object) -> dict[str, object]:
    extra = {
        "implementation": "online_softmax", "recipe": "bf16", "shape": "[1, 2, 64, 64]", "case": "g/a",
        "flops": 2e9, "emulated": True, "rel_l2": 1.5e-3, "kv_bytes_per_token": 256,
    }  # fmt: skip
    return {"name": "x", "stats": {"median": 0.004}, "extra_info": {**extra, **changes}}


def timings_file(folder: Path, content: object) -> Path:
    path = folder / "throughput.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_throughput_is_flops_over_the_median_beside_error_and_cache(tmp_path: Path) -> None:
    (timing,) = read_timings(timings_file(tmp_path, {"benchmarks": [benchmark()]}))
    assert timing.tflops == pytest.approx(0.5)
    for shown in (timings_text([timing]), timings_markdown([timing])):
        for part in ("online", "4.00", "0.500", "1.5e-03", "256", "the emulator's time, not the format's"):
            assert part in shown


def test_real_computation_is_not_called_emulated(tmp_path: Path) -> None:
    timings = read_timings(timings_file(tmp_path, {"benchmarks": [benchmark(emulated=False)]}))
    assert "emulated" not in timings_text(timings) + timings_markdown(timings)


def test_throughput_text_fits_100_columns_and_is_escaped_in_markdown(tmp_path: Path) -> None:
    entry = benchmark(
        implementation=HOSTILE, case="g/" + "long" * 40, recipe="r" * 60, kv_bytes_per_token=None
    )
    timings = read_timings(timings_file(tmp_path, {"benchmarks": [entry]}))
    assert max(map(len, timings_text(timings).split("\n"))) <= 100
    assert "<script" not in timings_markdown(timings)


def test_no_benchmarks_say_that_nothing_was_timed(tmp_path: Path) -> None:
    timings = read_timings(timings_file(tmp_path, {"benchmarks": []}))
    assert "nothing was timed" in timings_text(timings)
    assert "nothing was timed" in timings_markdown(timings)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '"x"', {}, {"benchmarks": {}}, {"benchmarks": [1]}, {"benchmarks": [{"stats": {}}]},
     {"benchmarks": [{"stats": {"median": "x"}, "extra_info": {}}]},
     {"benchmarks": [benchmark(flops="many")]},
     {"benchmarks": [{"stats": {"median": 1.0}, "extra_info": {"recipe": "bf16"}}]},
     {"benchmarks": [{"stats": {"median": 1.0}, "extra_info": None}]}],
)  # fmt: skip
def test_file_that_is_not_pytest_benchmarks_is_a_one_line_error(tmp_path: Path, content: object) -> None:
    with pytest.raises(ValueError, match=r"throughput\.json") as error:
        read_timings(timings_file(tmp_path, content))
    assert "\n" not in str(error.value)


def test_report_and_gate_load_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, harness.report, harness.gate; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
