"""What a whole decoder's prefill and decode step compute and move.

Bytes are compulsory traffic, each counted once: every weight, K and V written, K and V read, and activations where a
matrix product reads or writes them (norms, residuals and softmax taken as fused). A kernel that reads K and V again for
each block of queries, and a naive one that stores L × S scores, move more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.cost.attention import attention_flops, kv_cache_bytes
from harness.cost.formulas import ffn_flops, product_flops, projections
from harness.cost.models import Model
from harness.formats import FORMATS, FloatFormat
from harness.recipe import RECIPES, TENSORS, Recipe
from harness.spec import AttentionSpec

CAUSAL = AttentionSpec(causal=True)


@dataclass(frozen=True)
class Work:
    """One prefill or one decode step. `flops` by part: projections, attention, ffn, head. The rest in bytes:
    `kv_cache` is what the cache holds afterwards."""

    flops: Mapping[str, int]
    weights: int
    kv_read: int
    kv_written: int
    activations: int
    kv_cache: int

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def moved(self) -> int:
        """Bytes moved in all."""
        return self.weights + self.kv_read + self.kv_written + self.activations

    @property
    def intensity(self) -> float:
        """FLOPs per byte of the whole."""
        return self.total_flops / self.moved

    @property
    def attention_intensity(self) -> float:
        """FLOPs of Q·Kᵀ and P·V per byte of K and V read. A batch does not raise it, grouped heads do."""
        return self.flops["attention"] / self.kv_read


def kv_storage(name: str) -> Recipe:
    """How K and V are stored, by a recipe's name, with its scales; or by a format's, without any.

    Raises ValueError naming the valid ones.
    """
    if name in RECIPES:
        return RECIPES[name]
    if name in FORMATS:
        return Recipe(name, storage=dict.fromkeys(TENSORS, name), at={"out": "bf16"})
    formats = ", ".join(f for f in FORMATS if f not in RECIPES)
    raise ValueError(f"unknown KV storage {name!r}; allowed: {', '.join(RECIPES)}; without scales: {formats}")


def prefill(model: Model, kv: Recipe, weights: FloatFormat, tokens: int, batch: int = 1) -> Work:
    """A prompt of `tokens` for each of `batch` sequences, causal, and the logits of its last token."""
    return _work(model, kv, weights, tokens, tokens, batch)


def decode_step(model: Model, kv: Recipe, weights: FloatFormat, context: int, batch: int = 1) -> Work:
    """One token for each of `batch` sequences, which attends over `context` keys, its own the last of them."""
    return _work(model, kv, weights, 1, context, batch)


def _work(model: Model, kv: Recipe, weights: FloatFormat, tokens: int, keys: int, batch: int) -> Work:
    rows, layers, m = batch * tokens, model.layers, model
    cached = layers * kv_cache_bytes(m.call(batch, tokens, keys), kv)
    before = layers * kv_cache_bytes(m.call(batch, tokens, keys - tokens), kv)
    products = projections(batch, tokens, m.width, m.heads, m.K, m.H).values()
    flops = {
        "projections": layers * sum(p.flops for p in products),
        "attention": layers * attention_flops(m.call(batch, tokens, keys), CAUSAL),
        "ffn": layers * ffn_flops(rows, m.width, m.ffn, m.ffn_matrices),
        "head": product_flops(batch, m.width, m.vocab),
    }
    # Of the embedding the tokens' own rows are read; a tied one is read whole, as the head.
    read = m.params if m.tied else m.params - max(m.embedding_params - rows * m.width, 0)
    # Per token of a layer: D into Q, K, V and out of O; Q out and in again, the heads' outputs out and in again; D into
    # the FFN and out of it, its inner vectors out (of all matrices but the last) and into the last.
    values = 4 * m.width + 4 * m.heads * m.H + m.ffn_matrices * m.ffn
    activations = layers * rows * values + batch * (m.width + m.vocab)
    return Work(
        flops,
        read * weights.bytes,
        cached,
        cached - before,
        activations * FORMATS[kv.out_format].bytes,
        cached,
    )
