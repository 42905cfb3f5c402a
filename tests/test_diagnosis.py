"""The name and size of planted faults. All of `planted.PLANTS` in all precisions: benchmarks/planted_faults.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted import PLANTS, RECIPES, Kernel, Plant, made, planted

import harness
from harness import Status
from harness.diagnosis import NOTHING
from harness.recipe import get_recipe
from harness.variants import variants

QUICK = {
    "scale omitted": "fp16", "key 37 lost": "bf16", "next key leaks": "bf16", "heads swapped": "fp8_e4m3",
    "GQA interleaved": "bf16", "stale block": "bf16", "rotated V block": "fp16", "K not descaled": "fp8_e4m3",
    "V scale of head 0": "fp8_e4m3", "P cut": "bf16", "O cut": "fp16", "no rescale": "bf16", "sink dropped": "bf16",
    "bias dropped": "bf16", "bias scaled": "fp32", "softcap ignored": "bf16", "window left − 1": "bf16",
    "alignment swapped": "bf16", "kv_lens ignored": "bf16", "mask inverted": "fp8_e4m3", "mean of V": "fp8_e4m3",
    "BF16 running sum": "fp16", "all zeros": "fp8_e4m3", "not normalised": "bf16", "normalised by 1.01": "bf16",
}  # fmt: skip
BY_NAME = {p.name: p for p in PLANTS}


@pytest.mark.parametrize("name", QUICK)
def test_planted_fault_is_named(name: str) -> None:
    plant = BY_NAME[name]
    call, out = planted(plant, QUICK[name], plant.masks[-1], size=(1, 4, 128, 64))
    j = call.judge(out)
    assert j.status is Status.FAIL
    assert j.diagnosis is not None
    assert j.diagnosis.fault in plant.said, str(j)
    assert plant.size is None or j.diagnosis.size == pytest.approx(plant.size, rel=0.1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_scale_that_is_off_by_a_five_hundredth_is_named_with_its_size(recipe: str, causal: bool) -> None:
    plant: Plant = BY_NAME["scale + 0.2 %"]
    call, out = planted(plant, recipe, causal)
    j = call.judge(out)
    assert j.status is Status.FAIL
    assert j.diagnosis is not None
    assert j.diagnosis.fault == "scale"
    assert j.diagnosis.size == pytest.approx(math.log(1.002), rel=0.1)
    assert not j.diagnosis.rivals


def test_error_like_no_known_fault_is_unknown() -> None:
    call = made((1, 2, 64, 32), "bf16")
    out = Kernel()(call)
    j = call.judge(out + 0.1 * torch.randn(out.shape, generator=torch.Generator().manual_seed(0)))
    assert j.diagnosis is not None
    assert j.diagnosis.fault == NOTHING
    assert "no known fault explains it" in str(j.diagnosis)


def test_two_faults_that_are_one_here_are_rivals() -> None:
    call = made((1, 2, 64, 32), "fp32", kv_heads=1)  # one kv head: interleaved or in groups, each reads it
    out = Kernel()(call).roll(
        -1, 1
    )  # two heads: the next one, the previous one, swapped and reversed are one fault
    j = call.judge(out)
    assert j.diagnosis is not None
    names = {j.diagnosis.fault, *j.diagnosis.rivals}
    assert names == {"next head", "previous head", "heads swapped", "heads reversed"}


def test_what_passes_has_no_diagnosis() -> None:
    call = made((1, 2, 64, 32), "bf16")
    assert call.judge(Kernel()(call)).diagnosis is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_variants_differ_from_the_recipe_in_one_thing(recipe: str) -> None:
    own = get_recipe(recipe)
    digests = [r.digest for _, _, r in variants(own)]
    assert own.digest not in digests
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_part_of_the_rows_keeps_its_positions(align: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.part.PAIRS", 1)  # 16 rows of 48
    call = made((1, 2, 48, 16), "fp32", kv_len=64, causal=True, align=align)
    other = made(
        (1, 2, 48, 16), "fp32", kv_len=64, causal=True, align=({"bottom-right", "top-left"} - {align}).pop()
    )
    j = call.judge(Kernel()(other))
    assert j.diagnosis is not None
    assert j.diagnosis.fault == "alignment", str(j)
    out = Kernel()(call)
    j = call.judge(out.transpose(1, 2).reshape(out.shape))
    assert j.diagnosis is not None
    assert j.diagnosis.fault == "heads and tokens transposed", str(j)


def test_part_takes_the_sequences_and_heads_that_err(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.part.PAIRS", 16 * 24 * 2)  # two heads of one sequence
    call = made((2, 4, 24, 16), "fp32", extras={"sinks": torch.full((4,), 1.0)})
    out, wrong = Kernel()(call), Kernel(sinks=False)(call)
    out[1, 2:] = wrong[1, 2:]
    j = call.judge(out)
    assert j.diagnosis is not None
    assert j.diagnosis.fault == "no sink", str(j)
    assert j.diagnosis.explained > 0.99


def test_size_of_a_degree_is_fitted_to_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    call = made((1, 2, 64, 32), "bf16")
    out = Kernel(scale=1.01)(call)
    whole = call.judge(out).diagnosis
    monkeypatch.setattr("harness.part.PAIRS", 1)
    part = call.judge(out).diagnosis
    assert whole is not None
    assert part is not None
    assert part.size == whole.size == pytest.approx(math.log(1.01), rel=0.1)


def test_rows_off_by_factors_of_their_own_are_a_sum_that_is_imprecise() -> None:
    call = made((1, 2, 64, 32), "fp32")
    out = Kernel()(call)
    factors = 1 + 1e-3 * torch.randn(1, 2, 64, 1, generator=torch.Generator().manual_seed(0))
    j = call.judge(out * factors)
    assert j.diagnosis is not None
    assert j.diagnosis.fault == "row sum"
    assert j.diagnosis.size == pytest.approx(1e-3, rel=5 / (2 * 128) ** 0.5)


def alone(change: Callable[[torch.Tensor], None], recipe: str = "bf16") -> Any:
    """The judgement of an honest output of which a part is changed."""
    call = made((1, 4, 128, 64), recipe, causal=True)
    out = Kernel()(call).double()
    change(out)
    return call.judge(out)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fault_of_one_head_is_named_with_the_head(recipe: str) -> None:
    def wrong(out: torch.Tensor) -> None:
        out[:, 2] *= 1.02

    d = alone(wrong, recipe).diagnosis
    assert d.fault == "shrink"
    assert d.size == pytest.approx(0.02, rel=0.1)
    assert d.what.endswith("in 1 of 4 heads alone (b=0 h=2)")


@pytest.mark.parametrize("row", [5, 64, 127])
def test_fault_of_one_row_is_named_with_the_row_wherever_it_lies(
    row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.part.PAIRS", 4 * 128 * 32)  # 32 rows are looked at

    def wrong(out: torch.Tensor) -> None:
        out[0, 1, row] *= 1.2

    d = alone(wrong).diagnosis
    assert d.fault == "shrink"
    assert d.what.endswith(f"rows alone (b=0 h=1 i={row})")


def test_wrong_elements_are_counted() -> None:
    def wrong(out: torch.Tensor) -> None:
        out[0, 1, 40, 3] += 1.0

    d = alone(wrong).diagnosis
    assert d.fault == "single elements"
    assert "1 of 32768 elements is wrong, first b=0 h=1 i=40 c=3" in d.what


def test_a_key_that_some_rows_lose_is_named_with_the_rows() -> None:
    call = made((1, 4, 128, 64), "fp16", causal=True)
    lost = torch.ones(1, 1, 128, 128, dtype=torch.bool)
    lost[..., ::2, 5] = False
    q, k, v = (x.values for x in call.stored)
    moved = harness.reference(q, k, v, call.spec, mask=lost).out - harness.reference(q, k, v, call.spec).out
    d = call.judge(Kernel()(call) + moved).diagnosis
    assert d.fault == "key 5 lost"
    assert "rows alone" in d.what


@pytest.mark.parametrize(
    ("stage", "fmt", "name"),
    [("acc", "fp16", "fp16 accumulator"), ("acc", "bf16", "bf16 accumulator"), ("scores_raw", "fp16", "fp16 q·k"),
     ("probs", "bf16", "bf16 P"), ("out", "fp8_e4m3", "fp8_e4m3 output")],
)  # fmt: skip
@pytest.mark.parametrize("block", [48, 64])
def test_a_stage_in_a_narrower_format_is_named_whatever_the_blocks(
    stage: str, fmt: str, name: str, block: int
) -> None:
    call = made((1, 4, 128, 64), "fp32")
    wrong = replace(call.recipe, at={**call.recipe.at, stage: fmt})
    out = harness.get("online_softmax").run_stored(call.stored, call.spec, wrong, block=block).out
    d = call.judge(out).diagnosis
    assert d.fault == name, str(d)


def test_a_scale_far_off_is_named_with_its_size() -> None:
    call = made((1, 4, 128, 64), "bf16")
    d = call.judge(Kernel(scale=0.6)(call)).diagnosis
    assert d.fault == "scale"
    assert d.size == pytest.approx(math.log(0.6), rel=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rows reversed", lambda out: out.flip(2)),
        ("channel halves swapped", lambda out: out.roll(out.shape[3] // 2, 3)),
        ("channel pairs swapped", lambda out: out.unflatten(3, (-1, 2)).flip(4).flatten(3)),
    ],
    ids=["rows", "halves", "pairs"],
)
def test_output_that_is_out_of_order_is_named(
    name: str, wrong: Callable[[torch.Tensor], torch.Tensor], recipe: str
) -> None:
    call = made((1, 2, 64, 32), recipe)
    j = call.judge(wrong(Kernel()(call)))
    assert j.diagnosis is not None
    assert j.diagnosis.fault == name, str(j)


@pytest.mark.parametrize(
    ("name", "order"),
    [("sinks reversed", [3, 2, 1, 0]), ("sink of another head", [1, 2, 3, 0])],
    ids=["reversed", "next"],
)
def test_sinks_of_other_heads_are_named(name: str, order: list[int]) -> None:
    sinks = torch.tensor([3.0, 4.0, 5.5, 7.0])
    call = made((1, 4, 64, 32), "bf16", extras={"sinks": sinks})
    j = call.judge(Kernel()(replace(call, extras={"sinks": sinks[order]})))
    assert j.diagnosis is not None
    assert j.diagnosis.fault == name, str(j)


@pytest.mark.parametrize("recipe", RECIPES)
def test_softmax_off_by_one_is_named(recipe: str) -> None:
    call = made((1, 4, 64, 32), recipe)
    j = call.judge(Kernel()(replace(call, extras={"sinks": torch.zeros(4)})))
    assert j.diagnosis is not None
    assert "off-by-one softmax" in (j.diagnosis.fault, *j.diagnosis.rivals), str(j)


def test_denominator_without_the_keys_of_a_last_part_block_is_named() -> None:
    call = made((1, 4, 64, 32), "bf16", kv_len=101)
    q, k, _ = (x.values for x in call.stored)
    p = torch.softmax(q @ k.mT * 32**-0.5, -1)
    out = Kernel()(call) / (1 - p[..., 64:].sum(-1, keepdim=True))
    j = call.judge(out.float().bfloat16())
    assert j.diagnosis is not None
    assert j.diagnosis.fault == "tail of 64 missing in l", str(j)


@pytest.mark.parametrize("causal", [False, True])
def test_zero_keys_of_a_tile_are_not_called_another_block_that_counts_twice(causal: bool) -> None:
    """A fault that is there leaves nothing but rounding: what explains half of an error is another."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 256, 64, generator=g).bfloat16() for _ in "qkv")
    spec, wrong = harness.AttentionSpec(causal=causal), k.clone()
    wrong[:, :, 128:192] = 0
    out = harness.get("online_softmax").run(q, wrong, v, spec, recipe="bf16").out
    found = harness.judge(out, q, k, v, spec=spec, recipe="bf16").diagnosis
    assert found is not None
    assert "twice" not in found.fault


def test_no_name_is_looked_for_in_a_context_that_would_take_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import docket

    monkeypatch.setattr(docket, "NAMED_KEYS", 100)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 128, 32, generator=g) for _ in "qkv")
    found = harness.judge(
        1.03 * harness.get("naive_masked").run(q, k, v, recipe="fp32").out, q, k, v, recipe="fp32"
    )
    assert found.status is harness.Status.FAIL
    assert (
        str(found.diagnosis) == "no name is looked for beyond 100 keys: judge a shorter call of the same kind"
    )
