"""The command line: exit codes, one line for every mistake, and nothing loaded or written without need."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from record_factory import errors, record, refused

from harness.cli import main, progress
from harness.cli.group import cli
from harness.gate import read_baseline
from harness.recipe import RECIPES
from harness.records import Record, Status, read_records, write_records

ROOT = Path(__file__).resolve().parent.parent
QUICK = ("--cases", "smoke", "--only", "smoke/causal-*", "-i", "naive_masked", "-r", "bf16", "--jobs", "1")
COST = ("--model", "plain-7b")
CASE = "from harness import *\nCASES = [Case('mine', 'one', Shape(q_len=4, head_dim=8), 'a why'{})]\n"

# What an installed package would bring: one kills its process, one never ends. Both wait for what the test needs.
PLUGIN = """
import os, time
from pathlib import Path
from harness.attention.naive import NAIVE_MASKED

class Slow:
    def refusals(self, *_):
        return ()
    def run_stored(self, stored, spec, recipe, extras, watch=None):
        if not spec.causal:
            return NAIVE_MASKED.run_stored(stored, spec, recipe, extras, watch=watch)
        records = Path(os.environ["RECORDS"])
        while not (records.exists() and records.read_text()):
            time.sleep(0.01)
        self.end()

class Dies(Slow):
    def end(self):
        os._exit(9)

class Hangs(Slow):
    def end(self):
        Path(os.environ["RECORDS"] + ".hangs").touch()
        time.sleep(600)

