"""Baselines of several classes of machine, and how one changes: with a reason, after its changes were shown."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from record_factory import MACHINE, OVERFLOW, TODAY, deviation, grid, margins, record

from harness.cli import gating, main
from harness.deviations import review
from harness.gate import choose, machine_class, make_baseline, pool_records, read_baseline, read_folder
from harness.gate.baseline import Baseline
from harness.records import Record, Status, write_records

AVX512, AVX2 = "cpu-linux-avx512-torch2.13", "cpu-linux-avx2-torch2.13"


class Called(NamedTuple):
    code: int
    out: str
    err: str


Gate = Callable[..., Called]


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Gate:
    """The command on these records, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def called(records: list[Record], *arguments: str) -> Called:
        write_records("r", records)
        with pytest.raises(SystemExit) as stop:
            main(["gate", "--records", "r", *arguments])
        assert isinstance(stop.value.code, int)
        return Called(stop.value.code, *capsys.readouterr())

    return called


def on(isa: str, **changes: object) -> Record:
    return record(machine=replace(MACHINE, isa=isa), **changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, AVX512),
        ({"torch": "2.13.1+cpu", "threads": 8, "cores": 64, "cpu": "Another"}, AVX512),
        ({"torch": "2.14.0"}, "cpu-linux-avx512-torch2.14"),
        ({"system": "Darwin arm64", "isa": "DEFAULT"}, "cpu-darwin-arm64-default-torch2.13"),
        ({"device": "cuda (NVIDIA H100 80GB HBM3)"}, "cuda-nvidia-h100-80gb-hbm3-torch2.13"),
        ({"device": "cuda:1 (NVIDIA H100 80GB HBM3)"}, "cuda-nvidia-h100-80gb-hbm3-torch2.13"),
        ({"system": "../..", "isa": "a/b\n"}, "cpu-unknown-a-b-torch2.13"),
    ],
)
def test_class_of_a_machine_is_what_decides_bits_and_is_safe_as_a_file_name(
    changes: dict[str, str], name: str
) -> None:
    assert machine_class(replace(MACHINE, **changes)) == name


def test_gate_takes_the_baseline_of_its_class_else_the_nearest(tmp_path: Path) -> None:
    names = ("cuda-nvidia-h100-torch2.13", AVX512, AVX2, "cpu-linux-avx2-torch2.12")
    held = {tmp_path / f"{n}.jsonl": Baseline({}, n) for n in names}
    for name in names:
        assert choose(held, name).stem == name
    assert choose(held, "cpu-linux-avx2-torch2.14").stem.startswith("cpu-linux-avx2")
    assert choose(held, "cuda-nvidia-h100-torch2.14").stem == "cuda-nvidia-h100-torch2.13"
    assert choose({tmp_path / "old.jsonl": Baseline({})}, AVX2).stem == "old"


def test_each_class_has_its_file_and_another_class_is_compared_by_verdicts(
    gate: Gate, tmp_path: Path
) -> None:
    assert gate([on("AVX512")], "--update").code == 0
    done = gate([on("AVX2", rmse=1.05e-3, margins=margins(ratio=1.05))])
    assert done.code == 0
    assert f"note: machine class {AVX2}, the baseline's is {AVX512}" in done.out
    assert gate([on("AVX2")], "--update").code == 0
    assert sorted(p.stem for p in (tmp_path / "reports/baselines").iterdir()) == [AVX2, AVX512]
    assert gate([on("AVX2", rmse=1.05e-3, margins=margins(ratio=1.05))]).code == 1
    assert gate([on("AVX512")]).out == "gate: no regression; 1 cells of this run stand in the baseline\n"


def test_records_of_two_classes_are_refused(gate: Gate) -> None:
    assert gate([on("AVX512")], "--update").code == 0
    assert gate([on("AVX2")], "--update").code == 0
    done = gate([on("AVX512"), on("AVX2", recipe="fp32")])
    assert (done.code, f"are of {AVX2}, {AVX512}" in done.err) == (2, True)


def test_update_of_a_baseline_needs_a_reason_shows_what_moves_and_keeps_both(
    gate: Gate, tmp_path: Path
) -> None:
    old = [record("smoke/a"), record("smoke/b"), record("smoke/c"), record("smoke/gone")]
    new = [
        record("smoke/a", rmse=2e-3), record("smoke/b", status=Status.FAIL), record("smoke/c"), record("smoke/new"),
    ]  # fmt: skip
    assert gate(old, "--update", "--reason", "made").code == 0
    path = tmp_path / "reports/baselines" / f"{AVX512}.jsonl"
    before = path.read_bytes()
    for reason in ((), ("--reason", " \n ")):
        done = gate(new, "--update", *reason)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert f'{AVX512}.jsonl exists: say why it changes with --reason "…"' in done.err
        assert path.read_bytes() == before
    done = gate(new, "--update", "--reason", "sums in\nblocks of 64")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == (
        "cells: 3 in both, 1 new, 1 gone, 1 with another verdict, 1 with a larger rmse, 0 with a smaller one"
    )
    assert "smoke/b · naive_masked · bf16: PASS 1 | PASS 1 |  → FAIL 1 | PASS 1 | " in lines
    assert "smoke/a · naive_masked · bf16: rmse 0.001 → 0.002 (+100.0%)" in lines
    assert "gone: smoke/gone · naive_masked · bf16" in lines
    held = read_baseline(path)
    assert [c.reason for c in held.history] == ["made", "sums in blocks of 64"]
    assert (held.history[1].date, held.history[1].commit) == ("2026-01-01", "abc1234")
    assert held.history[1].moved == lines[0]
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[0])["kind"] == "baseline"
    assert gate(new).code == 0


