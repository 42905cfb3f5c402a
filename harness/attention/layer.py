"""The attention layer, around any attention: X `[B, T, D]` → LayerNorm(X + Z), written over `Arithmetic`.

    Q = X W_Q   K = X W_K   V = X W_V      each stored (`proj`), q and k turned by their positions (`rope`)
    Y = Attention(Q, K, V)                 q, k and v stored as the recipe stores them; Y `[B, T, N·H]` by its `out`
    Z = Y W_O                              stored (`z`)
    Out = LayerNorm(X + Z)                 the sum stored (`residual`), statistics in the base, the result (`norm`)

Here the whole sequence passes at once, under the causal mask in training. `layer_decode` takes one token at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.arithmetic import DTYPES, Arithmetic, Block, Watcher
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


@dataclass
class _Placed:
    """A watcher told which tokens `[B, 1, T, ·]` are at work."""

    watch: Watcher
    first: int = 0

    def __call__(self, stage: str, before: Tensor, after: Tensor, block: Block) -> None:
        self.watch(stage, before, after, Block(self.first, before.shape[2]))

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

    def train(self, stored: StoredLayer, scales: Scales | None = None) -> LayerResult:
        """The whole sequence at once. `scales` of q, k and v replace those that this sequence would have."""
        with torch.no_grad():
            before = self.arithmetic.flops
            made = self.project(stored, 0)
            qkv = self.store(made, scales)
            result = self.attention.run_stored(
                qkv, self.spec, self.recipe, NO_EXTRAS, watch=self.attention_watch
            )
            return self.finish(stored, made, qkv, result, before)

    # --- the parts ---------------------------------------------------------------------------------------------------

    def project(self, stored: StoredLayer, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """q `[B, N, T, H]`, k and v `[B, K, T, H]` of these tokens, the first at position `first`."""
        self._at(first)
        shape = self.shape

        def heads(name: str, n: int) -> Tensor:
            made = self._linear(stored.operand, stored.matrices[name], "proj")[:, 0]
            return made.view(*made.shape[:2], n, shape.head_dim).transpose(1, 2)

        q, k, v = heads("q", shape.heads), heads("k", shape.Hkv), heads("v", shape.Hkv)
        return self._turned(q, first), self._turned(k, first), v

    def store(
        self, made: tuple[Tensor, Tensor, Tensor], scales: Scales | None
    ) -> tuple[Stored, Stored, Stored]:
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
