"""Commands for tensors and questions from outside: `judge`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from harness.cli.exits import FAILURE, NOTHING_RAN
from harness.recipe import RECIPES, Recipe, get_recipe, load_recipe
from harness.records import Status, write_records
from harness.report.text import WIDTH, table

if TYPE_CHECKING:
    from harness.judge_file import FileVerdict
    from harness.places import Place

FILE = click.Path(path_type=Path, dir_okay=False)
SHOWN = 8  # heads told one by one
_CODES = {Status.PASS: 0, Status.FAIL: FAILURE, Status.INCONCLUSIVE: NOTHING_RAN}
F = TypeVar("F", bound=Callable[..., Any])

_RULES: tuple[Callable[[Any], Any], ...] = (
    click.option("--causal/--no-causal", default=None, help="Whether rows see later keys."),
    click.option("--align", metavar="NAME", help="bottom-right or top-left."),
    click.option("--window", metavar="LEFT,RIGHT", help="Keys seen to either side: 127,0 or 64,none."),
    click.option("--scale", metavar="NUMBER", help="[default: head_dim^-½]"),
    click.option("--softcap", metavar="NUMBER"),
    click.option("--empty-row", metavar="NAME", help="zero or nan: a row that sees no key."),
)


def _rules(command: F) -> F:
    for option in reversed(_RULES):
        command = option(command)
    return command


def recipe_of(name: str) -> Recipe:
    """A recipe by name or from a TOML file."""
    return load_recipe(Path(name)) if name.endswith(".toml") else get_recipe(name)


@click.command(short_help="Judge tensors that another program wrote.")
@click.argument("path", type=FILE)
@_rules
@click.option("-r", "--recipe", metavar="NAME|FILE.toml", help="[default: by the types of q, k and v]")
@click.option("--layout", metavar="NAME", help="bhsd, bshd or thd.  [default: bhsd]")
@click.option("--fp8", metavar="NAME", help="What bytes hold: e4m3fn, e4m3fnuz or e5m2.")
@click.option(
    "--quantize", is_flag=True, help="q, k and v are values before their rounding to the recipe's storage."
)
@click.option("--budget", type=float, default=None, help="rel_l2 against the exact truth that is allowed.")
@click.option("--out", type=FILE, default=None, help="Write the record there, one JSON line.")
def judge(
    path: Path, causal: bool | None, recipe: str | None, quantize: bool, budget: float | None, out: Path | None,
    **options: str | None,
) -> int:  # fmt: skip
    """Judge tensors q, k, v and out of a safetensors file; lse, mask, bias, sinks, kv_lens and scales may be there too.

    What is not given here is taken from the file's metadata. Nothing of the file is executed. Exit 0: PASS, 1: FAIL,
    2: a file that cannot be judged, 3: these inputs cannot tell right from wrong.
    """
    known = None if recipe is None else recipe_of(recipe)  # a wrong name costs no loading of torch
    if not path.exists():
        raise ValueError(f"{path} does not exist; give the path of a safetensors file")
    from harness.dump import read_dump
    from harness.judge_file import NO_EXACT, judge_dump, record_of

    given = {**options, "causal": None if causal is None else str(causal).lower()}
    dump = read_dump(path, given, quantize)
    if known is None and dump.recipe is None:
        raise ValueError(
            f"{path}: no recipe goes with these types; give --recipe, one of {', '.join(RECIPES)}"
        )
    try:
        known = known or get_recipe(dump.recipe or "")  # a file names one; only the caller names files
        found = judge_dump(dump, known, quantize, budget)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    spec = dump.spec
    said = [
        f"{path}: {found.shape}",
        "causal" if spec.causal else "full",
        f"recipe {known.name}",
        str(dump.out.dtype),
    ]
    click.echo(", ".join(said))
    click.echo(_wrapped(str(found.judgement).replace(NO_EXACT, "the file has no exact_q, exact_k, exact_v")))
    click.echo("\n".join(_places(found)))
    if out is not None:
        write_records(out, [record_of(path, dump, known, found)])
        click.echo(f"written: {out}")
    return _CODES[found.judgement.status]


def _wrapped(text: str) -> str:
    lines = (
        textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        for line in text.splitlines()
    )
    return "\n".join(part for parts in lines for part in parts)


def _places(found: FileVerdict) -> list[str]:
    """Errors by head, the farthest from normal first, and by position."""
    worst = sorted(found.heads, key=lambda p: (-p.wrong, -(p.ratio if p.ratio == p.ratio else -1.0)))
    shown = worst[:SHOWN]
    headers = ["where", "rel_l2", "× expected", "max abs", "NaN or Inf amiss"]
    rows = [[p.name, *_cells(p)] for p in (*shown, *found.positions)]
    lines = [table(headers, rows, wrap=(0,), right=(1, 2, 3, 4))]
    left = len(worst) - len(shown)
    return lines + ([f"… and {left} heads nearer to normal"] if left else [])


def _cells(p: Place) -> list[str]:
    return [f"{p.rel_l2:.2g}", f"{p.ratio:.2f}", f"{p.max_abs:.2g}", str(p.wrong)]
