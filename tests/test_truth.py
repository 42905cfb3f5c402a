"""The FP64 truth against a scalar oracle, and relations without a tolerance; `test_certify` holds it against balls.

TOL is derived in `problems`, which draws them.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import TOL, Problem, assert_like_oracle, assert_near, problems
from torch import Tensor

import harness.truth
from harness.ranges import Ranges
from harness.spec import AttentionSpec
from harness.truth import Truth, reference

U = 2.0**-53
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def normal(*size: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size) * std)


def qkv(b: int, h: int, kv_heads: int, length: int, s: int, d: int, e: int, std: float = 1.0) -> list[Tensor]:
    return [
        normal(b, h, length, d, seed=1, std=std),
        normal(b, kv_heads, s, d, seed=2),
        normal(b, kv_heads, s, e, seed=3),
    ]


def same_bits(a: Truth, b: Truth) -> bool:
    """Every output, NaN equal to itself and −0 to 0 (a hidden key may add a zero of either sign)."""
    pairs = [(a.out, b.out), (a.lse, b.lse), (a.row_max, b.row_max)]
    return all(
        torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in pairs
    )


# --- against the oracle -------------------------------------------------------------------------------------------


@settings(max_examples=1000)
@given(problems(made=True))
def test_every_combination_of_options_agrees_with_the_scalar_oracle(problem: Problem) -> None:
    assert_like_oracle(problem)


@settings(max_examples=300)
@given(problems(special=True))
def test_nan_and_infinities_anywhere_come_out_as_the_scalar_oracle_says(problem: Problem) -> None:
    assert_like_oracle(problem)


@settings(max_examples=100)
@given(problems(), st.sampled_from([8, 24, 100]))
def test_the_size_of_the_score_buffer_does_not_matter(problem: Problem, size: int) -> None:
    whole = problem.truth()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.truth, "BUFFER_BYTES", size)
        parts = problem.truth()
    assert_near(parts.out, whole.out, 2 * TOL)
    assert_near(parts.lse, whole.lse, TOL)
    assert_near(parts.row_max, whole.row_max, TOL)


@settings(max_examples=100)
@given(problems(special=True))
def test_collecting_ranges_changes_no_bit(problem: Problem) -> None:
    assert same_bits(problem.truth(ranges=True), problem.truth())


@settings(max_examples=150)
@given(problems(), st.integers(0, 2**32))
def test_keys_in_another_order_give_the_same_when_position_plays_no_part(problem: Problem, seed: int) -> None:
    problem.rules.update(causal=False, window=None)
    problem.extras.pop("kv_lens", None)
    s = problem.tensors[1].shape[2]
    order = np.random.default_rng(seed).permutation(s)
    q, k, v = problem.tensors
    moved = {
        n: x[..., order] if n in ("mask", "bias") and x.ndim and x.shape[-1] == s else x
        for n, x in problem.extras.items()
    }
    there = Problem([q, k[:, :, order], v[:, :, order]], problem.rules, moved).truth()
    here = problem.truth()
    assert_near(there.out, here.out, 2 * TOL)
    assert_near(there.lse, here.lse, TOL)
    assert_near(there.row_max, here.row_max, TOL)


# --- the worked example -------------------------------------------------------------------------------------------


def test_worked_example_agrees_to_the_last_digit_of_the_note() -> None:
    q, k, v = (
        torch.tensor([[x]], dtype=torch.float64)
        for x in ([[1, 0], [0, 1], [1, 1]], [[1, 1], [0, 1], [1, 0]], [[1, 0], [0, 1], [1, 1]])
    )
    note = [[0.802, 0.599], [0.599, 0.599], [0.752, 0.497]]
    assert_near(reference(q, k, v).out[0, 0], np.array(note), 0.0005)


# --- relations that need no tolerance -----------------------------------------------------------------------------

SIZES = [(1, 1, 1, 1, 1, 1, 1), (2, 4, 2, 5, 7, 3, 4), (1, 2, 1, 33, 70, 17, 9), (1, 1, 1, 300, 280, 64, 64)]
SIZE = pytest.mark.parametrize("size", SIZES, ids=str)


@SIZE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrower_inputs_give_the_bits_of_their_values_in_fp64(
    size: tuple[int, ...], dtype: torch.dtype
) -> None:
    narrow = [x.to(dtype) for x in qkv(*size)]
    spec = AttentionSpec(causal=True)
    bias = normal(size[3], size[4]).to(dtype)
    wide = reference(*(x.double() for x in narrow), spec, bias=bias.double())
    assert same_bits(reference(*narrow, spec, bias=bias), wide)


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def heads_inside(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_other(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0]


def off_by_one(x: Tensor) -> Tensor:
    """Contiguous, at an address that is no multiple of anything."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def batch_last(x: Tensor) -> Tensor:
    return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


