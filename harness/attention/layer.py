"""The attention layer, around any attention: X `[B, T, D]` → LayerNorm(X + Z), written over `Arithmetic`.

    Q = X W_Q   K = X W_K   V = X W_V      each stored (`proj`), q and k turned by their positions (`rope`)
    Y = Attention(Q, K, V)                 q, k and v stored as the recipe stores them; Y `[B, T, N·H]` by its `out`
    Z = Y W_O                              stored (`z`)
    Out = LayerNorm(X + Z)                 the sum stored (`residual`), statistics in the base, the result (`norm`)

In training the whole sequence passes at once under the causal mask. In decoding step t makes q_t, k_t and v_t of x_t
alone, appends k_t and v_t to the cache and attends with q_t over k_1 … k_t, its own key among them: row t of the same.
There is no Q cache, since no later step looks at q_t.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness.arithmetic import DTYPES, Arithmetic, Block, Watcher
from harness.attention.kv_cache import KVCache
from harness.layer_store import StoredLayer, layer_recipe, store_operand, turns
from harness.operands import NO_EXTRAS
from harness.quantize import Stored, quantize
from harness.recipe import TENSORS, Recipe
from harness.spec import AttentionSpec, LayerSpec, Shape

Scales = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class LayerResult:
    """`out` `[B, T, D]` in the recipe's output dtype; what passed between its parts: the projections before they were
    stored, `stored` q, k and v, `y` `[B, N, T, H]`, `z` and `residual` `[B, 1, T, D]`; the FLOPs of the products."""

    out: Tensor
    projections: tuple[Tensor, Tensor, Tensor]
    stored: tuple[Stored, Stored, Stored]
    y: Tensor
    z: Tensor
    residual: Tensor
    flops: int

    @property
    def scales(self) -> Scales:
        """The scales of q, k and v."""
        q, k, v = (x.scale for x in self.stored)
        return q, k, v


def fixed(recipe: Recipe, name: str) -> bool:
    """Whether one scale serves tokens that have not come yet."""
    scaling = recipe.scaling.get(name)
    return scaling is not None and scaling.source != "unit" and scaling.granularity in ("tensor", "head")


def decoding_refusals(recipe: Recipe) -> tuple[str, ...]:
    """Why a recipe's scales cannot come token by token; empty when they can."""
    for name in TENSORS:
        scaling = recipe.scaling.get(name)
        if scaling is None or scaling.source == "unit":
            continue
        if scaling.granularity == "block" or (scaling.granularity == "mx" and name == "v"):
            rows = scaling.rows if scaling.granularity == "block" else "32"
            return (f"a scale of {name} spans {rows} tokens under {recipe.name}; decoding does not know it before the"
                    " last of them",)  # fmt: skip
    return ()


@dataclass
class _Placed:
    """A watcher told which tokens `[B, 1, T, ·]` are at work."""

    watch: Watcher
    first: int = 0

    def __call__(self, stage: str, before: Tensor, after: Tensor, block: Block) -> None:
        self.watch(stage, before, after, Block(self.first, before.shape[2]))

    def stagnation(self, stage: str, held: Tensor, added: Tensor, after: Tensor) -> None:
        self.watch.stagnation(stage, held, added, after)


@dataclass(frozen=True)
class _Shifted:
    """A watcher of attention told of rows of the whole sequence, where a step counts its own."""

    watch: Watcher
    first: int

    def __call__(self, stage: str, before: Tensor, after: Tensor, block: Block) -> None:
        self.watch(stage, before, after, replace(block, row=block.row + self.first))

    def stagnation(self, stage: str, held: Tensor, added: Tensor, after: Tensor) -> None:
        self.watch.stagnation(stage, held, added, after)


