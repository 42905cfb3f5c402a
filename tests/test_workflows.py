"""The workflows, ours and the one for users: YAML, least rights, and commands that this version understands."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from harness.cli.group import cli
from harness.report.github import MARK

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/github/attention-accuracy.yml"
WORKFLOWS = (
    *sorted((ROOT / ".github" / "workflows").glob("*.yml")),
    EXAMPLE,
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
def test_triggers_are_pushes_to_main_and_pull_requests_with_a_forks_rights(path: Path) -> None:
    on = load(path)[True]  # YAML 1.1 reads the key `on` so
    assert set(on) <= {"push", "pull_request", "workflow_dispatch"}, (
        "pull_request_target has a stranger's code and our rights"
    )
    assert "pull_request" in on
    assert on["push"] == {"branches": ["main"]}


@each
def test_rights_are_least_jobs_end_and_later_pushes_take_over(path: Path) -> None:
    flow = load(path)
    assert flow["permissions"] == {"contents": "read"}
    assert "cancel-in-progress" in flow["concurrency"]
    for job in flow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert set(job.get("permissions", {}).items()) <= {("pull-requests", "write")}


@each
def test_what_may_write_runs_no_code_of_the_pull_request_and_not_for_forks(path: Path) -> None:
    """Nor does code that runs find a token: none in a step's environment, none left by the checkout."""
    for job in load(path)["jobs"].values():
        names = [step.get("uses", "").partition("@")[0] for step in job["steps"]]
        if "permissions" in job:
            assert "actions/checkout" not in names
            assert "python" not in "".join(step.get("run", "") for step in job["steps"])
            assert "github.event.pull_request.head.repo.full_name == github.repository" in job["if"]
            continue
        assert "github.token" not in str(job)
        assert "secrets." not in str(job)
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": False}


@each
def test_no_text_that_others_choose_is_put_into_a_script(path: Path) -> None:
    """`${{ … }}` in `run:` is text before the shell reads it; in `env:` it is a value. Of an event only numbers are."""
    for step in steps(path):
        assert "${{" not in step.get("run", "")
        for value in step.get("env", {}).values():
            told = re.findall(r"github\.(?:event\S*|head_ref)", str(value))
            assert set(told) <= {"github.event.pull_request.number"}


@each
def test_artifact_is_kept_after_failures_and_holds_what_the_commands_write(path: Path) -> None:
    flow = load(path)
    for job in flow["jobs"].values():
        kept = [s for s in job["steps"] if s.get("uses", "").startswith("actions/upload-artifact@")]
        scripts = "\n".join(s.get("run", "") for s in job["steps"])
        if "-s accuracy" not in scripts and "harness run" not in scripts:
            continue
        (step,) = kept
        assert step["if"] in ("${{ !cancelled() }}", "${{ always() }}")
        written = re.findall(r"--(?:junit|json|comment|summary) (\S+)", scripts)
        assert written
        assert all(file.startswith(step["with"]["path"] + "/") for file in written)


def test_comment_job_waits_for_the_artifact_of_its_name() -> None:
    jobs = load(EXAMPLE)["jobs"]
    kept, fetched = (
        next(
            s["with"]
            for s in jobs[job]["steps"]
            if s.get("uses", "").startswith(f"actions/{action}-artifact@")
        )
        for job, action in (("accuracy", "upload"), ("comment", "download"))
    )
    assert (kept["name"], kept["path"]) == (fetched["name"], fetched["path"])
    assert jobs["comment"]["needs"] == "accuracy"


@each
def test_scripts_are_bash_and_call_only_what_a_runner_has(path: Path) -> None:
    bash = shutil.which("bash")
    for step in steps(path):
        script = step.get("run", "")
        if bash:
            done = subprocess.run([bash, "-n"], input=script, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        for line in script.replace("\\\n", " ").splitlines():
            first = re.match(r"\s*(?:\w+=\(?\$?\(?)?\s*(\S*?)[\s);]*(?:\s|$)", line)
            assert first is not None
            assert first[1] in {"python", "gh", "if", "else", "fi", "against=", ""}, line


def test_modules_and_files_that_workflows_name_are_here() -> None:
    for path in WORKFLOWS:
        for words in commands(path):
            if words[1] == "-m":
                assert (ROOT / words[2] / "__main__.py").is_file()
            else:
                assert (ROOT / words[1]).is_file()
    assert (ROOT / "examples/github/my_attention.py").is_file()


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
    text = EXAMPLE.read_text(encoding="utf-8")
    assert f'startswith("{MARK}")' in text
