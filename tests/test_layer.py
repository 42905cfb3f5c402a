"""The attention layer: its truth against plain Python, its error model against runs, decoding against training, faults.

Bands and limits are the verdict's own: measured ÷ expected within its slack, rows within `ratio_limit`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_capture import TEXT, tiny
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import harness
from harness import AttentionSpec, Case, Draw, LayerSpec, Shape, Status, registry
from harness import capture as capture_room
from harness.attention.algorithm import Result
from harness.attention.layer import Layer, LayerResult
from harness.attention.layer_decode import Decoding, decode
from harness.capture import layer_weights
from harness.case import load_cases
from harness.cost import attention_flops
from harness.cost.formulas import projections, score_products
from harness.error_model import WHOLE, form_of
from harness.error_model.layer import LayerExpectation, layer_expectations
from harness.formats import get_format
from harness.hazards import RangeLedger
from harness.inputs import make_inputs
from harness.layer_inputs import make_layer
from harness.layer_judging import blame, judge_layer
from harness.layer_store import StoredLayer, Weights, layer_recipe, operand_recipe, store_layer, unstored
from harness.layer_truth import LayerTruth, layer_reference, project
from harness.optional import MissingExtra
from harness.recipe import LAYER_STAGES, Recipe, get_recipe
from harness.records import HazardKind
from harness.significance import ratio_limit
from harness.yardstick import FP32_LIMITS, NARROW

CAUSAL = AttentionSpec(causal=True)
SHAPE = Shape(1, 4, 48, 16, kv_heads=2)
LAYER = LayerSpec(64, rope=1e4)
FOUR = ("fp32", "bf16", "fp16", "fp8_e4m3")
FINER = ("fp8_e4m3_block", "fp8_e4m3_hadamard", "mxfp8")


def case(layer: LayerSpec = LAYER, shape: Shape = SHAPE, spec: AttentionSpec = CAUSAL, **params: Any) -> Case:
    return Case("layer", "one", shape, "to test layers", spec, Draw("layer", params), layer=layer)


class Made:
    """A layer case under one recipe: stored, its truth, its expectation. Tests share it and change nothing."""

    def __init__(self, case: Case, recipe: str | Recipe, seed: int = 0, form: Any = WHOLE) -> None:
        assert case.layer is not None
        self.case, self.layer, self.recipe = case, case.layer, get_recipe(recipe)
        self.x, self.weights = make_layer(case, seed)
        self.stored = store_layer(self.x, self.weights, self.recipe, self.layer)
        self.truth: LayerTruth = layer_reference(self.stored, case.shape, case.spec, self.layer)
        self.expected: LayerExpectation = layer_expectations(
            self.truth, self.stored, case.shape, case.spec, self.layer, self.recipe, [form]
        )[form]

    def around(self, attention: Any = "naive_masked", kind: type[Layer] = Layer) -> Layer:
        inside = registry.get(attention) if isinstance(attention, str) else attention
        return kind(inside, self.case.shape, self.case.spec, self.layer, self.recipe)

    def train(self, attention: Any = "naive_masked", kind: type[Layer] = Layer) -> LayerResult:
        return self.around(attention, kind).train(self.stored)

    def verdict(self, result: LayerResult) -> Any:
        return judge_layer(result.out[:, None], self.truth.out, self.expected, self.recipe)

    @property
    def slack(self) -> float:
        return (FP32_LIMITS if self.recipe.name == "fp32" else NARROW).slack


@functools.cache
def made_once(case: Case, recipe: str | Recipe, seed: int = 0, form: Any = WHOLE) -> Made:
    return Made(case, recipe, seed, form)


def parts(result: LayerResult) -> dict[str, Tensor]:
    q, k, v = (s.values for s in result.stored)
    rest = {"y": result.y, "z": result.z, "residual": result.residual, "out": result.out[:, None]}
    return {"q": q, "k": k, "v": v, **rest}


# --- the truth -------------------------------------------------------------------------------------------------------


def by_hand(
    x: list[list[float]], w: Weights, shape: Shape, rope: float | None, eps: float
) -> list[list[float]]:
    """The notes' formulas in plain Python, one sequence, causal: sums in the order they are written."""
    width, h, group = len(x[0]), shape.head_dim, shape.heads // shape.Hkv
    matrix = {n: getattr(w, n).tolist() for n in "qkvo"}

    def product(row: list[float], name: str, column: int) -> float:
        return sum(a * w_row[column] for a, w_row in zip(row, matrix[name], strict=True))

    def rows(name: str, heads: int) -> list[list[list[float]]]:
        return [[[product(row, name, n * h + c) for c in range(h)] for row in x] for n in range(heads)]

    def turned(head: list[list[float]]) -> list[list[float]]:
        if rope is None:
            return head
        new = []
        for t, row in enumerate(head):
            half, out = h // 2, [0.0] * h
            for i in range(half):
                a = t / rope ** (2 * i / h)
                out[i] = row[i] * math.cos(a) - row[i + half] * math.sin(a)
                out[i + half] = row[i + half] * math.cos(a) + row[i] * math.sin(a)
            new.append(out)
        return new

    q, k = ([turned(r) for r in rows(name, n)] for name, n in (("q", shape.heads), ("k", shape.Hkv)))
    v = rows("v", shape.Hkv)
    out = []
    for t, row in enumerate(x):
        y: list[float] = []
        for n in range(shape.heads):
            g = n // group
            s = [
                sum(a * b for a, b in zip(q[n][t], k[g][j], strict=True)) / math.sqrt(h) for j in range(t + 1)
            ]
            e = [math.exp(a - max(s)) for a in s]
            y += [sum(e[j] * v[g][j][c] for j in range(t + 1)) / sum(e) for c in range(h)]
        r = [row[d] + sum(y[c] * matrix["o"][c][d] for c in range(len(y))) for d in range(width)]
        mean = sum(r) / width
        sigma = math.sqrt(sum((a - mean) ** 2 for a in r) / width + eps)
        out.append(
            [(a - mean) / sigma * g + b for a, g, b in zip(r, w.gamma.tolist(), w.beta.tolist(), strict=True)]
        )
    return out


