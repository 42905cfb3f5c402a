"""The review as one HTML file that opens offline: styles, script and figures inside, and a policy that forbids the
network and any other script. Every text is escaped by the template engine; what is not printable becomes `?`."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from importlib import resources
from typing import Any

from harness.report import words
from harness.report.review.blocks import Chart, Document

TEMPLATE, STYLE, SCRIPT = "review.html.j2", "review.css", "review.js"


def to_html(doc: Document) -> str:
    """Draws the figures, which takes most of the time. Ends with a newline."""
    from markupsafe import Markup

    drawn = {
        b.key: Markup(b.draw()) for section in doc.sections for b in section.blocks if isinstance(b, Chart)
    }
    script = _read(SCRIPT)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _environment().from_string(_read(TEMPLATE))
    made: str = page.render(
        doc=doc,
        drawn=drawn,
        style=Markup(_read(STYLE)),
        script=Markup(script),
        script_hash=digest,
        kind=_kind,
    )
    return made.rstrip() + "\n"


def _kind(block: object) -> str:
    return type(block).__name__


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import Environment, StrictUndefined

    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )


def _printable(value: object) -> object:
    """Texts on one line, without control and bidirectional characters. Markup, which is ours, as it is."""
    from markupsafe import Markup

    return words.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
