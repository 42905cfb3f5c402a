"""What a reader is told: counts, pooled figures and their marks, order, and that hostile text stays text."""

from __future__ import annotations

import csv
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
    SCALE_OFF,
    deviation,
    errors,
    grid,
    margins,
    record,
    refused,
    reviewed,
)

from harness.recipe import recipes
from harness.records import HazardKind, Record, Status
from harness.report import (
    Context,
    Report,
    Timing,
    cases_csv,
    cells_csv,
    hazards_csv,
    latest,
    read_context,
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


def cell_of(*records: Record) -> str:
    return words.cell(report_of(*records).groups[0].cells[0][0])


def cost_of(*records: Record) -> list[str]:
    return words.cost(report_of(*records).groups[0].costs[0])


def one_line(text: str) -> str:
    return " ".join(text.split())


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
    text = one_line(to_text(report_of(record())))
    for part in ("the ceiling that no correct run exceeds", "the yardstick", "the fault directions"):
        assert part in text
    assert "Precision is the recipe's, against the exact truth" in text
    for fact in ("cpu: Some CPU", "ISA AVX512", "2 threads", "torch 2.13.0", "commit abc1234"):
        assert fact in text


def test_no_records_say_that_nothing_ran() -> None:
    assert "no records: nothing ran" in to_text(report_of())
    assert "no records: nothing ran" in to_markdown(report_of())
    assert len([*cells_csv([], reviewed([]))]) == len([*hazards_csv([])]) == 1


def test_one_record_renders_everywhere(tmp_path: Path) -> None:
    write_report([record()], reviewed([record()]), tmp_path / "new" / "folder")
    names = {p.name: p.read_text(encoding="utf-8") for p in (tmp_path / "new" / "folder").iterdir()}
    assert set(names) == {"report.md", "cells.csv", "cases.csv", "hazards.csv"}
    assert "1.0e-3 ×1.0" in names["report.md"]


def test_figures_pool_by_mean_square_over_cases_and_seeds() -> None:
    records = [record("g/a", rel=3e-4), record("g/b", rel=4e-4, seed=1)]
    assert cell_of(*records) == "3.5e-4 ×1.0"  # √((9 + 16) / 2) = 3.54; the mean would give 3.5 as well, so:
    assert report_of(*records).groups[0].cells[0][0].kernel.rel_l2 == pytest.approx(math.sqrt(12.5) * 1e-4)
    assert cost_of(*records)[0] == "7.1e-4"
    ratios = [record(margins=margins(ratio=3.0)), record(seed=1, margins=margins(ratio=4.0))]
    assert report_of(*ratios).groups[0].cells[0][0].ratio == pytest.approx(math.sqrt(12.5))


def test_margins_that_are_not_finite_or_absent_or_of_broken_outputs_do_not_pool() -> None:
    broken = record(seed=1, errors=errors(nan_mismatch=9), margins=margins(ratio=0.0))
    endless = record(seed=2, margins=margins(ratio=math.inf))
    assert cell_of(record(margins=margins(ratio=2.0)), broken, endless) == "1.0e-3 ×2.0*"
    assert cell_of(record(margins=None)) == "1.0e-3 –"


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [(0.0, "×0.0"), (0.97, "×1.0"), (9.94, "×9.9"), (9.96, "×10"), (428.4, "×428"), (1e3, "×1.0e3"),
     (3.04e12, "×3.0e12"), (math.inf, "×inf"), (math.nan, "–")],
)  # fmt: skip
def test_ratio_is_as_short_as_two_or_three_digits_allow(ratio: float, shown: str) -> None:
    assert words.times(ratio) == shown


@pytest.mark.parametrize(
    "broken",
    [errors(nan_mismatch=1, rel_l2=9.0), errors(posinf_mismatch=1, rel_l2=9.0), errors(rel_l2=math.nan),
     errors(rel_l2=math.inf), errors(neginf_mismatch=2, rel_l2=math.nan)],
)  # fmt: skip
def test_cell_with_a_broken_seed_is_marked_and_does_not_average_it(broken: object) -> None:
    assert cell_of(record(rel=2e-4), record(seed=1, errors=broken)) == "2.0e-4 ×1.0*"
    assert cell_of(record(errors=broken)) == "*"
    assert cost_of(record(errors=broken))[0] == "2.0e-3"
    assert cost_of(record(total_errors=broken))[0] == "n/a*"


