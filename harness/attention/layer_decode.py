"""The layer in decoding: one token at a time over cached K and V.

Step t makes q_t, k_t and v_t of x_t alone, appends k_t and v_t to the cache and attends with q_t over k_1 … k_t, its
own key among them: row t of the training form. There is no Q cache, since no later step looks at q_t.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.arithmetic import DTYPES, Block, Watcher
from harness.attention.kv_cache import KVCache
from harness.attention.layer import Layer, LayerResult, Scales, fixed
from harness.layer_store import StoredLayer
from harness.operands import NO_EXTRAS
from harness.quantize import Stored
from harness.recipe import TENSORS, Recipe


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


@dataclass(frozen=True)
class _Shifted:
    """A watcher of attention told of rows of the whole sequence, where a step counts its own."""

    watch: Watcher
    first: int

    def __call__(self, stage: str, before: Tensor, after: Tensor, block: Block) -> None:
        self.watch(stage, before, after, replace(block, row=block.row + self.first))

    def stagnation(self, stage: str, held: Tensor, added: Tensor, after: Tensor) -> None:
        self.watch.stagnation(stage, held, added, after)


class Decoding:
    """The layer's decoding form: tokens arrive, K and V stay in a cache in their storage dtypes.

    `scales`: of q, k and v, for a recipe that has one for all tokens; scales per token come with their tokens.
    Raises ValueError for causality that is off, scales that are missing, and scales that span several tokens.
    """

    def __init__(
        self, layer: Layer, batch: int, scales: Scales | None = None, device: torch.device | str = "cpu"
    ) -> None:  # fmt: skip
        recipe, shape = layer.recipe, layer.shape
        if not layer.spec.causal:
            raise ValueError("the spec is not causal; allowed: causal=True, later tokens do not exist yet")
        if refused := decoding_refusals(recipe):
            raise ValueError("; ".join(refused))
        needed = [n for n in TENSORS if fixed(recipe, n)]
        if needed and scales is None:
            raise ValueError(
                f"{recipe.name} has one scale for all tokens of {', '.join(needed)}, which the first does not know;"
                " give scales= from a calibration (those of a training pass do)"
            )
        self.layer, self.scales = layer, scales
        k, v = (DTYPES[recipe.storage[n]] for n in "kv")
        self.cache = KVCache(batch, shape.Hkv, shape.S, shape.head_dim, shape.E, k, v, device)
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
        rules = replace(layer.spec, align="bottom-right")  # the last query meets the last key
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
        k, v = (Stored(x, self._scale(n)) for n, x in zip("kv", self.cache.read(torch.float64), strict=True))
        scale = q[0].scale
        if scale is not None and not fixed(self.layer.recipe, "q"):
            scale = torch.cat([x.scale for x in q if x.scale is not None], 2)
        return Stored(torch.cat([x.codes for x in q], 2), scale), k, v

    def _scale(self, name: str) -> Tensor | None:
        """Of all keys or values so far."""
        if self.scales is not None and fixed(self.layer.recipe, name):
            return self.scales[TENSORS.index(name)]
        return self._by_token.get(name)


def decode(layer: Layer, stored: StoredLayer, steps: int, scales: Scales | None = None) -> LayerResult:
    """A whole sequence, its last `steps` tokens one at a time, those before them as one chunk. Raises as `Decoding`."""
    n = stored.x.shape[2]
    session = Decoding(layer, stored.x.shape[0], scales, stored.x.device)
    chunks = [slice(0, n - steps)] if n > steps else []
    chunks += [slice(t, t + 1) for t in range(n - steps, n)]
    parts = [session.step(stored.rows(tokens)) for tokens in chunks]
    y, z, residual = (torch.cat(x, 2) for x in zip(*((p.y, p.z, p.residual) for p in parts), strict=True))
    return LayerResult(
        torch.cat([p.out for p in parts], 1), _joined([p.projections for p in parts]),
        session.held([p.stored[0] for p in parts]), y, z, residual, sum(p.flops for p in parts),
    )  # fmt: skip


def _joined(parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    return q, k, v
