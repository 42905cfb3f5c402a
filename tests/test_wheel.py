"""The wheel, in an empty folder: its commands, its cases and data, its plug-in, and what is said of absent extras."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.optional import EXTRAS

ROOT = Path(__file__).resolve().parent.parent

# One process for all commands: torch is loaded once. Each prints its exit code after what it says.
COMMANDS = """
import sys, pathlib
import harness
from harness.cli import main

where = pathlib.Path(harness.__file__).resolve()
assert pathlib.Path(sys.argv[1]).resolve() in where.parents, where

def run(*arguments):
    print("$", *arguments, flush=True)
    try:
        main(arguments)
    except SystemExit as stop:
        print("exit", stop.code, flush=True)

run("list")
run("cost", "--model", "llama-3.1-8b", "--context", "4K")
small = ("-i", "online_softmax", "-r", "bf16,fp8_e4m3", "--seeds", "1", "--jobs", "1")
run("run", "--cases", "smoke", "--only", "smoke/normal", *small, "--out", "smoke")
run("run", "--cases", "real", "--only", "real/smollm2-layer00", *small, "--out", "real", "--no-report")
run("explain", "smoke/normal, online_softmax, bf16", "--records", "smoke/records.jsonl")
run("gate", "--records", "smoke/records.jsonl", "--baseline", "base.jsonl", "--update")
run("tolerance", "--shape", "1,2,64,32", "--recipe", "bf16")
import torch
from safetensors.torch import save_file
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 64, 32).bfloat16() for _ in range(3))
out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
save_file({"q": q, "k": k, "v": v, "out": out}, "dump.safetensors")
run("judge", "dump.safetensors")
"""
HIDDEN = """
import sys
from harness.cli import main

sys.modules[sys.argv[1]] = None  # import and find_spec find nothing
main(sys.argv[2:])
"""
PLUGIN = """
import torch

def test_mine(attention):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 32).bfloat16() for _ in range(3))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    attention.assert_close(out, q, k, v, recipe="bf16")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(out)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the wheel into, and nothing else."""
    target = tmp_path_factory.mktemp("site")
    pip = (
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
    )
    done = subprocess.run(
        [sys.executable, *pip, "--target", str(target), str(wheel)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return target


def python(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "HARNESS"))}
    env = {**clean, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-P", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )


def test_cases_and_data_travel_and_nothing_else_does(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = email.message_from_bytes(
            file.read(next(n for n in names if n.endswith(".dist-info/METADATA")))
        )
    cases = {p.relative_to(ROOT).as_posix() for p in (ROOT / "cases").rglob("*") if p.is_file()}
    kept = {c for c in cases if "__pycache__" not in c}
    assert {f"harness/_{c}" for c in kept} <= names
    strange = [n for n in names if "__pycache__" in n or not n.startswith(("harness/", "attention_harness-"))]
    assert strange == []
    assert {
        f"harness/{p.relative_to(ROOT / 'harness').as_posix()}" for p in (ROOT / "harness").rglob("*.py")
    } <= names
    assert set(metadata.get_all("Provides-Extra", [])) == set(EXTRAS)


def test_commands_work_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = python(installed, tmp_path, "-c", COMMANDS, str(installed))
    assert done.returncode == 0, done.stderr
    parts = dict(part.split("\n", 1) for part in done.stdout.split("$ ")[1:])
    assert {name: body.rstrip().rsplit("\n", 1)[-1] for name, body in parts.items()} == dict.fromkeys(
        parts, "exit 0"
    )
    assert [name.split()[0] for name in parts] == [
        "list", "cost", "run", "run", "explain", "gate", "tolerance", "judge",
    ]  # fmt: skip
    assert "real/smollm2-layer00" in done.stdout
    assert "Accuracy beside cost" in done.stdout
    assert "implementation: PASS" in done.stdout
    assert {p.name for p in (tmp_path / "smoke").iterdir()} >= {"records.jsonl", "report.md", "tradeoff.svg"}


def test_the_plug_in_is_found_by_pytest(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(PLUGIN)
    options = ("-q", "-p", "no:cacheprovider", "--attention-records", "a.jsonl")
    done = python(installed, tmp_path, "-m", "pytest", *options, "test_mine.py")
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "a.jsonl").read_text().count("\n") == 1


def test_the_command_is_installed_under_its_own_name(installed: Path, tmp_path: Path) -> None:
    script = next((installed / "bin").glob("attention-harness*"))
    done = python(installed, tmp_path, str(script), "cost", "--list")
    assert done.returncode == 0
    assert "llama-3.1-8b" in done.stdout


ABSENT = {
    "certify": ("flint", ("certify", "--cases", "smoke"), 2),
    "capture": ("gguf", ("capture", "--out", "qkv.safetensors"), 2),
}


@pytest.mark.parametrize("extra", ABSENT)
def test_an_absent_extra_is_one_line_that_names_it_and_its_command(
    extra: str, installed: Path, tmp_path: Path
) -> None:
    modules, command, code = ABSENT[extra]
    done = python(installed, tmp_path, "-c", HIDDEN, modules, *command)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"pip install 'attention-harness[{extra}]'" in done.stderr
