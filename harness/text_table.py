"""A plain table for a terminal. Apart from the reports, so that `list` loads none of them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence

from tabulate import tabulate

WIDTH = 100
GAP = 2  # between columns of tabulate's "plain" format
_NARROWEST = 8


class _NameWrapper(textwrap.TextWrapper):
    """Breaks identifiers after `_` and `/` too, before it cuts through them."""

    wordsep_simple_re = re.compile(r"( +|(?<=[_/])(?=[^ _/]))")


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    wrap: Collection[int],
    right: Collection[int] = (),
) -> str:
    """A plain table within WIDTH. The columns `wrap` give way, the widest first; the others keep theirs."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(widest(line[i]) for line in lines) for i in range(len(headers))]
    while sum(widths) + GAP * (len(widths) - 1) > WIDTH:
        largest = max(wrap, key=lambda i: widths[i])
        if widths[largest] <= _NARROWEST:
            break
        widths[largest] -= 1
    for line in lines:
        for i in wrap:
            if len(line[i]) > widths[i]:
                line[i] = fold(line[i], widths[i])
    # Headers are lines like others: tabulate would keep a column two wider than its own.
    lines.insert(1, ["-" * max(widest(line[i]) for line in lines) for i in range(len(headers))])
    align = ["right" if i in right else "left" for i in range(len(headers))]
    return tabulate(lines, tablefmt="plain", disable_numparse=True, colalign=align)


def widest(text: str) -> int:
    """Of its longest line."""
    return max(map(len, text.split("\n")))


def fold(text: str, width: int) -> str:
    """Names broken to lines of `width`."""
    wrapper = _NameWrapper(width, break_on_hyphens=False)
    return "\n".join(part for line in text.split("\n") for part in wrapper.wrap(line))
