"""Sessions over every kind of KV cache: each step is one-shot causal attention, whatever the chunks.

A run is held to the ceiling of its recipe against the FP64 truth of the stored values (`ceiling`), so two runs differ
by no more than the sum of their ceilings; equality of bits is claimed only where it is tested with tolerance 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from ceiling import ceiling, scores_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness import AttentionSpec, Recipe, Scaling, Shape, get, get_recipe, reference
from harness.arithmetic import Arithmetic
from harness.attention.algorithm import Algorithm
from harness.attention.cache import Cache
from harness.attention.invariance import invariance
from harness.attention.kv_cache import KVCache
from harness.attention.paged import PagedCache
from harness.attention.session import CHUNKED_DECODE, PAGED_DECODE, Session, make_cache, run_session
from harness.attention.sliding import SlidingCache
from harness.ledger import RangeLedger
from harness.quantize import Stored, quantize
from harness.recipe import TENSORS
from harness.records import HazardKind

CAUSAL = AttentionSpec(causal=True)
RECIPES = ("fp64", "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_kv")


def scaled(recipe: str, granularity: str) -> Recipe:
    """The recipe with its scales at this granularity."""
    r = get_recipe(recipe)
    return replace(r, name=f"{recipe}_{granularity}", scaling={t: Scaling(granularity) for t in r.scaling})


def draw_normal(shape: Shape, seed: int, heads_apart: bool = True) -> dict[str, Tensor]:
    """Normal q, k, v; kv head h of k and v is 20^h times larger and its queries smaller by as much (F55), so that no
    scale is 1 and none fits two heads; channel 0 of v is zero (F53)."""
    g = torch.Generator().manual_seed(seed)
    x = {t: torch.randn(shape.tensor(t), generator=g, dtype=torch.float64) for t in TENSORS}
    if heads_apart:
        size = 20.0 ** torch.arange(shape.Hkv).double().view(1, -1, 1, 1)
        x = {
            "q": x["q"] / size.repeat_interleave(shape.group, 1) * 2, "k": x["k"] * size, "v": x["v"] * size * 3
        }  # fmt: skip
    x["v"][..., :1] = 0.0
    return x


@dataclass(frozen=True)
class Whole:
    """A whole causal problem, stored: what every session has to reproduce."""

    shape: Shape
    spec: AttentionSpec
    recipe: Recipe
    stored: dict[str, Stored]
    sinks: Tensor | None = None

    @property
    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.stored[t].values for t in TENSORS)
        return q, k, v

    def scales(self, rows: slice | None) -> tuple[Any, Any, Any]:
        """Those of these tokens, or (None) those that hold for all."""
        out = []
        for t in TENSORS:
            s = self.stored[t].scale
            by_token = s is not None and s.shape[2] > 1
            out.append(
                (s[:, :, rows] if rows and by_token else None if rows or by_token else s)
                if s is not None
                else None
            )
        return out[0], out[1], out[2]

    def session(self, cache: Cache | None = None) -> Session:
        return Session(
            self.shape, self.spec, self.recipe, cache=cache, scales=self.scales(None), sinks=self.sinks
        )

    def play(self, chunks: list[int], cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """Every token through one session."""
        session, parts, start = self.session(cache), [], 0
        for n in chunks:
            rows = slice(start, start + n)
            parts.append(
                session.step(*(self.stored[t].codes[:, :, rows] for t in TENSORS), self.scales(rows))
            )
            start += n
        assert session.length == self.shape.q_len
        return torch.cat([o for o, _ in parts], 2), torch.cat([x for _, x in parts], 2)

    def one_shot(self) -> tuple[Tensor, Tensor]:
        scales = [self.stored[t].scale for t in TENSORS]
        result = get("naive_masked").run(
            *self.values, self.spec, recipe=self.recipe, scales=scales, sinks=self.sinks
        )
        return result.out, result.lse

    def hold(self, out: Tensor, lse: Tensor, blocks: int = 1) -> None:
        """Assert that a run keeps the ceiling."""
        truth = reference(*self.values, self.spec, sinks=self.sinks)
        bound, log_bound = ceiling(*self.values, self.spec, self.recipe, self.sinks, blocks)
        error = (out.double() - truth.out).abs()
        assert out.shape == truth.out.shape
        assert bool((error <= bound).all()), f"out off by {float((error / bound).max()):.3g} ceilings"
        log_error = (lse.double() - truth.lse).abs()
        assert bool((log_error <= log_bound).all()), (
            f"lse off by {float((log_error / log_bound).max()):.3g} ceilings"
        )


def whole(
    shape: Shape, recipe: str | Recipe = "fp32", spec: AttentionSpec = CAUSAL, sinks: Tensor | None = None,
    seed: int = 0, heads_apart: bool = True,
) -> Whole:  # fmt: skip
    recipe = get_recipe(recipe)
    x = draw_normal(shape, seed, heads_apart)
    return Whole(shape, spec, recipe, {t: quantize(x[t], t, recipe) for t in TENSORS}, sinks)


@st.composite
def chunkings(draw: Any, total: int) -> list[int]:
    """Chunks that add up to `total`, with single tokens and empty steps among them."""
    chunks: list[int] = []
    while sum(chunks) < total:
        chunks.append(draw(st.sampled_from([0, 1, 1, 2, 3, 5, 8])))
        chunks[-1] = min(chunks[-1], total - sum(chunks[:-1]))
    return [*chunks, *draw(st.sampled_from([[], [0]]))] or [0]


@st.composite
def wholes(draw: Any, windowed: bool = False) -> tuple[Whole, list[int]]:
    size = st.integers
    kv_heads, length = draw(size(1, 2)), draw(size(0, 14))
    shape = Shape(
        draw(size(1, 2)), kv_heads * draw(size(1, 3)), length, draw(size(1, 8)),
        kv_heads=kv_heads, value_dim=draw(size(1, 6)),
    )  # fmt: skip
    left = draw(size(0, 5)) if windowed else draw(st.none() | size(0, 5))
    spec = AttentionSpec(
        causal=True,
        window=None if left is None else (left, draw(st.sampled_from([0, None]))),
        scale=draw(st.sampled_from([None, None, 0.3])),
        softcap=draw(st.sampled_from([None, None, 3.0])),
    )
    recipe = scaled(draw(st.sampled_from(RECIPES)), draw(st.sampled_from(["tensor", "head", "token"])))
    sinks = None
    if draw(st.booleans()):
        values = st.sampled_from([-math.inf, -1.0, 0.0, 2.5, 5.0])
        sinks = torch.tensor([draw(values) for _ in range(shape.heads)], dtype=torch.float64)
    return whole(shape, recipe, spec, sinks, draw(size(0, 2**31))), draw(chunkings(length))


# --- every chunking, every cache ----------------------------------------------------------------------------------


@given(wholes(), st.integers(1, 7), st.integers(0, 99))
@settings(max_examples=100)
def test_a_session_in_any_chunks_is_one_shot_attention(
    case: tuple[Whole, list[int]], block: int, seed: int
) -> None:
    problem, chunks = case
    problem.hold(*problem.one_shot())
    contiguous = problem.play(chunks)
    problem.hold(*contiguous)
    cache = make_cache("paged", problem.shape, problem.recipe, block_size=block, seed=seed)
    paged = problem.play(chunks, cache)
    assert torch.equal(paged[0], contiguous[0])  # bit for bit: one order of tokens, one layout when read
    assert torch.equal(paged[1], contiguous[1])


@given(wholes(windowed=True), st.integers(0, 9))
@settings(max_examples=60)
def test_a_sliding_session_is_windowed_attention(case: tuple[Whole, list[int]], slack: int) -> None:
    problem, chunks = case
    assert problem.spec.left is not None
    size = problem.spec.left + 1 + slack
    cache = make_cache("sliding", problem.shape, problem.recipe, window=size)
    problem.hold(*problem.play(chunks, cache))
    assert isinstance(cache, SlidingCache)
    assert cache.first == max(0, problem.shape.q_len - size)


@pytest.mark.parametrize("kind", ["contiguous", "paged", "sliding"])
def test_under_fp64_a_session_errs_by_less_than_1e_13_of_the_values(kind: str) -> None:
    spec = AttentionSpec(causal=True, window=(20, 0))
    problem = whole(
        Shape(2, 4, 60, 16, kv_heads=2), "fp64", spec, torch.tensor([0.5, 3.0, -1.0, 0.0]).double()
    )
    cache = make_cache(kind, problem.shape, problem.recipe, window=32, block_size=8)
    out, _ = problem.play([17, 0, 1, 1, 30, 11], cache)
    truth = reference(*problem.values, spec, sinks=problem.sinks)
    size = scores_of(*problem.values[:2], spec)[1].max() * problem.values[2].abs().amax((2, 3), keepdim=True)
    assert bool(((out - truth.out).abs() <= 1e-13 * size.repeat_interleave(2, 1)).all())


@pytest.mark.parametrize("granularity", ["tensor", "head", "token"])
@pytest.mark.parametrize("recipe", ["fp8_e4m3", "fp8_kv"])
def test_an_fp8_cache_keeps_codes_and_scales_whatever_their_granularity(
    recipe: str, granularity: str
) -> None:
    problem = whole(Shape(2, 6, 40, 32, kv_heads=3), scaled(recipe, granularity))
    scale = problem.stored["v"].scale
    assert scale is not None
    assert not bool((scale == 1).any())
    session = problem.session()
    rows = slice(0, 40)
    out, lse = session.step(*(problem.stored[t].codes for t in TENSORS), problem.scales(rows))
    problem.hold(out, lse)
    k, v = session.cache.read(torch.float64)
    assert torch.equal(k, problem.stored["k"].codes)
    assert torch.equal(v, problem.stored["v"].codes)
    codes = 2 * 2 * 3 * 40 * 32
    assert session.nbytes == codes + (4 * 2 * 2 * 3 * 40 if granularity == "token" else 0)
    assert torch.equal(out[..., 0], torch.zeros_like(out[..., 0]))  # F53: the zero channel, exactly


def test_one_heads_scale_for_all_heads_breaks_the_ceiling() -> None:
    """F55: what the tests above would see if scales per head were read as one."""
    problem = whole(Shape(1, 2, 24, 16), "fp8_e4m3")
    first = {t: Stored(s.codes, s.scale[:, :1]) for t, s in problem.stored.items() if s.scale is not None}
    wrong = replace(problem, stored=first)
    out, lse = wrong.play([8, 16])
    with pytest.raises(AssertionError, match="ceilings"):
        problem.hold(out, lse)


# --- paged: only what was written (F47) ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32]
)
def test_nine_tokens_in_blocks_of_four_are_read_without_tail_or_stale_block(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 3, 9, d, generator=g).to(dtype).float() for d in (5, 4))
    cache = PagedCache(2, 3, 16, 5, 4, dtype, dtype, block_size=4, seed=7)
    plain = KVCache(2, 3, 16, 5, 4, dtype, dtype)
    for rows in (slice(0, 3), slice(3, 3), slice(3, 4), slice(4, 9)):
        cache.append(k[:, :, rows], v[:, :, rows])
        plain.append(k[:, :, rows], v[:, :, rows])
    assert (
        int(torch.isnan(cache.k_pool.float()).all(-1).all(-1)[cache.table[0, 2]].sum()) == 3
    )  # the tail is NaN
    cache.table[:, 3] = cache.table[:, 0]  # stale: a block of somebody else's tokens
    assert cache.nbytes == plain.nbytes
    for got, want in zip(cache.read(torch.float32), plain.read(torch.float32), strict=True):
        assert torch.equal(got, want)
    swapped = cache.table[0, [1, 0]]
    cache.table[0, :2] = swapped  # pages in another order are other tokens: the table is what is read
    assert torch.equal(cache.read(torch.float32)[0][0, :, :8], k[0][:, [4, 5, 6, 7, 0, 1, 2, 3]])


@given(wholes(), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=30)
def test_stale_entries_and_unwritten_slots_change_no_bit(
    case: tuple[Whole, list[int]], block: int, seed: int
) -> None:
    problem, chunks = case
    clean, _ = problem.play(
        chunks, make_cache("paged", problem.shape, problem.recipe, block_size=block, seed=None)
    )
    wider = replace(problem.shape, kv_len=problem.shape.q_len + 3 * block)
    cache = make_cache("paged", wider, problem.recipe, block_size=block, seed=seed)
    assert isinstance(cache, PagedCache)
    used = -(-problem.shape.q_len // block)
    # No entry beyond the used ones may be followed: 10⁶ is outside the pool, an index error if it were.
    cache.table[:, used:] = 10**6
    out, _ = problem.play(chunks, cache)
    assert torch.equal(out, clean)
    assert not bool(torch.isnan(out).any())


def test_blocks_are_shuffled_by_seed_and_no_block_serves_two_sequences() -> None:
    def table(seed: int | None) -> Tensor:
        cache = PagedCache(3, 1, 32, 2, 2, torch.float32, torch.float32, block_size=4, seed=seed)
        cache.append(torch.zeros(3, 1, 30, 2), torch.zeros(3, 1, 30, 2))
        assert cache.free_blocks == 0
        return cache.table

    assert torch.equal(table(5), table(5))
    assert not torch.equal(table(5), table(6))
    assert not torch.equal(table(5), table(None))
    for seed in (None, 5):
        assert sorted(table(seed).flatten().tolist()) == list(range(1, 25))


# --- sliding: no more than the window ------------------------------------------------------------------------------


def test_a_ring_of_exactly_the_window_takes_a_long_chunk_in_pieces() -> None:
    spec = AttentionSpec(causal=True, window=(7, 0))
    problem = whole(Shape(2, 4, 50, 8, kv_heads=2), scaled("fp8_e4m3", "token"), spec)
    cache = make_cache("sliding", problem.shape, problem.recipe, window=8)
    problem.hold(*problem.play([30, 20], cache))
    assert cache.nbytes == 2 * 2 * 2 * 8 * 8


@pytest.mark.parametrize(
    "spec", [CAUSAL, AttentionSpec(causal=True, window=(8, 0)), AttentionSpec(causal=True, window=(None, 0))]
)
def test_a_spec_that_sees_older_keys_than_the_ring_holds_is_refused(spec: AttentionSpec) -> None:
    shape = Shape(1, 1, 4, 8)
    with pytest.raises(
        ValueError, match=r"sliding cache of 8 tokens does not hold them; allowed: .*left ≤ 7"
    ):
        Session(shape, spec, "fp32", cache=make_cache("sliding", shape, get_recipe("fp32"), window=8))


def test_a_query_whose_keys_have_been_dropped_is_refused() -> None:
    problem = whole(Shape(1, 1, 12, 8), "fp32", AttentionSpec(causal=True, window=(3, 0)))
    session = problem.session(make_cache("sliding", problem.shape, problem.recipe, window=4))
    q, k, v = problem.values
    session.append(k, v)
    with pytest.raises(ValueError, match=r"a query at 10 with window=\(3, 0\) sees keys before 8"):
        session.attend(q[:, :, 10:])
    out, _ = session.attend(q[:, :, 11:])
    assert out.shape == (1, 1, 1, 8)


# --- relations between runs (F48, F49, F50) ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8_e4m3"])
def test_decode_and_prefill_of_the_last_row_are_both_within_their_precision(recipe: str) -> None:
    problem = whole(Shape(1, 8, 384, 64), recipe, heads_apart=False)
    prefill, decode = problem.play([384]), problem.play([383, 1])
    problem.hold(*prefill)
    problem.hold(*decode)
    fmt = problem.recipe.out_format
    apart = invariance(prefill[0][:, :, -1], decode[0][:, :, -1], fmt)
    bound = 2 * ceiling(*problem.values, CAUSAL, problem.recipe)[0][:, :, -1]
    assert bool(((prefill[0] - decode[0])[:, :, -1].abs() <= bound).all()), str(apart)
    assert torch.equal(
        prefill[0][:, :, :383], problem.play([384])[0][:, :, :383]
    )  # one chunking is one set of bits


def test_fp8_probabilities_depend_on_the_key_block_once_a_hot_key_comes_later() -> None:
    """F49: P is rounded relative to the maximum so far, which in blocks of 96 lacks key 96 and in blocks of 128 not."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=g, dtype=torch.float64) for n in (1, 139, 139))
    k[:, :, 96] = q[:, :, 0] / 2  # a score near 4, where the others' are of size 1
    apart = {}
    for n in (88, 96, 97, 128, 139):
        stored = {
            t: quantize(x, t, get_recipe("fp8_e4m3"))
            for t, x in (("q", q), ("k", k[:, :, :n]), ("v", v[:, :, :n]))
        }
        problem = Whole(Shape(1, 1, 1, 64, kv_len=n), CAUSAL, get_recipe("fp8_e4m3"), stored)
        scales = [stored[t].scale for t in TENSORS]
        runs = [
            get("online_softmax").run(*problem.values, CAUSAL, recipe="fp8_e4m3", scales=scales, block=block)
            for block in (96, 128)
        ]
        for run in runs:
            problem.hold(run.out, run.lse, blocks=2)
        apart[n] = invariance(*runs, "bf16")
    assert apart[88].bits_equal
    assert apart[96].bits_equal
    assert all(not apart[n].bits_equal for n in (97, 128, 139)), {n: str(a) for n, a in apart.items()}
    assert "ulps of bf16" in str(apart[97])


