"""Figures as SVG text that stands alone: in a file, or inside a page. matplotlib is loaded by the first one.

Every series has its own colour and marker and its name beside it: none is told by colour alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.cost.units import show_bytes, show_time
from harness.optional import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*X<>"
_LINE = 0.058  # height of a label, of the axes'
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class TradeoffPoint:
    """One recipe: its total rel_l2, bytes of K and V a token, and seconds of a modelled decode step (None: none)."""

    recipe: str
    rel_l2: float
    kv_bytes: float
    decode_s: float | None = None


def tradeoff_svg(
    points: Sequence[TradeoffPoint], title: str = "Accuracy beside cost", identifier: str = ""
) -> str:
    """Error against KV bytes, and against decode time where any is known; log axes, `<svg …>` without a prolog, the
    same text for the same points. What a log axis cannot show (0, not finite) is left out. The metadata hold the
    `identifier`.

    Raises MissingExtra without matplotlib, ValueError where nothing is left to show.
    """
    need("the trade-off plot", "report", "matplotlib")
    shown = [p for p in points if _shown(p.rel_l2) and _shown(p.kv_bytes)]
    if not shown:
        raise ValueError("no point has a finite error and size above 0: nothing to plot")
    panels: list[tuple[str, Callable[[float], str], dict[int, float]]] = [
        ("KV bytes a token", show_bytes, {i: p.kv_bytes for i, p in enumerate(shown)})
    ]
    times = {i: p.decode_s for i, p in enumerate(shown) if p.decode_s is not None and _shown(p.decode_s)}
    if times:
        panels.append(("modelled decode step", show_time, times))
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", {**_STYLE, "svg.hashsalt": title}]):
        figure = Figure(figsize=(5.4 * len(panels), 4.0))
        figure.subplots_adjust(0.11 / len(panels) + 0.01, 0.21, 1 - 0.27 / len(panels), 0.9, wspace=0.62)
        figure.suptitle(_plain(title), x=0.01, ha="left", parse_math=False)
        for n, (name, show, values) in enumerate(panels):
            _panel(figure.add_subplot(1, len(panels), n + 1), shown, name, show, values)
        return _text(figure, title, identifier)


def _shown(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _panel(
    axes: Axes, points: Sequence[TradeoffPoint], name: str, show: Callable[[float], str],
    values: dict[int, float],
) -> None:  # fmt: skip
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(values.values()) / 1.25, max(values.values()) * 1.25)
    errors = [points[i].rel_l2 for i in values]
    low, high = math.floor(math.log10(min(errors) / 1.2)), math.ceil(math.log10(max(errors) * 1.2))
    axes.set_ylim(10.0**low, 10.0**high)
    axes.xaxis.set_major_locator(FixedLocator(_ticks(values.values(), name)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: show(x)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelrotation=30)
    axes.grid(which="major", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(name)
    axes.set_ylabel("rel_l2 against the exact truth")
    heights = {i: math.log10(points[i].rel_l2 / 10.0**low) / (high - low) for i in values}
    places = _spread(heights)
    for i, x in values.items():
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        axes.plot(
            [x],
            [points[i].rel_l2],
            marker,
            color=colour,
            markersize=7,
            markeredgecolor="white",
            clip_on=False,
        )
        axes.annotate(
            _plain(points[i].recipe), (x, points[i].rel_l2), (1.04, places[i]), textcoords="axes fraction",
            color=colour, va="center", parse_math=False, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkB": 4, "relpos": (0, 0.5)},
        )  # fmt: skip


def _ticks(values: Any, name: str) -> list[float]:
    """Round numbers inside the axis: powers of two of bytes, 1, 1.5, 2, 3, 4, 6, 8 times a power of ten of time."""
    low, high = min(values) / 1.25, max(values) * 1.25
    if name.startswith("KV"):
        steps = [2.0**n for n in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    else:
        tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = [m * 10.0**n for n in tens for m in (1, 1.5, 2, 3, 4, 6, 8)]
    inside = [x for x in steps if low <= x <= high]
    return inside[:: 1 + len(inside) // 9]


def _spread(heights: dict[int, float]) -> dict[int, float]:
    """Where labels stand: beside their points, at least a line apart, in their order, as parts of the height."""
    order = sorted(heights, key=lambda i: (heights[i], i))
    places: dict[int, float] = {}
    below = -math.inf
    for i in order:
        places[i] = below = max(heights[i], below + _LINE)
    above = max(1.0, _LINE * (len(order) - 1))
    for i in reversed(order):
        places[i] = above = min(places[i], above)
        above -= _LINE
    return places


def _text(figure: Any, title: str, identifier: str) -> str:
    """The SVG without prolog and dates."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    out = io.StringIO()
    metadata = {"Title": _plain(title), "Identifier": identifier or None, "Date": None, "Creator": None}
    figure.savefig(out, format="svg", metadata=metadata)
    text = out.getvalue()
    lines = text[text.index("<svg") :].splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"
