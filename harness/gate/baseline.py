"""The baseline: JSON Lines, one line per (case, implementation, recipe) with its seeds pooled.

Lines are sorted by these names and figures rounded to 4 digits (the gate's headroom is 10 %), so that the
file's history reads well and says little about where it was made.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from harness.records import Record, Status, pooled_rms
from harness.report.words import clean

SCHEMA = "1.1"
UPDATE = "python -m harness gate --update"

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Pooled:
    """One cell over its seeds. `status` counts seeds. The figures are None where no seed gave an output and
    NaN or Inf where one seed's is; `mismatches` counts elements of the wrong class; `hazards` the observed
    ones by kind. `recipe_digest` and `inputs` are hashes that tell whether the same thing was measured.

    Since schema 1.1: `precision` counts seeds, `ratio` is error ÷ expected, None where nothing was judged. `diagnosis`
    is the first that a seed has; a baseline holds none."""

    case: str
    implementation: str
    recipe: str
    status: Mapping[str, int]
    rmse: float | None
    rel_l2: float | None
    truth_rms: float | None
    mismatches: int
    hazards: Mapping[str, int]
    seeds: tuple[int, ...]
    device: str
    isa: str
    recipe_digest: str
    inputs: str
    precision: Mapping[str, int] = field(default_factory=dict)
    ratio: float | None = None
    diagnosis: str = field(default="", compare=False)
    schema: str = SCHEMA

    @property
    def key(self) -> Key:
        return (self.case, self.implementation, self.recipe)

    def __str__(self) -> str:
        return " · ".join(map(clean, self.key))


def make_baseline(records: Iterable[Record]) -> str:
    """The baseline's text. Raises ValueError for no records, and for a cell that holds a seed twice."""
    cells = pool_records(records)
    if not cells:
        raise ValueError("no records: a baseline of nothing would compare nothing; run some cases first")
    return "".join(_line(cells[key]) + "\n" for key in sorted(cells))


def read_baseline(path: Path | str) -> dict[Key, Pooled]:
    """The lines of a baseline. Raises ValueError, in one line, for a file that is missing or damaged."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ValueError(f"no baseline at {path}; make one with {UPDATE}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a baseline: not UTF-8; make one with {UPDATE}") from None
    cells: dict[Key, Pooled] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            cell = _parse(line, f"{path}, line {number}")
            if cell.key in cells:
                raise ValueError(f"{path}, line {number} repeats {cell}; make it anew with {UPDATE}")
            cells[cell.key] = cell
    return cells


def pool_records(records: Iterable[Record]) -> dict[Key, Pooled]:
    """Every cell of a run over its seeds. Raises ValueError for a cell that holds a seed twice."""
    cells: dict[Key, list[Record]] = defaultdict(list)
    for record in records:
        cells[record.group_key].append(record)
    return {key: _pool(members) for key, members in cells.items()}


def _pool(records: Sequence[Record]) -> Pooled:
    records = sorted(records, key=lambda r: r.seed)
    errors = [r.errors for r in records if r.errors is not None]
    kinds = Counter(h.kind.value for r in records for h in r.hazards if h.source == "observed")
    pooled = Pooled(
        *records[0].group_key,
        status=_counts(r.status for r in records),
        rmse=_rms(e.rmse for e in errors),
        rel_l2=_rms(e.rel_l2 for e in errors),
        truth_rms=_rms(e.truth_rms for e in errors),
        mismatches=sum(e.class_mismatch for e in errors),
        hazards=dict(sorted(kinds.items())),
        seeds=tuple(r.seed for r in records),
        device="+".join(sorted({r.machine.device for r in records})),
        isa="+".join(sorted({r.machine.isa for r in records})),
        recipe_digest=_hash(r.recipe_digest for r in records),
        inputs=_hash(r.inputs_hash for r in records),
        precision=_counts(r.precision for r in records),
        ratio=_rms(r.margins.ratio for r in records if r.margins is not None),
        diagnosis=next((str(r.diagnosis) for r in records if r.diagnosis is not None), ""),
    )
    if len(set(pooled.seeds)) < len(pooled.seeds):
        raise ValueError(f"{pooled} holds a seed twice; give the gate one run on one device at a time")
    return pooled


def _counts(found: Iterable[Status | None]) -> dict[str, int]:
    met = Counter(found)
    return {s.value: met[s] for s in Status if met[s]}


def _rms(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(f"{pooled_rms(values):.4g}") if values else None


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "replace")).hexdigest()[:12]


def _line(cell: Pooled) -> str:
    # Strict JSON has no NaN: written as strings, as records do.
    fields = {name: _plain(value) for name, value in vars(cell).items() if name != "diagnosis"}
    return json.dumps(fields, ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@cache  # to build one takes longer than to validate a thousand lines
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Pooled)


def _parse(line: str, where: str) -> Pooled:
    from pydantic import ValidationError

    try:
        fields = json.loads(line)
        major = int(str(fields["schema"]).split(".")[0])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{where} is not a baseline's; make it anew with {UPDATE}") from None
    if major > int(SCHEMA.split(".")[0]):
        newer = f"{where} has schema {fields['schema']}; this version reads up to {SCHEMA}"
        raise ValueError(f"{newer}: update attention-harness")
    try:
        cell: Pooled = _adapter().validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(p) for p in first["loc"])
        problem = f"{where} is not a baseline's: {place}: {clean(first['msg'])}"
        raise ValueError(f"{problem}; make it anew with {UPDATE}") from None
    return cell
