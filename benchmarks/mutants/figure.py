"""The report's figure, drawn by hand as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.mutants.calls import RECIPES
from benchmarks.mutants.report import JUDGES, Record, is_above, is_mutant, rejects

COLOURS = dict(zip(RECIPES, ("#4269d0", "#efb118", "#3ca951", "#ff725c"), strict=True))
LEFT, WIDE, ROW, BAND = 150, 300, 44, 9


def svg(records: Sequence[Record]) -> str:
    """Two bars a rule and precision: mutants above the limit that it fails, honest runs that it fails."""
    height = 60 + ROW * len(JUDGES)
    second = LEFT + WIDE + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{second + WIDE + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="16">mutants above the limit that it fails</text>',
        f'<text x="{second}" y="16">honest runs that it fails</text>',
    ]
    for i, (recipe, colour) in enumerate(COLOURS.items()):
        x = LEFT + 90 * i
        parts.append(f'<rect x="{x}" y="24" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="33">{recipe}</text>')
    for i, judge in enumerate(JUDGES):
        y = 44 + ROW * i
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 22}" text-anchor="end">{judge.replace(">", "&gt;")}</text>'
        )
        for k, recipe in enumerate(RECIPES):
            for x, kind in ((LEFT, is_above), (second, lambda r: not is_mutant(r))):
                found = [v for r in records if r["unit"][3] == recipe and kind(r)
                         and (v := rejects(r, judge)) is not None]  # fmt: skip
                if found:
                    part = sum(found) / len(found)
                    parts.append(_bar(x, y + BAND * k, part, COLOURS[recipe]))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(x: int, y: int, part: float, colour: str) -> str:
    width = (WIDE - 50) * part
    return (
        f'<rect x="{x}" y="{y}" width="{max(width, 1):.1f}" height="{BAND - 1}" fill="{colour}"/>'
        f'<text x="{x + width + 4:.1f}" y="{y + BAND - 1}" font-size="9">{100 * part:.0f} %</text>'
    )
