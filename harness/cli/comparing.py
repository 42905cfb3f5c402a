"""`compare`: which of two is faster, on inputs where both are right."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness import registry
from harness.cli.doors import recipe_of, rules
from harness.cli.exits import FAILURE, nothing_ran
from harness.cli.group import cli
from harness.cli.paths import PLACE
from harness.cost.units import show_time
from harness.dump_options import spec_of
from harness.recipe import RECIPES
from harness.records import Status
from harness.report import words
from harness.spec import parse_shape
from harness.text_table import WIDTH, table

if TYPE_CHECKING:
    from harness.timing.pairs import Paired
    from harness.timing.rule import Interval
    from harness.versus import Versus

SHAPES = ("1,8,512,64", "1,8/2,1,4096,64")  # where none is given: a prompt, and one query over a cache
EMULATED = "is emulated: its time is the emulator's, not the format's"


@cli.command(short_help="Say which of two is faster, where both are right.")
@click.argument("names", nargs=-1, required=True, metavar="A B | --old PATH NAME…")
@click.option(
    "--shape", "shapes", multiple=True, metavar="B,H,L,D", help=f"Or B,H,L,S,D; H may be H/G.  [{SHAPES}]"
)
@click.option(
    "-r", "--recipe", default="fp32", show_default=True, metavar="NAME|FILE.toml", help="Of names without."
)
@rules
@click.option("--old", type=PLACE, help="Another checkout: A is NAME there, B is NAME here.")
@click.option("--budget", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True, metavar="SECONDS",
              help="For each shape.")  # fmt: skip
@click.option(
    "--threshold", default="5%", show_default=True, metavar="5%|0.05", help="Smaller differences are none."
)
@click.option(
    "--threads",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="Of torch; pinned to as many cores.",
)
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="cpu, cuda or cuda:N.")
@click.option("--anyway", is_flag=True, help="Time also what did not pass.")
def compare(
    names: tuple[str, ...], shapes: tuple[str, ...], recipe: str, old: Path | None, budget: float, threshold: str,
    threads: int, device: str, anyway: bool, causal: bool | None, **given: str | None,
) -> int:  # fmt: skip
    """Time A and B by turns on the same inputs, and say whether B is slower, faster, or the same within a threshold.

    A and B are implementations, "name:recipe", or your own "file.py:function" (a recipe may follow here too). Both are
    judged first, and timed only where both pass. With --old, each NAME as that checkout computes it is A, and as this
    one does, B.

    Exit 0: B is no slower; 1: B is slower than the threshold by its whole interval, or fails its verdict; 2: wrong
    usage; 3: nothing was timed, or nothing decided.
    """
    share, sizes = _share(threshold), tuple(map(parse_shape, shapes or SHAPES))
    parsed = _parsed(names, recipe, old)
    spec = spec_of({"causal": str(bool(causal)).lower(), **{k: v for k, v in given.items() if v is not None}})
    from harness.clock import pinned
    from harness.versus import Contender, sides, versus

    who = [Contender(name, recipe_of(written), written) for name, written in parsed]
    pairs = [(replace(now, old=old), now) for now in who] if old else [(who[0], who[1])]
    with pinned(threads) as how, sides(old) as both:
        click.echo(_head(how, device, spec.causal))
        found = []
        for one in versus(pairs, sizes, spec, both, budget, share, device, anyway):
            found.append(one)
            click.echo(_told(one, share))
    return _code(found)


def _share(text: str) -> float:
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ValueError(f"threshold is {text!r}; allowed: such as 5% or 0.05, between 0 and 1")
    return value


def _parsed(names: Sequence[str], recipe: str, old: Path | None) -> list[tuple[str, str]]:
    """(implementation, recipe) of each; nothing of torch is loaded for a mistake."""
    if old is None and len(names) != 2:
        raise ValueError(
            f"{len(names)} given: {', '.join(names)}; allowed: two, A and B, or --old PATH with names"
        )
    if old is not None:
        check_checkout(old)
    parsed = [_named(name, recipe) for name in names]
    if old is not None and any(registry.is_kernel(name) for name, _ in parsed):
        raise ValueError(
            "--old compares implementations of both checkouts; give two kernels as A and B instead"
        )
    return parsed


def check_checkout(old: Path) -> None:
    """Raises ValueError for a folder that is no checkout of this project."""
    if not (old / "harness" / "registry.py").is_file():
        raise ValueError(f"--old {old} holds no harness/registry.py; give the root of another checkout")


def _named(text: str, recipe: str) -> tuple[str, str]:
    """`name` or `file.py:function`, either with `:recipe` at its end."""
    name, _, last = text.rpartition(":")
    if name and (last in RECIPES or last.endswith(".toml")):
        text, recipe = name, last
    elif name in registry.table():
        recipe_of(last)  # it is none, and this says which there are
    registry.entry(text)
    place = text.partition("@")[0].rpartition(":")[0]
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"{place} does not exist; give the path of a Python file, a name, or name:recipe")
    recipe_of(recipe)
    return text, recipe


def _head(how: str, device: str, causal: bool) -> str:
    from harness.clock import clock_mhz
    from harness.machine import machine

    m, mhz = machine(device), clock_mhz(device)
    clocks = "" if mhz is None else f", {mhz:.0f} MHz"
    said = f"{m.device}: {m.cpu}, {m.isa}, torch {m.torch}, {how}{clocks}; {'causal' if causal else 'full'}"
    return "\n".join(textwrap.wrap(words.clean(said), WIDTH))


def _told(v: Versus, threshold: float) -> str:
    """One comparison: both sides' accuracy and time, then the verdict."""
    rows = []
    for side, who, judged in zip("AB", (v.a, v.b), v.judged, strict=True):
        found = None if v.times is None else v.times.a_s if side == "A" else v.times.b_s
        accuracy = judged.status.value + (
            f", {words.times(judged.ratio)} expected" if judged.rel_l2 >= 0 else ""
        )
        rows.append([side, words.clean(str(who)), accuracy, words.optional(judged.rel_l2), *_span(found)])
    lines = [
        "",
        str(v.shape),
        table(["", "", "accuracy", "rel_l2", "time", "interval"], rows, wrap=(1, 2), right=(3, 4)),
        verdict(v, threshold),
    ]
    for side, who, judged in zip("AB", (v.a, v.b), v.judged, strict=True):
        if judged.status is not Status.PASS:
            lines += _folded(f"{side} is {judged.status.value}: {'; '.join(judged.reasons)}")
        if who.emulated and v.times is not None:
            lines += _folded(f"{side} {EMULATED}")
    return "\n".join(lines)


