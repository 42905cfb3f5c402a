"""The page of the harness's own speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks.speed.ratios import Measured
from harness.machine import machine

HEADERS = ["what", "measured", "95 %", "limit", "kept", "beside"]
NOTES = Path(__file__).with_name("limits.md")


def row(x: Measured) -> list[str]:
    """One line of a table."""
    bound = "" if math.isinf(x.limit) else f"{'≤' if x.at_most else '≥'} {x.limit:g} {x.unit}"
    kept = "" if math.isinf(x.limit) else "yes" if x.kept else "no"
    return [x.what, f"{x.value:.3g} {x.unit}", f"{x.low:.3g} … {x.high:.3g}", bound, kept, x.more]


def markdown(found: Mapping[str, Sequence[Measured]]) -> str:
    """The page: the machine, a table, and what stops those that are not kept."""
    m = machine()
    rows = [[f"`{name}`", *row(x)] for name, some in found.items() for x in some]
    table = tabulate(rows, ["ratio", *HEADERS], tablefmt="github", disable_numparse=True)
    return (
        "# The harness's own speed\n\n"
        "`python -m benchmarks.speed` measures all, `python -m benchmarks.speed NAME` one. Each ratio is of one run:\n"
        "a b b a, CPU time of the process on one thread, the median of the rounds and the 95 % bootstrap interval of\n"
        "that median. Other work on the machine meets both sides.\n\n"
        f"Machine: {m.cpu}, {m.cores} cores, {m.isa}; {m.system}; Python {m.python}, torch {m.torch}, NumPy {m.numpy};"
        f" commit {m.commit}.\n\n{table}\n\n{NOTES.read_text(encoding='utf-8')}"
    )
