"""One unit of a run: a case and seed, its truths, and every cell on it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from harness.attempt import Outcome, attempt
from harness.case import Case
from harness.cost import kv_bytes_per_token
from harness.devices import synchronise, use_device
from harness.docket import Docket, Judgement
from harness.error_model import Expectation, Form, expectations, form_of
from harness.facts import facts, hash_of, visible_flops
from harness.floor import ideal_recipe
from harness.formats import get_format
from harness.hazards import headroom_bits, storage_hazards
from harness.inputs import Inputs, make_inputs
from harness.layer_cell import run_layer
from harness.layouts import lay_out
from harness.lies import lying_rows
from harness.machine import machine
from harness.operands import Extras
from harness.quantize import Stored, quantize
from harness.recipe import TENSORS, Recipe
from harness.records import Hazard, HazardKind, MaskRow, Record
from harness.row_cell import run_rows
from harness.truth import Truth, reference
from harness.twins import FIRST
from harness.unit import Unit, is_emulated

__all__ = ["Unit", "is_emulated", "run_unit"]


@dataclass(frozen=True)
class _Problem:
    """What the cells of a unit share: the case on the device, and its exact truth."""

    inputs: Inputs
    exact: tuple[torch.Tensor, ...]
    extras: Extras
    truth: Truth
    truth_ms: float


@dataclass(frozen=True)
class _Shared:
    """What the cells of one storage share."""

    stored: tuple[Stored, Stored, Stored]
    truth: Truth
    truth_ms: float
    hazards: tuple[Hazard, ...]
    expected: dict[tuple[str, Form], Expectation]


@torch.inference_mode()  # thousands of small operations: their bookkeeping is most of their cost
def run_unit(unit: Unit) -> list[Record]:
    """All cells of a unit."""
    if unit.case.layer is not None:
        return run_layer(unit)
    if unit.case.rows is not None:
        return run_rows(unit)
    device = use_device(unit.device)
    inputs = make_inputs(unit.case, unit.seed)
    exact, extras = tuple(x.to(device) for x in inputs.tensors), inputs.extras.to(device)
    truth, ms = _truth(exact, unit.case, extras, device)
    problem = _Problem(inputs, exact, extras, truth, ms)
    data = facts(truth, unit.case.shape)
    shared: dict[tuple[object, ...], _Shared] = {}
    for recipe in unit.recipes:
        for needed in (recipe, ideal_recipe(recipe)):
            if needed.storage_key not in shared:
                shared[needed.storage_key] = _share(unit, problem, needed, device)
    return [
        record
        for recipe in unit.recipes
        for record in _cells(
            unit,
            recipe,
            problem,
            shared[recipe.storage_key],
            shared[ideal_recipe(recipe).storage_key].truth,
            data,
        )
    ]


def _share(unit: Unit, problem: _Problem, recipe: Recipe, device: torch.device) -> _Shared:
    case = unit.case
    q, k, v = (quantize(x, name, recipe) for x, name in zip(problem.exact, TENSORS, strict=True))
    truth, ms = _truth((q.values, k.values, v.values), case, problem.extras, device)
    hazards = tuple(storage_hazards(problem.exact, (q, k, v), recipe))
    pairs = [
        (r, form)
        for r in unit.recipes
        if r.storage_key == recipe.storage_key
        for form in dict.fromkeys(form_of(name) for name in unit.implementations)
    ]
    found = expectations(
        truth, q.values, k.values, v.values, case.spec, pairs, **problem.extras.as_options(),
        scales=(q.scale, k.scale, v.scale),
    )  # fmt: skip
    expected = {(r.name, form): e for (r, form), e in zip(pairs, found, strict=True)}
    q, k, v = (replace(x, codes=lay_out(x.codes, case.layout)) for x in (q, k, v))
    return _Shared((q, k, v), truth, ms + problem.truth_ms, hazards, expected)


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


def _cells(
    unit: Unit,
    recipe: Recipe,
    problem: _Problem,
    shared: _Shared,
    ideal: Truth | None,
    data: dict[str, float],
) -> Iterator[Record]:
    """The records of all implementations under one recipe, judged together: they share twins and directions."""
    case, device = unit.case, problem.exact[0].device
    lies = _lies(case, problem, shared, recipe)
    outcomes = {
        name: attempt(case, unit.seed, device, name, recipe, shared.stored, problem.extras, shared.truth)
        for name in unit.implementations
    }
    docket = Docket(
        shared.stored, case.spec, problem.extras, recipe, problem.exact, shared.truth, problem.truth, ideal,
        {form: e for (of, form), e in shared.expected.items() if of == recipe.name}, shared.hazards,
    )  # fmt: skip
    ran = {name: o.result for name, o in outcomes.items() if o.result is not None}
    if FIRST in ran:
        docket.knows(ran[FIRST].out)
    forms = {name: form_of(name) for name in ran}
    verdicts = dict(
        zip(ran, docket.verdicts([r.out for r in ran.values()], list(forms.values())), strict=True)
    )
    for name, outcome in outcomes.items():
        hazards = (*lies[0], *shared.hazards, *outcome.hazards)
        judged = None
        if name in ran:
            judged = docket.judgement(
                ran[name].out, verdicts[name], ran[name].lse, forms[name], hazards, precise=unit.seed == 0
            )
        yield _record(
            unit, name, recipe, problem, shared, replace(outcome, hazards=hazards), judged, lies[1], data
        )


def _record(
    unit: Unit, name: str, recipe: Recipe, problem: _Problem, shared: _Shared, outcome: Outcome,
    judged: Judgement | None, rows: tuple[MaskRow, ...], data: dict[str, float],
) -> Record:  # fmt: skip
    case = unit.case
    verdict = {} if judged is None else {
        "errors": judged.errors, "total_errors": judged.total_errors, "lse_errors": judged.lse_errors,
        "status": judged.status, "reasons": judged.reasons, "margins": judged.margins, "diagnosis": judged.diagnosis,
        "precision": judged.precision, "precision_reasons": judged.precision_reasons, "floor": judged.floor,
        "output_hash": hash_of(outcome.result.out),
        "head_rel_l2": _by_head(case, outcome.result.out, problem.truth.out),
    }  # fmt: skip
    nothing = {
        "errors": None, "total_errors": None, "lse_errors": None, "status": outcome.status, "reasons": outcome.reasons,
        "output_hash": "",
    }  # fmt: skip
    return Record(
        case=case.id, group=case.group, shape=str(case.shape), why=case.why, implementation=name,
        recipe=recipe.name, recipe_digest=recipe.digest, seed=unit.seed, hazards=outcome.hazards,
        traceback=outcome.traceback, emulated=is_emulated(name, recipe),
        run_ms=outcome.run_ms, truth_ms=shared.truth_ms, flops=visible_flops(problem.truth, case.shape),
        computed_flops=getattr(outcome.result, "flops", 0), kv_bytes_per_token=kv_bytes_per_token(case.shape, recipe),
        data=data, inputs_hash=problem.inputs.hash, machine=machine(unit.device),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        case_digest=case.digest, source=case.source, relations=outcome.relations, mask_rows=rows,
        ran=getattr(outcome.result, "ran", None),
        **(verdict or nothing),
    )  # fmt: skip


def _by_head(case: Case, out: torch.Tensor, exact: torch.Tensor) -> tuple[float, ...]:
    """Total rel_l2 of each head: NaN where it is not finite, or the truth is 0."""
    if case.draw.kind != "file":
        return ()
    apart, size = ((x * x).sum((0, 2, 3)) for x in (out.double() - exact, exact))
    return tuple(float(f"{x:.4g}") for x in (apart / size).sqrt().tolist())
