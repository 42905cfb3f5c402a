"""A long call judged by some of its rows: which they are, what they see, and which faults they meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import harness
from harness import AttentionSpec, Rows, Status
from harness import by_head as heads
from harness.attention.rows import Problem, key_range, visible
from harness.case import Case, load_cases
from harness.directions import Call, key_powers, project
from harness.error_model import WHOLE, expect
from harness.lies import seen_keys
from harness.operands import NO_EXTRAS, Extras
from harness.pipeline import plan, run_units
from harness.quantize import Stored, store
from harness.query_rows import choose_rows, name_rows
from harness.recipe import get_recipe
from harness.spec import Shape

SPECS = (
    AttentionSpec(),
    AttentionSpec(causal=True),
    AttentionSpec(causal=True, align="top-left"),
    AttentionSpec(causal=True, window=(9, 0)),
    AttentionSpec(window=(4, 6)),
    AttentionSpec(window=(None, 3), align="top-left"),
)


def tensors(
    rows: int = 96, keys: int | None = None, seed: int = 0, dim: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 4, rows, dim, generator=g).bfloat16()
    k, v = (torch.randn(2, 2, keys or rows, dim, generator=g).bfloat16() for _ in "kv")
    return q, k, v


# --- which rows ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 700), st.integers(8, 80), st.integers(0, 3))
@settings(max_examples=40)
def test_chosen_rows_are_as_many_as_asked_with_both_ends_and_the_same_for_a_seed(
    n: int, count: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(n)
    q, k = (torch.randn(1, 2, n, 4, generator=g) for _ in "qk")
    found = choose_rows(q, k, AttentionSpec(causal=True), rows=count, seed=seed)
    assert len(found) == min(n, count) == sum(found.counts)
    assert {0, n - 1} <= set(found.index.tolist())
    assert torch.equal(
        found.index, choose_rows(q, k, AttentionSpec(causal=True), rows=count, seed=seed).index
    )
    assert f"{len(found)} of {n} rows per head, seed {seed}" in str(found)


def test_rows_at_tile_borders_and_those_of_large_scores_are_among_the_chosen() -> None:
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 2, 4096, 16, generator=g) for _ in "qk")
    q[0, 1, 3001] *= 30
    found = set(choose_rows(q, k, AttentionSpec(causal=True), rows=64).index.tolist())
    assert {2047, 2048, 1023, 1024} <= found
    assert 3001 in found


def test_chance_of_a_run_is_the_share_of_draws_that_meet_it() -> None:
    """Hypergeometric, against 2,000 draws: its standard deviation is √(p(1 − p)/2000), six of which are allowed."""
    size, drawn, of, trials = 40, 32, 1000, 2000
    rows = Rows(torch.arange(drawn), of, 0, (0, 0, 0, drawn))
    g = torch.Generator().manual_seed(0)
    met = sum(bool((torch.randperm(of, generator=g)[:drawn] < size).any()) for _ in range(trials)) / trials
    p = rows.chance(size)
    assert abs(met - p) < 6 * (p * (1 - p) / trials) ** 0.5
    assert rows.chance(of - drawn + 1) == 1.0
    assert rows.chance(0) == 0.0


@pytest.mark.parametrize(
    "wrong", [[], [3, 3], [5, 2], [-1], [96], [0.5], [True], "rows", 7, True, Rows(torch.tensor([0]), 7)]
)
def test_rows_that_are_none_of_the_call_are_refused_in_one_line(wrong: Any) -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"^[^\n]*allowed: [^\n]*$"):
        harness.judge(q, q, k, v, rows=wrong)


def test_output_of_neither_all_rows_nor_those_judged_is_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match="out has 95 rows; allowed: all 96, or the 16 that are judged"):
        harness.judge(q[:, :, :95], q, k, v, rows=16)


# --- what they see ---------------------------------------------------------------------------------------------------


def test_rows_see_in_truth_model_and_algorithms_what_they_see_in_the_whole_call() -> None:
    index = [0, 1, 7, 8, 31, 40, 41, 95]
    rows = name_rows(index, 96)
    for spec in SPECS:
        for lens in (None, torch.tensor([96, 57])):
            q, k, v = (x.double() for x in tensors(96))
            whole, some = Extras(kv_lens=lens), Extras(kv_lens=lens, rows=rows)
            seen = seen_keys(96, 96, spec, whole)
            assert torch.equal(seen_keys(8, 96, spec, some), seen[:, :, index])
            p = Problem(
                Shape(2, 4, 8, 16, kv_heads=2, kv_len=96),
                spec,
                some,
                rows.take(q),
                k,
                v,
                None,
                None,
                None,
                True,
            )
            for part in (slice(0, 8), slice(2, 5), slice(7, 8)):
                keys = key_range(p, part)
                shown = visible(p, part, keys)
                mine = seen[:, :, rows.index[part]].expand(2, 1, -1, -1)
                hidden = mine.clone()
                hidden[..., keys] = False
                assert not hidden.any()
                got = (
                    torch.ones_like(mine[..., keys])
                    if shown is None
                    else shown[:, :, : part.stop - part.start]
                )
                assert torch.equal(got.expand_as(mine[..., keys]), mine[..., keys])
            full, full_e = expect(q, k, v, spec, "fp32", WHOLE, kv_lens=lens)
            own = harness.reference(rows.take(q), k, v, spec, kv_lens=lens, rows=rows)
            bound = 96 * 2.0**-52 * v.abs().max()  # FP64 sums of at most 96 keys, twice
            assert (own.out - rows.take(full.out)).abs().max() < bound
            stored = tuple(Stored(x) for x in (rows.take(q), k, v))
            (e,) = heads.expectations_by_head(own, stored, spec, some, get_recipe("fp32"), [WHOLE])
            both = torch.stack([e.variance, rows.take(full_e.variance)])
            fp32 = 12 * 96 * 2.0**-24  # a dozen FP32 sums of at most 96 terms, in blocks of other sizes
            assert ((both[0] - both[1]).abs() <= fp32 * both.amax(0)).all()


@pytest.mark.parametrize("recipe", ["bf16", "fp8_e4m3"])
def test_a_call_judged_by_all_its_rows_has_the_verdict_of_the_call(recipe: str) -> None:
    q, k, v = tensors(64)
    spec = AttentionSpec(causal=True)
    out = harness.get("online_softmax").run(q, k, v, spec, recipe=recipe, quantize=True).out
    plain = harness.judge(out, q, k, v, spec=spec, recipe=recipe, quantize=True)
    some = harness.judge(out, q, k, v, spec=spec, recipe=recipe, quantize=True, rows=list(range(64)))
    assert some.errors.rel_l2 == pytest.approx(plain.errors.rel_l2, rel=1e-9)
    assert some.margins.ratio == pytest.approx(plain.margins.ratio, rel=1e-4)
    assert (some.status, some.precision) == (plain.status, plain.precision) == (Status.PASS, Status.PASS)


def test_mask_bias_and_scales_of_rows_are_taken_with_them() -> None:
    q, k, v = tensors(96)
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(2, 1, 96, 96, generator=g) < 0.8
    bias = torch.randn(4, 96, 96, generator=g).bfloat16()
    recipe = replace(
        get_recipe("fp8_e4m3"), name="tokens", scaling={n: harness.Scaling("token", "amax") for n in "qkv"}
    )
    out = harness.get("online_softmax").run(q, k, v, recipe=recipe, mask=mask, bias=bias, quantize=True)
    options: dict[str, Any] = {"recipe": recipe, "mask": mask, "bias": bias, "quantize": True}
    judged = harness.judge(out.out, q, k, v, lse=out.lse, rows=24, **options)
    assert judged.status is Status.PASS, str(judged)


# --- a kv head at a time ---------------------------------------------------------------------------------------------


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call counts as long."""
    monkeypatch.setattr(heads, "ELEMENTS", 0)
    monkeypatch.setattr(heads, "BLOCK_TOKENS", 40)


