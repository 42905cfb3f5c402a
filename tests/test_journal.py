"""A run that is killed: what it leaves is whole, and resuming it gives what an uninterrupted run gives."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness import journal, pipeline
from harness.case import Draw, load_cases
from harness.journal import record
from harness.pipeline import Unit, plan
from harness.recipe import Recipe
from harness.records import Record, read_records, to_json, write_records

SEED = int(os.environ.get("JOURNAL_SEED", random.randrange(2**32)))
NAMES, RECIPES, SEEDS = ("naive_masked", "online_softmax"), ("bf16", "fp8_e4m3"), 3
UNITS = plan(load_cases("smoke"), NAMES, RECIPES, seeds=SEEDS)

# Loads torch once, then forks a child for a line of stdin, which runs the smoke cases into that file, and kills it
# at the next line. (Only its parent can kill without the risk of meeting another process of that number.)
FORKS = f"""
import os, signal, sys
from pathlib import Path
from harness.case import Draw, load_cases
from harness.journal import record
from harness.pipeline import plan
units = plan(load_cases("smoke"), {NAMES!r}, {RECIPES!r}, seeds={SEEDS})
while line := sys.stdin.readline():
    child = os.fork()
    if child == 0:
        for _ in record(Path(line.strip()), units, 1, False):
            pass
        os._exit(0)
    sys.stdin.readline()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def timeless(records: list[Record]) -> list[str]:
    return [to_json(replace(r, run_ms=0.0, truth_ms=0.0, created="")) for r in records]


def run(path: Path, units: list[Unit] = UNITS, resume: bool = False) -> list[Record]:
    return [r for _, batch in record(path, units, 1, resume) for r in batch]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a run that nothing interrupted."""
    path = tmp_path_factory.mktemp("whole") / "records.jsonl"
    run(path)
    return path.read_bytes()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Case and seed of the units that are run."""
    seen = []
    real = pipeline.run_unit

    def noted(unit: Unit) -> list[Record]:
        seen.append((unit.case.id, unit.seed))
        return real(unit)

    monkeypatch.setattr(pipeline, "run_unit", noted)
    return seen


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def check_resumes(path: Path, whole: bytes, ran: list[tuple[str, int]]) -> None:
    """The file holds whole units and one cut line at most; resuming runs the other units, once each."""
    text = path.read_bytes()
    lines = text.split(b"\n")
    assert all(json.loads(line) for line in lines[:-1])
    held = read_records(path)
    expected = timeless(_parsed(path.parent, whole))
    assert timeless(held) == expected[: len(held)]
    found = {r.key for r in held}
    missing = [(u.case.id, u.seed) for u in UNITS if not u.keys <= found]
    assert timeless(run(path, resume=True)) == expected
    assert ran == missing
    assert timeless(read_records(path)) == expected


def _parsed(folder: Path, text: bytes) -> list[Record]:
    (folder / "whole").write_bytes(text)
    return read_records(folder / "whole")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kill", range(10), ids=str)
def test_killed_run_is_whole_and_resumes_without_repeating(
    kill: int, tmp_path: Path, whole: bytes, ran: list[tuple[str, int]], forks: subprocess.Popen[str]
) -> None:
    draw = random.Random(SEED + kill)
    size, pause = draw.random() * len(whole), draw.random() * 0.02
    print(f"JOURNAL_SEED={SEED}: killed {pause:.4f} s after byte {size:.0f} of {len(whole)}")
    path = tmp_path / "records.jsonl"
    assert forks.stdin is not None
    assert forks.stdout is not None
    forks.stdin.write(f"{path}\n")
    forks.stdin.flush()
    deadline = time.monotonic() + 30
    while not path.exists() or path.stat().st_size < size:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(pause)
    forks.stdin.write("kill\n")
    forks.stdin.flush()
    assert forks.stdout.readline() == "gone\n"
    check_resumes(path, whole, ran)


@pytest.mark.parametrize("cut", range(6), ids=str)
def test_file_cut_anywhere_resumes(
    cut: int, tmp_path: Path, whole: bytes, ran: list[tuple[str, int]]
) -> None:
    end = random.Random(SEED + cut).randrange(len(whole) + 1)
    print(f"JOURNAL_SEED={SEED}: cut after byte {end} of {len(whole)}")
    path = tmp_path / "records.jsonl"
    path.write_bytes(whole[:end])
    check_resumes(path, whole, ran)


