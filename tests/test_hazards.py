"""The range ledger on built inputs: what is observed, what is predicted, where, how far, and that both agree."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import harness
from harness import AttentionSpec, Recipe, Shape, get, get_recipe, reference
from harness.arithmetic import Arithmetic, Block
from harness.formats import FORMATS
from harness.hazards import RangeLedger, beyond, coarse, headroom_bits, predict, storage_hazards
from harness.quantize import quantize
from harness.recipe import TENSORS
from harness.records import Hazard, HazardKind, Status
from harness.rounding import round_to

K = HazardKind
ALGORITHMS = ("naive_masked", "online_softmax", "decode_with_cache", "lower_triangle")


def observe(
    name: str, qkv: tuple[Tensor, ...], shape: Shape, recipe: str | Recipe, spec: AttentionSpec | None = None,
    options: dict[str, int] | None = None, **extras: Any,
) -> list[Hazard]:  # fmt: skip
    ledger = RangeLedger(shape, get_recipe(recipe))
    get(name).run(*qkv, spec, recipe=recipe, quantize=True, watch=ledger, **extras, **(options or {}))
    return list(ledger.hazards())


def foresee(
    qkv: tuple[Tensor, ...], recipe: str | Recipe, subtracts_max: bool = True, spec: AttentionSpec | None = None,
    **extras: Any,
) -> list[Hazard]:  # fmt: skip
    r = get_recipe(recipe)
    stored = [quantize(x, t, r).values for x, t in zip(qkv, TENSORS, strict=True)]
    return list(predict(reference(*stored, spec, ranges=True, **extras), r, subtracts_max))


def only(found: list[Hazard], kind: HazardKind, stage: str) -> Hazard | None:
    hits = [h for h in found if h.kind is kind and h.stage == stage]
    assert len(hits) <= 1, hits
    return hits[0] if hits else None


def one_pair(score: float, where: tuple[int, int, int, int], shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """q·k = score at one pair and 0 elsewhere: the first channel of one query and one key. Exact where it is FP16."""
    q, k, v = (torch.zeros(shape.tensor(t), dtype=torch.float64) for t in TENSORS)
    b, h, i, j = where
    q[b, h, i, 0], k[b, h // shape.group, j, 0] = score / 32, 32.0
    return q, k, v + 1


# --- scores past FP16's edge --------------------------------------------------------------------------------------

GQA = Shape(2, 4, 10, 8, kv_heads=2, kv_len=12)
PLACES = [(0, 0, 0, 0), (1, 3, 9, 11), (0, 1, 4, 5), (1, 2, 7, 0), (0, 2, 3, 10)]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("naive_masked", {}), ("online_softmax", {"block": 5, "q_block": 3}), ("online_softmax", {"block": 1}),
        ("decode_with_cache", {"steps": 6}),
    ],
)  # fmt: skip
def test_a_score_below_fp16s_edge_fits_and_one_above_overflows_at_its_place(
    name: str, options: dict[str, int], where: tuple[int, int, int, int]
) -> None:
    """65472 is one ulp (32) below FP16's max, 65504; 65536 is the next step and infinite."""
    for score in (65472.0, 65504.0, 65536.0):
        qkv = one_pair(score, where, GQA)
        observed = observe(name, qkv, GQA, "fp16_eager", options=options)
        predicted = foresee(qkv, "fp16_eager")
        for found in (observed, predicted):
            overflow, near = only(found, K.OVERFLOW, "scores_raw"), only(found, K.NEAR_OVERFLOW, "scores_raw")
            hit = overflow if score > 65504 else near
            assert (overflow is None, near is None) == ((False, True) if score > 65504 else (True, False))
            assert hit is not None
            assert (hit.where, hit.count, hit.peak) == (where, 1, score)
            assert hit.headroom_bits == math.log2(65504 / score)
            assert hit.format == "fp16"


def test_the_lower_triangle_finds_the_same_place() -> None:
    shape, where = Shape(1, 4, 10, 8, kv_heads=2), (0, 3, 8, 6)
    for block in (1, 3, 10):
        found = observe(
            "lower_triangle", one_pair(65536.0, where, shape), shape, "fp16_eager", AttentionSpec(causal=True),
            {"block": block},
        )  # fmt: skip
        hit = only(found, K.OVERFLOW, "scores_raw")
        assert hit is not None
        assert hit.where == where


