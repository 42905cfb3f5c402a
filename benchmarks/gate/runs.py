"""Runs of unchanged code, many times, under settings of the machine that may differ between two runs of a gate.

A process per setting repeats `--cases smoke` as the gate runs it, without the start of a process between two runs.
Between runs changes what may: the order of the units (and with it what is warm), where tensors lie in memory, the
threads, and now and then the number of processes. A run is a line of `SETTING.jsonl`: its variation and a signature of
its records, timings, dates, commit and thread count apart; the records of each signature are kept once. A run that was
stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

SETTINGS: dict[str, dict[str, str]] = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    # The same class of machine as far as torch says, with the products of another processor:
    "avx2-mkl-compatible": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"},
    "avx2-onednn-sse41": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}  # two threads on a core that others share would spin for minutes
JOBS_EVERY, THREADS_EVERY = 20, 10


def timeless(record: Any) -> Any:
    """A record without what may differ between two runs that gave the same."""
    machine = replace(record.machine, commit="", threads=0)
    return replace(record, run_ms=0.0, truth_ms=0.0, created="", machine=machine)


def signature(records: list[Any]) -> str:
    from harness.records import to_json

    lines = sorted(to_json(timeless(r)) for r in records)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def read_runs(state: Path, setting: str) -> list[dict[str, Any]]:
    path = state / f"{setting}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def variation(n: int, setting: str) -> dict[str, Any]:
    draw = random.Random(f"{setting} {n}")
    return {
        "n": n,
        "order": draw.randrange(2**32),
        "offset": draw.randrange(1, 1 << 16),
        "threads": 2 if n % THREADS_EVERY == 5 else 1,
        "jobs": 2 if n % JOBS_EVERY == 10 else 1,
    }


def one_run(v: dict[str, Any], scratch: Path) -> list[Any]:
    """Every record of one smoke run."""
    import torch

    from harness.case import load_cases
    from harness.journal import record
    from harness.pipeline import plan, run_units

    units = plan(load_cases("smoke"))
    random.Random(v["order"]).shuffle(units)
    held = [torch.empty(v["offset"] * (1 + i % 7), dtype=torch.uint8) for i in range(32)]
    del held[::2]  # holes: the allocator hands out other places than in the run before
    torch.set_num_threads(v["threads"])
    if v["jobs"] > 1:  # as the gate does: processes of one thread each
        return [r for _, batch in record(scratch, units, v["jobs"], False) for r in batch]
    return [r for _, batch in run_units(units) for r in batch]


def work(setting: str, runs: int, state: Path) -> None:
    """In a process of its own, whose environment has the setting."""
    from harness.records import write_records

    done = len(read_runs(state, setting))
    path = state / f"{setting}.jsonl"
    text = "".join(json.dumps(x) + "\n" for x in read_runs(state, setting))
    if path.exists() and path.read_text() != text:
        path.write_text(text)  # a line that was cut off
    for n in range(done, runs):
        v = variation(n, setting)
        records = one_run(v, state / f"{setting}.scratch")
        found = signature(records)
        kept = state / f"{setting}-{found}.records"
        if not kept.exists():
            write_records(kept, sorted(records, key=lambda r: r.key))
        line = {**v, "cells": len(records), "isa": records[0].machine.isa, "signature": found}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{setting}: run {n + 1} of {runs}, {found}", file=sys.stderr, flush=True)


def collect(setting: str, runs: int, state: Path, start: Callable[..., Any] = subprocess.run) -> None:
    state.mkdir(parents=True, exist_ok=True)
    if len(read_runs(state, setting)) >= runs:
        return
    command = [sys.executable, "-m", "benchmarks.gate.runs", setting, str(runs), str(state)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    start(
        command, check=True, env={**os.environ, "PYTHONPATH": path, **PATIENT, **SETTINGS[setting]}, cwd=ROOT
    )


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
