# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["nox>=2025.2.9"]
# ///
"""The project's sessions: `python noxfile.py -s NAME [-- ARGUMENTS]`, on a machine that has only Python.

Exit codes of `python noxfile.py`: 0 pass, 1 failure, 2 wrong usage, 3 nothing ran. (Started as `nox`, every
failed session is 1.) Environment:

HARNESS_TORCH_ARGS  what pip is given for torch: a version, an index, a wheel; default: the pinned version
HARNESS_PYTHON      run the sessions with this interpreter as it is, and install nothing
"""

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 13):  # before any import or syntax that an older Python lacks
    sys.stderr.write(
        "noxfile.py needs Python 3.11, 3.12 or 3.13, but was started with %d.%d (%s).\n"  # noqa: UP031
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    sys.exit(2)

import argparse
import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE / "constraints.txt"
NOX = "nox>=2025.2.9"  # the first release with requires=; the same range stands in the script block above
FAILURE, USAGE, NOTHING_RAN = 1, 2, 3


def _venv_python(location: Path) -> Path:
    return location / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _build_boot(boot: Path) -> None:
    import venv

    print("noxfile: installing nox into .nox/_boot, once (about 15 s) ...", file=sys.stderr, flush=True)
    venv.create(boot, with_pip=True, clear=True, symlinks=os.name != "nt")
    install = ["-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), NOX]
    subprocess.run([str(_venv_python(boot)), *install], check=True)


def _bootstrap() -> NoReturn:
    """Start this file again, with the same arguments, under an interpreter that has nox."""
    boot = HERE / ".nox" / "_boot"
    if Path(sys.prefix).resolve() == boot.resolve():
        sys.exit("noxfile: .nox/_boot is damaged; delete that folder and run again.")
    # Written last: an environment half made, or made by another Python, lacks it and is made anew.
    stamp, complete = boot / "complete", f"{sys.version}\n{NOX}\n"
    python = _venv_python(boot)
    if not (python.exists() and stamp.exists() and stamp.read_text() == complete):
        try:
            _build_boot(boot)
        except KeyboardInterrupt:
            print("\nnoxfile: interrupted; the next run starts the installation again.", file=sys.stderr)
            sys.exit(130)
        except (OSError, subprocess.CalledProcessError) as error:
            print(
                f"noxfile: installing nox failed ({error}).\n"
                "noxfile: it needs the venv module (Debian and Ubuntu: the package python3-venv) "
                "and an index that pip can reach.",
                file=sys.stderr,
            )
            sys.exit(FAILURE)
        stamp.write_text(complete)
    command = [str(python), str(Path(__file__).resolve()), *sys.argv[1:]]
    environ = {**os.environ, "NOX_SCRIPT_MODE": "none"}  # nox would prepare an environment for itself
    sys.stdout.flush()
    if os.name == "nt":  # there os.exec* returns to the shell before the program has ended
        sys.exit(subprocess.call(command, env=environ))
    os.execve(command[0], command, environ)


try:
    import nox
except ImportError:
    _bootstrap()

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["accuracy"]

PYPROJECT = nox.project.load_toml(HERE / "pyproject.toml")
ENV = HERE / ".nox" / "env"
STAMP = ENV / "complete"
OUTSIDE_PYTHON = os.environ.get("HARNESS_PYTHON")
# nox knows passed and failed only, and loads this file a second time when it is run as a program: the codes
# of the failed children are kept in the program's own module.
_codes: set[int] = vars(sys.modules["__main__"]).setdefault("_codes", set())


# --- the one environment ------------------------------------------------------------------------------------


def _pinned(name: str) -> str:
    return next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith(f"{name}=="))


def _torch_args() -> list[str]:
    """What pip is given. PyPI's build for Linux brings CUDA: a CPU wheel in PIP_FIND_LINKS is preferred."""
    chosen = os.environ.get("HARNESS_TORCH_ARGS")
    if chosen:
        return shlex.split(chosen)
    pin = _pinned("torch")
    if sys.platform == "linux" and not shutil.which("nvidia-smi"):
        tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        wheel = f"{pin.replace('==', '-')}+cpu-{tag}-*.whl"
        links = (Path(link) for link in os.environ.get("PIP_FIND_LINKS", "").split())
        if any(any(folder.glob(wheel)) for folder in links if folder.is_dir()):
            return [f"{pin}+cpu"]
    return [pin]


def _key() -> str:
    """Changes with anything that decides what the environment holds."""
    tables = [PYPROJECT[table] for table in ("build-system", "project", "dependency-groups")]
    facts = (tables, CONSTRAINTS.read_text(), _torch_args(), sys.version, str(HERE))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _is_current() -> bool:
    return STAMP.exists() and STAMP.read_text() == _key()


def _constraints_without_torch() -> Path:
    """The torch that is installed by now stands; it may be another one than the pinned."""
    path = ENV / "constraints.txt"
    lines = CONSTRAINTS.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith("torch==")) + "\n")
    return path