def test_a_negative_score_counts_by_its_magnitude() -> None:
    qkv = one_pair(-65536.0, (0, 1, 4, 5), GQA)
    for found in (observe("naive_masked", qkv, GQA, "fp16_eager"), foresee(qkv, "fp16_eager")):
        hit = only(found, K.OVERFLOW, "scores_raw")
        assert hit is not None
        assert hit.where == (0, 1, 4, 5)


def test_clamped_scores_are_called_saturated() -> None:
    qkv = one_pair(80000.0, (1, 2, 7, 0), GQA)
    for found in (
        observe("naive_masked", qkv, GQA, "fp16_eager_clamped"),
        foresee(qkv, "fp16_eager_clamped"),
    ):
        hit = only(found, K.SATURATION, "scores_raw")
        assert hit is not None
        assert (hit.where, hit.count) == ((1, 2, 7, 0), 1)
        assert only(found, K.OVERFLOW, "scores_raw") is None


def test_nothing_near_an_edge_gives_an_empty_ledger() -> None:
    g = torch.Generator().manual_seed(0)
    shape = Shape(1, 2, 16, 8)
    qkv = tuple(torch.randn(shape.tensor(t), generator=g, dtype=torch.float64) for t in TENSORS)
    for recipe in ("fp64", "fp32", "bf16"):
        assert observe("naive_masked", qkv, shape, recipe) == []
        assert foresee(qkv, recipe) == []


def test_the_output_is_placed_by_its_channel_not_by_a_key() -> None:
    """V = 3e5 overflows FP16's output, not its storage here; the last block of keys starts at 4."""
    shape = Shape(1, 4, 3, 4, kv_heads=2, kv_len=6)
    q, k, v = (torch.zeros(shape.tensor(t)) for t in TENSORS)
    v[0, 1, :, 2] = 3e5
    r = Recipe("x", at={"out": "fp16"})
    for name, options in (("naive_masked", {}), ("online_softmax", {"block": 4}), ("decode_with_cache", {})):
        hit = only(observe(name, (q, k, v), shape, r, options=options), K.OVERFLOW, "out")
        assert hit is not None
        assert hit.where == (0, 2, 0, 2)
        assert hit.peak == pytest.approx(3e5, rel=16 * 2.0**-24)


# --- headroom, resolution -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_headroom_is_the_number_of_doublings_left(fmt: str) -> None:
    f = FORMATS[fmt]
    assert headroom_bits(f, f.max) == 0
    assert headroom_bits(f, f.max / 2) == 1
    assert headroom_bits(f, f.max / 1024) == 10
    assert headroom_bits(f, 0.0) == math.inf
    assert headroom_bits(f, math.inf) == -math.inf


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp32"])
def test_a_score_is_coarse_once_its_ulp_passes_a_sixteenth(fmt: str) -> None:
    """ulp = 2^(e − p + 1) > 2⁻⁴ from e = p − 4: 16 in BF16, 128 in FP16, 2²⁰ in FP32."""
    edge = 2.0 ** (FORMATS[fmt].precision - 4)
    assert edge == {"bf16": 16, "fp16": 128, "fp32": 2**20}[fmt]
    assert not coarse(FORMATS[fmt], math.nextafter(edge, 0))
    assert coarse(FORMATS[fmt], edge)
    assert not coarse(FORMATS[fmt], 0.0)


@pytest.mark.parametrize(("recipe", "score"), [("bf16_eager", 16.0), ("fp16_eager", 128.0)])
def test_lost_resolution_is_flagged_at_the_largest_score(recipe: str, score: float) -> None:
    spec = AttentionSpec(scale=1.0)
    for value, flagged in ((score, True), (score * (1 - 2.0**-7), False)):
        qkv = one_pair(value, (0, 2, 3, 10), GQA)
        for found in (observe("naive_masked", qkv, GQA, recipe, spec), foresee(qkv, recipe, spec=spec)):
            hit = only(found, K.RESOLUTION, "scores")
            assert (hit is not None) == flagged
            assert hit is None or hit.where == (0, 2, 3, 10)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_midpoint_past_max_leaves_a_format_unless_max_is_its_even_neighbour(fmt: str) -> None:
    f = FORMATS[fmt]
    for magnitude in (f.max, f.overflow_threshold):
        if fmt == "fp64" and magnitude != f.max:
            continue  # FP64 has no number between its max and infinity
        x = torch.tensor(magnitude, dtype=torch.float64)
        left = bool(round_to(x, f, "inf" if f.infinities else "nan").isfinite().logical_not())
        assert bool(beyond(f, x)) == left == (magnitude != f.max and fmt != "fp8_e4m3")


