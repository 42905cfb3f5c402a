"""One unit of a run whose case is judged by some of its rows: a long context.

Algorithms written over `Arithmetic` compute these rows alone. A black box computes the whole call, as it would.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness import registry
from harness.attempt import Outcome, outcome_of
from harness.by_head import parts_of, store_narrow, truth_by_head
from harness.cost import kv_bytes_per_token
from harness.devices import synchronise, use_device
from harness.docket import Docket, Judgement
from harness.error_model import form_of
from harness.facts import facts, hash_of, visible_flops
from harness.inputs import Inputs, make_inputs
from harness.judging import store_rows, taken
from harness.machine import machine
from harness.operands import Extras
from harness.quantize import Stored
from harness.query_rows import Rows, choose_rows
from harness.recipe import TENSORS, Recipe
from harness.records import Record, Status
from harness.result import Result, tried
from harness.sample import Sample
from harness.truth import Truth
from harness.unit import Unit, is_emulated

Three = tuple[Stored, Stored, Stored]


@dataclass(frozen=True)
class _Problem:
    """What the cells of a unit share. `extras` are of the rows, `whole` of the call."""

    inputs: Inputs
    rows: Rows
    exact: tuple[Tensor, Tensor, Tensor]
    extras: Extras
    whole: Extras
    truth: Truth
    truth_ms: float


def run_rows(unit: Unit) -> list[Record]:
    """All cells of a unit, a recipe at a time: what one stores is gone before the next."""
    device, case = use_device(unit.device), unit.case
    assert case.rows is not None
    inputs = make_inputs(case, unit.seed)
    q, k, v = (x.to(device) for x in inputs.tensors)
    whole = inputs.extras.to(device)
    rows = choose_rows(q, k, case.spec, rows=case.rows, seed=unit.seed, kv_lens=whole.kv_lens).to(device)
    mask, bias = (
        None if x is None else taken(n, x, rows) for n, x in (("mask", whole.mask), ("bias", whole.bias))
    )
    extras = replace(whole, mask=mask, bias=bias, rows=rows)
    exact = (rows.take(q), k, v)
    start = time.perf_counter()
    truth = truth_by_head((Stored(exact[0]), Stored(k), Stored(v)), case.spec, extras, ranges=True)
    ms = 1e3 * (time.perf_counter() - start)
    problem = _Problem(inputs, rows, exact, extras, whole, truth, ms)
    return [record for recipe in unit.recipes for record in _cells(unit, recipe, problem, (q, k, v))]


def _cells(
    unit: Unit, recipe: Recipe, problem: _Problem, tensors: tuple[Tensor, Tensor, Tensor]
) -> list[Record]:
    case = unit.case
    stored = store_rows(tensors, problem.rows, recipe, None, True)
    start = time.perf_counter()
    docket = Docket(stored, case.spec, problem.extras, recipe, problem.exact, exact_truth=problem.truth)
    truth_ms = 1e3 * (time.perf_counter() - start) + problem.truth_ms
    foreseen = docket.hazards()
    outcomes = {name: _run(unit, recipe, problem, stored, tensors, name) for name in unit.implementations}
    ran = {name: o.result for name, o in outcomes.items() if o.result is not None}
    forms = {name: form_of(name) for name in ran}
    verdicts = docket.verdicts([r.out for r in ran.values()], list(forms.values()))
    judged = {
        name: docket.judgement(r.out, verdict, r.lse, forms[name], foreseen, precise=unit.seed == 0)
        for (name, r), verdict in zip(ran.items(), verdicts, strict=True)
    }
    return [
        _record(unit, recipe, name, problem, o, judged.get(name), truth_ms) for name, o in outcomes.items()
    ]


def _run(
    unit: Unit, recipe: Recipe, problem: _Problem, stored: Three, tensors: Sequence[Tensor], name: str
) -> Outcome:  # fmt: skip
    """Whatever an implementation raises becomes an ERROR with its traceback: it is under test."""
    case = unit.case

    def run() -> Outcome:
        start = time.perf_counter()
        implementation = registry.get(name)
        if refused := implementation.refusals(case.spec, case.shape, recipe, problem.whole.given):
            return Outcome(Status.REFUSED, tuple(refused))
        if hasattr(implementation, "part"):
            if implementation.part is None:
                return Outcome(Status.REFUSED, (f"{name} cannot be run for some rows alone",))
            result = _alone(implementation, unit, recipe, problem, stored)
        else:
            result = _whole(implementation, unit, recipe, problem, tensors)
        synchronise(use_device(unit.device))
        return Outcome(Status.PASS, (), result, run_ms=1e3 * (time.perf_counter() - start))

    return outcome_of(tried(run))


def _alone(implementation: Any, unit: Unit, recipe: Recipe, problem: _Problem, stored: Three) -> Result:
    """These rows alone, a kv head at a time."""
    run = implementation.run_stored
    shape = unit.case.shape
    slices = Sample(len(problem.rows)).slices(shape.S * shape.heads)
    parts = [
        run(own, unit.case.spec, recipe, extras, rows=slices)
        for _, own, extras in parts_of(stored, problem.extras)
    ]
    out, lse = (torch.cat([getattr(p, n) for p in parts], 1) for n in ("out", "lse"))
    return Result(out, lse, sum(p.flops for p in parts))


def _whole(
    implementation: Any, unit: Unit, recipe: Recipe, problem: _Problem, tensors: Sequence[Tensor]
) -> Result:
    """All rows, of which these are taken."""
    q, k, v = (store_narrow(x, n, recipe, None, True) for x, n in zip(tensors, TENSORS, strict=True))
    given = tuple(replace(x, codes=x.codes.double()) for x in (q, k, v))
    result: Result = implementation.run_stored(given, unit.case.spec, recipe, problem.whole, watch=None)
    lse = None if result.lse is None else taken("lse", result.lse, problem.rows)
    return replace(result, out=taken("out", result.out, problem.rows), lse=lse)


def _record(
    unit: Unit, recipe: Recipe, name: str, problem: _Problem, outcome: Outcome, judged: Judgement | None,
    truth_ms: float,
) -> Record:  # fmt: skip
    case = unit.case
    record = Record(
        case=case.id, group=case.group, shape=f"{case.shape}, {problem.rows}", why=case.why, implementation=name,
        recipe=recipe.name, recipe_digest=recipe.digest, seed=unit.seed, status=outcome.status,
        reasons=outcome.reasons, errors=None, total_errors=None, lse_errors=None, hazards=outcome.hazards,
        traceback=outcome.traceback, emulated=is_emulated(name, recipe), run_ms=outcome.run_ms, truth_ms=truth_ms,
        flops=visible_flops(problem.truth, case.shape), computed_flops=getattr(outcome.result, "flops", 0),
        kv_bytes_per_token=kv_bytes_per_token(case.shape, recipe), data=facts(problem.truth, case.shape),
        inputs_hash=problem.inputs.hash, output_hash="", machine=machine(unit.device),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        case_digest=case.digest, source=case.source, ran=getattr(outcome.result, "ran", None),
    )  # fmt: skip
    if judged is None:
        return record
    return replace(
        record, status=judged.status, reasons=judged.reasons, errors=judged.errors, total_errors=judged.total_errors,
        lse_errors=judged.lse_errors, hazards=judged.hazards, margins=judged.margins, diagnosis=judged.diagnosis,
        precision=judged.precision, precision_reasons=judged.precision_reasons, floor=judged.floor,
        output_hash=hash_of(outcome.result.out),
    )  # fmt: skip
