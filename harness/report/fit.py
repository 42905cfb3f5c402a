"""Markdown within a limit of bytes: whole lines, no open fence or fold, no table without its rows, and a word about
what was left out. For text that `harness.report.markdown` made: there a line that starts with a fence is one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from harness.report import words

_FENCE = re.compile("`{3,}")
_HEADING = re.compile("#{1,6} ")
_NAMED = 12  # headings
_TAIL = 2000  # bytes kept for the word about what was left out
LEAST = 2 * _TAIL


def fit(text: str, limit: int, whole: str) -> str:
    """`text` as it is, or so much of its start as fits with a tail that says what was cut. `whole`: where all of it
    is. Raises ValueError for a limit that holds no tail."""
    if len(text.encode()) <= limit:
        return text
    if limit < LEAST:
        raise ValueError(f"limit is {limit} bytes; allowed: at least {LEAST}")
    lines = text.rstrip("\n").split("\n")
    kept = _whole_lines(lines, limit - _TAIL)
    return "\n".join([*lines[:kept], "", _told(lines, kept, whole), ""]).lstrip("\n")


def _whole_lines(lines: Sequence[str], room: int) -> int:
    """How many lines may be kept: the last place within `room` bytes where nothing is open."""
    kept = used = 0
    for number, (line, closed) in enumerate(zip(lines, _closed(lines), strict=True), 1):
        used += len(line.encode()) + 1
        if used > room:
            break
        if closed:
            kept = number
    # A heading, or a table's head, with nothing under it says nothing.
    while kept and (not lines[kept - 1] or _HEADING.match(lines[kept - 1]) or _is_head(lines, kept)):
        kept -= 1
    return kept


def _closed(lines: Sequence[str]) -> Iterator[bool]:
    """For each line, whether text may end after it."""
    fence, folds = "", 0
    for line in lines:
        opened = _FENCE.match(line)
        if fence:
            fence = "" if line == fence else fence
        elif opened:
            fence = opened[0]
        else:
            folds += line.count("<details") - line.count("</details>")
        yield not fence and folds <= 0


def _is_head(lines: Sequence[str], kept: int) -> bool:
    """Whether the last line kept is a table's header or the rule under it."""
    rule = re.compile(r"\|[:\-|]+\|$")
    return bool(rule.match(lines[kept - 1])) or bool(kept < len(lines) and rule.match(lines[kept]))


def _told(lines: Sequence[str], kept: int, whole: str) -> str:
    left = lines[kept:]
    at = next((line for line in reversed(lines[:kept]) if _HEADING.match(line)), "")
    names = [_HEADING.sub("", line) for line in left if _HEADING.match(line)]
    told = f"**Cut here: {words.many(sum(map(bool, left)), 'line')} left out to fit.**"
    if at:
        told += f" The section above ({_short(at)}) may go on."
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        told += f" Left out: {'; '.join(map(_short, names[:_NAMED]))}{more}."
    return f"{told} All of it is in {whole}."


def _short(heading: str) -> str:
    """The start of a heading whose text is escaped already: cut between words, lest an escape is cut through."""
    text = _HEADING.sub("", heading)
    if len(text.encode()) <= 80:
        return text
    start = text.encode()[:80].decode(errors="ignore").rpartition(" ")[0]
    return f"{start} …" if start and "`" not in start else "a section"
