"""The template package, installed as pip would: its files on the path, its entry points beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.records import Status, read_records

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "examples" / "template"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has the template and this tree."""
    project = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / f"my_attention-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    points = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
    path = os.pathsep.join(map(str, (TEMPLATE, tmp_path / "site", ROOT)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def python(installed: dict[str, str], where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=installed, cwd=where, capture_output=True, text=True, timeout=120
    )


def test_the_template_is_listed_judged_and_passes(installed: dict[str, str], tmp_path: Path) -> None:
    listed = python(installed, tmp_path, "-m", "harness", "list", "implementations")
    assert "from my_attention:attention" in " ".join(listed.stdout.split())
    options = ("-i", "my_attention", "--cases", "smoke", "-r", "bf16,fp32", "--jobs", "1", "--out", "out")
    ran = python(installed, tmp_path, "-m", "harness", "run", *options, "--no-report")
    assert ran.returncode == 0, ran.stderr
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert {r.status for r in records} == {Status.PASS, Status.INCONCLUSIVE}
    assert {r.case for r in records if r.status is Status.PASS} == {"smoke/normal", "smoke/causal-gqa"}


def test_the_templates_own_tests_pass(installed: dict[str, str], tmp_path: Path) -> None:
    tests = str(TEMPLATE / "tests")
    ran = python(
        installed,
        tmp_path,
        "-m",
        "pytest",
        "-q",
        "-p",
        "harness.pytest_plugin",
        "-p",
        "no:cacheprovider",
        tests,
    )
    assert "6 passed" in ran.stdout, ran.stdout
