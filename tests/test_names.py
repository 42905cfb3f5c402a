"""Names that lie near others: which of two look-alikes it is, and when there is none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from planted import DTYPES, RECIPES, Kernel, Made, made
from torch import Tensor

import harness
from harness import Status
from harness.diagnosis import NOTHING, diagnose
from harness.directions import Call
from harness.docket import Docket
from harness.error_model import BLACK_BOX
from harness.operands import NO_EXTRAS, Extras
from harness.part import choose
from harness.rounding import round_to, ulp
from harness.suspects import Setting, Trial

# --- an implementation known to be right errs as much -----------------------------------------------------------------


def call_of(made: Made, extras: Extras = NO_EXTRAS) -> Call:
    return Docket(made.stored, made.spec, extras, made.recipe).bench(BLACK_BOX).call  # type: ignore[arg-type]


def twin(made: Made, name: str, **options: int) -> Tensor:
    return harness.get(name).run_stored(made.stored, made.spec, made.recipe, **options).out


def said(call: Call, out: Tensor, made: Made) -> harness.records.Diagnosis:
    return diagnose(call, out, made.stored, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_e4m3", "bf16_eager"])
@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("naive_masked", {}, "naive_masked"),
        ("online_softmax", {"block": 64}, "online_softmax in blocks of 64 keys"),
        ("online_softmax", {"block": 128}, "online_softmax in blocks of 128 keys"),
    ],
    ids=["naive", "64", "128"],
)
def test_bits_of_a_right_implementation_are_no_fault(
    name: str, options: dict[str, int], told: str, recipe: str
) -> None:
    case = made((1, 2, 160, 32), recipe)
    d = said(call_of(case), twin(case, name, **options), case)
    assert d.fault == NOTHING
    assert str(d) == (
        f"no fault is named: {told}, known to be right, gives the same bits, so that what is expected may be too small"
    )


def test_bits_of_a_twin_of_more_keys_than_there_are_are_told_as_its_own() -> None:
    case = made((1, 2, 40, 32), "bf16_eager")  # a block that holds every key, and normalises late
    d = said(call_of(case), twin(case, "online_softmax", block=128), case)
    assert "online_softmax in blocks of 128 keys, known to be right, gives the same bits" in d.what


def test_a_right_implementation_that_errs_more_than_is_expected_is_told_beside_a_few_values_rounded_otherwise() -> (
    None
):
    case = made((1, 2, 64, 32), "bf16")
    call = call_of(case)
    out = twin(case, "naive_masked").double()
    out[0, 1, 40, :3] += ulp(out[0, 1, 40, :3].float(), harness.formats.get_format("bf16")).double()
    d = said(replace(call, variance=call.variance / 100), out, case)
    assert d.fault == NOTHING
    assert "naive_masked, known to be right, errs alike" in d.what
    d = said(call, out, case)  # as large as is expected: nothing is said of what is
    assert d.fault == NOTHING
    assert "elements" not in d.what


def test_a_part_that_is_right_is_no_place_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.part.PAIRS", 1)  # 16 rows, which a window on the right keeps at the end
    case = made((1, 2, 64, 32), "bf16", window=(8, 2))
    out = twin(case, "naive_masked").double()
    out[0, 1, 3, 5] += 1.0
    j = case.judge(out)
    assert j.status is Status.FAIL
    assert j.diagnosis is not None
    assert j.diagnosis.fault == NOTHING
    assert "(heads 0 to 1, rows 48 to 63) naive_masked, known to be right, gives the same bits" in str(
        j.diagnosis
    )
    assert str(j.diagnosis).endswith("the fault lies elsewhere")


def test_a_part_for_which_the_recipe_promises_nothing_has_no_name() -> None:
    case = made((1, 2, 64, 32), "bf16")
    call = call_of(case)
    d = said(replace(call, variance=torch.full_like(call.variance, math.inf)), 2 * call.truth.out, case)
    assert str(d) == "no fault is named: the recipe promises nothing in the part that is looked at"


# --- where P is normalised --------------------------------------------------------------------------------------------


def scores(case: Made) -> tuple[Tensor, Tensor]:
    """Scores `[B, H, L, S]`, −∞ where hidden, and V of every query head, in FP32."""
    q, k, v = (x.values.float() for x in case.stored)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * q.shape[-1] ** -0.5
    if case.spec.causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return s, v


def normalised(case: Made, early: bool, p_scale: float | None = None) -> Tensor:
    """Whole rows in FP32 on torch alone, P cast after or before it is divided by its sum."""
    s, v = scores(case)
    p = torch.exp(s - s.amax(-1, keepdim=True))
    total = p.sum(-1, keepdim=True)
    scale = case.recipe.p_scale if p_scale is None else p_scale
    p = (scale * (p / total if early else p)).to(DTYPES[case.recipe.format_of("probs")]).float()
    out = p @ v / scale
    return (out if early else out / total).to(DTYPES[case.recipe.out_format])


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("causal", "kv_heads", "length", "seed"),
    [(False, 4, 256, 0), (True, 4, 256, 1), (True, 2, 320, 2), (False, 1, 192, 3)],
    ids=["full", "causal", "causal GQA", "full MQA"],
)
def test_p_normalised_before_its_cast_is_named_with_what_to_do(
    causal: bool, kv_heads: int, length: int, seed: int, recipe: str
) -> None:
    case = made((1, 4, length, 64), recipe, seed, causal=causal, kv_heads=kv_heads)
    assert case.judge(normalised(case, early=False)).status is Status.PASS
    j = case.judge(normalised(case, early=True))
    assert j.status is Status.FAIL
    assert j.diagnosis is not None
    assert j.diagnosis.fault == "P normalised before its cast"
    assert not j.diagnosis.rivals
    assert j.diagnosis.explained > 0.9
    assert 'judge it under a recipe with normalise = "early", see docs/doors.md' in str(j.diagnosis)


def test_p_normalised_before_its_cast_and_not_scaled_is_named_with_both() -> None:
    case = made((1, 4, 256, 64), "fp8_e4m3")
    d = case.judge(normalised(case, early=True, p_scale=1.0)).diagnosis
    assert d is not None
    assert d.fault == "P normalised before its cast"
    assert 'normalise = "early", see docs/doors.md, and p_scale = 1' in d.what


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8_e4m3"])
def test_p_normalised_after_its_product_is_named_where_the_recipe_does_it_before(recipe: str) -> None:
    """By the name alone: streams over blocks normalise late under any recipe, so that such a kernel passes."""
    early = replace(harness.get_recipe(recipe), name="early", normalise="early")
    case = made((1, 2, 256, 64), early)
    out = normalised(case, early=False)
    assert case.judge(out).status is Status.PASS
    d = said(call_of(case), out, case)
    assert d.fault == "P normalised after P·V"
    assert 'normalise = "late"' in d.what


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8_e4m3"])
def test_the_advice_of_another_place_to_normalise_p_holds(recipe: str) -> None:
    early = replace(harness.get_recipe(recipe), name="early", normalise="early")
    case = made((1, 4, 256, 64), early, causal=True)
    assert case.judge(normalised(case, early=True)).status is Status.PASS


# --- a key and its value ----------------------------------------------------------------------------------------------


def weighed(case: Made) -> tuple[Tensor, Tensor]:
    """P `[B, H, L, S]` and V of every query head, in FP32."""
    s, v = scores(case)
    return torch.softmax(s, -1), v


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["normal", "V mean 1", "heavy key"])
@pytest.mark.parametrize(("causal", "kv_heads"), [(False, 4), (True, 2)], ids=["full", "causal GQA"])
def test_a_key_whose_value_is_missing_is_not_called_lost(
    causal: bool, kv_heads: int, kind: str, recipe: str
) -> None:
    case = made((1, 4, 256, 64), recipe, causal=causal, kv_heads=kv_heads, kind=kind)
    p, v = weighed(case)
    out = Kernel()(case).float() - p[..., 7:8] * v[:, :, 7:8]
    d = case.judge(out.to(DTYPES[case.recipe.out_format])).diagnosis
    assert d is not None
    assert d.fault == "V of key 7 missing"
    assert not d.rivals


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["normal", "heavy key"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_key_that_is_lost_is_not_called_a_missing_value(causal: bool, kind: str, recipe: str) -> None:
    case = made((1, 4, 256, 64), recipe, causal=causal, kind=kind)
    d = case.judge(Kernel(seen=lambda seen: seen & (torch.arange(seen.shape[-1]) != 7))(case)).diagnosis
    assert d is not None
    assert d.fault == "key 7 lost"
    assert not d.rivals


def test_a_value_that_one_head_misses_is_named_with_the_head() -> None:
    case = made((1, 4, 128, 64), "bf16")
    p, v = weighed(case)
    out = Kernel()(case).float()
    out[:, 2] -= p[:, 2, :, 7:8] * v[:, 2, 7:8]
    d = case.judge(out.bfloat16()).diagnosis
    assert d is not None
    assert d.fault == "V of key 7 missing"
    assert d.what.endswith("in 1 of 4 heads alone (b=0 h=2)")


# --- an output in a narrower format -----------------------------------------------------------------------------------


def test_errors_as_large_as_a_formats_are_not_its_own_where_the_values_are_no_numbers_of_it() -> None:
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, 128, 64, generator=g).bfloat16() for _ in "qkv")
    out = harness.get("online_softmax").run(q, k, v, recipe="bf16").out
    noisy = (out * (1 + 0.02 * torch.randn(out.shape, generator=g))).bfloat16()
    j = harness.judge(noisy, q, k, v, recipe="bf16")
    assert j.status is Status.FAIL
    assert j.diagnosis is not None
    assert j.diagnosis.fault == NOTHING, str(j.diagnosis)


@pytest.mark.parametrize(("recipe", "fmt"), [("bf16", "fp8_e4m3"), ("fp16", "bf16"), ("fp32", "fp8_e4m3")])
def test_an_output_of_a_formats_numbers_is_named(recipe: str, fmt: str) -> None:
    case = made((1, 4, 128, 64), recipe)
    out = Kernel()(case).float()
    d = case.judge(round_to(out, fmt)).diagnosis
    assert d is not None
    assert d.fault == f"{fmt} output"


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_one_head_of_a_formats_numbers_is_named_with_the_head(recipe: str) -> None:
    case = made((1, 4, 128, 64), recipe)
    out = Kernel()(case).float()
    out[:, 1] = round_to(out[:, 1], "fp8_e4m3")
    d = case.judge(out).diagnosis
    assert d is not None
    assert d.fault == "fp8_e4m3 output"
    assert d.what.endswith("in 1 of 4 heads alone (b=0 h=1)")


def test_rows_of_a_formats_numbers_are_those_without_any_other() -> None:
    case = made((1, 2, 32, 16), "bf16")
    call, out = call_of(case), round_to(torch.ones(1, 2, 32, 16) / 3, "fp8_e4m3")
    out[0, 1, 5, 3] = 1 / 3
    trial = Trial(Setting(choose(call, out), call, case.stored), out)  # type: ignore[arg-type]
    rows = trial.within("fp8_e4m3 output")
    assert rows is not None
    assert (~rows).nonzero().tolist() == [[0, 1, 5]]
    assert trial.within("sign of the output") is None
    assert trial.within("fp16 q·k") is None


# --- K or V beside its place ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8_e4m3"])
@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("which", ["K", "V"])
def test_k_or_v_read_one_key_off_is_named_where_rows_see_other_keys(which: str, by: int, recipe: str) -> None:
    case = made((1, 2, 128, 32), recipe, causal=True)
    wrong = Kernel(**{which.lower(): lambda x: x.roll(by, 2)})  # type: ignore[arg-type]
    d = case.judge(wrong(case)).diagnosis
    assert d is not None
    assert d.fault == f"{which} one key off"
    assert not d.rivals


@pytest.mark.parametrize("by", [1, -1])
def test_k_one_key_off_is_v_one_key_off_the_other_way_where_all_rows_see_all_keys(by: int) -> None:
    case = made((1, 2, 128, 32), "bf16")
    d = case.judge(Kernel(k=lambda x: x.roll(by, 2))(case)).diagnosis
    assert d is not None
    assert {d.fault, *d.rivals} == {"V one key off", "K one key off"}
