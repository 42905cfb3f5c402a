"""Every option of the truth, one by one, against the scalar oracle: what the draws of `test_truth` combine."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from problems import Problem, assert_like_oracle

from harness.options import run_packed
from harness.truth import reference

B, H, HKV, L, S, D, E = 2, 4, 2, 3, 5, 4, 3
BROADCAST = [(S,), (L, 1), (L, S), (H, 1, S), (1, L, S), (B, 1, 1, S), (B, 1, L, S), (B, H, L, S), ()]
SHAPES = pytest.mark.parametrize("size", BROADCAST, ids=str)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def problem(
    *, b: int = B, h: int = H, hkv: int = HKV, length: int = L, s: int = S, d: int = D, e: int = E,
    extras: dict[str, Any] | None = None, made: dict[str, Any] | None = None, **rules: Any,
) -> Problem:  # fmt: skip
    rng = np.random.default_rng(3)
    sizes = ((b, h, length, d), (b, hkv, s, d), (b, hkv, s, e))
    defaults = {"causal": False, "align": "bottom-right", "window": None, "scale": None, "softcap": None}
    tensors = [rng.uniform(-2, 2, size) for size in sizes]
    return Problem(tensors, {**defaults, "empty_row": "zero", **rules}, extras or {}, made or {})


@CAUSAL
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize(("length", "s"), [(3, 5), (5, 3), (4, 4), (1, 4)])
def test_causality_alignment_and_every_pair_of_window_sides(
    causal: bool, align: str, length: int, s: int
) -> None:
    sides = (None, 0, 1, 2, 9)
    for window in (None, *itertools.product(sides, sides)):
        for rule in ("zero", "nan"):
            assert_like_oracle(
                problem(length=length, s=s, causal=causal, align=align, window=window, empty_row=rule)
            )


@CAUSAL
@pytest.mark.parametrize("scale", [None, 0.0, 0.3, -1.0, 2.0])
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
def test_scale_and_softcap(causal: bool, scale: float | None, softcap: float | None) -> None:
    assert_like_oracle(problem(causal=causal, scale=scale, softcap=softcap))


@CAUSAL
@SHAPES
@pytest.mark.parametrize("rule", ["zero", "nan"])
def test_mask_of_every_broadcast_shape(causal: bool, size: tuple[int, ...], rule: str) -> None:
    for seed, share in itertools.product(range(3), (0.0, 0.6, 1.0)):
        mask = np.asarray(np.random.default_rng(seed).random(size) < share)
        assert_like_oracle(problem(causal=causal, empty_row=rule, extras={"mask": mask}))


@CAUSAL
@SHAPES
@pytest.mark.parametrize("hidden", [0.0, 0.4, 1.0], ids=["finite", "some_hidden", "all_hidden"])
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_bias_of_every_broadcast_shape(
    causal: bool, size: tuple[int, ...], hidden: float, softcap: float | None
) -> None:
    rng = np.random.default_rng(1)
    bias = np.asarray(np.where(rng.random(size) < hidden, -math.inf, rng.uniform(-3, 3, size)))
    assert_like_oracle(problem(causal=causal, softcap=softcap, extras={"bias": bias}))


@CAUSAL
@pytest.mark.parametrize("heads", [6, 12, 40])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("lens", [None, (0, 4)], ids=["whole", "ragged"])
def test_alibi_of_head_counts_that_are_no_power_of_two(
    causal: bool, heads: int, align: str, lens: tuple[int, int] | None
) -> None:
    extras = {} if lens is None else {"kv_lens": np.array(lens)}
    assert_like_oracle(
        problem(h=heads, hkv=heads // 2, causal=causal, align=align, extras=extras, made={"alibi": True})
    )


@CAUSAL
@pytest.mark.parametrize("sink", [-math.inf, -3.0, 0.0, 9.0])
@pytest.mark.parametrize("length", [3, 7], ids=["all_rows_see", "some_rows_empty"])
@pytest.mark.parametrize("rule", ["zero", "nan"])
def test_sinks(causal: bool, sink: float, length: int, rule: str) -> None:
    sinks = np.array([sink, 0.5, -1.0, sink])
    assert_like_oracle(problem(causal=causal, length=length, empty_row=rule, extras={"sinks": sinks}))


@CAUSAL
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("window", [None, (1, 1)])
@pytest.mark.parametrize("rule", ["zero", "nan"])
def test_every_pair_of_lengths(causal: bool, align: str, window: Any, rule: str) -> None:
    for lens in itertools.product(range(S + 1), range(S + 1)):
        assert_like_oracle(
            problem(
                d=2, causal=causal, align=align, window=window, empty_row=rule, extras={"kv_lens": np.array(lens)}
            )
        )  # fmt: skip


@CAUSAL
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("window", [None, (1, 1)])
def test_padding_on_either_side(causal: bool, side: str, align: str, window: Any) -> None:
    for lengths in ([S, S], [0, 2], [4, 1]):
        padded = {"padded": (side, lengths)}
        assert_like_oracle(problem(causal=causal, align=align, window=window, made=padded))


PACKED = [([3], [5]), ([2, 1], [2, 3]), ([0, 3, 0], [1, 0, 4]), ([1, 1, 1], [0, 5, 0])]


@CAUSAL
@pytest.mark.parametrize("lengths", PACKED, ids=str)
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("window", [None, (1, 1)])
def test_packed_sequences_as_a_mask_and_one_by_one(
    causal: bool, lengths: Any, align: str, window: Any
) -> None:
    packed = problem(b=1, causal=causal, align=align, window=window, made={"packed": lengths})
    assert_like_oracle(packed)
    alone = problem(b=1, causal=causal, align=align, window=window)
    (q, k, v), spec, _ = alone.call()
    offsets = [np.cumsum([0, *n]).tolist() for n in lengths]
    parts = run_packed(reference, q, k, v, *offsets, spec)
    out, lse, _ = packed.by_oracle()
    np.testing.assert_allclose(parts.out, out, rtol=0, atol=2e-12)
    np.testing.assert_allclose(parts.lse, lse, rtol=0, atol=1e-12)


@CAUSAL
@pytest.mark.parametrize(("h", "hkv"), [(1, 1), (4, 4), (4, 2), (6, 2), (6, 1)])
def test_head_groups_from_one_to_all(causal: bool, h: int, hkv: int) -> None:
    assert_like_oracle(problem(h=h, hkv=hkv, causal=causal))


SIZES: list[dict[str, int]] = [
    {"e": 1}, {"e": 7}, {"e": 0}, {"d": 0}, {"d": 1}, {"s": 0}, {"length": 0}, {"s": 0, "length": 0}, {"b": 0},
    {"d": 0, "e": 0}, {"length": 7}, {"length": 1},
]  # fmt: skip


@CAUSAL
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rule", ["zero", "nan"])
@pytest.mark.parametrize("sunk", [False, True])
def test_widths_and_lengths_that_differ_or_are_zero(
    causal: bool, size: dict[str, int], rule: str, sunk: bool
) -> None:
    extras = {"sinks": np.array([0.0, 1.0, -math.inf, 2.0])} if sunk else {}
    assert_like_oracle(problem(**size, causal=causal, empty_row=rule, extras=extras))
