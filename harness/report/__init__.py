"""Reports: pure functions of records. They load neither torch nor numpy, and never recompute a figure.

`summary` makes a `Report` (data), `to_text` and `to_markdown` render it, `write_report` fills a folder; `to_document`
(JSON), `to_junit`, `job_summary` and `comment` are for other programs, `changes` compares two runs;
`read_timings`, `timings_text` and `timings_markdown` do the same for stored timings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.beside import beside
from harness.deviations import Review
from harness.files import write_atomically, write_lines_atomically
from harness.optional import MissingExtra
from harness.records import Record
from harness.report.changes import Changes, changes
from harness.report.csv_files import cases_csv, cells_csv, hazards_csv
from harness.report.markdown import to_markdown
from harness.report.model import Report
from harness.report.tables import latest, summary
from harness.report.text import to_text
from harness.report.tradeoff import plot

if TYPE_CHECKING:
    from harness.report.document import to_document
    from harness.report.github import comment, job_summary
    from harness.report.junit import to_junit
    from harness.report.throughput import timings_markdown, timings_text
    from harness.report.timings import Context, Timing, read_context, read_timings

# What only some commands use, and is loaded by its first use (PEP 562).
_LATER = {
    "to_document": "document",
    "comment": "github",
    "job_summary": "github",
    "to_junit": "junit",
    "timings_markdown": "throughput",
    "timings_text": "throughput",
    "Context": "timings",
    "Timing": "timings",
    "read_context": "timings",
    "read_timings": "timings",
}
FIGURE = "tradeoff.svg"
MANY = 10_000  # records whose table takes longer than a fork
NOT_DRAWN = "the trade-off plot was not drawn: python -m harness report --plots draws it"

__all__ = [
    "Changes",
    "Context",
    "Report",
    "Timing",
    "cases_csv",
    "cells_csv",
    "changes",
    "comment",
    "hazards_csv",
    "job_summary",
    "latest",
    "read_context",
    "read_timings",
    "summary",
    "timings_markdown",
    "timings_text",
    "to_document",
    "to_junit",
    "to_markdown",
    "to_text",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def write_report(records: Iterable[Record], review: Review, folder: Path, plots: bool = True) -> Report:
    """Write report.md, cells.csv, cases.csv, hazards.csv and, where recipes can be compared and matplotlib is there,
    tradeoff.svg into `folder`, each whole or not at all. Returns what was rendered.

    Without `plots` nothing is drawn, which takes longer than all else of a small report; a plot of the same points,
    which a run drew, stays.
    """
    records = list(records)
    newest = latest(records)

    def cells() -> None:
        write_lines_atomically(folder / "cells.csv", cells_csv(newest, review))

    with beside(cells, len(records) >= MANY):  # it takes as long as all else
        report = _with_figure(summary(records, review), folder / FIGURE, plots)
        write_atomically(folder / "report.md", to_markdown(report))
        write_lines_atomically(folder / "cases.csv", cases_csv(newest))
        write_lines_atomically(folder / "hazards.csv", hazards_csv(newest))
    return report


def _with_figure(report: Report, path: Path, draw: bool) -> Report:
    """The report, which says where its plot is or why there is none. A plot of other points goes."""
    content = plot(report.tradeoff)
    note = "" if content is None else NOT_DRAWN
    if content is not None and draw:
        try:
            write_atomically(path, content.svg())
        except MissingExtra as error:
            note = str(error)
    there = content is not None and content.is_in(path)
    if not there:
        path.unlink(missing_ok=True)
    if report.tradeoff is None:
        return report
    figure, note = (path.name, "") if there else ("", note)
    return replace(report, tradeoff=replace(report.tradeoff, figure=figure, note=note))