# --- P in E4M3 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("peak", "saturated"), [(448.0, 0), (464.0, 0), (465.0, 2), (1e6, 2), (math.inf, 2)])
def test_e4m3_saturates_past_464(peak: float, saturated: int) -> None:
    """464 is the midpoint after 448; its tie goes to 448. Two elements, of either sign."""
    shape = Shape(1, 1, 1, 1, kv_len=4)
    ledger = RangeLedger(shape, Recipe("x", at={"probs": "fp8_e4m3"}))
    ar = Arithmetic(ledger.recipe, ledger)
    ar.block = Block(0, 1, 0)
    got = ar.cast(torch.tensor([[[[1.0, peak, -peak, 447.0]]]]), "probs")
    assert got.flatten().tolist() == [1.0, 448.0, -448.0, 448.0]
    hit = only(list(ledger.hazards()), K.SATURATION, "probs")
    assert (0 if hit is None else hit.count) == saturated
    if hit is not None and math.isfinite(peak):
        assert (hit.where, hit.peak, hit.total) == ((0, 0, 0, 1), peak, 4)


def heavy_first_key(shift: float, n: int = 64) -> tuple[tuple[Tensor, Tensor, Tensor], Shape]:
    """Scores N(0, 1), `shift` more for key 0."""
    shape = Shape(1, 4, 32, 64, kv_heads=2, kv_len=n)
    g = torch.Generator().manual_seed(int(shift))
    q, k, v = (torch.randn(shape.tensor(t), generator=g, dtype=torch.float64) for t in TENSORS)
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, :, 0, 0] = 8 * shift
    return (q, k, v), shape


@pytest.mark.parametrize("shift", [0.0, 6.0, 12.0])
@pytest.mark.parametrize("p_scale", [1.0, 256.0])
def test_flushed_probabilities_are_counted_as_brute_force_counts_them(shift: float, p_scale: float) -> None:
    """The key that holds the max comes first, so that online softmax meets the final max in its first block. Scores in
    FP64: nothing but P is rounded, and the counts are exact."""
    qkv, shape = heavy_first_key(shift)
    r = Recipe("x", base="fp64", at={"probs": "fp8_e4m3"}, p_scale=p_scale)
    q, k, _ = qkv
    s = q @ k.repeat_interleave(2, 1).mT / 8
    p = p_scale * torch.exp(s - s.amax(-1, keepdim=True))
    brute = int((p <= 2.0**-10).sum())
    kept = round_to(p, "fp8_e4m3")
    assert brute == int((kept == 0).sum())
    assert (brute > 100) == ((p_scale == 1.0 and shift > 0) or shift == 12.0)
    predicted = only(foresee(qkv, r), K.FLUSH, "probs")
    assert (0 if predicted is None else predicted.count) == brute
    for name in ("naive_masked", "decode_with_cache", *(["online_softmax"] if shift == 12.0 else [])):
        observed = only(
            observe(name, qkv, shape, r, options={"block": 16} if name[0] == "o" else None), K.FLUSH, "probs"
        )
        assert (0 if observed is None else observed.count) == brute, name
        if observed is not None:
            assert observed.total == p.numel()
            assert predicted is not None
            assert predicted.share == observed.share
            # 1 − ΣP_quantised/ΣP; the ledger adds up blocks in FP64: n·u relative to 1.
            lost = 1 - float(kept.sum()) / float(p.sum())
            assert observed.lost_mass == pytest.approx(lost, abs=p.numel() * 2.0**-53)


def test_lost_mass_is_the_share_of_the_denominator_that_became_zero() -> None:
    shape = Shape(1, 1, 1, 4, kv_len=9)
    q, k, v = (torch.zeros(shape.tensor(t), dtype=torch.float64) for t in TENSORS)
    bias = torch.zeros(9, dtype=torch.float64).index_fill_(0, torch.arange(1, 9), -8.0)
    r = Recipe("x", at={"probs": "fp8_e4m3"})
    mass = 8 * math.exp(-8)
    for found in (observe("naive_masked", (q, k, v), shape, r, bias=bias), foresee((q, k, v), r, bias=bias)):
        hit = only(found, K.FLUSH, "probs")
        assert hit is not None
        assert (hit.count, hit.total) == (8, 9)
        assert hit.lost_mass == pytest.approx(mass / (1 + mass), abs=9 * 2.0**-24)
    full = replace(r, p_scale=256.0)
    assert only(observe("naive_masked", (q, k, v), shape, full, bias=bias), K.FLUSH, "probs") is None
    assert only(foresee((q, k, v), full, bias=bias), K.FLUSH, "probs") is None


