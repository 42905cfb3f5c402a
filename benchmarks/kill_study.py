"""Kill a run at random points: is what it recorded whole, and does `run --resume` finish the rest alone?

    python -m benchmarks.kill_study --kills 50 --out reports/kill-study.md

runs `harness run` on the smoke cases with two implementations and two recipes (8 units, 32 records), sends it SIGKILL,
reads what it left, and runs it again with `--resume`. A fifth of the kills come at a random time of the first moments,
before anything is recorded or while it is; the others a random instant after the file has reached a random size. Every
fifth run has two worker processes. The command line runs in a process forked from one that has loaded torch, which
saves seconds a run and changes nothing that is written. A kill is a line of `--state`; a study that was stopped goes on
there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHOSEN = ("--cases", "smoke", "-i", "naive_masked,online_softmax", "-r", "bf16,fp8_e4m3")
LIMIT_S = 120.0

# One line of stdin starts the command line in a forked child; "kill" kills it, "wait" waits for it. (Only its parent
# can kill without the risk of meeting another process of that number.)
_SERVER = """
import json, os, signal, sys
import harness.cli, harness.cli.commands, harness.journal
child = None
for line in sys.stdin:
    if line.startswith("["):
        child = os.fork()
        if child == 0:
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 1)
                os.dup2(null.fileno(), 2)
            try:
                harness.cli.main(json.loads(line))
            except SystemExit as stop:
                os._exit(stop.code)
        print("started", flush=True)
        continue
    if line == "kill\\n":
        os.kill(child, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Server:
    """Starts command lines without the start of an interpreter."""

    def __enter__(self) -> Server:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        self._process.stdout.close()

    def _say(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def start(self, *arguments: str) -> None:
        assert self._say(json.dumps(["run", *CHOSEN, "--no-report", *arguments])) == "started"

    def kill(self) -> int:
        return int(self._say("kill"))

    def wait(self) -> int:
        return int(self._say("wait"))


@dataclass(frozen=True)
class Kill:
    """One kill and what came of it. `kept`: lines that the resumed run left as they were, byte for byte, timings as
    well; `ran`: records that it made; `partial`: whole lines of a unit that was cut, which ran again; `stray`: other
    files left beside the records. `problem` is empty where everything held."""

    n: int
    point: str
    jobs: int
    ended: int
    lines: int
    cut_bytes: int
    kept: int
    ran: int
    partial: int
    stray: int
    problem: str


def timeless(record: Any) -> Any:
    return replace(record, run_ms=0.0, truth_ms=0.0, created="")


def one_kill(server: Server, n: int, seed: int, whole: bytes, folder: Path) -> Kill:
    """Run, kill, read, resume, compare with the uninterrupted run whose file is `whole`."""
    draw = random.Random(f"{seed} {n}")
    jobs = "2" if n % 5 == 4 else "1"
    path = folder / "records.jsonl"
    arguments = ("--out", str(folder), "--jobs", jobs)
    server.start(*arguments)
    if n % 5 == 0:
        pause = draw.random()
        point = f"{pause:.3f} s after the start"
    else:
        size, pause = draw.random() * len(whole), draw.random() * 0.05
        point = f"{pause:.3f} s after byte {size:.0f}"
        until = time.monotonic() + LIMIT_S
        while (not path.exists() or path.stat().st_size < size) and time.monotonic() < until:
            time.sleep(0.001)
    time.sleep(pause)
    ended = server.kill()
    left = path.read_bytes() if path.exists() else b""
    stray = sum(p.name.startswith(".") for p in folder.iterdir()) if folder.exists() else 0
    lines = left.split(b"\n")
    found = {"lines": len(lines) - 1, "cut_bytes": len(lines[-1]), "kept": 0, "ran": 0, "partial": 0}
    try:
        found |= _resumed(server, arguments, path, lines[:-1], whole)
        problem = ""
    except (AssertionError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    return Kill(n=n, point=point, jobs=int(jobs), ended=ended, stray=stray, problem=problem, **found)


def _resumed(
    server: Server, arguments: Sequence[str], path: Path, left: Sequence[bytes], whole: bytes
) -> dict[str, int]:
    from harness.records import read_records

    held = read_records(path) if path.exists() else []
    assert len(held) == len(left), f"{len(held)} records read of {len(left)} lines"
    server.start(*arguments, "--resume")
    code = server.wait()
    assert code == 0, f"--resume ended with {code}"
    final = path.read_bytes().splitlines()
    kept = set(left) & set(final)
    reference = path.with_name("whole")
    reference.write_bytes(whole)
    here, there = ([timeless(r) for r in read_records(p)] for p in (path, reference))
    reference.unlink()
    assert repr(here) == repr(there), "the records differ from an uninterrupted run's"  # NaN is not itself
    units = {(r.case, r.seed) for r in there}
    size = len(there) // len(units)
    met = [(r.case, r.seed) for r in held]
    partial = sum(met.count(unit) for unit in units if met.count(unit) < size)
    assert len(kept) == len(left) - partial, f"{len(left) - partial - len(kept)} whole records ran again"
    return {"kept": len(kept), "ran": len(final) - len(kept), "partial": partial}


def uninterrupted(server: Server, folder: Path) -> bytes:
    server.start("--out", str(folder), "--jobs", "1")
    code = server.wait()
    if code:
        raise ValueError(f"the uninterrupted run ended with {code}")
    return (folder / "records.jsonl").read_bytes()


def page(kills: Sequence[Kill], seed: int, records: int) -> str:
    bad = [k for k in kills if k.problem]
    killed = sum(k.ended == -9 for k in kills)
    lines = [
        "# Killed runs",
        "",
        f"`python -m benchmarks.kill_study --kills {len(kills)} --seed {seed}`",
        "",
        f"{killed} of {len(kills)} runs of {records} records died of SIGKILL; the others had ended by then. "
        f"Problems: **{len(bad)}**.",
        "",
        "After each, the file was read, `run --resume` finished it, and the records were compared with those of an "
        "uninterrupted run in everything but timings and dates. *Kept*: lines that stayed as they were, byte for byte, "
        "timings too, so they did not run again. *Ran*: records that the resumed run made. *Cut*: bytes of a last line "
        "without its end. *Partial*: whole lines of a unit that was cut, which runs again as one. *Stray*: temporary "
        "files left beside the records.",
        "",
        "| kill | at | jobs | whole lines | cut bytes | partial | kept | ran | stray | problem |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {k.n} | {k.point} | {k.jobs} | {k.lines} | {k.cut_bytes} | {k.partial} | {k.kept} | {k.ran} | {k.stray} "
        f"| {k.problem or '—'} |"
        for k in kills
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=ROOT / "reports/latest/kill-study.jsonl")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from harness.files import write_atomically

    options.state.parent.mkdir(parents=True, exist_ok=True)
    text = options.state.read_text() if options.state.exists() else ""
    kills = [Kill(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    with Server() as server, tempfile.TemporaryDirectory() as scratch:
        whole = uninterrupted(server, Path(scratch, "whole"))
        for n in range(len(kills), options.kills):
            kills.append(one_kill(server, n, options.seed, whole, Path(scratch, str(n))))
            write_atomically(options.state, "".join(json.dumps(asdict(k)) + "\n" for k in kills))
            print(f"kill {n + 1} of {options.kills}: {kills[-1]}", file=sys.stderr, flush=True)
    if options.out:
        write_atomically(options.out, page(kills, options.seed, whole.count(b"\n")))
    print(f"{len(kills)} kills, {sum(bool(k.problem) for k in kills)} problems")
    return 1 if any(k.problem for k in kills) else 0


if __name__ == "__main__":
    sys.exit(main())
