"""Failures that are meant: `cases/deviations.toml`, each with its reason and an expiry.

A cell that fails as listed shows as *known* and does not set exit code 1. An entry that matches nothing in a run that
covers it, or that has expired, is itself a failure: a list nobody checks only grows.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path

from harness.records import Record, Status

_FAILING = (Status.FAIL, Status.ERROR)
Cell = tuple[str, str, str]
_cell: Callable[[Record], Cell] = attrgetter("implementation", "case", "recipe")
_NOTICE = datetime.timedelta(days=30)
_FIELDS = ("implementation", "case", "recipe", "status", "reason", "link", "expires")


@dataclass(frozen=True)
class Deviation:
    """One entry: globs over implementation, case id and recipe, and the status expected there."""

    implementation: str
    case: str
    recipe: str
    status: Status
    reason: str
    link: str
    expires: datetime.date

    def covers(self, implementation: str, case: str, recipe: str) -> bool:
        return (
            fnmatchcase(implementation, self.implementation)
            and fnmatchcase(case, self.case)
            and fnmatchcase(recipe, self.recipe)
        )

    def __str__(self) -> str:
        return f"{self.implementation} × {self.case} × {self.recipe} → {self.status.value}"


@dataclass(frozen=True)
class Review:
    """Records split by the deviations: `known` failures, `unexpected` ones, and entries that need attention; `expiring`
    ones will within 30 days."""

    known: tuple[tuple[Record, Deviation], ...]
    unexpected: tuple[Record, ...]
    unmatched: tuple[Deviation, ...]
    expired: tuple[Deviation, ...]
    expiring: tuple[Deviation, ...] = ()

    @property
    def ok(self) -> bool:
        return not (self.unexpected or self.unmatched or self.expired)


def load_deviations(path: Path) -> tuple[Deviation, ...]:
    """Entries of a TOML file of `[[deviation]]` tables. Raises ValueError naming the entry that is wrong."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    entries = tables.get("deviation", [])
    if set(tables) - {"deviation"} or not isinstance(entries, list):
        raise ValueError(f"{path} has {', '.join(tables)}; allowed: [[deviation]] tables alone")
    return tuple(_entry(path, number, e) for number, e in enumerate(entries, 1))


def _entry(path: Path, number: int, entry: object) -> Deviation:
    where = f"{path}, deviation {number}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is {entry!r}; allowed: a [[deviation]] table")
    if set(entry) != set(_FIELDS):
        raise ValueError(
            f"{where} has {', '.join(sorted(entry)) or 'nothing'}; allowed: exactly {', '.join(_FIELDS)}"
        )
    for name in _FIELDS[:-1]:
        if not isinstance(entry[name], str) or not entry[name].strip():
            raise ValueError(f"{where} has {name} {entry[name]!r}; allowed: text that is not empty")
    status, expires = entry["status"], entry["expires"]
    if status not in (s.value for s in _FAILING):
        raise ValueError(f"{where} has status {status!r}; allowed: {', '.join(s.value for s in _FAILING)}")
    if not isinstance(expires, datetime.date) or isinstance(expires, datetime.datetime):
        raise ValueError(
            f"{where} has expires {expires!r}; allowed: a date such as 2027-12-31, without quotes"
        )
    implementation, case, recipe, _, reason, link = (entry[name] for name in _FIELDS[:-1])
    return Deviation(implementation, case, recipe, Status[status], reason, link, expires)


def review(records: Iterable[Record], deviations: Iterable[Deviation], today: datetime.date) -> Review:
    """Sort failures into known and unexpected. An entry is unmatched when the run holds cells it covers that ended
    in a different way in every one of them."""
    records, deviations = list(records), list(deviations)
    covering = _covering(dict.fromkeys(map(_cell, records)), deviations)
    active = {d for d in deviations if d.expires >= today}
    known: list[tuple[Record, Deviation]] = []
    unexpected: list[Record] = []
    used: set[Deviation] = set()
    for record in records:
        if record.status in _FAILING:
            matching = [d for d in covering[_cell(record)] if d in active and d.status is record.status]
            if matching:
                known.append((record, matching[0]))
            else:
                unexpected.append(record)
            used.update(matching)
    met = {d for found in covering.values() for d in found}
    covered = [d for d in deviations if d in met]
    unmatched = tuple(d for d in covered if d in active and d not in used)
    expired = tuple(d for d in covered if d not in active)
    expiring = tuple(d for d in covered if d in active and d.expires < today + _NOTICE)
    return Review(tuple(known), tuple(unexpected), unmatched, expired, expiring)


def _covering(cells: Iterable[Cell], deviations: Sequence[Deviation]) -> dict[Cell, tuple[Deviation, ...]]:
    """The entries that cover each cell, in their order. A glob is held once against each name that it may mean."""
    cells = list(cells)
    names = [set(column) for column in zip(*cells, strict=True)] or [set(), set(), set()]
    found: dict[Cell, tuple[Deviation, ...]] = dict.fromkeys(cells, ())
    for d in deviations:
        implementations, cases, recipes = (
            {name for name in met if fnmatchcase(name, glob)}
            for met, glob in zip(names, (d.implementation, d.case, d.recipe), strict=True)
        )
        if implementations and cases and recipes:
            for cell in cells:
                if cell[0] in implementations and cell[1] in cases and cell[2] in recipes:
                    found[cell] += (d,)
    return found
