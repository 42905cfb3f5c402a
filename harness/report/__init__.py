"""Reports: pure functions of records. They load neither torch nor numpy, and never recompute a figure.

`summary` makes a `Report` (data), `to_text` and `to_markdown` render it, `write_report` fills a folder;
`read_timings`, `timings_text` and `timings_markdown` do the same for stored timings.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from harness.deviations import Review
from harness.files import write_atomically
from harness.records import Record
from harness.report.csv_files import cases_csv, cells_csv, hazards_csv
from harness.report.markdown import to_markdown
from harness.report.model import Report
from harness.report.tables import latest, summary
from harness.report.text import to_text
from harness.report.throughput import timings_markdown, timings_text
from harness.report.timings import Context, Timing, read_context, read_timings

__all__ = [
    "Context",
    "Report",
    "Timing",
    "cases_csv",
    "cells_csv",
    "hazards_csv",
    "latest",
    "read_context",
    "read_timings",
    "summary",
    "timings_markdown",
    "timings_text",
    "to_markdown",
    "to_text",
    "write_report",
]


def write_report(records: Iterable[Record], review: Review, folder: Path) -> Report:
    """Write report.md, cells.csv, cases.csv and hazards.csv into `folder`, each whole or not at all. Returns what was
    rendered."""
    records = list(records)
    report = summary(records, review)
    records = latest(records)
    write_atomically(folder / "report.md", to_markdown(report))
    write_atomically(folder / "cells.csv", cells_csv(records, review))
    write_atomically(folder / "cases.csv", cases_csv(records))
    write_atomically(folder / "hazards.csv", hazards_csv(records))
    return report
