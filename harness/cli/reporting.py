"""From records to what a reader sees, and to an exit code."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import click

from harness import registry
from harness.case import cases_folder, load_cases
from harness.cli.exits import FAILURE, nothing_ran
from harness.cli.outputs import Outputs
from harness.cli.selection import SEEDS
from harness.collector import no_collection
from harness.deviations import Review, load_deviations, review
from harness.recipe import DEFAULT_RECIPES
from harness.records import Record, Status, why_empty


def report_records(
    records: list[Record],
    out: Path,
    shown: bool = True,
    source: Path | None = None,
    more: Outputs | None = None,
    plots: bool = True,
) -> int:
    """Write the report into `out` and what `more` asks for, print it, and judge the run. `source`: the file the records
    come from. `plots`: draw what is drawn."""
    from harness.report import latest, to_text, write_report

    if not records:
        return nothing_ran("" if source is None else why_empty(source))
    with no_collection():
        reviewed = _reviewed(latest(records))
        made = write_report(records, reviewed, out, plots)
        written = (more or Outputs()).write(records, reviewed, made)
        if shown:
            click.echo(to_text(made))
    beside = made.tradeoff
    plot = [beside.figure] if beside is not None and beside.figure else []
    names = [str(out / "report.md"), "cells.csv", "cases.csv", "hazards.csv", *plot, *map(str, written)]
    click.echo(f"written: {', '.join(names)}")
    if beside is not None and beside.note:
        click.echo(f"no plot beside the tables: {beside.note}")
    if not reviewed.ok:
        return FAILURE
    ran = any(r.status not in (Status.REFUSED, Status.INCONCLUSIVE) for r in records)
    return 0 if ran else nothing_ran()


def refuse_baseline(path: Path) -> None:
    """Raise ValueError where what should hold records is a gate's baseline."""
    from harness.gate import read_baseline

    if not path.is_file():
        return  # a pipe that was read: another reading would wait
    try:
        cells = len(read_baseline(path).cells)
    except (ValueError, OSError):
        return
    if cells:
        raise ValueError(
            f"{path} is a gate's baseline: figures of {cells} cells, without records; give the records of a run, such"
            " as reports/latest/records.jsonl, which `python -m harness run` writes"
        )


def report_throughput(path: Path, out: Path) -> int:
    """The same for timings that pytest-benchmark stored."""
    from harness.files import write_atomically
    from harness.report import read_context, read_timings, timings_markdown, timings_text

    timings = read_timings(path)
    if not timings:
        return nothing_ran(f"{path} holds no benchmarks")
    context = read_context(path)
    write_atomically(out / "throughput.md", timings_markdown(timings, context))
    click.echo(timings_text(timings, context))
    click.echo(f"written: {out / 'throughput.md'}")
    return 0


def _reviewed(records: list[Record]) -> Review:
    path = cases_folder() / "deviations.toml"
    listed = load_deviations(path) if path.is_file() else ()
    reviewed = review(records, listed, datetime.datetime.now(datetime.UTC).date())
    # An entry is idle when a whole default run gives it nothing to explain; a filtered run cannot tell.
    return reviewed if not reviewed.unmatched or _whole(records) else replace(reviewed, unmatched=())


def _whole(records: list[Record]) -> bool:
    """Whether these records cover the default run."""
    have = {r.key for r in records}
    return all(
        (case.id, name, recipe, seed) in have
        for case in load_cases("all")
        for seed in range(case.draws(SEEDS))
        for name in registry.default_implementations(case.group)
        for recipe in filter(case.chooses, DEFAULT_RECIPES)
    )