def test_cell_shows_its_figures_and_marks() -> None:
    assert cell_of(record(), failed(seed=1)) == "1.0e-3 ×1.0F"
    assert cell_of(record(status=Status.ERROR, errors=None)) == "E"
    assert cell_of(refused()) == "–"
    assert cell_of(refused("smoke/b"), record()) == "1.0e-3 ×1.0–"
    assert cell_of(record(status=Status.INCONCLUSIVE)) == "1.0e-3 ×1.0?"
    assert cell_of(record(hazards=(OVERFLOW,))) == "1.0e-3 ×1.0!"
    known = [failed()]
    shown = summary(known, reviewed(known, deviation())).groups[0].cells[0][0]
    assert words.cell(shown) == "1.0e-3 ×1.0k"
    assert words.cell(None) == ""


def test_only_observed_hazards_that_change_numbers_are_marked() -> None:
    assert cell_of(record(hazards=(replace(OVERFLOW, source="predicted"),))) == "1.0e-3 ×1.0"
    assert cell_of(record(hazards=(replace(OVERFLOW, kind=HazardKind.RESOLUTION),))) == "1.0e-3 ×1.0"


LOST = "saturation in q (fp8_e4m3, observed): peak 1e+04, headroom -4.62 bits, 9 of 4096 at b=0 h=0 i=1 j=2"


def costs(**changes: object) -> Record:
    return record(**{"precision": Status.FAIL, "precision_reasons": (LOST,), **changes})


def test_precision_is_counted_by_case_and_recipe() -> None:
    records = [record(), record(seed=1), record(recipe="fp16"), costs(case="smoke/b"), refused("smoke/c")]
    records += [record("smoke/d", precision=Status.INCONCLUSIVE)]
    report = report_of(*records)
    assert report.headline.precision == (("PASS", 2), ("FAIL", 1), ("INCONCLUSIVE", 1))
    told = "precision, by case and recipe: PASS 2 · FAIL 1 · INCONCLUSIVE 1"
    assert told in to_text(report)
    assert told in to_markdown(report)


def test_records_that_were_never_judged_say_nothing_of_precision() -> None:
    old = record(margins=None, precision=None, floor=math.nan, source="")
    text = to_text(report_of(old))
    assert "by case and recipe" not in text
    assert "could not have shown" not in text
    assert cost_of(old) == ["2.0e-3", "–", "PASS"]


def test_recipe_fails_only_where_every_implementation_loses() -> None:
    one = [record(), costs(implementation="naive_unsafe"), costs(case="smoke/b"), record("smoke/b", seed=1)]
    report = report_of(*one)
    assert [(r.case, r.recipe) for r in report.costly] == [("smoke/b", "bf16")]
    assert [(r.implementations, r.cells) for r in report.own_losses] == [(("naive_unsafe",), 1)]
    assert cost_of(*one)[2] == "FAIL in 1 of 2 cases"
    assert "in 1 more (case, recipe), only with naive_unsafe" in to_text(report)


def test_cost_is_that_of_implementations_that_did_not_fail_where_there_are_any() -> None:
    bad = failed(implementation="wrong", rel=0.5, floor=0.4)
    assert cost_of(record(), bad)[:2] == ["2.0e-3", "2.0e-3"]
    assert cost_of(bad)[:2] == ["1.0e+0", "4.0e-1"]


def test_what_costs_too_much_is_ordered_by_total_error_over_the_floor_nan_first() -> None:
    nan = errors(nan_mismatch=1)
    report = report_of(
        costs(case="g/a", rel=1e-3), costs(case="g/b", rel=9e-3), costs(case="g/c", total_errors=nan)
    )
    assert [r.case for r in report.costly] == ["g/c", "g/b", "g/a"]
    text, shown = to_text(report), to_markdown(report)
    assert "== Recipes that cost too much here ==" in text
    assert "peak 1e+04" not in text
    assert "peak 1e+04" in shown


