"""One cell over its seeds: what the gate compares, and what a line of a baseline holds."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.gate.machine_class import machine_class
from harness.records import Errors, Record, Status, pooled_rms
from harness.report.words import clean

SCHEMA = "1.3"

Key = tuple[str, str, str]
_IN = " in "


@dataclass(frozen=True)
class Pooled:
    """One cell over its seeds. `status` counts seeds. The figures are None where no seed gave an output and
    NaN or Inf where one seed's is; `mismatches` counts elements of the wrong class; `hazards` the observed ones by kind
    and stage ("overflow in scores"; by kind alone before schema 1.3). `recipe_digest` and `inputs` are hashes that tell
    whether the same thing was measured.

    Since schema 1.1: `precision` counts seeds, `ratio` is error ÷ expected, None where nothing was judged. Since 1.2:
    `rmses` seed by seed (in the order of `seeds`, None without an output) and `machine_class`. A baseline does not hold
    `diagnosis`, the first that a seed has, nor `noise`, by seed (see `gate.drift`)."""

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
    rmses: tuple[float | None, ...] = ()
    machine_class: str = ""
    diagnosis: str = field(default="", compare=False)
    noise: tuple[float, ...] = field(default=(), compare=False)
    schema: str = SCHEMA

    @property
    def key(self) -> Key:
        return (self.case, self.implementation, self.recipe)

    def new_hazards(self, old: Pooled) -> dict[str, int]:
        """Those of this run that the old cell never saw, with their numbers."""
        return {
            name: count
            for name, count in self.hazards.items()
            if name not in old.hazards and name.partition(_IN)[0] not in old.hazards
        }

    def __str__(self) -> str:
        return " · ".join(map(clean, self.key))


def pool_records(records: Iterable[Record]) -> dict[Key, Pooled]:
    """Every cell of a run over its seeds. Raises ValueError for a cell that holds a seed twice."""
    cells: dict[Key, list[Record]] = defaultdict(list)
    for record in records:
        cells[record.group_key].append(record)
    return {key: _pool(members) for key, members in cells.items()}


def _pool(records: Sequence[Record]) -> Pooled:
    records = sorted(records, key=lambda r: r.seed)
    errors = [r.errors for r in records if r.errors is not None]
    hazards = Counter(
        f"{h.kind.value}{_IN}{h.stage}" for r in records for h in r.hazards if h.source == "observed"
    )
    pooled = Pooled(
        *records[0].group_key,
        status=_counts(r.status for r in records),
        rmse=_rms(e.rmse for e in errors),
        rel_l2=_rms(e.rel_l2 for e in errors),
        truth_rms=_rms(e.truth_rms for e in errors),
        mismatches=sum(e.class_mismatch for e in errors),
        hazards=dict(sorted(hazards.items())),
        seeds=tuple(r.seed for r in records),
        device="+".join(sorted({r.machine.device for r in records})),
        isa="+".join(sorted({r.machine.isa for r in records})),
        recipe_digest=_hash(r.recipe_digest for r in records),
        inputs=_hash(r.inputs_hash for r in records),
        precision=_counts(r.precision for r in records),
        ratio=_rms(r.margins.ratio for r in records if r.margins is not None),
        rmses=tuple(None if r.errors is None else float(f"{r.errors.rmse:.6g}") for r in records),
        machine_class="+".join(sorted({machine_class(r.machine) for r in records})),
        diagnosis=next((str(r.diagnosis) for r in records if r.diagnosis is not None), ""),
        noise=tuple(_noise(r.errors) for r in records),
    )
    if len(set(pooled.seeds)) < len(pooled.seeds):
        raise ValueError(f"{pooled} holds a seed twice; give the gate one run on one device at a time")
    return pooled


def _noise(errors: Errors | None) -> float:
    """τ = (2·n_eff)^-½, with n_eff = n·rmse²/max² elements, at least 1: `gate.drift` derives it."""
    if errors is None or not 0 < errors.rmse < math.inf:
        return math.sqrt(0.5)
    share = errors.rmse / errors.max_abs if errors.rmse < errors.max_abs < math.inf else 1.0
    return math.sqrt(0.5 / max(1.0, errors.count * share * share))


def _counts(found: Iterable[Status | None]) -> dict[str, int]:
    met = Counter(found)
    return {s.value: met[s] for s in Status if met[s]}


def _rms(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(f"{pooled_rms(values):.4g}") if values else None


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "replace")).hexdigest()[:12]
