"""The commands that have no module of their own. Each checks its arguments, then imports what it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from harness import registry
from harness.case import cases_folder, load_cases
from harness.cli.exits import nothing_ran
from harness.cli.group import cli
from harness.cli.outputs import F, outputs, take
from harness.cli.paths import FILE, FOLDER
from harness.cli.reporting import refuse_baseline, report_records, report_throughput
from harness.cli.running import run_cells
from harness.cli.selection import filters, select
from harness.collector import leave_to_the_system, no_collection
from harness.optional import MissingExtra, need
from harness.recipe import RECIPES
from harness.records import read_records

LATEST = Path("reports/latest")
RECORDS = "records.jsonl"


@cli.command(name="list", short_help="Show implementations, recipes and cases.")
@click.argument("what", type=click.Choice(["all", "implementations", "recipes", "cases"]), default="all")
@click.option("--options", is_flag=True, help="Show instead which implementation takes which option.")
def list_(what: str, options: bool) -> None:
    """Show the implementations, recipes and cases there are."""
    from harness.text_table import table

    if options:
        if what not in ("all", "implementations"):
            raise ValueError(f"--options was given with {what}; allowed: implementations, or nothing")
        from harness.option_table import option_table, to_text

        click.echo(to_text(option_table()), nl=False)
        return

    if what in ("all", "implementations"):
        rows = [[e.name, _when(e), _what(e)] for e in registry.table().values()]
        click.echo(table(["implementation", "", "what it is"], rows, wrap=(2,)) + "\n")
    if what in ("all", "recipes"):
        rows = [[r.name, r.digest] for r in RECIPES.values()]
        click.echo(table(["recipe", "definition"], rows, wrap=(1,)) + "\n")
    if what in ("all", "cases"):
        rows = [[c.id, str(c.shape), c.why] for c in load_cases("all")]
        click.echo(table(["case", "[B, H, L, D]", "why"], rows, wrap=(0, 2)))


def _when(e: registry.Entry) -> str:
    """Whether a run takes it where none are named."""
    return "on " + ", ".join(e.groups) if e.default and e.groups else "" if e.default else "by name"


def _what(e: registry.Entry) -> str:
    reason = registry.unavailable(e)
    return f"{e.summary}; not here: {reason}" if reason else e.summary


def _plots(default: bool) -> Callable[[F], F]:
    told = "Draw tradeoff.svg: accuracy beside cost."
    return click.option("--plots/--no-plots", default=default, show_default=True, help=told)


@cli.command(short_help="Run implementations × recipes on cases, and report.")
@filters
@click.option("--out", type=FOLDER, default=LATEST, show_default=True, help="Where records and report go.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with a run that was killed: keep its records in --out, of what is selected now.",
)
@click.option("--report/--no-report", "reported", default=True, help="Print the report at the end.")
@_plots(True)
@outputs
def run(out: Path, resume: bool, reported: bool, plots: bool, **chosen: Any) -> int:
    """Run implementations × recipes on cases, record every cell, and report.

    Options that take a NAME may be repeated, or take several with commas.
    """
    more = take(chosen)
    records = run_cells(out / RECORDS, select(**chosen), resume)
    return report_records(records, out, reported, more=more, plots=plots)


@cli.command(short_help="Report stored records or timings again.")
@click.argument("path", type=FILE, default=LATEST / RECORDS)
@click.option("--out", type=FOLDER, default=None, help="Where the report goes.  [default: beside PATH]")
@click.option("--throughput", type=FILE, default=None, help="A pytest-benchmark JSON file, instead of PATH.")
@_plots(False)
@outputs
def report(path: Path, out: Path | None, throughput: Path | None, plots: bool, **chosen: Any) -> int:
    """Report stored records again, or stored timings with --throughput. A plot that a run drew of the same figures
    stays; --plots draws it."""
    more = take(chosen)
    if plots:  # asked for, so that a report without them would not do
        _need("--plots", "report", "matplotlib")
    if throughput is not None:
        return report_throughput(throughput, out or throughput.parent)
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; give a records file, or make one with `python -m harness run`"
        )
    if out is None and not path.is_file():
        raise ValueError(
            f"{path} is no file, beside which the report could stand; say with --out FOLDER where it goes"
        )
    with no_collection():
        try:
            records = read_records(path)
        except ValueError:
            refuse_baseline(path)
            raise
        code = report_records(records, out or path.parent, source=path, more=more, plots=plots)
        leave_to_the_system(records)
    return code


def _need(what: str, extra: str, *modules: str) -> None:
    try:
        need(what, extra, *modules)
    except MissingExtra as error:
        raise ValueError(str(error)) from None


@cli.command(short_help="Hold the FP64 truth against ball arithmetic.")
@click.option(
    "--cases", default="all", show_default=True, metavar="NAME|FILE.py", help="Case files, with commas."
)
@click.option("--out", type=FOLDER, default=Path("reports"), show_default=True, help="Where the page goes.")
def certify(cases: str, out: Path) -> int:
    """Hold the FP64 truth of every small case against ball arithmetic (needs the certify extra); exit 1 where it is not
    inside."""
    _need("certify", "certify")
    chosen = load_cases([c.strip() for c in cases.split(",")])
    from harness.certify import certify_cases
    from harness.cli.progress import progress
    from harness.files import write_atomically
    from harness.report import certificates
    from harness.text_table import table

    rows: list[Any] = []
    with progress(len(chosen)) as shown:
        for case in chosen:
            rows += certify_cases([case])
            shown.update(1, case.id)
    write_atomically(out / "certificates.md", certificates.to_markdown(rows))
    click.echo(table(certificates.HEADERS, map(certificates.cells, rows), wrap=(0, 7), right=(2, 3, 4, 5, 6)))
    click.echo(f"{certificates.summary(rows)}\nwritten: {out / 'certificates.md'}")
    return 0 if rows and all(r.certificate.contained for r in rows) else 1 if rows else nothing_ran()


@cli.command(short_help="Take Q, K and V from a small model.")
@click.option("--layers", default="0,7,15,22,29", show_default=True, help="Layers of the model.")
@click.option("--tokens", type=click.IntRange(1), default=256, show_default=True, help="Tokens of the text.")
@click.option("--text", type=FILE, default=None, help="A text file.  [default: the text beside the cases]")
@click.option("--out", type=FILE, required=True, help="A safetensors file.")
def capture(layers: str, tokens: int, text: Path | None, out: Path) -> int:
    """Take Q, K and V after RoPE from SmolLM2-135M (needs the capture extra)."""
    try:
        numbers = [int(n) for n in layers.split(",")]
    except ValueError:
        raise ValueError(f"layers is {layers!r}; allowed: numbers with commas, such as 0,7,15") from None
    source = (text or cases_folder() / "data" / "text.txt").read_text(encoding="utf-8")
    from harness.capture import capture as take
    from harness.optional import MissingExtra

    try:
        take(source, numbers, tokens, out)
    except MissingExtra as error:
        raise ValueError(str(error)) from None
    click.echo(f"{out}: layers {layers}, {tokens} tokens")
    return 0
