"""The rows of a large call that twins and directions are computed for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted import made

import harness
from harness import AttentionSpec, Shape
from harness.directions import Call, project
from harness.operands import NO_EXTRAS
from harness.quantize import quantize
from harness.recipe import get_recipe
from harness.records import Status
from harness.sample import ROWS, Sample, choose


def tensors(rows: int = 200, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, 2, rows, 16, generator=g).bfloat16().double() for _ in "qkv")


@given(st.integers(0, 700), st.integers(1, 40), st.integers(0, 3))
def test_taken_rows_are_in_order_and_parts_cover_each_once(rows: int, size: int, chosen: int) -> None:
    shape = Shape(1, 1, rows, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.sample.SCORES", max(1, rows) * ROWS * chosen)
        sample = choose(shape, torch.rand(1, 1, rows, 1, dtype=torch.float64))
    at = torch.arange(rows).view(1, 1, -1)
    taken = sample.take(at).flatten().tolist()
    assert taken == sorted(set(taken))
    assert sample.count == len(taken)
    parts = list(sample.parts(size))
    assert [n for full, _ in parts for n in at[0, 0, full].tolist()] == taken
    assert [n for _, part in parts for n in range(part.start, part.stop)] == list(range(len(taken)))
    if rows and not sample.whole:
        assert {0, rows - 1} <= set(taken)


def test_a_sample_holds_the_rows_where_the_model_expects_most_error() -> None:
    shape = Shape(1, 1, 2048, 1)
    variance = torch.ones(1, 1, 2048, 1, dtype=torch.float64)
    variance[:, :, 1000] = 100.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.sample.SCORES", 2048 * ROWS * 8)
        sample = choose(shape, variance)
    assert sample.count == 8 * ROWS
    assert 1000 in sample.take(torch.arange(2048).view(1, 1, -1))


@pytest.mark.parametrize("name", ["naive_masked", "online_softmax"])
@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(causal=True, window=(40, 0))])
def test_some_rows_alone_are_those_of_the_whole_run_but_for_the_order_of_sums(
    name: str, spec: AttentionSpec
) -> None:
    recipe = get_recipe("fp64")
    stored = tuple(quantize(x, n, recipe) for x, n in zip(tensors(), "qkv", strict=True))
    rows = (slice(0, 32), slice(96, 130))
    whole = harness.get(name).run_stored(stored, spec, recipe, NO_EXTRAS)
    part = harness.get(name).run_stored(stored, spec, recipe, NO_EXTRAS, rows=rows)
    sample = Sample(200, rows)
    assert part.out.shape == (1, 2, 66, 16)
    bound = 200 * 2.0**-52 * stored[2].values.abs().max()  # FP64 sums of at most 200 keys, twice
    assert (part.out - sample.take(whole.out)).abs().max() < bound
    assert (part.lse - sample.take(whole.lse)).abs().max() < 200 * 2.0**-50


def test_an_algorithm_that_has_no_rows_of_its_own_says_so() -> None:
    recipe = get_recipe("fp32")
    stored = tuple(quantize(x, n, recipe) for x, n in zip(tensors(), "qkv", strict=True))
    with pytest.raises(ValueError, match="naive_unsafe cannot be run for some rows alone"):
        harness.get("naive_unsafe").run_stored(
            stored, AttentionSpec(), recipe, NO_EXTRAS, rows=(slice(0, 4),)
        )


def test_directions_of_a_sample_are_those_of_its_rows() -> None:
    q, k, v = tensors(96)
    truth = harness.reference(q, k, v, AttentionSpec(causal=True))
    variance = torch.full_like(truth.out, 1e-4)
    call = Call(q, k, v, AttentionSpec(causal=True), NO_EXTRAS, get_recipe("bf16"), truth, variance)
    delta = torch.randn(1, 2, 96, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sample = Sample(96, (slice(0, 32), slice(64, 96)))
    whole, part = project(call, [delta]), project(replace(call, sample=sample), [sample.take(delta)])
    index = sample.take(torch.arange(192).view(1, 2, 96)).flatten()
    assert torch.equal(part.f, whole.f[:, index])
    assert torch.equal(part.a, whole.a[:, :, index])
    assert int(part.key_rows[0]) == 2 * 64


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16", "fp8_e4m3"])
def test_a_sampled_judgement_says_so_and_gives_the_same_verdicts(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = made((1, 2, 512, 32), recipe, causal=True)
    right = harness.get("online_softmax").run_stored(call.stored, call.spec, call.recipe, NO_EXTRAS).out
    wrong = right.double() * 1.01
    monkeypatch.setattr("harness.sample.SCORES", 2 * 512 * ROWS * 8)
    j, bad = call.judge(right), call.judge(wrong)
    assert j.status is Status.PASS, str(j)
    assert "looked for in 256 of 512 rows of every head" in j.reasons[0]
    assert bad.status is Status.FAIL
    assert bad.diagnosis is not None
    assert bad.diagnosis.fault == "shrink", str(bad)