def test_update_with_filters_leaves_the_other_cells_as_they_are(gate: Gate, tmp_path: Path) -> None:
    old = grid(["smoke/a", "smoke/b"], ["x", "y"], ["bf16"], seeds=2)
    assert gate(old, "--update").code == 0
    moved = [replace(r, status=Status.FAIL) for r in old]
    done = gate(moved, "--update", "--reason", "x fails", "--only", "smoke/a")
    assert (done.code, "2 cells that were not selected stay" in done.out) == (0, True)
    (held,) = read_folder(tmp_path / "reports/baselines").values()
    was, now = pool_records(old), pool_records(moved)
    assert held.cells == {key: (now if key[0] == "smoke/a" else was)[key] for key in was}


def test_hostile_reason_and_names_stay_one_line_each(gate: Gate, tmp_path: Path) -> None:
    assert gate([record("g/a\n\u2028<b>\x1b[31m")], "--update", "--reason", 'a\x1b[31m\u2028b\n"c"').code == 0
    (path,) = (tmp_path / "reports/baselines").iterdir()
    assert len(path.read_text(encoding="utf-8").split("\n")) == 3
    assert read_baseline(path).history[0].reason == 'a?[31m b "c"'


def test_damaged_head_is_named(tmp_path: Path) -> None:
    text = make_baseline([record()]).replace('"history": [{', '"history": [{"date": 3}, {')
    (tmp_path / "b.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1 is not a baseline's: history"):
        read_baseline(tmp_path / "b.jsonl")


# --- what the gate is for, through the command ---------------------------------------------------------------

SMOKE = grid(["smoke/a", "smoke/b", "smoke/c"], ["x", "y"], ["bf16"], seeds=3)


def edited(case: str | None, **changes: object) -> list[Record]:
    """The smoke records with those of implementation x changed, on one case or on all."""
    return [replace(r, **changes) if r.implementation == "x" and case in (None, r.case) else r for r in SMOKE]


def raised(case: str | None, factor: float = 1.05) -> list[Record]:
    return [
        replace(r, errors=replace(r.errors, rmse=factor * r.errors.rmse))
        if r.errors and r.implementation == "x" and case in (None, r.case) else r
        for r in SMOKE
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (raised("smoke/b"), "smoke/b · x · bf16: rmse +5.0% beyond the floor in 3 paired seeds"),
        (raised(None), "all cases · x · bf16: rmse +5.0% beyond the floor over 3 cases and 9 pairs"),
        (edited("smoke/b", status=Status.INCONCLUSIVE), "smoke/b · x · bf16: status PASS 3 → INCONCLUSIVE 3"),
        (edited("smoke/b", precision=Status.FAIL), "smoke/b · x · bf16: precision PASS 3 → FAIL 3"),
        ([r for r in SMOKE if (r.case, r.implementation) != ("smoke/b", "x")],
         "smoke/b · x · bf16: in the baseline, not in this run"),
        (edited("smoke/b", hazards=(OVERFLOW,)), "smoke/b · x · bf16: overflow in scores observed 3 times, never"),
    ],
    ids=["rmse-in-one-cell", "rmse-in-all-cells", "verdict", "precision", "lost-cell", "hazard"],
)  # fmt: skip
def test_planted_regression_exits_1_and_is_named_in_one_line(
    gate: Gate, planted: list[Record], named: str
) -> None:
    # grid's figures lie between 1e-4 and 2e-3 with u·truth = 4e-3: raise them above the floor
    def above(records: list[Record]) -> list[Record]:
        return [
            replace(r, errors=replace(r.errors, rmse=100 * r.errors.rmse, max_abs=1.0))
            for r in records
            if r.errors
        ]

    assert gate(above(SMOKE), "--update").code == 0
    assert gate(above(SMOKE)).code == 0
    done = gate(above(planted))
    assert done.code == 1
    (line,) = [x for x in done.out.splitlines() if x.startswith("REGRESSION")]
    assert line.startswith(f"REGRESSION: {named}")


def test_deviation_is_noted_in_its_last_thirty_days_and_then_fails_the_gate(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = datetime.datetime.now(datetime.UTC).date()
    day = datetime.timedelta(days=1)
    assert gate([record()], "--update").code == 0
    for expires, code, said in (
        (today + 40 * day, 0, ""),
        (today + 20 * day, 0, "note: known deviation"),
        (today - day, 1, "gate: 1 expired deviation;"),
    ):
        listed = (
            deviation(implementation="naive_*", expires=expires),
            deviation(case="other/*", expires=today - day),
        )
        monkeypatch.setattr(gating, "load_deviations", lambda _, listed=listed: listed)
        done = gate([record()])
        assert (done.code, said in done.out) == (code, True)
        assert ("known deviation" in done.out) == bool(said)
    assert (
        f"EXPIRED: known deviation naive_* × * × * → FAIL in cases/deviations.toml, expires {today - day}"
        in done.out
    )


def test_review_tells_what_expires_within_thirty_days() -> None:
    day = datetime.timedelta(days=1)
    soon, late, past = (deviation(expires=TODAY + n * day) for n in (29, 31, -1))
    found = review([record()], [soon, late, past], TODAY)
    assert (found.expiring, found.expired) == ((soon,), (past,))
