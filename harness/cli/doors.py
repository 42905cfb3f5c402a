"""Commands for tensors and questions from outside: `judge`, `tolerance`, `explain`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from harness.cli.exits import FAILURE, NOTHING_RAN
from harness.cli.group import cli
from harness.cli.paths import FILE
from harness.dump_options import spec_of
from harness.recipe import RECIPES, Recipe, get_recipe, load_recipe
from harness.records import Status, write_records
from harness.spec import parse_shape
from harness.text_table import WIDTH, table

if TYPE_CHECKING:
    from harness.judge_file import FileVerdict
    from harness.places import Place
    from harness.tolerance import Tolerance

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


def rules(command: F) -> F:
    """The options that set the rules of attention."""
    for option in reversed(_RULES):
        command = option(command)
    return command


def recipe_of(name: str) -> Recipe:
    """A recipe by name or from a TOML file."""
    return load_recipe(Path(name)) if name.endswith(".toml") else get_recipe(name)


@cli.command(short_help="Judge tensors that another program wrote.")
@click.argument("path", type=FILE)
@rules
@click.option("-r", "--recipe", metavar="NAME|FILE.toml", help="[default: by the types of q, k and v]")
@click.option("--layout", metavar="NAME", help="bhsd, bshd or thd.  [default: bhsd]")
@click.option("--fp8", metavar="NAME", help="What bytes hold: e4m3fn, e4m3fnuz or e5m2.")
@click.option(
    "--quantize", is_flag=True, help="q, k and v are values before their rounding to the recipe's storage."
)
@click.option("--budget", type=float, default=None, help="rel_l2 against the exact truth that is allowed.")
@click.option(
    "--rows", type=click.IntRange(8), default=None, metavar="N", help="Judge by so many rows of each head."
)
@click.option("--seed", type=click.IntRange(0), default=0, metavar="N", help="Of the rows that --rows draws.")
@click.option("--out", type=FILE, default=None, help="Write the record there, one JSON line.")
def judge(
    path: Path, causal: bool | None, recipe: str | None, quantize: bool, budget: float | None, rows: int | None,
    seed: int, out: Path | None,
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
        found = judge_dump(dump, known, quantize, budget, rows, seed)
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
    """Lines within the width, each with the indent it came with."""
    folded = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip(" ")))
        folded += textwrap.wrap(
            line.strip(),
            WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_on_hyphens=False,
        )
    return "\n".join(folded)


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


@cli.command(name="tolerance", short_help="Say what error is normal for a shape and a precision.")
@click.option("--shape", required=True, metavar="B,H,L,D", help="Or B,H,L,S,D for S keys.")
@click.option("-r", "--recipe", required=True, metavar="NAME|FILE.toml")
@rules
@click.option(
    "--data", default="normal", show_default=True, help="Drawn q, k and v: normal, peaked or outliers."
)
@click.option(
    "--probability", type=float, default=1e-3, show_default=True, help="That a correct kernel passes it."
)
def tolerance_(
    shape: str, recipe: str, data: str, probability: float, causal: bool | None, **others: str | None
) -> int:
    """Say what error a correct kernel shows for a shape and a precision, and the rtol and atol that it comes to."""
    known, sizes = recipe_of(recipe), parse_shape(shape)
    given = {"causal": str(bool(causal)).lower(), **{k: v for k, v in others.items() if v is not None}}
    spec = spec_of(given)
    from harness.tolerance import tolerance

    found = tolerance(sizes, known, spec, data, probability)
    click.echo(f"{sizes}, {'causal' if spec.causal else 'full'}, recipe {known.name}, {data} data\n")
    for line in _tolerance_lines(found, known, probability):
        click.echo(line if "\n" in line else _wrapped(line))
    return 0


def _tolerance_lines(found: Tolerance, recipe: Recipe, probability: float) -> list[str]:
    stored, exact, fmt = found.stored, found.exact, recipe.out_format
    rows = [
        [
            what,
            f"{n.rms:.2g}",
            f"{n.rel_l2:.2g}",
            f"{n.largest:.2g}",
            f"{n.ulps:.3g}",
            f"{n.rtol:.3g}",
            _up(n.atol),
        ]
        for what, n in (("inputs as stored", stored), ("inputs before", exact))
    ]
    headers = ["FP64 attention on", "RMS", "rel_l2", "largest", f"{fmt} ulps", "rtol", "atol"]
    return [
        table(headers, rows, wrap=(0,), right=range(1, 7)),
        "",
        f"largest, ulps, and rtol with atol: what a correct kernel passes with probability {probability:g}, by one or"
        f" more of {found.elements:,} elements. ulps are those at the RMS of the row.",
        f"rtol is the unit roundoff of {fmt}, the most that rounding the output can do. atol is what else the recipe"
        f" rounds ({_rounds(recipe)}), with {found.slack:g} × the expected size for what kernels differ in.",
        f"    torch.testing.assert_close(out.double(), truth, rtol={stored.rtol!r}, atol={_up(stored.atol)})",
        _unseen(found.scale_unseen),
    ]


def _unseen(scale: float) -> str:
    """How wrong the softmax scale may be: infinitely where each row sees one key."""
    said = f"a softmax scale that is off by less than {100 * scale:.2g} % passes."
    if not math.isfinite(scale):
        said = "no softmax scale, however wrong, moves this output: each row sees one key."
    ours = "harness.judge tests the direction of the error, sees far less, and knows your inputs."
    return f"What it cannot see: {said} {ours}"


def _rounds(recipe: Recipe) -> str:
    stages = [f"{stage} to {fmt}" for stage, fmt in recipe.at.items() if stage != "out"]
    return ", ".join([*stages, f"sums in {recipe.base}"])


def _up(x: float) -> str:
    """Two digits, rounded up: a tolerance must not shrink when it is printed."""
    digits = 1 - math.floor(math.log10(x)) if x > 0 else 0
    return f"{math.ceil(x * 10.0**digits) / 10.0**digits:.2g}"


@cli.command(short_help="Tell the story of one record.")
@click.argument("cell")
@click.option("--records", "path", type=FILE, default=Path("reports/latest/records.jsonl"), show_default=True)
def explain(cell: str, path: Path) -> int:
    """Open one record and tell its story: truths, stages, ledger, places, and what to do next.

    CELL is "CASE, IMPLEMENTATION, RECIPE, SEED", or as a report prints it with dots; parts may be globs, and later ones
    may be left out: then the worst record is told.
    """
    from harness.cli.reporting import refuse_baseline
    from harness.records import read_records, why_empty
    from harness.report.story import find, name, story
    from harness.report.words import clean

    if not path.exists():
        raise ValueError(f"{path} does not exist; give --records, or make one with `python -m harness run`")
    try:
        records = read_records(path)
    except ValueError:
        refuse_baseline(path)
        raise
    if not records:
        raise ValueError(why_empty(path))
    found = find(records, cell)
    if not found:
        close = sorted(
            {r.case for r in records if cell.partition(",")[0].strip().partition("/")[0] in r.case}
        )
        known = ", ".join((close or sorted({r.case for r in records}))[:SHOWN])
        raise ValueError(
            f"no record of {path} is {cell!r}; there are {len(records)}, of cases such as {clean(known)}"
        )
    click.echo(name(found[0]))
    for heading, lines in story(found[0]):
        click.echo(f"\n== {heading} ==\n{_wrapped(chr(10).join(lines))}")
    if len(found) > 1:
        more = "\n".join(f"{name(r)}: {r.status.value}" for r in found[1 : SHOWN + 1])
        click.echo(f"\n{len(found) - 1} other records match, such as\n{_wrapped(more)}")
    return 0
