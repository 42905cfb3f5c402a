"""Stored timings as tables: speed beside the error it was bought with, as shares of what the machine reaches."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from harness.cost.units import show_rate
from harness.report import markdown, words
from harness.report.timings import Context, NotTimed, Timing
from harness.text_table import WIDTH, table

EMULATED = "emulated: the emulator's time, not the format's"
_NAMES = ("implementation", "recipe", "rel_l2", "error ÷ expected")
_NATIVE = (*_NAMES, "median ms", "interval", "TFLOP/s", "GB/s", "of ceiling", "KV bytes/token")
_EMULATOR = (*_NAMES, "emulator's ms", "interval", "KV bytes/token")
_LEFT = ("case", "implementation", "recipe", "status", "reason")
_SHORT = {"error ÷ expected": "error\n÷ exp.", "KV bytes/token": "KV B\n/token"}  # headers in a terminal
_REASON = 160
LEGEND = (
    "error ÷ expected: 1 is what is normal for this precision on these inputs (docs/error-model.md). median: of a call"
    " with its inputs in place, caches as the call before left them; interval: 95 %, of the median: of seven rounds"
    " that is all they took, and its lower end tells what other work on the machine left of the median.",
    "TFLOP/s: products of visible pairs alone, whatever was computed. GB/s: q, k, v and out once. of ceiling: the"
    " larger of its shares of the product rate (×) and of the copy rate (→) below; a narrow format's product ceiling is"
    " the better of its own products and FP32's, to which a kernel may widen. Above 100 %: inputs lay in a cache.",
    "Two of these differ where `python -m harness compare A B` says so, by turns; two rows of one table do not say it.",
)


def sig3(value: float) -> str:
    """Three significant digits, zeros kept; whole numbers from 1000 on, two digits of what is below a thousandth."""
    if 999.5 <= abs(value) < 1e15:
        return f"{value:.0f}"
    if 0 < abs(value) < 1e-3:
        return words.short(value)
    return f"{value:#.3g}".rstrip(".") if math.isfinite(value) else words.NONE


def timings_text(timings: Sequence[Timing], context: Context | None = None) -> str:
    """For a terminal, at most 100 columns wide."""
    context = context or Context()
    blocks = ["\n".join(_wrapped(line)) for line in _head(context)]
    for title, headers, rows in _tables(timings, context):
        short = ["name", *(_SHORT.get(h, h.replace(" ", "\n")) for h in headers[1:])]
        shown = table(short, rows, wrap=(0, 1), right=range(2, len(headers)))
        blocks.append("\n".join([*_wrapped(title), shown]))
    if context.not_timed:
        rows = _left(context.not_timed)
        blocks.append("== Not timed ==\n" + table(_LEFT, rows, wrap=(0, 1, 2, 4)))
    if context.products:
        blocks.append("\n".join(_wrapped(_ceilings(context))))
    if not timings:
        blocks.append("no benchmarks: nothing was timed")
    else:
        blocks.append("\n".join(line for told in _legend(timings) for line in _wrapped(told)))
    return "\n\n".join(blocks) + "\n"


def timings_markdown(timings: Sequence[Timing], context: Context | None = None) -> str:
    """As Markdown, text escaped."""
    context = context or Context()
    blocks = ["# Throughput", *map(markdown.escape, _head(context))]
    for title, headers, rows in _tables(timings, context):
        cells = [[markdown.escape(x) for x in row] for row in rows]
        blocks += [
            f"## {markdown.escape(title)}",
            markdown.table(headers, cells, right=range(2, len(headers))),
        ]
    if context.not_timed:
        rows = [[markdown.escape(x) for x in row] for row in _left(context.not_timed)]
        blocks += ["## Not timed", markdown.table(_LEFT, rows, right=())]
    if context.products:
        blocks.append(markdown.escape(_ceilings(context)))
    if not timings:
        blocks.append("no benchmarks: nothing was timed")
    else:
        blocks += _legend(timings)
    return "\n\n".join(blocks) + "\n"


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, break_on_hyphens=False)


def _head(context: Context) -> list[str]:
    if not context.machine:
        return []
    loads = f"; load average {' and '.join(f'{x:.1f}' for x in context.loads)}" if context.loads else ""
    return [words.clean(context.machine) + loads + " before and after" * (len(context.loads) == 2)]


def _legend(timings: Sequence[Timing]) -> list[str]:
    return [*LEGEND, *([EMULATED] if any(t.emulated for t in timings) else [])]


def _tables(timings: Iterable[Timing], context: Context) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, headers and rows: of each case what runs in its own precision, then what is emulated."""
    blocks: dict[tuple[bool, str, str], list[Timing]] = {}
    for t in timings:
        blocks.setdefault((t.emulated, t.case, t.shape), []).append(t)
    tables: list[tuple[str, Sequence[str], list[list[str]]]] = []
    for (emulated, case, shape), found in sorted(blocks.items(), key=lambda block: block[0][0]):
        title = f"{words.clean(case)} {words.clean(shape)}" + f", {EMULATED}" * emulated
        rows = [_emulator_row(t) if emulated else _row(t, context) for t in found]
        tables.append((title, _EMULATOR if emulated else _NATIVE, rows))
    return tables


def _row(t: Timing, context: Context) -> list[str]:
    return [*_names(t), *_time(t), sig3(t.tflops), sig3(t.gbytes), _share(*context.shares(t)), _kv(t)]


def _emulator_row(t: Timing) -> list[str]:
    return [*_names(t), *_time(t), _kv(t)]


def _names(t: Timing) -> list[str]:
    names = [words.clean(t.implementation), words.clean(t.recipe)]
    return [*names, words.figure(t.rel_l2), words.times(t.ratio)]


def _time(t: Timing) -> list[str]:
    known = t.low_ms > 0 and math.isfinite(t.high_ms)
    return [sig3(t.median_ms), f"{sig3(t.low_ms)}–{sig3(t.high_ms)}" if known else words.NONE]


def _share(products: float, copying: float) -> str:
    """The larger share, and which it is."""
    known = [(x, mark) for x, mark in ((products, "×"), (copying, "→")) if math.isfinite(x)]
    if not known:
        return words.NONE
    share, mark = max(known)
    return f"{100 * share:.{1 if share < 0.0995 else 0}f} % {mark}"


def _kv(t: Timing) -> str:
    return f"{t.kv_bytes_per_token:.6g}" if math.isfinite(t.kv_bytes_per_token) else words.NONE


def _left(cells: Iterable[NotTimed]) -> list[list[str]]:
    return [
        [
            *(words.clean(x) for x in (c.case, c.implementation, c.recipe, c.status)),
            words.clip(words.clean(c.reason), _REASON),
        ]
        for c in cells
    ]


def _ceilings(context: Context) -> str:
    rates = ", ".join(f"{words.clean(f)} {show_rate(rate, 'FLOP/s')}" for f, rate in context.products.items())
    copying = f"; copying {show_rate(context.copy, 'B/s')}" if math.isfinite(context.copy) else ""
    return f"Ceilings, measured in the same run: products {rates}{copying}"