@SIZE
@pytest.mark.parametrize("layout", [transposed, heads_inside, every_other, off_by_one, batch_last])
def test_strides_and_addresses_change_no_bit(size: tuple[int, ...], layout: Any) -> None:
    tensors, spec = qkv(*size), AttentionSpec(causal=True, window=(40, None))
    assert same_bits(reference(*map(layout, tensors), spec), reference(*tensors, spec))


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_a_sequence_alone_and_a_head_alone_have_the_bits_they_have_in_the_batch(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv(3, 4, 2, 33, 41, 17, 9))
    spec = AttentionSpec(causal=True)
    mask, lens = normal(3, 1, 33, 41, seed=4) > -1, torch.tensor([41, 7, 20])
    whole = reference(q, k, v, spec, mask=mask, kv_lens=lens)
    for b, h in itertools.product(range(3), range(4)):
        one, kv = slice(b, b + 1), slice(h // 2, h // 2 + 1)
        alone = reference(
            q[one, h : h + 1].clone(), k[one, kv].clone(), v[one, kv].clone(), spec,
            mask=mask[one].clone(), kv_lens=lens[one],
        )  # fmt: skip
        there = (slice(b, b + 1), slice(h, h + 1))
        assert same_bits(alone, Truth(whole.out[there], whole.lse[there], whole.row_max[there]))


@settings(max_examples=150)
@given(problems(), st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_a_hidden_key_has_no_effect_on_any_bit(problem: Problem, poison: float, data: st.DataObject) -> None:
    """The row sees not the key; V = one-hot tells which rows do, whatever hid it."""
    q, k, v = problem.tensors
    if not k.size * v.size:
        return
    j = data.draw(st.integers(0, k.shape[2] - 1))
    one_hot = np.zeros_like(v)
    one_hot[:, :, j] = 1.0
    sees = Problem([q, k, one_hot], problem.rules, problem.extras).truth().out[..., 0].nan_to_num(1.0) != 0
    clean = problem.truth()
    k, v = k.copy(), v.copy()
    k[:, :, j], v[:, :, j] = poison, poison
    poisoned = Problem([q, k, v], problem.rules, problem.extras).truth()
    hidden = Truth(poisoned.out[~sees], poisoned.lse[~sees], poisoned.row_max[~sees])
    assert same_bits(hidden, Truth(clean.out[~sees], clean.lse[~sees], clean.row_max[~sees]))
    if poison != poison:
        empty = torch.isneginf(clean.lse) | torch.isnan(clean.lse)
        assert bool(torch.isnan(poisoned.out[sees & ~empty]).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("score", [0.0, -800.0], ids=["heavy", "weight_underflows"])
def test_a_visible_value_that_is_not_finite_shows_in_its_channel_alone(value: float, score: float) -> None:
    q, k = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 3, 1, dtype=torch.float64)
    k[0, 0, 1] = score
    v = normal(1, 1, 3, 2)
    v[0, 0, 1, 0] = value
    out = reference(q, k, v).out[0, 0, 0]
    assert_near(out[:1], np.array([value]), 0.0)
    assert math.isfinite(out[1])


@pytest.mark.parametrize("n", [1, 3, 64, 1000, 5000])
def test_values_of_one_give_one_to_the_roundings_of_two_sums(n: int) -> None:
    """ΣP·1 ÷ ΣP: one list of numbers summed in two orders (γ_(n−1) each), and a division (u)."""
    q, k, _ = qkv(1, 2, 1, 4, n, 8, 1)
    out = reference(q, k, torch.ones(1, 1, n, 3, dtype=torch.float64)).out
    assert float((out - 1).abs().max()) <= (2 * (n - 1) + 1) * U * 1.001


def test_gradients_are_neither_kept_nor_needed() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 1, 5, 4, 3, 2))
    sinks = torch.zeros(2, requires_grad=True)
    truth = reference(
        q, k, v, AttentionSpec(causal=True), sinks=sinks, bias=normal(5, 4).requires_grad_(), ranges=True
    )
    assert not any(x.requires_grad for x in (truth.out, truth.lse, truth.row_max))


# --- degenerate sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q_len", "batch", "value_dim"])
def test_a_size_of_zero_gives_an_empty_output_of_the_right_shape(name: str) -> None:
    b, length, e = int(name != "batch"), 3 * int(name != "q_len"), 2 * int(name != "value_dim")
    truth = reference(*qkv(b, 4, 2, length, 5, 3, e), AttentionSpec(causal=True), ranges=True)
    assert truth.out.shape == (b, 4, length, e)
    assert truth.lse.shape == truth.row_max.shape == (b, 4, length)


