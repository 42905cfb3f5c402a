"""Every record, case and hazard as CSV, for spreadsheets and scripts. Columns follow the records' own fields.

Figures have 7 digits, hashes 16: the records hold all. What a case says once stands in cases.csv alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from harness.deviations import Review
from harness.records import Errors, Hazard, Machine, Margins, Record, Status

# A spreadsheet runs a cell that starts with one of these as a formula (OWASP, "CSV injection").
_FORMULA = tuple("=+-@\t\r\n＝＋－＠")
_CASE = ("case", "group", "shape", "why", "source", "case_digest")
_HASHES = ("inputs_hash", "output_hash")
_UNSEEN = ("shrink", "scale")
_TRUTHS = (("errors", "kernel"), ("total_errors", "total"), ("lse_errors", "lse"))
_FORMATS = {"float": "%.7g", "int": "%d", "bool": "%s"}


class _Numbers:
    """The numeric fields of a dataclass, so that a field added to a record is a new column."""

    def __init__(self, cls: type[Any], *left_out: str) -> None:
        fields = [f for f in dataclasses.fields(cls) if f.type in _FORMATS and f.name not in left_out]
        self.names = tuple(f.name for f in fields)
        self.template = ",".join(_FORMATS[str(f.type)] for f in fields)
        self.blank = "," * (len(fields) - 1)
        self._values: Callable[[Any], tuple[Any, ...]] = attrgetter(*self.names)

    def __call__(self, item: Any) -> str:
        return self.blank if item is None else self.template % self._values(item)


_NUMBERS, _ERRORS, _MARGINS, _HAZARD = map(_Numbers, (Record, Errors, Margins, Hazard))
_TEXTS = tuple(
    f.name
    for f in dataclasses.fields(Record)
    if f.type == "str" and f.name not in (*_CASE[1:], *_HASHES, "traceback")
)
_MACHINE = tuple(f.name for f in dataclasses.fields(Machine) if f.type == "str")
_record_texts, _hashes, _machine = attrgetter(*_TEXTS), attrgetter(*_HASHES), attrgetter(*_MACHINE)


@lru_cache(4096)  # names and reasons repeat in many rows
def inert(text: str) -> str:
    """Text as a CSV field that a spreadsheet shows and does not run."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.startswith(_FORMULA) or text.lstrip().startswith(_FORMULA):
        text = f"'{text}"
    quoted = "," in text or '"' in text or "\n" in text
    return '"' + text.replace('"', '""') + '"' if quoted else text


def cells_csv(records: Iterable[Record], review: Review) -> str:
    """One row per record: status, its reasons unless it passed, the figures of each truth, margins, diagnosis,
    precision, timing, machine. Figures that are not finite are `nan`, `inf`, `-inf`; those that a record lacks are
    empty."""
    records = list(records)
    facts = tuple(dict.fromkeys(name for r in records for name in r.data))
    known = {(r.key, r.machine.device): d.reason for r, d in review.known}
    header = [*_TEXTS, "status", "known", "reasons", "exception", "precision", "precision_reasons"]
    header += ["fault", "rivals", "fault_size", "fault_explained", "worst_at", "direction", *_MARGINS.names]
    header += [*(f"unseen_{name}" for name in _UNSEEN), *_NUMBERS.names, "hazards", "observed_hazards"]
    for _, prefix in _TRUTHS:
        header += [f"{prefix}_{name}" for name in (*_ERRORS.names, "worst_bhic")]
    header += [*_HASHES, *(f"machine_{name}" if name in _TEXTS else name for name in _MACHINE)]
    header += [f"data_{name}" for name in facts]
    return _csv(header, (_cell(r, known.get((r.key, r.machine.device), ""), facts) for r in records))


def _cell(record: Record, known: str, facts: Sequence[str]) -> str:
    reasons, why = (
        "" if status is Status.PASS else "; ".join(told)
        for status, told in (
            (record.status, record.reasons),
            (record.precision, record.precision_reasons),
        )
    )
    exception = record.traceback.strip().rpartition("\n")[2]
    precision = "" if record.precision is None else record.precision.value
    texts = (*_record_texts(record), record.status.value, known, reasons, exception, precision, why)
    observed = sum(h.source == "observed" for h in record.hazards)
    parts = [*map(inert, texts), *_diagnosis(record), *_margins(record.margins), _NUMBERS(record)]
    parts.append(f"{len(record.hazards)},{observed}")
    for errors in (record.errors, record.total_errors, record.lse_errors):
        parts += (_ERRORS(errors), "" if errors is None else _place(errors.worst))
    parts += (inert(text[:16]) for text in _hashes(record))
    parts.append(_machine_text(record.machine))
    parts += (f"{record.data[name]:.7g}" if name in record.data else "" for name in facts)
    return ",".join(parts)


def _diagnosis(record: Record) -> tuple[str, str, str, str]:
    d = record.diagnosis
    if d is None:
        return "", "", "", ""
    return inert(d.fault), inert(", ".join(d.rivals)), f"{d.size:.7g}", f"{d.explained:.7g}"


def _margins(margins: Margins | None) -> tuple[str, ...]:
    if margins is None:
        return "", "", _MARGINS.blank, *("" for _ in _UNSEEN)
    sizes = (f"{margins.unseen[name]:.7g}" if name in margins.unseen else "" for name in _UNSEEN)
    return inert(margins.worst_at), inert(margins.direction), _MARGINS(margins), *sizes


@lru_cache(64)
def _machine_text(machine: Machine) -> str:
    return ",".join(map(inert, _machine(machine)))


def cases_csv(records: Iterable[Record]) -> str:
    """One row per case (and version of it, where it has changed): its shape, why it exists, where it comes from."""
    rows = dict.fromkeys(",".join(map(inert, _case(r))) for r in records)
    return _csv(_CASE, rows)


_case: Callable[[Record], tuple[str, ...]] = attrgetter(*_CASE)


def hazards_csv(records: Iterable[Record]) -> str:
    """One row per hazard of each record."""
    header = ["case", "implementation", "recipe", "seed", "kind", "stage", "format", "source"]
    header += [*_HAZARD.names, "share", "where_bhij"]
    return _csv(header, _hazard_rows(records))


def _hazard_rows(records: Iterable[Record]) -> Iterator[str]:
    for r in records:
        cell = f"{inert(r.case)},{inert(r.implementation)},{inert(r.recipe)},{r.seed}"
        for h in r.hazards:
            kind = f"{h.kind.value},{inert(h.stage)},{inert(h.format)},{inert(h.source)}"
            yield f"{cell},{kind},{_HAZARD(h)},{h.share:.7g},{_place(h.where)}"


@lru_cache(4096)
def _place(where: tuple[int, ...] | None) -> str:
    """Separated by spaces: a spreadsheet would read 1,2 as a number and 1-2 as a date."""
    return "" if where is None else " ".join(map(str, where))


def _csv(header: Sequence[str], rows: Iterable[str]) -> str:
    text = "\n".join([",".join(map(inert, header)), *rows]) + "\n"
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate has no UTF-8 form
