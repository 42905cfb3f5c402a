"""The faults of `cases/field.py`, planted: for each entry what is done wrong, and what the judge must say of it.

`Planted.output` is that of a kernel on torch alone (`tests/planted.py`) with the mistake in it, or the recipe that the
mistaken kernel would have: one of the algorithms then runs under it, watched as a run watches it.
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
from harness.docket import Docket
from harness.error_model import BLACK_BOX, form_of
from harness.gate import pool_records
from harness.gate.rules import compare
from harness.hazards import RangeLedger
from harness.inputs import make_inputs
from harness.operands import Extras, check
from harness.recipe import Recipe, get_recipe
from harness.records import Diagnosis

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
    """What was found: a status, the names that the fault was given (the likeliest first, then its rivals), and what was
    said."""

    status: str
    names: tuple[str, ...] = ()
    said: str = ""


@dataclass(frozen=True)
class Planted:
    """One fault. `output`: what the faulty kernel makes of the call (of a relation: two runs, and `right` those of a
    kernel that keeps it). `told`: the names of which one must be given, none where no direction, suspect or hazard
    describes the fault and its numbers alone show it. `precise`: whether it is to be named. `missed`, `misnamed`: what
    the judge does not do yet, and why."""

    case: str
    what: str
    output: Callable[[Made], Any]
    told: tuple[str, ...] = ()
    recipe: str | None = None
    instrument: str = "status"
    right: Callable[[Made], Any] | None = None
    precise: bool = True
    missed: str = ""
    misnamed: str = ""

    @property
    def entry(self) -> str:
        return entry_of(self.case)

    @property
    def id(self) -> str:
        return f"{self.entry} {self.what}, {self.case[4:]}"

    @property
    def caught_as(self) -> str:
        """The status that says that the fault is seen."""
        return "other bits" if self.instrument == "relation" else "FAIL"

    def seen(self) -> Seen:
        call = made(self.case, self.recipe)
        return INSTRUMENTS[self.instrument](self, call)


# --- instruments -------------------------------------------------------------------------------------------------


def _names(found: Diagnosis | None) -> tuple[str, ...]:
    return () if found is None else (found.fault, *found.rivals)


def _by_status(plant: Planted, call: Made) -> Seen:
    """The judge. A recipe in place of an output is one of the algorithms under it, watched as a run watches it."""
    got, extras, hazards = plant.output(call), Extras(**call.extras), ()
    form, lse = BLACK_BOX, None
    docket = Docket(call.stored, call.spec, extras, call.recipe, call.exact)
    if isinstance(got, Recipe):
        shape = check(*call.exact, call.spec)[0]
        ledger = RangeLedger(shape, got)
        result = harness.get(WATCHED).run_stored(call.stored, call.spec, got, extras, watch=ledger)
        got, lse, form, hazards = result.out, result.lse, form_of(WATCHED), tuple(ledger.hazards())
    (verdict,) = docket.verdicts([got], [form])
    hazards = (*docket.hazards(), *hazards)
    j = docket.judgement(got, verdict, lse, form, hazards, precise=plant.precise)
    return Seen(j.status.value, _names(j.diagnosis), "; ".join(j.reasons))


def _by_precision(plant: Planted, call: Made) -> Seen:
    """The recipe is what is wrong: a kernel that is faithful to it passes, its precision does not."""
    j = call.judge(plant.output(call))
    lost = (h for h in j.hazards if str(h) in j.precision_reasons)
    names = tuple(f"{h.kind.value} in {h.stage}" for h in lost)
    return Seen(j.precision.value, names, "; ".join(j.precision_reasons))


def _by_relation(plant: Planted, call: Made) -> Seen:
    """Two runs of one thing: other bits in more than ten times as many places as where the relation is kept (sums of
    other lengths may round otherwise there)."""
    assert plant.right is not None
    fmt = call.recipe.out_format
    found, kept = (invariance(*output(call), fmt) for output in (plant.output, plant.right))
    other = found.differing > 10 * kept.differing
    return Seen("other bits" if other else "same bits", (), f"{found}; where it is kept: {kept}")


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
    return Seen("FAIL" if found.exit_code == 1 else "PASS", _names(j.diagnosis), "; ".join(found.regressions))


INSTRUMENTS: dict[str, Callable[[Planted, Made], Seen]] = {
    "status": _by_status, "precision": _by_precision, "relation": _by_relation,
    "gate": _by_gate,
}  # fmt: skip