def test_reasons_that_differ_by_figures_or_source_alone_are_told_once() -> None:
    again = LOST.replace("observed", "predicted").replace("1e+04", "2e+04")
    (row,) = report_of(costs(), costs(seed=1, precision_reasons=(again, "over the budget"))).costly
    assert row.reasons == (LOST, "over the budget")


def test_unseen_is_the_largest_of_a_group_and_names_its_case() -> None:
    blind = margins(unseen={"shrink": 0.5, "scale": 1e-4})
    report = report_of(
        record(), record("smoke/blind", margins=blind), record("g/x", margins=margins(unseen={}))
    )
    first, second = report.unseen
    assert (first.shrink, first.shrink_at) == (0.5, "smoke/blind · bf16")
    assert (first.scale, first.scale_at) == (2e-3, "smoke/tiny · bf16")
    assert math.isnan(second.shrink)
    assert words.unseen(second) == ["g", "–", "", "–", ""]


def test_inconclusive_cases_stand_by_reason_with_the_range_of_its_numbers() -> None:
    def unsure(case: str, rows: int, **changes: object) -> Record:
        reasons = (f"{rows} independent rows; at least 4 are needed",)
        return record(case, status=Status.INCONCLUSIVE, reasons=reasons, **changes)

    records = [unsure("g/a", 3), unsure("g/a", 3, seed=1), unsure("g/b", 0), unsure("g/c", 2)]
    records.append(record("g/d", status=Status.INCONCLUSIVE, reasons=()))
    first, second = report_of(*records).doubts
    assert first.reason == "0 to 3 independent rows; at least 4 are needed"
    assert first.cases == (("g/a", 2), ("g/b", 1), ("g/c", 1))
    assert second.reason == "no reason given"
    shown = "0 to 3 independent rows; at least 4 are needed: 4 cells in g/a (2), g/b (1), g/c (1)"
    assert shown in one_line(to_text(report_of(*records)))
    assert words.doubt(first, 1).endswith("in g/a (2) … and 2 cases more")


def test_combination_that_did_not_run_is_blank() -> None:
    report = report_of(record(recipe="bf16"), record(recipe="fp16", implementation="other"))
    assert report.groups[0].cells[0][1] is None


def test_failures_come_before_tables_with_a_command_that_repeats_them() -> None:
    text = to_text(report_of(*grid(["smoke/a"], IMPLEMENTATIONS, ["bf16"]), failed(recipe="fp16", seed=2)))
    assert text.index("Unexpected failures: 1 cell") < text.index("== Errors")
    command = text[text.index("python -m harness") : text.index("== Errors")].replace("\\\n", "")
    expected = "python -m harness run --cases smoke --only smoke/tiny --implementations naive_masked"
    assert shlex.split(command) == [*expected.split(), "--recipes", "fp16", "--seeds", "3"]


def test_command_names_the_device_unless_it_is_the_default() -> None:
    (failure,) = report_of(failed(machine=replace(MACHINE, device="cuda"))).failures
    assert words.command(failure)[-2:] == ("--device", "cuda")


def test_command_names_the_case_file_a_case_came_from_or_else_its_group() -> None:
    def cases(source: str) -> str:
        (failure,) = report_of(failed(source=source)).failures
        command = words.command(failure)
        return command[command.index("--cases") + 1]

    assert cases("/home/me/my cases.py") == "/home/me/my cases.py"
    assert cases("real") == "real"
    assert cases("") == "smoke"


