"""The points as tables for the terminal and as a Markdown page with its figure."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Callable, Sequence

import torch
from tabulate import tabulate

from benchmarks.scaling.fit import exponent
from benchmarks.scaling.plot import Panel, svg
from benchmarks.scaling.points import HEAD_DIM, HEADS, RECIPE, Point
from harness.cost.units import show_bytes, show_flops, show_ratio

Found = dict[str, list[Point]]
QUANTITIES: tuple[tuple[str, Callable[[Point], float | None]], ...] = (
    ("time", lambda p: p.seconds),
    ("allocated", lambda p: p.allocated),
    ("resident", lambda p: p.resident),
    ("FLOPs", lambda p: p.flops),
)
TOLD = f"""\
FP32, causal, [1, {HEADS}, L, {HEAD_DIM}], one thread; for `one decode step`, one query over L keys. **time**: CPU time
of a call, in multiples of the first row's; machines differ, ratios less so. **allocated**: the most that torch's
allocator had given out at once during the call, inputs not counted; equal in every run. **resident**: by how much the
call raised the peak resident set of a fresh process, in which freed memory goes back to the system at once. **FLOPs**:
of the matrix products that were computed, and how many times what causality leaves visible that is."""
FITTED = """\
Exponents b of y ∝ L^b, by least squares on logarithms over all lengths, with the 95 % interval; in brackets, the one
between the two largest lengths. A constant beside the power bends the line: the interval is then as wide as the bend,
and the brackets tell where it goes."""


def exponents(found: Found) -> list[list[str]]:
    """A row an algorithm: its exponents by quantity."""
    rows = []
    for name, points in found.items():
        cells = []
        for _, of in QUANTITIES:
            known = [(p.length, y) for p in points if (y := of(p))]
            if len(known) < 2:
                cells.append("")
                continue
            fitted = exponent([n for n, _ in known], [y for _, y in known])
            cells.append(f"{fitted} ({fitted.last:.2f})")
        rows.append([name, *cells])
    return rows


def measured(found: Found) -> list[list[str]]:
    """A row a point."""
    unit = _unit(found)
    return [
        [
            name, str(p.length), show_ratio(p.seconds / unit), show_bytes(p.allocated),
            "" if p.resident is None else show_bytes(p.resident), show_flops(p.flops), f"{p.flops / p.needed:.2f}",
        ]
        for name, points in found.items()
        for p in points
    ]  # fmt: skip


def _unit(found: Found) -> float:
    """Seconds that count as 1: of the first point there is."""
    return next(p.seconds for points in found.values() for p in points)


EXPONENT_HEADERS = ["algorithm", *(name for name, _ in QUANTITIES)]
POINT_HEADERS = ["algorithm", "L", "time", "allocated", "resident", "FLOPs", "÷ visible"]


def text(found: Found, skipped: Sequence[str]) -> str:
    """At most 100 columns."""

    def table(rows: list[list[str]], headers: list[str]) -> str:
        align = ["left", *["right"] * (len(headers) - 1)]
        return tabulate(rows, headers, "simple", disable_numparse=True, colalign=align)

    tables = [table(measured(found), POINT_HEADERS), table(exponents(found), EXPONENT_HEADERS)]
    notes = [line for note in (*skipped, seen(found)) for line in textwrap.wrap(note, 100)]
    return "\n\n".join([*tables, *(["\n".join(notes)] if notes else [])])


def seen(found: Found) -> str:
    """What the peaks say of naive and online attention at the largest length both have; empty without both."""
    naive, online = ({p.length: p for p in found.get(n, [])} for n in ("naive_masked", "online_softmax"))
    if not (common := sorted(naive.keys() & online.keys())):
        return ""
    longest = common[-1]
    a, b = naive[longest].allocated, online[longest].allocated
    scores = show_bytes(HEADS * longest**2 * 4)
    line = (
        f"At L = {longest} `naive_masked` held {show_bytes(a)}, {show_ratio(a / b)} times the {show_bytes(b)} of"
        f" `online_softmax`; scores of {HEADS} heads, L × L in FP32, are {scores}."
    )
    if len(common) > 1:
        before = common[-2]
        grown = [show_ratio(x[longest].allocated / x[before].allocated) for x in (naive, online)]
        line += f" From L = {before} to there the two grew {grown[0]} and {grown[1]} times."
    return line


def figure(found: Found) -> str:
    """The SVG."""
    unit = _unit(found)

    def panel(title: str, of: Callable[[Point], float]) -> Panel:
        return Panel(title, {name: [(p.length, of(p)) for p in points] for name, points in found.items()})

    return svg(
        [
            panel("time, in multiples of the first", lambda p: p.seconds / unit),
            panel("peak allocated, MiB", lambda p: p.allocated / 2**20),
            panel("FLOPs computed, MFLOP", lambda p: p.flops / 1e6),
        ],
        "Growth of time, peak memory and FLOPs with the length, by algorithm, on logarithmic axes",
    )


def markdown(found: Found, skipped: Sequence[str], command: str, figure_name: str, seconds: float) -> str:
    lines = ["# How the algorithms grow with the length", ""]
    lines += [
        f"`{command}`: recipe {RECIPE}, Python {platform.python_version()}, torch {torch.__version__},"
        f" {torch.backends.cpu.get_cpu_capability()}, {seconds:.0f} s.",
        "",
        f"![Time, peak memory and FLOPs over length, log-log]({figure_name})",
        "",
        *textwrap.wrap(seen(found), 120),
        "",
        TOLD,
    ]
    lines += ["", "## Exponents", "", FITTED, "", *_table(exponents(found), EXPONENT_HEADERS)]
    lines += ["", "## Points", "", *_table(measured(found), POINT_HEADERS)]
    if skipped:
        lines += ["", "## Not run", "", *(f"* {line}" for line in skipped)]
    return "\n".join(lines) + "\n"


def _table(rows: list[list[str]], headers: list[str]) -> list[str]:
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