def test_a_session_has_no_key_blocks_so_fp8_decode_meets_prefill() -> None:
    """The cure of F49: rows 88 … 138 one by one and in one piece round P against the same maximum. Scores may still
    differ in their last bits, so the claim is a ceiling, not bits."""
    problem = whole(Shape(1, 1, 139, 64), "fp8_e4m3", heads_apart=False)
    problem.hold(*problem.play([88] + [1] * 51))
    problem.hold(*problem.play([139]))


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8_kv"])
def test_a_row_alone_and_in_a_batch_are_the_same_within_their_precision(recipe: str) -> None:
    """F50: the last row alone, with 63 others, and with seven batchmates."""
    problem = whole(Shape(8, 2, 64, 32), scaled(recipe, "head"), heads_apart=False)
    bound = 2 * ceiling(*problem.values, CAUSAL, problem.recipe)[0][:1, :, -1:]
    batch = problem.play([64])[0][:1, :, -1:]
    alone = {
        t: Stored(s.codes[:1], None if s.scale is None else s.scale[:1]) for t, s in problem.stored.items()
    }
    single = replace(problem, shape=replace(problem.shape, batch=1), stored=alone)
    for chunks in ([64], [63, 1]):
        row = single.play(chunks)[0][:, :, -1:]
        apart = invariance(row, batch, problem.recipe.out_format)
        assert bool(((row - batch).abs() <= bound).all()), str(apart)
        assert apart.bits_equal == torch.equal(row, batch)


