"""How fast is each implementation under each recipe, and what error comes with that speed?

Timed is `run_stored` without a watcher: inputs are stored already, and nothing is judged. FLOPs are the mathematics'
(`harness.cost`), not what an implementation computes: masked products count for nothing. Low precision over
`Arithmetic` is emulated, and its time is the emulator's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from harness import registry
from harness.case import Case
from harness.compare import compare
from harness.cost import attention_flops, kv_bytes_per_token
from harness.inputs import make_inputs
from harness.pipeline import is_emulated
from harness.quantize import Stored, store
from harness.recipe import DEFAULT_RECIPES, get_recipe
from harness.spec import AttentionSpec, Shape
from harness.truth import Truth, reference

CAUSAL = AttentionSpec(causal=True)
CASES = {
    c.name: c
    for c in (
        Case("throughput", "prefill", Shape(heads=4, q_len=256, head_dim=64), "a prompt at once", CAUSAL),
        Case(
            "throughput", "decode", Shape(heads=4, kv_heads=2, q_len=1, kv_len=2048, head_dim=64),
            "one query against a cache", CAUSAL,
        ),
    )
}  # fmt: skip


@cache
def prepared(case: str, recipe: str) -> tuple[tuple[Stored, Stored, Stored], Truth]:
    """Stored inputs and their truth."""
    stored = store(make_inputs(CASES[case], 0).tensors, get_recipe(recipe), round_first=True)
    return stored, reference(*(s.values for s in stored), CASES[case].spec)


@pytest.mark.benchmark(max_time=0.35, min_rounds=5)
@pytest.mark.parametrize("recipe", DEFAULT_RECIPES)
@pytest.mark.parametrize("implementation", registry.implementations())
@pytest.mark.parametrize("case", CASES)
def test_throughput(benchmark: Any, case: str, recipe: str, implementation: str) -> None:
    problem, chosen, found = CASES[case], get_recipe(recipe), registry.get(implementation)
    if refused := found.refusals(problem.spec, problem.shape, chosen):
        pytest.skip("; ".join(refused))
    stored, truth = prepared(case, recipe)
    result = benchmark(found.run_stored, stored, problem.spec, chosen)
    errors = compare(result.out, truth.out, chosen.out_format)
    benchmark.extra_info.update(
        case=case,
        shape=str(problem.shape),
        implementation=implementation,
        recipe=recipe,
        flops=attention_flops(problem.shape, problem.spec),
        rel_l2=errors.rel_l2,
        kv_bytes_per_token=kv_bytes_per_token(problem.shape, chosen),
        emulated=is_emulated(implementation, chosen),
    )
