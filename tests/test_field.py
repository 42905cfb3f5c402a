"""The field's own faults: each entry has a case, right attention passes it, and the fault planted in it is caught."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from field_faults import Planted, Seen, cases, entry_of, gated, made, right_record
from field_plants import PLANTS, by_table
from planted import Kernel

import harness
from harness.case import case_files
from harness.cell import Unit, run_unit
from harness.inputs import make_inputs
from harness.recipe import get_recipe
from harness.records import HazardKind, Status

RIGHT = ("naive_masked", "lower_triangle", "online_softmax", "decode_with_cache", "split_kv", "paged_decode")
# Where an honest kernel on torch alone is no right implementation: 0·NaN is its fault.
NAN_INSIDE = ("f03-nan-in-hidden-slots", "f60-nan-in-v")


def entries() -> dict[str, tuple[str, str]]:
    """The table of the case file, read and not run."""
    tree = ast.parse(case_files()["field"].read_text(encoding="utf-8"))
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "ENTRIES"
        ):
            return dict(ast.literal_eval(node.value))
    raise AssertionError("cases/field.py has no ENTRIES")


@cache
def seen(plant: Planted) -> Seen:
    return plant.seen()


def params(reason: str, plants: Any = PLANTS) -> list[Any]:
    """Plants, those that the judge does not do yet marked with the reason: once it does, the mark is an error."""
    return [pytest.param(p, id=p.id, marks=_mark(getattr(p, reason))) for p in plants]


def _mark(why: str) -> list[Any]:
    return [pytest.mark.xfail(strict=True, reason=why)] if why else []


def test_there_are_48_entries_and_each_has_a_case_and_a_planted_fault() -> None:
    assert len(entries()) == 48
    assert {entry_of(name) for name in cases()} == set(entries())
    assert {p.entry for p in PLANTS} == set(entries())
    assert len({p.id for p in PLANTS}) == len(PLANTS)


@pytest.mark.parametrize("name", sorted(cases()))
def test_every_case_says_why_it_exists_and_where_it_was_reported(name: str) -> None:
    title, thread = entries()[entry_of(name)]
    why = cases()[name].why
    assert why.startswith(f"{title}: ")
    assert why.endswith(f"({entry_of(name)}, https://github.com/{thread})")


def test_they_run_only_when_they_are_named() -> None:
    assert not [c for c in harness.load_cases("all") if c.group == "field"]
    assert harness.load_cases("field")


@pytest.mark.parametrize("name", sorted(cases()))
def test_every_right_implementation_passes(name: str) -> None:
    case = cases()[name]
    records = run_unit(Unit(case, 0, RIGHT, tuple(get_recipe(r) for r in case.recipes)))
    wrong = [r for r in records if r.status not in (Status.PASS, Status.REFUSED)]
    assert not wrong, [(r.implementation, r.recipe, r.reasons, r.traceback) for r in wrong]
    refused = {r.implementation for r in records if r.status is Status.REFUSED}
    assert refused <= ({"lower_triangle", "paged_decode"} if not case.spec.causal else set())


PLANTED_IN = sorted({(p.case, p.recipe) for p in PLANTS if p.case not in NAN_INSIDE}, key=str)


@pytest.mark.parametrize(("name", "recipe"), PLANTED_IN)
def test_the_kernel_that_faults_are_planted_in_passes_without_one(name: str, recipe: str | None) -> None:
    call = made(name, recipe)
    j = call.judge(Kernel()(call))
    assert j.status is Status.PASS, str(j)


@pytest.mark.parametrize("plant", params("missed"))
def test_a_planted_fault_is_caught(plant: Planted) -> None:
    assert seen(plant).status == plant.caught_as, seen(plant).said


@pytest.mark.parametrize("plant", params("misnamed", [p for p in PLANTS if p.told and not p.missed]))
def test_a_planted_fault_is_named_where_a_name_exists(plant: Planted) -> None:
    assert set(plant.told) & set(seen(plant).names), seen(plant)


def test_formula_and_table_of_one_mask_give_the_same_bits() -> None:
    one, other = by_table(made("f30-formula"))
    assert torch.equal(one, other)


def test_the_gate_asks_no_timings_of_the_same_code() -> None:
    once, again = right_record("f63-same-code"), right_record("f63-same-code")
    slow = replace(again, run_ms=30 * once.run_ms, truth_ms=30 * once.truth_ms)
    assert gated(once, slow).exit_code == 0
    assert once.output_hash == again.output_hash


def test_a_fixed_tolerance_fails_right_runs_where_the_judge_passes_them() -> None:
    """Half a BF16 ulp of values in [16, 32) is 1/16."""
    call = made("f58-values-30")
    out = Kernel()(call).double()
    truth = harness.reference(*(x.values for x in call.stored), call.spec).out
    assert float((out - truth).abs().max()) > 0.06
    assert call.judge(out).status is Status.PASS


def test_zero_scale_blocks_are_counted() -> None:
    hazards = right_record("f53-zero-head").hazards
    assert HazardKind.ZERO_AMAX in {h.kind for h in hazards}


def test_stale_max_case_weighs_key_0_as_reported() -> None:
    case = cases()["f57-stale-max"]
    q, k, _ = make_inputs(case, 0).tensors
    one_hot = torch.eye(4, dtype=torch.float64).expand(1, 8, 4, 4)
    weight = harness.reference(q, k, one_hot, case.spec).out[0, 0, 0, 0]
    assert math.isclose(float(weight), 1 / 1.65625, rel_tol=1e-14)


def test_neighbouring_rope_positions_keep_their_angle_at_15962() -> None:
    """Of unit vectors six positions apart in a plane that turns by 1 a position, q·k is cos 6."""
    from harness.inputs import rotate_at

    unit = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64).view(1, 1, 2, 2)
    a, b = rotate_at(unit, torch.tensor([15962, 15968]))[0, 0]
    assert abs(float(a @ b) - math.cos(6)) <= 4 * 15968 * 2.0**-53