# --- as algorithms ------------------------------------------------------------------------------------------------


def near(got: Tensor, want: Tensor) -> bool:
    """Same classes, and as near as FP64 sums of at most 10 keys of size ≲ 4 are: 1e-13 is some 450 u."""
    finite = torch.isfinite(want)
    classes = torch.equal(torch.isfinite(got), finite) and torch.equal(torch.isnan(got), torch.isnan(want))
    return classes and bool(((got - want).abs()[finite] <= 1e-13 * (1 + want.abs()[finite])).all())


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("keys", [5, 7, 9])
def test_lengths_masks_and_biases_follow_their_rows_through_the_chunks(
    chunk: int, align: str, keys: int
) -> None:
    """What drawn calls meet too seldom: ragged lengths, with and without a mask, in more than one chunk."""
    g = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(3, 2, n, 4, generator=g, dtype=torch.float64) for n in (7, keys, keys))
    spec = AttentionSpec(causal=True, align=align)
    mask = torch.rand(3, 1, 7, keys, generator=g) > 0.3
    lens = torch.tensor([0, 3, keys])
    bias = torch.randn(2, 7, keys, generator=g, dtype=torch.float64)
    for more in ({"kv_lens": lens}, {"kv_lens": lens, "mask": mask}, {"mask": mask, "bias": bias}):
        truth = reference(q, k, v, spec, **more)
        result = CHUNKED_DECODE.run(q, k, v, spec, recipe="fp64", **more, chunk=chunk)
        assert near(result.out, truth.out)
        assert near(result.lse, truth.lse)
    sliding = Algorithm("sliding", lambda ar, p: run_session(ar, p, chunk, "sliding"), causal_only=True)
    narrow = replace(spec, window=(2, 0))
    result, truth = (
        f(q, k, v, narrow, mask=mask, bias=bias) for f in (partial(sliding.run, recipe="fp64"), reference)
    )
    assert near(result.out, truth.out)