@pytest.mark.parametrize(
    "recipe", ["bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e4m3_block", "mxfp8", "fp8_e4m3_hadamard"]
)
@pytest.mark.usefixtures("long")
def test_a_long_call_stores_what_a_short_one_does_in_as_many_bits(recipe: str) -> None:
    q, k, v = (x.float() * 1.01 for x in tensors(96, dim=32))
    r = get_recipe(recipe)
    for x, name, plain in zip((q, k, v), "qkv", store((q, k, v), r, None, True), strict=True):
        narrow = heads.store_narrow(x, name, r, None, True)
        assert torch.equal(narrow.codes.double(), plain.codes)
        assert narrow.codes.dtype.itemsize <= 4
        assert torch.equal(narrow.values.double(), plain.values)
        again = heads.store_narrow(narrow.values, name, r, narrow.scale, False)
        assert torch.equal(again.values.double(), plain.values)
        assert heads.holds(narrow, plain.values)
        assert not heads.holds(narrow, plain.values * 1.5)


def test_a_long_call_has_the_judgement_of_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(96)
    for recipe in ("bf16", "fp8_e4m3"):
        for wrong in (1.0, 1.02):
            out = harness.get("split_kv").run(q, k, v, recipe=recipe, quantize=True).out * wrong
            found = []
            for elements in (2**24, 0):
                monkeypatch.setattr(heads, "ELEMENTS", elements)
                found.append(harness.judge(out, q, k, v, recipe=recipe, quantize=True, rows=48))
            short, far = found
            assert short.status is far.status is (Status.PASS if wrong == 1.0 else Status.FAIL)
            assert far.errors == short.errors
            assert far.margins.ratio == pytest.approx(short.margins.ratio, rel=1e-4)
            assert [(h.kind, h.stage, h.count, h.where) for h in far.hazards] == [
                (h.kind, h.stage, h.count, h.where) for h in short.hazards
            ]
            assert (far.diagnosis and far.diagnosis.fault) == (short.diagnosis and short.diagnosis.fault)


