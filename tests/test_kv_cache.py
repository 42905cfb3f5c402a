"""The KV cache: exact codes in the storage's own dtype, its errors, its bytes, and why there is no Q cache."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from harness import AttentionSpec, Shape, get, get_recipe
from harness.arithmetic import DTYPES
from harness.attention.kv_cache import KVCache
from harness.cost import SCALE_BYTES, kv_bytes_per_token
from harness.recipe import TENSORS

CAUSAL = AttentionSpec(causal=True)


def cache(capacity: int = 5, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    return KVCache(2, 3, capacity, 4, 6, dtype, dtype)


def tokens(n: int, value: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((2, 3, n, 4), value), torch.full((2, 3, n, 6), -value)


def test_appended_tokens_are_read_in_order() -> None:
    held = cache()
    for n, value in ((2, 1.0), (0, 9.0), (1, 2.0), (2, 3.0)):
        held.append(*tokens(n, value))
    k, v = held.read(torch.float64)
    assert held.length == held.capacity == 5
    assert k[0, 0, :, 0].tolist() == [1, 1, 2, 3, 3]
    assert torch.equal(v[..., :4], -k)
    assert k.dtype == v.dtype == torch.float64


def test_only_what_was_written_is_read() -> None:
    held = cache()
    held.append(*tokens(2))
    assert held.read(torch.float32)[0].shape == (2, 3, 2, 4)
    assert held.read(torch.float32)[1].shape == (2, 3, 2, 6)


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (
            (2, 3, 1, 5),
            (2, 3, 1, 6),
            r"k is \(2, 3, 1, 5\); allowed: \[B, Hkv, n, ·\] = \[2, 3, n, 4\] for this cache",
        ),
        (
            (2, 3, 1, 4),
            (2, 3, 1, 4),
            r"v is \(2, 3, 1, 4\); allowed: \[B, Hkv, n, ·\] = \[2, 3, n, 6\] for this cache",
        ),
        ((2, 3, 2, 4), (2, 3, 1, 6), "2 tokens of k and 1 of v; allowed: as many of both"),
        (
            (1, 3, 1, 4),
            (1, 3, 1, 6),
            r"k is \(1, 3, 1, 4\); allowed: \[B, Hkv, n, ·\] = \[2, 3, n, 4\] for this cache",
        ),
        (
            (3, 1, 4),
            (3, 1, 6),
            r"k is \(3, 1, 4\); allowed: \[B, Hkv, n, ·\] = \[2, 3, n, 4\] for this cache",
        ),
        ((2, 3, 4, 4), (2, 3, 4, 6), "4 tokens after 2 exceed the cache of 5; make a larger one"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_and_changes_nothing(
    k: tuple[int, ...], v: tuple[int, ...], message: str
) -> None:
    held = cache()
    held.append(*tokens(2))
    with pytest.raises(ValueError, match=message) as caught:
        held.append(torch.zeros(k), torch.zeros(v))
    assert "\n" not in str(caught.value)
    assert held.length == 2
    assert torch.equal(held.read(torch.float32)[0], tokens(2)[0])


def test_a_cache_of_no_tokens_takes_none() -> None:
    held = cache(0)
    held.append(*tokens(0))
    assert held.nbytes == 0
    with pytest.raises(ValueError, match="1 tokens after 0 exceed the cache of 0"):
        held.append(*tokens(1))


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
def test_every_code_of_the_storage_format_comes_back_unchanged(fmt: str) -> None:
    dtype = DTYPES[fmt]
    bits = 8 * dtype.itemsize
    kind = {8: torch.int8, 16: torch.int16}[bits]
    codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).to(kind).view(dtype)
    column = codes.float()[None, None, :, None]
    held = KVCache(1, 1, 2**bits, 1, 1, dtype, dtype)
    held.append(column, column.double())
    for base in (torch.float32, torch.float64):
        for read in held.read(base):
            assert torch.equal(torch.isnan(read), torch.isnan(column))
            known = ~torch.isnan(column)
            assert torch.equal(read[known], column[known].to(base))
            assert torch.equal(torch.signbit(read[known]), torch.signbit(column[known]))


@pytest.mark.parametrize(
    "recipe", ["fp64", "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e4m3_unscaled", "fp8_kv"]
)
def test_its_bytes_are_the_kv_bytes_of_the_cost_model(recipe: str) -> None:
    r, shape = get_recipe(recipe), Shape(2, 6, 7, 4, kv_heads=3, value_dim=6)
    held = KVCache(2, 3, 9, 4, 6, DTYPES[r.storage["k"]], DTYPES[r.storage["v"]])
    held.append(*tokens(7))
    # The cost model also counts the FP32 scales, one per head here; they live beside the cache.
    scales = sum(SCALE_BYTES * 3 for t in ("k", "v") if t in r.scaling and r.scaling[t].source == "amax")
    # Of one sequence; the spread of a head's scale over its tokens is a float division: 2⁻⁵⁰ relative.
    assert kv_bytes_per_token(shape, r) * 7 == pytest.approx(held.nbytes / 2 + scales, rel=2.0**-50)
    assert kv_bytes_per_token(shape, replace(r, scaling={})) * 7 * 2 == held.nbytes


@pytest.mark.parametrize("recipe", ["fp64", "fp32", "bf16", "fp16_eager", "fp8_e4m3"])
def test_a_step_needs_its_own_query_alone_so_there_is_no_q_cache(recipe: str) -> None:
    """o_t = softmax(scale·q_t K_{≤t}ᵀ) V_{≤t}: no other query stands in it, every earlier key and value does."""
    shape, t = Shape(1, 4, 12, 16, kv_heads=2), 9
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(shape.tensor(x), generator=g, dtype=torch.float64) for x in TENSORS)
    r = replace(get_recipe(recipe), scaling={})  # an amax over other rows would join them

    def row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return get("decode_with_cache").run(q, k, v, CAUSAL, recipe=r, quantize=True, steps=12).out[:, :, t]

    want = row(q, k, v)
    other = torch.randn(q.shape, generator=g, dtype=torch.float64)
    other[:, :, t] = q[:, :, t]
    assert torch.equal(row(other, k, v), want)
    assert torch.equal(
        row(torch.full_like(q, math.nan).index_copy_(2, torch.tensor([t]), q[:, :, t : t + 1]), k, v), want
    )
    for past in range(t + 1):
        changed_k, changed_v = k.clone(), v.clone()
        changed_k[:, :, past] += 2
        changed_v[:, :, past] += 2
        assert not torch.equal(row(q, changed_k, v), want), past
        assert not torch.equal(row(q, k, changed_v), want), past
    future_k, future_v = k.clone(), v.clone()
    future_k[:, :, t + 1 :], future_v[:, :, t + 1 :] = 7.0, -7.0
    assert torch.equal(row(q, future_k, future_v), want)


def test_a_value_the_storage_lacks_is_refused() -> None:
    held = KVCache(1, 1, 2, 1, 1, torch.float8_e4m3fn, torch.bfloat16)
    with pytest.raises(ValueError, match=r"^k holds 0\.3, no value of torch\.float8_e4m3fn; allowed: codes"):
        held.append(torch.full((1, 1, 1, 1), 0.3, dtype=torch.float64), torch.ones(1, 1, 1, 1))
    assert held.length == 0