@pytest.mark.parametrize("algorithm", [CHUNKED_DECODE, PAGED_DECODE], ids=lambda a: a.name)
@pytest.mark.parametrize("granularity", ["tensor", "head", "token"])
def test_a_registered_session_carries_the_scales_of_its_inputs(
    algorithm: Algorithm, granularity: str
) -> None:
    problem = whole(Shape(2, 4, 37, 16, kv_heads=2), scaled("fp8_e4m3", granularity))
    scales = [problem.stored[t].scale for t in TENSORS]
    result = algorithm.run(*problem.values, CAUSAL, recipe=problem.recipe, scales=scales, chunk=5)
    problem.hold(result.out, result.lse)


def test_hazards_of_a_session_are_placed_in_the_whole_problem() -> None:
    q, k, v = (torch.ones(1, 2, 12, 4) for _ in range(3))
    q[0, 1, 9, 0] = math.nan
    shape, recipe = Shape(1, 2, 12, 4), get_recipe("fp16_eager")
    ledger = RangeLedger(shape, recipe)
    CHUNKED_DECODE.run(q, k, v, CAUSAL, recipe=recipe, watch=ledger, chunk=5)
    places = {
        h.where for h in ledger.hazards() if h.kind is HazardKind.NON_FINITE and h.stage == "scores_raw"
    }
    assert places == {(0, 1, 9, 0)}


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_session_that_is_not_causal_is_refused() -> None:
    with pytest.raises(ValueError, match="not causal; allowed: causal=True"):
        Session(Shape(), AttentionSpec())
    for algorithm in (CHUNKED_DECODE, PAGED_DECODE):
        assert algorithm.refusals(AttentionSpec(), Shape(), "fp32")