@pytest.mark.parametrize("rule", ["zero", "nan"])
def test_no_keys_at_all_makes_every_row_empty(rule: str) -> None:
    truth = reference(*qkv(1, 2, 1, 3, 0, 4, 2), AttentionSpec(empty_row=rule))
    out, lse = (0.0, -math.inf) if rule == "zero" else (math.nan, math.nan)
    assert_near(truth.out, np.full((1, 2, 3, 2), out), 0.0)
    assert_near(truth.lse, np.full((1, 2, 3), lse), 0.0)
    assert_near(truth.row_max, np.full((1, 2, 3), -math.inf), 0.0)


def test_a_row_with_a_sink_alone_is_zero_with_the_sink_as_its_lse() -> None:
    truth = reference(*qkv(1, 2, 1, 3, 0, 4, 2), sinks=torch.tensor([0.75, -2.0], dtype=torch.float64))
    assert not truth.out.any()
    assert truth.lse[0, :, 0].tolist() == [0.75, -2.0]
    assert bool(torch.isneginf(truth.row_max).all())


def test_head_dim_zero_gives_the_mean_of_v() -> None:
    q, k, v = qkv(1, 2, 1, 3, 5, 0, 4)
    truth = reference(q, k, v)
    assert_near(truth.out, v.mean(2, keepdim=True).expand(1, 2, 3, 4), 10 * U * float(v.abs().max()))
    assert not truth.row_max.any()


# --- ranges -------------------------------------------------------------------------------------------------------


