"""`gate --old`: whether this checkout is slower than another, on the machine that the gate runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness import registry
from harness.cli.comparing import SHAPES, check_checkout, verdict
from harness.cli.doors import recipe_of
from harness.records import Record, Status
from harness.report.words import clean, clip, many
from harness.spec import AttentionSpec, parse_shape

if TYPE_CHECKING:
    from harness.gate import Outcome
    from harness.versus import Versus

RECIPE, THRESHOLD, BUDGET_S = "fp32", 0.05, 10.0  # what narrower recipes take is the emulator's time
_REASON = 160  # characters


def check_old(old: Path | None, stored: Path | None, update: bool, kernel: bool) -> None:
    """Raises ValueError where there is nothing to time `old` against."""
    if old is None:
        return
    for given, why in (
        (update, "--update writes figures, and times are not among them"),
        (stored is not None, "--records were made elsewhere or before; times are taken here and now"),
        (
            kernel,
            "--kernel is no checkout's; `python -m harness compare A.py:f B.py:f` times two",
        ),
    ):
        if given:
            raise ValueError(f"--old {old} times implementations of two checkouts; {why}")
    check_checkout(old)


def with_times(outcome: Outcome, records: Sequence[Record], old: Path, device: str) -> tuple[Outcome, int]:
    """The outcome, with a regression for each implementation that is slower here than in `old` beyond doubt, and how
    many pairs were timed. Timed are those that passed in this run under FP32, each pair by turns on one core: figures
    can be compared because one machine makes both. All of it counts as one command, which calls equals slower in at
    most 1 % of its runs.

    What fails its verdict here, at the size that is timed, is a regression too. An implementation that the other
    checkout lacks, or whose time stays undecided, is a note.
    """
    from harness.clock import pinned
    from harness.timing.rule import Speed
    from harness.versus import Contender, sides, versus

    passed = {r.implementation for r in records if r.recipe == RECIPE and r.status is Status.PASS}
    now = [Contender(name, recipe_of(RECIPE), RECIPE) for name in registry.table() if name in passed]
    found: dict[Speed | None, list[str]] = {speed: [] for speed in (None, *Speed)}
    failed: list[str] = []
    with pinned(1), sides(old) as both:
        pairs = [(replace(one, old=old), one) for one in now]
        shapes = [parse_shape(shape) for shape in SHAPES]
        for one in versus(pairs, shapes, AttentionSpec(causal=True), both, BUDGET_S, THRESHOLD, device):
            if all(x.status is Status.REFUSED for x in one.judged):
                continue  # a shape that it does not do, there or here
            line = _line(one)
            click.echo(f"timed: {line}", err=True)
            wrong = one.judged[1].status in (Status.FAIL, Status.ERROR)
            (failed if wrong else found[None if one.times is None else one.times.verdict]).append(line)
    even = len(found[Speed.SAME])
    notes = [f"time: {many(even, 'comparison')} with {clean(str(old))}: no difference"] if even else []
    notes += [f"time: {line}" for line in (*found[Speed.UNDECIDED], *found[None])]
    outcome = replace(
        outcome,
        regressions=(*outcome.regressions, *failed, *found[Speed.SLOWER]),
        improvements=(*outcome.improvements, *found[Speed.FASTER]),
        notes=(*outcome.notes, *notes),
    )
    return outcome, sum(len(found[speed]) for speed in Speed)


def _line(v: Versus) -> str:
    """A pair in a line: B is this checkout, A the other."""
    why = ""
    if v.times is None:
        said = [
            f"{side} is {x.status.value}: {clip(clean('; '.join(x.reasons)), _REASON)}"
            for side, x in zip("AB", v.judged, strict=True)
            if x.status is not Status.PASS
        ]
        why = f" ({'; '.join(said)})"
    return f"{clean(str(v.b))} {v.shape}: {verdict(v, THRESHOLD, advice=False)}{why}"