def test_what_underflows_in_the_base_is_neither_predicted_nor_observed_as_flushed() -> None:
    """exp(−120) is 0 in FP32 already: no factor on P would save it. Hidden keys are no flush either."""
    shape = Shape(1, 1, 2, 4, kv_len=4)
    q, k, v = (torch.zeros(shape.tensor(t), dtype=torch.float64) for t in TENSORS)
    bias = torch.tensor([0.0, -120.0, -math.inf, -9.0], dtype=torch.float64)
    r = Recipe("x", at={"probs": "fp8_e4m3"})
    for found in (observe("naive_masked", (q, k, v), shape, r, bias=bias), foresee((q, k, v), r, bias=bias)):
        hit = only(found, K.FLUSH, "probs")
        assert hit is not None
        assert hit.count == 2


# --- running sums -------------------------------------------------------------------------------------------------


def test_a_running_sum_that_no_longer_moves_is_flagged() -> None:
    """256 + 1 = 256 in BF16: equal scores, one key a block, so l grows by 1 up to 256 and stays there."""
    shape = Shape(1, 2, 3, 4, kv_len=300)
    qkv = tuple(torch.zeros(shape.tensor(t)) for t in TENSORS)
    hit = only(
        observe("online_softmax", qkv, shape, "bf16_eager", options={"block": 1}), K.STAGNATION, "row_sum"
    )
    assert hit is not None
    assert hit.count == 2 * 3 * (300 - 256)
    assert hit.peak == 257.0  # met before its rounding
    for name, options in (("naive_masked", {}), ("online_softmax", {"block": 100})):
        assert only(observe(name, qkv, shape, "bf16_eager", options=options), K.STAGNATION, "row_sum") is None
    assert observe("online_softmax", qkv, shape, "bf16", options={"block": 1}) == []


# --- storage ------------------------------------------------------------------------------------------------------


def stored_hazards(x: Tensor, recipe: str | Recipe) -> list[Hazard]:
    r = get_recipe(recipe)
    other = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    exact = (other, x, other)
    stored = tuple(quantize(t, n, r) for t, n in zip(exact, TENSORS, strict=True))
    found = list(storage_hazards(exact, stored, r))  # type: ignore[arg-type]
    assert all(h.stage == "k" and h.source == "observed" for h in found)
    return found


def wide() -> Tensor:
    x = torch.ones(1, 2, 3, 4, dtype=torch.float64)
    x[0, 0, 1, 2], x[0, 1, 2, 3] = 500.0, -1e6
    x[0, 1, 0, 1], x[0, 0, 0, 3] = 2.0**-11, 2.0**-30
    return x


def test_a_unit_scale_saturates_and_flushes_and_both_are_placed() -> None:
    found = {h.kind: h for h in stored_hazards(wide(), "fp8_e4m3_unscaled")}
    assert set(found) == {K.SATURATION, K.FLUSH}
    assert (found[K.SATURATION].count, found[K.SATURATION].where) == (2, (0, 1, 2, 3))
    assert found[K.SATURATION].peak == 1e6
    assert found[K.SATURATION].headroom_bits == math.log2(448 / 1e6)
    assert (found[K.FLUSH].count, found[K.FLUSH].where) == (2, (0, 1, 0, 1))
    assert found[K.FLUSH].total == 24


def test_an_amax_scale_does_not_saturate_but_flushes_what_lies_far_below() -> None:
    found = {h.kind: h for h in stored_hazards(wide(), "fp8_e4m3")}
    assert set(found) == {K.FLUSH}  # head 1: everything below 1e6/448·2⁻¹⁰ ≈ 2.2; head 0: 2⁻³⁰
    assert found[K.FLUSH].count == 11 + 1
    assert found[K.FLUSH].where == (0, 1, 0, 0)