@pytest.mark.parametrize("rope", [None, 100.0])
def test_truth_is_the_notes_formulas_in_plain_python(rope: float | None) -> None:
    shape = Shape(1, 4, 7, 6, kv_heads=2)
    one = case(LayerSpec(10, rope=rope), shape)
    x, w = make_layer(one, 0)
    assert one.layer is not None
    truth = layer_reference(unstored(x, w), shape, CAUSAL, one.layer).out[0, 0]
    told = torch.tensor(by_hand(x[0].tolist(), w, shape, rope, one.layer.eps), dtype=torch.float64)
    # Both are FP64 runs of one layer: as far apart as the model allows two such runs to be.
    bound = made_once(one, "fp64").expected.ceiling[0, 0]
    assert bool(((truth - told).abs() <= 2 * bound).all())
    assert float(bound.max()) < 1e-10


def test_truth_normalises_as_torch_does() -> None:
    made = made_once(case(), "fp64")
    w = made.weights
    told = torch.nn.functional.layer_norm(made.truth.residual, (64,), w.gamma, w.beta, made.layer.eps)
    assert bool(((made.truth.out - told).abs() <= made.expected.ceiling).all())


def test_grouped_heads_are_repeated_heads() -> None:
    one, many = case(), case(shape=Shape(1, 4, 48, 16))
    x, w = make_layer(one, 0)
    wide = replace(w, **{n: getattr(w, n).view(64, 2, 16).repeat_interleave(2, 1).flatten(1) for n in "kv"})
    a = layer_reference(unstored(x, w), one.shape, CAUSAL, LAYER).out
    b = layer_reference(unstored(x, wide), many.shape, CAUSAL, LAYER).out
    assert bool(((a - b).abs() <= 2 * made_once(one, "fp64").expected.ceiling).all())