def test_failure_tells_its_ratio_and_the_first_diagnosis_of_its_seeds() -> None:
    records = [
        failed(seed=0, margins=margins(ratio=5.0)),
        failed(seed=1, margins=margins(ratio=7.0), diagnosis=SCALE_OFF),
    ]
    told = "the softmax scale is off: size +0.002, explains 99.0% of the error; as well explained by: softcap"
    for shown in (to_text(report_of(*records)), to_markdown(report_of(*records))):
        assert "×7.0 expected" in shown
        assert told in one_line(shown)
        assert shown.count("(2 of 2 seeds, cpu)") == 1
    (unjudged,) = report_of(failed(margins=None)).failures
    assert (words.margin(unjudged), unjudged.diagnosis) == ("", "")


def test_later_record_of_the_same_cell_and_device_counts_alone() -> None:
    first, other = failed(), record(machine=replace(MACHINE, device="cuda"))
    records = [first, other, record(rel=5e-4)]
    assert latest(records) == [records[2], other]
    report = report_of(*records)
    assert (report.headline.records, report.headline.repeated) == (2, 1)
    assert report.failures == ()
    assert "1 record left out: a later one of the same cell and device" in to_text(report)
    assert "left out: a later" not in to_text(report_of(record(), other))


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


def test_worst_rows_put_unexpected_failures_first_then_error_over_expected() -> None:
    records = [record(f"g/{n}", rel=1e-3) for n in range(20)]
    records += [record("g/odd", rel=1e-6, recipe="fp32", margins=margins(ratio=1.4))]
    records += [failed(case="g/bad", rel=1e-8, margins=margins(ratio=0.1)), record("g/old", margins=None)]
    records += [record("g/nan"), record("g/nan", seed=1, errors=errors(nan_mismatch=1))]
    rows = report_of(*records).worst
    assert [r.case for r in rows[:3]] == ["g/bad", "g/nan", "g/odd"]
    assert len(rows) == 15
    assert "g/old" not in {r.case for r in rows}


def test_worst_row_shows_the_margins_of_the_seed_farthest_out() -> None:
    far = margins(ratio=2.0, limit=1.6, worst=0.8, worst_at="element (0, 1, 2, 3)", statistic=4.56)
    (row,) = report_of(record(seed=1), record(seed=2, margins=far)).worst
    assert words.worst(row) == [
        ("1.0e-3",), ("2", "limit 1.6"), ("0.8", "element (0,1,2,3)"), ("4.6 of 6.2", "shrink"),
        ("-1.0e-04", "-1.0e-02"),
    ]  # fmt: skip
    shown = one_line(to_markdown(report_of(record(margins=far))))
    assert "| 2, limit 1.6 | 0.8, element (0,1,2,3) | 4.6 of 6.2, shrink | -1.0e-04, -1.0e-02 |" in shown
    (bare,) = report_of(record(margins=None)).worst
    assert words.worst(bare)[1:4] == [("–",)] * 3


def test_known_failures_do_not_crowd_the_worst_rows() -> None:
    records = [*(failed(case=f"g/{n}") for n in range(20)), record("g/pass")]
    assert summary(records, reviewed(records, deviation())).worst[0].case == "g/pass"


def test_worst_row_shows_the_worst_seed_and_nan_is_worse_than_any() -> None:
    records = [
        record(errors=errors(slope=-3e-3, bias_ulp=0.1)),
        record(seed=1, errors=errors(slope=1e-3, bias_ulp=math.nan), margins=margins(ratio=math.nan)),
    ]
    (row,) = report_of(*records).worst
    assert row.slope == -3e-3
    assert math.isnan(row.bias_ulp)
    assert row.margins is not None
    assert math.isnan(row.margins.ratio)


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
    far = margins(ratio=1.234e300, limit=1e300, worst_at=name * 9, direction=name, statistic=1e9)
    lost = {
        "precision": Status.FAIL,
        "precision_reasons": (name * 4,),
        "diagnosis": SCALE_OFF,
        "margins": far,
    }
    records += [failed(case="smoke/wide", errors=wide, hazards=(hazard,), status=s, **lost) for s in Status]
    records += [costs(case=f"{name}/{name}", recipe=name, margins=far, source=f"/{name}.py")]
    text = to_text(summary(records, reviewed(records)))
    assert max(map(len, text.split("\n"))) <= 100
    assert name.replace("_", "") in re.sub(r"[\s_]", "", text)  # wrapped, not cut