def _span(x: Interval | None) -> list[str]:
    if x is None:
        return [words.NONE, words.NONE]
    known = x.low > 0
    return [show_time(x.median), f"{show_time(x.low)} to {show_time(x.high)}" if known else words.NONE]


def verdict(v: Versus, threshold: float, advice: bool = True) -> str:
    """What was found of a pair, in a line: the ratio and what it is called, or why there is none. `advice`: and what to
    do where it is undecided."""
    from harness.timing.rule import Speed

    if v.times is None:
        wrong = [
            side for side, judged in zip("AB", v.judged, strict=True) if judged.status is not Status.PASS
        ]
        return f"not timed: {' and '.join(wrong)} did not pass"
    t, share = v.times, f"{100 * threshold:.3g} %"
    said = {
        Speed.SLOWER: "B is slower",
        Speed.FASTER: "B is faster",
        Speed.SAME: f"no difference at {share}",
        Speed.UNDECIDED: f"undecided at {share}",
    }[t.verdict]
    if t.unrepeated:  # no budget decides it
        said += ": what one pair of processes showed, fresh ones did not repeat"
    elif t.verdict is Speed.UNDECIDED and (advice or t.rounds == t.most):
        said += ", raise --budget" if t.rounds < t.most else ", the difference is too near to it"
    return f"B ÷ A = {_ratio(t)} in {t.rounds} rounds: {said}"


def _ratio(t: Paired) -> str:
    x = t.ratio
    return f"{x.median:.3f}" + (
        f" ({x.low:.3f} to {x.high:.3f})" if x.low > 0 else f" (no interval below {t.fewest})"
    )


def _folded(text: str) -> list[str]:
    return textwrap.wrap(words.clean(text), WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _code(found: Sequence[Versus]) -> int:
    from harness.timing.rule import Speed

    wrong = any(v.judged[1].status in (Status.FAIL, Status.ERROR) for v in found)
    timed = [v.times.verdict for v in found if v.times is not None]
    if wrong or Speed.SLOWER in timed:
        return FAILURE
    if not timed:
        return nothing_ran("nothing was timed: see the verdicts above")
    return nothing_ran("nothing was decided") if set(timed) == {Speed.UNDECIDED} else 0
