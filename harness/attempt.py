"""One run of one implementation: what it gave, or how it failed to give anything."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness import registry
from harness.case import Case
from harness.devices import synchronise
from harness.hazards import RangeLedger, predict
from harness.operands import Extras
from harness.quantize import Stored
from harness.recipe import Recipe
from harness.records import Hazard, Relation, Status
from harness.relations import relations
from harness.result import Fallen, Refusal, tried
from harness.spec import Shape
from harness.truth import Truth


@dataclass(frozen=True)
class Outcome:
    """What one implementation gave on one case. PASS here says that there is a result to judge."""

    status: Status
    reasons: tuple[str, ...]
    result: Any = None
    hazards: tuple[Hazard, ...] = ()
    traceback: str = ""
    run_ms: float = math.nan
    relations: tuple[Relation, ...] = ()


def attempt(
    case: Case, seed: int, device: torch.device, name: str, recipe: Recipe, stored: tuple[Stored, Stored, Stored],
    extras: Extras, truth: Truth,
) -> Outcome:  # fmt: skip
    """Run one implementation. Whatever it raises becomes an ERROR with its traceback: it is under test."""
    shape, spec = case.shape, case.spec
    ledger = RangeLedger(shape, recipe)

    def run() -> tuple[Outcome, bool]:
        start = time.perf_counter()
        implementation = registry.get(name)
        if refused := implementation.refusals(spec, shape, recipe, extras.given):
            return Outcome(Status.REFUSED, tuple(refused)), True
        result = implementation.run_stored(stored, spec, recipe, extras, watch=ledger)
        synchronise(device)
        run_ms = 1e3 * (time.perf_counter() - start)
        if wrong := _misshapen(result, shape):
            return Outcome(Status.FAIL, wrong, run_ms=run_ms), True
        related: tuple[Relation, ...] = ()
        if case.relations and seed == 0:  # what one draw shows, the others repeat
            with suppress(Refusal):  # of a part of the case, which has run
                related = relations(name, result.out, stored, spec, recipe, extras, shape)
        given = Outcome(Status.PASS, (), result, run_ms=run_ms, relations=related)
        return given, getattr(implementation, "subtracts_max", True)

    found = tried(run)
    if isinstance(found, Fallen):
        return outcome_of(found)
    given, subtracts_max = found
    if given.result is None:
        return given
    foreseen = predict(truth, recipe, subtracts_max, stored[2].scale, extras.sinks)
    return replace(given, hazards=(*foreseen, *ledger.hazards()))


def outcome_of(given: Outcome | Fallen) -> Outcome:
    """The same, of a run that may have fallen."""
    return (
        given
        if isinstance(given, Outcome)
        else Outcome(given.status, given.reasons, traceback=given.traceback)
    )


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
