"""From a selection to its records on disk. torch is loaded here, after everything else has been checked,
or, by several processes, in these alone."""

from __future__ import annotations

from pathlib import Path

import click

from harness import registry
from harness.cli.exits import RunFailed
from harness.cli.progress import progress
from harness.cli.selection import Selection
from harness.interrupts import interrupts_held
from harness.records import Record


def run_cells(path: Path, chosen: Selection, resume: bool) -> list[Record]:
    """Every cell's record, appended to `path` as it comes. Nothing is written when nothing is chosen.

    Raises ValueError for a device that is not here or a damaged `path`; RunFailed when a worker process dies.
    """
    if not chosen.cells:
        return []
    click.echo(f"{chosen}; loading torch", err=True)  # which takes seconds
    from concurrent.futures import BrokenExecutor

    from harness.journal import record
    from harness.unit import plan

    if chosen.device != "cpu":
        with interrupts_held():  # what torch imports has swallowed an interrupt
            from harness.devices import use_device

        use_device(chosen.device)
    for name in filter(registry.is_kernel, chosen.implementations or ()):
        takes = registry.get(name).takes  # raises for a kernel that cannot be loaded, before anything runs
        click.echo(f"{name} takes {', '.join(takes) or 'no options'}", err=True)
    recipes = chosen.recipes if chosen.named else None
    units = plan(chosen.cases, chosen.implementations, recipes, chosen.device, chosen.seeds)
    records: list[Record] = []
    finished = 0
    recorded = record(
        path, units, chosen.jobs, resume, lambda line: click.echo(line, err=True), chosen.executor
    )
    try:
        with progress(chosen.cells) as shown:
            for unit, batch in recorded:
                records.extend(batch)
                finished += 1
                shown.update(unit.cells, unit.case.id)
    except BrokenExecutor:
        retried = ", more often than is retried" if chosen.executor else ""
        raise RunFailed(
            f"a worker process died (killed, or out of memory{retried}) with {finished} of {len(units)} units recorded"
            f" in {path}: what is there is whole; try fewer --jobs, with --resume where the command has it"
        ) from None
    return records
