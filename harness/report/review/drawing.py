"""What all figures of the review share: size, style, and SVG that takes its colours from the page, dark or light."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harness.report.plots import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 8.0  # inches of a figure: with 9-point text, what fills a page's column
# Fills of cells, from well to badly: the page gives each a light and a dark value.
FILLS = ("#e0e0e1", "#f3e2b1", "#f0b671", "#d9744d", "#fafafb")
INK, LINES, PAPER, DARK = "#000000", "#dddddd", "#ffffff", "#1a1a1b"
_VARIABLES = {
    INK: "currentColor", LINES: "var(--line)", PAPER: "var(--paper)", DARK: "var(--on-cell)",
    **{colour.lower(): f"var(--series-{i})" for i, colour in enumerate(COLOURS) if colour != INK},
    **{fill: f"var(--cell-{i})" for i, fill in enumerate(FILLS)},
}  # fmt: skip
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.parse_math": False,  # names are the user's: $ is a character
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}
_NEVER_TWICE = re.compile(r"<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->", re.DOTALL)


def themed(svg: str) -> str:
    """SVG that takes its colours and its font from the page around it."""

    def style(found: re.Match[str]) -> str:
        kept = re.sub(r"font-family:[^;\"]*;?|font: ?([0-9.]+px)[^;\"]*;?", _font, found[0])
        return re.sub(r"#[0-9a-f]{6}\b", lambda c: _VARIABLES.get(c[0], c[0]), kept)

    bare = _NEVER_TWICE.sub("", svg[svg.index("<svg") :])
    bare = re.sub(r'fill="(#[0-9a-f]{6})"', r'style="fill: \1"', bare)  # the ground of a hatch
    bare = re.sub(r'style="[^"]*"', style, bare)
    bare = re.sub(r'(<svg\b[^>]*?) (?:width|height)="[^"]*pt"', r"\1", bare)
    return re.sub(r'(<svg\b[^>]*?) (?:width|height)="[^"]*pt"', r"\1", bare)


def _font(found: re.Match[str]) -> str:
    return f"font-size: {found[1]};" if found[1] else ""


@contextmanager
def drawing(title: str) -> Iterator[None]:
    from matplotlib import style

    with style.context(["default", {**_STYLE, "svg.hashsalt": title}]), warnings.catch_warnings():
        # The page's fonts have what matplotlib's lacks: text stays text.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")
        warnings.filterwarnings("ignore", message=".*layout not applied.*")
        yield


def figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def to_svg(drawn: Figure, title: str) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(drawn)
    out = io.StringIO()
    drawn.savefig(out, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    return themed("\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n")


def mark(index: int) -> tuple[str, str]:
    return COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