def test_builtin_recipes_by_builtin_implementations_take_one_block() -> None:
    text = to_text(report_of(*grid(["smoke/a"], IMPLEMENTATIONS, recipes())))
    tables = text[text.index("== Errors") : text.index("== Accuracy beside cost")]
    (row,) = [line.split() for line in tables.split("\n") if line.startswith("fp8_kv ")]
    assert len(row) == 1 + 2 * len(IMPLEMENTATIONS) + 2  # two figures a cell, total and floor


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
        failed(
            **{**names, "case": f"{HOSTILE}2", "source": HOSTILE},
            diagnosis=replace(SCALE_OFF, what=HOSTILE, rivals=(HOSTILE,)),
            margins=margins(worst_at=HOSTILE, direction=HOSTILE), precision=Status.FAIL,
            precision_reasons=(HOSTILE,),
        ),
        costs(**{**names, "case": f"{HOSTILE}3"}, precision_reasons=(HOSTILE,)),
        record(**{**names, "case": f"{HOSTILE}4", "status": Status.INCONCLUSIVE, "reasons": (HOSTILE,)}),
    ]  # fmt: skip
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
    first, second = csv.DictReader(cells_csv(records, reviewed(records)))
    assert float(first["kernel_rel_l2"]) == 1e-3
    assert float(first["total_rel_l2"]) == 2e-3
    assert first["lse_worst_bhic"] == "0 1 17 3"
    assert (first["kv_bytes_per_token"], first["run_ms"], first["isa"]) == ("256", "1", "AVX512")
    assert (first["data_score_max"], second["data_score_max"]) == ("3.5", "")
    assert (second["status"], second["reasons"], second["kernel_rmse"]) == ("REFUSED", "no window", "")


def test_csv_has_margins_diagnosis_and_precision() -> None:
    judged = failed(diagnosis=SCALE_OFF, precision=Status.FAIL, precision_reasons=("a", "b"))
    first, second, third = csv.DictReader(
        cells_csv(records := [judged, record(seed=1), refused(seed=2)], reviewed(records))
    )
    got = [first[n] for n in ("ratio", "limit", "worst", "worst_at", "ceiling", "statistic", "threshold")]
    assert got == ["1", "1.5", "0.5", "row b=0 h=1 i=17", "0.1", "3", "6.2"]
    assert (first["direction"], first["expected_rel_l2"]) == ("shrink", "0.001")
    assert (first["unseen_shrink"], first["unseen_scale"]) == ("0.001", "0.002")
    told = [first[n] for n in ("fault", "fault_size", "fault_explained", "rivals")]
    assert told == ["scale", "0.002", "0.99", "softcap"]
    assert (first["precision"], first["precision_reasons"], first["floor"]) == ("FAIL", "a; b", "0.002")
    assert (second["precision"], second["precision_reasons"], second["fault"]) == ("PASS", "", "")
    assert (third["precision"], third["ratio"], third["unseen_scale"], third["floor"]) == ("", "", "", "nan")


def test_csv_says_once_what_a_case_says_in_all_its_cells() -> None:
    records = [*grid(["g/a", "g/b"], ["x", "y"], ["bf16"]), record("g/a", why="another reason")]
    rows = list(csv.DictReader(cases_csv(records)))
    assert [r["case"] for r in rows] == ["g/a", "g/b", "g/a"]
    assert (rows[0]["why"], rows[0]["shape"], rows[0]["group"]) == ("made up", "[1, 2, 64, 64]", "g")
    assert "made up" not in "".join(cells_csv(records, reviewed(records)))


def test_csv_keeps_seven_digits_of_figures_and_all_of_counts() -> None:
    records = [record(errors=errors(count=123456789, rel_l2=1 / 3), flops=12345678901)]
    (row,) = csv.DictReader(cells_csv(records, reviewed(records)))
    assert (row["kernel_count"], row["kernel_rel_l2"]) == ("123456789", "0.3333333")
    assert (row["flops"], row["emulated"]) == ("12345678901", "True")