def brute_ranges(problem: Problem) -> dict[str, Any]:
    """The same facts pair by pair; (b, h, i, j) → value for every visible pair."""
    (q, k, _), rules, extras = problem.tensors, problem.rules, problem.extras
    (b, h, length, d), (kv_heads, s) = q.shape, k.shape[1:3]
    scale = rules["scale"] if rules["scale"] is not None else (d**-0.5 if d else 1.0)
    raw, score, row_sum = {}, {}, {}
    count, mass, octaves, rows = np.zeros(1100), np.zeros(1100), np.zeros(1100), 0
    for bb, hh, i in itertools.product(range(b), range(h), range(length)):
        n = int(extras["kv_lens"][bb]) if "kv_lens" in extras else s
        position = i + (n - length if rules["align"] == "bottom-right" else 0)
        own = {}
        for j in range(n):
            at = (bb, hh, i, j)
            bias = oracle.broadcast_at(extras["bias"], *at) if "bias" in extras else 0.0
            if not oracle.in_reach(j, position, rules["causal"], rules["window"]) or bias == -math.inf:
                continue
            if "mask" in extras and not oracle.broadcast_at(extras["mask"], *at):
                continue
            raw[at] = math.fsum(q[bb, hh, i] * k[bb, hh // (h // kv_heads), j])
            x = raw[at] * scale
            x = rules["softcap"] * math.tanh(x / rules["softcap"]) if rules["softcap"] is not None else x
            own[at] = score[at] = x + bias
        sink = extras["sinks"][hh] if "sinks" in extras else -math.inf
        m = max([*own.values(), sink], default=-math.inf)
        if m == -math.inf:
            continue
        p = [math.exp(x - m) for x in own.values()]
        total = math.fsum([*p, math.exp(sink - m)])
        row_sum[bb, hh, i], rows = total, rows + 1
        for x in p:
            if x:
                octave = next(e for e in range(1100) if x > 2.0 ** -(e + 1))
                count[octave] += 1
                mass[octave] += x / total
    for x in score.values():
        octaves[min(max(math.ceil(x * math.log2(math.e)), 0), 1099)] += 1
    return {
        "raw": raw,
        "score": score,
        "row_sum": row_sum,
        "count": count,
        "mass": mass,
        "octaves": octaves,
        "rows": rows,
    }


def assert_peak(peak: Any, brute: dict[tuple[int, ...], float], tol: float) -> None:
    """The largest, and at its place a value as large."""
    want = max(brute.values(), default=0.0)
    assert abs(peak.value - want) <= tol
    assert (peak.where is None) == (peak.value == 0)
    if peak.where is not None:
        assert abs(brute[peak.where[: len(next(iter(brute)))]] - want) <= tol


def assert_ranges(got: Ranges, problem: Problem, tol: float) -> None:
    want = brute_ranges(problem)
    assert_peak(got.raw, {at: abs(x) for at, x in want["raw"].items()}, tol)
    assert_peak(got.score, {at: abs(x) for at, x in want["score"].items()}, tol)
    assert_peak(got.score_max, {at: max(x, 0.0) for at, x in want["score"].items()}, tol)
    assert_peak(got.row_sum, want["row_sum"], tol)
    assert (got.pairs, got.rows) == (len(want["raw"]), want["rows"])
    square = math.fsum(x * x for x in want["raw"].values())
    assert abs(got.raw_square - square) <= 2 * tol * (1 + square)
    np.testing.assert_array_equal(got.probs_count.numpy(), want["count"])
    np.testing.assert_array_equal(got.exp_count.numpy(), want["octaves"])
    np.testing.assert_allclose(got.probs_mass.numpy(), want["mass"], rtol=0, atol=tol * (1 + want["rows"]))


@settings(max_examples=120)
@given(problems())
def test_ranges_of_every_combination_agree_with_a_count_pair_by_pair(problem: Problem) -> None:
    rng = np.random.default_rng(
        5
    )  # off the integers: a score on the edge of an octave could count on either side
    problem.tensors[:2] = [x + rng.uniform(0.01, 0.02, x.shape) for x in problem.tensors[:2]]
    problem.rules["scale"] = problem.rules["scale"] or 0.7
    if "bias" in problem.extras:
        problem.extras["bias"] = problem.extras["bias"] + rng.uniform(
            0.01, 0.02, problem.extras["bias"].shape
        )
    if "sinks" in problem.extras:
        problem.extras["sinks"] = problem.extras["sinks"] + rng.uniform(
            0.01, 0.02, problem.extras["sinks"].shape
        )
    assert_ranges(problem.truth(ranges=True).ranges, problem, TOL)


@pytest.mark.parametrize("std", [1.0, 40.0, 400.0])
def test_ranges_of_deep_rows_cover_every_octave_of_fp64(std: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.truth, "BUFFER_BYTES", 8 * 40 * 7)  # peaks have their places across blocks
    tensors = [x.numpy() for x in qkv(2, 4, 2, 23, 40, 8, 3, std=std)]
    rules = {"causal": True, "align": "bottom-right", "window": (25, None), "scale": None, "softcap": None}
    mask = np.random.default_rng(9).random((2, 1, 23, 40)) < 0.8
    problem = Problem(tensors, rules, {"mask": mask, "kv_lens": np.array([40, 15])})
    ranges = problem.truth(ranges=True).ranges
    if std == 400.0:
        assert bool((ranges.probs_count[900:] > 0).any())
    assert_ranges(ranges, problem, 40 * U * 400 * 64)  # γ_d and a few roundings of |q·k| ≤ 400·64


# --- mistakes -----------------------------------------------------------------------------------------------------

Q, K, V = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 6)
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"k": K[:1]}, "batch sizes are q 2, k 1, v 2; allowed: one for all"),
    "kv heads differ": ({"v": V[:, :1]}, "kv heads are k 2, v 1; allowed: one for both"),
    "no heads": ({"q": Q[:, :0]}, "q has 0 heads and k 2; allowed: at least 1, and q's a multiple"),
    "no kv heads": ({"k": K[:, :0], "v": V[:, :0]}, "q has 4 heads and k 0; allowed: at least 1"),
    "gqa": ({"q": Q[:, :3]}, "q has 3 heads and k 2; allowed: at least 1, and q's a multiple of k's (GQA)"),
    "head_dim": ({"k": K[..., :7]}, "head_dim is q 8, k 7; allowed: one for both"),
    "kv_len": ({"v": V[:, :, :4]}, "kv_len is k 5, v 4; allowed: one for both"),
    "rank": ({"q": Q[0]}, "q is torch.float32 (4, 3, 8); allowed: a torch tensor [B, H, L, D]"),
    "list": ({"q": [1.0]}, "q is 'list'; allowed: a torch tensor [B, H, L, D]"),
    "numpy": ({"v": V.numpy()}, "v is 'ndarray'; allowed: a torch tensor [B, H, L, D]"),
    "none": ({"k": None}, "k is 'NoneType'; allowed: a torch tensor"),
    "integers": ({"q": Q.long()}, "q is torch.int64; allowed: torch.float64, torch.float32"),
    "bool": ({"k": K.bool()}, "k is torch.bool; allowed: torch.float64"),
    "complex": ({"v": V.to(torch.complex64)}, "v is torch.complex64; allowed: torch.float64"),
    "device": ({"k": K.to("meta")}, "k is on meta and q on cpu; allowed: one device for all"),
    "mask of numbers": ({"mask": torch.zeros(3, 5)}, "mask is torch.float32 (3, 5); allowed: a bool tensor"),
    "mask list": ({"mask": [[True]]}, "mask is 'list'; allowed: a bool tensor"),
    "mask shape": (
        {"mask": torch.ones(5, 3, dtype=torch.bool)},
        "mask is torch.bool (5, 3); allowed: a shape that broadcasts to [B, H, L, S] = [2, 4, 3, 5]",
    ),
    "mask of kv heads": ({"mask": torch.ones(2, 2, 3, 5, dtype=torch.bool)}, "broadcasts to [B, H, L, S]"),
    "mask rank": ({"mask": torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)}, "broadcasts to [B, H, L, S]"),
    "bias of bool": ({"bias": torch.ones(3, 5, dtype=torch.bool)}, "bias is torch.bool (3, 5); allowed: a floating"),
    "bias list": ({"bias": [0.0]}, "bias is 'list'; allowed: a floating-point tensor"),
    "bias shape": ({"bias": torch.zeros(4, 5)}, "bias is torch.float32 (4, 5); allowed: a shape that broadcasts"),
    "sinks size": ({"sinks": torch.zeros(2)}, "sinks is torch.float32 (2,); allowed: a floating-point tensor [4]"),
    "sinks integers": ({"sinks": torch.zeros(4).long()}, "sinks is torch.int64 (4,); allowed: a floating-point"),
    "sinks text": ({"sinks": "zero"}, "sinks is 'str' that is no tensor; allowed: a floating-point tensor [4]"),
    "lens size": ({"kv_lens": torch.tensor([1, 2, 3])}, "kv_lens is torch.int64 (3,); allowed: integers [2]"),
    "lens floats": ({"kv_lens": torch.tensor([1.0, 2.0])}, "kv_lens is torch.float32 (2,); allowed: integers [2]"),
    "lens bool": ({"kv_lens": torch.tensor([True, True])}, "kv_lens is torch.bool (2,); allowed: integers [2]"),
    "lens complex": ({"kv_lens": torch.tensor([1j, 2j])}, "kv_lens is torch.complex64 (2,); allowed: integers"),
    "lens ragged": ({"kv_lens": [[1], [1, 2]]}, "kv_lens is 'list' that is no tensor; allowed: integers [2]"),
    "lens negative": ({"kv_lens": torch.tensor([-1, 2])}, "kv_lens is [-1, 2]; allowed: 0 to kv_len = 5"),
    "lens too long": ({"kv_lens": [6, 2]}, "kv_lens is [6, 2]; allowed: 0 to kv_len = 5"),
    "spec": ({"spec": {"causal": True}}, "spec is {'causal': True}; allowed: a harness.AttentionSpec"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_line_with_what_is_allowed(name: str) -> None:
    changes, message = MISTAKES[name]
    with pytest.raises(ValueError, match="allowed: ") as caught:
        reference(**{"q": Q, "k": K, "v": V, **changes})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


WRONG_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"align": "left"}, "align is 'left'; allowed: bottom-right, top-left"),
    ({"empty_row": "one"}, "empty_row is 'one'; allowed: zero, nan"),
    ({"scale": math.nan}, "scale is nan; allowed: a finite number, up to FP32's"),
    ({"scale": -math.inf}, "scale is -inf; allowed: a finite number, up to FP32's"),
    ({"softcap": 0.0}, "softcap is 0.0; allowed: a finite number > 0 that FP32 holds"),
    ({"softcap": -1.0}, "softcap is -1.0; allowed: a finite number > 0"),
    ({"softcap": math.inf}, "softcap is inf; allowed: a finite number > 0"),
    ({"softcap": math.nan}, "softcap is nan; allowed: a finite number > 0"),
    (
        {"window": (-1, 0)},
        "window is (-1, 0); allowed: a pair (left, right), each an integer from 0 to 2**62 or None",
    ),
    ({"window": 5}, "window is 5; allowed: a pair (left, right)"),
    ({"window": (1, 2, 3)}, "window is (1, 2, 3); allowed: a pair (left, right)"),
    ({"window": (1.0, None)}, "window is (1.0, None); allowed: a pair (left, right)"),
    ({"window": (True, None)}, "window is (True, None); allowed: a pair (left, right)"),
]


@pytest.mark.parametrize(("values", "message"), WRONG_SPECS, ids=lambda x: str(x)[:30])
def test_a_wrong_rule_is_told_in_one_line_with_what_is_allowed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="allowed: ") as caught:
        AttentionSpec(**values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
