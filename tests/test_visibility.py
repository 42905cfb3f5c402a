"""Two rules for who sees whom, written apart, agree: the truth's and the algorithms'. All small cases, none sampled.

With q = 0 every visible key weighs the same, and with V the identity a row of the output shows which keys it saw. A
rule from the text of `harness.spec` is the third opinion.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import harness
from harness.attention.rows import Problem, key_range, visible
from harness.operands import Extras
from harness.spec import ALIGNMENTS, AttentionSpec, Shape
from harness.truth import reference

SIDES = (None, 0, 1, 2)
SPECS = [
    AttentionSpec(causal=causal, align=align, window=window)
    for causal in (False, True)
    for align in ALIGNMENTS
    for window in itertools.product(SIDES, SIDES)
]
SIZES = list(itertools.product(range(1, 6), range(6)))
SPEC = pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{'causal' if s.causal else 'all'}-{s.align}-{s.window}"
)
ANY = ("naive_masked", "online_softmax", "decode_with_cache")
NAMES = (*ANY, "lower_triangle")
PAIRS = [(n, c) for n in NAMES for c in (True, False) if c or n in ANY]


def calls(length: int, s: int) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor], Tensor]]:
    """q = 0 and V = identity: one sequence without kv_lens, then S + 1 of them with lengths 0 … S. The extras, and the
    lengths."""
    for lens in (torch.tensor([s]), torch.arange(s + 1)):
        b = len(lens)
        q, k, v = torch.zeros(b, 1, length, 1), torch.ones(b, 1, s, 1), torch.eye(s).expand(b, 1, s, s)
        yield (q.double(), k.double(), v.double()), {"kv_lens": lens} if b > 1 else {}, lens


@functools.cache
def by_definition(spec: AttentionSpec, length: int, lens: tuple[int, ...], s: int) -> Tensor:
    """`[B, L, S]` from the two lines of `harness.spec`."""
    left, right = spec.window or (None, None)
    seen = torch.zeros(len(lens), length, s, dtype=torch.bool)
    for b, i, j in itertools.product(range(len(lens)), range(length), range(s)):
        n = lens[b]
        position = i + n - length if spec.align == "bottom-right" else i
        low = -math.inf if left is None else position - left
        high = math.inf if right is None else position + right
        seen[b, i, j] = j < n and (not spec.causal or j <= position) and low <= j <= high
    return seen


def seen_by(out: Tensor) -> Tensor:
    """`[B, L, S]`, and that the keys seen share the weight evenly."""
    seen = out[:, 0] != 0
    share = 1 / seen.sum(-1, keepdim=True).clamp(min=1).double()
    assert float((out[:, 0] - seen * share).abs().max() if out.numel() else 0.0) <= 2.0**-50
    return seen


@SPEC
def test_truth_sees_what_the_definition_says(spec: AttentionSpec) -> None:
    for length, s in SIZES:
        for tensors, extras, lens in calls(length, s):
            truth = reference(*tensors, spec, **extras)
            want = by_definition(spec, length, tuple(lens.tolist()), s)
            assert torch.equal(seen_by(truth.out), want), (length, s, extras)
            assert torch.equal(truth.lse[:, 0] == -math.inf, ~want.any(-1)), (length, s, extras)


@SPEC
def test_masks_of_the_algorithms_say_what_the_definition_says_and_key_range_loses_nothing(
    spec: AttentionSpec,
) -> None:
    for length, s in SIZES:
        for (q, k, v), extras, lens in calls(length, s):
            shape = Shape(len(lens), 1, length, 1, kv_len=s, value_dim=s)
            p = Problem(shape, spec, Extras(**extras), q, k, v, None, None, None, True)
            want = by_definition(spec, length, tuple(lens.tolist()), s)
            for start, stop in itertools.combinations(range(length + 1), 2):
                rows, all_keys = slice(start, stop), slice(0, s)
                mask = visible(p, rows, all_keys)
                mask = torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
                assert torch.equal(mask.expand(len(lens), 1, stop - start, s)[:, 0], want[:, rows]), (
                    length,
                    s,
                    rows,
                )
                keys = key_range(p, rows)
                outside = [j for j in range(s) if not keys.start <= j < keys.stop]
                assert not want[:, rows][..., outside].any(), (length, s, rows, keys)


@functools.cache
def seen_by_truth(spec: AttentionSpec, length: int, s: int, with_lens: bool) -> Tensor:
    tensors, extras, _ = list(calls(length, s))[with_lens] if s else next(iter(calls(length, s)))
    return seen_by(reference(*tensors, spec, **extras).out)


def refused(name: str, spec: AttentionSpec) -> bool:
    return bool(harness.get(name).refusals(spec, Shape(), "fp64"))


def test_only_lower_triangle_refuses_and_only_what_is_not_causal() -> None:
    assert {(n, s.causal) for n in NAMES for s in SPECS if refused(n, s)} == {("lower_triangle", False)}


@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize(("name", "causal"), PAIRS)
def test_algorithms_see_what_the_truth_sees(name: str, causal: bool, align: str) -> None:
    """Blocks of 2 and 3 rows and keys, and 2 decoded steps, so that edges fall inside. Two savings: under causality the
    window's right side is read by `AttentionSpec.right` alone, so None and 1 stand for all of them (the masks above try
    each); beyond 3 keys the sequence of full length in the ragged batch stands for the call without kv_lens."""
    algorithm = harness.get(name)
    sizes = {"block": 2, "q_block": 3, "steps": 2}
    options = {o: n for o, n in sizes.items() if o in algorithm.options}
    for spec in SPECS:
        if (spec.causal, spec.align) != (causal, align) or (
            causal and spec.window and spec.window[1] in (0, 2)
        ):
            continue
        for length, s in SIZES:
            for tensors, extras, _ in calls(length, s):
                if not extras and s > 3:
                    continue
                got = algorithm.run(*tensors, spec, recipe="fp64", **extras, **options)
                want = seen_by_truth(spec, length, s, bool(extras))
                assert torch.equal(seen_by(got.out), want), (spec, length, s, extras)
                assert torch.equal(got.lse[:, 0] == -math.inf, ~want.any(-1)), (spec, length, s, extras)


@pytest.mark.parametrize("name", NAMES)
def test_no_queries_give_no_rows(name: str) -> None:
    *_, (tensors, extras, _) = calls(0, 3)
    result = harness.get(name).run(*tensors, AttentionSpec(causal=True), recipe="fp64", **extras)
    assert (
        result.out.shape
        == reference(*tensors, AttentionSpec(causal=True), **extras).out.shape
        == (4, 1, 0, 3)
    )
