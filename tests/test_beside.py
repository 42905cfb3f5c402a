"""What is done beside the rest of a command is done whole, and its errors are the command's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.beside import beside

ROOT = Path(__file__).parents[1]
# In a process of one thread without torch, as `report` is: this one may have both.
SCRIPT = """
import os, sys, pathlib
from harness.beside import _can_fork, beside
path, parent = pathlib.Path(sys.argv[1]), os.getpid()
def work():
    path.write_text("other" if os.getpid() != parent else "same")
    {then}
try:
    with beside(work, {worth}):
        print("body", end=" ")
        {inside}
except ValueError as error:
    print(error, end=" ")
print(path.read_text(), _can_fork(), "done")
"""


def run(tmp_path: Path, worth: bool = True, then: str = "pass", inside: str = "pass") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(worth=worth, then=then, inside=inside), str(tmp_path / "x")],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


def test_work_is_done_in_a_fork_where_one_is_safe_and_worth_it(tmp_path: Path) -> None:
    body, where, can, done = run(tmp_path)
    assert (body, where, done) == ("body", "other" if can == "True" else "same", "done")
    assert run(tmp_path, worth=False)[:2] == ["body", "same"]


def test_error_of_the_work_is_raised_once_and_after_the_body(tmp_path: Path) -> None:
    found = run(tmp_path, then="raise ValueError('full')")
    assert found.count("full") == found.count("done") == 1
    assert found[-3] == "same"  # done again here, to say what is wrong


def test_error_of_the_body_waits_for_the_work(tmp_path: Path) -> None:
    found = run(tmp_path, then="import time; time.sleep(0.2); path.write_text('whole')",
                inside="raise ValueError('wrong')")  # fmt: skip
    assert found[:3] == ["body", "wrong", "whole"]


def test_process_that_has_loaded_torch_does_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: F401

    monkeypatch.setattr("os.fork", lambda: pytest.fail("forked"))
    done = []
    with beside(lambda: done.append(1), True):
        assert done == [1]


def test_tables_of_a_large_report_are_those_of_a_small_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Forked or not: the same files."""
    sample = ROOT / "reports" / "sample" / "records.jsonl"
    code = (
        "import sys, harness.report as r; r.MANY = int(sys.argv[1]); from harness.cli import main;"
        "main(['report', sys.argv[2], '--out', sys.argv[3]])"
    )
    for many in ("1", "1000000"):
        done = subprocess.run(
            [sys.executable, "-c", code, many, str(sample), str(tmp_path / many)],
            cwd=ROOT,
            capture_output=True,
        )
        assert done.returncode in (0, 1), done.stderr
    for name in ("report.md", "cells.csv", "cases.csv", "hazards.csv"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "1000000" / name).read_bytes()