def test_complete_run_resumes_without_running_and_a_missing_file_starts_empty(
    tmp_path: Path, whole: bytes, ran: list[tuple[str, int]]
) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(whole)
    run(path, resume=True)
    assert ran == []
    assert path.read_bytes() == whole  # timings and dates as well
    run(tmp_path / "new" / "records.jsonl", UNITS[:1], resume=True)
    assert len(ran) == 1


def test_run_without_resume_starts_empty(tmp_path: Path, ran: list[tuple[str, int]]) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("not a record\n")
    run(path, UNITS[:1])
    assert len(ran) == 1
    assert {r.key for r in read_records(path)} == UNITS[0].keys


def test_changed_recipe_runs_again(tmp_path: Path, ran: list[tuple[str, int]]) -> None:
    path = tmp_path / "records.jsonl"
    cases = load_cases("smoke")[:2]
    first = plan(cases, ["naive_masked"], [Recipe("mine", at={"out": "bf16"})])
    run(path, first)
    run(path, first, resume=True)
    assert len(ran) == 2
    (one, two) = run(path, plan(cases, ["naive_masked"], [Recipe("mine", at={"out": "fp16"})]), resume=True)
    assert len(ran) == 4
    assert one.recipe_digest == two.recipe_digest != read_digest(first)


def read_digest(units: list[Unit]) -> str:
    return units[0].recipes[0].digest


@pytest.mark.parametrize(
    "change",
    [{"case_digest": "0123456789abcdef"},
     {"why": "another"}, {"device": "cuda (Some GPU)"}, {"isa": "none"}, {"torch": "2.9.0"}],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_record_of_another_case_device_or_software_runs_again(
    tmp_path: Path, ran: list[tuple[str, int]], change: dict[str, str]
) -> None:
    path = tmp_path / "records.jsonl"
    records = run(path, UNITS[:2])
    field = next(iter(change))
    of_record = hasattr(records[0], field)
    records[0] = replace(
        records[0], **(change if of_record else {"machine": replace(records[0].machine, **change)})
    )
    write_records(path, records)
    ran.clear()
    run(path, UNITS[:2], resume=True)
    assert ran == [(UNITS[0].case.id, UNITS[0].seed)]


def test_resuming_tells_which_records_go_and_which_run_again(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    said: list[str] = []
    both, one = (
        plan(load_cases("smoke")[:1], NAMES, ["bf16"]),
        plan(load_cases("smoke")[:1], NAMES[:1], ["bf16"]),
    )
    run(path, both)
    list(record(path, both, 1, True, said.append))
    assert said == []
    list(record(path, one, 1, True, said.append))
    assert said == [f"of 2 records in {path}, 1 are not of this selection and go"]
    run(path, both)
    path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n{")  # the unit's second record was cut off
    list(record(path, both, 1, True, said.append))
    again = "1 are of units that were cut off, or of other code or another machine, and run again"
    assert said[1:] == [f"of 1 records in {path}, {again}"]
    assert len(read_records(path)) == 2


def test_resuming_a_damaged_file_names_the_line_and_touches_nothing(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "records.jsonl"
    lines = whole.split(b"\n")
    lines[1] = lines[1][:-10]
    damaged = b"\n".join(lines)
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2 is not a record"):
        run(path, resume=True)
    assert path.read_bytes() == damaged


def test_one_job_leaves_the_threads_as_they_were() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with journal.workers(1) as executor:
            assert executor is None
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_run_that_cannot_start_leaves_the_earlier_records_alone(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    (smoke, *_) = load_cases("smoke")
    list(record(path, plan([smoke], ["naive_masked"], ["fp32"], seeds=1), jobs=1, resume=False))
    before = path.read_bytes()
    broken = replace(smoke, draw=Draw("file", {"path": "absent.safetensors", "prefix": "x"}))
    for resume in (False, True):
        with pytest.raises(ValueError, match="does not exist"):
            list(record(path, plan([broken], ["online_softmax"], ["fp32"], seeds=1), jobs=1, resume=resume))
        assert path.read_bytes() == before


def test_run_by_processes_loads_no_torch_here(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from harness.case import load_cases
from harness.journal import record
from harness.unit import plan
if __name__ == "__main__":
    units = plan(load_cases("smoke"), ["naive_masked"], ["bf16"], seeds=1)[:2]
    assert [r for _, batch in record(Path({str(tmp_path / "r.jsonl")!r}), units, 2, False) for r in batch]
    assert "torch" not in sys.modules
"""
    script = tmp_path / "script.py"
    script.write_text(code, encoding="utf-8")
    root = Path(__file__).resolve().parent.parent
    subprocess.run([sys.executable, str(script)], check=True, env={**os.environ, "PYTHONPATH": str(root)})
