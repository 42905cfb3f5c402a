"""What a report says, as data: no widths, no escaping, no truncation. `tables.summary` fills it, the
renderers read it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from harness.deviations import Deviation
from harness.records import Errors, Hazard, HazardKind, Machine, MaskRow, Relation, Status, pooled_rms

DECIDED = (
    "Status is decided by classes alone: NaN and ±Inf stand where the stored truth has them."
    " Error figures are shown, not yet judged."
)
KNOWN = "known"
# FAIL and ERROR count what no deviation explains, so that the words are disjoint and add up to all records.
LABELS = (
    Status.PASS.value,
    Status.FAIL.value,
    Status.ERROR.value,
    KNOWN,
    Status.REFUSED.value,
    Status.INCONCLUSIVE.value,
)


@dataclass(frozen=True)
class Pooled:
    """rel_l2 of several records by mean square. NaN when nothing was measured.

    Records with class mismatches or a non-finite figure cannot be pooled: they are counted in `left_out`, and
    the figure describes the `measured` rest.
    """

    rel_l2: float
    measured: int
    left_out: int


def pool(errors: Iterable[Errors | None]) -> Pooled:
    """Pool what can be pooled and count what cannot; records without an output (None) are neither."""
    present = [e for e in errors if e is not None]
    clean = [e.rel_l2 for e in present if not e.class_mismatch and math.isfinite(e.rel_l2)]
    return Pooled(pooled_rms(clean), len(clean), len(present) - len(clean))


@dataclass(frozen=True)
class Headline:
    """Counts over the whole run. `labels` pairs each of LABELS with its number of records."""

    records: int
    labels: tuple[tuple[str, int], ...]
    groups: int
    cases: int
    implementations: int
    recipes: int
    seeds: int
    machines: tuple[Machine, ...]


@dataclass(frozen=True)
class Failure:
    """A cell that failed and that no deviation explains. `seeds` of `of` seeds did."""

    case: str
    group: str
    implementation: str
    recipe: str
    status: Status
    reason: str
    traceback: str
    seeds: int
    of: int
    first_seeds: int
    device: str


@dataclass(frozen=True)
class Cell:
    """One implementation under one recipe, over the cases and seeds of a group. `labels`: the LABELS met
    there. `flagged`: an observed hazard changed numbers (overflow, saturation, flush, non-finite)."""

    kernel: Pooled
    total: Pooled
    labels: frozenset[str]
    flagged: bool


@dataclass(frozen=True)
class GroupTable:
    """`cells[i][j]` is implementation i under recipe j, None where nothing ran."""

    group: str
    cases: int
    seeds: int
    implementations: tuple[str, ...]
    recipes: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]


@dataclass(frozen=True)
class WorstRow:
    """One (case, implementation, recipe). `times_median`: its rel_l2 over the median of its recipe's cells.
    `max_ulp`, `slope` and `bias_ulp` are those of the worst seed, `worst` is (b, h, i, c) of its largest
    error."""

    case: str
    implementation: str
    recipe: str
    label: str
    kernel: Pooled
    times_median: float
    max_ulp: float
    worst: tuple[int, ...] | None
    slope: float
    bias_ulp: float


@dataclass(frozen=True)
class HazardRow:
    """Hazards of one (kind, stage, format, recipe), less those that an earlier stage of the run caused. `cells`,
    `observed`, `predicted` count cells, not elements."""

    kind: HazardKind
    stage: str
    format: str
    recipe: str
    cells: int
    observed: int
    predicted: int
    worst: Hazard
    case: str
    implementation: str


@dataclass(frozen=True)
class RelationRow:
    """One pair of runs that should agree, over cases, recipes and seeds: equal bits in `equal` of `cells`; the farthest
    apart by rel_l2 is `worst`, in this case and recipe."""

    implementation: str
    name: str
    cells: int
    equal: int
    worst: Relation
    case: str
    recipe: str


@dataclass(frozen=True)
class LyingMask:
    """Rows of a case whose bias hides by large finite numbers and leaves nothing else, once it is added in a format.
    `count` of `total` rows; `rows` are those recorded."""

    case: str
    format: str
    recipes: tuple[str, ...]
    count: int
    total: int
    rows: tuple[MaskRow, ...]


@dataclass(frozen=True)
class InputRow:
    """What a case's inputs are like, by the mean over its seeds, and why the case exists."""

    case: str
    shape: str
    var_qk_per_dim: float
    score_peak: float
    mean_top_prob: float
    why: str


@dataclass(frozen=True)
class RefusalRow:
    """A reason an implementation gave, and how many cases and records it refused with it."""

    implementation: str
    reason: str
    cases: int
    records: int


@dataclass(frozen=True)
class KnownRow:
    """A deviation that explained failures, and how many records it explained."""

    deviation: Deviation
    records: int


@dataclass(frozen=True)
class Report:
    """Everything a reader gets, in the order a reader needs it."""

    headline: Headline
    failures: tuple[Failure, ...]
    problems: tuple[str, ...]
    groups: tuple[GroupTable, ...]
    worst: tuple[WorstRow, ...]
    hazards: tuple[HazardRow, ...]
    lies: tuple[LyingMask, ...]
    relations: tuple[RelationRow, ...]
    inputs: tuple[InputRow, ...]
    refusals: tuple[RefusalRow, ...]
    known: tuple[KnownRow, ...]
