"""One unit of a run: a case and seed, its truths, and every cell on it."""

from __future__ import annotations

import datetime
import hashlib
import math
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness import registry
from harness.case import Case
from harness.compare import compare
from harness.cost import kv_bytes_per_token
from harness.devices import synchronise, use_device
from harness.formats import get_format
from harness.hazards import RangeLedger, headroom_bits, predict, storage_hazards
from harness.inputs import Inputs, make_inputs
from harness.layouts import lay_out
from harness.lies import lying_rows
from harness.machine import machine
from harness.operands import Extras
from harness.quantize import Stored, quantize
from harness.recipe import TENSORS, Recipe
from harness.records import Errors, Hazard, HazardKind, MaskRow, Record, Relation, Status
from harness.relations import relations
from harness.spec import Shape
from harness.truth import Truth, reference

BY_CLASSES = "NaN and ±Inf stand where the stored truth has them; error figures are shown, not yet judged"


@dataclass(frozen=True)
class Unit:
    """One case and seed, and the cells to run on it."""

    case: Case
    seed: int
    implementations: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    device: str = "cpu"

    @property
    def cells(self) -> int:
        return len(self.implementations) * len(self.recipes)

    @property
    def keys(self) -> set[tuple[str, str, str, int]]:
        """Keys of the records it gives."""
        return {(self.case.id, i, r.name, self.seed) for i in self.implementations for r in self.recipes}


@dataclass(frozen=True)
class _Problem:
    """What the cells of a unit share: the case on the device, and its exact truth."""

    inputs: Inputs
    exact: tuple[torch.Tensor, ...]
    extras: Extras
    truth: Truth
    truth_ms: float

    @property
    def flops(self) -> int:
        """2·D for a score and 2·E for its P·V, per visible pair."""
        assert self.truth.ranges is not None
        return 2 * self.truth.ranges.pairs * (self.exact[0].shape[3] + self.exact[2].shape[3])


@dataclass(frozen=True)
class _Shared:
    """What the cells of one storage share."""

    stored: tuple[Stored, Stored, Stored]
    truth: Truth
    truth_ms: float
    hazards: tuple[Hazard, ...]


@torch.inference_mode()  # thousands of small operations: their bookkeeping is most of their cost
def run_unit(unit: Unit) -> list[Record]:
    """All cells of a unit."""
    device = use_device(unit.device)
    try:
        inputs = make_inputs(unit.case, unit.seed)
    except ValueError as error:
        error.add_note(f"in case {unit.case.id}")
        raise
    exact, extras = tuple(x.to(device) for x in inputs.tensors), inputs.extras.to(device)
    truth, ms = _truth(exact, unit.case, extras, device)
    problem = _Problem(inputs, exact, extras, truth, ms)
    data = _facts(truth, unit.case)
    shared: dict[tuple[object, ...], _Shared] = {}
    records = []
    for recipe in unit.recipes:
        if recipe.storage_key not in shared:
            shared[recipe.storage_key] = _share(unit.case, problem, recipe, device)
        lies = _lies(unit.case, problem, shared[recipe.storage_key], recipe)
        for name in unit.implementations:
            records.append(_cell(unit, name, recipe, problem, shared[recipe.storage_key], lies, data))
    return records


def _share(case: Case, problem: _Problem, recipe: Recipe, device: torch.device) -> _Shared:
    q, k, v = (quantize(x, name, recipe) for x, name in zip(problem.exact, TENSORS, strict=True))
    truth, ms = _truth((q.values, k.values, v.values), case, problem.extras, device)
    hazards = tuple(storage_hazards(problem.exact, (q, k, v), recipe))
    q, k, v = (replace(x, codes=lay_out(x.codes, case.layout)) for x in (q, k, v))
    return _Shared((q, k, v), truth, ms + problem.truth_ms, hazards)


def _truth(
    tensors: tuple[torch.Tensor, ...], case: Case, extras: Extras, device: torch.device
) -> tuple[Truth, float]:
    start = time.perf_counter()
    truth = reference(tensors[0], tensors[1], tensors[2], case.spec, ranges=True, **extras.as_options())
    synchronise(device)
    return truth, 1e3 * (time.perf_counter() - start)


def _lies(
    case: Case, problem: _Problem, shared: _Shared, recipe: Recipe
) -> tuple[tuple[Hazard, ...], tuple[MaskRow, ...]]:
    """What a bias of large finite numbers does where this recipe adds it."""
    q, k, _ = (x.values for x in shared.stored)
    fmt = recipe.format_of("scores")
    count, rows = lying_rows(q, k, case.spec, problem.extras, fmt)
    if not count:
        return (), ()
    bias = problem.extras.bias
    assert bias is not None
    peak = float(bias[torch.isfinite(bias)].abs().max())
    shape = case.shape
    total = shape.batch * shape.heads * shape.q_len
    place = (*rows[0].where, 0)
    room = headroom_bits(get_format(fmt), peak)
    hazard = Hazard(HazardKind.SENTINEL, "scores", fmt, "predicted", peak, room, count, total, place)
    return (hazard,), rows


def _facts(truth: Truth, case: Case) -> dict[str, float]:
    """What the exact inputs are like: Var(q·k)/D, the largest |score|, the mean over rows of the top probability."""
    ranges = truth.ranges
    assert ranges is not None
    top = torch.exp(truth.row_max - truth.lse)[torch.isfinite(truth.lse)]
    return {
        "var_qk_per_dim": ranges.raw_square / ranges.pairs / case.shape.head_dim
        if ranges.pairs and case.shape.head_dim
        else math.nan,
        "score_peak": ranges.score.value,
        "mean_top_prob": float(top.mean()) if top.numel() else math.nan,
    }


