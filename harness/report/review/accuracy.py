"""Sections on accuracy: on real activations and on hard cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.records import Record, Status
from harness.report import words
from harness.report.review import charts, figures
from harness.report.review.blocks import Block, Chart, Paragraph, Section, Table, Value, table
from harness.report.review.material import Material
from harness.report.review.series import Grid, GridCell, grid, sweeps

LISTED = 120  # rows of a table
WHY = 160  # characters of a reason
KEY = (
    "F fails, E raises, k fails as a listed deviation says it does, ? these inputs cannot tell, – refused;"
    " empty: not run."
)


def real(m: Material) -> Section:
    told = (
        "A case is one layer. Total error is against the exact truth: what the precision costs. Kernel error is against"
        " the stored truth: what the implementation did beside it; ×: that error ÷ what is normal for the recipe."
        " Pooled over the implementations that did not fail and over seeds, by mean square."
    )
    if not m.real:
        nothing = f"No case of real activations ({', '.join(m.asked.real)}) is in these records."
        again = "python -m harness run --cases real measures some."
        return Section("real", "Accuracy on real activations", (Paragraph(f"{nothing} {again}"),))
    headers = (
        "layer", "recipe", "total rel_l2", "÷ baseline", "kernel rel_l2", "×", "precision", "largest error at",
    )  # fmt: skip
    rows = [row for case in m.real for recipe in m.asked.recipes if (row := _real_row(m, case, recipe))]
    shown = table("Accuracy on real activations, by layer and recipe", headers, rows, right=(2, 3, 4, 5))
    return Section("real", "Accuracy on real activations", (Paragraph(told), shown, *_heads(m), *_reasons(m)))


def _real_row(m: Material, case: str, recipe: str) -> list[Value | str] | None:
    records = m.sound(case, recipe)
    if not records:
        return None
    total, base = m.total([case], recipe).rel_l2, m.total([case], m.baseline).rel_l2
    worst = max((r for r in records if r.total_errors is not None), key=_largest, default=None)
    where = None if worst is None or worst.total_errors is None else worst.total_errors.worst
    place = (
        Value(words.NONE)
        if where is None
        else Value("head {1}, query {2}, channel {3}".format(*where), where[1])
    )
    return [
        case, recipe, figures.pooled(m.total([case], recipe)), figures.ratio(total / base if base > 0 else math.nan),
        figures.pooled(m.kernel([case], recipe)), figures.times(m.ratio([case], recipe)),
        figures.status(m.precise[case, recipe].status), place,
    ]  # fmt: skip


def _heads(m: Material) -> Sequence[Block]:
    """Total error head by head, for recipes and layers whose records hold it."""
    found = {
        (case, recipe): heads
        for case in m.real
        for recipe in m.asked.recipes
        if (heads := m.heads(case, recipe))
    }
    if not found:
        return (
            Paragraph(
                "These records hold no error by head (records do since schema 1.3): run the cases again."
            ),
        )
    count = max(map(len, found.values()))
    rows: list[list[Value | str]] = []
    for (case, recipe), heads in found.items():
        finite = [x for x in heads if math.isfinite(x)]
        most = max(finite, default=math.nan)
        cells = [_head(figures.error(x), x == most and len(finite) > 1) for x in heads]
        rows.append([case, recipe, *cells, *[""] * (count - len(heads))])
    headers = ("layer", "recipe", *(f"h{n}" for n in range(count)))
    return (
        table("Total rel_l2 by layer and head (▲: the largest)", headers, rows, right=range(2, count + 2)),
    )


def _head(value: Value, largest: bool) -> Value:
    return replace(value, text=f"{value.text} ▲", tone="fair") if largest else value


def _largest(r: Record) -> float:
    return (
        -math.inf if r.total_errors is None or math.isnan(r.total_errors.max_abs) else r.total_errors.max_abs
    )


def _reasons(m: Material) -> Sequence[Block]:
    """Why cases exist: a reader has to know what these activations are."""
    why = sorted({(r.case, r.shape, r.why) for r in m.records if m.is_real(r.case)})
    return (table("What the layers are", ("layer", "[B, H, L, D]", "why the case exists"), why),)


def hard(m: Material) -> Section:
    found = grid(m)
    blocks: list[Block] = []
    if found is not None:
        what = "a group of cases, by its worst" if found.grouped else "a case"
        told = (
            "All cases, real ones too. Kernel error ÷ what is normal for the recipe: 1 is as accurate as it allows."
            f" A row is {what}. {KEY}"
        )
        shown = _grid_table(found)
        blocks.append(Chart("heatmap", "Implementation × case", told, lambda: charts.heat_map(found), shown))
    blocks += _precision(m)
    return Section("hard", "Accuracy on hard cases", tuple(blocks))


def _grid_table(found: Grid) -> Table:
    headers = ["group" if found.grouped else "case", "recipe", *found.implementations]
    rows = [
        [row, recipe, *(_grid_value(found.cells[row, name, recipe]) for name in found.implementations)]
        for row in found.rows
        for recipe in found.recipes
        if any(found.cells[row, name, recipe] for name in found.implementations)
    ]
    caption = "Implementation × case: kernel error ÷ what is normal"
    return table(caption, headers, rows, right=range(2, len(headers)))


def _grid_value(cell: GridCell | None) -> Value | str:
    if cell is None:
        return ""
    shown = "" if math.isnan(cell.ratio) else words.times(cell.ratio)
    tone = "bad" if cell.mark in ("F", "E") else "fair" if cell.mark in ("k", "?") else ""
    sort = None if math.isnan(cell.ratio) else cell.ratio
    return Value(f"{shown} {cell.mark}".strip(), sort, tone)


def _precision(m: Material) -> Sequence[Block]:
    if not m.hard:
        return (
            Paragraph("No other case is in these records: what the recipe does at its limits is not shown."),
        )
    swept = {case for sweep in sweeps(m) for case in sweep.cases}  # which have their own table
    shown_here = [c for c in m.hard if c not in swept or _lossy(m, c)]
    ordered = sorted(shown_here, key=lambda c: not _lossy(m, c))  # stable
    facts = {r.case: r.why for r in m.records}
    rows = [
        [
            case,
            *(_precision_value(m, case, recipe) for recipe in m.asked.recipes),
            words.clip(facts[case], WHY),
        ]
        for case in ordered[:LISTED]
    ]
    told = (
        "Total rel_l2 by case and recipe, against the exact truth; FAIL: values are lost to the format, or the expected"
        " error is more than 2 × that of ideal scales; ?: nothing can be expected of these inputs. Failures"
        " first; lengths stand below."
    )
    if len(ordered) > LISTED:
        told += f" {len(ordered) - LISTED} more cases are in cells.csv of the report."
    headers = ("case", *m.asked.recipes, "why the case exists")
    shown = table(
        "Total error on hard cases, by recipe", headers, rows, right=range(1, len(m.asked.recipes) + 1)
    )
    return (Paragraph(told), shown)


def _lossy(m: Material, case: str) -> bool:
    found = (m.precise.get((case, recipe)) for recipe in m.asked.recipes)
    return any(p is not None and p.status is Status.FAIL for p in found)


def _precision_value(m: Material, case: str, recipe: str) -> Value | str:
    found = m.precise.get((case, recipe))
    if found is None:
        return ""
    total = m.total([case], recipe)
    mark = {Status.FAIL: " FAIL", Status.INCONCLUSIVE: " ?"}.get(found.status or Status.PASS, "")
    tone = {Status.FAIL: "bad", Status.INCONCLUSIVE: "fair"}.get(found.status or Status.PASS, "")
    return Value(words.pooled(total) + mark, figures.pooled(total).sort, tone)