@pytest.mark.parametrize(
    ("cache", "k", "v", "told"),
    [
        (PagedCache, (1, 2, 3, 4), (1, 2, 2, 4), "k has 3 tokens and v 2"),
        (SlidingCache, (1, 2, 3, 4), (1, 2, 2, 4), "k has 3 tokens and v 2"),
        (PagedCache, (1, 1, 3, 4), (1, 2, 3, 4), r"k is \(1, 1, 3, 4\); allowed: .*\[1, 2, n, 4\]"),
        (SlidingCache, (1, 2, 3, 4), (1, 2, 3), r"v is \(1, 2, 3\); allowed"),
        (PagedCache, (1, 2, 9, 4), (1, 2, 9, 4), "9 tokens after 0 exceed the cache of 8"),
    ],
)
def test_tokens_that_do_not_fit_are_refused_and_nothing_is_kept(
    cache: Any, k: Any, v: Any, told: str
) -> None:
    held = cache(1, 2, 8, 4, 4, torch.bfloat16, torch.bfloat16)
    with pytest.raises(ValueError, match=told) as caught:
        held.append(torch.zeros(k), torch.zeros(v))
    assert "\n" not in str(caught.value)
    assert held.length == 0


@pytest.mark.parametrize("cache", [PagedCache, SlidingCache])
def test_a_value_that_is_no_code_is_refused_rather_than_rounded(cache: Any) -> None:
    held = cache(1, 1, 8, 2, 2, torch.float8_e4m3fn, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"v holds 1\.00999.*no value of torch.float8_e4m3fn"):
        held.append(torch.ones(1, 1, 1, 2), torch.full((1, 1, 1, 2), 1.01))
    held.append(torch.full((1, 1, 1, 2), math.nan), torch.full((1, 1, 1, 2), -0.0))
    k, v = held.read(torch.float32)
    assert bool(torch.isnan(k).all())
    assert bool(torch.signbit(v).all())


