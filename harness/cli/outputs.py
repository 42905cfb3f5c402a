"""The options for what else a report writes, and the writing. The files are asked for one by one: each has a reader."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from harness.cli.paths import FILE
from harness.collector import no_collection
from harness.deviations import Review
from harness.files import append, write_atomically
from harness.records import Record, records_in

if TYPE_CHECKING:
    from harness.gate import Baseline
    from harness.report import Changes, Report
    from harness.report.changes import Key, Side

F = TypeVar("F", bound=Callable[..., Any])
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--json", type=FILE, metavar="FILE", help="Write summary and cells as one JSON document."),
    click.option("--junit", type=FILE, metavar="FILE", help="Write JUnit XML, a test case a cell."),
    click.option("--summary", type=FILE, metavar="FILE", help="Write Markdown for a GitHub job summary."),
    click.option("--step-summary", is_flag=True, help=f"Append that to ${STEP_SUMMARY}."),
    click.option("--comment", type=FILE, metavar="FILE", help="Write Markdown for a pull request's comment."),
    click.option(
        "--against",
        type=FILE,
        metavar="FILE",
        help="Say first what changed since these records or baseline.",
    ),
)


def outputs(command: F) -> F:
    """The options of `Outputs`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class Outputs:
    """What was asked for. `before`: the cells of the file `against`."""

    json: Path | None = None
    junit: Path | None = None
    summary: Path | None = None
    step_summary: Path | None = None
    comment: Path | None = None
    against: Path | None = None
    before: Mapping[Key, Side] | None = None

    def write(self, records: Sequence[Record], review: Review, report: Report) -> list[Path]:
        """Write each. Returns the files."""
        import harness.report as made_by  # whose functions are loaded as they are met

        changed = self._changes(records)
        made: tuple[tuple[Path | None, Callable[[], str]], ...] = (
            (self.json, lambda: made_by.to_document(report, records, review)),
            (self.junit, lambda: made_by.to_junit(records, review)),
            (self.summary, lambda: made_by.job_summary(report, changed)),
            (self.comment, lambda: made_by.comment(report, changed)),
        )
        written = []
        for path, text in made:
            if path is not None:
                write_atomically(path, text())
                written.append(path)
        if self.step_summary is not None:
            _append(self.step_summary, report, changed)
        return written

    def _changes(self, records: Sequence[Record]) -> Changes | None:
        if self.before is None:
            return None
        from harness.report import changes, latest
        from harness.report.changes import sides

        return changes(self.before, sides(latest(records)), str(self.against))


def take(chosen: dict[str, Any]) -> Outputs:
    """Take the options of `outputs` out of a command's, and read the file to compare with: before anything runs."""
    given = {f.name: chosen.pop(f.name) for f in fields(Outputs) if f.name != "before"}
    if given.pop("step_summary"):
        path = os.environ.get(STEP_SUMMARY)
        if not path:
            raise ValueError(
                f"--step-summary was given, but {STEP_SUMMARY} is not set: GitHub's runner sets it; elsewhere give"
                " --summary FILE"
            )
        given["step_summary"] = Path(path)
    against = given["against"]
    if against is not None and not any(given.get(name) for name in ("summary", "step_summary", "comment")):
        raise ValueError(
            f"--against {against} was given without what shows it; add --comment FILE, --summary FILE or --step-summary"
        )
    return Outputs(**given, before=None if against is None else _before(against))


def _before(path: Path) -> Mapping[Key, Side]:
    """The cells of a records file or of a gate's baseline, whichever it is."""
    from harness.gate import baseline_in
    from harness.report import latest
    from harness.report.changes import sides

    if not path.exists():
        raise ValueError(
            f"{path} does not exist; give a records file of `run` or a baseline of `gate --update`"
        )
    with path.open("rb", buffering=2**16) as file:  # once: a pipe can be read only so
        start = list(_up_to_text(file))
        lines = chain(start, file)
        if _is_record(start[-1] if start else b""):
            with no_collection():
                return sides(latest(list(records_in(lines, path))))
        return _sides_of(baseline_in(b"".join(lines), path))


def _up_to_text(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines up to the first that is not blank, and it."""
    for line in lines:
        yield line
        if line.removeprefix(codecs.BOM_UTF8).strip():
            return


def _is_record(line: bytes) -> bool:
    """Whether records start so: one has a seed and a machine. Damage is told by whoever reads the whole."""
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return True
    return isinstance(first, dict) and "seed" in first


def _sides_of(baseline: Baseline) -> Mapping[Key, Side]:
    from harness.report.changes import Side

    return {
        key: Side(
            cell.status, cell.precision, cell.rel_l2, cell.ratio, cell.seeds, f"{cell.device} {cell.isa}"
        )
        for key, cell in baseline.cells.items()
    }


def _append(path: Path, report: Report, changed: Changes | None) -> None:
    """To the step's summary, within what earlier commands of the step left of its limit."""
    from harness.report import job_summary
    from harness.report.github import LEAST_BYTES, SUMMARY_BYTES

    used = path.stat().st_size if path.exists() else 0
    if SUMMARY_BYTES - used - 1 < LEAST_BYTES:
        click.echo(f"the step's summary is full ({used} bytes): nothing was added to it", err=True)
        return
    append(path, "\n" * bool(used) + job_summary(report, changed, SUMMARY_BYTES - used - 1))
