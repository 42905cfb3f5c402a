"""Split-KV: parts of the keys merged by log-sum-exp are the whole, whatever the parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_cache_sessions import CAUSAL, Whole, near, whole
from torch import Tensor

from harness import AttentionSpec, Shape, get, get_recipe, reference
from harness.arithmetic import Arithmetic, Block
from harness.attention.invariance import invariance
from harness.attention.split_kv import SPLIT_KV, key_parts, merge_partials
from harness.recipe import TENSORS

INF = math.inf


def fp64() -> Arithmetic:
    return Arithmetic(get_recipe("fp64"))


class Casts:
    """A watcher that counts elements rounded at each stage, and keeps what it saw at one of them."""

    def __init__(self, keep: str = "") -> None:
        self.count: dict[str, int] = {}
        self.keep, self.kept = keep, list[Tensor]()

    def __call__(self, stage: str, before: Tensor, after: Tensor, block: Block) -> None:
        self.count[stage] = self.count.get(stage, 0) + after.numel()
        if stage == self.keep:
            self.kept.append(after.clone())

    def stagnation(self, stage: str, held: Tensor, added: Tensor, after: Tensor) -> None:
        pass


def run(problem: Whole, splits: int, watch: Any = None) -> Any:
    scales = [problem.stored[t].scale for t in TENSORS]
    return SPLIT_KV.run(
        *problem.values, problem.spec, recipe=problem.recipe, scales=scales, sinks=problem.sinks, splits=splits,
        watch=watch,
    )  # fmt: skip


# --- the whole ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 60))
def test_parts_cover_every_key_once_in_order(start: int, n: int, splits: int) -> None:
    parts = key_parts(slice(start, start + n), splits)
    assert len(parts) == splits
    assert [j for part in parts for j in range(part.start, part.stop)] == list(range(start, start + n))


def test_one_split_multiplies_by_one_and_keeps_the_bits_of_one_shot() -> None:
    problem = whole(Shape(2, 4, 40, 16, kv_heads=2), "fp32")
    out, lse = problem.one_shot()
    result = run(problem, 1)
    assert invariance(result.out, out, "fp32").bits_equal
    assert torch.equal(result.lse, lse)


def test_splits_do_no_more_products_than_the_keys_they_cover() -> None:
    problem = whole(Shape(1, 2, 8, 4, kv_len=20), "fp32")
    products = get("naive_masked").run(*problem.values, CAUSAL, recipe="fp32").flops
    assert {run(problem, splits).flops for splits in (1, 3, 7, 40)} == {products}


# --- empty parts (F43) --------------------------------------------------------------------------------------------


def test_two_empty_parts_are_an_empty_row_and_not_nan() -> None:
    out, lse = merge_partials(fp64(), [torch.zeros(3).double()] * 2, [torch.tensor(-INF).double()] * 2)
    assert torch.equal(out, torch.zeros(3).double())
    assert float(lse) == -INF


@pytest.mark.parametrize("junk", [0.0, 7.0, math.nan, INF])
@pytest.mark.parametrize("first", [True, False])
def test_an_empty_part_is_ignored_whatever_it_holds(junk: float, first: bool) -> None:
    part = torch.tensor([1.5, -2.25, 0.1], dtype=torch.float64)
    outs = [part, torch.full((3,), junk, dtype=torch.float64)]
    lses = [torch.tensor(x, dtype=torch.float64) for x in (-3.7, -INF)]
    order = slice(None) if first else slice(None, None, -1)
    out, lse = merge_partials(fp64(), outs[order], lses[order])
    assert torch.equal(out, part)
    assert float(lse) == -3.7


@pytest.mark.parametrize("rule", ["zero", "nan"])
def test_a_row_that_no_part_sees_follows_the_declared_rule(rule: str) -> None:
    q, k, v = (
        torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)).double() for n in (5, 3, 3)
    )
    spec = AttentionSpec(causal=True, empty_row=rule)  # rows 0 and 1 stand before the first key
    result = SPLIT_KV.run(q, k, v, spec, recipe="fp64", splits=6)
    truth = reference(q, k, v, spec)
    assert near(result.out, truth.out)
    assert near(result.lse, truth.lse)
    assert bool((torch.isnan(result.out[:, :, :2]) if rule == "nan" else result.out[:, :, :2] == 0).all())


def test_a_part_of_no_weight_left_passes_its_infinity_on_as_nan() -> None:
    """exp(−1000) is 0 in FP64, and 0·∞ is NaN: said, not hidden."""
    outs = [torch.tensor([1.0]).double(), torch.tensor([INF]).double()]
    out, _ = merge_partials(fp64(), outs, [torch.tensor(0.0).double(), torch.tensor(-1000.0).double()])
    assert bool(torch.isnan(out).all())


@pytest.mark.parametrize(("outs", "lses"), [(0, 0), (2, 1)])
def test_parts_without_partners_are_refused(outs: int, lses: int) -> None:
    with pytest.raises(ValueError, match=f"{outs} outputs and {lses} lses; allowed: one of each per part"):
        merge_partials(fp64(), [torch.zeros(1)] * outs, [torch.zeros(())] * lses)


# --- sinks (F45) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [0.0, 5.0, -INF])
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 9])
def test_a_sink_counts_once_however_many_splits(sink: float, splits: int) -> None:
    q, k, v = (
        torch.ones(1, 1, 1, 1).double(),
        torch.arange(4.0).double().view(1, 1, 4, 1),
        torch.ones(1, 1, 4, 1).double(),
    )
    sinks = torch.tensor([sink], dtype=torch.float64)
    result = SPLIT_KV.run(q, k, v, AttentionSpec(scale=1.0), recipe="fp64", sinks=sinks, splits=splits)
    z = math.fsum(math.exp(s) for s in range(4))
    # At most 30 roundings of 2^-53 (5 parts of exp, sum, product and division, and exponents of size ≤ 5).
    assert math.isclose(float(result.out), z / (z + math.exp(sink)), rel_tol=30 * 2.0**-53)
    assert math.isclose(float(result.lse), math.log(z + math.exp(sink)), rel_tol=30 * 2.0**-53)
    if splits == 2 and sink > -INF:  # what counting it in both parts would give is far away
        assert abs(z / (z + 2 * math.exp(sink)) - z / (z + math.exp(sink))) > 0.02


# --- where it rounds ----------------------------------------------------------------------------------------------


def test_partials_are_stored_at_block_out_and_the_output_once_at_out() -> None:
    recipe = replace(
        get_recipe("bf16"), name="bf16_partials", at={"probs": "bf16", "block_out": "bf16", "out": "bf16"}
    )
    problem = whole(Shape(1, 2, 6, 8), recipe)
    casts = Casts("block_out")
    result = run(problem, 3, casts)
    problem.hold(result.out, result.lse, blocks=4)
    elements = 2 * 6 * 8
    assert casts.count["out"] == elements
    assert casts.count["block_out"] == 3 * elements
    assert all(torch.equal(x, x.bfloat16().float()) for x in casts.kept)
    kept = Casts("block_out")
    run(whole(Shape(1, 2, 6, 8), "bf16"), 3, kept)
    assert not all(
        torch.equal(x, x.bfloat16().float()) for x in kept.kept
    )  # FP32 partials, as kernels keep them


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8_e4m3"])
def test_the_number_of_splits_moves_a_result_by_what_its_ceiling_allows(recipe: str) -> None:
    problem = whole(Shape(1, 4, 1, 64, kv_len=512), recipe, heads_apart=False)
    results = {splits: run(problem, splits) for splits in (1, 2, 8, 64)}
    for splits, result in results.items():
        problem.hold(result.out, result.lse, blocks=splits + 1)
    told = str(invariance(results[1], results[8], problem.recipe.out_format))
    assert "equal bits" in told or f"ulps of {problem.recipe.out_format}" in told