# A stale environment is made anew rather than patched: nox would also keep one of another Python version.
@nox.session(
    name="env",
    venv_backend="none" if OUTSIDE_PYTHON else "virtualenv",
    reuse_venv=_is_current(),
    default=False,
)
def env(session: nox.Session) -> None:
    """Install torch, the harness and its tools into .nox/env, once."""
    if session.venv_backend == "none" or _is_current():
        return
    torch = _torch_args()
    session.log(f"installing into .nox/env, once. Step 1 of 2: {shlex.join(torch)}")
    if sys.platform == "linux" and torch == [_pinned("torch")] and not shutil.which("nvidia-smi"):
        session.log(
            "no NVIDIA GPU is seen, and PyPI's torch for Linux may bring several GB of CUDA libraries:"
        )
        session.log("to choose a CPU build instead, set HARNESS_TORCH_ARGS (see CONTRIBUTING.md)")
    pip = ("python", "-m", "pip", "--disable-pip-version-check", "install")
    session.run(*pip, *torch)
    session.log("step 2 of 2: the harness, its test and lint tools (about a minute)")
    tools = nox.project.dependency_groups(PYPROJECT, "dev")
    session.run(*pip, "--quiet", "--constraint", str(_constraints_without_torch()), "--editable", ".", *tools)
    STAMP.write_text(_key())
    session.log("the environment is complete; later runs reuse it")


def _python() -> str:
    if OUTSIDE_PYTHON:
        return OUTSIDE_PYTHON
    return sys.executable if "--no-venv" in sys.argv else str(_venv_python(ENV))


# --- running, and what the exit codes mean ------------------------------------------------------------------


def _harness_code(code: int) -> int:
    return code if code in (USAGE, NOTHING_RAN) else FAILURE


def _pytest_code(code: int) -> int:
    # 4 is wrong usage, 5 no test collected; 2 (also a test file that does not import) and 3 are failures
    return {4: USAGE, 5: NOTHING_RAN}.get(code, FAILURE)


def _lint_code(_code: int) -> int:
    return FAILURE


def _run(
    session: nox.Session, meaning: Callable[[int], int], *arguments: str, env: dict[str, str] | None = None
) -> None:
    try:
        session.run(_python(), *arguments, external=True, env=env)
    except nox.command.CommandFailed as failed:
        _codes.add(meaning(getattr(failed, "return_code", None) or FAILURE))
        raise


def _run_all(session: nox.Session, *runs: tuple[Callable[[int], int], tuple[str, ...]]) -> None:
    """Run every command even if an earlier one fails, then fail if any did."""
    failed = 0
    for meaning, arguments in runs:
        try:
            _run(session, meaning, *arguments)
        except nox.command.CommandFailed:
            failed += 1
    if failed:
        session.error(f"{failed} of {len(runs)} commands failed")


def _exit_code(nox_code: int | str | None) -> int | str | None:
    if nox_code == FAILURE and len(_codes) == 1:
        return next(iter(_codes))
    return USAGE if nox_code == 3 else nox_code  # nox's 3 is an unknown session or an empty selection


# Real layers and hard cases, a ladder of amplitudes, and lengths: about a minute on two cores.
REVIEWED = (
    "real/*", "normal/*", "magnitude/*", "outliers/*", "peaked/*", "sinks/*", "negative/*", "ties/*",
    *(f"shapes/n{n}" for n in (16, 32, 64, 128, 256, 512, 1024, 2048)),
)  # fmt: skip


# --- the sessions -------------------------------------------------------------------------------------------