dies, hangs = Dies(), Hangs()
"""
POINTS = (
    "[attention_harness.implementations]\ndies = plugin_under_test:dies\nhangs = plugin_under_test:hangs\n"
)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`harness` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def called(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in arguments])
        assert isinstance(stop.value.code, int)
        return Outcome(stop.value.code, *capsys.readouterr())

    return called


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), more.pop("PYTHONPATH", ""))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def child(*arguments: str, cwd: Path, timeout: float = 60, **more: str) -> Outcome:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=timeout
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    info = folder / "plugin_under_test-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-under-test\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    (folder / "plugin_under_test.py").write_text(PLUGIN)
    return folder


# --- mistakes ------------------------------------------------------------------------------------------------


MISTAKES = [
    (["frobnicate"], "frobnicate", "explain, gate, judge, list, report, review, run, tolerance"),
    (["list", "kernels"], "kernels", "'implementations', 'recipes', 'cases'"),
    (["run", "--cases", "nope"], "nope", "all, decode"),
    (["run", "--cases", "missing.py"], "missing.py", "path.py"),
    (["run", "--cases", "empty.py"], "empty.py", "harness.Case"),
    (["run", "--cases", "broken.py"], "broken.py, line 2", "NameError"),
    (["run", "--cases", ","], "--cases", "default"),
    (["run", "--implementations", ""], "--implementations", "default"),
    (["run", "--implementation", "nope"], "nope", "naive_masked, lower_triangle"),
    (["run", "--recipe", "nope"], "nope", "fp64, fp32, bf16"),
    (["run", "--recipes", "bf16,nope"], "nope", "fp64, fp32, bf16"),
    (["run", "--recipe", "missing.toml"], "missing.toml", "cannot be read"),
    (["run", "--recipe", "bad.toml"], "bad.toml", "cannot be read"),
    (["run", "--recipe", "stage.toml"], "nope", "scores_raw"),
    (["run", "--recipe", "field.toml"], "colour", "p_scale"),
    (["run", "--device", "tpu"], "tpu", "cpu, cuda or cuda:N"),
    (["run", "--seeds", "0"], "--seeds", "x>=1"),
    (["run", "--jobs", "0"], "--jobs", "x>=1"),
    (["run", "--seeds", "many"], "many", "integer"),
    (["run", "--sedes", "1"], "--sedes", "--seeds"),
    (["run", "--out", "empty.py", *QUICK], "empty.py", "is a file"),
    (["report", "missing.jsonl"], "missing.jsonl", "harness run"),
    (["report", "damaged.jsonl"], "damaged.jsonl, line 1", "not a record"),
    (["report", "binary.jsonl"], "binary.jsonl", "UTF-8"),
    (["report", "--throughput", "missing.json"], "missing.json", "No such file"),
    (["report", "--throughput", "bad.toml"], "bad.toml", "not JSON"),
    (["gate"], "no baseline in reports", "--update"),
    (["gate", "--baseline", "none.jsonl"], "none.jsonl", "--update"),
    (["gate", "--reason", "why"], "--reason", "--update"),
    (["gate", "--update", "--records", "missing.jsonl"], "missing.jsonl does not exist", "harness run"),
    (["gate", "--baseline", "damaged.jsonl"], "damaged.jsonl, line 1", "--update"),
    (["cost"], "no model", "--list"),
    (["cost", "--model", "nope"], "nope", "llama-3.1-8b"),
    (["cost", *COST, "--context", "0"], "'0'", "4096, 128K, 1M"),
    (["cost", *COST, "--context", "1.0001K"], "'1.0001K'", "whole number"),
    (["cost", *COST, "--batch", "0"], "--batch", "x>=1"),
    (["cost", *COST, "--kv", "nope"], "nope", "mxfp8"),
    (["cost", *COST, "--kv", "bf16,"], "''", "fp8_e5m2"),
    (["cost", *COST, "--weights", "mxfp8"], "mxfp8", "bf16"),
    (["cost", *COST, "--bandwidth", "4.8"], "'4.8'", "4.8TB/s"),
    (["cost", *COST, "--bandwidth", "0TB/s"], "0TB/s", "> 0"),
    (["cost", *COST, "--flops", "989TB/s"], "989TB/s", "989TFLOP/s"),
    (["cost", "--config", "missing.toml"], "missing.toml", "cannot be read"),
    (["cost", "--config", "bad.toml"], "bad.toml", "cannot be read"),
    (["cost", "--config", "field.toml"], "unknown key 'colour'", "model, context, batch, kv, weights"),
    (["capture"], "--out", "Missing option"),
    (["capture", "--layers", "a", "--out", "x"], "'a'", "0,7,15"),
    (["capture", "--tokens", "0", "--out", "x"], "--tokens", "x>=1"),
    (["capture", "--text", "missing.txt", "--out", "x"], "missing.txt", "No such file"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "given", "allowed"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_mistake_is_one_line_with_what_was_given_and_what_is_allowed(
    call: Call, tmp_path: Path, arguments: list[str], given: str, allowed: str
) -> None:
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "broken.py").write_text("x = 1\nCASES = [nope]\n")
    (tmp_path / "bad.toml").write_text("[[")
    (tmp_path / "stage.toml").write_text('[at]\nnope = "bf16"\n')
    (tmp_path / "field.toml").write_text("colour = 3\n")
    (tmp_path / "damaged.jsonl").write_text("{}\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\n")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    done = call(*arguments)
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1, done.err
    assert given in done.err
    assert allowed in done.err
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_missing_cuda_is_told_in_one_line_after_the_selection(call: Call, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    done = call("run", *QUICK, "--device", "cuda")
    assert done.code == 2
    assert done.err.splitlines()[1].startswith("error: torch")
    assert len(done.err.splitlines()) == 2
    assert not list(tmp_path.iterdir())


def test_no_command_shows_the_help_and_is_wrong_usage(call: Call) -> None:
    done = call()
    assert done.code == 2
    assert "Commands:" in done.err


@pytest.mark.parametrize(
    "command", [[], ["run"], ["report"], ["gate"], ["list"], ["capture"], ["cost"]], ids=str
)
def test_help_is_no_mistake_and_fits_a_terminal(call: Call, command: list[str]) -> None:
    done = call(*command, "--help")
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 100
    assert "..." not in done.out.partition("Commands:")[2]


def test_version_is_the_packages(call: Call) -> None:
    from harness import __version__

    assert call("--version").out == f"attention-harness, version {__version__}\n"


def test_glob_that_matches_nothing_names_the_ids_and_runs_nothing(call: Call, tmp_path: Path) -> None:
    done = call("run", "--cases", "smoke", "--only", "nope/*")
    assert done.code == 3
    assert "no case id matches nope/*; there are smoke/worked-example," in done.err
    assert not list(tmp_path.iterdir())


# --- runs ----------------------------------------------------------------------------------------------------


def test_run_writes_records_and_report_and_says_how_far_it_is(call: Call, tmp_path: Path) -> None:
    done = call("run", *QUICK)
    assert done.code == 0, done
    folder = tmp_path / "reports" / "latest"
    assert {p.name for p in folder.iterdir()} == {
        "records.jsonl", "report.md", "cells.csv", "cases.csv", "hazards.csv",
    }  # fmt: skip
    assert [r.case for r in read_records(folder / "records.jsonl")] == ["smoke/causal-gqa"] * 3
    first, last = done.err.splitlines()
    assert first == "3 cells: 1 case, 1 implementation, 1 recipe, 3 seeds, 1 job, cpu; loading torch"
    assert last.startswith("3/3 cells, ")
    assert "\r" not in done.err
    assert "PASS 3" in done.out
    again = call("report")
    assert again.code == 0
    assert again.out == done.out


def test_comma_lists_and_repeats_are_equal_and_resume_keeps_records(call: Call, tmp_path: Path) -> None:
    common = ("--cases", "smoke", "--only", "smoke/normal", "--seeds", "1", "--jobs", "1", "--no-report")
    joined = call("run", *common, "-i", "naive_masked, online_softmax", "-r", "bf16,fp32", "--out", "a")
    apart = call(
        "run", *common, "-i", "naive_masked", "--implementation", "online_softmax", "--recipes", "bf16",
        "--recipe", "fp32", "--out", "b",
    )  # fmt: skip
    assert joined.code == apart.code == 0
    keys = [[r.key for r in read_records(tmp_path / x / "records.jsonl")] for x in "ab"]
    assert keys[0] == keys[1]
    assert len(keys[0]) == 4
    before = (tmp_path / "a" / "records.jsonl").read_text()
    options = ("-i", "naive_masked,online_softmax", "-r", "bf16,fp32", "--out", "a", "--resume")
    assert call("run", *common, *options).code == 0
    assert (tmp_path / "a" / "records.jsonl").read_text() == before


def test_case_file_and_recipe_file_by_path(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CASE.format(""))
    (tmp_path / "coarse.toml").write_text('[at]\nprobs = "fp8_e4m3"\n')
    done = call(
        "run", "--cases", "mine.py", "-i", "naive_masked", "-r", "coarse.toml", "--seeds", 2, "--jobs", 1
    )
    assert done.code == 0, done.err
    records = read_records(tmp_path / "reports/latest/records.jsonl")
    assert [r.key for r in records] == [("mine/one", "naive_masked", "coarse", s) for s in range(2)]


def test_nothing_but_refusals_is_nothing_ran(call: Call) -> None:
    done = call("run", *QUICK, "-i", "lower_triangle", "--only", "smoke/normal", "--seeds", 1)
    assert done.code == 0  # the worked examples hold a causal one
    done = call(
        "run", "--cases", "smoke", "--only", "smoke/normal", "-i", "lower_triangle", "--seeds", 1, "--jobs", 1
    )
    assert done.code == 3
    assert "nothing ran" in done.err
    assert "REFUSED 9" in done.out


def test_damaged_data_of_a_case_is_one_line_and_leaves_whole_files(call: Call, tmp_path: Path) -> None:
    (tmp_path / "data.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{broken")
    draw = f", draw=Draw('file', {{'path': {str(tmp_path / 'data.safetensors')!r}, 'prefix': 'x'}})"
    (tmp_path / "mine.py").write_text(CASE.format(draw))
    done = call(
        "run", "--cases", "smoke,mine.py", *QUICK[4:], "--only", "*/worked-example,mine/*", "--out", "o"
    )
    assert done.code == 2, done
    assert "Traceback" not in done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert "data.safetensors" in last
    assert last.endswith("(in case mine/one)")
    assert {p.name for p in (tmp_path / "o").iterdir()} == {"records.jsonl"}
    assert len(read_records(tmp_path / "o" / "records.jsonl")) == 1


# --- reports and the gate ------------------------------------------------------------------------------------


def test_empty_records_report_that_nothing_ran(call: Call, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("")
    done = call("report", "r.jsonl")
    assert done.code == 3
    assert done.err == "nothing ran: r.jsonl holds no records\n"
    (tmp_path / "r.jsonl").write_text('{"case":"smoke/no')
    done = call("report", "r.jsonl")
    assert done.code == 3
    assert done.err.startswith("nothing ran: r.jsonl holds no whole record: its only line was cut off")
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_unexpected_failure_sets_exit_code_1_and_a_known_one_does_not(call: Call, tmp_path: Path) -> None:
    failing = record(status=Status.FAIL, reasons=("2 NaN",))
    write_records(tmp_path / "bad", [record("smoke/normal"), failing])
    assert call("report", "bad", "--out", "o").code == 1
    known = record("magnitude/raw-80000", recipe="fp16_eager", status=Status.FAIL, reasons=("9 NaN",))
    write_records(tmp_path / "known", [record("smoke/normal"), known])
    done = call("report", "known", "--out", "o")
    assert done.code == 0, done
    assert "known 1" in done.out


def test_refused_and_inconclusive_records_are_nothing_ran(call: Call, tmp_path: Path) -> None:
    write_records(tmp_path / "r", [refused(), record(status=Status.INCONCLUSIVE)])
    assert call("report", "r").code == 3


def test_stored_timings_are_reported_and_an_empty_file_is_nothing_ran(call: Call, tmp_path: Path) -> None:
    extra = {
        "case": "prefill", "shape": "[1, 4, 256, 64]", "implementation": "naive_masked", "recipe": "bf16",
        "flops": 1e6, "rel_l2": 1e-3, "kv_bytes_per_token": 1024, "emulated": True,
    }  # fmt: skip
    for name, entries in (("none", []), ("one", [{"stats": {"median": 1e-3}, "extra_info": extra}])):
        (tmp_path / name).write_text(json.dumps({"benchmarks": entries}))
    assert call("report", "--throughput", "none").code == 3
    done = call("report", "--throughput", "one", "--out", "o")
    assert done.code == 0
    assert "prefill" in done.out
    assert (tmp_path / "o" / "throughput.md").is_file()


def test_gate_passes_what_it_stored_and_names_a_regression(call: Call, tmp_path: Path) -> None:
    write_records(tmp_path / "r", [record(), record(recipe="fp32")])
    assert call("gate", "--records", "r", "--baseline", "b/base.jsonl").code == 2
    done = call("gate", "--records", "r", "--baseline", "b/base.jsonl", "--update")
    assert (done.code, done.out) == (0, f"{Path('b/base.jsonl')}: written from 2 records\n")
    assert "the first baseline" in read_baseline(Path("b/base.jsonl")).history[0].reason
    assert call("gate", "--records", "r", "--baseline", "b/base.jsonl").code == 0
    write_records(tmp_path / "worse", [record(errors=errors(rmse=0.5, rel_l2=0.5)), record(recipe="fp32")])
    done = call("gate", "--records", "worse", "--baseline", "b/base.jsonl")
    assert done.code == 1
    assert [x for x in done.out.splitlines() if "REGRESSION" in x and "smoke/tiny · naive_masked · bf16" in x]
    write_records(tmp_path / "empty", [])
    (tmp_path / "cut").write_text('{"case":"smoke/tiny","gr')
    for option in ((), ("--update", "--reason", "x")):
        done = call("gate", "--records", "empty", "--baseline", "b/base.jsonl", *option)
        assert (done.code, done.err) == (3, "nothing ran: empty holds no records\n")
        done = call("gate", "--records", "cut", "--baseline", "b/base.jsonl", *option)
        assert (done.code, "its only line was cut off" in done.err) == (3, True)
        done = call("gate", "--records", "r", "--baseline", "b/base.jsonl", "--only", "x/*", *option)
        assert (done.code, "r holds no selected records" in done.err) == (3, True)


def test_gate_compares_what_the_filters_select_and_notes_the_rest(call: Call, tmp_path: Path) -> None:
    write_records(tmp_path / "r", [record(), record(recipe="fp32"), record("other/x")])
    base = ("gate", "--records", "r", "--baseline", "base.jsonl")
    assert call(*base, "--update").code == 0
    for option in (("-r", "bf16", "--cases", "smoke"), ("-r", "fp32"), ("--only", "other/*")):
        done = call(*base, *option)
        assert done.code == 0, done
        assert "no regression; 1 cells" in done.out
        assert "note: 2 cells of the baseline were not selected" in done.out
    write_records(tmp_path / "r", [record()])
    assert call(*base).code == 1
    assert call(*base, "-r", "bf16", "--cases", "smoke").code == 0


def test_records_that_stand_twice_in_a_file_count_once(call: Call, tmp_path: Path) -> None:
    write_records(tmp_path / "r", [record(status=Status.FAIL), record(rel=5e-4)])
    done = call("report", "r", "--out", "o")
    assert done.code == 0, done
    assert "1 record left out: a later one of the same cell and device counts instead" in done.out


def two_recipes() -> list[Record]:
    """What a plot of accuracy beside cost can be drawn of."""
    return [record(recipe=name, recipe_digest=RECIPES[name].digest) for name in ("bf16", "fp8_e4m3")]


def test_report_draws_the_trade_off_where_plots_are_asked_for_and_keeps_it_later(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records(tmp_path / "r", two_recipes())
    done = call("report", "r")
    assert done.code == 0
    assert "python -m harness report --plots draws it" in done.out
    assert not (tmp_path / "tradeoff.svg").exists()
    for options in (["--plots"], []):
        assert "hazards.csv, tradeoff.svg\n" in call("report", "r", *options).out
        assert (tmp_path / "tradeoff.svg").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = call("report", "r", "--plots")
    assert done.code == 2
    assert done.err.startswith("error: --plots needs matplotlib, which is not installed: pip install")


def test_gate_runs_the_smoke_cases_when_no_records_are_given(call: Call, tmp_path: Path) -> None:
    assert call("gate", "--update", *QUICK[2:]).code == 0
    (path,) = (tmp_path / "reports/baselines").iterdir()
    held = read_baseline(path)
    assert path.stem == held.machine_class
    done = call("gate", "--update", *QUICK[2:])
    assert done.code == 2
    assert "--reason" in done.err
    assert read_baseline(path) == held
    done = call("gate", *QUICK[2:])
    assert done.code == 0, done
    assert "no regression; 1 cells" in done.out
    assert "note: rmse moved" not in done.out  # the same bits


def test_log_gets_a_line_every_ten_seconds_and_a_last_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0, 4, 11, 12, 25, 26])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.progress(50) as shown:
        for n in range(5):
            shown.update(10, f"g/{n}")
    assert (
        capsys.readouterr().err
        == "20/50 cells, 11 s, last g/1\n40/50 cells, 25 s, last g/3\n50/50 cells, 26 s\n"
    )


# --- processes -----------------------------------------------------------------------------------------------


def test_light_commands_load_neither_torch_nor_numpy(tmp_path: Path) -> None:
    write_records(tmp_path / "r.jsonl", two_recipes())
    script = """
