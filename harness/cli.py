"""The command line: `python -m harness COMMAND`, also installed as `attention-harness`.

Exit codes: 0 pass · 1 a failure or regression · 2 wrong usage or a missing baseline · 3 nothing ran. torch is imported
by the commands that need it, after their arguments are checked.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from harness import registry
from harness.case import Case, cases_folder, load_cases
from harness.deviations import Review, load_deviations, review
from harness.recipe import DEFAULT_RECIPES, RECIPES, Recipe, get_recipe, load_recipe
from harness.records import Record, Status, read_records

if TYPE_CHECKING:
    from harness.pipeline import Unit

FAILURE, USAGE, NOTHING_RAN, INTERRUPTED = 1, 2, 3, 130
SEEDS = 3
LATEST = Path("reports/latest")
RECORDS = "records.jsonl"
F = TypeVar("F", bound=Callable[..., Any])


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Every mistake of use is one line on stderr and exit code 2."""
    try:
        code = cli.main(args=None if arguments is None else list(arguments), standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (ValueError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        code = USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo(
            "interrupted; what was recorded is whole: `run --resume` with the same options goes on", err=True
        )
        code = INTERRUPTED
    sys.exit(code or 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="attention-harness")
def cli() -> None:
    """How accurate is attention in FP32, BF16, FP16 and FP8, measured against an FP64 ground truth?"""


def _names(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Repeated options and comma lists come to the same."""
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())


def _filters(command: F) -> F:
    """The options that choose what runs."""
    listed: dict[str, Any] = {"multiple": True, "callback": _names}
    for option in reversed(
        (
            click.option(
                "--cases", metavar="NAME|PATH.py", help="Case groups or files; default: all.", **listed
            ),
            click.option("--only", metavar="GLOB", help="Case ids, such as 'magnitude/raw-*'.", **listed),
            click.option(
                "--implementations", "--implementation", metavar="NAME", help="Default: all.", **listed
            ),
            click.option(
                "--recipes", "--recipe", metavar="NAME|FILE.toml", help="Default: all but fp64.", **listed
            ),
            click.option(
                "--seeds", type=click.IntRange(1), default=SEEDS, show_default=True, help="Seeds a case."
            ),
            click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N."),
            click.option(
                "--jobs", type=click.IntRange(1), default=None, help="Processes; default: one a core."
            ),
        )
    ):
        command = option(command)
    return command


@cli.command(name="list")
@click.argument("what", type=click.Choice(["all", "implementations", "recipes", "cases"]), default="all")
def list_(what: str) -> None:
    """Show the implementations, recipes and cases there are."""
    from harness.report.text import table

    if what in ("all", "implementations"):
        rows = [[e.name, "emulated" if e.emulated else "", e.summary] for e in registry.table().values()]
        click.echo(table(["implementation", "", "what it is"], rows, wrap=(2,)) + "\n")
    if what in ("all", "recipes"):
        rows = [[r.name, r.digest] for r in RECIPES.values()]
        click.echo(table(["recipe", "definition"], rows, wrap=(1,)) + "\n")
    if what in ("all", "cases"):
        rows = [[c.id, str(c.shape), c.why] for c in load_cases("all")]
        click.echo(table(["case", "[B, H, L, D]", "why"], rows, wrap=(0, 2)))


@cli.command()
@_filters
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=LATEST, show_default=True)
@click.option("--resume", is_flag=True, help="Keep the records that --out holds and run the rest.")
@click.option("--report/--no-report", "reported", default=True, help="Print the report at the end.")
def run(out: Path, resume: bool, reported: bool, **filters: Any) -> int:
    """Run implementations × recipes on cases, record every cell, and report."""
    records = _run(out / RECORDS, resume, **filters)
    return _report(records, out, reported)


@cli.command()
@click.argument("path", type=click.Path(path_type=Path), default=LATEST / RECORDS)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=None, help="Default: beside PATH."
)
@click.option(
    "--throughput", type=click.Path(path_type=Path), default=None, help="A pytest-benchmark JSON file."
)
def report(path: Path, out: Path | None, throughput: Path | None) -> int:
    """Report stored records again, or stored timings with --throughput."""
    if throughput is not None:
        return _report_throughput(throughput, out or throughput.parent)
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; give a records file, or make one with `python -m harness run`"
        )
    return _report(read_records(path), out or path.parent)


@cli.command()
@_filters
@click.option(
    "--records", "stored", type=click.Path(path_type=Path), help="Compare these records; default: run."
)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    default=Path("reports/baselines/smoke.jsonl"),
    show_default=True,
)
@click.option("--update", is_flag=True, help="Write the baseline instead of comparing.")
def gate(stored: Path | None, baseline: Path, update: bool, **filters: Any) -> int:
    """Compare with a stored baseline (of `--cases smoke` by default); exit 1 with a line for each regression."""
    from harness.files import write_atomically
    from harness.gate import compare, make_baseline, read_baseline

    if not update:
        held = read_baseline(baseline)  # before anything runs: a missing baseline is wrong usage
    filters["cases"] = filters["cases"] or ("smoke",)
    records = read_records(stored) if stored else _run(LATEST.with_name("gate") / RECORDS, False, **filters)
    if update:
        if not records:
            return _nothing_ran()
        write_atomically(baseline, make_baseline(records))
        click.echo(f"{baseline}: written from {len(records)} records")
        return 0
    outcome = compare(records, held)
    click.echo(outcome.text)
    return outcome.exit_code


@cli.command()
@click.option("--layers", default="0,7,15,22,29", show_default=True, help="Layers of the model.")
@click.option("--tokens", type=click.IntRange(1), default=256, show_default=True, help="Tokens of the text.")
@click.option(
    "--text", type=click.Path(path_type=Path), default=None, help="Default: the text beside the cases."
)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A safetensors file."
)
def capture(layers: str, tokens: int, text: Path | None, out: Path) -> int:
    """Take Q, K and V after RoPE from SmolLM2-135M (needs the capture extra)."""
    from harness.capture import MissingExtra
    from harness.capture import capture as take

    try:
        numbers = [int(n) for n in layers.split(",")]
    except ValueError:
        raise ValueError(f"layers is {layers!r}; allowed: numbers with commas, such as 0,7,15") from None
    try:
        source = text or cases_folder() / "data" / "text.txt"
        take(source.read_text(encoding="utf-8"), numbers, tokens, out)
    except MissingExtra as error:
        raise ValueError(str(error)) from None
    click.echo(f"{out}: layers {layers}, {tokens} tokens")
    return 0


def _select(cases: tuple[str, ...], only: tuple[str, ...]) -> tuple[Case, ...]:
    chosen = load_cases(cases or "all")
    if only:
        kept = tuple(c for c in chosen if any(fnmatchcase(c.id, pattern) for pattern in only))
        if not kept:
            click.echo(
                f"no case id matches {', '.join(only)}; there are {', '.join(c.id for c in chosen)}", err=True
            )
        return kept
    return chosen


def _run(
    path: Path, resume: bool, cases: tuple[str, ...], only: tuple[str, ...], implementations: tuple[str, ...],
    recipes: tuple[str, ...], seeds: int, device: str, jobs: int | None,
) -> list[Record]:  # fmt: skip
    chosen = _select(cases, only)
    wanted: list[Recipe] | None = [_recipe(r) for r in recipes] or None
    for name in implementations:
        registry.entry(name)
    from harness.devices import use_device
    from harness.journal import record
    from harness.pipeline import plan

    on = use_device(device)
    units = plan(chosen, implementations or None, wanted, device, seeds)
    if jobs is None:
        jobs = _cores() if on.type == "cpu" else 1
    return _with_progress(path, units, jobs, resume, record)


def _with_progress(
    path: Path, units: list[Unit], jobs: int, resume: bool, record: Callable[..., Any]
) -> list[Record]:
    from tqdm import tqdm

    quiet = not sys.stderr.isatty()  # in a log, a line every ten seconds instead of a moving bar
    records: list[Record] = []
    total = sum(u.cells for u in units)
    with tqdm(
        total=total, unit="cell", desc="accuracy", mininterval=10 if quiet else 0.2, ncols=90, leave=not quiet
    ) as bar:
        for unit, batch in record(path, units, jobs, resume):
            records.extend(batch)
            bar.set_postfix_str(unit.case.id, refresh=False)
            bar.update(unit.cells)
    return records


def _recipe(name: str) -> Recipe:
    return load_recipe(Path(name)) if name.endswith(".toml") else get_recipe(name)


def _cores() -> int:
    """Cores this process may use: a container's share, not the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _reviewed(records: list[Record]) -> Review:
    path = cases_folder() / "deviations.toml"
    listed = load_deviations(path) if path.is_file() else ()
    reviewed = review(records, listed, datetime.datetime.now(datetime.UTC).date())
    # An entry is idle when a whole default run gives it nothing to explain; a filtered run cannot tell.
    return reviewed if _whole(records) else replace(reviewed, unmatched=())


def _whole(records: list[Record]) -> bool:
    """Whether these records cover the default run."""
    have = {r.key for r in records}
    return all(
        (case.id, name, recipe, seed) in have
        for case in load_cases("all")
        for seed in range(1 if case.draw.fixed else SEEDS)
        for name in registry.implementations()
        for recipe in DEFAULT_RECIPES
    )


def _report(records: list[Record], out: Path, shown: bool = True) -> int:
    from harness.report import to_text, write_report

    if not records:
        return _nothing_ran()
    reviewed = _reviewed(records)
    made = write_report(records, reviewed, out)
    if shown:
        click.echo(to_text(made))
    click.echo(f"written: {out / 'report.md'}, cells.csv, hazards.csv")
    if not reviewed.ok:
        return FAILURE
    ran = any(r.status not in (Status.REFUSED, Status.INCONCLUSIVE) for r in records)
    return 0 if ran else _nothing_ran()


def _nothing_ran() -> int:
    click.echo("nothing ran: the selection is empty, or every cell was refused or inconclusive", err=True)
    return NOTHING_RAN


def _report_throughput(path: Path, out: Path) -> int:
    from harness.files import write_atomically
    from harness.report import read_timings, timings_markdown, timings_text

    timings = read_timings(path)
    if not timings:
        return _nothing_ran()
    write_atomically(out / "throughput.md", timings_markdown(timings))
    click.echo(timings_text(timings))
    click.echo(f"written: {out / 'throughput.md'}")
    return 0
