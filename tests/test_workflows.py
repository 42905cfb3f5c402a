"""The workflows, ours and the one for users: YAML, least rights, and commands that this version understands."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from harness.cli.group import cli
from harness.report.github import MARK

ROOT = Path(__file__).parents[1]
WORKFLOWS = (
    *sorted((ROOT / ".github" / "workflows").glob("*.yml")),
    ROOT / "examples/github/attention-accuracy.yml",
)
# What a session hands its arguments to (noxfile.py).
SESSIONS = {"accuracy": "run", "gate": "gate", "report": "report", "certify": "certify"}
IDS = [path.name for path in WORKFLOWS]
each = pytest.mark.parametrize("path", WORKFLOWS, ids=IDS)


def load(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in load(path)["jobs"].values():
        yield from job["steps"]


def commands(path: Path) -> Iterator[list[str]]:
    """Each call of Python in each `run:`, its variables replaced by their values."""
    env = {name: str(value) for name, value in load(path).get("env", {}).items()}
    for step in steps(path):
        text = step.get("run", "").replace("\\\n", " ")
        assert "${{" not in text, "an expression in a script is text that others choose: hand it over in env"
        text = re.sub(r"\$\{?(\w+)\}?", lambda m: env.get(m[1], m[0]), text)
        for line in filter(re.compile("-m harness|noxfile").search, text.splitlines()):
            words = shlex.split(line, comments=True)
            assert words[0] == "python", "a command within another is not read here: give it its own line"
            assert not {"&&", "||", ";", "|", ">"} & set(words)
            yield [word for word in words if not word.startswith("${")]


def invocations(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Commands of the command line, with their arguments, started as a module or by a session."""
    for words in commands(path):
        if words[:3] == ["python", "-m", "harness"]:
            yield words[3], words[4:]
        elif words[:3] == ["python", "noxfile.py", "-s"]:
            name, rest = words[3], words[4:]
            assert re.search(
                rf"^def {name}\(", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE
            )
            assert rest[:1] in ([], ["--"])
            if name in SESSIONS:
                yield SESSIONS[name], rest[1:]
            else:
                assert not rest, f"{name} takes no options of the command line"


def parse(name: str, arguments: list[str]) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, name
    command.make_context(name, list(arguments))


@each
def test_harness_commands_are_understood_by_this_version(path: Path) -> None:
    met = list(invocations(path))
    for name, arguments in met:
        parse(name, arguments)
    assert {"run", "gate"} <= {name for name, _ in met}


def test_option_that_is_gone_would_be_noticed() -> None:
    with pytest.raises(click.UsageError):
        parse("run", ["--no-such-option"])
    with pytest.raises(click.UsageError):
        parse("report", ["r.jsonl", "--junit"])


@each
def test_rights_are_least_jobs_end_and_later_pushes_take_over(path: Path) -> None:
    flow = load(path)
    assert flow["permissions"] == {"contents": "read"}
    assert "cancel-in-progress" in flow["concurrency"]
    assert "pull_request_target" not in flow[True]  # YAML 1.1 reads the key `on` so
    for job in flow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert set(job.get("permissions", {}).items()) <= {("contents", "read"), ("pull-requests", "write")}


@each
def test_actions_are_githubs_own_at_a_major_version(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"actions/[a-z\-]+@v\d+", action), action


def test_ci_runs_every_session_and_every_python() -> None:
    flow = load(ROOT / ".github/workflows/ci.yml")
    run = {
        words[3]
        for words in commands(ROOT / ".github/workflows/ci.yml")
        if words[1:3] == ["noxfile.py", "-s"]
    }
    assert run == {"lint", "tests", "accuracy", "gate"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    for job in ("tests", "accuracy"):
        assert flow["jobs"][job]["strategy"]["matrix"]["python"] == named


@each
def test_torch_is_the_tried_version_from_the_cpu_index(path: Path) -> None:
    pinned = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    env = load(path)["env"]
    told = env.get("HARNESS_TORCH_ARGS") or env["TORCH"]
    assert pinned is not None
    assert told == f"{pinned[0]} --index-url https://download.pytorch.org/whl/cpu"


def test_users_workflow_finds_its_comment_by_the_mark_that_reports_carry() -> None:
    text = (ROOT / "examples/github/attention-accuracy.yml").read_text(encoding="utf-8")
    assert f'startswith("{MARK}")' in text
