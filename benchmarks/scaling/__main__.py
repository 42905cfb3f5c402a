"""Measure how time, peak memory and FLOPs grow with the length.

    python -m benchmarks.scaling                  # L = 256 … 4096: reports/scaling.md and reports/scaling.svg
    python -m benchmarks.scaling --max 16384      # beyond; lengths that memory does not hold are left out, and named
    python -m benchmarks.scaling --only naive_masked,online_softmax   # nothing is written without --out

Exit codes: 0 measured, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.scaling.page import Found, figure, markdown, text
from benchmarks.scaling.points import ALGORITHMS, Algorithm, Point, measure
from harness.cli.progress import Progress, progress
from harness.cost.units import show_bytes
from harness.files import write_atomically

SMALLEST, LARGEST = 256, 4096
COMMAND = "python noxfile.py -s scaling"
NAMES = tuple(a.name for a in ALGORITHMS)


def chosen(names: str) -> tuple[str, ...]:
    given = tuple(name.strip() for name in names.split(","))
    if unknown := [n for n in given if n not in NAMES]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; allowed: {', '.join(NAMES)}")
    return given


def largest(given: str) -> int:
    if not given.isdecimal() or int(given) < 2 * SMALLEST:
        raise argparse.ArgumentTypeError(f"{given!r}; allowed: an integer ≥ {2 * SMALLEST}, two lengths")
    return int(given)


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scaling", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--max", type=largest, default=LARGEST, metavar="L", help="the largest length")
    parser.add_argument("--only", type=chosen, default=NAMES, metavar="NAMES", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, help="where the page is written, the figure beside it")
    return parser.parse_args(arguments)


def available() -> int | None:
    """Bytes of memory that are free to use, where the system tells (proc(5))."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def grown(algorithm: Algorithm, lengths: list[int], skipped: list[str], shown: Progress) -> list[Point]:
    """The points of one algorithm, up to the length that memory holds: nothing here grows faster than L²."""
    points: list[Point] = []
    for length in lengths:
        free = available()
        need = points[-1].allocated * (length / points[-1].length) ** 2 if points else 0
        if free is not None and need > free / 2:
            skipped.append(
                f"{algorithm.name} at L = {length}: up to {show_bytes(need)} are needed, and of"
                f" {show_bytes(free)} that are free it may take half"
            )
            shown.update(len(lengths) - len(points), f"{algorithm.name} {length}")
            break
        points.append(measure(algorithm, length))
        shown.update(1, f"{algorithm.name} {length}")
    return points


def main(arguments: list[str] | None = None) -> int:
    given = options(arguments)
    started = time.monotonic()
    lengths = [n for n in (SMALLEST << i for i in range(40)) if n <= given.max]
    algorithms = [a for a in ALGORITHMS if a.name in given.only]
    found: Found = {}
    skipped: list[str] = []
    with progress(len(lengths) * len(algorithms)) as shown:
        for algorithm in algorithms:
            found[algorithm.name] = grown(algorithm, lengths, skipped, shown)
    print(text(found, skipped))
    out = given.out
    if out is None and set(given.only) == set(NAMES):
        out = Path("reports", "scaling.md")
    if out is not None:
        command = COMMAND + (f" -- --max {given.max}" if given.max != LARGEST else "")
        drawn = out.with_suffix(".svg")
        write_atomically(drawn, figure(found))
        write_atomically(out, markdown(found, skipped, command, drawn.name, time.monotonic() - started))
        print(f"written to {out} and {drawn}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
