"""Three log-log panels as one SVG that needs nothing else: no script, no font, no style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

# Okabe and Ito's palette, told apart with any colour vision; the markers differ as well.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#000000")
GREY, LIGHT = "#666666", "#DDDDDD"
PANEL_W, PANEL_H, LEFT, TOP, GAP, FOOT = 238, 230, 62, 40, 74, 84
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Panel:
    """One quantity: `series` by name, all over the same lengths or some of them."""

    title: str
    series: dict[str, Points]


@dataclass(frozen=True)
class _Axis:
    """Log scale from `low` to `high`, onto pixels `start` … `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.stop - self.start)


def svg(panels: Sequence[Panel], description: str) -> str:
    """The figure, 900 or so wide. Names that no panel has data of are left out of the legend."""
    width = LEFT + len(panels) * (PANEL_W + GAP) - GAP + 16
    height = TOP + PANEL_H + FOOT
    names = list(dict.fromkeys(name for panel in panels for name, points in panel.series.items() if points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(description)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, panel in enumerate(panels):
        parts += _panel(panel, names, LEFT + i * (PANEL_W + GAP))
    parts += _legend(names, height - 22)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, names: Sequence[str], left: float) -> list[str]:
    points = [p for series in panel.series.values() for p in series]
    lengths = sorted({n for n, _ in points})
    low = 10.0 ** math.floor(math.log10(min(y for _, y in points)))
    high = 10.0 ** math.ceil(math.log10(max(y for _, y in points) * 1.001))
    x = _Axis(lengths[0] / 1.2, lengths[-1] * 1.2, left, left + PANEL_W)
    y = _Axis(low, high, TOP + PANEL_H, TOP)
    parts = [_text(left, TOP - 16, panel.title, "start", weight="bold")]
    for exponent in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = y(10.0**exponent)
        parts.append(f'<path d="M{left} {at:.1f}H{left + PANEL_W}" stroke="{LIGHT}"/>')
        parts.append(_text(left - 6, at + 4, _power(exponent), "end", GREY))
    for length in lengths:
        at = x(length)
        parts.append(f'<path d="M{at:.1f} {TOP + PANEL_H}v5" stroke="{GREY}"/>')
        if round(math.log2(length / lengths[0])) % max(2, len(lengths) // 3) == 0:
            parts.append(_text(at, TOP + PANEL_H + 18, str(length), "middle", GREY))
    parts.append(_text(left + PANEL_W / 2, TOP + PANEL_H + 35, "length L", "middle", GREY))
    parts += _guides(x, y, lengths) if lengths[-1] >= 4 * lengths[0] else []
    for i in reversed(range(len(names))):  # the first on top, and thinner: lines that coincide both show
        parts += _series(panel.series.get(names[i], ()), i, x, y)
    return parts


def _guides(x: _Axis, y: _Axis, lengths: Sequence[int]) -> list[str]:
    """What growth as L and as L² looks like, in the corner that growing lines leave empty."""
    parts = []
    start, stop, foot = lengths[0], lengths[0] * 4, y.high / 24
    for power, label in ((1, "∝ L"), (2, "∝ L²")):
        end = foot * (stop / start) ** power
        line = f"M{x(start):.1f} {y(foot):.1f}L{x(stop):.1f} {y(end):.1f}"
        parts.append(f'<path d="{line}" stroke="{GREY}" stroke-dasharray="3 3" fill="none"/>')
        parts.append(_text(x(stop) + 5, y(end) + 4, label, "start", GREY))
    return parts


def _series(points: Points, i: int, x: _Axis, y: _Axis) -> list[str]:
    if not points:
        return []
    line = "L".join(f"{x(n):.1f} {y(v):.1f}" for n, v in points)
    colour = COLOURS[i % len(COLOURS)]
    parts = [f'<path d="M{line}" stroke="{colour}" stroke-width="{1.5 + 0.8 * i:.1f}" fill="none"/>']
    return parts + [_marker(x(n), y(v), i) for n, v in points]


def _marker(x: float, y: float, i: int) -> str:
    colour = COLOURS[i % len(COLOURS)]
    shapes = (
        f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z",
        f"M{x:.1f} {y - 5:.1f}l5 9h-10z",
        f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
        f"M{x:.1f} {y + 5:.1f}l5 -9h-10z",
    )
    return f'<path d="{shapes[i % len(shapes)]}" fill="{colour}" stroke="white"/>'


def _legend(names: Sequence[str], y: float) -> list[str]:
    parts, x = [], float(LEFT)
    for i, name in enumerate(names):
        colour = COLOURS[i % len(COLOURS)]
        parts.append(
            f'<path d="M{x:.0f} {y - 4:.0f}h24" stroke="{colour}" stroke-width="{1.5 + 0.8 * i:.1f}"/>'
        )
        parts += [_marker(x + 12, y - 4, i), _text(x + 30, y, name, "start")]
        x += 54 + 7 * len(name)
    return parts


def _text(x: float, y: float, text: str, anchor: str, fill: str = "black", weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{fill}" font-weight="{weight}">{escape(text)}</text>'


def _power(exponent: int) -> str:
    if -1 <= exponent <= 2:
        return f"{10.0**exponent:g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