@nox.session(venv_backend="none", requires=["env"])
def accuracy(session: nox.Session) -> None:
    """Judge every implementation on the cases: `python -m harness run`."""
    _run(session, _harness_code, "-m", "harness", "run", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def certify(session: nox.Session) -> None:
    """Hold the FP64 truth against ball arithmetic: `python -m harness certify`."""
    _run(session, _harness_code, "-m", "harness", "certify", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def report(session: nox.Session) -> None:
    """Write the reports again from stored records: `python -m harness report`."""
    _run(session, _harness_code, "-m", "harness", "report", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def sample(session: nox.Session) -> None:
    """Write reports/sample and docs/schema again (-- --run --time: records, timings too): `benchmarks.sample`."""
    _run(session, _harness_code, "-m", "benchmarks.sample", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def review(session: nox.Session) -> None:
    """Measure what reviewers sign, and write it (-- --recipes A,B --quality --out DIR; the rest goes to `review`)."""
    asked = argparse.ArgumentParser(prog="review", add_help=False, allow_abbrev=False)
    asked.add_argument("-r", "--recipes", "--recipe", default="bf16,fp8_e4m3,fp8_kv")
    asked.add_argument("--out", default="reports/review")
    asked.add_argument("--quality", action="store_true")
    given, rest = asked.parse_known_args(session.posargs)
    recipes, records = ("--recipes", given.recipes), f"{given.out}/records.jsonl"
    files = ",".join(dict.fromkeys(glob.partition("/")[0] for glob in REVIEWED))
    cases = ("--cases", files, "--only", ",".join(REVIEWED))
    runs = [("run", *cases, *recipes, "--no-report", "--out", given.out)]
    found = ("--evidence", f"{given.out}/evidence.jsonl")
    runs.append(("evidence", *recipes, "--out", found[1], "--quality" if given.quality else "--no-quality"))
    runs.append(("review", records, *recipes, *found, "--out", given.out, *rest))
    _run_all(session, *((_harness_code, ("-m", "harness", *run)) for run in runs))


@nox.session(venv_backend="none", requires=["env"])
def throughput(session: nox.Session) -> None:
    """Time the implementations with pytest-benchmark (arguments go to pytest), then report."""
    measured = Path("reports", "latest", "throughput.json")
    measured.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        measured.unlink()  # an earlier run's numbers must not be reported as this one's
    path = measured.as_posix()
    _run(session, _pytest_code, "-m", "pytest", "benchmarks/", f"--benchmark-json={path}", *session.posargs)
    if not measured.exists():  # every cell was refused or did not pass
        _codes.add(NOTHING_RAN)
        session.error("nothing was timed: see the reasons above")
    _run(session, _harness_code, "-m", "harness", "report", "--throughput", path)


@nox.session(venv_backend="none", requires=["env"])
def published(session: nox.Session) -> None:
    """Measure published figures again (-- --full: at the papers' sizes): `python -m benchmarks.published`."""
    _run(session, _harness_code, "-m", "benchmarks.published", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def scaling(session: nox.Session) -> None:
    """Measure how time, memory and FLOPs grow with the length (-- --max L): `python -m benchmarks.scaling`."""
    _run(session, _harness_code, "-m", "benchmarks.scaling", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def gate(session: nox.Session) -> None:
    """Compare with the stored baseline: `python -m harness gate`."""
    _run(session, _harness_code, "-m", "harness", "gate", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def mutants(session: nox.Session) -> None:
    """Judge wrong implementations, by us and by others' rules: a check, or all and the report (-- --full)."""
    _run(session, _harness_code, "-m", "benchmarks.mutants", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def tests(session: nox.Session) -> None:
    """Run the tests, side by side where pytest-xdist is installed."""
    found = (
        subprocess.run([_python(), "-c", "import xdist"], capture_output=True, check=False).returncode == 0
    )
    parallel = (
        ("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal", "-p", "no:benchmark") if found else ()
    )
    # One thread each: workers that all take every core take many times as long.
    env = {"OMP_NUM_THREADS": "1"} if found else {}
    _run(session, _pytest_code, "-m", "pytest", "-q", *parallel, *session.posargs, env=env)


@nox.session(venv_backend="none", requires=["env"])
def lint(session: nox.Session) -> None:
    """Check style, formatting, types and the layers; all four, whichever fails."""
    layers = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    _run_all(
        session,
        (_lint_code, ("-m", "ruff", "check", ".")),
        (_lint_code, ("-m", "ruff", "format", "--check", ".")),
        (_lint_code, ("-m", "mypy")),
        (_lint_code, ("-c", layers)),
    )


@nox.session(venv_backend="none", requires=["env"])
def gpu(session: nox.Session) -> None:
    """Run the tests marked gpu, then the cases, on CUDA."""
    _run_all(
        session,
        (_pytest_code, ("-m", "pytest", "-q", "-m", "gpu")),
        (_harness_code, ("-m", "harness", "run", "--device", "cuda", *session.posargs)),
    )


if __name__ == "__main__":
    os.chdir(HERE)  # nox looks for noxfile.py in the working folder
    try:
        nox.main()
    except SystemExit as stop:
        sys.exit(_exit_code(stop.code))