def test_rotated_scores_depend_on_the_distance_of_tokens_alone() -> None:
    one = case(shape=Shape(1, 1, 9, 8), layer=LayerSpec(8, rope=50.0))
    x, w = make_layer(one, 0)
    x[:] = x[:, :1]  # one token, nine times
    _, (q, k, _) = project(unstored(x, w), one.shape, one.layer)  # type: ignore[arg-type]
    s = (q @ k.mT)[0, 0]
    size = float(q.norm(dim=-1).max() * k.norm(dim=-1).max())
    for i in range(8):
        assert bool(((s[1:, 1:] - s[:-1, :-1]).abs() <= 64 * 2.0**-53 * size).all()), i


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_shapes_are_those_of_the_notes_with_n_for_d() -> None:
    b, t, n, k, h, d = 2, 33, 6, 3, 8, 40
    made = made_once(case(LayerSpec(d), Shape(b, n, t, h, kv_heads=k)), "fp32")
    result = made.train()
    w = made.weights
    assert [tuple(getattr(w, m).shape) for m in "qkvo"] == [(d, n * h), (d, k * h), (d, k * h), (n * h, d)]
    q, key, v = result.projections
    # The notes write Q[B,T,D,H] where D is contracted away: what is left is [B,T,N,H], held heads first.
    assert tuple(q.transpose(1, 2).shape) == (b, t, n, h) != (b, t, d, h)
    assert tuple(key.transpose(1, 2).shape) == tuple(v.transpose(1, 2).shape) == (b, t, k, h)
    assert tuple(result.y.transpose(1, 2).shape) == (b, t, n, h)
    assert tuple(result.z.shape) == (b, 1, t, d)
    assert tuple(result.out.shape) == (b, t, d) == tuple(made.x.shape)


def test_flops_of_the_projections_are_those_of_the_notes() -> None:
    b, t, n, k, h, d = 2, 33, 6, 3, 8, 40
    made = made_once(case(LayerSpec(d), Shape(b, n, t, h, kv_heads=k), AttentionSpec()), "bf16")
    gemms = 2 * (2 * b * t * d * n * h) + 2 * (2 * b * t * d * k * h)  # W_Q and W_O, W_K and W_V
    assert made.train().flops == gemms + 2 * (2 * b * t * t * n * h)  # q·k and P·V


@pytest.mark.parametrize("attention", ["naive_masked", "lower_triangle"])
@pytest.mark.parametrize("recipe", FOUR)
def test_flops_of_the_layer_are_those_that_torch_counts_and_that_cost_foretells(
    recipe: str, attention: str
) -> None:
    """Weights and inputs are stored before: what torch sees is the layer's products alone."""
    made, shape = made_once(case(), recipe), SHAPE
    with FlopCounterMode(display=False) as counter:
        result = made.train(attention)
    assert result.flops == counter.get_total_flops()
    b, t = shape.batch, shape.q_len
    around = projections(b, t, LAYER.width, shape.heads, shape.Hkv, shape.head_dim).values()
    whole = score_products(b, t, t, shape.heads, shape.head_dim).values()
    rest = result.flops - sum(p.flops for p in around)
    if attention == "naive_masked":
        assert rest == sum(p.flops for p in whole)
    else:  # tiles on the diagonal are computed whole
        assert attention_flops(shape, CAUSAL) <= rest <= sum(p.flops for p in whole)


def test_flops_of_decoding_are_those_that_torch_counts_and_that_cost_foretells() -> None:
    """Each step takes one token, and attends over those that it has: the causal half, with the diagonal."""
    made, steps = made_once(case(), "bf16"), SHAPE.q_len
    with FlopCounterMode(display=False) as counter:
        result = decode(made.around("naive_masked"), made.stored, steps)
    around = projections(1, SHAPE.q_len, LAYER.width, SHAPE.heads, SHAPE.Hkv, SHAPE.head_dim).values()
    assert result.flops == counter.get_total_flops()
    assert result.flops == sum(p.flops for p in around) + attention_flops(SHAPE, CAUSAL)


# --- the error model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*harness.recipes()[1:-2]])
def test_every_part_errs_as_is_normal_and_below_its_bound(recipe: str) -> None:
    power: dict[str, list[float]] = {}
    for seed in range(2):
        made = made_once(case(), recipe, seed)
        got = parts(made.train())
        for name, b in made.expected.stages.items():
            e = got[name].double() - b.value
            assert bool((e.abs() <= b.bound).all()), name
            square, normal = power.setdefault(name, [0.0, 0.0])
            power[name] = [square + float((e * e).sum()), normal + float(b.variance.sum())]
    ratios = {name: math.sqrt(a / b) for name, (a, b) in power.items() if math.isfinite(b)}
    if get_recipe(recipe).accumulator is not None:
        assert ratios == {}, "a truncating accumulator has a ceiling and no expected size"
        return
    assert all(1 / made.slack <= r <= made.slack for r in ratios.values()), ratios


@pytest.mark.parametrize(
    "attention", ["online_softmax", "lower_triangle", "decode_with_cache", "split_kv", "paged_decode"]
)
@pytest.mark.parametrize("recipe", ["fp32", "fp8_e4m3", "fp16_eager"])
def test_any_registered_attention_passes_inside_the_layer(attention: str, recipe: str) -> None:
    made = made_once(case(), recipe, form=form_of(attention))
    verdict = made.verdict(made.train(attention))
    assert verdict.status is Status.PASS, verdict.reasons