@pytest.mark.parametrize("size", [0, -1, True, 2.0, None])
def test_a_block_size_or_window_that_is_no_positive_integer_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=r"block_size is .*; allowed: an integer ≥ 1"):
        PagedCache(1, 1, 8, 2, 2, torch.float32, torch.float32, block_size=size)
    with pytest.raises(ValueError, match=r"window is .*; allowed: an integer ≥ 1"):
        SlidingCache(1, 1, size, 2, 2, torch.float32, torch.float32)


def test_scales_come_with_every_token_or_with_none() -> None:
    shape, one = Shape(1, 2, 1, 4, kv_len=8), torch.ones(1, 2, 1, 4)
    scale = torch.ones(1, 2, 1, 1)
    fixed = Session(shape, CAUSAL, "fp8_e4m3", scales=(None, scale, None))
    with pytest.raises(ValueError, match="k has a scale for all tokens already"):
        fixed.step(one, one, one, (None, scale, None))
    session = Session(shape, CAUSAL, "fp8_e4m3")
    session.step(one, one, one, (scale, scale, scale))
    with pytest.raises(ValueError, match="scales of k come with their tokens; allowed: with every token"):
        session.step(one, one, one)
    assert session.length == 1
    bare = Session(shape, CAUSAL, "fp8_e4m3")
    bare.step(one, one, one)
    with pytest.raises(ValueError, match="scales of v are missing for earlier tokens"):
        bare.step(one, one, one, (None, None, scale))
    with pytest.raises(
        ValueError, match=r"the scale of q is \(1, 2, 3, 1\); allowed: \[1\|1, 2\|1, 1, 1\|4\], one per token"
    ):
        bare.step(one, one, one, (torch.ones(1, 2, 3, 1), None, None))
    with pytest.raises(
        ValueError, match=r"the scale of v is \(2, 1\); allowed: \[B\|1, H\|1, 1, 1\] for all tokens"
    ):
        Session(shape, CAUSAL, "fp8_e4m3", scales=(None, None, torch.ones(2, 1)))


