"""Evidence beside the records: where a recipe's error arises, and what it does to a model's words.

One JSON line each, `kind` says which; non-finite numbers are strings, as in records. Writing needs the standard library
only; reading validates with pydantic, which is imported there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.files import write_atomically
from harness.records import Machine, plain

SCHEMA = "1.1"
NORMAL_95 = 1.96


@dataclass(frozen=True)
class StageShare:
    """One rounding of a recipe. `stage`: `q`, `k`, `v` (their casts to storage) or a rounding point of the algorithm;
    `format`: what it rounds to. Squared errors add where errors are independent, so shares are of mean squares.

    `alone_rel_l2`: the total error with this rounding alone switched on, all others exact; `alone_share`: its square
    over the recipe's. `without_rel_l2`: with this rounding alone switched off; `without_share`: the part of the
    recipe's squared error that goes with it, 1 − (without ÷ whole)²; negative where the error grows.
    `alone_lost`, `without_lost`: output elements that are not finite in these runs though the truth is."""

    stage: str
    format: str
    alone_rel_l2: float
    alone_share: float
    without_rel_l2: float
    without_share: float
    alone_lost: int = 0
    without_lost: int = 0


@dataclass(frozen=True)
class Attribution:
    """Where the error of one (case, implementation, recipe) arises, pooled over `seeds`, against the exact truth.

    `sum_of_shares`: of `alone_share`, 1 where stages err independently. `additive`: whether it is 1 within what
    `statement`, one sentence for readers, says; `best`: the stage whose higher precision buys most, with `best_rel_l2`
    what is left then. `left_rel_l2`: the error with every named rounding off, of the accumulation order alone.
    `lost`: output elements that are not finite though the truth is; no figure holds them."""

    case: str
    implementation: str
    recipe: str
    recipe_digest: str
    seeds: int
    rel_l2: float
    left_rel_l2: float
    stages: tuple[StageShare, ...]
    sum_of_shares: float
    additive: bool
    statement: str
    best: str
    best_rel_l2: float
    machine: Machine
    created: str
    lost: int = 0
    kind: str = "attribution"
    schema: str = SCHEMA


@dataclass(frozen=True)
class Quality:
    """What a model says when its attention runs in `recipe`, against the same model with FP64 attention, over the
    `tokens` of `text`. `kl_mean`, `kl_p99`, `kl_max`: KL divergence of the next-token distributions, in nats;
    `top1_agreement`: the share of positions with the same likeliest token; `perplexity` and the reference's.
    `change_se`: the standard error of the change over the text's tokens, each taken for a sample; None where it was not
    recorded (schema 1.0)."""

    model: str
    text: str
    text_hash: str
    tokens: int
    implementation: str
    recipe: str
    recipe_digest: str
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float
    machine: Machine
    created: str
    change_se: float | None = None
    kind: str = "quality"
    schema: str = SCHEMA

    @property
    def perplexity_change(self) -> float:
        """Relative: 0.01 is 1 % more."""
        return self.perplexity / self.reference_perplexity - 1

    @property
    def change_range(self) -> tuple[float, float]:
        """Its 95 % interval; the change itself where no standard error was recorded, or none is finite."""
        change, se = self.perplexity_change, self.change_se
        half = NORMAL_95 * se if se is not None and math.isfinite(se) else 0.0
        return change - half, change + half


Evidence = Attribution | Quality
KINDS: dict[str, type[Attribution] | type[Quality]] = {"attribution": Attribution, "quality": Quality}


def write_evidence(path: Path | str, found: Iterable[Evidence]) -> None:
    """The whole file at once, by rename."""
    write_atomically(
        Path(path),
        "".join(json.dumps(plain(e), allow_nan=False, separators=(",", ":")) + "\n" for e in found),
    )


def read_evidence(path: Path | str) -> list[Evidence]:
    """Every line of the file. Raises ValueError naming the line that is damaged or of a newer major schema;
    FileNotFoundError."""
    from pydantic import TypeAdapter, ValidationError

    adapters: dict[str, TypeAdapter[Any]] = {kind: TypeAdapter(of) for kind, of in KINDS.items()}
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} holds no evidence: it is not UTF-8 ({error.reason})") from None
    found: list[Evidence] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        adapter = adapters[_kind(line, where)]
        try:
            found.append(adapter.validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(p) for p in first["loc"]) or "the line"
            raise ValueError(f"{where} is not evidence: {place}: {first['msg']}") from None
    return found


def _kind(line: str, where: str) -> str:
    try:
        fields = json.loads(line)
        kind, major = str(fields["kind"]), int(str(fields["schema"]).split(".")[0])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{where} is not evidence: no readable kind and schema version") from None
    if major > int(SCHEMA.split(".")[0]):
        newer = f"{where} has schema {fields['schema']}; this version reads up to {SCHEMA}"
        raise ValueError(f"{newer}: update attention-harness")
    if kind not in KINDS:
        raise ValueError(f"{where} is of kind {kind!r}; allowed: {', '.join(KINDS)}")
    return kind