@pytest.mark.parametrize(
    ("what", "layer", "shape", "spec", "params"),
    [
        ("peaked", LAYER, SHAPE, CAUSAL, {"gain": 2.0}),
        ("no mask, no positions", LayerSpec(64), SHAPE, AttentionSpec(), {}),
        ("window and softcap", LAYER, SHAPE, AttentionSpec(causal=True, window=(9, 0), softcap=2.0), {}),
        ("two sequences, wide sums", LayerSpec(400, rope=1e4), Shape(2, 3, 33, 32), CAUSAL, {}),
        ("one scale a matrix", replace(LAYER, weight_scale="tensor"), SHAPE, CAUSAL, {}),
    ],
)
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8_e4m3", "fp8_kv"])
def test_other_layers_err_as_is_normal(
    what: str, layer: LayerSpec, shape: Shape, spec: AttentionSpec, params: dict[str, float], recipe: str
) -> None:
    made = made_once(case(layer, shape, spec, **params), recipe)
    verdict = made.verdict(made.train())
    assert verdict.status is Status.PASS, (what, verdict.reasons)
    assert verdict.margins.ceiling <= 1


def test_fp64_run_of_the_layer_is_a_second_truth() -> None:
    made = made_once(case(), "fp64")
    out = made.train().out[:, None]
    assert bool(((out - made.truth.out).abs() <= made.expected.ceiling).all())


def test_coarse_scores_are_promised_nothing() -> None:
    made = made_once(case(outliers=3), "fp8_e4m3")
    verdict = made.verdict(made.train())
    assert verdict.status is Status.INCONCLUSIVE
    assert "rows were not judged" in verdict.reasons[0]


# --- storing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("granularity", "scales"), [("channel", (64, 1)), ("tensor", (1, 1))])
def test_weights_are_scaled_per_output_channel_or_per_tensor(
    granularity: str, scales: tuple[int, int]
) -> None:
    one = case(replace(LAYER, weight_scale=granularity))
    x, w = make_layer(one, 0)
    assert one.layer is not None
    stored = store_layer(x, w, get_recipe("fp8_e4m3"), one.layer)
    for name in "qkvo":
        kept, exact = stored.matrices[name], getattr(w, name).mT[None, None]
        assert kept.scale is not None
        assert tuple(kept.scale.shape[2:]) == ((exact.shape[2], 1) if granularity == "channel" else (1, 1))
        fmt, size = get_format("fp8_e4m3"), exact.abs()
        assert float((size / kept.scale).max()) <= fmt.max * (
            1 + 2.0**-23
        )  # the scale itself is rounded to FP32
        half = torch.maximum(fmt.unit_roundoff * size, kept.scale * fmt.min_subnormal / 2)
        assert bool(((kept.values - exact).abs() <= half * (1 + 2.0**-22)).all())


def test_large_output_channel_costs_the_others_nothing_when_each_has_its_scale() -> None:
    one = case()
    x, w = make_layer(one, 0)
    w.v[:, 0] *= 2.0**18
    errors = {}
    for granularity in ("channel", "tensor"):
        layer = replace(LAYER, weight_scale=granularity)
        kept = store_layer(x, w, get_recipe("fp8_e4m3"), layer).matrices["v"].values[0, 0].mT
        errors[granularity] = float((kept - w.v)[:, 1:].norm() / w.v[:, 1:].norm())
    # With its scale a channel is rounded by E4M3's own step; with one scale for all the others fall to 2^-11, and
    # below 2^-10 E4M3 has nothing.
    assert errors["channel"] <= 2.0**-4
    assert errors["tensor"] > 0.25


def test_narrow_recipes_keep_the_residual_stream_in_the_output_format() -> None:
    made = made_once(case(), "fp8_e4m3")
    assert torch.equal(made.stored.x, harness.round_to(made.x, "bf16")[:, None])
    assert made.stored.operand.scale is not None
    assert tuple(made.stored.operand.scale.shape) == (
        1,
        1,
        48,
        1,
    )  # one a token: a later one changes no earlier row
    assert operand_recipe(get_recipe("fp8_e4m3"), "token").storage["q"] == "fp8_e4m3"
    assert made_once(case(), "bf16").stored.operand.scale is None


