"""The cells of a layer case: each implementation is the attention inside one layer, judged at the layer's end."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from harness import registry
from harness.attempt import Outcome, outcome_of
from harness.attention.invariance import invariance
from harness.attention.layer import Layer, LayerResult
from harness.attention.layer_decode import decode, decoding_refusals
from harness.compare import compare
from harness.cost import kv_bytes_per_token
from harness.devices import synchronise, use_device
from harness.error_model import WHOLE, Form, form_of
from harness.error_model.layer import LayerExpectation, layer_expectations
from harness.facts import facts, hash_of
from harness.floor import ONE_BIT, ideal_recipe, lost_bits
from harness.hazards import RangeLedger, predict, storage_hazards
from harness.layer_inputs import hash_layer, make_layer
from harness.layer_judging import blame, judge_layer
from harness.layer_store import StoredLayer, Weights, layer_recipe, store_layer, unstored
from harness.layer_truth import LayerTruth, layer_reference
from harness.machine import machine
from harness.optional import MissingExtra
from harness.precision import ruinous
from harness.recipe import Recipe
from harness.records import Record, Relation, Status
from harness.result import tried
from harness.spec import LayerSpec, Shape
from harness.unit import Unit, is_emulated


@dataclass(frozen=True)
class _Problem:
    """What the cells of a unit share."""

    x: torch.Tensor
    weights: Weights
    exact: LayerTruth
    hash: str
    layer: LayerSpec

    def flops(self, shape: Shape) -> int:
        """Of the projections, and of the visible pairs."""
        ranges = self.exact.attention.ranges
        assert ranges is not None
        columns = 2 * (shape.heads + shape.Hkv) * shape.head_dim
        return 2 * shape.batch * shape.q_len * self.layer.width * columns + 4 * ranges.pairs * shape.head_dim


def run_layer(unit: Unit) -> list[Record]:
    """All cells of a layer case. A model that is not installed refuses them in one line."""
    case, layer = unit.case, unit.case.layer
    assert layer is not None
    device = use_device(unit.device)
    try:
        x, weights = make_layer(case, unit.seed)
    except MissingExtra as error:
        refused = Outcome(Status.REFUSED, (str(error),))
        return [_record(unit, r, n, None, refused) for r in unit.recipes for n in unit.implementations]
    digest = hash_layer(x, weights)
    x = x.to(device)
    weights = Weights(**{name: t.to(device) for name, t in vars(weights).items()})
    exact = layer_reference(unstored(x, weights), case.shape, case.spec, layer, ranges=True)
    problem = _Problem(x, weights, exact, digest, layer)
    return [record for recipe in unit.recipes for record in _cells(unit, recipe, problem)]


def _cells(unit: Unit, recipe: Recipe, problem: _Problem) -> list[Record]:
    case, layer = unit.case, problem.layer
    start = time.perf_counter()
    stored = store_layer(problem.x, problem.weights, recipe, layer)
    truth = layer_reference(stored, case.shape, case.spec, layer, ranges=True)
    truth_ms = 1e3 * (time.perf_counter() - start)
    forms = {name: form_of(name) for name in unit.implementations}
    expected = layer_expectations(
        truth, stored, case.shape, case.spec, layer, recipe, [WHOLE, *forms.values()]
    )  # fmt: skip
    floor = _floor(unit, problem, recipe, truth, expected[WHOLE])
    return [
        _judged(unit, recipe, name, problem, stored, truth, _held(expected, forms[name]), floor, truth_ms)
        for name in unit.implementations
    ]


def _held(expected: dict[Form, LayerExpectation], form: Form) -> LayerExpectation:
    """What an implementation is held to: where its own form is promised nothing for want of a max, what whole rows
    are."""
    own, best = expected[form], expected[WHOLE]
    if form.subtract_max:
        return own
    lost = torch.isinf(own.ceiling) | torch.isinf(own.variance)
    return LayerExpectation(
        torch.where(lost, best.variance, own.variance), torch.where(lost, best.ceiling, own.ceiling), best.stages
    )  # fmt: skip


def _run(
    unit: Unit, recipe: Recipe, name: str, stored: StoredLayer, layer: LayerSpec
) -> tuple[Outcome, LayerResult | None]:
    """Run the layer around one attention. Whatever that raises becomes an ERROR with its traceback."""
    case = unit.case
    inside, around = (
        RangeLedger(case.shape, recipe),
        RangeLedger(replace(case.shape, heads=1, kv_heads=1), layer_recipe(recipe)),
    )

    def run() -> Outcome:
        start = time.perf_counter()
        attention = registry.get(name)
        refused = (
            *attention.refusals(case.spec, case.shape, recipe, ()),
            *(() if layer.steps is None else decoding_refusals(recipe)),
        )
        if refused:
            return Outcome(Status.REFUSED, refused)
        made = Layer(attention, case.shape, case.spec, layer, recipe, around, inside)
        related: tuple[Relation, ...] = ()
        if layer.steps is None:
            result = made.train(stored)
        else:
            trained = Layer(attention, case.shape, case.spec, layer, recipe).train(stored)
            result = decode(made, stored, layer.steps, trained.scales)
            if unit.seed == 0:
                related = (
                    invariance(result.out[:, None], trained.out[:, None], recipe.out_format, "training form"),
                )
        synchronise(stored.x.device)
        run_ms = 1e3 * (time.perf_counter() - start)
        return Outcome(Status.PASS, (), result, run_ms=run_ms, relations=related)

    outcome = outcome_of(tried(run))
    if outcome.result is None:
        return outcome, None
    result: LayerResult = outcome.result
    kept = storage_hazards(tuple(t.double() for t in result.projections), result.stored, recipe)
    return replace(outcome, hazards=(*kept, *inside.hazards(), *around.hazards())), result


def _judged(
    unit: Unit, recipe: Recipe, name: str, problem: _Problem, stored: StoredLayer, truth: LayerTruth,
    expected: LayerExpectation, floor: tuple[float, float], truth_ms: float,
) -> Record:  # fmt: skip
    outcome, result = _run(unit, recipe, name, stored, problem.layer)
    if result is None:
        return _record(unit, recipe, name, problem, outcome, truth_ms)
    foreseen = predict(truth.attention, recipe, getattr(registry.get(name), "subtracts_max", True))
    outcome = replace(outcome, hazards=(*foreseen, *outcome.hazards))
    out = result.out[:, None]
    verdict = judge_layer(out, truth.out, expected, recipe)
    diagnosis = None
    if verdict.status is Status.FAIL:
        q, k, v = (s.values for s in result.stored)
        got = {"q": q, "k": k, "v": v, "y": result.y, "z": result.z, "residual": result.residual, "out": out}
        diagnosis = blame(got, expected.stages, recipe)
    precision, why = _precision(outcome, recipe, expected, floor)
    record = _record(unit, recipe, name, problem, outcome, truth_ms)
    return replace(
        record, status=verdict.status, reasons=verdict.reasons, errors=verdict.errors,
        total_errors=compare(out, problem.exact.out, recipe.out_format), margins=verdict.margins,
        diagnosis=diagnosis, precision=precision, precision_reasons=why, floor=floor[1],
        output_hash=hash_of(result.out), computed_flops=result.flops,
    )  # fmt: skip


def _floor(
    unit: Unit, problem: _Problem, recipe: Recipe, truth: LayerTruth, expected: LayerExpectation
) -> tuple[float, float]:  # fmt: skip
    """Expected rel_l2 against the exact truth, of this recipe and of one with ideal scales."""
    case, ideal = unit.case, ideal_recipe(recipe)

    def error(of: LayerTruth, e: LayerExpectation) -> float:
        apart = (of.out - problem.exact.out).nan_to_num(0.0, 0.0, 0.0)
        variance = float(e.variance.nan_to_num(0.0, 0.0, 0.0).sum())
        size = float(problem.exact.out.nan_to_num(0.0, 0.0, 0.0).norm())
        return math.sqrt(variance + float((apart * apart).sum())) / size if size else 0.0

    own = error(truth, expected)
    if ideal.storage_key == recipe.storage_key:
        return own, own
    stored = store_layer(problem.x, problem.weights, ideal, problem.layer)
    best = layer_reference(stored, case.shape, case.spec, problem.layer)
    (held,) = layer_expectations(best, stored, case.shape, case.spec, problem.layer, ideal, [WHOLE]).values()
    return own, error(best, held)


def _precision(
    outcome: Outcome, recipe: Recipe, expected: LayerExpectation, floor: tuple[float, float]
) -> tuple[Status, tuple[str, ...]]:  # fmt: skip
    """The recipe's status: values lost to a format, or a bit lost to its scales."""
    own, best = floor
    found: Sequence[str] = [said for h in outcome.hazards if (said := ruinous(h, recipe))]
    if best > 0 and own > ONE_BIT * best:
        found = [*found, lost_bits(own, best, "ideal scales")]
    if found:
        return Status.FAIL, tuple(found)
    if bool(torch.isinf(expected.variance).any()):
        return Status.INCONCLUSIVE, ("the recipe promises nothing for some rows: no error can be expected",)
    return Status.PASS, (f"expected error {own:.3g} against the exact truth, floor {best:.3g}",)


def _record(
    unit: Unit, recipe: Recipe, name: str, problem: _Problem | None, outcome: Outcome, truth_ms: float = math.nan
) -> Record:  # fmt: skip
    """The record of a cell before anything is judged."""
    case, layer = unit.case, unit.case.layer
    assert layer is not None
    return Record(
        case=case.id, group=case.group, shape=f"{layer.width}→{case.shape}", why=case.why, implementation=name,
        recipe=recipe.name, recipe_digest=recipe.digest, seed=unit.seed, status=outcome.status,
        reasons=outcome.reasons, errors=None, total_errors=None, lse_errors=None, hazards=outcome.hazards,
        traceback=outcome.traceback, emulated=is_emulated(name, recipe), run_ms=outcome.run_ms, truth_ms=truth_ms,
        flops=0 if problem is None else problem.flops(case.shape), computed_flops=0,
        kv_bytes_per_token=kv_bytes_per_token(case.shape, recipe),
        data={} if problem is None else facts(problem.exact.attention, case.shape),
        inputs_hash="" if problem is None else problem.hash, output_hash="", machine=machine(unit.device),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        case_digest=case.digest, source=case.source, relations=outcome.relations,
    )  # fmt: skip
