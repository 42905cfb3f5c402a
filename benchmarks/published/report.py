"""The measured rows as a table for the terminal and as a Markdown page."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
from tabulate import tabulate

from benchmarks.published.rows import Paper, Row

COMMAND = "python noxfile.py -s published"
Found = Sequence[tuple[Paper, Sequence[Row]]]


def table(rows: Sequence[Row]) -> str:
    """At most 100 columns."""
    cells = [[r.setting, r.published, r.shown, r.band, r.verdict] for r in rows]
    return tabulate(
        cells, ["setting", "published", "ours", "band", "verdict"], "simple", disable_numparse=True
    )


def summary(found: Found) -> str:
    rows = [r for _, rows in found for r in rows]
    outside = [r.setting for r in rows if not r.within]
    return f"{len(rows) - len(outside)} of {len(rows)} rows within their bands" + (
        f"; outside: {'; '.join(outside)}" if outside else ""
    )


def markdown(found: Found, full: bool, seconds: float) -> str:
    command = COMMAND + (" -- --full" if full else "")
    sizes = "the papers' sizes" if full else "sizes for continuous integration"
    lines = [
        "# Published numbers, measured again",
        "",
        f"`{command}`: {sizes}, {summary(found)}.",
        f"Python {platform.python_version()}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()},"
        f" {seconds:.0f} s. Seeds count from 0, inputs come from NumPy's Philox. All precisions are emulated.",
        "",
        "A band is what counts as the same figure: the spread seen between draws, or the digits that are printed.",
        "Where a paper leaves its setting open, one was found by search and then confirmed on other draws.",
    ]
    for paper, rows in found:
        lines += ["", f"## {paper.title}", "", f"Source: {paper.source}.", ""]
        lines += [
            "| setting | published | ours | band | verdict | measured at |",
            "|---|---|---|---|---|---|",
        ]
        for r in rows:
            at = r.size + (f" ({r.note})" if r.note else "")
            lines.append(f"| {r.setting} | {r.published} | {r.shown} | {r.band} | {r.verdict} | {at} |")
    return "\n".join(lines) + "\n"
