"""Directions against what they are derivatives of: the FP64 truth, moved a little."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import harness.directions
from harness import AttentionSpec, get_recipe, reference
from harness.directions import DIRECTIONS, Call, _Walk, key_powers, project
from harness.operands import Extras, check
from harness.rounding import ulp
from harness.yardstick import independent_rows

STEP = 1e-5  # central differences: h² of the third derivative, and 2⁻⁵³/h of rounding, both ≲ 1e-10 here


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def call(
    spec: AttentionSpec | None = None, recipe: str = "bf16", size: tuple[int, int, int, int] = (2, 4, 7, 8),
    kv_heads: int = 2, keys: int = 9, variance: float = 1.0, **extras: Tensor,
) -> Call:  # fmt: skip
    b, h, n, d = size
    q, k, v = normal(b, h, n, d), normal(b, kv_heads, keys, d, seed=1), normal(b, kv_heads, keys, 5, seed=2)
    spec = spec or AttentionSpec()
    _, checked = check(q, k, v, spec, *(extras.get(n) for n in ("mask", "bias", "sinks", "kv_lens")))
    truth = reference(q, k, v, spec, **checked.as_options())
    return Call(q, k, v, spec, checked, get_recipe(recipe), truth, torch.full_like(truth.out, variance))


def out(c: Call, spec: AttentionSpec | None = None, **extras: Any) -> Tensor:
    return reference(c.q, c.k, c.v, spec or c.spec, **{**c.extras.as_options(), **extras}).out


def direction(c: Call, name: str) -> Tensor:
    """g itself, `[B, H, L, E]`: with variance 1, ⟨unit vector, g⟩ is an element of it."""
    found = []
    for channel in range(c.truth.out.shape[-1]):
        unit = torch.zeros_like(c.truth.out)
        unit[..., channel] = 1.0
        p = project(c, [unit])
        i = p.names.index(name)
        found.append((p.a[0][i] * p.f[i]).view(c.truth.out.shape[:3]))
    return torch.stack(found, -1)


def assert_along(got: Tensor, want: Tensor, tol: float = 1e-8) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tol * max(1.0, float(want.abs().max())))


SPECS = {
    "full": AttentionSpec(), "causal": AttentionSpec(causal=True), "window": AttentionSpec(window=(2, 1)),
    "top-left": AttentionSpec(causal=True, align="top-left"), "softcap": AttentionSpec(softcap=1.5),
    "softcap, causal": AttentionSpec(causal=True, softcap=0.7, scale=-0.4),
}  # fmt: skip


def options(kind: str) -> dict[str, Tensor]:
    mask = torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(3)) < 0.7
    bias = normal(1, 4, 7, 9, seed=4)
    bias[..., 2] = -math.inf
    made = {
        "mask": mask, "bias": bias, "sinks": normal(4, seed=5), "kv_lens": torch.tensor([9, 3]),
    }  # fmt: skip
    return {n: x for n, x in made.items() if n in kind.split()}


EXTRAS = ("", "mask", "bias", "sinks", "kv_lens", "mask bias sinks kv_lens")


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_scale_and_softcap_are_the_derivatives_of_the_truth(spec: AttentionSpec, extras: str) -> None:
    c = call(spec, **options(extras))
    scale = spec.scale_for(8)
    up, down = (out(c, replace(spec, scale=scale * math.exp(x))) for x in (STEP, -STEP))
    assert_along(direction(c, "scale"), (up - down) / (2 * STEP))
    if spec.softcap is not None:
        up, down = (out(c, replace(spec, softcap=spec.softcap * math.exp(x))) for x in (STEP, -STEP))
        assert_along(direction(c, "softcap"), (up - down) / (2 * STEP))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_bias_is_the_derivative_of_a_bias_that_shrinks(spec: AttentionSpec) -> None:
    c = call(spec, **options("bias sinks"))
    bias = c.extras.bias
    assert bias is not None
    up, down = (out(c, bias=bias * (1 - x)) for x in (STEP, -STEP))
    assert_along(direction(c, "bias"), (up - down) / (2 * STEP))


def test_sink_is_the_derivative_of_one_that_loses_weight() -> None:
    c = call(SPECS["causal"], **options("sinks"))
    sinks = c.extras.sinks
    assert sinks is not None
    up, down = (out(c, sinks=sinks + math.log1p(-x)) for x in (STEP, -STEP))
    assert_along(direction(c, "sink"), (up - down) / (2 * STEP))


def reweighted(c: Call, pick: Callable[[Tensor], Tensor], by: float) -> Tensor:
    """The truth when the keys that `pick` chooses of the visible ones weigh 1 + `by`."""
    seen = torch.ones(2, 4, 7, 9, dtype=torch.bool)
    if c.spec.causal:
        seen = seen.tril(2)
    bias = torch.zeros(2, 4, 7, 9, dtype=torch.float64).masked_fill_(pick(seen), math.log1p(by))
    return out(c, bias=bias)


def _first(seen: Tensor) -> Tensor:
    return seen & (seen.cumsum(-1) == 1)


def _last(seen: Tensor) -> Tensor:
    return _first(seen.flip(-1)).flip(-1)


@pytest.mark.parametrize(("name", "pick"), [("first key", _first), ("last key", _last)])
@pytest.mark.parametrize("causal", [False, True])
def test_one_key_is_the_derivative_of_losing_it(
    name: str, pick: Callable[[Tensor], Tensor], causal: bool
) -> None:
    c = call(AttentionSpec(causal=causal))
    up, down = (reweighted(c, pick, -x) for x in (STEP, -STEP))
    assert_along(direction(c, name), (up - down) / (2 * STEP))


def test_next_key_is_the_derivative_of_letting_it_in() -> None:
    c = call(AttentionSpec(causal=True))
    i, j = torch.arange(7).view(-1, 1), torch.arange(9)
    hidden = (j > i + 2).expand(2, 4, 7, 9)
    bias = torch.zeros(2, 4, 7, 9, dtype=torch.float64).masked_fill_(hidden, -math.inf)
    bias.masked_fill_((j == i + 3).expand_as(bias), math.log(STEP))
    # One-sided (a weight cannot be negative): the error is the step itself.
    let_in = reference(c.q, c.k, c.v, AttentionSpec(), bias=bias).out
    assert_along(direction(c, "next key"), (let_in - c.truth.out) / STEP, tol=20 * STEP)


def test_uniform_and_shrink_are_what_they_say() -> None:
    c = call(AttentionSpec(causal=True))
    assert_along(direction(c, "shrink"), c.truth.out, 1e-14)
    flat = reference(torch.zeros_like(c.q), c.k, c.v, c.spec).out
    assert_along(direction(c, "uniform"), flat - c.truth.out, 1e-13)


def test_cut_output_lies_half_an_ulp_nearer_to_zero() -> None:
    c = call()
    assert_along(direction(c, "truncated O"), -0.5 * ulp(c.truth.out, "bf16") * c.truth.out.sign(), 1e-14)


@pytest.mark.parametrize("extras", EXTRAS)
def test_scan_of_lost_keys_holds_every_derivative(extras: str) -> None:
    c = call(AttentionSpec(causal=True), **options(extras))
    delta = normal(*c.truth.out.shape, seed=8)
    p, (power, square) = project(c, [delta]), key_powers(c)
    for key in range(9):
        bias = torch.zeros(1, 1, 1, 9, dtype=torch.float64)
        bias[..., key] = STEP
        given = c.extras.bias
        up, down = (out(c, bias=x if given is None else given + x) for x in (bias, -bias))
        g = -(up - down) / (2 * STEP)
        along = (delta * g).sum(-1)
        for got, want in (
            (p.key_sum[0][key], along.sum()), (p.key_square[0][key], (along**2).sum()),
            (power[key], (g * g).sum()), (square[key], (g * g).sum()),
        ):  # fmt: skip
            assert float(got) == pytest.approx(float(want), abs=1e-7)


def test_lost_key_is_its_direction_to_first_order() -> None:
    c = call(keys=200)
    mask = torch.ones(1, 1, 1, 200, dtype=torch.bool)
    mask[..., 17] = False
    lost = out(c, mask=mask) - c.truth.out
    power, _ = key_powers(c)
    p = project(c, [lost])
    # Exactly −p(v − o)/(1 − p): θ is the mean of 1/(1 − p) weighed by p²|v − o|², from 1 to 1 over (1 − the largest p).
    scores = c.spec.scale_for(8) * (c.q @ c.k.repeat_interleave(2, 1).mT)
    top = float(torch.softmax(scores, -1)[..., 17].max())
    assert 1 < float(p.key_sum[0][17] / power[17]) < 1 / (1 - top)


@pytest.mark.parametrize("block", [1, 40, 100, 2**21])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_projection_does_not_depend_on_blocks_of_rows(
    block: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = call(AttentionSpec(causal=True, softcap=2.0), kv_heads=kv_heads, **options("mask bias sinks kv_lens"))
    deltas = [normal(*c.truth.out.shape, seed=s) for s in (8, 9)]
    whole = project(c, deltas)
    monkeypatch.setattr(harness.directions, "BLOCK", block)
    parts = project(c, deltas)
    assert parts.names == whole.names
    for field in ("a", "f", "rms", "key_sum", "key_square", "key_rows"):
        torch.testing.assert_close(getattr(parts, field), getattr(whole, field), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("exact", [0, 2**30])
def test_projection_in_single_precision_is_near_the_double_one(
    exact: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = call(AttentionSpec(causal=True))
    delta = normal(*c.truth.out.shape, seed=8)
    fine = project(c, [delta])
    monkeypatch.setattr(harness.directions, "EXACT", exact)
    coarse = project(c, [delta])
    torch.testing.assert_close(coarse.a, fine.a, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(coarse.f, fine.f, rtol=1e-4, atol=1e-6)


def test_grouped_heads_project_as_repeated_ones() -> None:
    c = call(AttentionSpec(causal=True))
    k, v = (x.repeat_interleave(2, 1) for x in (c.k, c.v))
    delta = normal(*c.truth.out.shape, seed=8)
    grouped, repeated = project(c, [delta]), project(replace(c, k=k, v=v), [delta])
    for field in ("a", "f", "key_sum"):
        torch.testing.assert_close(getattr(grouped, field), getattr(repeated, field), rtol=1e-12, atol=1e-12)


def test_directions_without_an_option_are_left_out() -> None:
    assert set(DIRECTIONS) - set(_Walk(call()).names) == {"next key", "sink", "bias", "softcap"}
    full = call(AttentionSpec(causal=True, softcap=1.0), **options("bias sinks"))
    assert set(_Walk(full).names) == set(DIRECTIONS)


def test_rows_without_a_finite_truth_or_a_variance_have_no_direction() -> None:
    c = call(AttentionSpec(causal=True))
    c.truth.out[0, 0, 0] = math.nan
    c.variance[0, 0, 1] = 0.0
    c.variance[0, 0, 2, 1] = math.inf
    p = project(c, [torch.full_like(c.truth.out, math.nan)])
    f = p.f.view(-1, *c.truth.out.shape[:3])
    assert not f[:, 0, 0, :3].any()
    assert f[:, 0, 0, 3:].any()
    assert not p.a.any()


@pytest.mark.parametrize("size", [(1, 1, 0, 4), (0, 1, 3, 4), (1, 1, 3, 0)])
@pytest.mark.parametrize("keys", [0, 4])
def test_empty_shapes_project_to_nothing_or_zero(size: tuple[int, int, int, int], keys: int) -> None:
    c = call(AttentionSpec(causal=True), size=size, kv_heads=1, keys=keys)
    p = project(c, [torch.zeros_like(c.truth.out)])
    assert p.f.shape == (len(p.names), math.prod(size[:3]))
    assert not p.a.any()


def test_equal_queries_over_equal_keys_count_once() -> None:
    c = call()
    c.q[0, 0, 3] = c.q[0, 0, 1]
    kept = independent_rows(c).view(2, 4, 7)
    assert not kept[0, 0, 3]
    assert int(kept.sum()) == 2 * 4 * 7 - 1
    assert independent_rows(replace(c, spec=AttentionSpec(causal=True))).all()  # other keys, another row
    masked = replace(c, extras=Extras(mask=torch.ones(1, 1, 7, 9, dtype=torch.bool)))
    assert independent_rows(masked).all()