import contextlib, io, sys
def check(what):
    loaded = {"torch", "numpy", "matplotlib"} & set(sys.modules)
    assert not loaded, f"{what} loads {loaded}"
import harness
check("import harness")
from harness.cli import main
check("import harness.cli")
for arguments in (["--help"], ["list"], ["run", "--help"], ["report", "r.jsonl"], ["gate", "--records", "r.jsonl",
                  "--update"], ["gate", "--records", "r.jsonl"], ["cost", "--model", "plain-7b"],
                  ["run", "-i", "nope"], ["run", "--only", "nope"]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments)
    check(arguments)
print("light")
"""
    done = child("-W", "error", "-c", script, cwd=tmp_path)
    assert done.out == "light\n", done.err
    assert done.code == 0


def test_module_is_started_by_its_name_and_a_mistake_has_no_traceback(tmp_path: Path) -> None:
    done = child("-m", "harness", "run", "-r", "nope", cwd=tmp_path)
    assert done.code == 2
    assert done.err.startswith("error: unknown recipe 'nope'")
    assert done.err.count("\n") == 1


def test_worker_that_dies_ends_the_run_with_one_line_and_whole_records(tmp_path: Path, plugin: Path) -> None:
    path = tmp_path / "o" / "records.jsonl"
    done = child(
        "-m", "harness", "run", "--cases", "smoke", "-i", "dies", "-r", "bf16", "--jobs", "2", "--out", "o",
        cwd=tmp_path, PYTHONPATH=str(plugin), RECORDS=str(path),
    )  # fmt: skip
    assert done.code == 1, done
    assert "Traceback" not in done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("error: a worker process died")
    assert "1 of 8 units recorded" in last
    assert [r.case for r in read_records(path)] == ["smoke/worked-example"]


@pytest.mark.skipif(os.name != "posix", reason="signals a process group")
@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_interrupted_run_ends_at_once_with_its_workers(tmp_path: Path, plugin: Path, how: str) -> None:
    path = tmp_path / "o" / "records.jsonl"
    command = [
        "-m",
        "harness",
        "run",
        "--cases",
        "smoke",
        "-i",
        "hangs",
        "-r",
        "bf16",
        "--jobs",
        "2",
        "--out",
        "o",
    ]
    with subprocess.Popen(
        [sys.executable, *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=environment(PYTHONPATH=str(plugin), RECORDS=str(path)), preexec_fn=_heeds_interrupts,
    ) as run:  # fmt: skip
        try:
            wait_for(lambda: path.with_name("records.jsonl.hangs").exists())
            if how == "interrupt":
                os.killpg(run.pid, signal.SIGINT)  # as a terminal does
            else:
                run.kill()
            _, err = run.communicate(
                timeout=20
            )  # ends when the workers, which hold stderr as well, have ended
        except BaseException:
            os.killpg(run.pid, signal.SIGKILL)
            raise
    assert "Traceback" not in err
    assert [r.case for r in read_records(path)] == ["smoke/worked-example"]
    if how == "interrupt":
        assert run.returncode == 130
        said = [line for line in err.splitlines() if line]
        assert said[-1] == "interrupted; what a run recorded is whole, and `run --resume` goes on with it"
        assert all(re.match(r"8 cells: |\d/8 cells, ", line) for line in said[:-1]), said


def _heeds_interrupts() -> None:
    """What a shell starts in the background ignores them, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_reader_that_stops_early_ends_the_command_quietly(tmp_path: Path) -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "harness", "list"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdout is not None
    command.stdout.close()  # before anything is written
    assert command.communicate()[1] == b""
    assert command.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "--kernel", "/tmp:f"], "kernel is '/tmp:f'; allowed: path/to/file.py:function"),
        (["report", "--throughput", "missing.json"], "missing.json"),
    ],
    ids=["folder", "file"],
)
def test_a_path_that_cannot_be_used_is_named_first(call: Call, arguments: list[str], told: str) -> None:
    done = call(*arguments)
    assert done.code == 2
    assert done.err.startswith(f"error: {told}")
    assert "Errno" not in done.err


def path_options() -> list[list[str]]:
    """Every option and argument of every command that takes a path, with an empty one."""
    found = []
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        paths = [p for p in command.params if isinstance(p.type, click.Path)]
        found += [[name, *([p.opts[-1]] if isinstance(p, click.Option) else []), ""] for p in paths]
    return found


@pytest.mark.parametrize("arguments", path_options(), ids="=".join)
def test_an_empty_path_is_no_current_folder(
    call: Call, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset variable of a script leaves one; reports were written into the current folder."""
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert "the path is empty; give one" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_commands_that_take_paths_are_all_looked_at() -> None:
    assert len(path_options()) > 20