@pytest.mark.usefixtures("long")
def test_directions_of_a_kv_head_at_a_time_are_those_of_all() -> None:
    q, k, v = (x.double() for x in tensors(40))
    spec = AttentionSpec(causal=True)
    truth = harness.reference(q, k, v, spec)
    call = Call(q, k, v, spec, NO_EXTRAS, get_recipe("bf16"), truth, torch.full_like(truth.out, 1e-4))
    delta = torch.randn(truth.out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    split, powers = project(call, [delta]), key_powers(call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "ELEMENTS", 2**24)
        whole, all_powers = project(call, [delta]), key_powers(call)
    for name in ("a", "f", "rms", "key_sum", "key_square", "key_rows"):
        assert torch.allclose(getattr(split, name), getattr(whole, name), rtol=1e-9, atol=1e-12), name
    for one, other in zip(powers, all_powers, strict=True):
        assert torch.allclose(one, other, rtol=1e-9)


# --- which faults they meet ------------------------------------------------------------------------------------------

N, COUNT = 512, 64


@pytest.fixture(scope="module")
def prefill() -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, AttentionSpec]:
    q, k, v = (x[:1] for x in tensors(N, seed=7))
    spec = AttentionSpec(causal=True)
    return (
        (q, k, v),
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        spec,
    )


def spoilt(out: Tensor, rows: slice) -> Tensor:
    wrong = out.clone()
    wrong[:, :, rows] *= 1.05
    return wrong


def test_a_right_kernel_passes_and_the_judgement_says_what_it_rests_on(prefill: Any) -> None:
    given_, out, spec = prefill
    judged = harness.judge(out, *given_, spec=spec, rows=COUNT)
    assert judged.status is Status.PASS, str(judged)
    rows = judged.rows
    assert rows is not None
    again = harness.judge(rows.take(out), rows.take(given_[0]), *given_[1:], spec=spec, rows=rows)
    assert repr(again) == repr(judged)  # of these rows alone as of all; the floor of both is NaN
    assert f"judged by {COUNT} of {N} rows per head, seed 0" in str(judged)
    assert (
        "a fault in rows that were not taken is not seen; one confined to 5 rows is met with probability"
        in str(judged)
    )


@pytest.mark.parametrize("where", [slice(0, N), slice(N - 8, N), slice(256, 320)], ids=str)
def test_a_fault_in_all_rows_in_the_last_or_beside_a_large_border_is_met(prefill: Any, where: slice) -> None:
    given_, out, spec = prefill
    wrong = spoilt(out, where)
    judged = harness.judge(wrong, *given_, spec=spec, rows=COUNT)
    assert judged.status is Status.FAIL
    assert judged.errors.worst is not None
    assert where.start <= judged.errors.worst[2] < where.stop  # in the numbers of the whole call


