"""How often does `compare` raise a false alarm, and does it see a slow-down of 10 %?

A/A: two copies of one call, each with tensors of its own. Planted: B has 1.1 times the query rows of A, and so exactly
1.1 times the products, in whole blocks of rows. Other checkout: A/A between two processes, started anew for every few
trials, as `compare --old` times them. Every trial is `harness.timing.pairs.paired` as the command calls it; so many
trials in so little time need cheap calls (under 1 ms where the machine is idle) and a small budget.

    python -m benchmarks.compare_study                    # writes reports/compare-study.md
    python -m benchmarks.compare_study --trials 20        # a look; writes nothing without --out
    python -m benchmarks.compare_study --load 2           # beside two processes that compute: compare-study-load.md

Exit codes: 0 alarms ≤ 1 % and every slow-down seen, 1 otherwise, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import harness
from harness.case import Case
from harness.clock import seconds
from harness.files import write_atomically
from harness.inputs import make_inputs
from harness.machine import machine
from harness.quantize import store
from harness.recipe import get_recipe
from harness.spec import AttentionSpec, Shape
from harness.timing.pairs import BUDGET_S, Paired, paired, repeated
from harness.timing.rule import ALPHA, LOOKS, Speed, looks, tail_of
from harness.timing.sides import Checkout, Problem

TRIALS, PLANTED, PATIENT, CHECKOUTS, EACH = 200, 40, 12, 7, 4
THRESHOLD, MORE = 0.05, 1.1
PATIENT_S = 60.0  # of some planted ones: what more rounds find where the load is heavy
SHORT_S = 5.0  # budget of A/A trials, of which there are many; the others have the command's own
ROOT = Path(__file__).resolve().parents[1]
# Rows are whole blocks: torch's flash kernel takes 64 at a time here, and 704 = 1.1 · 640 of them are 11 instead of 10.
CELLS = {
    "sdpa_flash": Shape(1, 1, 640, 64, kv_len=256),
    "naive_masked": Shape(1, 1, 640, 64, kv_len=256),
}
Clock = Callable[[int], float]
_BURN = "import torch\ntorch.set_num_threads(1)\nx = torch.randn(512, 512)\nwhile True: x @ x"


def problem(shape: Shape, seed: int) -> Problem:
    case = Case("study", "normal", shape, "what is timed")
    recipe = get_recipe("fp32")
    return Problem(
        shape,
        AttentionSpec(),
        recipe,
        "fp32",
        store(make_inputs(case, seed).tensors, recipe, round_first=True),
    )


def here(name: str, shape: Shape, seed: int) -> Clock:
    """The clock of a call in this process, inputs of its own."""
    p = problem(shape, seed)
    call = harness.get(name).ready(p.stored, p.spec, p.recipe)
    call()
    return partial(seconds, call)


def same(i: int) -> list[tuple[str, Paired]]:
    return [
        (name, paired(here(name, shape, 2 * i), here(name, shape, 2 * i + 1), SHORT_S, THRESHOLD))
        for name, shape in CELLS.items()
    ]


def slower(i: int, budget_s: float = BUDGET_S) -> list[tuple[str, Paired]]:
    found = []
    for name, shape in CELLS.items():
        more = Shape(shape.batch, shape.heads, round(MORE * shape.q_len), shape.head_dim, kv_len=shape.kv_len)
        found.append(
            (name, paired(here(name, shape, 2 * i), here(name, more, 2 * i + 1), budget_s, THRESHOLD))
        )
    return found


def checkouts(i: int) -> list[tuple[str, Paired]]:
    """Trials between two processes of this checkout."""
    found = []
    with closing(Checkout(ROOT)) as a, closing(Checkout(ROOT)) as b:
        for j in range(EACH):
            name = list(CELLS)[j % len(CELLS)]
            measure = partial(between, a, b, name, problem(CELLS[name], EACH * i + j))
            found.append((name, repeated(measure, lambda: (a.close(), b.close()))))
    return found


def between(a: Checkout, b: Checkout, name: str, p: Problem) -> Paired:
    x, y = (side.ready(name, p).clock for side in (a, b))
    return paired(partial(x, alone=True), partial(y, alone=True), SHORT_S, THRESHOLD)


PATIENTLY = partial(slower, budget_s=PATIENT_S)
STUDIES = {
    "A/A": same,
    "A/A, --old": checkouts,
    "planted 10 %": slower,
    "planted 10 %, 60 s": PATIENTLY,
}


def start(cores: Any) -> None:
    """A worker takes a core for itself, and for the processes that it starts."""
    core = cores.get()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)


def trial(what: str, i: int) -> list[tuple[str, Paired]]:
    with torch.no_grad():
        return STUDIES[what](i)


def share(k: int, n: int, above: bool) -> float:
    """The Clopper–Pearson bound of a probability seen k times in n, 97.5 % on this side, by bisection."""
    if k == (n if above else 0):
        return float(above)
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        kept = range(k + 1) if above else range(k, n + 1)
        chance = sum(math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in kept)
        low, high = (p, high) if (chance > 0.025) is above else (low, p)
    return low


def row(what: str, found: list[Paired]) -> list[str]:
    order = (Speed.SLOWER, Speed.SAME, Speed.FASTER, Speed.UNDECIDED)
    counts = [str(sum(x.verdict is speed for x in found)) for speed in order]
    k, n = sum(x.verdict is Speed.SLOWER for x in found), len(found)
    ratios = sorted(x.ratio.median for x in found)
    middle = statistics.median(ratios)
    rounds = f"{statistics.median(x.rounds for x in found):g} ({min(x.rounds for x in found)})"
    took = statistics.median(x.a_s.median for x in found)
    bounds = f"{100 * share(k, n, False):.2g} to {100 * share(k, n, True):.2g} %"
    spread = f"{middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    return [what, str(n), *counts, bounds, spread, rounds, f"{1e3 * took:.2f}"]


HEADERS = [
    "", "trials", "slower", "same", "faster", "undecided", "slower, 95 % interval", "median ratio (least to largest)",
    "rounds (fewest)", "ms a call",
]  # fmt: skip


def page(rows: list[list[str]], loads: list[float], own: int, how: str, command: str, minutes: float) -> str:
    m = machine()
    beside = f", beside {own} processes that only compute" if own else ", these trials included"
    told = (
        f"{command}: {minutes:.0f} min on {m.cpu}, {m.cores} cores, {m.isa}, torch {m.torch}, {how}. The load average"
        f" (processes that run or wait to) was {min(loads):.1f} to {max(loads):.1f} over these {m.cores} cores{beside}."
    )
    trial = (
        f"A trial is one comparison with a threshold of {100 * THRESHOLD:g} %, by the rule of `harness/timing/rule.py`;"
        f" its budget is {SHORT_S:g} s for A/A, and {BUDGET_S:g} s, the command's own, for planted ones where the name"
        " says no other. A/A are two copies of one call, in one process, and as `compare --old` does it, in two"
        f" processes pinned to one core. Planted: B has {MORE:g} times the rows of A. *Slower* on A/A is a false alarm;"
        f" the rule allows {100 * ALPHA:g} % of them, over all {LOOKS} looks. On planted trials it should be found;"
        " *undecided* are those that neither the budget nor the last look ended. Interval: Clopper–Pearson."
        f" A trial of fewer than {looks(tail_of(1))[0]} rounds cannot decide anything."
    )
    shown = tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)
    told, trial = ("\n".join(textwrap.wrap(x, 120, break_on_hyphens=False)) for x in (told, trial))
    return f"# What `compare` calls slower\n\n{told}\n\n{shown}\n\n{trial}\n"


@contextmanager
def load(processes: int) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", _BURN]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("compare_study", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=TRIALS, help="A/A ones; the others in proportion")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="processes that compute beside it")
    parser.add_argument(
        "--only", choices=STUDIES, metavar="PART", help="one part; writes nothing without --out"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if given.trials < 2:
        parser.error("--trials: at least 2")
    scale, started, loads = given.trials / TRIALS, time.monotonic(), [os.getloadavg()[0]]
    counts = (
        given.trials / len(CELLS), CHECKOUTS * scale, PLANTED * scale / len(CELLS), PATIENT * scale / len(CELLS),
    )  # fmt: skip
    spawn, rows, good = multiprocessing.get_context("spawn"), [], True
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    queue = spawn.Queue()
    for core in cores:
        queue.put(core)
    with load(given.load), ProcessPoolExecutor(len(cores), spawn, start, (queue,)) as pool:
        for what, count in zip(STUDIES, counts, strict=True):
            if given.only not in (None, what):
                continue
            found: dict[str, list[Paired]] = {}
            jobs = [pool.submit(trial, what, i) for i in range(math.ceil(count))]
            for i, job in enumerate(as_completed(jobs)):
                for name, one in job.result():
                    found.setdefault(name, []).append(one)
                if i % 10 == 0:
                    loads.append(os.getloadavg()[0])
                    print(f"{what} {i}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            rows += [row(f"{what}, {name}", x) for name, x in sorted(found.items())]
            every = [x for part in found.values() for x in part]
            alarms = sum(x.verdict is Speed.SLOWER for x in every)
            good &= alarms <= ALPHA * len(every) if what.startswith("A/A") else alarms == len(every)
            rows.append(row(f"{what}, all", every))
    how = f"trials on {len(cores)} cores at once, one thread each"
    page_of = ROOT / "reports" / f"compare-study{'-load' * bool(given.load)}.md"
    out = given.out or (page_of if given.trials == TRIALS and not given.only else None)
    command = "`python -m benchmarks.compare_study" + f" --load {given.load}" * bool(given.load)
    command += f" --only '{given.only}'`" if given.only else "`"
    text = page(rows, loads, given.load, how, command, (time.monotonic() - started) / 60)
    print(text)
    if out is not None:
        write_atomically(out, text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
