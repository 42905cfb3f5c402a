"""What GitHub shows: a job's summary and a pull request's comment, within its limits, what changed first.

Pure functions of a `Report` and, where there is something to compare with, of `Changes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.report import markdown, words
from harness.report.changes import MOVED, Change, Changes, Key, Side
from harness.report.fit import LEAST, fit
from harness.report.markdown import escape
from harness.report.model import Failure, Report

# docs.github.com: a step's summary ends at 1 MiB, of all that is appended to it; past that nothing is shown.
SUMMARY_BYTES = 2**20
# An issue's or pull request's comment ends at 65,536 characters; bytes are never fewer.
COMMENT_BYTES = 64_000
LEAST_BYTES = LEAST
MARK = "<!-- attention-harness -->"  # by which a workflow finds its own comment again
_LISTED = 25  # rows of a list in a comment
_REASON = 300
_ALL = "the CSV files and report.md of the same run"


def job_summary(report: Report, changed: Changes | None = None, limit: int = SUMMARY_BYTES) -> str:
    """The whole report, after what changed, in at most `limit` bytes."""
    parts = [] if changed is None else [_changes(changed, markdown.LISTED)]
    if report.tradeoff is not None:  # a summary holds no files: its picture would be a broken one
        report = replace(report, tradeoff=replace(report.tradeoff, figure=""))
    return fit("\n\n".join([*parts, markdown.to_markdown(report)]), limit, _ALL)


def comment(report: Report, changed: Changes | None = None, limit: int = COMMENT_BYTES) -> str:
    """What changed, the counts, what failed and the errors by group."""
    head = report.headline
    counted = [words.extent(head), f"**{words.counts(head)}**", words.precision(head), words.repeated(head)]
    parts = [MARK, f"## {_verdict(report)}"]
    parts += [] if changed is None else [_changes(changed, _LISTED)]
    parts += [line for line in counted if line]
    parts += [
        _failures(report.failures),
        _problems(report.problems),
        _folded("Errors by group", _groups(report)),
    ]
    stated = "\n".join(f"* {escape(text)}" for text in (*map(words.machine, head.machines), *head.ran))
    parts.append(_folded("Where it ran", stated))
    return fit("\n\n".join(part for part in parts if part) + "\n", limit, _ALL)


def _verdict(report: Report) -> str:
    if not report.headline.records:
        return "Attention accuracy: nothing ran"
    failed = sum(f.seeds for f in report.failures)
    wrong = [f"{words.many(failed, 'cell')} failed"] * bool(failed)
    if report.problems:
        wrong.append(f"{words.many(len(report.problems), 'deviation')} to look at")
    return f"Attention accuracy: {', '.join(wrong) or 'no unexpected failure'}"


def _changes(c: Changes, limit: int) -> str:
    """Worst first. Says so where nothing changed: an empty list might have been forgotten."""
    lists: tuple[tuple[str, Sequence[Change], Callable[[Change], list[str]]], ...] = (
        ("newly failing", c.newly_failing, _status),
        ("newly passing", c.newly_passing, _status),
        ("ended differently", c.other_status, _status),
        ("precision of the recipe", c.precision, _precision),
        (f"error up by more than {MOVED - 1:.0%}", c.error_up, _error),
        (f"error down by more than {1 - 1 / MOVED:.0%}", c.error_down, _error),
    )
    told = [f"{len(found)} {title}" for title, found, _ in lists if found]
    told += [f"{len(keys)} {word}" for word, keys in (("new", c.new), ("vanished", c.vanished)) if keys]
    parts = [f"### What changed against {escape(c.against)}"]
    parts.append(f"**{' · '.join(told) or 'nothing'}** · {words.many(c.same, 'cell')} as before")
    parts += [f"* {escape(note)}" for note in c.notes]
    for title, found, row in lists:
        if found:
            rows = [[*map(escape, change.key), *row(change)] for change in found[:limit]]
            headers = ("case", "implementation", "recipe", "before", "now", "rel_l2 before", "now", "")
            parts.append(
                f"#### {title}\n\n{markdown.table(headers, rows, (5, 6, 7))}{_more(len(found), limit)}"
            )
    for title, cells, head in (("new cells", c.new, "now"), ("vanished cells", c.vanished, "before")):
        if cells:
            rows = [[*map(escape, key), side.told] for key, side in cells[:limit]]
            shown = markdown.table(("case", "implementation", "recipe", head), rows)
            parts.append(f"#### {title}\n\n{shown}{_more(len(cells), limit)}")
    return "\n\n".join(parts)


def _more(total: int, limit: int) -> str:
    return f"\n\n… and {total - limit} more" if total > limit else ""


def _name(key: Key) -> str:
    return " · ".join(map(escape, key))


def _status(change: Change) -> list[str]:
    return [change.before.told, change.now.told, *_figures(change)]


def _precision(change: Change) -> list[str]:
    told = [" ".join(f"{s} {n}" for s, n in side.precision.items()) for side in (change.before, change.now)]
    return [*map(escape, told), *_figures(change)]


_error = _status


def _figures(change: Change) -> list[str]:
    factor = change.factor
    shown = "" if math.isnan(factor) or factor == 1 else f"×{factor:.2f}" if 0.005 < factor < 1000 else ""
    return [*(_rel_l2(side) for side in (change.before, change.now)), shown]


def _rel_l2(side: Side) -> str:
    return words.NONE if side.rel_l2 is None else words.figure(side.rel_l2)


def _failures(failures: Sequence[Failure]) -> str:
    if not failures:
        return ""
    lines = []
    for f in failures[:_LISTED]:
        again = markdown.code(words.command_line(words.command(f)))
        told = escape(words.clip(f.diagnosis or f.reason, _REASON))
        name = _name((f.case, f.implementation, f.recipe))
        lines.append(f"* **{f.status.value}** {name}{words.margin(f)}: {told}; {again}")
    failed = words.many(sum(f.seeds for f in failures), "cell")
    return f"### Unexpected failures: {failed}\n\n" + "\n".join(lines) + _more(len(failures), _LISTED)


def _problems(problems: Sequence[str]) -> str:
    lines = "\n".join(f"* {escape(p)}" for p in problems[:_LISTED])
    return f"### Deviations that need attention\n\n{lines}{_more(len(problems), _LISTED)}" if lines else ""


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>" if body else ""


def _groups(report: Report) -> str:
    return "\n\n".join(markdown.groups(report)[1:])
