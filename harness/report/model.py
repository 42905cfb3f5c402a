"""What a report says, as data: no widths, no escaping, no truncation. `tables.summary` fills it, the
renderers read it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from harness.deviations import Deviation
from harness.records import (
    Errors,
    Hazard,
    HazardKind,
    Machine,
    Margins,
    MaskRow,
    Record,
    Relation,
    Status,
    pooled_rms,
)

DECIDED = (
    "Status is the implementation's, against the stored truth: NaN and ±Inf in their places, the ceiling that no"
    " correct run exceeds, the yardstick (error ÷ expected), the fault directions. Precision is the recipe's, against"
    " the exact truth: what storing and rounding cost these inputs."
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
    clean = [e.rel_l2 for e in present if can_pool(e)]
    return Pooled(pooled_rms(clean), len(clean), len(present) - len(clean))


def can_pool(errors: Errors) -> bool:
    e = errors
    return math.isfinite(e.rel_l2) and not (e.nan_mismatch or e.posinf_mismatch or e.neginf_mismatch)


def pool_ratio(records: Iterable[Record]) -> float:
    """Error ÷ expected by mean square, over the records whose error can be pooled too; NaN where none is judged."""
    return finite_rms(
        r.margins.ratio
        for r in records
        if r.margins is not None and r.errors is not None and not r.errors.class_mismatch
    )


def finite_rms(values: Iterable[float]) -> float:
    """Of the finite ones; NaN when there are none."""
    return pooled_rms(v for v in values if math.isfinite(v))


@dataclass(frozen=True)
class Headline:
    """Counts over the whole run. `labels` pairs each of LABELS with its number of records, `precision` each status of a
    recipe with its number of (case, recipe), empty where no record has one. `repeated` records were left out: a later
    one of the same cell and device stands for them. `ran` says what black boxes were seen to run, a line each."""

    records: int
    labels: tuple[tuple[str, int], ...]
    groups: int
    cases: int
    implementations: int
    recipes: int
    seeds: int
    machines: tuple[Machine, ...]
    precision: tuple[tuple[str, int], ...] = ()
    repeated: int = 0
    ran: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A cell that failed and that no deviation explains. `seeds` of `of` seeds did. `source`: what `--cases` takes.
    `diagnosis` is the first that one of them has, "" for none; `ratio` their largest error ÷ expected, NaN for none."""

    case: str
    source: str
    implementation: str
    recipe: str
    status: Status
    reason: str
    diagnosis: str
    ratio: float
    traceback: str
    seeds: int
    of: int
    first_seeds: int
    device: str


@dataclass(frozen=True)
class Cell:
    """One implementation under one recipe, over the cases and seeds of a group. `labels`: the LABELS met
    there. `ratio`: its pooled error ÷ expected. `flagged`: an observed hazard changed numbers (overflow, saturation,
    flush, non-finite)."""

    kernel: Pooled
    ratio: float
    labels: frozenset[str]
    flagged: bool


@dataclass(frozen=True)
class Cost:
    """What a recipe costs the inputs of a group, over its cases and seeds and the implementations that did not fail,
    where there are any. `floor`: what it would with ideal scales. `failing` of `cases` cases have precision FAIL with
    every implementation; `inconclusive` ones have no answer."""

    total: Pooled
    floor: float
    cases: int
    failing: int
    inconclusive: int


@dataclass(frozen=True)
class GroupTable:
    """`cells[i][j]` is implementation i under recipe j, None where nothing ran; `costs[j]` what recipe j costs."""

    group: str
    cases: int
    seeds: int
    implementations: tuple[str, ...]
    recipes: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    costs: tuple[Cost, ...]


@dataclass(frozen=True)
class TradeoffRow:
    """One recipe: its error against the exact truth, bytes of K and V a token, seconds of a modelled decode step; NaN
    where it is not known how it stores."""

    recipe: str
    total: Pooled
    kv_bytes: float
    decode_s: float


@dataclass(frozen=True)
class Tradeoff:
    """Accuracy over the `cases` of a group beside the cost of the model that is `stated`. `yardstick`: bytes of K and V
    a token in BF16. `figure`: the plot's file beside the report; `note`: why there is none."""

    group: str
    cases: int
    stated: str
    yardstick: float
    rows: tuple[TradeoffRow, ...]
    figure: str = ""
    note: str = ""


@dataclass(frozen=True)
class WorstRow:
    """One (case, implementation, recipe). `margins` are those of the seed with the largest error ÷ expected, None where
    nothing was judged; `slope` and `bias_ulp` those of largest magnitude."""

    case: str
    implementation: str
    recipe: str
    label: str
    kernel: Pooled
    margins: Margins | None
    slope: float
    bias_ulp: float


@dataclass(frozen=True)
class CostlyRow:
    """A case and a recipe whose precision is FAIL with every implementation. `reasons`: one of each kind."""

    case: str
    recipe: str
    total: Pooled
    floor: float
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class OwnLoss:
    """Implementations that alone lose what others under the same recipe do not, in so many (case, recipe)."""

    implementations: tuple[str, ...]
    cells: int


@dataclass(frozen=True)
class Unseen:
    """The largest of the smallest shrinks (scales) that the inputs of a group can show, and where; NaN where none was
    looked for."""

    group: str
    shrink: float
    shrink_at: str
    scale: float
    scale_at: str


@dataclass(frozen=True)
class Doubt:
    """A reason why inputs cannot tell right from wrong, and each case with its number of cells."""

    reason: str
    cells: int
    cases: tuple[tuple[str, int], ...]


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
    tradeoff: Tradeoff | None
    worst: tuple[WorstRow, ...]
    costly: tuple[CostlyRow, ...]
    own_losses: tuple[OwnLoss, ...]
    unseen: tuple[Unseen, ...]
    doubts: tuple[Doubt, ...]
    hazards: tuple[HazardRow, ...]
    lies: tuple[LyingMask, ...]
    relations: tuple[RelationRow, ...]
    inputs: tuple[InputRow, ...]
    refusals: tuple[RefusalRow, ...]
    known: tuple[KnownRow, ...]
