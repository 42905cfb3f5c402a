"""The faults of `cases/field.py`, planted: for each entry what is done wrong, and what the judge must say of it.

`Planted.call` is a kernel on torch alone (`tests/planted.py`) with the mistake in it, or one of the algorithms under the
recipe that the mistaken kernel would have, watched as a run watches it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from planted import Made

import harness
from harness.attention.invariance import invariance
from harness.case import Case
from harness.cell import Unit, run_unit
from harness.error_model import form_of
from harness.gate.baseline import pool_records
from harness.gate.rules import compare
from harness.hazards import RangeLedger
from harness.inputs import make_inputs
from harness.judging import Docket
from harness.operands import Extras
from harness.recipe import Recipe, get_recipe

WATCHED = "naive_masked"


@cache
def cases() -> dict[str, Case]:
    """The entries' cases by name."""
    return {c.name: c for c in harness.load_cases("field")}


def entry_of(case: str) -> str:
    return case[:3].upper()


def made(case: str, recipe: str | None = None) -> Made:
    """The first draw of a case under the first of its recipes, or another."""
    c = cases()[case]
    inputs = make_inputs(c, 0)
    extras = {n: x for n, x in inputs.extras.as_options().items() if x is not None}
    return Made(inputs.tensors, get_recipe(recipe or c.recipes[0]), c.spec, extras)


@dataclass(frozen=True)
class Seen:
    """What was found: a status, how the fault was called, and what else was said."""

    status: str
    named: str = ""
    said: str = ""


@dataclass(frozen=True)
class Planted:
    """One fault. `output`: what the faulty kernel makes of the call. `told`: the names of which one must be given, none
    where no direction, suspect or hazard there is describes the fault: it is then caught by its numbers alone."""

    case: str
    what: str
    output: Callable[[Made], Any]
    told: tuple[str, ...] = ()
    recipe: str | None = None
    instrument: str = "status"

    @property
    def entry(self) -> str:
        return entry_of(self.case)

    @property
    def id(self) -> str:
        return f"{self.entry} {self.what}"

    @property
    def caught_as(self) -> str:
        """The status that says that the fault is seen."""
        return "other bits" if self.instrument == "relation" else "FAIL"

    def seen(self) -> Seen:
        call = made(self.case, self.recipe)
        return INSTRUMENTS[self.instrument](self, call)


# --- instruments -------------------------------------------------------------------------------------------------


def _by_status(plant: Planted, call: Made) -> Seen:
    got = plant.output(call)
    if isinstance(got, Recipe):
        return _watched(call, got)
    j = call.judge(got)
    return Seen(j.status.value, "" if j.diagnosis is None else j.diagnosis.fault, "; ".join(j.reasons))


def _watched(call: Made, wrong: Recipe) -> Seen:
    """An algorithm under the wrong recipe, judged by the right one, with what was seen on the way."""
    q, _, v = (x.codes for x in call.stored)
    extras = Extras(**call.extras)
    shape = harness.Shape(*q.shape, kv_heads=v.shape[1], kv_len=v.shape[2], value_dim=v.shape[3])
    ledger = RangeLedger(shape, wrong)
    result = harness.get(WATCHED).run_stored(call.stored, call.spec, wrong, extras, watch=ledger)
    docket = Docket(call.stored, call.spec, extras, call.recipe, call.exact)
    form = form_of(WATCHED)
    (verdict,) = docket.verdicts([result.out], [form])
    j = docket.judgement(result.out, verdict, result.lse, form, (*docket.hazards(), *ledger.hazards()))
    return Seen(j.status.value, "" if j.diagnosis is None else j.diagnosis.fault, "; ".join(j.reasons))


def _by_precision(plant: Planted, call: Made) -> Seen:
    """The recipe is what is wrong: a kernel that is faithful to it passes, its precision does not."""
    j = call.judge(plant.output(call))
    first = next((h for h in j.hazards if any(str(h) == r for r in j.precision_reasons)), None)
    named = "" if first is None else f"{first.kind.value} in {first.stage}"
    return Seen(j.precision.value, named, "; ".join(j.precision_reasons))


def _by_relation(plant: Planted, call: Made) -> Seen:
    """Two calls that should give the same bits."""
    one, other = plant.output(call)
    found = invariance(one, other, call.recipe.out_format)
    return Seen("same bits" if found.bits_equal else "other bits", "", str(found))


def gated(old: Any, new: Any) -> Any:
    """What the gate says of a run of one record after another."""
    return compare([new], pool_records([old]))


def right_record(case: str, name: str = WATCHED) -> Any:
    c = cases()[case]
    (record,) = run_unit(Unit(c, 0, (name,), (get_recipe(c.recipes[0]),)))
    return record


def _by_gate(plant: Planted, call: Made) -> Seen:
    """The record of the fault against that of the right implementation, as `gate` compares them."""
    right, j = right_record(plant.case), call.judge(plant.output(call))
    wrong = replace(right, status=j.status, errors=j.errors, margins=j.margins, diagnosis=j.diagnosis)
    found = gated(right, wrong)
    named = "" if j.diagnosis is None else j.diagnosis.fault
    return Seen("FAIL" if found.exit_code == 1 else "PASS", named, "; ".join(found.regressions))


INSTRUMENTS: dict[str, Callable[[Planted, Made], Seen]] = {
    "status": _by_status, "precision": _by_precision, "relation": _by_relation,
}  # fmt: skip
