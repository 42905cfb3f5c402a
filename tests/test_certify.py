"""The FP64 truth lies in ball-arithmetic enclosures, on the suite's own small cases and on every option."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import flint
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from problems import Problem, problems
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import load_cases
from harness.certify import certificate, certify_cases
from harness.enclosure import LIMIT, certifiable, enclose
from harness.operands import NO_EXTRAS, Extras, check
from harness.spec import AttentionSpec, Shape
from harness.truth import Truth, reference

U = 2.0**-53
SMALL = 2**18  # scores times width: 32 of the suite's cases, a third of a second each under three recipes


def qkv(n: int, d: int = 8, std: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 1, n, d))) for _ in range(3))
    return q * std, k, v


def test_every_small_case_of_the_suite_is_certified() -> None:
    rows = certify_cases(load_cases("all"), limit=SMALL)
    assert len(rows) >= 90
    assert [(r.case, r.recipe) for r in rows if not r.certificate.contained] == []
    assert max(r.certificate.left_out for r in rows if r.recipe == "fp32") == 0
    # the balls blur nothing: below a millionth of u
    assert [r.case for r in rows if r.radius > 1e-6 * U * max(r.distance / U, 1.0)] == []
    worst = max(rows, key=lambda r: r.certificate.relative)
    print(f"{len(rows)} certificates; farthest {worst.case} {worst.recipe}: {worst.certificate.relative:.2e}")


@settings(max_examples=60)
@given(problems(made=True))
def test_every_combination_of_options_is_certified(problem: Problem) -> None:
    (q, k, v), spec, extras = problem.call()
    found = certificate(q, k, v, spec, check(q, k, v, spec, **extras)[1])
    assert found.contained
    assert found.left_out == found.unbounded == 0


@settings(max_examples=60)
@given(problems(special=True))
def test_rows_that_see_nan_or_infinity_are_left_out_and_the_others_certified(problem: Problem) -> None:
    (q, k, v), spec, extras = problem.call()
    truth = problem.truth()
    found = certificate(q, k, v, spec, check(q, k, v, spec, **extras)[1], truth)
    assert found.contained
    assert found.rows + found.left_out + found.unbounded <= truth.lse.numel()


CERTIFIED = [(1, 1.0), (2, 1.0), (7, 1.0), (16, 1.0), (33, 1.0), (64, 1.0), (64, 8.0), (64, 60.0)]


@pytest.mark.parametrize(("n", "std"), CERTIFIED)
def test_truth_lies_in_the_balls_widened_by_what_fp64_allows(
    n: int, std: float, record_property: Any
) -> None:
    found = certificate(*qkv(n, n, std))
    assert found.contained
    assert (found.rows, found.left_out) == (n, 0)
    assert found.radius < 2.0**-100
    record_property("certified_distance", found.distance)
    print(f"n = d = {n}, std {std}: out {found.distance:.2e}, of the bound {found.of_bound:.2f}")


@pytest.mark.parametrize("name", ["out", "lse"])
@pytest.mark.parametrize("causal", [False, True])
def test_one_element_nudged_by_1e_minus_12_is_refused(name: str, causal: bool) -> None:
    tensors, spec = qkv(33), AttentionSpec(causal=causal)
    truth = reference(*tensors, spec)
    assert certificate(*tensors, spec, NO_EXTRAS, truth).contained
    nudged = getattr(truth, name).clone()
    nudged[0, 0, 20] += 1e-12
    found = certificate(*tensors, spec, NO_EXTRAS, dataclasses.replace(truth, **{name: nudged}))
    assert not found.contained
    assert found.worst == (0, 0, 20)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_truth_that_is_not_finite_is_refused(value: float) -> None:
    tensors = qkv(5)
    truth = reference(*tensors)
    out = truth.out.clone()
    out[0, 0, 2, 1] = value
    assert not certificate(*tensors, truth=Truth(out, truth.lse, truth.row_max)).contained


def test_an_empty_row_that_is_not_zero_is_refused() -> None:
    tensors, spec = qkv(3), AttentionSpec()
    extras = Extras(mask=torch.tensor([[[[True], [False], [True]]]]))
    truth = reference(*tensors, spec, mask=extras.mask)
    assert certificate(*tensors, spec, extras, truth).contained
    out = truth.out.clone()
    out[0, 0, 1, 0] = 1e-300
    assert not certificate(*tensors, spec, extras, dataclasses.replace(truth, out=out)).contained
    assert not certificate(*tensors, AttentionSpec(empty_row="nan"), extras, truth).contained


@pytest.mark.parametrize("n", [5, 64])
def test_torch_sdpa_in_fp64_is_within_its_own_error_of_the_balls(n: int) -> None:
    q, k, v = qkv(n, n)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    balls = enclose(q, k, v)
    # SDPA multiplies q and k each by √scale, rounded: scale's 2u twice halved, √'s u and a product's u on each side.
    own = q[0, 0].abs() @ k[0, 0].abs().T * n**-0.5 * 6 * U
    for i in range(n):
        bound = balls.bounds[0, 0, i][0] + 2 * own[i].max() * v.abs().max()
        far = [
            float(abs(flint.arb(x) - t).abs_upper())
            for x, t in zip(theirs[0, 0, i].tolist(), balls.out[0, 0, i], strict=True)
        ]
        assert bool((torch.tensor(far, dtype=torch.float64) <= bound).all())


def test_precision_grows_until_scores_of_any_size_are_known() -> None:
    """Scores of 1e60 times an irrational scale: 192 bits leave them a radius of a hundred."""
    q, k, v = qkv(4)
    found = enclose(q * 1e30, k * 1e30, v)
    assert found.bits > 192
    best = (q @ k.mT)[0, 0].argmax(-1)
    for i, j in enumerate(best.tolist()):
        assert [float(x.mid()) for x in found.out[0, 0, i]] == v[0, 0, j].tolist()


def test_scores_that_fp64_cannot_tell_apart_are_counted_and_not_claimed() -> None:
    tensors, spec = qkv(4), AttentionSpec()
    bias = torch.full((1, 1, 4, 4), -1e30, dtype=torch.float64)
    found = certificate(*tensors, spec, Extras(bias=bias))
    assert (found.rows, found.unbounded) == (0, 4)


def test_the_precision_of_the_caller_is_left_as_it_was() -> None:
    before = flint.ctx.prec
    enclose(*qkv(3))
    assert flint.ctx.prec == before


def test_a_call_too_large_is_refused_with_what_is_allowed() -> None:
    assert not certifiable(Shape(1, 8, 128, 128))
    with pytest.raises(ValueError, match=f"too large to certify; allowed: scores times width ≤ {LIMIT}"):
        enclose(*qkv(300, 64))


def test_without_python_flint_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flint", None)
    with pytest.raises(ModuleNotFoundError, match="certificates need python-flint; install it with"):
        certificate(*qkv(2))
