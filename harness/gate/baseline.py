"""The baseline: JSON Lines. A head with the class of machine, the number of cells (since schema 1.3: a file that was
cut between lines would pass for a whole one) and why the baseline was made and changed, then one line per (case,
implementation, recipe) with its seeds.

Lines are sorted by these names and figures rounded to 4 digits (rmse by seed to 6; the smallest drift is 1 %), so that
the file's history reads well and says little about where it was made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from harness.gate.machine_class import nearness
from harness.gate.pooled import SCHEMA, Key, Pooled, pool_records
from harness.records import Record
from harness.report.words import clean

UPDATE = "python -m harness gate --update"
ANEW = (
    f"take it from version control again, or remove it and run {UPDATE}"  # which reads the one that is there
)
KIND = "baseline"
COUNTED_SINCE = 3  # minor schema
_FIGURES = ("rmse", "rel_l2", "truth_rms", "ratio", "mismatches")
_COUNTS = ("status", "precision", "hazards")


@dataclass(frozen=True)
class Change:
    """Why a baseline was made or changed: the day and commit of the run, the reason, and what it moved."""

    date: str
    commit: str
    reason: str
    moved: str


@dataclass(frozen=True)
class Baseline:
    """Cells, the class of machine they were measured on ("" before schema 1.2), and the changes, newest last."""

    cells: Mapping[Key, Pooled]
    machine_class: str = ""
    history: tuple[Change, ...] = ()


@dataclass(frozen=True)
class _Head:
    machine_class: str
    cells: int = 0  # 0 before schema 1.3: unknown
    history: tuple[Change, ...] = ()
    kind: str = KIND
    schema: str = field(default=SCHEMA)


def make_baseline(
    records: Iterable[Record], reason: str = "", moved: str = "", earlier: Baseline | None = None,
    kept: Iterable[Pooled] = (),
) -> str:  # fmt: skip
    """The baseline's text. `earlier`: the one it takes the place of, whose history it goes on with; `kept`: cells of it
    that stay. Raises ValueError for no records, and for a cell that holds a seed twice."""
    records = list(records)
    cells = {**{cell.key: cell for cell in kept}, **pool_records(records)}
    if not records:
        raise ValueError("no records: a baseline of nothing would compare nothing; run some cases first")
    date = max(r.created for r in records)[:10]
    commit = "+".join(sorted({r.machine.commit for r in records}))
    change = Change(date, commit, clean(reason), moved)
    head = _Head(class_of(cells.values()), len(cells), (*(earlier.history if earlier else ()), change))
    lines = [json.dumps(asdict(head), ensure_ascii=False), *(_line(cells[key]) for key in sorted(cells))]
    return "".join(line + "\n" for line in lines)


def _minor(schema: str) -> int:
    minor = schema.partition(".")[2].partition(".")[0]
    return int(minor) if minor.isdecimal() else 0


def class_of(cells: Iterable[Pooled]) -> str:
    """The class of machine of these cells; several are joined by a plus sign."""
    return "+".join(sorted({cell.machine_class for cell in cells}))


def read_baseline(path: Path | str) -> Baseline:
    """A baseline, of this or an older minor schema. Raises ValueError, in one line, for a file that is missing or
    damaged."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"no baseline at {path}; make one with {UPDATE}") from None
    return baseline_in(data, path)


def baseline_in(data: bytes, path: Path | str) -> Baseline:
    """`read_baseline` of what `path` holds, which was read by the caller: a pipe can be read only once."""
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a baseline: not UTF-8; {ANEW}") from None
    cells: dict[Key, Pooled] = {}
    head = _Head("", schema="1.0")  # older ones had no first line
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        fields = _fields(line, where)
        if fields.get("kind") == KIND and number == 1:
            head = _valid(_Head, fields, where)
            continue
        cell: Pooled = _valid(Pooled, fields, where)
        if wrong := _negative(cell):
            raise ValueError(f"{where} is not a baseline's: {cell} has a negative {wrong}; {ANEW}")
        if cell.key in cells:
            raise ValueError(f"{where} repeats {cell}; {ANEW}")
        cells[cell.key] = cell
    counted = head.cells or _minor(head.schema) >= COUNTED_SINCE
    if counted and head.cells != len(cells):
        raise ValueError(f"{path} holds {len(cells)} cells where its first line says {head.cells}; {ANEW}")
    if not head.machine_class and any(cell.machine_class for cell in cells.values()):
        raise ValueError(f"{path} has lost its first line, with the class of machine; {ANEW}")
    return Baseline(cells, head.machine_class, head.history)


