"""Records: what one cell (case, implementation, recipe, seed) gave, one JSON line each.

Non-finite numbers are written as the strings "nan", "inf" and "-inf": strict JSON has none. Writing needs only the
standard library; reading validates with pydantic, which is imported there.
"""

from __future__ import annotations

import codecs
import dataclasses
import datetime
import enum
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness.collector import no_collection
from harness.files import write_atomically

SCHEMA = "1.3"


class Status(enum.Enum):
    """What was found about the implementation. `advice` says what a reader does next."""

    PASS = ("PASS", "nothing to do")
    FAIL = ("FAIL", "read the reasons; the hazards say where the numbers left their format")
    INCONCLUSIVE = (
        "INCONCLUSIVE",
        "this input cannot tell right from wrong; use a larger or better conditioned one",
    )
    REFUSED = ("REFUSED", "the implementation cannot do this case; the reasons say why")
    ERROR = ("ERROR", "the implementation raised; the record keeps the traceback")

    def __new__(cls, value: str, advice: str) -> Status:
        member = object.__new__(cls)
        member._value_ = value
        member.advice = advice
        return member

    advice: str
    __hash__ = object.__hash__  # members are single: Enum's own, of the name, runs in Python and is met often


class HazardKind(enum.Enum):
    """A way in which numbers leave their format. `advice` says what usually helps."""

    OVERFLOW = (
        "overflow",
        "subtract the row max, scale before storing, or keep this stage in a wider format",
    )
    SATURATION = ("saturation", "values beyond the format's max were clamped to it: use a scale from amax")
    NEAR_OVERFLOW = (
        "near-overflow",
        "less than 1 bit to the format's max: scale Q and K, or widen this stage",
    )
    STAGNATION = (
        "stagnation",
        "a running sum no longer moves when it is added to: accumulate in a wider format",
    )
    FLUSH = ("flush", "values below half the smallest subnormal became 0: scale up before the cast")
    RESOLUTION = (
        "resolution",
        "one ulp of the largest score moves a probability by more than 5 %: widen the scores",
    )
    NON_FINITE = (
        "non-finite",
        "NaN or Inf that was not in the inputs: look at the first stage that shows it",
    )
    ZERO_AMAX = ("zero-amax", "a scale block is all zeros; its scale is 1, and 0/0 does not arise")
    SENTINEL = (
        "sentinel",
        "a bias hides keys by large finite numbers and leaves a row nothing else: pass mask= or a bias of −∞",
    )

    def __new__(cls, value: str, advice: str) -> HazardKind:
        member = object.__new__(cls)
        member._value_ = value
        member.advice = advice
        return member

    advice: str
    __hash__ = object.__hash__  # members are single: Enum's own, of the name, runs in Python and is met often


@dataclass(frozen=True, slots=True)
class Hazard:
    """One entry of the range ledger.

    `source`: `predicted` from FP64 values or `observed` in the run. `peak`: the largest magnitude met at that stage;
    `headroom_bits`: log2(format max / peak), negative beyond it. `count` of `total` elements are affected. `where`
    is (b, h, i, j) of the first worst element: query row i and key or channel j.
    """

    kind: HazardKind
    stage: str
    format: str
    source: str
    peak: float
    headroom_bits: float
    count: int
    total: int
    where: tuple[int, ...] | None = None
    lost_mass: float = 0.0

    @property
    def share(self) -> float:
        return self.count / self.total if self.total else 0.0

    def __str__(self) -> str:
        place = "" if self.where is None else " at b={} h={} i={} j={}".format(*self.where)
        return (
            f"{self.kind.value} in {self.stage} ({self.format}, {self.source}): peak {self.peak:.4g},"
            f" headroom {self.headroom_bits:+.2f} bits, {self.count} of {self.total}{place}"
        )


@dataclass(frozen=True, slots=True)
class Errors:
    """Distance of an output from a truth, in FP64, over elements finite in both (NUMERICS section 3).

    `nan_mismatch`, `posinf_mismatch`, `neginf_mismatch` count positions of the classes that differ; where they are
    not 0 the figures describe the remaining elements only. Ulps are of the output's format. With nothing to compare
    (`count` 0), figures are NaN. `worst` is (b, h, i, c) of the largest absolute error.
    """

    count: int
    nan_mismatch: int
    posinf_mismatch: int
    neginf_mismatch: int
    max_abs: float
    rmse: float
    rel_l2: float
    rel_l1: float
    cosine: float
    sqnr_db: float
    max_ulp: float
    p99_ulp: float
    bias_ulp: float
    slope: float
    truth_rms: float
    worst: tuple[int, ...] | None = None

    @property
    def class_mismatch(self) -> int:
        return self.nan_mismatch + self.posinf_mismatch + self.neginf_mismatch