@given(st.text(), st.text())
def test_csv_reads_back_any_text_as_one_clean_line(case: str, reason: str) -> None:
    records = [failed(case=case, reasons=(reason,), source="x")]
    (row,) = csv.DictReader(cells_csv(records, reviewed(records)))
    for name, text in (("case", case), ("reasons", reason)):
        assert row[name].removeprefix("'") == words.clean(text).removeprefix("'")
    assert row["kernel_rel_l2"] == "0.001"


def test_csv_files_hold_no_control_characters_that_names_and_reasons_bring() -> None:
    """A terminal obeyed them, and a direction mark showed a name as another."""
    hazard = replace(OVERFLOW, stage=HOSTILE, format=HOSTILE)
    texts = dict.fromkeys(("case", "group", "implementation", "recipe", "why", "source"), HOSTILE)
    records = [
        failed(
            **texts, reasons=(HOSTILE,), traceback=HOSTILE, hazards=(hazard,), inputs_hash=HOSTILE,
            machine=replace(MACHINE, cpu=HOSTILE), diagnosis=replace(SCALE_OFF, fault=HOSTILE, rivals=(HOSTILE,)),
            margins=margins(worst_at=HOSTILE, direction=HOSTILE), data={HOSTILE: 1.0},
        )
    ]  # fmt: skip
    assert not HOSTILE.isprintable()
    for lines in (cells_csv(records, reviewed(records)), cases_csv(records), hazards_csv(records)):
        header, *rows = lines
        assert len(rows) == 1
        for line in (header, *rows):
            assert line.endswith("\n")
            assert line[:-1].isprintable()


def test_csv_writes_non_finite_figures_as_words() -> None:
    records = [record(errors=errors(rel_l2=math.nan, rmse=math.inf, slope=-math.inf))]
    (row,) = csv.DictReader(cells_csv(records, reviewed(records)))
    assert (row["kernel_rel_l2"], row["kernel_rmse"], row["kernel_slope"]) == ("nan", "inf", "-inf")


def test_csv_text_cannot_be_a_formula_and_numbers_stay_numbers() -> None:
    records = [
        failed(case=text, reasons=(text,), why=text, machine=replace(MACHINE, cpu=text), hazards=(OVERFLOW,),
               data={"x": -1.0})
        for text in (FORMULA, "+1", "-1", "@x", "\t=1", "\r=1", " =1", "＝1")
    ]  # fmt: skip
    for row in csv.DictReader(cases_csv(records)):
        assert all(row[name].startswith("'") for name in ("case", "why"))
    for row in csv.DictReader(cells_csv(records, reviewed(records))):
        assert all(row[name].startswith("'") for name in ("case", "reasons", "cpu"))
        assert row["kernel_slope"] == "-0.0001"
        assert row["data_x"] == "-1"
    for row in csv.DictReader(hazards_csv(records)):
        assert row["case"].startswith("'")
        assert (row["headroom_bits"], row["where_bhij"]) == ("-0.61", "0 1 17 9")


def test_csv_names_the_reason_of_known_failures() -> None:
    records = [failed()]
    (row,) = csv.DictReader(cells_csv(records, reviewed(records, deviation(reason="by design"))))
    assert row["known"] == "by design"


def test_lone_surrogates_do_not_stop_a_report(tmp_path: Path) -> None:
    records = [failed(case="g/\ud800", reasons=("\udfff",))]
    write_report(records, reviewed(records), tmp_path)


def test_markdown_explains_the_figures_and_both_truths() -> None:
    shown = to_markdown(report_of(record()))
    assert "‖Δ‖ / ‖o‖" in shown
    for part in ("ΣΔ² / Σσ²", "√(2 ln(2K/α))", "ceiling", "INCONCLUSIVE", "floor", "diagnosis", "χ²"):
        assert part in shown
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
    (timing,) = read_timings(timings_file(tmp_path, {"benchmarks": [benchmark(emulated=False)]}))
    assert timing.tflops == pytest.approx(0.5)
    for shown in (timings_text([timing]), timings_markdown([timing])):
        for part in ("online", "4.00", "0.500", "1.5e-03", "256"):
            assert part in shown