def test_tensors_that_do_not_fit_the_session_are_refused_before_anything_is_kept() -> None:
    session = Session(Shape(1, 2, 1, 4, kv_len=8), CAUSAL)
    one = torch.ones(1, 2, 3, 4)
    for q, k, v in ((one[0], one, one), (one, one[:, :, :2], one), (one, one, one[..., :3])):
        with pytest.raises(ValueError, match=r"[qkv] is \(.*\); allowed: \("):
            session.step(q, k, v)
    assert session.length == 0


@pytest.mark.parametrize(
    ("chunks", "kind", "told"),
    [
        ([3, 3], "contiguous", r"chunks are \[3, 3\]; allowed: numbers ≥ 0 that add up to q_len = 5"),
        ([6, -1], "contiguous", r"add up to q_len = 5"),
        (0, "contiguous", "chunk is 0; allowed: an integer ≥ 1"),
        (2, "ring", "cache kind is 'ring'; allowed: contiguous, paged, sliding"),
        (2, "sliding", "a sliding cache needs a window"),
    ],
)
def test_a_run_that_cannot_be_is_told_why(chunks: Any, kind: str, told: str) -> None:
    algorithm = Algorithm("drawn", lambda ar, p: run_session(ar, p, chunks, kind))
    with pytest.raises(ValueError, match=told):
        algorithm.run(*(torch.ones(1, 1, 5, 2) for _ in range(3)), CAUSAL)


def test_a_sliding_run_of_sequences_of_different_lengths_is_refused() -> None:
    algorithm = Algorithm("drawn", lambda ar, p: run_session(ar, p, 2, "sliding"))
    spec = AttentionSpec(causal=True, window=(2, 0))
    with pytest.raises(ValueError, match="holds sequences of one length; allowed: no kv_lens"):
        algorithm.run(*(torch.ones(1, 1, 5, 2) for _ in range(3)), spec, kv_lens=torch.tensor([3]))


# --- how invariance is told ---------------------------------------------------------------------------------------


def test_invariance_tells_bits_from_ulps() -> None:
    a = torch.tensor([1.0, 2.0, math.nan, 0.0])
    assert str(invariance(a, a.clone(), "bf16")) == "equal bits in 4 elements"
    b = torch.tensor([1.0, 2.0 + 2 * 2.0**-6, math.nan, 0.0])
    apart = invariance(a, b, "bf16")
    assert (apart.max_ulps, apart.differing, apart.worst) == (2.0, 1, (1,))
    assert str(apart) == "1 of 4 elements differ, at most 2 ulps of bf16 at (1,)"


def test_signed_zeros_differ_by_no_ulp_and_nan_against_a_number_by_infinitely_many() -> None:
    zero = invariance(torch.tensor([0.0]), torch.tensor([-0.0]), "fp16")
    assert (zero.bits_equal, zero.max_ulps, zero.differing) == (False, 0.0, 1)
    for odd in (math.nan, math.inf):
        assert invariance(torch.tensor([1.0]), torch.tensor([odd]), "fp16").max_ulps == math.inf
    assert invariance(torch.tensor([math.inf]), torch.tensor([-math.inf]), "fp16").max_ulps == math.inf


def test_outputs_of_two_shapes_have_no_invariance() -> None:
    with pytest.raises(ValueError, match=r"outputs are \(1,\) and \(2,\); allowed: one shape"):
        invariance(torch.ones(1), torch.ones(2), "fp32")


def test_a_session_uses_the_arithmetic_it_is_given() -> None:
    arithmetic = Arithmetic(get_recipe("bf16"))
    session = Session(Shape(1, 1, 1, 4, kv_len=8), CAUSAL, arithmetic)
    session.step(*(torch.ones(1, 1, 3, 4) for _ in range(3)))
    assert session.arithmetic is arithmetic
    assert arithmetic.flops == 2 * 2 * 3 * 3 * 4
