"""Every record, case and hazard as CSV, for spreadsheets and scripts. Columns follow the records' own fields.

Figures have 7 digits, hashes 16: the records hold all. What a case says once stands in cases.csv alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from harness.deviations import Review
from harness.records import Errors, Hazard, Machine, Margins, Record, Status

# A spreadsheet runs a cell that starts with one of these as a formula (OWASP, "CSV injection").
_FORMULA = tuple("=+-@\t\r\n＝＋－＠")
_CASE = ("case", "group", "shape", "why", "source", "case_digest")
_HASHES = ("inputs_hash", "output_hash")
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


class _Facts:
    """Figures that have names and that a record may lack."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.template = ",".join(["%.7g"] * len(self.names))
        self.blank = "," * (len(self.names) - 1)

    def __call__(self, given: Mapping[str, float]) -> str:
        try:
            return self.template % tuple([given[name] for name in self.names])
        except KeyError:
            return ",".join(f"{given[name]:.7g}" if name in given else "" for name in self.names)


_UNSEEN = _Facts(("shrink", "scale"))
_NUMBERS, _ERRORS, _MARGINS, _HAZARD = map(_Numbers, (Record, Errors, Margins, Hazard))
_TEXTS = tuple(
    f.name
    for f in dataclasses.fields(Record)
    if f.type == "str" and f.name not in (*_CASE[1:], *_HASHES, "traceback")
)
_MACHINE = tuple(f.name for f in dataclasses.fields(Machine) if f.type == "str")
_machine: Callable[[Machine], tuple[str, ...]] = attrgetter(*_MACHINE)
_texts: Callable[[Record], tuple[str, ...]] = attrgetter(*_TEXTS)
_identity = attrgetter("case", "implementation", "recipe", "seed", "machine.device")
_STATUS: dict[Status | None, str] = {None: "", **{status: status.value for status in Status}}
_TOLD: dict[Status | None, bool] = {None: True, **{status: status is not Status.PASS for status in Status}}


@lru_cache(4096)  # names and reasons repeat in many rows
def inert(text: str) -> str:
    """Text as a CSV field that a spreadsheet shows and does not run."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.startswith(_FORMULA) or text.lstrip().startswith(_FORMULA):
        text = f"'{text}"
    quoted = "," in text or '"' in text or "\n" in text
    return '"' + text.replace('"', '""') + '"' if quoted else text


@lru_cache(65536)  # what a cell is called and how it ended: its seeds, or its recipe's, share most of it
def _row(texts: tuple[str, ...]) -> str:
    return ",".join(map(inert, texts))


def cells_csv(records: Iterable[Record], review: Review) -> str:
    """One row per record: status, its reasons unless it passed, the figures of each truth, margins, diagnosis,
    precision, timing, machine. Figures that are not finite are `nan`, `inf`, `-inf`; those that a record lacks are
    empty."""
    records = list(records)
    facts = _Facts(dict.fromkeys(name for r in records for name in r.data))
    known = {_identity(r): d.reason for r, d in review.known}
    header = [*_TEXTS, "status", "known", "reasons", "exception", "precision", "precision_reasons"]
    header += ["fault", "rivals", "fault_size", "fault_explained", "worst_at", "direction", *_MARGINS.names]
    header += [*(f"unseen_{name}" for name in _UNSEEN.names), *_NUMBERS.names, "hazards", "observed_hazards"]
    for _, prefix in _TRUTHS:
        header += [f"{prefix}_{name}" for name in (*_ERRORS.names, "worst_bhic")]
    header += [*_HASHES, *(f"machine_{name}" if name in _TEXTS else name for name in _MACHINE)]
    header += [f"data_{name}" for name in facts.names]
    return _csv(header, [_cell(r, known.get(_identity(r), ""), facts) for r in records])


def _cell(record: Record, known: str, facts: _Facts) -> str:
    status, precision = record.status, record.precision
    reasons = "; ".join(record.reasons) if _TOLD[status] else ""
    why = "; ".join(record.precision_reasons) if _TOLD[precision] else ""
    exception = record.traceback.strip().rpartition("\n")[2] if record.traceback else ""
    texts = (*_texts(record), _STATUS[status], known, reasons, exception, _STATUS[precision], why)
    observed = [h.source for h in record.hazards].count("observed")
    parts = [_row(texts), _diagnosis(record), _margins(record.margins), _NUMBERS(record)]
    parts.append(f"{len(record.hazards)},{observed}")
    for errors in (record.errors, record.total_errors, record.lse_errors):
        parts += (_ERRORS(errors), "" if errors is None else _place(errors.worst))
    parts += (_hash(record.inputs_hash), _hash(record.output_hash), _row(_machine(record.machine)))
    if facts.names:
        parts.append(facts(record.data))
    return ",".join(parts)


def _hash(text: str) -> str:
    return text[:16] if text.isalnum() else inert(text[:16])


def _diagnosis(record: Record) -> str:
    d = record.diagnosis
    if d is None:
        return ",,,"
    return f"{inert(d.fault)},{inert(', '.join(d.rivals))},{d.size:.7g},{d.explained:.7g}"


def _margins(margins: Margins | None) -> str:
    if margins is None:
        return f",,{_MARGINS.blank},{_UNSEEN.blank}"
    return (
        f"{inert(margins.worst_at)},{inert(margins.direction)},{_MARGINS(margins)},{_UNSEEN(margins.unseen)}"
    )


def cases_csv(records: Iterable[Record]) -> str:
    """One row per case (and version of it, where it has changed): its shape, why it exists, where it comes from."""
    return _csv(_CASE, map(_row, dict.fromkeys(map(_case, records))))


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
    text = "\n".join([_row(tuple(header)), *rows, ""])
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8 form
        return text.encode("utf-8", "replace").decode("utf-8")
    return text
