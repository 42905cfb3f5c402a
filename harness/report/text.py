"""The report for a terminal, at most 100 columns wide. Long names wrap: none is cut, since a cut name finds
nothing."""

from __future__ import annotations

import textwrap

from harness.records import HazardKind
from harness.report import words
from harness.report.model import DECIDED, Failure, GroupTable, Report
from harness.text_table import GAP, WIDTH, fold, table, widest

SHOWN = 25
SHOWN_INPUTS = 60
_REASON = 300  # characters of a reason
_CASES = 12  # named for one reason
_COSTLY = 3  # reasons of one case and recipe


def to_text(report: Report) -> str:
    """All sections; those with nothing to say are left out. Ends with a newline."""
    sections = (
        _headline,
        _failures,
        _problems,
        _groups,
        _tradeoff,
        _worst,
        _costly,
        _unseen,
        _hazards,
        _lies,
        _relations,
        _inputs,
        _refusals,
        _known,
    )
    blocks = [lines for section in sections if (lines := section(report))]
    return words.for_log("\n\n".join("\n".join(lines) for lines in blocks) + "\n")


def _paragraph(text: str, bullet: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=bullet, subsequent_indent="  ", break_on_hyphens=False)


def _title(text: str) -> str:
    return f"== {text} =="


def _more(total: int, where: str = "report.md", shown: int = SHOWN) -> list[str]:
    return [f"… and {total - shown} more in {where}"] if total > shown else []


def _headline(report: Report) -> list[str]:
    head = report.headline
    lines = [*_paragraph(words.extent(head)), words.counts(head)]
    lines += [line for line in (words.precision(head), words.repeated(head)) if line]
    lines += _paragraph(DECIDED)
    stated = [*map(words.machine, head.machines), *map(words.clean, head.ran)]
    return lines + [line for text in stated for line in _paragraph(text)]


def _failures(report: Report) -> list[str]:
    if not report.failures:
        return []
    lines = [_title(f"Unexpected failures: {words.many(sum(f.seeds for f in report.failures), 'cell')}")]
    for failure in report.failures[:SHOWN]:
        lines += _paragraph(_failure_line(failure))
        if failure.diagnosis:
            told = words.clip(words.clean(failure.diagnosis), _REASON)
            lines += _paragraph(f"diagnosis: {told}", "  ")
        lines += words.command_lines(words.command(failure), WIDTH)
    return lines + _more(len(report.failures))


def _failure_line(failure: Failure) -> str:
    """What failed, where and why, without the command."""
    f = failure
    place = f"{f.status.value} {f.case} · {f.implementation} · {f.recipe}"
    seeds = f"({f.seeds} of {f.of} seeds, {f.device})"
    return words.clean(f"{place} {seeds}{words.margin(f)}: {words.clip(f.reason, _REASON)}")


def _problems(report: Report) -> list[str]:
    if not report.problems:
        return []
    lines = [line for p in report.problems for line in _paragraph(words.clean(p), "- ")]
    return [_title("Deviations that need attention"), *lines]


def _groups(report: Report) -> list[str]:
    lines: list[str] = []
    for group in report.groups:
        extent = f"{words.many(group.cases, 'case')}, {words.many(group.seeds, 'seed')}"
        lines += [*_paragraph(f"{words.clean(group.group)} ({extent})"), *_grid(group), ""]
    if not lines:
        return []
    legend = [line for entry in words.LEGEND for line in _paragraph(entry)]
    title = _title("Errors, pooled over cases and seeds by mean square")
    return [title, *legend, "", *lines[:-1]]


def _grid(group: GroupTable) -> list[str]:
    """Recipes down, implementations and costs across, in as many blocks as the width asks for."""
    names = [fold(words.clean(name), 11) for name in group.recipes]
    heads = [[fold(words.clean(name), 11)] for name in group.implementations]
    columns = [[[words.cell(row[j])] for j in range(len(names))] for row in group.cells]
    # Total and floor stay side by side.
    heads.append([*words.COST_HEADERS[:2]])
    columns.append([words.short_cost(cost) for cost in group.costs])
    widths = [
        sum(max(map(widest, cells)) + GAP for cells in zip(head, *column, strict=True))
        for head, column in zip(heads, columns, strict=True)
    ]
    blocks: list[list[int]] = [[]]
    first = room = WIDTH - max(map(widest, names))
    for j, width in enumerate(widths):
        if blocks[-1] and room < width:
            blocks.append([])
            room = first
        blocks[-1].append(j)
        room -= width
    out = []
    for block in blocks:
        rows = [[name, *(x for j in block for x in columns[j][i])] for i, name in enumerate(names)]
        out.append(table(["", *(x for j in block for x in heads[j])], rows, wrap=()))
    return "\n\n".join(out).split("\n")


def _tradeoff(report: Report) -> list[str]:
    t = report.tradeoff
    if t is None:
        return []
    rows = [words.tradeoff(row, t) for row in t.rows]
    title = _title("Accuracy beside cost")
    shown = table(words.TRADEOFF_HEADERS, rows, wrap=(0,), right=(1, 2, 3, 4))
    return [title, *_paragraph(words.tradeoff_told(t)), "", shown]


