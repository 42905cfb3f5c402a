"""The review's figures: SVG for a page that is dark or light. matplotlib is loaded by the first one drawn.

Nothing is told by colour alone: series have markers, bars hatches, cells words or letters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.evidence import Attribution, StageShare
from harness.records import Status
from harness.report import words
from harness.report.plots import COLOURS
from harness.report.review.drawing import DARK, FILLS, INK, LINES, PAPER, drawing, figure, mark, to_svg
from harness.report.review.series import Grid, GridCell, Ladder, Step, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = 3  # of a heat map, side by side
SWEEPS = 2
RATIOS = ((1.25, "≤ 1.25"), (2.0, "≤ 2"), (10.0, "≤ 10"), (math.inf, "> 10"))
ERRORS = ((1e-3, "≤ 1e-3"), (1e-2, "≤ 1e-2"), (1e-1, "≤ 0.1"), (math.inf, "> 0.1"))


def lengths(found: Sequence[Sweep]) -> str:
    """Error against the number of keys, a panel for each of the longest sweeps, a line for each recipe."""
    shown = sorted(found, key=lambda s: -max(map(len, s.points.values())))[:SWEEPS]
    order = list(dict.fromkeys(recipe for sweep in found for recipe in sweep.points))
    with drawing("length"):
        page = figure(3.6)
        axes = page.subplots(1, len(shown), squeeze=False, sharey=True)[0]
        for panel, sweep in zip(axes, shown, strict=True):
            _lines(panel, sweep, order)
        axes[0].set_ylabel("total rel_l2")
        handles, labels = _legend(axes, order)
        page.legend(handles, labels, loc="outside upper left", ncols=min(len(order), 4))
        return to_svg(page, "Error against length")


def _lines(axes: Axes, sweep: Sweep, order: Sequence[str]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, ScalarFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for recipe, points in sweep.points.items():
        drawn = [(n, total) for n, total in points if math.isfinite(total) and total > 0]
        if drawn:
            colour, marker = mark(order.index(recipe))
            axes.plot(
                *zip(*drawn, strict=True), marker=marker, color=colour, markersize=5, linewidth=1.2,
                markeredgecolor=PAPER, markeredgewidth=0.6, label=words.clean(recipe),
            )  # fmt: skip
    met = sorted({n for points in sweep.points.values() for n, _ in points})
    powers = [n for n in met if n & (n - 1) == 0] or met
    axes.xaxis.set_major_locator(FixedLocator(powers[:: 1 + len(powers) // 8]))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: words.short(y).replace(".0e", "e")))
    axes.grid(axis="y", color=LINES, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("keys")
    axes.set_title(words.clean(sweep.name))


def _legend(axes: Sequence[Axes], order: Sequence[str]) -> tuple[list[Any], list[str]]:
    """One entry for each recipe that has a line somewhere."""
    found: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(str(label), handle)
    names = [name for recipe in order if (name := words.clean(recipe)) in found]
    return [found[name] for name in names], names


def heat_map(grid: Grid) -> str:
    """Implementation × case, a panel for each recipe."""
    across = min(len(grid.recipes), PANELS)
    down = -(-len(grid.recipes) // across)
    with drawing("heat map"):
        page = figure(down * (1.1 + 0.2 * len(grid.rows)) + 0.35)
        axes = page.subplots(down, across, squeeze=False, sharey=True)
        for panel in axes.flat[len(grid.recipes) :]:
            panel.set_axis_off()
        for panel, recipe in zip(axes.flat, grid.recipes, strict=False):
            _matrix(
                panel,
                {
                    (x, y): cell
                    for y, row in enumerate(grid.rows)
                    for x, name in enumerate(grid.implementations)
                    if (cell := grid.cells[row, name, recipe]) is not None
                },
                _grid_look, grid.implementations, grid.rows, slanted=True,
            )  # fmt: skip
            panel.set_title(words.clean(recipe), fontweight="bold", pad=8)
        bins = (*RATIOS[:-1], (math.inf, "> 10, or fails"))
        _fill_legend(page, "error ÷ normal", bins, "not judged", "fails or raises")
        return to_svg(page, "Implementation × case")


def _grid_look(cell: GridCell) -> tuple[int, str, bool]:
    """Fill, text and whether it is hatched."""
    failed = cell.mark in ("F", "E", "k")
    fill = len(RATIOS) - 1 if failed else _bin(cell.ratio, RATIOS)
    text = words.times(cell.ratio)[1:] if cell.ratio > RATIOS[0][0] and not cell.mark else ""
    return fill, f"{text}{cell.mark}", cell.mark in ("F", "E")


def ladder(found: Ladder, recipes: Sequence[str]) -> str:
    """Recipe × amplitude."""
    ran = [recipe for recipe in recipes if any((rung.case, recipe) in found.steps for rung in found.rungs)]
    cells = {
        (x, y): step
        for y, recipe in enumerate(ran)
        for x, rung in enumerate(found.rungs)
        if (step := found.steps.get((rung.case, recipe))) is not None
    }
    names = [f"{amplitude(r.peak)}\n{r.case.partition('/')[2]}" for r in found.rungs]
    with drawing("ladder"):
        page = figure(1.5 + 0.32 * len(ran))
        panel = page.subplots()
        _matrix(panel, cells, _step_look, names, ran, slanted=False)
        panel.set_xlabel("largest |score|, and the case")
        _fill_legend(page, "total rel_l2", ERRORS, "no figure", "breaks")
        return to_svg(page, "Where each format breaks")


def amplitude(peak: float) -> str:
    return f"{peak:,.0f}" if 100 <= peak < 1e6 else words.number(peak)


def _step_look(step: Step) -> tuple[int, str, bool]:
    broken = step.status is Status.FAIL
    text = "BREAKS" if broken else words.optional(step.error)
    return _bin(step.error, ERRORS), text + "?" * (step.status is Status.INCONCLUSIVE), broken


def _bin(value: float, bins: Sequence[tuple[float, str]]) -> int:
    return len(bins) if math.isnan(value) else next(i for i, (top, _) in enumerate(bins) if value <= top)


def _matrix(
    axes: Axes, cells: Mapping[tuple[int, int], Any], look: Callable[[Any], tuple[int, str, bool]],
    columns: Sequence[str], rows: Sequence[str], slanted: bool,
) -> None:  # fmt: skip
    """Cells as one path a fill: a path each would be most of the page."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    fills: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
    for place, cell in cells.items():
        fill, text, hatched = look(cell)
        fills[fill, hatched].append(place)
        if text:
            axes.text(*place, text, ha="center", va="center", fontsize=7, color=DARK)
    for (fill, hatched), places in fills.items():
        path = Path.make_compound_path(*(_square(Path, *place) for place in places))
        hatch = {"hatch": "////", "edgecolor": DARK} if hatched else {"edgecolor": PAPER}
        axes.add_patch(PathPatch(path, facecolor=FILLS[fill], linewidth=0.0 if hatched else 1.0, **hatch))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [_lines_of(name) for name in columns])
    axes.set_yticks(range(len(rows)), [words.clean(name) for name in rows])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    if slanted:
        axes.xaxis.set_ticks_position("top")
        for label in axes.get_xticklabels():
            label.set(rotation=40, ha="left", rotation_mode="anchor")


