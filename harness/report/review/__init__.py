"""`review`: the document that people sign. A pure function of records and evidence; it needs the extra `report`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from harness.deviations import Review
from harness.evidence import Evidence
from harness.files import write_atomically
from harness.optional import need
from harness.records import Record
from harness.report.review.document import document
from harness.report.review.html import to_html
from harness.report.review.markdown import to_markdown
from harness.report.review.material import REAL, Asked, Material, Source

__all__ = [
    "MARKDOWN", "PAGE", "REAL", "Asked", "Material", "Source", "check_extra", "document", "to_html", "to_markdown",
    "write_review",
]  # fmt: skip
MARKDOWN, PAGE = "review.md", "review.html"


def check_extra() -> None:
    """Raise MissingExtra where a page cannot be made: better before records are read than after."""
    need("the review", "report")


def write_review(
    records: Iterable[Record], listed: Review, evidence: Iterable[Evidence], asked: Asked, folder: Path
) -> None:
    """Write review.md and review.html into `folder`, each whole or not at all. Raises MissingExtra."""
    check_extra()
    doc = document(Material(records, listed, evidence, asked))
    write_atomically(folder / PAGE, to_html(doc))
    write_atomically(folder / MARKDOWN, to_markdown(doc))