@dataclass(frozen=True, slots=True)
class Relation:
    """Two runs that should give the same numbers: bits equal, or how far apart. No error: both may be as near to the
    truth as their precision allows.

    `name` says what differed between the runs. `bits_equal`: same values, signs of zero and places of NaN. `max_ulps`,
    in ulps of `format`: infinite where only one of the two is NaN or infinite, or they are opposite infinities.
    `differing` of `count` elements differ, most at index `worst`. An element near 0 has small ulps: `rel_l2`, the
    distance over the norm, both over finite elements, says how much the whole differs.
    """

    name: str
    format: str
    bits_equal: bool
    max_ulps: float
    differing: int
    count: int
    worst: tuple[int, ...] | None = None
    rel_l2: float = 0.0

    def __str__(self) -> str:
        if self.bits_equal:
            return f"equal bits in {self.count} elements"
        place = "" if self.worst is None else f" at {self.worst}"
        apart = f"at most {self.max_ulps:.3g} ulps of {self.format}{place}"
        return f"{self.differing} of {self.count} elements differ, {apart}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The fault that explains a failure best. `size` in its own unit: relative for one that comes in degrees, 1 for one
    that is there or not. `explained`: the share of the error, weighed by what was expected, that it accounts for.
    `statistic`: what it was found by. `rivals`: faults that explain as much."""

    fault: str
    what: str
    size: float
    statistic: float
    explained: float
    rivals: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.statistic:  # nothing was fitted: a hazard's words, or that no fault is known
            return self.what
        shown = f"{self.what}: size {self.size:+.3g}, explains {self.explained:.1%} of the error"
        if self.rivals:
            shown += f"; as well explained by: {', '.join(self.rivals)}"
        return shown


@dataclass(frozen=True, slots=True)
class Margins:
    """How the error compares with what is normal. `ratio`: root mean square of error ÷ expectation over the rows, and
    its `limit`. `worst`: the head, block or row farthest past (or nearest to) its own limit, as a share of it, and
    `worst_at`. `ceiling`: the largest error ÷ the bound that no correct run exceeds. `statistic`: the largest |T| among
    the fault directions, its `threshold` and `direction`. `expected_rel_l2`: what rel_l2 is normal. `unseen`: by
    direction, the size of fault that these inputs could not have shown."""

    ratio: float
    limit: float
    worst: float
    worst_at: str
    ceiling: float
    statistic: float
    threshold: float
    direction: str
    expected_rel_l2: float
    unseen: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MaskRow:
    """A row (b, h, i) whose bias hides by large finite numbers and leaves nothing else. `shown`: keys that masks and −∞
    leave; `meant`: those that are no sentinels; `effective`: keys that weigh anything once the bias is added in
    `format`."""

    where: tuple[int, ...]
    format: str
    shown: int
    meant: int
    effective: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a record was made. `isa` is torch's CPU capability: results differ in the last bits between them."""

    device: str
    cpu: str
    isa: str
    cores: int
    threads: int
    system: str
    python: str
    torch: str
    numpy: str
    harness: str
    commit: str


@dataclass(frozen=True, slots=True)
class Ran:
    """What a black box was seen to run. `backend`: what was asked for. `operators`: the products, softmaxes and fused
    kernels that torch dispatched to, in order, each once. `dtype`, `device`: of the tensors these were given."""

    backend: str
    operators: tuple[str, ...]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Record:
    """One cell. `errors` is against the stored truth, `total_errors` against the exact truth, `lse_errors` against
    the stored truth's log-sum-exp; they are None where there is no output. `kv_bytes_per_token` counts codes and scales
    of K and V of all kv heads of the case. `flops` is the mathematics' count for the visible pairs, `computed_flops`
    what the implementation's products took. `data` holds facts about the inputs, from FP64. `source`: the built-in case
    file or the path the case came from; `case_digest`: `Case.digest`. `ran`: of black boxes, since schema 1.2.
    `head_rel_l2`: total rel_l2 of each head, over sequences, for captured activations (drawn heads are alike), since
    schema 1.3."""

    case: str
    group: str
    shape: str
    why: str
    implementation: str
    recipe: str
    recipe_digest: str
    seed: int
    status: Status
    reasons: tuple[str, ...]
    errors: Errors | None
    total_errors: Errors | None
    lse_errors: Errors | None
    hazards: tuple[Hazard, ...]
    traceback: str
    emulated: bool
    run_ms: float
    truth_ms: float
    flops: int
    computed_flops: int
    kv_bytes_per_token: float
    data: dict[str, float]
    inputs_hash: str
    output_hash: str
    machine: Machine
    created: str
    case_digest: str = ""
    source: str = ""
    relations: tuple[Relation, ...] = ()
    mask_rows: tuple[MaskRow, ...] = ()
    margins: Margins | None = None
    diagnosis: Diagnosis | None = None
    precision: Status | None = None
    precision_reasons: tuple[str, ...] = ()
    floor: float = math.nan
    ran: Ran | None = None
    head_rel_l2: tuple[float, ...] = ()
    schema: str = SCHEMA

    @property
    def group_key(self) -> tuple[str, str, str]:
        """Case, implementation, recipe: seeds pool within it."""
        return (self.case, self.implementation, self.recipe)

    @property
    def key(self) -> tuple[str, str, str, int]:
        return (*self.group_key, self.seed)


