"""Certificates as a page: how far the FP64 truth can be from the real values, case by case."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from harness.report import words
from harness.report.markdown import escape
from harness.report.markdown import table as markdown_table

HEADERS = ("case", "stored as", "distance", "÷ rms(out)", "lse", "ball radius", "rows", "")
TOLD = (
    "Each case's first draw in ball arithmetic (python-flint, at least 192 bits): every ball contains the real value,"
    " so the distances are upper bounds of the FP64 truth's own error. Not every row has a bound: where a bias of −3e38"
    " absorbs the scores, the truth is what FP64 makes of them."
)


def summary(rows: Sequence[Any]) -> str:
    """One sentence over all rows of `harness.certify.certify_cases`."""
    if not rows:
        return "no case is small enough for a certificate"
    kept = [r.certificate for r in rows]
    inside = sum(c.contained for c in kept)
    relative = sorted(c.relative for c in kept)
    return (
        f"{inside} of {len(kept)} truths lie inside their enclosure; distance ÷ rms(out): median"
        f" {statistics.median(relative):.1e}, largest {relative[-1]:.1e}; largest ball radius"
        f" {max(c.radius for c in kept):.1e}"
    )


def cells(row: Any) -> list[str]:
    """What stands under HEADERS."""
    c = row.certificate
    notes = [] if c.contained else ["OUTSIDE"]
    notes += [f"{c.unbounded} rows unbounded"] * bool(c.unbounded) + [f"{c.left_out} left out"] * bool(
        c.left_out
    )
    figures = [f"{x:.1e}" for x in (c.distance, c.relative, c.lse_distance, c.radius)]
    return [words.clean(row.case), words.clean(row.recipe), *figures, str(c.rows), ", ".join(notes)]


def to_markdown(rows: Sequence[Any]) -> str:
    """The page. Ends with a newline."""
    body = markdown_table(HEADERS, [[escape(x) for x in cells(row)] for row in rows], right=(2, 3, 4, 5, 6))
    return f"# Certificates of the truth\n\n{TOLD}\n\n**{summary(rows)}**\n\n{body}\n"