def test_an_fp16_cast_to_infinity_is_an_overflow_where_the_largest_value_is() -> None:
    x = wide()
    x[0, 0, 2, 0] = 65520.0  # the midpoint: its tie goes to infinity
    x[0, 0, 2, 1] = 65519.0
    found = {h.kind: h for h in stored_hazards(x, "fp16")}
    assert (found[K.OVERFLOW].count, found[K.OVERFLOW].where) == (2, (0, 1, 2, 3))
    assert (found[K.FLUSH].count, found[K.FLUSH].where) == (1, (0, 0, 0, 3))


def test_an_infinity_stored_as_the_largest_number_is_saturation_and_none_where_it_stays() -> None:
    x = torch.ones(1, 1, 1, 3, dtype=torch.float64)
    x[..., 1] = -math.inf
    (hit,) = stored_hazards(x, "fp8_e4m3_unscaled")
    assert (hit.kind, hit.count, hit.where, hit.peak) == (K.SATURATION, 1, (0, 0, 0, 1), 1.0)
    assert stored_hazards(x, "fp16") == []
    x[..., 1] = math.nan
    assert stored_hazards(x, "fp8_e4m3_unscaled") == []


def test_blocks_of_zeros_are_counted_in_blocks() -> None:
    x = torch.zeros(1, 3, 4, 5, dtype=torch.float64)
    x[0, 1] = 1.0
    (hit,) = stored_hazards(x, "fp8_e4m3")
    assert (hit.kind, hit.count, hit.total) == (K.ZERO_AMAX, 2, 3)
    assert stored_hazards(torch.zeros(1, 1, 0, 5, dtype=torch.float64), "fp8_e4m3") == []


# --- prediction ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "stages", "scores"),
    [
        ("fp16", ("probs", "probs", "probs"), (11.08, 11.1, 30.0)),
        ("bf16", ("probs", "probs", "exp"), (88.70, 88.722, 95.0)),  # BF16's edge is 88.7209, FP32's 88.7228
        ("fp32", ("exp", "exp", "exp"), (88.70, 88.73, 95.0)),
        ("fp64", ("exp", "exp", "exp"), (709.7, 709.8, 750.0)),
        ("fp8_e4m3", ("probs", "probs", "probs"), (0.5, 0.8, 5.0)),  # ln(464 / 256) = 0.595
    ],
)
def test_what_is_predicted_for_unsafe_softmax_is_observed(
    recipe: str, stages: tuple[str, ...], scores: tuple[float, float, float]
) -> None:
    """Below, above and far above the edge, with 1, 1 and 3 pairs there: kind, stage, place and count."""
    shape = Shape(1, 4, 5, 8, kv_heads=2, kv_len=6)
    places = [(0, 3, 4, 5), (0, 2, 1, 0), (0, 1, 0, 3)]
    r = replace(get_recipe(recipe), scaling={})
    for score, n, stage in zip(scores, (0, 1, 3), stages, strict=True):
        bias = torch.zeros(1, 4, 5, 6, dtype=torch.float64)
        for rank, place in enumerate(places[: max(n, 1)]):
            bias[place] = score - rank * 1e-3 * score  # distinct, the first the largest
        q, k, v = (torch.zeros(shape.tensor(t), dtype=torch.float64) for t in TENSORS)
        kind = K.SATURATION if recipe == "fp8_e4m3" else K.OVERFLOW
        observed = only(observe("naive_unsafe", (q, k, v), shape, r, bias=bias), kind, stage)
        predicted = only(foresee((q, k, v), r, subtracts_max=False, bias=bias), kind, stage)
        assert (observed is not None) == (predicted is not None) == (n > 0), score
        if observed is not None and predicted is not None:
            first = min(places[:n]) if kind is K.OVERFLOW else places[0]  # Inf hides which was the largest
            assert (observed.where, predicted.where) == (first, places[0])
            assert predicted.count <= observed.count == n
            if score == scores[2]:
                assert predicted.count == n


def test_a_prediction_needs_ranges() -> None:
    x = torch.ones(1, 1, 1, 1)
    with pytest.raises(
        ValueError, match=r"this truth has no ranges; make it with reference\(\.\.\., ranges=True\)"
    ):
        list(predict(reference(x, x, x), get_recipe("fp16")))


def test_every_hazard_of_a_run_says_where_it_stands_and_prints() -> None:
    qkv = one_pair(80000.0, (1, 2, 7, 0), GQA)
    for name, recipe in itertools.product(
        ("naive_masked", "online_softmax", "naive_unsafe"), ("fp16_eager", "fp16")
    ):
        for h in (*observe(name, qkv, GQA, recipe), *foresee(qkv, recipe, name != "naive_unsafe")):
            assert 0 < h.count <= h.total, h
            assert h.stage in str(h)