def read_folder(folder: Path) -> dict[Path, Baseline]:
    """Every baseline of a folder. Raises ValueError, in one line, where there is none or one is damaged."""
    found = {path: read_baseline(path) for path in sorted(folder.glob("*.jsonl"))}
    if not found:
        raise ValueError(f"no baseline in {folder}; make one with {UPDATE}")
    return found


def choose(held: Mapping[Path, Baseline], here: str) -> Path:
    """The file of this class of machine: the one that is named so, if several are of it. Else that of the nearest
    class."""
    return min(
        held,
        key=lambda path: (
            held[path].machine_class != here,
            path.stem != here,
            -nearness(here, held[path].machine_class),
            path.name,
        ),
    )


def _line(cell: Pooled) -> str:
    # Strict JSON has no NaN: written as strings, as records do.
    fields = {name: _plain(value) for name, value in vars(cell).items() if name not in ("diagnosis", "noise")}
    return json.dumps(fields, ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@cache  # to build one takes longer than to validate a thousand lines
def _adapter(of: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(of)


def _fields(line: str, where: str) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(line)
        major = int(str(fields["schema"]).split(".")[0])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{where} is not a baseline's; {ANEW}") from None
    if major > int(SCHEMA.split(".")[0]):
        newer = f"{where} has schema {clean(str(fields['schema']))}; this version reads up to {SCHEMA}"
        raise ValueError(f"{newer}: update attention-harness")
    return fields


def _valid(of: type, fields: Mapping[str, Any], where: str) -> Any:
    from pydantic import ValidationError

    try:
        return _adapter(of).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(p) for p in first["loc"])
        problem = f"{where} is not a baseline's: {place}: {clean(first['msg'])}"
        raise ValueError(f"{problem}; {ANEW}") from None


def _negative(cell: Pooled) -> str:
    """The name of what no error and no count can be; empty where there is none."""
    found = {name: (getattr(cell, name),) for name in _FIGURES} | {"rmses": cell.rmses}
    found |= {name: tuple(getattr(cell, name).values()) for name in _COUNTS}
    return next((name for name, held in found.items() if any(v is not None and v < 0 for v in held)), "")


def differences(new: Mapping[Key, Pooled], old: Mapping[Key, Pooled], most: int = 5) -> tuple[str, ...]:
    """What an update moves: counts first, then verdicts, then the largest changes of rmse."""
    both = sorted(new.keys() & old.keys())
    verdicts = [key for key in both if _verdict(new[key]) != _verdict(old[key])]
    rises = {key: _rise(new[key], old[key]) for key in both}
    up, down = sum(r > 0 for r in rises.values()), sum(r < 0 for r in rises.values())
    counts = (
        (len(both), "in both"), (len(new.keys() - old.keys()), "new"), (len(old.keys() - new.keys()), "gone"),
        (len(verdicts), "with another verdict"), (up, "with a larger rmse"), (down, "with a smaller one"),
    )  # fmt: skip
    lines = ["cells: " + ", ".join(f"{n} {word}" for n, word in counts)]
    lines += [f"{new[key]}: {_verdict(old[key])} → {_verdict(new[key])}" for key in verdicts[:most]]
    largest = sorted((k for k in both if rises[k]), key=lambda k: -abs(rises[k]))[:most]
    lines += [f"{new[key]}: rmse {old[key].rmse} → {new[key].rmse} ({rises[key]:+.1%})" for key in largest]
    lines += [f"gone: {old[key]}" for key in sorted(old.keys() - new.keys())[:most]]
    return tuple(lines)


def _verdict(cell: Pooled) -> str:
    counted = (cell.status, cell.precision, cell.hazards)
    return " | ".join(" ".join(f"{name} {n}" for name, n in met.items()) for met in counted)


def _rise(new: Pooled, old: Pooled) -> float:
    """Of rmse, relative; 0 where there is none on both sides or they are equal."""
    here, there = (math.inf if v.rmse is None or math.isnan(v.rmse) else v.rmse for v in (new, old))
    if here == there:
        return 0.0
    return here / there - 1 if there else math.inf
