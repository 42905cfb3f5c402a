"""Regressions planted in a smoke run, each put through the real command: exit code and the lines that name it.

Records of a run are changed as a fault would change them; and a kernel of one's own (`--kernel`) is changed in its
file, so that its error is 1.05 times what it was: out = truth + 1.05·(out − truth). It keeps P in BF16 under the FP32
recipe and fails in both runs: of an error of an ulp of the output, the output's own rounding would swallow most of the
5 %.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.records import Hazard, HazardKind, Record, Status, write_records

ROOT = Path(__file__).resolve().parent.parent.parent
CASE, NAME, RECIPE = "smoke/normal", "online_softmax", "bf16"

KERNEL = """
import torch

def attention(q, k, v, *, causal=False, scale=None):
    def attend(q, k, v, narrow):
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        p = torch.softmax(scores, -1)
        return (p.bfloat16().to(p.dtype) if narrow else p) @ v

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, truth = attend(q, k, v, True), attend(q.double(), k.double(), v.double(), False)
    return (truth + FACTOR * (out - truth)).to(q.dtype)
"""


@dataclass(frozen=True)
class Planted:
    what: str
    code: int
    regressions: tuple[str, ...]


def harness(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-m", "harness", *arguments]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


def of_records(records: Sequence[Record], folder: Path) -> Iterator[Planted]:
    """The unchanged records first."""
    write_records(folder / "whole", records)
    harness("gate", "--records", "whole", "--baseline", "base.jsonl", "--update", cwd=folder)
    for what, planted in _plants(records).items():
        write_records(folder / "planted", planted)
        yield _told(what, harness("gate", "--records", "planted", "--baseline", "base.jsonl", cwd=folder))


def _told(what: str, done: subprocess.CompletedProcess[str]) -> Planted:
    lines = [x for x in done.stdout.splitlines() if x.startswith("REGRESSION")]
    return Planted(what, done.returncode, tuple(lines))


def _plants(records: Sequence[Record]) -> dict[str, list[Record]]:
    def changed(change: Callable[[Record], Any], **cell: str) -> list[Record]:
        return [change(r) if all(getattr(r, n) == v for n, v in cell.items()) else r for r in records]

    def risen(r: Record) -> Record:
        assert r.errors is not None
        return replace(
            r, errors=replace(r.errors, rmse=1.05 * r.errors.rmse, max_abs=1.05 * r.errors.max_abs)
        )

    hazard = Hazard(HazardKind.OVERFLOW, "scores", "fp16", "observed", 7e4, -0.1, 1, 9216, (0, 0, 0, 0))
    cell = {"implementation": NAME, "recipe": RECIPE}
    one = {"case": CASE, **cell}
    return {
        "nothing": list(records),
        "+5 % rmse in one cell": changed(risen, **one),
        "+5 % rmse in all cells of an implementation and recipe": changed(risen, **cell),
        "a flipped verdict": changed(lambda r: replace(r, status=Status.FAIL), **one),
        "a flipped verdict in one seed of three": [
            replace(r, status=Status.INCONCLUSIVE) if r.key == (CASE, NAME, RECIPE, 1) else r for r in records
        ],
        "a worse precision": changed(lambda r: replace(r, precision=Status.FAIL), **one),
        "a lost case": [r for r in records if r.group_key != (CASE, NAME, RECIPE)],
        "a new hazard": changed(lambda r: replace(r, hazards=(*r.hazards, hazard)), **one),
    }


def of_kernel(folder: Path) -> Iterator[Planted]:
    """A kernel whose file changes between two runs of the gate: not at all, then to 1.05 times its error."""
    chosen = ("--kernel", "mine.py:attention", "-r", "fp32", "--jobs", "1", "--baseline", "kernel.jsonl")
    file = folder / "mine.py"
    for what, factor, more in (
        ("", "1.0", ("--update",)), ("nothing, in a kernel", "1.0", ()), ("+5 % error of a kernel", "1.05", ()),
    ):  # fmt: skip
        file.write_text(KERNEL.replace("FACTOR", factor))
        done = harness("gate", *chosen, *more, cwd=folder)
        if what:
            yield _told(what, done)
        elif done.returncode:
            raise ValueError(f"the kernel's baseline was not made: {done.stderr}")