# --- sums past their format ---------------------------------------------------------------------------------------


def narrow(**at: str) -> Recipe:
    recipe = get_recipe("fp16")
    return replace(recipe, name="narrow", at={**recipe.at, **at})


def flat(keys: int, value: float) -> tuple[Tensor, Tensor, Tensor]:
    """Every key weighs the same, so that the row sum is their number."""
    q, k = (torch.zeros(1, 2, n, 4, dtype=torch.float64) for n in (1, keys))
    return q, k, torch.full((1, 2, keys, 4), value, dtype=torch.float64)


@pytest.mark.parametrize(("keys", "value", "kind"), [
    (64, 1020.0, HazardKind.NEAR_OVERFLOW), (64, 1030.0, HazardKind.OVERFLOW), (64, 500.0, None)])  # fmt: skip
def test_an_accumulator_that_is_divided_last_is_foreseen_beyond_its_format(
    keys: int, value: float, kind: HazardKind | None
) -> None:
    qkv, recipe = flat(keys, value), narrow(acc="fp16", block_out="fp16")
    found = [h for h in foresee(qkv, recipe) if h.stage == "acc"]
    assert [h.kind for h in found] == ([] if kind is None else [kind])
    assert all(h.peak == pytest.approx(keys * value, rel=1e-12) for h in found)
    out = get("online_softmax").run(*qkv, recipe=recipe, quantize=True).out
    assert bool(torch.isinf(out).any()) == (kind is HazardKind.OVERFLOW)
    assert not [h for h in foresee(qkv, replace(recipe, normalise="early")) if h.stage == "acc"]
    judged = harness.judge(out, *qkv, recipe=recipe, quantize=True)
    assert (judged.precision is Status.FAIL) == (kind is HazardKind.OVERFLOW)


def test_an_overflow_of_a_sum_that_the_recipe_divides_first_is_the_implementations() -> None:
    qkv = flat(128, 1030.0)
    out = get("online_softmax").run(*qkv, recipe="fp16_eager", quantize=True).out
    judged = harness.judge(out, *qkv, recipe="fp16_eager", quantize=True)
    assert (judged.status, judged.precision) == (Status.FAIL, Status.PASS)
    assert judged.diagnosis is not None
    assert judged.diagnosis.fault == "overflow in acc"
    assert "divided by its sum at the end" in judged.diagnosis.what


def test_a_row_sum_beyond_its_format_is_foreseen() -> None:
    recipe = narrow(row_sum="fp16")
    (h,) = [h for h in foresee(flat(66_000, 1.0), recipe) if h.stage == "row_sum"]
    assert (h.kind, h.peak) == (HazardKind.OVERFLOW, pytest.approx(66_000, rel=1e-12))
    assert not [h for h in foresee(flat(30_000, 1.0), recipe) if h.stage == "row_sum"]


def test_an_output_beyond_its_format_is_foreseen_where_it_is_largest() -> None:
    qkv = flat(4, 3.39e38)
    qkv[2][0, 1, :, 2] = 3.4e38
    found = [
        h
        for h in foresee(qkv, replace(narrow(out="bf16"), storage=get_recipe("fp32").storage))
        if h.stage == "out"
    ]
    (h,) = found
    assert (h.kind, h.where) == (HazardKind.OVERFLOW, (0, 1, 0, 2))


def test_a_sink_that_is_the_row_maximum_leaves_the_row_sum_at_1() -> None:
    q, k, v = flat(16, 1.0)
    sinks = torch.tensor([20.0, -3.0], dtype=torch.float64)
    truth = reference(q, k, v, sinks=sinks, ranges=True)
    recipe = narrow(row_sum="fp16", acc="fp16")
    assert not [h for h in predict(truth, recipe, sinks=sinks) if h.stage in ("row_sum", "acc")]
    assert "row_sum" in [
        h.stage for h in predict(truth, recipe)
    ]  # e^20 keys, were the largest score the maximum


def test_the_factor_of_p_is_no_part_of_the_row_sum() -> None:
    recipe = Recipe("x", at={"row_sum": "fp16"}, p_scale=256.0, row_sum="after")
    qkv = flat(512, 1.0)
    assert not foresee(qkv, recipe)
    assert not observe("naive_masked", qkv, Shape(1, 2, 1, 4, kv_len=512), recipe)
