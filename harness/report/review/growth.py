"""Sections on how error moves: with length, and up the ladder of amplitudes."""

from __future__ import annotations

import math

from harness.records import Status
from harness.report import words
from harness.report.review import charts, figures
from harness.report.review.blocks import Block, Chart, Paragraph, Section, Table, Value, table
from harness.report.review.material import Material
from harness.report.review.series import FEWEST, USELESS, Ladder, Step, Sweep, ladder, sweeps

_REASON = 200  # characters


def length(m: Material) -> Section:
    found = sweeps(m)
    if not found:
        told = (
            f"Not shown: no {FEWEST} cases of these records differ in length alone."
            " python -m harness run --cases normal,shapes measures some."
        )
        return Section("length", "Error against length", (Paragraph(told),))
    told = (
        "Total rel_l2 over the number of keys, of cases alike in all else. Averages over more keys shrink the output as"
        " much as they shrink an error that is random: a line that rises has an error that does not average out."
    )
    chart = Chart(
        "length", "Error against length", told, lambda: charts.lengths(found), _length_table(m, found)
    )
    return Section("length", "Error against length", (chart,))


def _length_table(m: Material, found: tuple[Sweep, ...]) -> Table:
    rows: list[list[Value | str]] = []
    for sweep in found:
        for n in sorted({n for points in sweep.points.values() for n, _ in points}):
            at = {recipe: dict(points) for recipe, points in sweep.points.items()}
            values = [figures.error(at.get(recipe, {}).get(n, math.nan)) for recipe in m.asked.recipes]
            rows.append([sweep.name, Value(str(n), n), *values])
    headers = ("cases", "keys", *m.asked.recipes)
    return table("Total rel_l2 by number of keys", headers, rows, right=range(1, len(headers)))


def amplitude(m: Material) -> Section:
    title = "Where each format breaks"
    found = ladder(m)
    if found is None:
        told = "Not shown: no case of the group magnitude is in these records."
        return Section(
            "ladder", title, (Paragraph(f"{told} python -m harness run --cases magnitude measures it."),)
        )
    told = (
        "Scores grow from left to right; a cell is the total rel_l2 of implementations that did not fail. BREAKS:"
        f" precision FAIL with every implementation, or an error beyond {USELESS:.0%} of the output; ?: so coarse that"
        " nothing can be expected. An implementation that breaks earlier by its own doing is seen in the heat map."
    )
    chart = Chart(
        "ladder", title, told, lambda: charts.ladder(found, m.asked.recipes), _ladder_table(m, found)
    )
    blocks: list[Block] = [chart, _breaks(m, found)]
    return Section("ladder", title, tuple(blocks))


def _ladder_table(m: Material, found: Ladder) -> Table:
    rows = [
        [
            rung.case,
            Value(charts.amplitude(rung.peak), rung.peak),
            *(_step_value(found.steps.get((rung.case, recipe))) for recipe in m.asked.recipes),
        ]
        for rung in found.rungs
    ]
    headers = ("case", "largest |s|", *m.asked.recipes)
    return table("Total rel_l2 by size of the scores", headers, rows, right=range(1, len(headers)))


def _step_value(step: Step | None) -> Value | str:
    if step is None:
        return ""
    mark = {Status.FAIL: " BREAKS", Status.INCONCLUSIVE: " ?"}.get(step.status or Status.PASS, "")
    tone = {Status.FAIL: "bad", Status.INCONCLUSIVE: "fair"}.get(step.status or Status.PASS, "")
    shown = words.optional(step.error) + "*" * step.left_out
    return Value(shown + mark, figures.error(step.error).sort, tone)


def _breaks(m: Material, found: Ladder) -> Table:
    """For each recipe the last rung it stands on, its largest error there, and the first it breaks on."""
    rows: list[list[Value | str]] = []
    for recipe in m.asked.recipes:
        steps = [(rung, s) for rung in found.rungs if (s := found.steps.get((rung.case, recipe)))]
        held = [(rung, s) for rung, s in steps if s.status is Status.PASS]
        broken = [(rung, s) for rung, s in steps if s.status is Status.FAIL]
        peak = held[-1][0].peak if held else math.nan
        worst = max((s.error for _, s in held if not math.isnan(s.error)), default=math.nan)
        row: list[Value | str] = [
            recipe,
            Value(words.NONE) if math.isnan(peak) else Value(charts.amplitude(peak), peak),
            figures.error(worst),
        ]
        if broken:
            rung, step = broken[0]
            at = Value(f"{charts.amplitude(rung.peak)} ({rung.case})", rung.peak, "bad")
            rows.append([*row, at, words.clip(step.reason, _REASON)])
        elif steps:
            rows.append([*row, "none of these", ""])
    headers = ("recipe", "largest |s| it holds", "largest error there", "smallest |s| that breaks it", "how")
    return table("Where each recipe breaks", headers, rows, right=(1, 2))
