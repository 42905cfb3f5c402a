"""Every record and every hazard as CSV, for spreadsheets and scripts. Columns follow the records' own
fields."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from harness.deviations import Review
from harness.records import Errors, Hazard, Machine, Record

# A spreadsheet runs a cell that starts with one of these as a formula (OWASP, "CSV injection").
_FORMULA = tuple("=+-@\t\r\n＝＋－＠")


def _named(cls: type[Any], *types: str) -> tuple[str, ...]:
    """Fields of these declared types, so that a field added to a record is a new column."""
    return tuple(f.name for f in dataclasses.fields(cls) if f.type in types and f.name != "traceback")


_RECORD_TEXT = _named(Record, "str")
_RECORD_NUMBERS = _named(Record, "int", "float", "bool")
_ERROR_NUMBERS = _named(Errors, "int", "float")
_MACHINE = _named(Machine, "str")
_HAZARD_NUMBERS = _named(Hazard, "int", "float")
_TRUTHS = (("errors", "kernel"), ("total_errors", "total"), ("lse_errors", "lse"))

_record_text, _record_numbers = attrgetter(*_RECORD_TEXT), attrgetter(*_RECORD_NUMBERS)
_error_numbers, _hazard_numbers = attrgetter(*_ERROR_NUMBERS), attrgetter(*_HAZARD_NUMBERS)
_machine = attrgetter(*_MACHINE)
_BLANK = ("",) * (len(_ERROR_NUMBERS) + 1)


@lru_cache(4096)  # names and machines repeat in every row
def inert(text: str) -> str:
    """Text that a spreadsheet shows and does not run."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(_FORMULA) or text.lstrip().startswith(_FORMULA) else text


def cells_csv(records: Iterable[Record], review: Review) -> str:
    """One row per record: status and its reasons, the error figures of each truth, timing, machine. Figures
    that are not finite are `nan`, `inf`, `-inf`; those of a record without an output are empty."""
    records = list(records)
    facts = tuple(dict.fromkeys(name for r in records for name in r.data))
    known = {(r.key, r.machine.device): d.reason for r, d in review.known}
    header = [*_RECORD_TEXT, "status", "known", "reasons", "exception"]
    header += [*_RECORD_NUMBERS, "hazards", "observed_hazards"]
    for _, prefix in _TRUTHS:
        header += [f"{prefix}_{name}" for name in (*_ERROR_NUMBERS, "worst_bhic")]
    header += [f"machine_{name}" if name in _RECORD_TEXT else name for name in _MACHINE]
    header += [f"data_{name}" for name in facts]
    return _csv(header, (_cell_row(r, known.get((r.key, r.machine.device), ""), facts) for r in records))


def _cell_row(record: Record, known: str, facts: Sequence[str]) -> list[Any]:
    exception = record.traceback.strip().rpartition("\n")[2]
    texts = (*_record_text(record), record.status.value, known, "; ".join(record.reasons), exception)
    observed = sum(h.source == "observed" for h in record.hazards)
    row: list[Any] = [*map(inert, texts), *_record_numbers(record), len(record.hazards), observed]
    for errors in (record.errors, record.total_errors, record.lse_errors):
        row += _BLANK if errors is None else (*_error_numbers(errors), _place(errors.worst))
    row += _machine_row(record.machine)
    row += (record.data.get(name, "") for name in facts)
    return row


@lru_cache(64)
def _machine_row(machine: Machine) -> list[str]:
    return [inert(text) for text in _machine(machine)]


def hazards_csv(records: Iterable[Record]) -> str:
    """One row per hazard of each record."""
    header = ["case", "implementation", "recipe", "seed", "kind", "stage", "format", "source"]
    header += [*_HAZARD_NUMBERS, "share", "where_bhij"]
    return _csv(header, _hazard_rows(records))


def _hazard_rows(records: Iterable[Record]) -> Iterator[list[Any]]:
    for r in records:
        names = [inert(r.case), inert(r.implementation), inert(r.recipe), r.seed]
        for h in r.hazards:
            kind = [h.kind.value, inert(h.stage), inert(h.format), inert(h.source)]
            yield [*names, *kind, *_hazard_numbers(h), h.share, _place(h.where)]


@lru_cache(4096)
def _place(where: tuple[int, ...] | None) -> str:
    """Separated by spaces: a spreadsheet would read 1,2 as a number and 1-2 as a date."""
    return "" if where is None else " ".join(map(str, where))


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue().encode("utf-8", "replace").decode("utf-8")  # a lone surrogate has no UTF-8 form
