"""Assertions for test suites: attention's output against what its precision allows, without a tolerance.

from harness.testing import assert_attention_close

assert_attention_close(my_attention(q, k, v), q, k, v, spec=AttentionSpec(causal=True), recipe="bf16")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.docket import Judgement
from harness.judging import judge
from harness.recipe import Recipe, get_recipe
from harness.records import Status
from harness.spec import AttentionSpec, rules_in_spec

__all__ = ["assert_attention_close", "check_judgement"]


@rules_in_spec
def assert_attention_close(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec | None = None,
    recipe: str | Recipe = "bf16", allow_inconclusive: bool = False, **options: Any,
) -> Judgement:  # fmt: skip
    """Assert that `out` `[B, H, L, E]` is attention of q, k and v as accurate as `recipe` allows; return the judgement.

    NaN and ±Inf have to stand where the FP64 truth has them. The recipe's own fitness, `precision`, is not asserted:
    read it from the result. `options` are those of `harness.judge`.

    Raises AssertionError, with what was found and what to do, when the status is FAIL, and when it is INCONCLUSIVE
    (these inputs cannot tell right from wrong) unless that is allowed; ValueError as `judge` does.
    """
    judgement = judge(out, q, k, v, spec=spec, recipe=recipe, **options)
    check_judgement(judgement, recipe, allow_inconclusive, _again())
    return judgement


def check_judgement(
    judgement: Judgement, recipe: str | Recipe, allow_inconclusive: bool = False, again: Sequence[str] = ()
) -> None:
    """Raise AssertionError with the whole story unless the status is allowed. `again`: commands that repeat it."""
    allowed = (Status.PASS, Status.INCONCLUSIVE) if allow_inconclusive else (Status.PASS,)
    if judgement.status not in allowed:
        lines = [_story(judgement, get_recipe(recipe)), f"torch was seeded with {torch.initial_seed()}"]
        raise AssertionError("\n".join([*lines, *(f"to repeat: {command}" for command in again)]))


def _again() -> tuple[str, ...]:
    """The test that is running, where pytest tells."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    return (f"pytest '{test}'",) if test else ()


def _story(j: Judgement, recipe: Recipe) -> str:
    """What was expected, what was seen, where, why, and how to go on."""
    lines = [
        f"attention is {j.status.value} under recipe {recipe.name}",
        *(f"  {reason}" for reason in j.reasons),
    ]
    if j.diagnosis is not None:
        lines.append(f"likeliest fault: {j.diagnosis.fault}")
        lines.append(f"  {j.diagnosis}")
    e, m = j.errors, j.margins
    lines.append(f"rel_l2 is {e.rel_l2:.3g}, but {m.expected_rel_l2:.3g} is normal")
    lines.append(f"error is {m.ratio:.3g} × normal, but should be ≤ {m.limit:.3g} ×")
    if e.worst is not None:
        lines.append(
            "largest error {:.3g} ({:.3g} ulps of {}) at b={} h={} i={} c={}".format(
                e.max_abs, e.max_ulp, recipe.out_format, *e.worst
            )
        )
    lines += [f"  {hazard}" for hazard in j.hazards]
    lines.append(f"to go on: {_advice(j)}")
    return "\n".join(lines)


def _advice(j: Judgement) -> str:
    if j.status is Status.INCONCLUSIVE:
        return f"{j.status.advice}, or pass allow_inconclusive=True"
    if j.errors.class_mismatch:
        return "look at the first stage that leaves its format, and at rows that see no key"
    if j.diagnosis is not None and j.diagnosis.statistic > 0:
        return "mend the fault named above and run again; harness.judge(…) returns all figures"
    return (
        "compare with another recipe: a kernel may keep P or its sums in a narrower format than this one says"
    )