@dataclass(frozen=True)
class _Outcome:
    """What one implementation gave on one case."""

    status: Status
    reasons: tuple[str, ...]
    result: Any = None
    hazards: tuple[Hazard, ...] = ()
    traceback: str = ""
    run_ms: float = math.nan
    relations: tuple[Relation, ...] = ()


def _attempt(unit: Unit, name: str, recipe: Recipe, extras: Extras, shared: _Shared) -> _Outcome:
    """Run one implementation. Whatever it raises becomes an ERROR with its traceback: it is under test."""
    shape, spec, device = unit.case.shape, unit.case.spec, torch.device(unit.device)
    ledger = RangeLedger(shape, recipe)
    start = time.perf_counter()
    try:
        implementation = registry.get(name)
        if refused := implementation.refusals(spec, shape, recipe, extras.given):
            return _Outcome(Status.REFUSED, tuple(refused))
        result = implementation.run_stored(shared.stored, spec, recipe, extras, watch=ledger)
        synchronise(device)
        run_ms = 1e3 * (time.perf_counter() - start)
        if wrong := _misshapen(result, shape):
            return _Outcome(Status.FAIL, wrong, run_ms=run_ms)
        related: tuple[Relation, ...] = ()
        if unit.case.relations and unit.seed == 0:  # what one draw shows, the others repeat
            related = relations(name, result.out, shared.stored, spec, recipe, extras, shape)
    except Exception as error:
        return _Outcome(Status.ERROR, (f"{type(error).__name__}: {error}",), traceback=traceback.format_exc())
    foreseen = predict(shared.truth, recipe, getattr(implementation, "subtracts_max", True))
    hazards = (*shared.hazards, *foreseen, *ledger.hazards())
    return _Outcome(Status.PASS, (), result, hazards, run_ms=run_ms, relations=related)


def _misshapen(result: Any, shape: Shape) -> tuple[str, ...]:
    """What is wrong with a result before any of its numbers is looked at."""
    out = shape.tensor("out")
    wanted = {"out": out, "lse": out[:3]}
    wrong = []
    for name, size in wanted.items():
        x = getattr(result, name, None)
        if x is None and name == "lse":  # not every kernel gives one
            continue
        if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            got = str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__
            wrong.append(f"{name} is {got}, but should be a floating-point tensor {size}")
        elif tuple(x.shape) != size:
            wrong.append(f"{name} is {tuple(x.shape)}, but should be {size}")
    return tuple(wrong)


def is_emulated(name: str, recipe: Recipe) -> bool:
    """Whether time says nothing about the formats: some are narrower than what the arithmetic runs in."""
    narrow = {*recipe.storage.values(), *recipe.at.values()} - {recipe.base}
    return registry.entry(name).emulated and bool(narrow)


def _cell(
    unit: Unit, name: str, recipe: Recipe, problem: _Problem, shared: _Shared,
    lies: tuple[tuple[Hazard, ...], tuple[MaskRow, ...]], data: dict[str, float],
) -> Record:  # fmt: skip
    case, outcome = unit.case, _attempt(unit, name, recipe, problem.extras, shared)
    errors = total = lse_errors = None
    status, reasons, output_hash = outcome.status, outcome.reasons, ""
    if outcome.result is not None:
        out, lse = outcome.result.out, outcome.result.lse
        errors = compare(out, shared.truth.out, recipe.out_format)
        total = compare(out, problem.truth.out, recipe.out_format)
        if lse is not None:
            lse_errors = compare(lse[..., None], shared.truth.lse[..., None], recipe.base)
        output_hash = hashlib.sha256(
            out.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        status, reasons = judge_classes(errors)
    return Record(
        case=case.id, group=case.group, shape=str(case.shape), why=case.why, implementation=name,
        recipe=recipe.name, recipe_digest=recipe.digest, seed=unit.seed, status=status, reasons=reasons,
        errors=errors, total_errors=total, lse_errors=lse_errors, hazards=(*lies[0], *outcome.hazards),
        traceback=outcome.traceback, emulated=is_emulated(name, recipe),
        run_ms=outcome.run_ms, truth_ms=shared.truth_ms, flops=problem.flops,
        computed_flops=getattr(outcome.result, "flops", 0), kv_bytes_per_token=kv_bytes_per_token(case.shape, recipe),
        data=data, inputs_hash=problem.inputs.hash, output_hash=output_hash, machine=machine(unit.device),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        case_digest=case.digest, source=case.source, relations=outcome.relations, mask_rows=lies[1],
    )  # fmt: skip


def judge_classes(errors: Errors) -> tuple[Status, tuple[str, ...]]:
    """PASS when NaN, +Inf and −Inf stand exactly where the stored truth has them, else FAIL with the counts."""
    if not errors.class_mismatch:
        return Status.PASS, (BY_CLASSES,)
    counts = (
        ("NaN", errors.nan_mismatch),
        ("+Inf", errors.posinf_mismatch),
        ("−Inf", errors.neginf_mismatch),
    )
    found = ", ".join(f"{n} {name}" for name, n in counts if n)
    return Status.FAIL, (f"classes differ from the stored truth: {found}",)