def _lines_of(name: str) -> str:
    return "\n".join(words.clean(line) for line in name.split("\n"))


def _square(path: Any, x: int, y: int) -> Any:
    return path([(x - 0.47, y - 0.45), (x + 0.47, y - 0.45), (x + 0.47, y + 0.45), (x - 0.47, y + 0.45),
                 (x - 0.47, y - 0.45)], [1, 2, 2, 2, 79])  # fmt: skip


def _fill_legend(
    page: Figure, name: str, bins: Sequence[tuple[float, str]], nothing: str, hatched: str
) -> None:
    from matplotlib.patches import Patch

    told = [text for _, text in bins]
    handles = [
        Patch(facecolor=FILLS[i], edgecolor=LINES, linewidth=0.6, label=t)
        for i, t in enumerate([*told, nothing])
    ]
    handles.append(Patch(facecolor=FILLS[-1], edgecolor=DARK, linewidth=0.0, hatch="////", label=hatched))
    page.legend(
        handles=handles, loc="outside lower left", ncols=len(handles), title=name, alignment="left",
        handlelength=1.4, columnspacing=1.2, fontsize=8, title_fontsize=8,
    )  # fmt: skip


def attribution(shown: Sequence[tuple[Attribution, Sequence[StageShare]]]) -> str:
    """Bars by stage, a panel for each recipe."""
    rows = max(len(stages) for _, stages in shown)
    across = min(len(shown), PANELS)
    down = -(-len(shown) // across)
    with drawing("attribution"):
        page = figure(down * (0.9 + 0.34 * rows) + 0.3)
        axes = page.subplots(down, across, squeeze=False)
        for panel in axes.flat[len(shown) :]:
            panel.set_axis_off()
        for panel, (a, stages) in zip(axes.flat, shown, strict=False):
            _bars(panel, a, stages, rows)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        page.legend(handles, labels, loc="outside lower left", ncols=2)
        return to_svg(page, "Where the error arises")


def _bars(axes: Axes, a: Attribution, stages: Sequence[StageShare], rows: int) -> None:
    from matplotlib.ticker import PercentFormatter

    places = range(len(stages))
    for shift, name, values, look in (
        (-0.2, "alone", [s.alone_share for s in stages], {"color": COLOURS[0]}),
        (0.2, "without", [s.without_share for s in stages],
         {"facecolor": PAPER, "edgecolor": COLOURS[1], "hatch": "////", "linewidth": 0.8}),
    ):  # fmt: skip
        drawn = [v if math.isfinite(v) else 0.0 for v in values]
        axes.barh([p + shift for p in places], drawn, height=0.36, label=name, **look)
        for p, v in zip(places, values, strict=True):
            at = max(v, 0.0) if math.isfinite(v) else 0.0
            told = f"{v:.0%}".replace("-0%", "0%").replace("-", "−") if math.isfinite(v) else "n/a"
            axes.annotate(
                told, (at, p + shift), (3, 0), textcoords="offset points", va="center", fontsize=7, color=INK
            )
    axes.set_yticks(list(places), [f"{words.clean(s.stage)}\n{words.clean(s.format)}" for s in stages])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.margins(x=0.2)
    axes.axvline(0, color=INK, linewidth=0.6)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.locator_params(axis="x", nbins=5)
    axes.spines["left"].set_visible(False)
    axes.set_title(f"{words.clean(a.recipe)}\n{words.clean(a.case)}", fontsize=8)
