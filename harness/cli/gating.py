"""`gate`: a run against the baseline of its class of machine, and how that baseline changes."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from harness.case import cases_folder
from harness.cli.commands import LATEST, RECORDS
from harness.cli.exits import nothing_ran
from harness.cli.group import cli
from harness.cli.paths import FILE, PLACE
from harness.cli.running import run_cells
from harness.cli.selection import Selection, filters, select
from harness.cli.slower import check_old, with_times
from harness.deviations import Deviation, Review, load_deviations, review
from harness.gate import (
    Baseline,
    Outcome,
    Pooled,
    choose,
    compare,
    differences,
    machine_class,
    make_baseline,
    pool_records,
    read_baseline,
    read_folder,
    scope,
)
from harness.gate.scope import ALL, Selected
from harness.records import Record, read_records, why_empty

BASELINES = Path("reports/baselines")


@cli.command(short_help="Compare with a stored baseline.")
@filters
@click.option("--records", "stored", type=FILE, help="Compare these records instead of running.")
@click.option(
    "--baseline",
    type=PLACE,
    default=BASELINES,
    show_default=True,
    metavar="FOLDER|FILE",
    help="A baseline, or a folder of one for each class of machine.",
)
@click.option("--update", is_flag=True, help="Write the baseline instead of comparing.")
@click.option(
    "--reason", metavar="TEXT", help="Why the baseline changes; kept in it. Needed where there is one."
)
@click.option(
    "--old", type=PLACE, help="Another checkout: also time what passes against it, on this machine."
)
def gate(
    stored: Path | None, baseline: Path, update: bool, reason: str | None, old: Path | None, **chosen: Any
) -> int:
    """Compare with a stored baseline, of the smoke cases unless --cases says otherwise; exit 1 with a line for each
    regression.

    Cells of the baseline that --cases, --only, -i or -r leave out are not compared, and --update leaves them as they
    are. With --old, what passes under FP32 is timed too, by turns with the same of another checkout; what is slower by
    more than 5 %, by its whole interval, is a regression.
    """  # fmt: skip
    check_old(old, stored, update, bool(chosen["kernels"]))
    reason = " ".join((reason or "").split())
    if reason and not update:
        raise ValueError("--reason was given without --update, which it is for")
    if not update:
        held = _held(baseline)  # before anything runs: a missing baseline is wrong usage
    if stored is not None and not stored.exists():
        raise ValueError(f"{stored} does not exist; make one with `python -m harness run`")
    selection, selected = _selected(chosen)
    if update and stored is None and selection.cells:
        _check_reason(_file(baseline, _class_here(selection.device)), reason)  # before anything runs
    if stored is None:
        records = run_cells(LATEST.with_name("gate") / RECORDS, selection, False)
    else:
        read = read_records(stored)
        if not read:
            return nothing_ran(why_empty(stored))
        records = [r for r in read if selected(r.group_key)]
    if not records:
        return nothing_ran("" if stored is None else f"{stored} holds no selected records")
    if update:
        _update(_file(baseline, _class_of(records)), records, reason, selected)
        return 0
    path = choose(held, _class_of(records)) if len(held) > 1 else next(iter(held))
    click.echo(f"baseline: {path}", err=True)
    outcome, timed = _with_deviations(compare(records, held[path].cells, selected), records), None
    if old is not None:
        outcome, timed = with_times(outcome, records, old, selection.device)
    click.echo(outcome.text, nl=False)
    if timed == 0 and not outcome.exit_code:
        return nothing_ran(f"nothing was timed against {old}: see the notes above")
    return outcome.exit_code


def _selected(chosen: dict[str, Any]) -> tuple[Selection, Selected]:
    """What runs, and what is compared: all that the baseline holds where no filter is given."""
    given = {name: bool(chosen[name]) for name in ("cases", "recipes")}
    filtered = any(given.values()) or chosen["only"] or chosen["implementations"]
    selection = select(**{**chosen, "cases": chosen["cases"] or ("smoke",)})
    if not filtered:
        return selection, ALL
    return selection, scope(
        selection.cases if given["cases"] else None,
        chosen["only"],
        chosen["implementations"],
        [r.name for r in selection.recipes] if given["recipes"] else (),
    )


def _held(baseline: Path) -> Mapping[Path, Baseline]:
    return read_folder(baseline) if _is_folder(baseline) else {baseline: read_baseline(baseline)}


def _is_folder(baseline: Path) -> bool:
    return baseline.is_dir() or not (baseline.exists() or baseline.suffix)


def _file(baseline: Path, name: str) -> Path:
    """The file that an update writes: in a folder, the one that the gate would choose for this class."""
    if not _is_folder(baseline):
        return baseline
    made = baseline / f"{name}.jsonl"
    if made.exists() or not baseline.is_dir() or not any(baseline.glob("*.jsonl")):
        return made
    held = read_folder(baseline)
    path = choose(held, name)
    return path if held[path].machine_class == name else made


def _class_of(records: list[Record]) -> str:
    """Raises ValueError for records of several classes of machine."""
    names = sorted({machine_class(r.machine) for r in records})
    if len(names) > 1:
        raise ValueError(
            f"the records are of {', '.join(names)}; give the gate those of one class of machine"
        )
    return names[0]


def _class_here(device: str) -> str:
    """Of this machine. torch is loaded, which takes seconds."""
    from harness.interrupts import interrupts_held

    with interrupts_held():  # what torch imports has swallowed an interrupt
        from harness.devices import use_device
        from harness.machine import machine

    use_device(device)
    return machine_class(machine(device))


def _check_reason(path: Path, reason: str) -> None:
    if path.exists() and not reason:
        raise ValueError(f'{path} exists: say why it changes with --reason "…", which it keeps')


def _update(path: Path, records: list[Record], reason: str, selected: Selected) -> None:
    """Print what the new baseline moves, then write it."""
    from harness.files import write_atomically

    _check_reason(path, reason)
    earlier, moved, reason = None, "", reason or "the first baseline of this class of machine"
    kept: tuple[Pooled, ...] = ()
    if path.exists():
        earlier = read_baseline(path)
        kept = tuple(cell for key, cell in earlier.cells.items() if not selected(key))
        compared = {key: cell for key, cell in earlier.cells.items() if selected(key)}
        moved, *rest = differences(pool_records(records), compared)
        click.echo("\n".join([moved, *rest]))
        if kept:
            click.echo(f"{len(kept)} cells that were not selected stay as they are")
    write_atomically(path, make_baseline(records, reason, moved, earlier, kept))
    click.echo(f"{path}: written from {len(records)} records")


def _with_deviations(outcome: Outcome, records: list[Record]) -> Outcome:
    """With the known deviations that cover these cells and have expired, or will soon."""
    path = cases_folder() / "deviations.toml"
    listed = load_deviations(path) if path.is_file() else ()
    found: Review = review(records, listed, datetime.datetime.now(datetime.UTC).date())
    return replace(
        outcome,
        expired=tuple(
            f"known deviation {_entry(d)}: renew it with a reason, or mend it" for d in found.expired
        ),
        notes=(*outcome.notes, *(f"known deviation {_entry(d)}" for d in found.expiring)),
    )


def _entry(deviation: Deviation) -> str:
    from harness.report.words import clean

    return f"{clean(str(deviation))} in cases/deviations.toml, expires {deviation.expires}"
