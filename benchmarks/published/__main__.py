"""Measure what papers print, and say which figures are the same.

    python -m benchmarks.published                # sizes for continuous integration: reports/published.md
    python -m benchmarks.published --full         # the papers' sizes: reports/published-full.md
    python -m benchmarks.published --only golden  # nothing is written without --out

Exit codes: 0 all within their bands, 1 a figure outside, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.published import (
    flash_attention_3,
    golden,
    hopper,
    lazy_rescale,
    p_cast,
    pasa,
    sage,
    tied_maxima,
    worked_example,
)  # fmt: skip
from benchmarks.published.report import markdown, summary, table
from benchmarks.published.rows import Paper, Row
from harness.files import write_atomically

MODULES = (
    worked_example, flash_attention_3, golden, p_cast, tied_maxima, pasa, sage, hopper, lazy_rescale,
)  # fmt: skip
NAMES = tuple(m.PAPER.name for m in MODULES)


def chosen(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [n for n in names if n not in NAMES]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; allowed: {', '.join(NAMES)}")
    return names


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "published", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--full", action="store_true", help="the papers' sizes instead of small ones")
    parser.add_argument("--only", type=chosen, default=NAMES, metavar="NAMES", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, help="where the page is written")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = options(arguments)
    started = time.monotonic()
    found: list[tuple[Paper, list[Row]]] = []
    for module in (m for m in MODULES if m.PAPER.name in given.only):
        begun = time.monotonic()
        found.append((module.PAPER, list(module.rows(given.full))))
        seconds = time.monotonic() - begun
        print(
            f"{module.PAPER.title} · {module.PAPER.source} · {seconds:.0f} s\n{table(found[-1][1])}\n",
            flush=True,
        )
    print(summary(found))
    out = given.out
    if out is None and set(given.only) == set(NAMES):
        out = Path("reports", "published-full.md" if given.full else "published.md")
    if out is not None:
        write_atomically(out, markdown(found, given.full, time.monotonic() - started))
        print(f"written to {out}")
    return 0 if all(r.within for _, rows in found for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
