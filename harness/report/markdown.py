"""The report as Markdown (GitHub's dialect). Text from records is escaped: it opens no cell, link or HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from harness.records import HazardKind
from harness.report import words
from harness.report.model import DECIDED, Failure, GroupTable, Report

LISTED = 300  # rows of a section; the CSV files hold all (GitHub ends a job summary at 1 MiB)
TRACEBACKS = 5
_REASON = 1000  # characters of a reason
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)")
# What GitHub makes links of in plain text, and tells the people behind them: @name, #12, GH-12, addresses.
_REFERENCE = re.compile(r"@(?=\w)|#(?=\d)|\bGH-(?=\d)|\bwww(?=\.)|:(?=//)", re.IGNORECASE)
BREAK = "&#8203;"  # of no width: what stands around it is no longer one word

HOW_TO_READ = """\
## How to read this

Two truths, both computed in FP64, never mixed, and an answer to each:

* **kernel error** is measured against the *stored truth*: attention of the inputs as the recipe stores them
  (codes times scales). **Status** says whether the implementation does what its precision allows.
* **total error** is measured against the *exact truth*: attention of the inputs before they were stored.
  **Precision** says whether the recipe is good enough for these inputs.

With output ô, truth o and Δ = ô − o, over elements finite in both:

| figure | formula |
|---|---|
| rel_l2 | ‖Δ‖ / ‖o‖ |
| rel_l1 | Σ\\|Δ\\| / Σ\\|o\\| |
| rmse | √(mean of Δ²) |
| sqnr_db | 20·log10(‖o‖ / ‖Δ‖) |
| max ulp, p99 ulp | \\|Δ\\| in units in the last place of the output's format |
| bias ulp | mean of the signed Δ in ulps: rounding to nearest has none |
| slope | ⟨ô, o⟩ / ⟨o, o⟩ − 1: a wrong scale or a lost part of the row sum shows here |
| ×, error ÷ expected | √(mean over n independent rows of ΣΔ² / Σσ²), σ² the variance of the recipe's roundings |
| pooled | √(mean of the squares) over cases and seeds |
| bits | log2(format's max / largest magnitude met): below 0 it does not fit |

A status is decided in this order, and the first that fails says FAIL:

1. **classes**: NaN and ±Inf stand where the stored truth has them. No error figure covers an element whose class is
   wrong.
2. **ceiling**: \\|Δ\\| is below the bound that no correct run exceeds, for each element.
3. **yardstick**: error ÷ expected over the tensor, each head, 32 rows, row and element is at most
   slack·√(χ²ₙ(α/tests) / n), with α = 10⁻⁶ a cell and slack 1.25 (1.6 where all is FP32). Share of limit: the place
   that comes nearest to its own.
4. **fault directions**: the part of Δ along what a known fault would do (a scale that is off, a shrink, a first or last
   key lost, truncation), less that of an honest twin: \\|T\\| ≤ τ = √(2 ln(2K/α)) for K statistics.

**INCONCLUSIVE** passed them all on inputs that could not have shown a fault: fewer than 4 independent rows, an expected
error beyond 25 % of the output, or a shrink of 10 % unseen. A **diagnosis** names the fault that removes most of a
failed output's error (weighed by 1/σ²), the share it explains, and rivals that explain as much.

**Precision** is FAIL where the format lost values (overflow, saturation of what has no amax scale, a flush of more than
rounding may lose) or the expected total error is more than 2 × the **floor**, that of ideal scales: one amax scale a
head for what is narrower than 16 bits.

A hazard is *observed* in the run or *predicted* from FP64 values.
"""


def escape(text: str) -> str:
    """Untrusted text as one line of inert Markdown, which mentions nobody and refers to no issue."""
    text = _SPECIAL.sub(r"\\\g<0>", words.clean(text))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _REFERENCE.sub(rf"\g<0>{BREAK}", text)


def code(text: str) -> str:
    """Untrusted text as a code span on one line. Not for table cells, where `|` would still end the cell."""
    text = words.clean(text) or " "
    fence = "`" * (1 + _longest_run(text))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def code_block(text: str) -> str:
    """Untrusted lines in a fence that they cannot close."""
    lines = "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in text.splitlines())
    fence = "`" * max(3, 1 + _longest_run(lines))
    return f"{fence}text\n{lines}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table of cells that are already escaped."""
    rows = [list(row) for row in rows]
    if not rows:
        return ""
    align = ["right" if i in set(right) else "left" for i in range(len(headers))]
    return tabulate(rows, headers=list(headers), tablefmt="pipe", disable_numparse=True, colalign=align)


def to_markdown(report: Report) -> str:
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
    blocks = [block for section in sections if (block := section(report))]
    return "\n\n".join([*blocks, HOW_TO_READ])


def _more(total: int) -> str:
    return f"\n\n… and {total - LISTED} more in the CSV files" if total > LISTED else ""


def _headline(report: Report) -> str:
    head = report.headline
    stated = [*map(words.machine, head.machines), *head.ran]
    machines = "".join(f"* {escape(text)}\n" for text in stated)
    parts = ["# Attention accuracy", words.extent(head), f"**{words.counts(head)}**"]
    parts += [words.precision(head), words.repeated(head), DECIDED, machines]
    return "\n\n".join(part for part in parts if part).strip()


def _failures(report: Report) -> str:
    if not report.failures:
        return ""
    lines = [_failure(f) for f in report.failures[:LISTED]]
    raised = [f for f in report.failures if f.traceback][:TRACEBACKS]
    blocks = [
        f"<details><summary>{escape(f.case)} · {escape(f.implementation)} · {escape(f.recipe)}</summary>\n\n"
        f"{code_block(f.traceback)}\n\n</details>"
        for f in raised
    ]
    body = "\n".join(lines) + _more(len(report.failures))
    failed = words.many(sum(f.seeds for f in report.failures), "cell")
    return "\n\n".join([f"## Unexpected failures: {failed}", body, *blocks])


def _failure(f: Failure) -> str:
    place = f"{escape(f.case)} · {escape(f.implementation)} · {escape(f.recipe)}"
    again = code(words.command_line(words.command(f)))
    seeds = f"({f.seeds} of {f.of} seeds, {escape(f.device)})"
    told = escape(words.clip(f.reason, _REASON))
    if f.diagnosis:
        told += f"; *diagnosis:* {escape(words.clip(f.diagnosis, _REASON))}"
    return f"* **{f.status.value}** {place} {seeds}{words.margin(f)}: {told}; {again}"


def _problems(report: Report) -> str:
    lines = "".join(f"\n* {escape(p)}" for p in report.problems)
    return f"## Deviations that need attention\n{lines}" if lines else ""


def _groups(report: Report) -> str:
    return "\n\n".join(groups(report))


def groups(report: Report) -> list[str]:
    """Errors as blocks: a title, a heading and a table for each group, the legend. Nothing where no group has any."""
    if not report.groups:
        return []
    blocks = ["## Errors, pooled over cases and seeds by mean square"]
    for group in report.groups:
        extent = f"{words.many(group.cases, 'case')}, {words.many(group.seeds, 'seed')}"
        blocks.append(f"### {escape(group.group)} ({extent})")
        blocks.append(_grid(group))
    return [*blocks, "\n".join(f"* {escape(entry)}" for entry in words.LEGEND)]


def _grid(group: GroupTable) -> str:
    rows = [
        [
            escape(name),
            *(escape(words.cell(row[j])) for row in group.cells),
            *map(escape, words.cost(group.costs[j])),
        ]
        for j, name in enumerate(group.recipes)
    ]
    return table(["", *map(escape, group.implementations), *words.COST_HEADERS], rows)


def _tradeoff(report: Report) -> str:
    t = report.tradeoff
    if t is None:
        return ""
    rows = [[*map(escape, words.tradeoff(row, t))] for row in t.rows]
    shown = table(words.TRADEOFF_HEADERS, rows, right=(1, 2, 3, 4))
    parts = ["## Accuracy beside cost", escape(words.tradeoff_told(t)), shown]
    parts.append(
        f"![error against KV bytes and decode time, by recipe]({t.figure})" if t.figure else escape(t.note)
    )
    return "\n\n".join(part for part in parts if part)


def _worst(report: Report) -> str:
    headers = ["", "case", "implementation", "recipe", *map(escape, words.WORST_HEADERS)]
    rows = [
        [
            *map(escape, (w.label, w.case, w.implementation, w.recipe)),
            *(escape(", ".join(parts)) for parts in words.worst(w)),
        ]
        for w in report.worst
    ]
    shown = table(headers, rows, right=(4, 8))
    return f"## Worst first: kernel error ÷ what is expected of the recipe\n\n{shown}" if rows else ""


def _costly(report: Report) -> str:
    if not (report.costly or report.own_losses):
        return ""
    rows = [
        [*map(escape, words.costly(row)), escape(words.clip("; ".join(row.reasons), _REASON))]
        for row in report.costly[:LISTED]
    ]
    parts = ["## Recipes that cost too much here"]
    if rows:
        shown = table(words.COSTLY_HEADERS, rows, right=(2, 3))
        parts += [words.COSTLY_TOLD, shown + _more(len(report.costly))]
    parts.append("\n".join(f"* {escape(words.own_loss(row))}" for row in report.own_losses))
    return "\n\n".join(part for part in parts if part)


def _unseen(report: Report) -> str:
    if not (report.unseen or report.doubts):
        return ""
    parts = ["## What these inputs could not have shown"]
    if report.unseen:
        rows = [[*map(escape, words.unseen(row))] for row in report.unseen]
        parts += [words.UNSEEN_TOLD, table(words.UNSEEN_HEADERS, rows, right=(1, 3))]
    if report.doubts:
        parts.append("INCONCLUSIVE, by reason, with the number of cells of each case:")
        parts.append("\n".join(f"* {escape(words.doubt(row, LISTED))}" for row in report.doubts[:LISTED]))
    return "\n\n".join(parts)


def _hazards(report: Report) -> str:
    if not report.hazards:
        return ""
    headers = [*words.HAZARD_HEADERS, "case", "implementation", "b,h,i,j"]
    rows = [
        [*map(escape, words.hazard(h)), escape(h.case), escape(h.implementation), words.index(h.worst.where)]
        for h in report.hazards[:LISTED]
    ]
    kinds = dict.fromkeys(h.kind for h in report.hazards)
    advice = "\n".join(f"* {kind.value}: {kind.advice}" for kind in kinds)
    body = table(headers, rows, right=(3, 4, 5)) + _more(len(report.hazards))
    told = (
        "The first stage of each run at which numbers left their format: in how many cells it was seen in the run"
        " and foreseen from FP64 values, and the worst place."
    )
    return f"## Overflow and range\n\n{told}\n\n{body}\n\n{advice}"


def _lies(report: Report) -> str:
    if not report.lies:
        return ""
    rows = [[*map(escape, words.lie(row)), escape(", ".join(row.recipes))] for row in report.lies[:LISTED]]
    body = table([*words.LIE_HEADERS, "recipes"], rows, right=(2, 4, 5, 6))
    advice = HazardKind.SENTINEL.advice
    return f"## Masks that lie\n\n{words.LIES_TOLD}\n\n{body}{_more(len(report.lies))}\n\n{advice}"


def _relations(report: Report) -> str:
    if not report.relations:
        return ""
    rows = [
        [escape(row.implementation), *map(escape, words.relation(row)), escape(row.case)]
        for row in report.relations[:LISTED]
    ]
    body = table(["implementation", *words.RELATION_HEADERS, "case"], rows, right=(2, 3, 4))
    return f"## Runs that should agree\n\n{words.RELATIONS_TOLD}\n\n{body}{_more(len(report.relations))}"


def _inputs(report: Report) -> str:
    if not report.inputs:
        return ""
    rows = [
        [escape(r.case), escape(r.shape), *map(escape, words.facts(r)), escape(r.why)] for r in report.inputs
    ]
    body = table([*map(escape, words.INPUT_HEADERS), "why the case exists"], rows, right=(2, 3, 4))
    told = "From FP64, mean over seeds: softmax is saturated where the top probability nears 1."
    return f"## What the inputs are like\n\n{told}\n\n{body}"


def _refusals(report: Report) -> str:
    if not report.refusals:
        return ""
    rows = [
        [escape(r.implementation), str(r.cases), str(r.records), escape(words.clip(r.reason, _REASON))]
        for r in report.refusals[:LISTED]
    ]
    body = table(["implementation", "cases", "cells", "reason"], rows, right=(1, 2))
    return f"## Refused\n\n{body}{_more(len(report.refusals))}"


def _known(report: Report) -> str:
    lines = "".join(f"\n* {escape(words.known(row))}" for row in report.known)
    return f"## Known deviations\n{lines}" if lines else ""
