"""Every way to compute one attention call gives one answer: the truth, every registered implementation, and sessions
over every kind of cache, on drawn combinations of all options.

Under FP64 they are held to a bound derived here, under lower precisions to the ceiling of `ceiling` where that covers
the options (causality, left window, scale, softcap, sinks).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import in_reach
from problems import Problem, assert_near, problems
from test_cache_sessions import Whole, chunkings, scaled, whole
from torch import Tensor

from harness import AttentionSpec, Shape, get, registry
from harness.attention.algorithm import Algorithm
from harness.attention.session import KINDS, run_session
from harness.compare import compare
from harness.recipe import TENSORS, Recipe
from harness.result import Result

U = 2.0**-53


# --- what is run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ways:
    """Drawn parameters of everything that has some, and the ways to run with them."""

    options: dict[str, dict[str, int]]  # of each implementation
    chunks: list[int]  # of sessions
    block_size: int
    seed: int

    def of(
        self, spec: AttentionSpec, shape: Shape, recipe: str | Recipe, extras: tuple[str, ...]
    ) -> Iterator[tuple[str, Callable[..., Result]]]:
        """Name and `run` of every implementation that does not refuse the call, and of the sessions."""
        for name, options in self.options.items():
            if not get(name).refusals(spec, shape, recipe, extras):
                yield f"{name} {options}", self._bound(get(name).run, options)
        for kind in KINDS:
            if spec.causal and (kind != "sliding" or (spec.left is not None and "kv_lens" not in extras)):
                yield f"{kind} session, chunks {self.chunks}", self._session(kind)

    @staticmethod
    def _bound(run: Callable[..., Result], options: dict[str, int]) -> Callable[..., Result]:
        return lambda *args, **kwargs: run(*args, **kwargs, **options)

    def _session(self, kind: str) -> Callable[..., Result]:
        return Algorithm(
            f"{kind}_session",
            lambda ar, p: run_session(
                ar, p, self.chunks, kind, block_size=self.block_size, seed=self.seed
            ),
        ).run  # fmt: skip


# Ours, which promise what they do with NaN and ±Inf; a black box does as it does.
ALGORITHMS = tuple(e.name for e in registry.table().values() if e.emulated)


@st.composite
def ways(draw: st.DrawFn, q_len: int) -> Ways:
    options = {n: {o: draw(st.integers(1, 11)) for o in get(n).options} for n in ALGORITHMS}
    return Ways(options, draw(chunkings(q_len)), draw(st.integers(1, 5)), draw(st.integers(0, 99)))


@st.composite
def calls(draw: st.DrawFn, special: bool = False) -> tuple[Problem, Ways]:
    problem = draw(
        problems(special=special, made=True, longest=9, causal=draw(st.sampled_from([True, True, False])))
    )
    return problem, draw(ways(problem.shape.q_len))  # fmt: skip


# --- FP64 ---------------------------------------------------------------------------------------------------------


def dense_bounds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    bias: Tensor | None,
    sinks: Tensor | None,
    hidden: Tensor,
) -> tuple[Tensor, Tensor]:
    """NUMERICS section 4's ceiling with every format FP64 and T ≤ n + 1 blocks, for out and lse.

    Two implementations that each keep the ceiling differ by twice it. (d + 10) in place of (d + 2) and 8u for the
    roundings of scale, softcap (division, tanh at 2u, product) and bias; |s| joins |s − m| because unsafe softmax
    takes m = 0. A bias that is itself a sum (ALiBi's) is taken as given.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale, d, n = spec.scale_for(q.shape[3]), q.shape[3], k.shape[2]
    s = scale * (q @ k.mT)
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    size = s.abs()
    if bias is not None:
        s, size = s + bias, size + bias.abs()
    hidden = hidden | torch.isinf(s)
    s, size = s.masked_fill(hidden, -math.inf), size.masked_fill(hidden, 0.0)
    sink = torch.full((1, q.shape[1], 1, 1), -math.inf).double() if sinks is None else sinks.view(1, -1, 1, 1)
    joined = torch.cat([s, sink.expand(*s.shape[:3], 1)], -1)
    m = joined.amax(-1, keepdim=True)
    m = m.masked_fill(m == -math.inf, 0.0)
    lse = torch.logsumexp(joined, -1, keepdim=True)
    lse = torch.where(torch.isfinite(lse), lse, 0.0)
    p = torch.exp(s - lse)
    blocks = n + 1
    eps = (d + 10) * U * abs(scale) * (q.abs() @ k.abs().mT) + 8 * U * size
    distance = torch.where(hidden, 0.0, (s - m).abs()) + size + m.abs()
    eta = torch.expm1(eps + U * (distance + 4) + 2 * blocks * U).masked_fill(hidden, 0.0)
    amount = (p * eta).sum(-1, keepdim=True)
    mass = p @ v.abs()
    out = (p * eta) @ v.abs() + (amount + (2 * n + 4 * blocks + 6) * U) * mass
    sunk = U * (sink.masked_fill(sink == -math.inf, 0.0).abs() + m.abs() + 4)
    log = eta.amax(-1, keepdim=True) if n else torch.zeros_like(m)
    log = log + sunk + (2 * n + 4 * blocks + 8) * U + 4 * U * (lse.abs() + m.abs())
    # The sink's own share of the denominator errs by `sunk` as well.
    return 2 * (out + 2 * sunk * mass) * (1 + amount) + 1e-300, (2 * log)[..., 0]


def enumerate_hidden(shape: Shape, spec: AttentionSpec, mask: Tensor | None, lens: Any) -> Tensor:
    """The rule of `harness.spec`, pair by pair."""
    hidden = torch.ones(shape.batch, shape.heads, shape.q_len, shape.S, dtype=torch.bool)
    for b, i, j in itertools.product(range(shape.batch), range(shape.q_len), range(shape.S)):
        n = shape.S if lens is None else int(lens[b])
        position = i + (n - shape.q_len if spec.align == "bottom-right" else 0)
        hidden[b, :, i, j] = not (j < n and in_reach(j, position, spec.causal, spec.window))
    return hidden if mask is None else hidden | ~mask


@given(calls())
@settings(max_examples=300)
def test_under_fp64_every_way_is_the_reference(call: tuple[Problem, Ways]) -> None:
    problem, drawn = call
    tensors, spec, extras = problem.call()
    truth, shape = problem.truth(), problem.shape
    hidden = enumerate_hidden(shape, spec, extras.get("mask"), extras.get("kv_lens"))
    bounds = dense_bounds(*tensors, spec, extras.get("bias"), extras.get("sinks"), hidden)
    results = {}
    for name, run in drawn.of(spec, shape, "fp64", tuple(extras)):
        result = results[name.split()[0]] = run(*tensors, spec, recipe="fp64", **extras)
        try:
            assert_near(result.out, truth.out, bounds[0].numpy())
            if result.lse is not None:
                assert_near(result.lse, truth.lse, bounds[1].numpy())
        except AssertionError as error:
            error.add_note(f"by {name}")
            raise
    if "paged" in results:  # bit for bit: one order of tokens, one layout when read
        assert_near(results["paged"].out, results["contiguous"].out, 0.0)
        assert_near(results["paged"].lse, results["contiguous"].lse, 0.0)


@given(calls(special=True))
@settings(max_examples=200)
def test_nan_and_infinities_stand_where_the_reference_has_them(call: tuple[Problem, Ways]) -> None:
    """Unsafe softmax aside, which divides ∞ by ∞ where no score is infinite."""
    problem, drawn = call
    tensors, spec, extras = problem.call()
    truth = problem.truth()
    for name, run in drawn.of(spec, problem.shape, "fp64", tuple(extras)):
        if not name.startswith("naive_unsafe"):
            result = run(*tensors, spec, recipe="fp64", **extras)
            assert not compare(result.out, truth.out, "fp64").class_mismatch, (name, result.out, truth.out)
            if result.lse is not None:
                lse = (result.lse[..., None], truth.lse[..., None])
                assert not compare(*lse, "fp64").class_mismatch, (name, *lse)


# --- lower precisions ---------------------------------------------------------------------------------------------


@st.composite
def stored(draw: st.DrawFn) -> tuple[Whole, Ways]:
    """What the ceiling covers. Causal rows all see a key: an empty row has no error to bound."""
    size = st.integers
    kv_heads, causal, length = draw(size(1, 2)), draw(st.booleans()), draw(size(0, 12))
    shape = Shape(
        draw(size(1, 2)), kv_heads * draw(size(1, 3)), length, draw(size(1, 8)),
        kv_heads=kv_heads, kv_len=draw(size(max(length, 1) if causal else 1, 14)), value_dim=draw(size(1, 6)),
    )  # fmt: skip
    left = draw(st.none() | size(0, 5))
    spec = AttentionSpec(
        causal=causal,
        window=None if left is None else (left, None),
        scale=draw(st.sampled_from([None, None, 0.3])),
        softcap=draw(st.sampled_from([None, None, 3.0])),
    )
    recipe = draw(st.sampled_from(["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_kv"]))
    sinks = None
    if draw(st.booleans()):
        values = st.sampled_from([-math.inf, -1.0, 0.0, 2.5, 5.0])
        sinks = torch.tensor([draw(values) for _ in range(shape.heads)], dtype=torch.float64)
    granularity = draw(st.sampled_from(["tensor", "head", "token"]))
    return whole(shape, scaled(recipe, granularity), spec, sinks, draw(size(0, 2**31))), draw(ways(length))


def blocks_of(name: str, ways: Ways, keys: int) -> int:
    """Parts that a result was put together from."""
    if name.startswith("online_softmax"):
        return 1 + -(-keys // ways.options["online_softmax"]["block"])
    return 1 + ways.options["split_kv"]["splits"] if name.startswith("split_kv") else 1


@given(stored())
@settings(max_examples=150)
def test_under_lower_precision_every_way_keeps_the_ceiling(case: tuple[Whole, Ways]) -> None:
    """Unsafe softmax aside: without a maximum P leaves the range that the ceiling counts on."""
    problem, drawn = case
    extras = () if problem.sinks is None else ("sinks",)
    scales = [problem.stored[t].scale for t in TENSORS]
    for name, run in drawn.of(problem.spec, problem.shape, problem.recipe, extras):
        if name.startswith("naive_unsafe"):
            continue
        result = run(*problem.values, problem.spec, recipe=problem.recipe, scales=scales, sinks=problem.sinks)
        try:
            problem.hold(result.out, result.lse, blocks_of(name, drawn, problem.shape.S))
        except AssertionError as error:
            error.add_note(f"by {name}")
            raise
