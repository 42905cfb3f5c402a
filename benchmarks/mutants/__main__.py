"""`python -m benchmarks.mutants`: run the study and, of a whole one, write its report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.mutants.figure import svg
from benchmarks.mutants.report import OURS, is_above, is_mutant, markdown, naming, rejects
from benchmarks.mutants.study import run, units
from harness.files import write_atomically

REPORTS = Path("reports")


def main(arguments: list[str] | None = None) -> int:
    """0: all mutants above the limit are killed and no honest run fails; 1: otherwise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=(__doc__ or "").strip())
    parser.add_argument(
        "--full", action="store_true", help="every run (an hour); goes on where it was stopped"
    )
    parser.add_argument(
        "--file", type=Path, help="the records (default: runs/mutants.jsonl, runs/mutants-ci.jsonl)"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the records that are there")
    parser.add_argument("--write", action="store_true", help="write reports/mutants.md from a short run too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = options.file or Path("runs", "mutants.jsonl" if options.full else "mutants-ci.jsonl")
    # A short run is a check of this tree: old records would say nothing of it.
    fresh = options.fresh or (not options.full and options.file is None)
    records = run(path, units(options.full), fresh, every=1 if options.full else 4)
    if options.full or options.write:
        write_atomically(REPORTS / "mutants.svg", svg(records))
        write_atomically(REPORTS / "mutants.md", markdown(records, "mutants.svg"))
    above = [r for r in records if is_above(r)]
    missed = [r for r in above if not rejects(r, OURS)]
    alarms = [r for r in records if not is_mutant(r) and rejects(r, OURS)]
    said = [naming(r) for r in above if rejects(r, OURS)]
    asked, told = (sum(x not in out for x in said) for out in (("unasked",), ("unasked", "unknown", "wrong")))
    print(
        f"{len(above)} runs of mutants above the limit: {len(above) - len(missed)} killed; of {asked} {told} named"
    )
    print(f"{sum(not is_mutant(r) for r in records)} honest runs: {len(alarms)} failed")
    for what, found in (("missed", missed), ("false alarm", alarms)):
        for r in found:
            print(f"{what}: {' · '.join(r['unit'])}")
    return 1 if missed or alarms else 0


if __name__ == "__main__":
    sys.exit(main())
