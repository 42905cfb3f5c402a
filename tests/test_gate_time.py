"""`gate --old`: what is slower than another checkout is a regression, on one machine, of implementations that pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from record_factory import grid, record

from harness import versus as versus_module
from harness.cli import main
from harness.cli.slower import check_old, with_times
from harness.gate import Outcome, compare, pool_records
from harness.records import Record, Status
from harness.timing.pairs import Paired
from harness.timing.rule import Interval, Speed
from harness.versus import Judged, Versus

ROOT = Path(__file__).parents[1]
PASSED = Judged(Status.PASS, (), 1e-7, 1.0)


def times(speed: Speed, ratio: float, most: int = 500) -> Paired:
    near = Interval(ratio, 0.99 * ratio, 1.01 * ratio)
    return Paired(near, Interval(1e-3, 1e-3, 1e-3), near, speed, 43, (1, 1), 13, most)


def found_by(monkeypatch: pytest.MonkeyPatch, *found: tuple[Judged, Judged, Paired | None]) -> list[Any]:
    """The comparison gives these, one for each shape; what it was asked for."""
    asked: list[Any] = []

    def instead(pairs: Any, shapes: Any, *_: Any) -> Iterator[Versus]:
        pairs = tuple(pairs)
        asked.extend(pairs)
        for (a, b), shape, (x, y, timed) in zip(pairs * len(found), shapes, found, strict=False):
            yield Versus(shape, a, b, (x, y), timed)

    monkeypatch.setattr(versus_module, "versus", instead)
    return asked


def fp32(implementation: str = "naive_masked", **given: Any) -> Record:
    return record(recipe="fp32", implementation=implementation, **given)


def outcome_of(records: list[Record]) -> Outcome:
    return compare(records, pool_records(records))


def test_slower_is_a_regression_and_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    found_by(
        monkeypatch, (PASSED, PASSED, times(Speed.SLOWER, 1.2)), (PASSED, PASSED, times(Speed.SAME, 1.0))
    )
    outcome, timed = with_times(outcome_of([fp32()]), [fp32()], ROOT, "cpu")
    assert (outcome.exit_code, timed) == (1, 2)
    (line,) = outcome.regressions
    assert line.startswith(
        "naive_masked:fp32 [1, 8, 512, 64]: B ÷ A = 1.200 (1.188 to 1.212) in 43 rounds: B is"
    )
    assert outcome.notes == (f"time: 1 comparison with {ROOT}: no difference",)


def test_faster_is_an_improvement_and_undecided_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    found_by(
        monkeypatch,
        (PASSED, PASSED, times(Speed.FASTER, 0.8)),
        (PASSED, PASSED, times(Speed.UNDECIDED, 1.04)),
    )
    outcome, timed = with_times(outcome_of([fp32()]), [fp32()], ROOT, "cpu")
    assert (outcome.exit_code, timed, len(outcome.improvements)) == (0, 2, 1)
    (note,) = outcome.notes
    assert note.endswith("undecided at 5 %")  # `gate` has no --budget to raise


def test_what_fresh_processes_do_not_repeat_is_a_note_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found_by(monkeypatch, (PASSED, PASSED, replace(times(Speed.UNDECIDED, 1.2), unrepeated=True)))
    outcome, timed = with_times(outcome_of([fp32()]), [fp32()], ROOT, "cpu")
    assert (outcome.exit_code, timed) == (0, 1)
    assert outcome.notes[0].endswith(
        "undecided at 5 %: what one pair of processes showed, fresh ones did not repeat"
    )


def test_what_the_other_checkout_lacks_is_a_note_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Judged(Status.ERROR, ("ValueError: unknown implementation",))
    refused = Judged(Status.REFUSED, ("no such shape",))
    found_by(monkeypatch, (lacking, PASSED, None), (refused, refused, None))
    outcome, timed = with_times(outcome_of([fp32()]), [fp32()], ROOT, "cpu")
    assert (outcome.exit_code, timed) == (0, 0)
    (note,) = outcome.notes  # of a shape that neither does, nothing
    assert note.endswith("not timed: A did not pass (A is ERROR: ValueError: unknown implementation)")


def test_what_fails_here_at_the_timed_size_is_a_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smoke cases are smaller: a fault that begins at 512 rows is seen here alone."""
    wrong = Judged(Status.FAIL, ("error of tensor is 300 × what is normal",), 0.05, 300.0)
    found_by(monkeypatch, (PASSED, wrong, None), (PASSED, PASSED, times(Speed.SAME, 1.0)))
    outcome, timed = with_times(outcome_of([fp32()]), [fp32()], ROOT, "cpu")
    assert (outcome.exit_code, timed) == (1, 1)
    (line,) = outcome.regressions
    assert "B is FAIL: error of tensor is 300 × what is normal" in line


def test_only_what_passed_under_fp32_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = found_by(monkeypatch)
    records = [
        fp32(), fp32("sdpa_flash", status=Status.FAIL), record(implementation="sdpa_math", recipe="bf16"),
        fp32("no_more"),
    ]  # fmt: skip
    with_times(outcome_of(records), records, ROOT, "cpu")
    assert [(str(a), str(b)) for a, b in asked] == [(f"naive_masked:fp32 of {ROOT}", "naive_masked:fp32")]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"update": True}, "--update"),
        ({"stored": Path("x.jsonl")}, "--records"),
        ({"kernel": True}, "--kernel"),
        ({"old": Path("nowhere")}, "nowhere holds no harness/registry.py"),
    ],
)
def test_what_has_no_times_to_compare_is_refused_in_a_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as wrong:
        check_old(**{"old": ROOT, "stored": None, "update": False, "kernel": False, **given})
    assert "\n" not in str(wrong.value)
    check_old(None, Path("x.jsonl"), True, True)


def test_nothing_timed_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness.cli import gating
    from harness.gate import make_baseline

    baseline = tmp_path / "baseline.jsonl"
    records = grid(["g/a"], ["naive_masked"], ["bf16"])
    baseline.write_text(make_baseline(records))
    monkeypatch.setattr(gating, "run_cells", lambda *_: records)
    with pytest.raises(SystemExit) as stop:
        main(["gate", "--baseline", str(baseline), "--old", str(ROOT)])
    assert stop.value.code == 3
    assert "nothing was timed against" in capsys.readouterr().err


def test_one_real_comparison_of_this_checkout_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it finds of the time, it times both and tells it."""
    from harness.cli import slower

    monkeypatch.setattr(slower, "SHAPES", ("1,2,32,16",))
    monkeypatch.setattr(slower, "BUDGET_S", 0.3)
    outcome, timed = with_times(outcome_of([fp32()]), [fp32()], ROOT, "cpu")
    assert timed == 1
    assert len(outcome.notes) + len(outcome.regressions) + len(outcome.improvements) == 1