def test_emulated_precision_has_its_emulators_time_and_no_rate(tmp_path: Path) -> None:
    """It used to stand beside the others with TFLOP/s, which read as the format's speed."""
    (timing,) = read_timings(timings_file(tmp_path, {"benchmarks": [benchmark(bytes=1e6, format="bf16")]}))
    assert math.isnan(timing.tflops)
    assert math.isnan(timing.gbytes)
    for shown in (timings_text([timing], CONTEXT), timings_markdown([timing], CONTEXT)):
        before, _, table = shown.partition("the emulator's time, not the format's")
        assert "online" in table
        assert "4.00" in table
        assert "TFLOP/s" not in before
        assert "0.500" not in shown


CONTEXT = Context("cpu: a machine", (1.0, 2.0), {"fp64": 0.5e12, "fp32": 1e12, "bf16": 0.25e12}, 1e9)


def test_shares_are_of_the_ceilings_of_the_same_run() -> None:
    t = Timing("c", "[1]", "i", "fp32", 4.0, 2e9, 1e-3, 256.0, False, 1e6, 1.0, 3.9, 4.2, "fp32")
    assert CONTEXT.shares(t) == (pytest.approx(0.5), pytest.approx(0.25))  # 0.5 TFLOP/s, 0.25 GB/s
    # a kernel may widen to FP32, and nothing widens beyond FP64
    assert CONTEXT.product("bf16") == 1e12
    assert CONTEXT.product("fp64") == 0.5e12
    for shown in (timings_text([t], CONTEXT), timings_markdown([t], CONTEXT)):
        for part in (
            "50 % ×",
            "3.90–4.20",
            "×1.0",
            "0.250",
            "fp32 1.00 TFLOP/s",
            "copying 1.00 GB/s",
            "cpu: a machine",
        ):
            assert part in shown
    by_copy = replace(t, bytes=4e6)
    assert "100 % →" in timings_text([by_copy], CONTEXT)
    assert "of ceiling" in timings_markdown([t])  # and without ceilings a dash
    assert CONTEXT.product("") != CONTEXT.product("")


def test_cells_that_did_not_pass_are_told_with_their_reason(tmp_path: Path) -> None:
    left = {
        "case": "c",
        "shape": "[1]",
        "implementation": HOSTILE,
        "recipe": "bf16",
        "status": "FAIL",
        "reason": "2 NaN",
    }
    stored = {
        "benchmarks": [benchmark()],
        "throughput": {"not_timed": [left], "products": {"fp32": 1e12}, "copy": 1e9},
    }
    path = timings_file(tmp_path, stored)
    context, timings = read_context(path), read_timings(path)
    text, page = timings_text(timings, context), timings_markdown(timings, context)
    assert "2 NaN" in text
    assert "FAIL" in page
    assert "<script" not in page
    assert max(map(len, text.split("\n"))) <= 100


@pytest.mark.parametrize(
    "said", [[], 1, {"not_timed": [{}]}, {"products": {"fp32": "fast"}}, {"loads": [None]}, {"copy": "x"}]
)
def test_a_context_that_is_not_the_sessions_is_a_one_line_error(tmp_path: Path, said: object) -> None:
    path = timings_file(tmp_path, {"benchmarks": [], "throughput": said})
    with pytest.raises(ValueError, match=r"throughput\.json.*throughput is not the session's") as error:
        read_context(path)
    assert "\n" not in str(error.value)


def test_a_file_of_plain_benchmarks_has_an_empty_context(tmp_path: Path) -> None:
    assert repr(read_context(timings_file(tmp_path, {"benchmarks": []}))) == repr(Context())  # copy is NaN


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


def test_missing_timings_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: No such file; write one with pytest benchmarks/"):
        read_timings(tmp_path / "none.json")


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