def _worst(report: Report) -> list[str]:
    if not report.worst:
        return []
    headers = ["case, implementation, recipe", *words.WORST_HEADERS]
    rows = [
        [
            f"{w.label} {words.clean(w.case)}\n{words.clean(w.implementation)} · {words.clean(w.recipe)}",
            *map("\n".join, words.worst(w)),
        ]
        for w in report.worst
    ]
    title = _title("Worst first: kernel error ÷ what is expected of the recipe")
    return [title, table(headers, rows, wrap=(0, 3, 4), right=(5,))]


def _costly(report: Report) -> list[str]:
    if not (report.costly or report.own_losses):
        return []
    rows = [[*words.costly(row), words.short_reasons(row, _COSTLY)] for row in report.costly[:SHOWN]]
    lines = [_title("Recipes that cost too much here")]
    if rows:
        lines += [
            *_paragraph(words.COSTLY_TOLD),
            "",
            table(words.COSTLY_HEADERS, rows, wrap=(0, 1, 4), right=(2, 3)),
        ]
    lines += _more(len(report.costly))
    return lines + [line for row in report.own_losses for line in _paragraph(words.own_loss(row), "- ")]


def _unseen(report: Report) -> list[str]:
    if not (report.unseen or report.doubts):
        return []
    lines = [_title("What these inputs could not have shown")]
    if report.unseen:
        rows = [words.unseen(row) for row in report.unseen]
        lines += [*_paragraph(words.UNSEEN_TOLD), "", table(words.UNSEEN_HEADERS, rows, wrap=(0, 2, 4))]
    if report.doubts:
        lines += ["", "INCONCLUSIVE, by reason, with the number of cells of each case:"]
    for row in report.doubts[:SHOWN]:
        lines += _paragraph(words.doubt(row, _CASES), "- ")
    return lines + _more(len(report.doubts))


def _hazards(report: Report) -> list[str]:
    if not report.hazards:
        return []
    shown = report.hazards[:SHOWN]
    headers = [*words.HAZARD_HEADERS, "worst at (b,h,i,j)"]
    rows = []
    for h in shown:
        place = f"{words.clean(h.case)} {words.clean(h.implementation)} {words.index(h.worst.where)}"
        rows.append([*words.hazard(h), place])
    advice = dict.fromkeys(h.kind for h in shown)
    lines = [_title("Overflow and range: where numbers left their format, first stage of each run")]
    lines.append(table(headers, rows, wrap=(1, 2, 6), right=(3, 4, 5)))
    lines += _more(len(report.hazards), "report.md, each one in hazards.csv")
    return lines + [line for kind in advice for line in _paragraph(f"{kind.value}: {kind.advice}")]


def _lies(report: Report) -> list[str]:
    if not report.lies:
        return []
    rows = [words.lie(row) for row in report.lies[:SHOWN]]
    lines = [_title("Masks that lie"), *_paragraph(words.LIES_TOLD), ""]
    lines.append(table(words.LIE_HEADERS, rows, wrap=(0,), right=(2, 4, 5, 6)))
    return [*lines, *_more(len(report.lies)), *_paragraph(HazardKind.SENTINEL.advice)]


def _relations(report: Report) -> list[str]:
    if not report.relations:
        return []
    shown = report.relations[:SHOWN_INPUTS]
    rows = [[words.clean(row.implementation), *words.relation(row), words.clean(row.case)] for row in shown]
    lines = [_title("Runs that should agree"), *_paragraph(words.RELATIONS_TOLD), ""]
    headers = ["implementation", *words.RELATION_HEADERS, "case"]
    lines.append(table(headers, rows, wrap=(0, 1, 5, 6), right=(2, 3, 4)))
    return [*lines, *_more(len(report.relations), shown=SHOWN_INPUTS)]


def _inputs(report: Report) -> list[str]:
    if not report.inputs:
        return []
    rows = [
        [words.clean(r.case), words.clean(r.shape), *words.facts(r)] for r in report.inputs[:SHOWN_INPUTS]
    ]
    lines = table(words.INPUT_HEADERS, rows, wrap=(0, 1), right=(2, 3, 4))
    more = _more(len(report.inputs), shown=SHOWN_INPUTS)
    return [
        _title("What the inputs are like (FP64, mean over seeds); why each case exists: report.md"),
        lines,
        *more,
    ]


def _refusals(report: Report) -> list[str]:
    if not report.refusals:
        return []
    rows = [
        [
            words.clean(r.implementation),
            str(r.cases),
            str(r.records),
            words.clip(words.clean(r.reason), _REASON),
        ]
        for r in report.refusals[:SHOWN]
    ]
    lines = table(["implementation", "cases", "cells", "reason"], rows, wrap=(0, 3), right=(1, 2))
    return [_title("Refused"), lines, *_more(len(report.refusals))]


def _known(report: Report) -> list[str]:
    if not report.known:
        return []
    lines = [_title("Known deviations")]
    for row in report.known:
        lines += _paragraph(words.clean(words.known(row)), "- ")
    return lines
