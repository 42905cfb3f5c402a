"""Measure the harness's own speed, as ratios of one run.

    python -m benchmarks.speed                      # all, and reports/speed.md
    python -m benchmarks.speed truth --rounds 9     # one ratio; nothing is written without --out

Exit codes: 0 measured (whether or not a limit is kept: that is in the page), 2 wrong usage.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.speed.page import HEADERS, markdown, row
from benchmarks.speed.ratios import RATIOS, Measured
from harness.files import write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RATIOS)}; default: all")
    parser.add_argument("--rounds", type=int, default=7, help="a b b a, so many times")
    parser.add_argument(
        "--out", type=Path, default=None, help="default: reports/speed.md when all are measured"
    )
    given = parser.parse_args()
    if unknown := [n for n in given.names if n not in RATIOS]:
        parser.error(f"unknown {', '.join(unknown)}; allowed: {', '.join(RATIOS)}")
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}; allowed: an integer ≥ 1")
    torch.set_num_threads(1)
    found: dict[str, list[Measured]] = {}
    for name in given.names or RATIOS:
        found[name] = RATIOS[name](given.rounds)
        print(
            tabulate([row(x) for x in found[name]], HEADERS, tablefmt="plain", disable_numparse=True),
            flush=True,
        )
    out = given.out or (None if given.names else Path("reports/speed.md"))
    if out is not None:
        write_atomically(out, markdown(found))
        print(f"written: {out}")


if __name__ == "__main__":
    main()
