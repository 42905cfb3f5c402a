"""ALiBi, padding, packed sequences and sentinel biases against loops, published values and the unpadded problem."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import in_reach
from torch import Tensor
from torch.nn.functional import pad

from harness import AttentionSpec, get, reference
from harness.formats import get_format
from harness.lies import inspect_bias
from harness.options import (
    alibi_bias,
    alibi_slopes,
    check_cu_seqlens,
    cu_seqlens,
    packed_mask,
    padding_mask,
    run_packed,
)

INF, U = math.inf, 2.0**-53
CAUSAL = AttentionSpec(causal=True)
SPECS = (
    AttentionSpec(),
    CAUSAL,
    AttentionSpec(causal=True, window=(1, 0)),
    AttentionSpec(window=(2, 1)),
    AttentionSpec(causal=True, align="top-left"),
    AttentionSpec(window=(1, 2), align="top-left"),
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def under_fp64(name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: get(name).run(*args, recipe="fp64", **kwargs)


RUNS: dict[str, Callable[..., Any]] = {
    "reference": reference,
    **{name: under_fp64(name) for name in ("naive_masked", "online_softmax")},
}
RUN = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
SPEC = pytest.mark.parametrize("spec", SPECS, ids=str)
LENGTHS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=5)


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(q_len: int, kv_len: int, seed: int = 0, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, ...]:
    """[1, H, T, D], with D = 5 and E = 3."""
    return (
        randn(1, heads, q_len, 5, seed=seed),
        randn(1, kv_heads, kv_len, 5, seed=seed + 1),
        randn(1, kv_heads, kv_len, 3, seed=seed + 2),
    )


def bound(q: Tensor, k: Tensor, v: Tensor, bias: float = 0.0) -> float:
    """How far two FP64 evaluations may lie apart, in out (|v| ≤ max) and lse.

    Each: a score within (d + 4)·u·A of a = Σ|q||k|·scale ≤ A, s − m and exp add (2A + 2)u, a weight's share of out
    doubles that, the sums of n terms add 2n·u and the rescaling of one block 6u; lse adds its own rounding.
    """
    d, n = q.shape[-1], max(k.shape[2], 1)
    a = float(q.abs().amax() * k.abs().amax()) * d**0.5 + bias if q.numel() and k.numel() else bias
    top = max(1.0, float(v.abs().amax()) if v.numel() else 1.0)
    return 2 * U * (2 * ((d + 6) * a + 2) + 2 * n + 16) * top


def assert_near(a: Tensor, b: Tensor, most: float) -> None:
    """Infinities equal, nothing NaN, the rest within `most`."""
    assert a.shape == b.shape
    assert not a.isnan().any()
    assert torch.equal(a.isinf(), b.isinf())
    off = torch.where(a.isinf(), (a != b).double(), (a - b).abs().nan_to_num(0.0))
    assert off.numel() == 0 or float(off.max()) <= most, f"off by {float(off.max())}, but should be ≤ {most}"


# --- ALiBi -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (40, [k / 4 for k in range(1, 33)] + [k / 8 for k in range(1, 16, 2)]),
    ],
)
def test_slopes_are_the_published_powers_in_order(heads: int, exponents: list[float]) -> None:
    slopes = alibi_slopes(heads)
    assert slopes.dtype == torch.float64
    assert len(slopes) == heads
    for slope, e in zip(slopes.tolist(), exponents, strict=True):
        power, step = Fraction(slope), Fraction(U) * 2
        assert (power * (1 - step)) ** 8 < Fraction(1, 2 ** int(8 * e)) < (power * (1 + step)) ** 8
        if e == int(e):
            assert slope == 2.0**-e


def test_slopes_of_twelve_heads_run_from_a_half_to_0_0884() -> None:  # F46
    slopes = alibi_slopes(12)
    assert slopes[0] == 0.5
    assert round(float(slopes[-1]), 4) == 0.0884
    assert round(float(slopes[8]), 4) == 0.7071


@given(st.integers(1, 130))
def test_slopes_are_those_of_the_power_below_then_every_other_of_the_power_above(heads: int) -> None:
    n = 2 ** int(math.log2(heads))
    expected = torch.cat([alibi_slopes(n), alibi_slopes(2 * n)[0::2][: heads - n]])
    assert torch.equal(alibi_slopes(heads), expected)
    assert len(set(expected.tolist())) == heads


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 40])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 3), (2, 5), (4, 2), (1, 0), (0, 3)])
def test_bias_is_minus_slope_times_distance(
    heads: int, align: str, symmetric: bool, q_len: int, kv_len: int
) -> None:
    bias = alibi_bias(heads, q_len, kv_len, align, symmetric=symmetric)
    assert bias.shape == (1, heads, q_len, kv_len)
    assert not torch.signbit(bias[bias == 0]).any()
    slopes = alibi_slopes(heads).tolist()
    for h, i, j in itertools.product(range(heads), range(q_len), range(kv_len)):
        position = i + (kv_len - q_len if align == "bottom-right" else 0)
        distance = -abs(j - position) if symmetric else j - position
        assert float(bias[0, h, i, j]) == slopes[h] * distance


def test_bias_of_ragged_lengths_meets_each_sequences_own_last_key() -> None:
    ragged = alibi_bias(6, 2, 5, kv_lens=[5, 3])
    assert ragged.shape == (2, 6, 2, 5)
    assert torch.equal(ragged[:1], alibi_bias(6, 2, 5))
    assert torch.equal(ragged[1:, ..., :3], alibi_bias(6, 2, 3))
    assert torch.equal(
        alibi_bias(6, 2, 5, "top-left", kv_lens=torch.tensor([3])), alibi_bias(6, 2, 5, "top-left")
    )


@RUN
def test_weights_of_twelve_heads_fall_by_the_slope_per_key(run: Callable[..., Any]) -> None:  # F46
    q, k, v = torch.zeros(1, 12, 1, 4).double(), randn(1, 12, 6, 4), torch.eye(6).double().expand(1, 12, 6, 6)
    weights = run(q, k, v, CAUSAL, bias=alibi_bias(12, 1, 6)).out[0, :, 0]
    ratio = weights[:, 1:] / weights[:, :-1]
    assert torch.allclose(ratio, alibi_slopes(12).exp()[:, None].expand_as(ratio), rtol=40 * U * 8, atol=0.0)


@RUN
def test_both_futures_are_one_under_causality(run: Callable[..., Any]) -> None:
    q, k, v = qkv(3, 5)
    one, other = (run(q, k, v, CAUSAL, bias=alibi_bias(4, 3, 5, symmetric=s)).out for s in (True, False))
    assert torch.equal(one, other)


# --- padding -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(["left", "right"]))
def test_padding_mask_shows_the_real_slots(lengths: list[int], side: str) -> None:
    mask = padding_mask(lengths, 5, side)
    assert mask.shape == (len(lengths), 1, 1, 5)
    for b, n in enumerate(lengths):
        expected = [j < n if side == "right" else j >= 5 - n for j in range(5)]
        assert mask[b, 0, 0].tolist() == expected


def padded(
    pieces: list[tuple[Tensor, ...]], q_len: int, kv_len: int, side: str, poison: float
) -> tuple[Tensor, ...]:
    """The sequences in one batch; padded keys hold `poison`, padded queries 7."""
    out = []
    for which, (length, fill) in enumerate([(q_len, 7.0), (kv_len, poison), (kv_len, poison)]):
        rows = []
        for piece in pieces:
            x = piece[which]
            filler = x.new_full((*x.shape[:2], length - x.shape[2], x.shape[3]), fill)
            rows.append(torch.cat([filler, x] if side == "left" else [x, filler], 2))
        out.append(torch.cat(rows))
    return tuple(out)


def real_rows(x: Tensor, b: int, m: int, side: str) -> Tensor:
    return x[b : b + 1, :, x.shape[2] - m :] if side == "left" else x[b : b + 1, :, :m]


def same_position(spec: AttentionSpec, side: str, equal_pads: bool) -> bool:
    """The four formulas of `padding_mask`."""
    if spec.causal or spec.window:
        return (side, spec.align) in (("left", "bottom-right"), ("right", "top-left")) or equal_pads
    return True


@RUN
@SPEC
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("poison", [math.nan, 1e30])
@pytest.mark.parametrize("equal_pads", [True, False])
def test_padded_rows_equal_the_unpadded_run(
    run: Callable[..., Any], spec: AttentionSpec, side: str, poison: float, equal_pads: bool
) -> None:  # F03, F05
    if not same_position(spec, side, equal_pads):
        spec = AttentionSpec()
    lengths = [(4, 6), (1, 3), (2, 4), (0, 2)] if equal_pads else [(2, 6), (4, 1), (3, 3), (4, 0)]
    pieces = [qkv(m, n, seed=9 * i) for i, (m, n) in enumerate(lengths)]
    q, k, v = padded(pieces, 4, 6, side, poison)
    got = run(q, k, v, spec, mask=padding_mask([n for _, n in lengths], 6, side))
    for b, ((m, _), piece) in enumerate(zip(lengths, pieces, strict=True)):
        alone = run(*piece, spec)
        assert_near(real_rows(got.out, b, m, side), alone.out, bound(*piece))
        assert_near(real_rows(got.lse, b, m, side), alone.lse, bound(*piece))


@RUN
@pytest.mark.parametrize("side", ["left", "right"])
def test_unequal_pads_move_the_rule_exactly_as_the_formula_says(run: Callable[..., Any], side: str) -> None:
    align, (m, n) = ("top-left" if side == "left" else "bottom-right"), (3, 2)
    piece = qkv(m, n)
    q, k, v = padded([piece], 4, 6, side, math.nan)
    got = run(q, k, v, AttentionSpec(causal=True, align=align), mask=padding_mask([n], 6, side))
    moved = (4 - m) - (6 - n) if side == "left" else 6 - 4
    rule = torch.tensor([[c <= r + moved for c in range(n)] for r in range(m)])
    assert_near(real_rows(got.out, 0, m, side), run(*piece, mask=rule).out, bound(*piece))


@RUN
@pytest.mark.parametrize("side", ["left", "right"])
def test_with_equal_scores_padding_changes_no_bit(run: Callable[..., Any], side: str) -> None:
    lengths, v = [5, 2, 1], torch.arange(10.0).double().view(1, 1, 5, 2)
    pieces = [(torch.zeros(1, 1, n, 3).double(), randn(1, 1, n, 3), v[:, :, :n]) for n in lengths]
    q, k, values = padded(pieces, 5, 5, side, math.nan)
    got = run(q * 0, k, values, CAUSAL, mask=padding_mask(lengths, 5, side))
    for b, (n, piece) in enumerate(zip(lengths, pieces, strict=True)):
        assert torch.equal(real_rows(got.out, b, n, side), run(*piece, CAUSAL).out)


@RUN
def test_kv_lens_are_right_padding_that_moves_bottom_right(run: Callable[..., Any]) -> None:
    lengths = [4, 6, 3]
    pieces = [qkv(3, n, seed=n) for n in lengths]
    q, k, v = padded(pieces, 3, 6, "right", math.nan)
    got = run(q, k, v, CAUSAL, kv_lens=lengths)
    for b, piece in enumerate(pieces):
        assert_near(got.out[b : b + 1], run(*piece, CAUSAL).out, bound(*piece))
    by_mask = run(q, k, v, mask=padding_mask(lengths, 6)).out
    assert_near(by_mask, run(q, k, v, kv_lens=lengths).out, bound(q, k.nan_to_num(0), v.nan_to_num(0)))


@RUN
def test_left_padded_query_rows_under_causality_are_empty(run: Callable[..., Any]) -> None:  # F05
    pieces = [qkv(33, 33), qkv(6, 6, seed=3)]
    q, k, v = padded(pieces, 33, 33, "left", 0.0)
    got = run(q, k, v, CAUSAL, mask=padding_mask([33, 6], 33, "left"))
    assert not got.out[1, :, :27].any()
    assert torch.all(got.lse[1, :, :27] == -INF)
    assert torch.isfinite(got.lse[1, :, 27:]).all()


@RUN
def test_transposed_padding_mask_empties_padded_queries(run: Callable[..., Any]) -> None:
    pieces = [qkv(2, 4), qkv(3, 1, seed=3)]
    q, k, v = padded(pieces, 3, 4, "right", math.nan)
    got = run(q, k, v, mask=padding_mask([4, 1], 4) & padding_mask([2, 3], 3).mT)
    assert (got.lse[0] == -INF).tolist() == [[False, False, True]] * 4
    assert not got.out[0, :, 2].any()
    assert torch.isfinite(got.lse[1]).all()


# --- packed sequences --------------------------------------------------------------------------------------------


@given(LENGTHS, st.sampled_from(SPECS))
def test_packed_mask_is_each_sequences_own_rule(lengths: list[tuple[int, int]], spec: AttentionSpec) -> None:
    cu_q, cu_k = (cu_seqlens([pair[i] for pair in lengths]) for i in (0, 1))
    mask = packed_mask(cu_q, cu_k, spec.causal, spec.window, spec.align)
    assert mask.shape == (1, 1, int(cu_q[-1]), int(cu_k[-1]))
    expected = torch.zeros(mask.shape, dtype=torch.bool)
    for (m, n), q0, k0 in zip(lengths, cu_q.tolist(), cu_k.tolist(), strict=False):
        for r, c in itertools.product(range(m), range(n)):
            position = r + (n - m if spec.align == "bottom-right" else 0)
            expected[0, 0, q0 + r, k0 + c] = in_reach(c, position, spec.causal, spec.window)
    assert torch.equal(mask, expected)


@RUN
@settings(max_examples=25)
@given(lengths=LENGTHS, spec=st.sampled_from(SPECS), thd=st.booleans())
def test_packed_by_mask_and_one_by_one_agree(
    run: Callable[..., Any], lengths: list[tuple[int, int]], spec: AttentionSpec, thd: bool
) -> None:  # F17
    cu_q, cu_k = (cu_seqlens([pair[i] for pair in lengths]) for i in (0, 1))
    q, k, v = qkv(int(cu_q[-1]), int(cu_k[-1]))
    whole = run(
        q, k, v, replace(spec, causal=False, window=None),
        mask=packed_mask(cu_q, cu_k, spec.causal, spec.window, spec.align),
    )  # fmt: skip
    tensors = [x[0].transpose(0, 1) if thd else x for x in (q, k, v)]
    packed = run_packed(run, *tensors, cu_q, cu_k, spec)
    out, lse = packed.out, packed.lse
    assert lse is not None
    if thd:
        assert out.is_contiguous()
        out, lse = out.transpose(0, 1)[None], lse[None]
    assert_near(out, whole.out, bound(q, k, v))
    assert_near(lse, whole.lse, bound(q, k, v))


@RUN
def test_packed_results_are_the_bits_of_each_sequence_alone(run: Callable[..., Any]) -> None:
    q, k, v = qkv(8, 8)
    packed = run_packed(run, q, k, v, [0, 3, 3, 8], spec=CAUSAL)
    for at in (slice(0, 3), slice(3, 8)):
        alone = run(*(x[:, :, at] for x in (q, k, v)), CAUSAL)
        assert torch.equal(packed.out[:, :, at], alone.out)
        assert packed.lse is not None
        assert torch.equal(packed.lse[:, :, at], alone.lse)


@RUN
def test_another_sequence_moves_no_bit_of_this_one(run: Callable[..., Any]) -> None:  # F17
    q, k, v = qkv(8, 8)
    mask, outs = packed_mask([0, 3, 8], causal=True), []
    for poison in (0.0, math.nan, INF):
        k[:, :, 3:], v[:, :, 3:] = poison, poison
        one_by_one = run_packed(run, q, k, v, [0, 3, 8], spec=CAUSAL).out[:, :, :3]
        by_mask = run(q, k, v, mask=mask).out[:, :, :3]
        assert_near(by_mask, one_by_one, bound(q, k[:, :, :3], v[:, :, :3]))
        outs.append(one_by_one)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@RUN
def test_packed_extras_are_cut_to_each_sequence(run: Callable[..., Any]) -> None:
    q, k, v = qkv(7, 9)
    bias, sinks = randn(4, 7, 9, seed=5), randn(4, seed=6)
    mask = randn(1, 1, 1, 9, seed=7) > -0.5
    packed = run_packed(
        run, q, k, v, [0, 2, 7], [0, 5, 9], CAUSAL, bias=bias, sinks=sinks, mask=mask, kv_lens=[4, 3]
    )
    # Two queries with 4 of 5 keys, then five with 3 of 4: the last query meets the last key that is left.
    first, second = (packed_mask([0, m], [0, n], causal=True) for m, n in ((2, 4), (5, 3)))
    blocks = pad(first, (0, 5, 0, 5)) | pad(second, (5, 1, 2, 0))
    whole = run(q, k, v, bias=bias, sinks=sinks, mask=mask & blocks)
    most = bound(q, k, v, float(bias.abs().max()))
    assert_near(packed.out, whole.out, most)
    assert packed.lse is not None
    assert_near(packed.lse, whole.lse, most)


@RUN
def test_packed_alibi_of_equal_lengths_is_one_bias_for_all(run: Callable[..., Any]) -> None:
    q, k, v = qkv(8, 8)
    packed = run_packed(run, q, k, v, [0, 3, 8], spec=CAUSAL, bias=alibi_bias(4, 8, 8))
    for at, n in ((slice(0, 3), 3), (slice(3, 8), 5)):
        alone = run(*(x[:, :, at] for x in (q, k, v)), CAUSAL, bias=alibi_bias(4, n, n))
        assert torch.equal(packed.out[:, :, at], alone.out)


def test_packed_scales_of_a_token_are_cut_and_sequences_without_queries_not_run() -> None:
    seen: list[tuple[Any, ...]] = []

    def run(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, scales: Any, block: int) -> Any:
        seen.append((scales, block))
        return SimpleNamespace(out=q, lse=None)

    q, k, v = qkv(5, 5)
    per_token = torch.arange(5.0).view(1, 1, 5, 1)
    packed = run_packed(run, q, k, v, [0, 2, 2, 5], scales=(per_token, 2.0, None), block=3)
    assert [s[0].flatten().tolist() for s, _ in seen] == [[0.0, 1.0], [2.0, 3.0, 4.0]]
    assert all(s[1:] == (2.0, None) and block == 3 for s, block in seen)
    assert packed.lse is None
    assert torch.equal(packed.out, q)


@RUN
def test_sequence_without_keys_gives_empty_rows_by_the_rule(run: Callable[..., Any]) -> None:
    q, k, v = qkv(3, 2)
    for rule, out in (("zero", 0.0), ("nan", math.nan)):
        packed = run_packed(run, q, k, v, [0, 2, 3], [0, 0, 2], AttentionSpec(empty_row=rule))
        assert torch.equal(
            packed.out[:, :, :2].nan_to_num(5.0), torch.full((1, 4, 2, 3), out).double().nan_to_num(5.0)
        )
        assert torch.isfinite(packed.out[:, :, 2]).all()


@RUN
def test_packed_without_any_query_is_empty_in_the_runs_dtype(run: Callable[..., Any]) -> None:
    q, k, v = (x[0].transpose(0, 1) for x in qkv(0, 4))
    packed = run_packed(run, q, k, v, [0, 0, 0], [0, 1, 4], kv_lens=[1, 2])
    assert packed.out.shape == (0, 4, 3)
    assert packed.out.dtype == torch.float64
    assert packed.lse is not None
    assert packed.lse.shape == (4, 0)


def test_packed_run_under_a_low_precision_recipe_is_in_its_dtype() -> None:
    q, k, v = (x.to(torch.bfloat16).double() for x in qkv(5, 5))
    packed = run_packed(get("online_softmax").run, q, k, v, [0, 2, 5], recipe="bf16")
    assert packed.out.dtype == torch.bfloat16


# --- masks that lie ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", DTYPES)
def test_one_finfo_min_is_a_sentinel_that_still_hides(fmt: str) -> None:
    lies = inspect_bias(torch.tensor([[0.0, torch.finfo(DTYPES[fmt]).min, -INF]]), fmt)
    assert (lies.sentinels.item(), lies.hidden.item(), lies.overflowing.item()) == (1, 1, 0)
    assert lies.visible.item() == 1
    assert not lies.sentinel_rows.any()
    assert not lies.emptied_rows.any()
    assert not lies.honest


@pytest.mark.parametrize("fmt", DTYPES)
def test_two_finfo_min_overflow_in_their_format(fmt: str) -> None:
    low = torch.finfo(DTYPES[fmt]).min
    bias = torch.tensor(
        [[0.0, 2.0 * low, low], [2.0 * low, 2.0 * low, low], [2.0 * low] * 3], dtype=torch.float64
    )
    lies = inspect_bias(bias, fmt)
    assert lies.overflowing.tolist() == [1, 2, 3]
    assert lies.sentinel_rows.tolist() == [False, True, True]
    assert lies.emptied_rows.tolist() == [False, False, True]
    assert lies.visible.tolist() == [1, 1, 0]
    assert "NaN without a rule" in str(lies)
    assert not inspect_bias(bias, "fp64").overflowing.any()


@pytest.mark.parametrize("fmt", DTYPES)
def test_two_finfo_min_added_in_the_dtype_are_already_hidden(fmt: str) -> None:
    low = torch.full((1, 2), torch.finfo(DTYPES[fmt]).min, dtype=DTYPES[fmt])
    lies = inspect_bias(low + low, fmt)
    assert (lies.hidden.item(), lies.sentinels.item(), lies.overflowing.item()) == (2, 0, 0)
    assert not lies.sentinel_rows.any()  # honestly empty
    assert lies.honest
    assert inspect_bias(0.0 * (low + low), fmt).undefined.item() == 2  # 0·(−∞), a mask applied by product


@pytest.mark.parametrize(("value", "fmt", "gone"), [
    (-1e4, "fp16", 0), (-1e4, "bf16", 0), (-1e4, "fp32", 0), (-1e9, "bf16", 0), (-1e9, "fp32", 0), (-1e9, "fp16", 1),
    (-65504.0, "bf16", 0), (-3.4e38, "fp16", 1),
])  # fmt: skip
def test_conventions_are_sentinels_in_every_format(value: float, fmt: str, gone: int) -> None:
    bias = torch.tensor([[0.0, value + 8.0]], dtype=torch.float64)  # with a real bias on top
    stored = bias.to(DTYPES[fmt])
    for b in (bias, stored) if not gone else (bias,):
        lies = inspect_bias(b, fmt)
        assert (lies.sentinels.item(), lies.overflowing.item(), lies.visible.item()) == (1, gone, 1)


@RUN
def test_row_of_sentinels_is_uniform_over_hidden_keys_and_not_empty(run: Callable[..., Any]) -> None:
    q, k, v = qkv(2, 4)
    low = torch.finfo(torch.float32).min
    bias = torch.tensor([[0.0, 0.0, low, low], [low] * 4], dtype=torch.float64)
    lies = inspect_bias(bias, "fp32", scores=q @ k.repeat_interleave(2, 1).mT)
    assert lies.sentinel_rows.tolist() == [[[False, True]] * 4]
    assert lies.visible.tolist() == [[[2, 4]] * 4]  # FP32 absorbs the scores: the weights are equal
    assert "row [0, 0, 1]: every key left is a sentinel; the weight goes to 4 keys" in str(lies)
    got = run(q, k, v, bias=bias)
    assert_near(got.out[:, :, 1], v.mean(2).repeat_interleave(2, 1), bound(q, k, v))
    assert torch.isfinite(got.lse).all()


def test_emptied_row_is_where_an_eager_fp16_run_parts_from_the_truth() -> None:
    q, k, v = (x.half().double() for x in qkv(1, 3))
    bias = torch.full((1, 3), 2.0 * torch.finfo(torch.float16).min, dtype=torch.float64)
    assert inspect_bias(bias, "fp16").emptied_rows.item()
    eager = get("naive_masked").run(q, k, v, bias=bias, recipe="fp16_eager")
    assert not eager.out.any()
    assert torch.isfinite(reference(q, k, v, bias=bias).lse).all()


def test_causal_mask_leaves_left_padding_rows_with_sentinels_alone() -> None:  # F05 with finfo.min
    low = torch.finfo(torch.bfloat16).min
    bias = torch.where(padding_mask([4, 2], 4, "left"), 0.0, low)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    lies = inspect_bias(bias, "bf16", mask=causal)
    assert lies.sentinel_rows.squeeze(1).tolist() == [[False] * 4, [True, True, False, False]]
    assert lies.visible.squeeze(1).tolist() == [[1, 2, 3, 4], [1, 2, 1, 2]]
    assert not inspect_bias(bias, "bf16").sentinel_rows.any()


@pytest.mark.parametrize("fmt", DTYPES)
def test_weights_count_until_the_format_rounds_them_to_zero(fmt: str) -> None:
    f = get_format(fmt)
    edge = math.log(f.min_subnormal / 2)
    keys = torch.tensor([[0.0, edge * 0.99, edge * 1.01]], dtype=torch.float64)
    assert inspect_bias(keys, fmt).visible.item() == 2
    assert inspect_bias(torch.zeros(1, 3), fmt, scores=keys + 3.0).visible.item() == 2


def test_non_finite_entries_make_a_row_undefined_and_a_mask_removes_them() -> None:
    bias = torch.tensor([[0.0, math.nan], [0.0, INF], [-INF, -INF]])
    lies = inspect_bias(bias, "fp16")
    assert lies.undefined.tolist() == [1, 1, 0]
    assert lies.visible.tolist() == [0, 0, 0]
    masked = inspect_bias(bias, "fp16", mask=torch.tensor([True, False]))
    assert masked.honest
    assert masked.hidden.tolist() == [1, 1, 2]
    poisoned = inspect_bias(torch.zeros(1, 2), "fp16", scores=torch.tensor([[1.0, math.nan]]),
                            mask=torch.tensor([True, False]))  # fmt: skip
    assert (poisoned.visible.item(), poisoned.undefined.item()) == (1, 0)


@pytest.mark.parametrize(
    ("bias", "score", "hidden", "overflowing", "undefined"),
    [
        (-131008.0, 70000.0, 0, 0, 1),  # each is rounded before the sum: −∞ + ∞
        (-INF, INF, 0, 0, 1),
        (-INF, math.nan, 0, 0, 1),
        (0.0, -INF, 1, 0, 0),
        (-65504.0, -20.0, 0, 1, 0),
        (65504.0, 20.0, 0, 0, 1),
    ],
)
def test_one_key_is_hidden_or_overflowing_or_undefined(
    bias: float, score: float, hidden: int, overflowing: int, undefined: int
) -> None:
    b, s = (torch.tensor([[x]], dtype=torch.float64) for x in (bias, score))
    lies = inspect_bias(b, "fp16", scores=s)
    assert [x.item() for x in (lies.hidden, lies.overflowing, lies.undefined)] == [
        hidden,
        overflowing,
        undefined,
    ]


def test_row_of_overflow_and_honest_infinities_is_emptied() -> None:
    lies = inspect_bias(torch.tensor([[-131008.0, -INF], [-INF, -INF], [-131008.0, 0.0]]), "fp16")
    assert lies.emptied_rows.tolist() == [True, False, False]


def test_long_alibi_reads_as_sentinels_until_the_threshold_is_lowered() -> None:
    bias = alibi_bias(8, 1, 12_000)
    assert inspect_bias(bias, "fp32").sentinels[0, 0].item() == 12_000 - 10_000
    assert inspect_bias(bias, "fp32", threshold=-1e6).honest


def test_bias_without_keys_or_rows_has_nothing_to_say() -> None:
    for size in ((2, 0), (0, 3)):
        lies = inspect_bias(torch.zeros(size), "fp16")
        assert lies.honest
        assert not lies.sentinel_rows.any()
        assert "hides by −∞ alone" in str(lies)


def test_text_counts_rows_it_does_not_show() -> None:
    text = str(inspect_bias(torch.full((9, 2), -1e4), "fp16"))
    assert text.count("every key left is a sentinel") == 4
    assert "9 sentinel rows in all" in text
    assert "effectively visible keys per row: 2" in text


PALETTE = (0.0, 1.0, -8.0, -16.0, -20.0, -96.0, -9984.0, -32768.0, -65504.0, -INF, INF, math.nan)


@given(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.tuples(st.sampled_from(PALETTE), st.sampled_from(PALETTE[:8])), min_size=1, max_size=5),
)
def test_inspection_agrees_with_a_loop_in_the_dtype(fmt: str, pairs: list[tuple[float, float]]) -> None:
    dtype, least = DTYPES[fmt], get_format(fmt).min_subnormal
    bias, scores = (torch.tensor([list(x)], dtype=torch.float64) for x in zip(*pairs, strict=True))
    sums = [float(torch.tensor(b, dtype=dtype) + torch.tensor(s, dtype=dtype)) for b, s in pairs]
    broken = any(math.isnan(t) or t == INF for t in sums) or all(t == -INF for t in sums)
    lies = inspect_bias(bias, fmt, scores=scores)
    assert lies.sentinels.item() == sum(math.isfinite(b) and b <= -5000 for b, _ in pairs)
    assert lies.overflowing.item() == sum(
        math.isfinite(b) and t == -INF for (b, _), t in zip(pairs, sums, strict=True)
    )
    assert lies.undefined.item() == sum(math.isnan(t) or t == INF for t in sums)
    assert lies.hidden.item() == sum(b == -INF for b, _ in pairs)
    assert lies.visible.item() == (0 if broken else sum(math.exp(t - max(sums)) > least / 2 for t in sums))


# --- mistakes ----------------------------------------------------------------------------------------------------

Q, K, V = qkv(5, 5)
B = torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: alibi_slopes(0), "heads is 0; allowed: an integer ≥ 1"),
        (lambda: alibi_slopes(True), "heads is True"),
        (lambda: alibi_bias(2, -1, 3), "q_len is -1"),
        (lambda: alibi_bias(2, 1, 3.0), "kv_len is 3.0"),
        (lambda: alibi_bias(2, 1, 3, "middle"), "align is 'middle'; allowed: bottom-right, top-left"),
        (lambda: alibi_bias(2, 1, 3, kv_lens=[4]), r"kv_lens is \[4\]; allowed: integers \[B\], each 0 to 3"),
        (lambda: padding_mask([1.5], 3), r"lengths is \[1.5\]; allowed"),
        (lambda: padding_mask([-1], 3), r"lengths is \[-1\]; allowed"),
        (lambda: padding_mask(2, 3), "lengths is 2; allowed"),
        (lambda: padding_mask("ab", 3), "lengths is 'ab'; allowed"),
        (lambda: padding_mask([1], 3, "both"), "side is 'both'; allowed: right, left"),
        (lambda: padding_mask([1], -3), "kv_len is -3"),
        (lambda: cu_seqlens([3, -1]), "a length is -1"),
        (lambda: check_cu_seqlens([]), r"cu_seqlens is \[\]; allowed: integers \[sequences \+ 1\]"),
        (lambda: check_cu_seqlens([1, 2]), "that start at 0"),
        (lambda: check_cu_seqlens([0, 3, 2]), r"is \[0, 3, 2\]; .* never fall"),
        (lambda: check_cu_seqlens([0, 3], 4, "cu_k"), r"cu_k is \[0, 3\]; .* end at 4"),
        (lambda: check_cu_seqlens([0.0, 3.0]), "allowed: integers"),
        (lambda: check_cu_seqlens(torch.zeros(2, 2)), r"torch.float32 \(2, 2\); allowed"),
        (lambda: packed_mask([0, 1], [0, 1, 2]), "cu_q has 1 sequences and cu_k 2"),
        (lambda: packed_mask([0, 1], window=(-1, 0)), "window is"),
        (lambda: run_packed(reference, Q, K, V, [0, 4]), "cu_q is .* end at 5"),
        (lambda: run_packed(reference, Q, K[0], V, [0, 5]), r"k is torch.float64 \(2, 5, 5\); allowed: \[T, H, D\]"),
        (lambda: run_packed(reference, Q[0, 0], K, V, [0, 5]), r"q is torch.float64 \(5, 5\)"),
        (lambda: run_packed(reference, Q.expand(2, -1, -1, -1), K, V, [0, 5]), "q is .*allowed"),
        (lambda: run_packed(reference, Q, K, V, [0, 5], kv_lens=[1, 2]), r"kv_lens is \[1, 2\]; .* \[1\]"),
        (lambda: run_packed(reference, Q, K, V, [0, 5], scales=(1.0, 2.0)), r"scales is \(1.0, 2.0\); allowed: three"),
        (lambda: run_packed(reference, Q, K, V, [0, 5], bias=torch.zeros(5, 4)), "bias is"),
        (lambda: inspect_bias(B, "fp8_e4m3"), "fmt is fp8_e4m3; allowed: fp16, bf16, fp32, fp64"),
        (lambda: inspect_bias(B, "fp17"), "unknown format 'fp17'"),
        (lambda: inspect_bias(B > 0, "fp16"), r"bias is torch.bool \(2, 2\); allowed: a floating-point"),
        (lambda: inspect_bias(B, "fp16", scores=3), "scores is 3; allowed"),
        (lambda: inspect_bias(B, "fp16", mask=B), "mask is .*; allowed: a bool tensor"),
        (lambda: inspect_bias(B, "fp16", scores=torch.zeros(3, 3)), r"shapes are bias \(2, 2\), scores \(3, 3\)"),
        (lambda: inspect_bias(B, "fp16", threshold=0.0), "threshold is 0.0; allowed: a finite number below 0"),
    ],
)  # fmt: skip
def test_mistake_says_what_was_given_and_what_is_allowed(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
