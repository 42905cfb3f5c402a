"""The run: cases × seeds × recipes × implementations → records.

The unit of work is one case and seed: its inputs are drawn once, its truths are computed once per storage, and every
implementation meets the same tensors. Units are independent, so any `concurrent.futures.Executor` can run them.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness import registry
from harness.case import Case, load_cases
from harness.compare import compare
from harness.cost import attention_flops, kv_bytes_per_token
from harness.devices import synchronise, use_device
from harness.hazards import RangeLedger, predict, storage_hazards
from harness.inputs import Inputs, make_inputs
from harness.machine import machine
from harness.quantize import Stored, quantize
from harness.recipe import DEFAULT_RECIPES, TENSORS, Recipe, get_recipe
from harness.records import Errors, Hazard, Record, Status
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


def plan(
    cases: Iterable[Case], implementations: str | Sequence[str] | None = None,
    recipes: str | Recipe | Sequence[str | Recipe] | None = None, device: str = "cpu", seeds: int = 3,
) -> list[Unit]:  # fmt: skip
    """The units of a run, in order. Cases whose inputs do not depend on the seed run once.

    Raises ValueError for an unknown name, a recipe name used twice, or fewer than one seed.
    """
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise ValueError(f"seeds is {seeds!r}; allowed: an integer ≥ 1")
    implementations = (implementations,) if isinstance(implementations, str) else implementations
    recipes = (recipes,) if isinstance(recipes, (str, Recipe)) else recipes
    names = tuple(
        dict.fromkeys(registry.default_implementations() if implementations is None else implementations)
    )
    for name in names:
        registry.entry(name)
    chosen = tuple(dict.fromkeys(get_recipe(r) for r in (DEFAULT_RECIPES if recipes is None else recipes)))
    if len({r.name for r in chosen}) < len(chosen):
        raise ValueError("two recipes share one name; give each its own, since records are keyed by it")
    return [
        Unit(case, seed, names, chosen, device)
        for case in cases
        for seed in range(1 if case.draw.fixed else seeds)
    ]


def run(
    cases: str | Path | Iterable[Case] = "all", implementations: str | Sequence[str] | None = None,
    recipes: str | Recipe | Sequence[str | Recipe] | None = None, device: str = "cpu", seeds: int = 3,
    executor: Executor | None = None,
) -> list[Record]:  # fmt: skip
    """Every cell's record, in a fixed order whatever the executor. See `plan` for what raises."""
    use_device(device)
    chosen = load_cases(cases) if isinstance(cases, (str, Path)) else cases
    return [
        r
        for _, batch in run_units(plan(chosen, implementations, recipes, device, seeds), executor)
        for r in batch
    ]


def run_units(units: Sequence[Unit], executor: Executor | None = None) -> Iterator[tuple[Unit, list[Record]]]:
    """Records unit by unit, in the order of the units."""
    mapped: Callable[..., Iterable[list[Record]]] = map if executor is None else executor.map
    yield from zip(units, mapped(run_unit, units), strict=True)


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
    exact = tuple(x.to(device) for x in inputs.tensors)
    exact_truth, exact_ms = _truth(exact, unit.case, device)
    data = _facts(exact_truth, unit.case)
    shared: dict[tuple[object, ...], _Shared] = {}
    records = []
    for recipe in unit.recipes:
        if recipe.storage_key not in shared:
            q, k, v = (quantize(x, name, recipe) for x, name in zip(exact, TENSORS, strict=True))
            truth, ms = _truth((q.values, k.values, v.values), unit.case, device)
            kept = (q, k, v)
            shared[recipe.storage_key] = _Shared(
                kept, truth, ms + exact_ms, tuple(storage_hazards(exact, kept, recipe))
            )
        for name in unit.implementations:
            records.append(_cell(unit, name, recipe, inputs, exact_truth, shared[recipe.storage_key], data))
    return records


def _truth(tensors: tuple[torch.Tensor, ...], case: Case, device: torch.device) -> tuple[Truth, float]:
    start = time.perf_counter()
    truth = reference(tensors[0], tensors[1], tensors[2], case.spec, ranges=True)
    synchronise(device)
    return truth, 1e3 * (time.perf_counter() - start)


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


def _attempt(unit: Unit, name: str, recipe: Recipe, shared: _Shared) -> _Outcome:
    """Run one implementation. Whatever it raises becomes an ERROR with its traceback: it is under test."""
    shape, spec, device = unit.case.shape, unit.case.spec, torch.device(unit.device)
    ledger = RangeLedger(shape, recipe)
    start = time.perf_counter()
    try:
        implementation = registry.get(name)
        if refused := implementation.refusals(spec, shape, recipe):
            return _Outcome(Status.REFUSED, tuple(refused))
        result = implementation.run_stored(shared.stored, spec, recipe, watch=ledger)
        synchronise(device)
    except Exception as error:
        return _Outcome(Status.ERROR, (f"{type(error).__name__}: {error}",), traceback=traceback.format_exc())
    run_ms = 1e3 * (time.perf_counter() - start)
    if wrong := _misshapen(result, shape):
        return _Outcome(Status.FAIL, wrong, run_ms=run_ms)
    foreseen = predict(shared.truth, recipe, getattr(implementation, "subtracts_max", True))
    hazards = (*shared.hazards, *foreseen, *ledger.hazards())
    return _Outcome(Status.PASS, (), result, hazards, run_ms=run_ms)


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
    unit: Unit,
    name: str,
    recipe: Recipe,
    inputs: Inputs,
    exact_truth: Truth,
    shared: _Shared,
    data: dict[str, float],
) -> Record:
    case, outcome = unit.case, _attempt(unit, name, recipe, shared)
    errors = total = lse_errors = None
    status, reasons, output_hash = outcome.status, outcome.reasons, ""
    if outcome.result is not None:
        out, lse = outcome.result.out, outcome.result.lse
        errors = compare(out, shared.truth.out, recipe.out_format)
        total = compare(out, exact_truth.out, recipe.out_format)
        if lse is not None:
            lse_errors = compare(lse[..., None], shared.truth.lse[..., None], recipe.base)
        output_hash = hashlib.sha256(
            out.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        status, reasons = judge_classes(errors)
    return Record(
        case=case.id, group=case.group, shape=str(case.shape), why=case.why, implementation=name,
        recipe=recipe.name, recipe_digest=recipe.digest, seed=unit.seed, status=status, reasons=reasons,
        errors=errors, total_errors=total, lse_errors=lse_errors, hazards=outcome.hazards,
        traceback=outcome.traceback, emulated=is_emulated(name, recipe),
        run_ms=outcome.run_ms, truth_ms=shared.truth_ms, flops=attention_flops(case.shape, case.spec),
        computed_flops=getattr(outcome.result, "flops", 0), kv_bytes_per_token=kv_bytes_per_token(case.shape, recipe),
        data=data, inputs_hash=inputs.hash, output_hash=output_hash, machine=machine(unit.device),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
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