def pooled_rms(values: Iterable[float]) -> float:
    """Root of the mean square: how seeds and heads pool (never the mean of RMSEs). NaN when empty or any is NaN."""
    values = list(values)
    if not values:
        return math.nan
    root = math.hypot(*values)
    if math.isinf(root) and any(map(math.isnan, values)):  # hypot(nan, inf) is inf
        return math.nan
    return root / math.sqrt(len(values))


def to_json(record: Record) -> str:
    """One line, without a newline. Lone surrogates, which UTF-8 and strict JSON lack, become text such as `\\ud800`."""
    return json.dumps(plain(record), allow_nan=False, separators=(",", ":"))


def plain(value: Any) -> Any:
    """What JSON can hold: enums by value, dataclasses as objects, dates and non-finite numbers as strings."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, frozenset):
        return sorted(plain(v) for v in value)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def write_records(path: Path | str, records: Iterable[Record]) -> None:
    """The whole file at once, by rename."""
    write_atomically(Path(path), "".join(to_json(r) + "\n" for r in records))


def read_records(path: Path | str) -> list[Record]:
    """Records of a JSON Lines file. A last line cut off by a killed run is dropped; any other damage raises.

    Raises ValueError naming the line, for text that is no record or of a newer major schema; FileNotFoundError.
    """
    with no_collection():
        return list(iter_records(path))


def iter_records(path: Path | str) -> Iterator[Record]:
    """`read_records`, one at a time."""
    with Path(path).open("rb", buffering=2**16) as file:
        yield from records_in(file, path)


def records_in(lines: Iterable[bytes], path: Path | str) -> Iterator[Record]:
    """`iter_records` of the lines of `path`, which is read by the caller: a pipe can be read only once."""
    from pydantic import ValidationError

    validate, known = _adapter().validator.validate_json, {SCHEMA}
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)  # which some editors write
        # A record ends with its newline: what follows the last one was cut off while it was written.
        if not line.endswith(b"\n") or line.isspace():
            continue
        if not line.isascii():
            _check_text(line, path)
        try:
            record: Record = validate(line)
        except ValidationError as error:
            _check_schema(line, f"{path}, line {number}")  # a newer schema may be why
            first = error.errors()[0]
            place = ".".join(str(p) for p in first["loc"]) or "the line"
            raise ValueError(f"{path}, line {number} is not a record: {place}: {first['msg']}") from None
        if record.schema not in known:
            _check_schema(line, f"{path}, line {number}")
            known.add(record.schema)
        yield record


@cache  # to build one takes longer than to validate a thousand lines
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Record)


def _check_text(line: bytes, path: Path | str) -> None:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} holds no records: it is not UTF-8 ({error.reason})") from None


def why_empty(path: Path | str) -> str:
    """What to say of a file that gave no records."""
    if not Path(path).is_file():
        return f"{path} held no whole record"  # a pipe that was read: another reading would wait
    if Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).strip():
        return f"{path} holds no whole record: its only line was cut off, as a run that is killed leaves it"
    return f"{path} holds no records"


def _check_schema(line: bytes, where: str) -> None:
    try:
        schema = json.loads(line).get("schema", "")
        major = int(str(schema).split(".")[0])
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{where} is not a record: no readable schema version") from None
    if major > int(SCHEMA.split(".")[0]):
        raise ValueError(
            f"{where} has schema {schema}; this version reads up to {SCHEMA}: update attention-harness"
        )
