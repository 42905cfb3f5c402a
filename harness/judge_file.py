"""A call from a file, judged: the verdict, where the error is, and its record."""

from __future__ import annotations

import datetime
import hashlib
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from harness.cost import kv_bytes_per_token
from harness.docket import Docket, Judgement
from harness.dump import Dump
from harness.error_model import BLACK_BOX
from harness.judging import check_budget, store_rows, taken
from harness.machine import machine
from harness.operands import Extras, check
from harness.places import Place, by_head, by_position
from harness.precision import NO_EXACT
from harness.quantize import store
from harness.query_rows import Rows, choose_rows
from harness.recipe import Recipe
from harness.records import Record
from harness.spec import Shape

__all__ = ["NO_EXACT", "FileVerdict", "judge_dump", "record_of"]


@dataclass(frozen=True)
class FileVerdict:
    """The judgement of one file, where its error is, and what a record says beside it."""

    shape: Shape
    judgement: Judgement
    heads: tuple[Place, ...]
    positions: tuple[Place, ...]
    truth_ms: float
    flops: int


@torch.no_grad()
def judge_dump(
    dump: Dump, recipe: Recipe, quantize: bool = False, budget: float | None = None, rows: int | None = None,
    seed: int = 0,
) -> FileVerdict:  # fmt: skip
    """The verdict on a call. `quantize`: q, k and v are values before their rounding. `budget`, `rows` and `seed` as
    for `harness.judge`.

    Raises ValueError for a value that the recipe's storage cannot hold, and scales where it has none.
    """
    shape, extras = check(dump.q, dump.k, dump.v, dump.spec, **dump.extras.as_options())
    tensors = (dump.q, dump.k, dump.v)
    exact = tensors if quantize else dump.exact
    check_budget(budget, exact is not None)
    if rows is None:
        stored = store(tensors, recipe, dump.scales, quantize)
    else:
        chosen = choose_rows(dump.q, dump.k, dump.spec, rows=rows, seed=seed, kv_lens=extras.kv_lens)
        stored = store_rows(tensors, chosen, recipe, dump.scales, quantize)
        dump, extras, exact = _of_rows(dump, extras, exact, chosen)
    start = time.perf_counter()
    docket = Docket(stored, dump.spec, extras, recipe, exact)
    truth_ms = 1e3 * (time.perf_counter() - start)
    (verdict,) = docket.verdicts([dump.out], [BLACK_BOX])
    judged = docket.judgement(dump.out, verdict, dump.lse, BLACK_BOX, docket.hazards(), budget)
    judged = docket.advised(dump.out, judged)
    (expected,) = docket.expected([BLACK_BOX])
    at = (dump.out, docket.truth.out, expected.variance)
    pairs = 0 if docket.truth.ranges is None else docket.truth.ranges.pairs
    return FileVerdict(
        shape, judged, tuple(by_head(*at)), tuple(by_position(*at, extras.row)), truth_ms,
        2 * pairs * (shape.head_dim + shape.E),
    )  # fmt: skip


def _of_rows(
    dump: Dump, extras: Extras, exact: tuple[Tensor, Tensor, Tensor] | None, rows: Rows
) -> tuple[Dump, Extras, tuple[Tensor, Tensor, Tensor] | None]:
    """What is judged of a call by some of its rows."""
    mask, bias = (
        None if x is None else taken(n, x, rows) for n, x in (("mask", extras.mask), ("bias", extras.bias))
    )
    lse = None if dump.lse is None else taken("lse", dump.lse, rows)
    exact = None if exact is None else (rows.take(exact[0]), exact[1], exact[2])
    extras = replace(extras, mask=mask, bias=bias, rows=rows)
    return replace(dump, q=rows.take(dump.q), out=rows.take(dump.out), lse=lse), extras, exact


def record_of(path: Path, dump: Dump, recipe: Recipe, found: FileVerdict) -> Record:
    """One record, as a run writes it; its case is `file/` and the file's name."""
    j = found.judgement
    name = "".join(c if c.isalnum() or c in "-_.+=×" else "-" for c in path.stem) or "unnamed"
    inputs = (
        dump.q,
        dump.k,
        dump.v,
        *(x for x in dump.extras.as_options().values() if isinstance(x, Tensor)),
    )
    return Record(
        case=f"file/{name}", group="file", shape=str(found.shape), why=f"tensors of {path.name}",
        implementation=dump.implementation, recipe=recipe.name, recipe_digest=recipe.digest, seed=0, status=j.status,
        reasons=j.reasons, errors=j.errors, total_errors=j.total_errors, lse_errors=j.lse_errors, hazards=j.hazards,
        traceback="", emulated=False, run_ms=math.nan, truth_ms=found.truth_ms, flops=found.flops, computed_flops=0,
        kv_bytes_per_token=kv_bytes_per_token(found.shape, recipe), data={}, inputs_hash=_hash(*inputs),
        output_hash=_hash(dump.out), machine=machine(), source=str(path),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), margins=j.margins,
        diagnosis=j.diagnosis, precision=j.precision, precision_reasons=j.precision_reasons, floor=j.floor,
    )  # fmt: skip


def _hash(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
