"""`review`: the document that quantisation reviewers sign, from records and evidence. Nothing is measured here."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path
from typing import Any

import click

from harness.case import cases_folder
from harness.cli.exits import nothing_ran
from harness.cli.group import cli
from harness.cli.paths import FILE, FOLDER
from harness.deviations import load_deviations
from harness.deviations import review as sorted_by
from harness.evidence import Evidence, read_evidence
from harness.optional import MissingExtra
from harness.recipe import RECIPES, Recipe, load_recipe
from harness.records import Record, iter_records, why_empty

RECORDS = Path("reports/latest/records.jsonl")


@cli.command(short_help="Write the document that reviewers sign.")
@click.argument("records", type=FILE, default=RECORDS)
@click.option(
    "-r",
    "--recipes",
    "--recipe",
    multiple=True,
    metavar="NAME|FILE.toml",
    help="What is reviewed; the first is the baseline.  [default: those of RECORDS]",
)
@click.option("--evidence", "found", type=FILE, multiple=True, help="What `harness evidence` measured.")
@click.option(
    "--real", multiple=True, metavar="GLOB", help="Cases that hold real activations.  [default: real/*]"
)
@click.option(
    "--model", default="llama-3.1-8b", show_default=True, metavar="NAME", help="Whose cost is modelled."
)
@click.option(
    "--context", default="32K", show_default=True, metavar="TOKENS", help="Keys of the decode step."
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences.")
@click.option("--bandwidth", default="2TB/s", show_default=True, metavar="RATE", help="Of memory.")
@click.option("--flops", metavar="RATE", help="Of matrix products, such as 989TFLOP/s.")
@click.option("--out", type=FOLDER, help="Where review.md and review.html go.  [default: beside RECORDS]")
def review(
    records: Path, recipes: tuple[str, ...], found: tuple[Path, ...], real: tuple[str, ...], out: Path | None,
    **given: Any,
) -> int:  # fmt: skip
    """Write review.md and review.html: what a recipe costs and where, with a recommendation by a stated rule.

    Exit 0 says that the document was written, whatever it recommends.
    """
    from harness.cost.settings import settings
    from harness.report.review import MARKDOWN, PAGE, REAL, Asked, check_extra, write_review

    try:
        check_extra()
    except MissingExtra as error:
        raise ValueError(str(error)) from None
    named, defined = _definitions(recipes)
    setting = settings({name: value for name, value in given.items() if value is not None})
    for path in (records, *found):
        if not path.exists():
            command = "evidence" if path in found else "run"
            raise ValueError(f"{path} does not exist; make one with `python -m harness {command}`")
        if not path.is_file():
            raise ValueError(f"{path} is no file; give one: the document names what it rests on by a SHA-256")
    held = list(iter_records(records))
    if not held:
        return nothing_ran(why_empty(records))
    chosen = _chosen(held, named, records)
    defined.update({name: RECIPES[name] for name in chosen if name in RECIPES and name not in defined})
    evidence = [e for path in found for e in read_evidence(path)]
    sources = [_source(path) for path in (records, *found)]
    asked = Asked(
        chosen, tuple(defined.values()), setting, tuple(_split(real)) or REAL, tuple(s for s in sources)
    )
    folder = out or records.parent
    write_review(held, _listed(held), evidence, asked, folder)
    click.echo(f"written: {folder / MARKDOWN}, {PAGE}{_unused(evidence, chosen)}")
    return 0


def _split(values: tuple[str, ...]) -> list[str]:
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def _definitions(given: tuple[str, ...]) -> tuple[list[str], dict[str, Recipe]]:
    """Names in the order given, and the recipes of those that are files."""
    names, defined = [], {}
    for name in _split(given):
        if name.endswith(".toml"):
            recipe = load_recipe(Path(name))
            defined[recipe.name] = recipe
            name = recipe.name
        names.append(name)
    if given and not names:
        raise ValueError("no recipe is given; leave --recipes out for all that the records hold")
    return list(dict.fromkeys(names)), defined


def _chosen(held: list[Record], named: list[str], path: Path) -> tuple[str, ...]:
    """Those named, or all in the order of the built-in table. Raises ValueError for one without records."""
    met = dict.fromkeys(r.recipe for r in held)
    for name in named:
        if name not in met:
            raise ValueError(
                f"{path} has no record of recipe {name!r}; it has {', '.join(met)}; measure it with"
                f" `python -m harness run --recipes {name}`"
            )
    return tuple(named) or (*(r for r in RECIPES if r in met), *(r for r in met if r not in RECIPES))


def _listed(held: list[Record]) -> Any:
    path = cases_folder() / "deviations.toml"
    listed = load_deviations(path) if path.is_file() else ()
    made = max(r.created for r in held)[
        :10
    ]  # the document's own day: the same records give the same document
    try:
        day = datetime.date.fromisoformat(made)
    except ValueError:
        raise ValueError(f"a record was created {made!r}; allowed: a date such as 2026-01-31T…") from None
    return sorted_by(held, listed, day)


def _source(path: Path) -> Any:
    from harness.report.review import Source

    data = path.read_bytes()
    return Source(path.name, hashlib.sha256(data).hexdigest(), data.count(b"\n"))


def _unused(evidence: list[Evidence], chosen: tuple[str, ...]) -> str:
    others = sorted({e.recipe for e in evidence} - set(chosen))
    return f" (evidence of {', '.join(others)} is not used)" if others else ""