def test_layer_stages_take_formats_of_their_own() -> None:
    recipe = replace(get_recipe("bf16"), name="wide_z", at={"probs": "bf16", "out": "bf16", "z": "fp32"})
    assert layer_recipe(recipe).format_of("z") == "fp32"
    assert layer_recipe(recipe).format_of("norm") == "bf16"
    assert "z→fp32" in recipe.digest
    # Z added unrounded: the residual's error loses that store and keeps its own.
    a, b = (
        made_once(case(), "bf16").expected.stages["residual"],
        made_once(case(), recipe).expected.stages["residual"],
    )
    assert float(b.variance.sum()) < float(a.variance.sum())


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["naive_masked", "online_softmax"])
@pytest.mark.parametrize("recipe", FOUR)
def test_decoding_64_steps_is_the_training_form_at_every_step(recipe: str, attention: str) -> None:
    made = made_once(case(shape=Shape(1, 4, 64, 16, kv_heads=2)), recipe, form=form_of(attention))
    trained = made.train(attention)
    decoded = decode(made.around(attention), made.stored, 64, trained.scales)
    assert made.verdict(decoded).status is Status.PASS
    # Each form is within the model of the truth, so they are within twice that of each other: every row, every element.
    apart = (decoded.out.double() - trained.out.double())[0]
    normal = made.expected.variance[0, 0].sum(-1).sqrt()
    assert bool((apart.norm(dim=-1) <= 2 * ratio_limit(1, 64, made.slack) * normal).all())
    assert bool((apart.abs() <= 2 * made.expected.ceiling[0, 0]).all())


def test_each_step_sees_its_own_key() -> None:
    """A note lets step t attend to k_1 … k_{t−1}: the first step would then see nothing, and every row be another."""
    made = made_once(case(), "fp32")

    class Late(Decoding):
        """Attends before it appends."""

        def held(self, q: Any, new: Any = None) -> Any:
            q_, k, v = super().held(q, new)
            return q_, *(replace(s, codes=s.codes[:, :, : max(1, s.codes.shape[2] - 1)]) for s in (k, v))

    session = Late(made.around(), 1)
    rows = [session.step(made.stored.rows(slice(t, t + 1))).out for t in range(48)]
    result = replace(made.train(), out=torch.cat(rows, 1))
    assert made.verdict(result).status is Status.FAIL
    assert made.verdict(decode(made.around(), made.stored, 48)).status is Status.PASS


def test_cache_holds_k_and_v_and_no_q() -> None:
    made = made_once(case(), "fp8_e4m3")
    session = Decoding(made.around(), 1, made.train().scales)
    session.step(made.stored.rows(slice(0, 5)))
    assert session.cache.length == 5
    # Codes of one byte each: 2·tokens·K·H, the notes' 2·L·d_kv·b for one layer.
    assert session.cache.nbytes == 2 * 5 * (2 * 16) * 1


@pytest.mark.parametrize("recipe", FOUR)
def test_future_token_changes_no_earlier_row(recipe: str) -> None:
    made = made_once(case(), recipe)
    scales = made.train().scales
    x = made.x.clone()
    x[:, 40:] = 3.0 - x[:, 40:]
    changed = store_layer(x, made.weights, made.recipe, made.layer)
    a, b = (made.around().train(s, scales).out for s in (made.stored, changed))
    assert torch.equal(a[:, :40], b[:, :40])
    assert not torch.equal(a[:, 40:], b[:, 40:])


def test_scale_of_a_whole_head_lets_the_future_into_earlier_rows() -> None:
    """Why decoding takes its scales from a calibration: amax over a sequence is a look ahead."""
    made = made_once(case(), "fp8_e4m3")
    x = made.x.clone()
    x[:, 40:] *= 3.0
    changed = store_layer(x, made.weights, made.recipe, made.layer)
    a, b = (made.around().train(s).out for s in (made.stored, changed))
    assert not torch.equal(a[:, :40], b[:, :40])


