"""Every record, case and hazard as CSV, for spreadsheets and scripts. Columns follow the records' own fields.

Figures have 7 digits, hashes 16: the records hold all. What a case says once stands in cases.csv alone. Text is one
line of printable characters, as everywhere in a report. Files come as lines, the header first: one of 50 MB need not
be held as one text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from harness.deviations import Review
from harness.records import Errors, Hazard, HazardKind, Machine, Margins, Record, Status
from harness.report.words import clean

# A spreadsheet runs a cell that starts with one of these as a formula (OWASP, "CSV injection").
_FORMULA = tuple("=+-@＝＋－＠")
_CASE = ("case", "group", "shape", "why", "source", "case_digest")
_HASHES = ("inputs_hash", "output_hash")
_TRUTHS = (("errors", "kernel"), ("total_errors", "total"), ("lse_errors", "lse"))
_FORMATS = {"float": "%.7g", "int": "%d", "bool": "%s"}


class _Numbers:
    """The numeric fields of a dataclass, so that a field added to a record is a new column."""

    def __init__(self, cls: type[Any]) -> None:
        fields = [f for f in dataclasses.fields(cls) if f.type in _FORMATS]
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
        self._values: Callable[[Any], Any] = itemgetter(*self.names) if self.names else lambda _: ()

    def __call__(self, given: Mapping[str, float]) -> str:
        try:
            shown: str = self.template % self._values(given)
            return shown
        except KeyError:
            return ",".join(f"{given[name]:.7g}" if name in given else "" for name in self.names)


class _Texts(dict[str, str]):
    """Text as a field; names and reasons repeat in many rows, and each is looked at once."""

    def __missing__(self, text: str) -> str:
        made = self[text] = inert(text)
        return made


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
_case: Callable[[Record], tuple[str, ...]] = attrgetter(*_CASE)
_identity = attrgetter("case", "implementation", "recipe", "seed", "machine.device")
# An enum's own .value is ten times as slow.
_STATUS: dict[Status | None, str] = {None: "", **{status: status.value for status in Status}}
_KIND = {kind: kind.value for kind in HazardKind}
_QUIET = (None, Status.PASS)  # with nothing to tell


def inert(text: str) -> str:
    """Text as a CSV field that a spreadsheet shows and does not run."""
    text = clean(text)
    if text.startswith(_FORMULA):
        text = f"'{text}"
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text


def cells_csv(records: Iterable[Record], review: Review) -> Iterator[str]:
    """One row per record: status, its reasons unless it passed, the figures of each truth, margins, diagnosis,
    precision, timing, machine. Figures that are not finite are `nan`, `inf`, `-inf`; those that a record lacks are
    empty."""
    records = list(records)
    facts = _Facts(dict.fromkeys(chain.from_iterable(r.data for r in records)))
    known = {_identity(r): d.reason for r, d in review.known}
    header = [*_TEXTS, "status", "known", "reasons", "exception", "precision", "precision_reasons"]
    header += ["fault", "rivals", "fault_size", "fault_explained", "worst_at", "direction", *_MARGINS.names]
    header += [*(f"unseen_{name}" for name in _UNSEEN.names), *_NUMBERS.names, "hazards", "observed_hazards"]
    for _, prefix in _TRUTHS:
        header += [f"{prefix}_{name}" for name in (*_ERRORS.names, "worst_bhic")]
    header += [*_HASHES, *(f"machine_{name}" if name in _TEXTS else name for name in _MACHINE)]
    header += [f"data_{name}" for name in facts.names]
    texts = _Texts()
    yield _line(map(inert, header))
    for r in records:
        yield _line(_cell(r, known.get(_identity(r), "") if known else "", facts, texts))


def _cell(record: Record, known: str, facts: _Facts, texts: _Texts) -> list[str]:
    """Parts of a row, each of one or more fields."""
    text = texts.__getitem__
    status, precision, margins, hazards = record.status, record.precision, record.margins, record.hazards
    parts = [*map(text, _texts(record)), _STATUS[status], text(known)]
    parts.append("" if status in _QUIET else text("; ".join(record.reasons)))
    parts.append(text(record.traceback.strip().rpartition("\n")[2]) if record.traceback else "")
    parts += (_STATUS[precision], "" if precision in _QUIET else text("; ".join(record.precision_reasons)))
    d = record.diagnosis
    parts.append(
        ",,," if d is None
        else f"{text(d.fault)},{text(', '.join(d.rivals))},{d.size:.7g},{d.explained:.7g}"
    )  # fmt: skip
    parts += (
        ("", "", _MARGINS.blank, _UNSEEN.blank) if margins is None
        else (text(margins.worst_at), text(margins.direction), _MARGINS(margins), _UNSEEN(margins.unseen))
    )  # fmt: skip
    observed = [h.source for h in hazards].count("observed") if hazards else 0
    parts += (_NUMBERS(record), f"{len(hazards)},{observed}")
    for errors in (record.errors, record.total_errors, record.lse_errors):
        parts += (_ERRORS(errors), "" if errors is None else _place(errors.worst))
    for digest in (record.inputs_hash[:16], record.output_hash[:16]):
        parts.append(digest if digest.isalnum() else inert(digest))
    parts += map(text, _machine(record.machine))
    if facts.names:
        parts.append(facts(record.data))
    return parts


def cases_csv(records: Iterable[Record]) -> Iterator[str]:
    """One row per case (and version of it, where it has changed): its shape, why it exists, where it comes from."""
    for row in (_CASE, *dict.fromkeys(map(_case, records))):
        yield _line(map(inert, row))


def hazards_csv(records: Iterable[Record]) -> Iterator[str]:
    """One row per hazard of each record."""
    texts = _Texts()
    names = ("case", "implementation", "recipe", "seed", "kind", "stage", "format", "source")
    yield _line((*names, *_HAZARD.names, "share", "where_bhij"))
    for r in records:
        if r.hazards:
            cell = f"{texts[r.case]},{texts[r.implementation]},{texts[r.recipe]},{r.seed}"
        for h in r.hazards:
            place = f"{_KIND[h.kind]},{texts[h.stage]},{texts[h.format]},{texts[h.source]}"
            yield f"{cell},{place},{_HAZARD(h)},{h.share:.7g},{_place(h.where)}\n"


@lru_cache(4096)
def _place(where: tuple[int, ...] | None) -> str:
    """Separated by spaces: a spreadsheet would read 1,2 as a number and 1-2 as a date."""
    return "" if where is None else " ".join(map(str, where))


def _line(fields: Iterable[str]) -> str:
    return ",".join(fields) + "\n"
