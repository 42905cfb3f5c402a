"""How fast is each implementation under each recipe, and what error comes with that speed?

Timed is a call with its inputs in place (`ready`), and only where the same inputs passed the accuracy verdict. FLOPs
are the mathematics' (`harness.cost`), not what an implementation computes: masked products count for nothing. Low
precision over `Arithmetic` is emulated, and its time is the emulator's: it is measured on the short shapes alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import pytest
import torch

from harness import registry
from harness.case import Case
from harness.cost import attention_bytes, attention_flops, kv_bytes_per_token
from harness.docket import Docket
from harness.error_model import form_of
from harness.inputs import make_inputs
from harness.operands import NO_EXTRAS
from harness.quantize import Stored, store
from harness.recipe import DEFAULT_RECIPES, get_recipe
from harness.records import Status
from harness.result import Refusal
from harness.spec import AttentionSpec, Shape
from harness.timing.rule import interval
from harness.unit import is_emulated

CAUSAL = AttentionSpec(causal=True)
# Short: every cell of a default run within its minutes. Long: prefill whose products outweigh calls into torch, and a
# cache that no L2 holds (32 MiB in FP32).
SHORT = (
    Case("throughput", "prefill-256", Shape(heads=4, q_len=256), "a short prompt", CAUSAL),
    Case(
        "throughput", "decode-2048", Shape(batch=4, heads=8, kv_heads=2, kv_len=2048),
        "a query of four sequences against their caches", CAUSAL,
    ),
)  # fmt: skip
LONG = (
    Case("throughput", "prefill-1024", Shape(heads=8, q_len=1024), "a prompt", CAUSAL),
    Case(
        "throughput", "decode-16384", Shape(heads=16, kv_heads=4, kv_len=16384), "a query against a long cache",
        CAUSAL,
    ),
)  # fmt: skip
CASES = {c.name: c for c in (*SHORT, *LONG)}
TAIL = 0.025  # of each side of the latency's interval: 95 %
ROUNDS = 7  # at least: fewer have no such interval


@cache
def docket(case: str, recipe: str) -> tuple[tuple[Stored, Stored, Stored], Docket]:
    """Stored inputs and what judges on them, shared by implementations."""
    chosen, spec = get_recipe(recipe), CASES[case].spec
    stored = store(make_inputs(CASES[case], 0).tensors, chosen, round_first=True)
    return stored, Docket(stored, spec, NO_EXTRAS, chosen)


def cells(implementations: Iterable[str]) -> list[tuple[str, str, str]]:
    """(case, implementation, recipe) of what is done and not refused."""
    found = []
    for (name, case), implementation, recipe in itertools.product(
        CASES.items(), implementations, DEFAULT_RECIPES
    ):
        chosen = get_recipe(recipe)
        short = case in SHORT or not is_emulated(implementation, chosen)
        if short and not registry.get(implementation).refusals(case.spec, case.shape, chosen):
            found.append((name, implementation, recipe))
    return found


@pytest.mark.benchmark(max_time=0.25, min_rounds=ROUNDS)
@torch.no_grad()
def test_throughput(
    benchmark: Any, not_timed: list[dict[str, str]], case: str, implementation: str, recipe: str
) -> None:
    problem, chosen, found = CASES[case], get_recipe(recipe), registry.get(implementation)
    stored, judge = docket(case, recipe)
    told = {"case": case, "shape": str(problem.shape), "implementation": implementation, "recipe": recipe}
    try:
        out = found.run_stored(stored, problem.spec, chosen, NO_EXTRAS).out
        call = partial(found.run_stored, stored, problem.spec, chosen, NO_EXTRAS)
        if hasattr(found, "ready"):  # a package's own implementation need not have it
            call = found.ready(stored, problem.spec, chosen)
    except Refusal as refusal:
        pytest.skip(str(refusal))
    if hasattr(call, "seconds"):
        pytest.skip("runs in a process of its own: time it with `python -m harness compare`")
    (verdict,) = judge.verdicts([out], [form_of(implementation)])
    if verdict.status is not Status.PASS:
        reason = verdict.reasons[0] if verdict.reasons else ""
        not_timed.append({**told, "status": verdict.status.value, "reason": reason})
        pytest.skip(f"not timed: {verdict.status.value}")
    benchmark(call)
    median = interval(benchmark.stats.stats.data, TAIL)
    benchmark.extra_info.update(
        **told, flops=attention_flops(problem.shape, problem.spec), bytes=attention_bytes(problem.shape, chosen),
        rel_l2=verdict.errors.rel_l2, ratio=verdict.margins.ratio, format=chosen.storage["q"], low_s=median.low,
        high_s=median.high, kv_bytes_per_token=kv_bytes_per_token(problem.shape, chosen),
        emulated=is_emulated(implementation, chosen),
    )  # fmt: skip