def test_decoding_refuses_scales_it_cannot_know() -> None:
    made = made_once(case(), "fp8_e4m3")
    with pytest.raises(
        ValueError, match="one scale for all tokens of q, k, v, which the first does not know"
    ):
        Decoding(made.around(), 1)
    for recipe, said in (
        ("fp8_e4m3_block", "a scale of q spans 128 tokens"),
        ("mxfp8", "a scale of v spans 32 tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            Decoding(made_once(case(), recipe).around(), 1)
    with pytest.raises(ValueError, match="not causal"):
        Decoding(made_once(case(spec=AttentionSpec()), "bf16").around(), 1)


def test_scales_that_come_with_their_tokens_need_no_calibration() -> None:
    token = harness.Scaling("token")
    recipe = replace(get_recipe("fp8_e4m3"), name="per_token", scaling=dict.fromkeys("qkv", token))
    made = made_once(case(), recipe)
    decoded = decode(made.around(), made.stored, 20)
    assert made.verdict(decoded).status is Status.PASS
    assert torch.equal(decoded.out, made.train().out) or made.verdict(made.train()).status is Status.PASS


# --- faults ----------------------------------------------------------------------------------------------------------


class MultipliedMask:
    """A note multiplies the causal mask of ones and zeros onto the scores. exp(0) = 1: hidden keys keep a weight."""

    @staticmethod
    def refusals(*_: Any) -> tuple[str, ...]:
        return ()

    @staticmethod
    def run_stored(stored: Any, spec: AttentionSpec, recipe: Recipe, *_: Any, **__: Any) -> Result:
        q, k, v = (s.values for s in stored)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        s = q @ k.mT * spec.scale_for(q.shape[3])
        p = torch.softmax(s * torch.ones_like(s).tril(), -1)
        return Result(harness.round_to(p @ v, recipe.out_format), None, 0)


class AddedMask(MultipliedMask):
    """−∞ added instead."""

    @staticmethod
    def run_stored(stored: Any, spec: AttentionSpec, recipe: Recipe, *_: Any, **__: Any) -> Result:
        q, k, v = (s.values for s in stored)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        s = q @ k.mT * spec.scale_for(q.shape[3])
        hidden = torch.ones_like(s, dtype=torch.bool).triu(1)
        return Result(
            harness.round_to(torch.softmax(s.masked_fill(hidden, -math.inf), -1) @ v, recipe.out_format),
            None,
            0,
        )


@pytest.mark.parametrize("recipe", FOUR)
def test_mask_multiplied_onto_scores_fails_and_one_of_minus_infinity_passes(recipe: str) -> None:
    made = made_once(case(), recipe)
    result = made.train(MultipliedMask())
    assert made.verdict(result).status is Status.FAIL
    assert blame(parts(result), made.expected.stages, made.recipe).fault == "stage y"
    assert made.verdict(made.train(AddedMask())).status is Status.PASS


@pytest.mark.parametrize("recipe", FOUR)
def test_mask_multiplied_onto_scores_fails_as_attention_too(recipe: str) -> None:
    made = made_once(case(), recipe)
    stored = made.train().stored
    out = MultipliedMask.run_stored(stored, CAUSAL, made.recipe).out
    scales = None if stored[0].scale is None else tuple(s.scale for s in stored)
    values = tuple(s.values for s in stored)
    told = harness.judge(out, *values, spec=CAUSAL, recipe=recipe, scales=scales)
    assert told.status is Status.FAIL


class NoResidual(Layer):
    def finish(self, stored: StoredLayer, *rest: Any) -> LayerResult:
        return super().finish(replace(stored, x=torch.zeros_like(stored.x)), *rest)


class HeadsSwapped(Layer):
    """The first head's output meets the last head's rows of W_O."""

    def finish(self, stored: StoredLayer, *rest: Any) -> LayerResult:
        o = stored.matrices["o"]
        swapped = o.codes.view(1, 1, -1, self.shape.heads, self.shape.head_dim).flip(3).flatten(3)
        return super().finish(
            replace(stored, matrices={**stored.matrices, "o": replace(o, codes=swapped)}), *rest
        )


class OneLess(Layer):
    """The variance divided by D − 1."""

    def _norm(self, r: Tensor, stored: StoredLayer) -> Tensor:
        ar, d = self.arithmetic, r.shape[-1]
        centred = r - r.mean(-1, keepdim=True)
        spread = (centred * centred).sum(-1, keepdim=True) / (d - 1) + self.layer.eps
        return ar.cast(
            centred * torch.rsqrt(spread) * stored.gamma.to(ar.dtype) + stored.beta.to(ar.dtype), "norm"
        )


class NoGamma(Layer):
    def _norm(self, r: Tensor, stored: StoredLayer) -> Tensor:
        return super()._norm(r, replace(stored, gamma=torch.ones_like(stored.gamma)))


class PositionsOff(Layer):
    """Queries turned as if one token further on."""

    def _turned(self, t: Tensor, first: int) -> Tensor:
        return super()._turned(t, first + (t.shape[1] == self.shape.heads))


class ScaleDrifts(Layer):
    """V descaled by 2 % too little."""

    def store(self, made: Any, scales: Any) -> Any:
        q, k, v = super().store(made, scales)
        return q, k, replace(v, codes=v.codes * 0.98)


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        (NoResidual, "residual"), (HeadsSwapped, "z"), (NoGamma, "out"), (PositionsOff, "q"), (ScaleDrifts, "v"),
        (OneLess, "out"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("recipe", ["fp32", "fp16"])
def test_faults_of_the_layer_fail_and_their_part_is_named(kind: type[Layer], stage: str, recipe: str) -> None:
    made = made_once(case(), recipe)
    result = made.train(kind=kind)
    assert made.verdict(result).status is Status.FAIL
    assert blame(parts(result), made.expected.stages, made.recipe).fault == f"stage {stage}"


def test_watchers_see_every_stage_and_name_the_token_that_overflows() -> None:
    made = made_once(case(), "fp16")
    around, inside = (
        RangeLedger(replace(SHAPE, heads=1, kv_heads=1), layer_recipe(made.recipe)),
        RangeLedger(SHAPE, made.recipe),
    )
    o = made.stored.matrices["o"]
    stored = replace(made.stored, matrices={**made.stored.matrices, "o": replace(o, codes=o.codes * 2.0**17)})
    layer = Layer(registry.get("naive_masked"), SHAPE, CAUSAL, LAYER, made.recipe, around, inside)
    result = layer.train(stored)
    assert set(around.stages) == set(LAYER_STAGES)
    assert "probs" in inside.stages
    found = next(h for h in around.hazards() if h.kind is HazardKind.OVERFLOW)
    assert (found.stage, found.format, found.source) == ("z", "fp16", "observed")
    assert found.where is not None
    assert bool(torch.isinf(result.z[found.where]))


# --- cases of the session --------------------------------------------------------------------------------------------


def test_layer_cases_give_records_of_every_implementation() -> None:
    one = replace(case(), name="short", shape=Shape(1, 4, 16, 16, kv_heads=2))
    records = harness.run([one], recipes=["bf16", "fp8_e4m3"])
    assert {(r.implementation, r.recipe) for r in records} == {
        (n, r) for n in registry.default_implementations("layer") for r in ("bf16", "fp8_e4m3")
    }
    for r in records:
        assert r.status is (
            Status.FAIL if (r.implementation, r.recipe) == ("naive_unsafe", "fp8_e4m3") else Status.PASS
        )
        assert r.errors is not None
        assert r.total_errors is not None
        assert r.margins is not None
        assert r.precision is (Status.FAIL if r.status is Status.FAIL else Status.PASS)
        assert r.shape == "64→[1, 4/2, 16, 16]"
        assert r.flops == 2 * 16 * 64 * (4 + 2) * 2 * 16 + 4 * 4 * (16 * 17 // 2) * 16


def test_decoding_cases_record_how_far_the_training_form_is(tmp_path: Path) -> None:
    one = replace(case(replace(LAYER, steps=5), Shape(1, 4, 12, 16, kv_heads=2)), name="short")
    records = harness.run([one], ["naive_masked", "online_softmax"], ["fp32", "fp8_e4m3", "fp8_e4m3_block"])
    for r in records:
        if r.recipe == "fp8_e4m3_block":
            assert r.status is Status.REFUSED
            assert "spans 128 tokens" in r.reasons[0]
            continue
        assert r.status is Status.PASS
        assert [x.name for x in r.relations] == (["training form"] if r.seed == 0 else [])
    harness.write_records(tmp_path / "r.jsonl", records)
    assert len(harness.read_records(tmp_path / "r.jsonl")) == len(records)


def test_attention_inside_a_layer_case_is_given_what_its_projections_make() -> None:
    one = case()
    x, w = make_layer(one, 0)
    inputs = make_inputs(one, 0)
    truth = layer_reference(unstored(x, w), SHAPE, CAUSAL, LAYER)
    for got, told in zip(inputs.tensors, (truth.q, truth.k, truth.v), strict=True):
        assert torch.equal(got, told)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": Shape(1, 4, 8, 16, kv_len=9)}, "one length and one head width"),
        ({"shape": Shape(1, 4, 8, 15)}, "head_dim is 15 with rope"),
        ({"layer": LayerSpec(64, steps=49)}, "steps is 49 of 48 tokens"),
        ({"layer": LayerSpec(64, steps=1), "spec": AttentionSpec()}, "a later token does not exist yet"),
        ({"layer": 3}, "layer of layer/one is 3; allowed: a harness.LayerSpec"),
        ({"extras": {"sinks": Draw("normal")}}, "a layer beside extras"),
    ],
)
def test_layer_cases_refuse_parts_that_do_not_fit(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(case(), **change)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"width": 0}, "width is 0"), ({"width": 8, "rope": -1.0}, "rope is -1.0"),
        ({"width": 8, "eps": 0.0}, "eps is 0.0"),
        ({"width": 8, "weight_scale": "row"}, "weight_scale is 'row'; allowed: channel, tensor"),
        ({"width": 8, "steps": -1}, "steps is -1"),
    ],
)  # fmt: skip
def test_layer_spec_refuses(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LayerSpec(**fields)


def test_draws_of_layers_and_of_attention_are_told_apart() -> None:
    with pytest.raises(ValueError, match="has a layer and draws 'normal'; allowed: layer, smollm2_layer"):
        make_layer(replace(case(), draw=Draw()), 0)
    with pytest.raises(ValueError, match="without a layer"):
        make_inputs(replace(case(), layer=None), 0)
    with pytest.raises(ValueError, match="wrong parameters"):
        make_layer(case(nonsense=1.0), 0)


# --- a trained layer -------------------------------------------------------------------------------------------------


def test_captured_layer_makes_the_q_k_and_v_that_the_model_captures() -> None:
    model = tiny()
    x, matrices = layer_weights("a layer", 1, 6, model)
    told = model.forward(model.tokenize("a layer")[:6])[1][1]
    shape, layer = Shape(1, 2, 6, 4, kv_heads=1), LayerSpec(8, rope=model.rope_theta)
    weights = Weights(
        **{n: w.double() for n, w in matrices.items()}, gamma=torch.ones(8), beta=torch.zeros(8)
    )
    stored = store_layer(x[None], weights, get_recipe("fp32"), layer)
    truth = layer_reference(stored, shape, CAUSAL, layer)
    expected = layer_expectations(truth, stored, shape, CAUSAL, layer, get_recipe("fp32"), [WHOLE])[WHOLE]
    for name, seen in zip("qkv", told, strict=True):
        b = expected.stages[name]
        assert bool(((seen.double()[None] - b.value).abs() <= b.bound).all()), name


def test_trained_layer_is_refused_in_one_line_where_the_model_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(*_: Any) -> Any:
        raise MissingExtra("capture needs gguf, which is not installed: pip install it")

    monkeypatch.setattr(capture_room, "load_model", absent)
    one = next(c for c in load_cases("layer") if c.draw.kind == "smollm2_layer")
    (record,) = harness.run([one], "naive_masked", "bf16")
    assert record.status is Status.REFUSED
    assert record.reasons == ("capture needs gguf, which is not installed: pip install it",)
    with pytest.raises(ValueError, match="capture needs gguf"):
        make_inputs(one, 0)


def test_layers_that_a_model_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="has no layer 2; allowed: 0 to 1"):
        layer_weights(TEXT, 2, 4, tiny())
    with pytest.raises(ValueError, match="tokens is 9; allowed: 1 to 3"):
        layer_weights("abc", 0, 9, tiny())


@pytest.mark.capture
@pytest.mark.parametrize("recipe", FOUR)
def test_trained_layer_errs_as_is_normal(recipe: str) -> None:
    one = next(c for c in load_cases("layer") if c.name == "smollm2-15")
    (record,) = harness.run([one], "naive_masked", recipe)
    assert record.status is Status.PASS, record.reasons


# --- the document ----------------------------------------------------------------------------------------------------


def test_lines_that_the_document_quotes_are_in_the_code() -> None:
    root = Path(__file__).resolve().parent.parent
    text = (root / "docs" / "attention.md").read_text(encoding="utf-8")
    seen = 0
    for part in text.split("```python\n")[1:]:
        head, *lines = (x.strip() for x in part.partition("```")[0].splitlines() if x.strip())
        source = (root / head.removeprefix("# ")).read_text(encoding="utf-8")
        for line in lines:
            assert line in source, f"{head}: {line}"
            seen += 1
    assert seen > 20
