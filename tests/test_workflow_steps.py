"""The example's steps, one after the other in an empty folder, as a runner does: `bash -e`, its variables and files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.report.github import COMMENT_BYTES, MARK

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
ROOT = Path(__file__).parents[1]
FLOW: dict[Any, Any] = yaml.safe_load(
    (ROOT / "examples/github/attention-accuracy.yml").read_text(encoding="utf-8")
)
STEPS = {s["name"]: s for job in FLOW["jobs"].values() for s in job["steps"] if "name" in s}
# gh, as far as the comment needs it: a line for each call; lists the comments that a file holds.
GH = """#!/bin/sh
echo "$*" >> "$RUNNER_TEMP/gh"
case "$*" in *--paginate*) cat "$RUNNER_TEMP/comments" ;; esac
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("bash") is None, reason="the steps are bash"),
]


class Runner:
    """A checkout with a kernel and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.work, self.temp = folder / "work", folder / "temp"
        self.kernel = self.work / FLOW["env"]["KERNEL"].partition(":")[0]
        self.kernel.parent.mkdir(parents=True)
        shutil.copyfile(ROOT / "examples/github/my_attention.py", self.kernel)
        tools = self.temp / "bin"
        tools.mkdir(parents=True)
        (self.temp / "comments").write_text("")
        scripts = {"gh": GH, "python": f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "$@"\n'}
        for name, text in scripts.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        for name in ("SUMMARY", "OUTPUT", "ENV"):
            (self.temp / name).touch()
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("GITHUB_", "PYTHONPATH"))},
            **{name: str(value) for name, value in FLOW["env"].items()},
            "PATH": os.pathsep.join((str(tools), os.environ["PATH"])), "CI": "true", "GITHUB_ACTIONS": "true",
            "GITHUB_WORKSPACE": str(self.work), "GITHUB_REPOSITORY": "owner/kernels", "RUNNER_TEMP": str(self.temp),
            "GITHUB_STEP_SUMMARY": str(self.temp / "SUMMARY"), "GITHUB_OUTPUT": str(self.temp / "OUTPUT"),
            "GITHUB_ENV": str(self.temp / "ENV"), "GITHUB_EVENT_NAME": "pull_request",
        }  # fmt: skip

    def step(self, name: str, **more: str) -> subprocess.CompletedProcess[str]:
        (self.temp / "SUMMARY").write_text("")  # each step has its own
        return self.script(STEPS[name]["run"], **more)

    def script(self, text: str, **more: str) -> subprocess.CompletedProcess[str]:
        file = self.temp / "step.sh"
        file.write_text(text)
        return subprocess.run(
            ["bash", "-e", str(file)], cwd=self.work, env={**self.environment, **more}, capture_output=True, text=True,
            check=False, timeout=600,
        )  # fmt: skip

    @property
    def summary(self) -> str:
        return (self.temp / "SUMMARY").read_text(encoding="utf-8")

    @property
    def comment(self) -> str:
        return (self.work / "reports/latest/comment.md").read_text(encoding="utf-8")

    def calls(self) -> list[str]:
        return (self.temp / "gh").read_text(encoding="utf-8").splitlines()


def edit(runner: Runner, old: str, new: str) -> None:
    text = runner.kernel.read_text(encoding="utf-8")
    assert old in text
    runner.kernel.write_text(text.replace(old, new), encoding="utf-8")


def test_steps_judge_gate_and_comment_on_a_kernel_from_nothing_to_a_regression(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    first = runner.step("Judge")
    assert first.returncode == 0, first.stdout + first.stderr
    assert {"records.jsonl", "report.md", "comment.md", "junit.xml", "results.json", "cells.csv"} <= {
        path.name for path in (runner.work / "reports/latest").iterdir()
    }
    assert "PASS" in runner.summary
    assert runner.comment.startswith(MARK)

    # The baseline, by the line of docs/ci.md.
    docs = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
    line = next(x for x in docs.splitlines() if x.startswith("python -m harness gate --update --records"))
    made = runner.script(line)
    assert made.returncode == 0, made.stderr
    assert (runner.work / FLOW["env"]["BASELINE"]).is_file()

    again = runner.step("Judge")
    assert again.returncode == 0, again.stderr
    gate = runner.step("Gate")
    assert gate.returncode == 0, gate.stdout
    assert gate.stdout.startswith("gate: no regression")

    # Scores in the inputs' type: within the limits of some cells, and worse than before.
    edit(runner, "torch.softmax(scores, dim=-1)", "torch.softmax(scores.to(q.dtype).float(), dim=-1)")
    worse = runner.step("Judge")
    assert worse.returncode == 1, worse.stdout
    assert "attention" in runner.summary
    assert len(runner.comment.encode()) <= COMMENT_BYTES
    gate = runner.step("Gate")
    assert gate.returncode == 1
    assert "REGRESSION: " in gate.stdout

    told = {"NUMBER": "7", "GH_TOKEN": "none"}
    assert runner.step("Comment", **told).returncode == 0
    assert runner.calls()[-1].startswith(
        "api --method POST repos/owner/kernels/issues/7/comments --field body=@"
    )
    (runner.temp / "comments").write_text("41\n42\n")
    assert runner.step("Comment", **told).returncode == 0
    assert runner.calls()[-1].startswith(
        "api --method PATCH repos/owner/kernels/issues/comments/41 --field body=@"
    )


def test_kernel_that_does_not_import_ends_the_judging_step_with_a_line(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    edit(runner, "import torch\n", "import torch, no_such_module\n")
    done = runner.step("Judge")
    assert done.returncode == 2
    assert "no_such_module" in done.stderr
    assert "Traceback" not in done.stderr
