"""`evidence`: where a recipe's error arises, and what it does to a model's words."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click

from harness.cli.exits import nothing_ran
from harness.cli.group import cli
from harness.cli.paths import FILE
from harness.cli.progress import progress
from harness.cli.selection import SEEDS, Selection, many, select
from harness.evidence import Attribution, Evidence, read_evidence, write_evidence
from harness.files import write_atomically

# Real activations, outliers, and a first key that holds most of every row.
CASES = ("real/*", "outliers/fa3", "sinks/heavy-first-key-1.3")
IMPLEMENTATION = "online_softmax"
TOKENS = "512,2048"


@cli.command(short_help="Attribute errors to stages; --quality: what a model says.")
@many("--cases", metavar="NAME|FILE.py", help="Case files.  [default: real activations and two hard cases]")
@many("--only", metavar="GLOB", help="Case ids of these files, such as 'real/*'.")
@many("-i", "--implementations", "--implementation", metavar="NAME", help=f"[default: {IMPLEMENTATION}]")
@many("-r", "--recipes", "--recipe", metavar="NAME|FILE.toml", help="[default: as `run`]")
@click.option("--seeds", type=click.IntRange(1), default=SEEDS, show_default=True, metavar="N")
@click.option("--attribution/--no-attribution", default=True, help="Where errors arise.  [default: on]")
@click.option(
    "--quality/--no-quality", default=False,
    help="Run SmolLM2 with its attention in each recipe (needs the capture extra; minutes a recipe).  [default: off]",
)  # fmt: skip
@click.option("--tokens", default=TOKENS, show_default=True, help="Lengths of text for --quality.")
@click.option("--keep", is_flag=True, help="Keep what --out holds of other cells.")
@click.option("--page", type=FILE, default=None, help="Write what the model says as Markdown, too.")
@click.option("--out", type=FILE, default=Path("reports/latest/evidence.jsonl"), show_default=True)
def evidence(
    cases: tuple[str, ...], only: tuple[str, ...], implementations: tuple[str, ...], recipes: tuple[str, ...],
    seeds: int, attribution: bool, quality: bool, tokens: str, keep: bool, page: Path | None, out: Path,
) -> int:  # fmt: skip
    """Say where each recipe's error arises, stage by stage, and with --quality what it does to a model's words.

    Prints tables and writes one JSON line each to --out. A run that is killed leaves what was there.
    """
    names = implementations or (IMPLEMENTATION,)
    lengths = _lengths(tokens) if quality else ()
    chosen = select(cases, only or (() if cases else CASES), names, recipes, seeds, "cpu", 1)
    start, held = time.monotonic(), _held(out, keep)
    found: list[Evidence] = []

    def write(old: list[Evidence]) -> None:
        new = {_key(e): e for e in found}
        write_evidence(out, [*(e for e in old if _key(e) not in new), *new.values()])

    if attribution:
        found += _attributions(chosen, names)
    if quality:
        for one in _qualities(chosen, names, lengths):
            found.append(one)
            write(held)  # minutes each: a run that is killed has what it found, beside what was there
    if not found:
        return nothing_ran("no case, or nothing but refusals")
    from harness.report.evidence import quality_page, to_text

    write(held if keep else [])
    click.echo(to_text(found), nl=False)
    if page is not None and quality:
        command = f"python -m harness evidence --quality -r {','.join(r.name for r in chosen.recipes)}"
        took = time.monotonic() - start
        write_atomically(page, quality_page(found, f"{command} --tokens {tokens}", took))
    click.echo(f"written: {out}" + (f", {page}" if page and quality else ""))
    return 0


def _held(out: Path, keep: bool) -> list[Evidence]:
    """What the file holds; nothing where it is damaged and not to be kept."""
    try:
        return read_evidence(out) if out.exists() else []
    except ValueError:
        if keep:
            raise
        return []


def _lengths(tokens: str) -> tuple[int, ...]:
    try:
        lengths = tuple(dict.fromkeys(int(n) for n in tokens.split(",")))
    except ValueError:
        raise ValueError(f"tokens is {tokens!r}; allowed: numbers with commas, such as {TOKENS}") from None
    from harness.quality import shipped_text

    most = len(shipped_text().ids)
    if wrong := [n for n in lengths if not 2 <= n <= most]:
        raise ValueError(f"tokens is {wrong[0]}; allowed: 2 to {most}, which the text has")
    return lengths


def _attributions(chosen: Selection, names: tuple[str, ...]) -> Iterator[Attribution]:
    """Of every case, implementation and recipe; what cannot be is told in a line."""
    if not chosen.cases:
        return
    click.echo("loading torch", err=True)
    from harness.attribution import algorithm, attributions

    found = {name: algorithm(name) for name in names}
    cells = len(chosen.cases) * len(names) * len(chosen.recipes)
    with progress(cells) as shown:
        for case in chosen.cases:
            if case.layer is not None:
                click.echo(f"left out: {case.id} is a whole layer", err=True)
                shown.update(len(names) * len(chosen.recipes), case.id)
                continue
            for name, its in found.items():
                left = list(chosen.recipes)
                for recipe in chosen.recipes:
                    if refused := its.refusals(case.spec, case.shape, recipe, tuple(case.extras)):
                        click.echo(f"left out: {case.id}, {recipe.name}: {'; '.join(refused)}", err=True)
                        left.remove(recipe)
                        shown.update(1, case.id)
                for one in attributions(case, [name], left, chosen.seeds):
                    shown.update(1, f"{case.id} {one.recipe}")
                    yield one


def _qualities(chosen: Selection, names: tuple[str, ...], lengths: tuple[int, ...]) -> Iterator[Evidence]:
    """Of every implementation, recipe and length. Without the extra: one line, and nothing."""
    from harness.capture import load_model
    from harness.optional import MissingExtra
    from harness.quality import passes, qualities, shipped_text

    try:
        model = load_model()
    except MissingExtra as error:
        click.echo(f"no quality: {error}", err=True)
        return
    total = passes(len(chosen.recipes), lengths, model.layers) * len(names)
    with progress(total, "layer") as shown:
        for name in names:
            yield from qualities(
                model, shipped_text(), chosen.recipes, name, lengths, lambda place: shown.update(1, place)
            )


def _key(e: Evidence) -> tuple[str, ...]:
    """What an entry is of."""
    if isinstance(e, Attribution):
        return (e.kind, e.case, e.implementation, e.recipe)
    return (e.kind, e.model, e.text_hash, e.implementation, e.recipe)