def test_a_wrong_tile_is_met_as_often_as_is_said(prefill: Any) -> None:
    """Of rows that stand nowhere special: over seeds, the share of choices with one of them, which are exactly those
    that fail. Six standard deviations of a share of 60 draws are allowed."""
    (q, k, v), out, spec = prefill
    where = slice(300, 306)
    wrong = spoilt(out, where)
    met, chances = [], []
    for seed in range(60):
        rows = choose_rows(q, k, spec, rows=COUNT, seed=seed)
        met.append(bool(((rows.index >= where.start) & (rows.index < where.stop)).any()))
        chances.append(rows.chance(where.stop - where.start))
    p = sum(chances) / len(chances)
    assert 0.2 < p < 0.9
    assert sum(met) / len(met) > p - 6 * (p * (1 - p) / len(met)) ** 0.5  # worst rows may lie there as well
    for seed in (met.index(True), met.index(False)):
        judged = harness.judge(wrong, q, k, v, spec=spec, rows=COUNT, seed=seed)
        assert judged.status is (Status.FAIL if met[seed] else Status.PASS)


# --- through the doors -----------------------------------------------------------------------------------------------


def test_a_file_is_judged_by_some_rows_and_told_by_their_numbers(prefill: Any, tmp_path: Any) -> None:
    from click.testing import CliRunner

    from harness.cli import cli
    from harness.records import read_records

    (q, k, v), out, _ = prefill
    path = tmp_path / "call.safetensors"
    save_file(
        {"q": q, "k": k, "v": v, "out": spoilt(out, slice(N - 1, N)).contiguous()}, path, {"causal": "true"}
    )
    arguments = ["judge", str(path), "--rows", "64", "--seed", "5", "--out", str(tmp_path / "r.jsonl")]
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert done.return_value == 1, done.output
    assert "judged by 64 of 512 rows per head, seed 5" in done.output.replace("\n    ", " ")
    assert "i=511" in done.output
    (record,) = read_records(tmp_path / "r.jsonl")
    assert record.shape == "[1, 4/2, 512, 16]"


def test_long_cases_run_by_name_alone_and_a_small_one_by_algorithm_and_kernel() -> None:
    assert not [c for c in load_cases("all") if c.rows is not None]
    named = load_cases("long")
    assert {c.group for c in named} == {"long"}
    small = Case(
        "made",
        "long",
        Shape(heads=2, kv_heads=1, q_len=300, head_dim=16),
        "small",
        AttentionSpec(causal=True),
        rows=64,
    )
    assert small.digest != replace(small, rows=65).digest != replace(small, rows=None).digest
    units = plan(
        [small], ["naive_masked", "split_kv", "sdpa_flash", "naive_unsafe"], ["bf16", "fp8_e4m3"], seeds=1
    )
    records = [r for _, batch in run_units(units) for r in batch]
    status = {(r.implementation, r.recipe): r.status for r in records}
    assert {s for (name, _), s in status.items() if name in ("naive_masked", "split_kv")} == {Status.PASS}
    assert status["sdpa_flash", "bf16"] is Status.PASS
    assert status["naive_unsafe", "bf16"] is Status.REFUSED
    assert all("64 of 300 rows per head, seed 0" in r.shape for r in records)


@pytest.mark.parametrize("rows", [0, 7, True, 8.0])
def test_case_of_too_few_rows_is_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match=r"rows of made/x is .*; allowed: an integer ≥ 8"):
        Case("made", "x", Shape(q_len=100), "x", rows=rows)


def test_a_fault_of_a_long_context_is_named_from_a_few_rows_of_one_kv_head(
    prefill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (q, k, v), _, spec = prefill
    monkeypatch.setattr("harness.part.LONG", 0)
    monkeypatch.setattr("harness.part.LONG_PAIRS", N * 2 * 8)
    monkeypatch.setattr(heads, "ELEMENTS", 0)
    wrong = (
        harness.get("online_softmax").run(q, k, v, replace(spec, scale=0.3), recipe="bf16").out
    )  # 16^-½ is 0.25
    judged = harness.judge(wrong, q, k, v, spec=spec, rows=COUNT)
    assert judged.status is Status.FAIL
    assert judged.diagnosis is not None
    assert judged.diagnosis.fault == "scale", str(judged)
