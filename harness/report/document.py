"""The report as one JSON document: what the other renderers show, as data, and a line for each record.

Strict JSON: numbers that are not finite are the strings "nan", "inf" and "-inf". `harness.report.schema` gives the
JSON Schema; the records file holds every figure, this what a script or a page asks for first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from harness.deviations import Review
from harness.records import Record, Status, plain
from harness.report.model import Report
from harness.report.tables import latest

SCHEMA = "1.0"  # of the document; a record has its own


@dataclass(frozen=True)
class CellLine:
    """One record: what it is, how it ended and its first figures. `known`: why its failure is meant, null where it is
    not. Figures are null where there is no output or nothing was judged."""

    case: str
    group: str
    implementation: str
    recipe: str
    seed: int
    device: str
    status: Status
    known: str | None
    reasons: tuple[str, ...]
    precision: Status | None
    precision_reasons: tuple[str, ...]
    diagnosis: str | None
    rel_l2: float | None
    max_abs: float | None
    rmse: float | None
    class_mismatch: int | None
    total_rel_l2: float | None
    floor: float
    ratio: float | None
    limit: float | None
    ceiling: float | None
    hazards: tuple[str, ...]
    run_ms: float
    emulated: bool
    inputs_hash: str
    output_hash: str


@dataclass(frozen=True)
class Document:
    """A report: `summary` as data, and `cells`, a line for each record that counts, in their order."""

    schema: str
    summary: Report
    cells: tuple[CellLine, ...]


def to_document(report: Report, records: Iterable[Record], review: Review) -> str:
    """The document's text, a cell a line. Ends with a newline."""
    known = {(r.key, r.machine.device): d.reason for r, d in review.known}
    lines = (_line(r, known.get((r.key, r.machine.device))) for r in latest(list(records)))
    cells = ",\n".join(json.dumps(plain(line), allow_nan=False) for line in lines)
    head = json.dumps(plain(report), allow_nan=False, indent=1)
    return f'{{"schema": "{SCHEMA}",\n"summary": {head},\n"cells": [\n{cells}\n]}}\n'


def _line(r: Record, known: str | None) -> CellLine:
    e, t, m = r.errors, r.total_errors, r.margins
    return CellLine(
        case=r.case,
        group=r.group,
        implementation=r.implementation,
        recipe=r.recipe,
        seed=r.seed,
        device=r.machine.device,
        status=r.status,
        known=known,
        reasons=() if r.status is Status.PASS else r.reasons,
        precision=r.precision,
        precision_reasons=() if r.precision is Status.PASS else r.precision_reasons,
        diagnosis=None if r.diagnosis is None else str(r.diagnosis),
        rel_l2=None if e is None else e.rel_l2,
        max_abs=None if e is None else e.max_abs,
        rmse=None if e is None else e.rmse,
        class_mismatch=None if e is None else e.class_mismatch,
        total_rel_l2=None if t is None else t.rel_l2,
        floor=r.floor,
        ratio=None if m is None else m.ratio,
        limit=None if m is None else m.limit,
        ceiling=None if m is None else m.ceiling,
        hazards=tuple(str(h) for h in r.hazards if h.source == "observed"),
        run_ms=r.run_ms,
        emulated=r.emulated,
        inputs_hash=r.inputs_hash,
        output_hash=r.output_hash,
    )