class Layer:
    """One layer under one recipe. `attention` is any implementation (`run_stored`); `watch` sees the layer's own
    roundings, `attention_watch` those inside attention.

    Raises ValueError for parts that do not fit, and for a case that the attention refuses.
    """

    def __init__(
        self, attention: Any, shape: Shape, spec: AttentionSpec, layer: LayerSpec, recipe: Recipe,
        watch: Watcher | None = None, attention_watch: Watcher | None = None,
    ) -> None:  # fmt: skip
        layer.check(shape, spec)
        if refused := attention.refusals(spec, shape, recipe):
            raise ValueError("; ".join(refused))
        self.attention, self.shape, self.spec, self.layer, self.recipe = attention, shape, spec, layer, recipe
        self._placed = None if watch is None else _Placed(watch)
        self.arithmetic = Arithmetic(layer_recipe(recipe), self._placed)
        self.attention_watch = attention_watch

    # --- the two forms -----------------------------------------------------------------------------------------------

    def train(self, stored: StoredLayer, scales: Scales | None = None) -> LayerResult:
        """The whole sequence at once. `scales` of q, k and v replace those that this sequence would have."""
        with torch.no_grad():
            before = self.arithmetic.flops
            made = self.project(stored, 0)
            qkv = self.store(made, scales)
            result = self.attention.run_stored(qkv, self.spec, self.recipe, NO_EXTRAS, watch=self.attention_watch)
            return self.finish(stored, made, qkv, result, before)

    def decode(self, stored: StoredLayer, scales: Scales | None = None) -> LayerResult:
        """The last `layer.steps` tokens one at a time, those before them as one chunk. One scale for all tokens, where
        the recipe has such, has to be known before the first: `scales`, as a calibration gives them."""
        steps, n = self.layer.steps or 0, stored.x.shape[2]
        session = Decoding(self, stored.x.shape[0], scales)
        chunks = [slice(0, n - steps)] if n > steps else []
        chunks += [slice(t, t + 1) for t in range(n - steps, n)]
        parts = [session.step(stored.rows(tokens)) for tokens in chunks]
        return LayerResult(
            torch.cat([p.out for p in parts], 1), _joined([p.projections for p in parts]),
            session.held([p.stored[0] for p in parts]),
            *(torch.cat([getattr(p, name) for p in parts], 2) for name in ("y", "z", "residual")),
            flops=sum(p.flops for p in parts),
        )  # fmt: skip

    # --- the parts ---------------------------------------------------------------------------------------------------

    def project(self, stored: StoredLayer, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """q `[B, N, T, H]`, k and v `[B, K, T, H]` of these tokens, the first at position `first`."""
        self._at(first)
        heads = (self.shape.heads, self.shape.Hkv, self.shape.Hkv)
        q, k, v = (
            self._linear(stored.operand, stored.matrices[name], "proj")[:, 0].unflatten(-1, (n, -1)).transpose(1, 2)
            for name, n in zip(TENSORS, heads, strict=True)
        )
        return self._turned(q, first), self._turned(k, first), v

    def store(self, made: tuple[Tensor, Tensor, Tensor], scales: Scales | None) -> tuple[Stored, Stored, Stored]:
        """q, k and v as attention finds them."""
        given = (None, None, None) if scales is None else scales
        q, k, v = (
            quantize(t.contiguous(), name, self.recipe, scale if fixed(self.recipe, name) else None)
            for t, name, scale in zip(made, TENSORS, given, strict=True)
        )
        return q, k, v

    def _linear(self, x: Stored, w: Stored, stage: str) -> Tensor:
        """x `[B, 1, T, in]` times w `[1, 1, out, in]` transposed: codes multiplied, scales joined to the product, but
        for blocks along the sum, which are descaled on load."""
        ar = self.arithmetic
        along = [s.scale is not None and s.scale.shape[3] > 1 for s in (x, w)]
        a, b = (s.values if inside else s.codes for s, inside in zip((x, w), along, strict=True))
        t = ar.matmul(a.to(ar.dtype), b.to(ar.dtype).mT.contiguous(), "gemm")
        if x.scale is not None and not along[0]:
            t = t * x.scale.to(ar.dtype)
        if w.scale is not None and not along[1]:
            t = t * w.scale.to(ar.dtype).mT
        return ar.cast(t, stage)

    def _turned(self, t: Tensor, first: int) -> Tensor:
        if self.layer.rope is None:
            return t
        positions = torch.arange(first, first + t.shape[2], device=t.device)
        angles = turns(self.layer.rope, positions, t.shape[3])
        cos, sin = angles.cos().to(t.dtype), angles.sin().to(t.dtype)
        low, high = t.chunk(2, -1)
        return self.arithmetic.cast(torch.cat((low * cos - high * sin, high * cos + low * sin), -1), "rope")

    def finish(
        self, stored: StoredLayer, made: tuple[Tensor, Tensor, Tensor], qkv: tuple[Stored, Stored, Stored],
        result: Any, before: int,
    ) -> LayerResult:  # fmt: skip
        """Heads joined, W_O, the residual and LayerNorm. `before`: FLOPs that are not these tokens'."""
        ar = self.arithmetic
        y = result.out.transpose(1, 2).flatten(2)[:, None]
        z = self._linear(store_operand(y, self.recipe), stored.matrices["o"], "z")
        r = ar.add(stored.x.to(ar.dtype), z, "residual")
        out = self._norm(r, stored)
        flops = ar.flops - before + result.flops
        dtype = DTYPES[self.recipe.out_format]
        return LayerResult(
            out[:, 0].to(dtype) if dtype.itemsize > 1 else out[:, 0], made, qkv, result.out, z, r, flops
        )

    def _norm(self, r: Tensor, stored: StoredLayer) -> Tensor:
        """γ·(r − mean)/√(variance + ε) + β, in the base but for its store."""
        centred = r - r.mean(-1, keepdim=True)
        spread = (centred * centred).mean(-1, keepdim=True) + self.layer.eps
        normal = centred * torch.rsqrt(spread)
        ar = self.arithmetic
        return ar.cast(normal * stored.gamma.to(ar.dtype) + stored.beta.to(ar.dtype), "norm")

    def _at(self, first: int) -> None:
        if self._placed is not None:
            self._placed.first = first


class Decoding:
    """The layer's decoding form: tokens arrive, K and V stay in a cache in their storage dtypes.

    `scales`: of q, k and v, for a recipe that has one for all tokens; scales per token come with their tokens.
    Raises ValueError for causality that is off, scales that are missing, and scales that span several tokens.
    """

    def __init__(self, layer: Layer, batch: int, scales: Scales | None = None) -> None:
        recipe, shape = layer.recipe, layer.shape
        if not layer.spec.causal:
            raise ValueError("the spec is not causal; allowed: causal=True, later tokens do not exist yet")
        if refused := decoding_refusals(recipe):
            raise ValueError("; ".join(refused))
        needed = [n for n in TENSORS if fixed(recipe, n)]
        if needed and scales is None:
            raise ValueError(
                f"{recipe.name} has one scale for all tokens of {', '.join(needed)}, which the first token does not know;"
                " give scales= from a calibration (those of a training pass do)"
            )
        self.layer, self.scales = layer, scales
        storage = [DTYPES[recipe.storage[n]] for n in "kv"]
        self.cache = KVCache(batch, shape.Hkv, shape.S, shape.head_dim, shape.E, *storage)
        self._by_token: dict[str, Tensor] = {}

    def step(self, stored: StoredLayer) -> LayerResult:
        """The next tokens `[B, 1, n, D]`: append their k and v, attend with their q over all so far."""
        layer, first = self.layer, self.cache.length
        with torch.no_grad():
            return self._step(layer, stored, first)

    def _step(self, layer: Layer, stored: StoredLayer, first: int) -> LayerResult:
        before = layer.arithmetic.flops
        made = layer.project(stored, first)
        q, k, v = layer.store(made, self.scales)
        self.cache.append(k.codes, v.codes)
        rules = replace(layer.spec, align="bottom-right")
        held = self.held([q], {"k": k, "v": v})
        watch = None if layer.attention_watch is None else _Shifted(layer.attention_watch, first)
        result = layer.attention.run_stored(held, rules, layer.recipe, NO_EXTRAS, watch=watch)
        return layer.finish(stored, made, (q, k, v), result, before)

    def held(self, q: list[Stored], new: dict[str, Stored] | None = None) -> tuple[Stored, Stored, Stored]:
        """These queries, and all keys and values so far, `new` ones' scales among them."""
        for name, x in (new or {}).items():
            if x.scale is not None and not fixed(self.layer.recipe, name):
                old = [self._by_token[name]] if name in self._by_token else []
                self._by_token[name] = torch.cat([*old, x.scale], 2)
        codes = self.cache.read(torch.float64)
        k, v = (
            Stored(c, self._by_token.get(n, self.scales[i] if self.scales and fixed(self.layer.recipe, n) else None))
            for n, c, i in zip("kv", codes, (1, 2), strict=True)
        )
        scale = q[0].scale
        if scale is not None and not fixed(self.layer.recipe, "q"):
            scale = torch.cat([x.scale for x in q if x.scale is not None], 2)
        return Stored(torch.cat([x.codes for x in q], 2), scale), k, v


def _joined(parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    return q, k, v
