"""A layer's input and weights as a recipe stores them, and what that makes of the recipe's stages.

X is one tensor with two readers. The residual stream keeps it in the output's format; the projections multiply it in
the format of q, which under FP8 is a second, scaled copy (a scale per token). Weights are stored in the projections'
format, a scale per output channel or one a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.quantize import Stored, quantize
from harness.recipe import LAYER_STAGES, Recipe
from harness.rounding import round_to
from harness.scaling import Scaling
from harness.spec import LayerSpec

MATRICES = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Weights:
    """Bias-free projections, each the matrix that its input multiplies from the left: `q` `[D, N·H]`, `k` and `v`
    `[D, K·H]`, `o` `[N·H, D]`; LayerNorm's `gamma` and `beta` `[D]`. FP64."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gamma: Tensor
    beta: Tensor


@dataclass(frozen=True)
class StoredLayer:
    """`x` `[B, 1, T, D]` as the residual stream has it, `operand` as the projections read it. `matrices`: name →
    `[1, 1, out, in]`, a row per output channel. `gamma` and `beta` are in the stream's format. All FP64."""

    x: Tensor
    operand: Stored
    matrices: Mapping[str, Stored]
    gamma: Tensor
    beta: Tensor

    def rows(self, tokens: slice) -> StoredLayer:
        """These tokens alone."""
        scale = self.operand.scale
        if scale is not None and scale.shape[2] > 1:
            scale = scale[:, :, tokens]
        part = replace(self.operand, codes=self.operand.codes[:, :, tokens], scale=scale)
        return replace(self, x=self.x[:, :, tokens], operand=part)


def layer_recipe(recipe: Recipe) -> Recipe:
    """The recipe with a format for every stage of the layer: what is stored between its operators keeps the output's
    format, a product keeps the base until it is stored."""
    stored = {s: recipe.out_format for s in LAYER_STAGES if s != "gemm" and s not in recipe.at}
    return replace(recipe, at={**recipe.at, **stored})


def operand_recipe(recipe: Recipe, granularity: str) -> Recipe:
    """How an operand of a projection is stored, as the q of a recipe of its own. `granularity` is `token` (a row: a
    token of X, an output channel of a weight) or `tensor`; a recipe of mx blocks has those, along the sum."""
    own = recipe.scaling.get("q")
    scaling = {}
    if own is not None and own.source != "unit":
        scaling["q"] = own if own.granularity == "mx" else Scaling(granularity, "amax", own.power_of_two)
    stored = dict.fromkeys(("q", "k", "v"), recipe.storage["q"])
    return Recipe(
        f"{recipe.name}.operand", recipe.base, stored, scaling=scaling, overflow={"q": recipe.policy("q")}
    )  # fmt: skip


def store_operand(x: Tensor, recipe: Recipe) -> Stored:
    """`x` `[B, 1, T, ·]` as a projection reads it."""
    return quantize(x.double(), "q", operand_recipe(recipe, "token"))


def store_layer(x: Tensor, weights: Weights, recipe: Recipe, layer: LayerSpec) -> StoredLayer:
    """Exact X `[B, T, D]` and weights as the recipe stores them. Non-finite values and what leaves a format follow the
    recipe's policies (`quantize`); the stream's follow its format's."""

    def stream(t: Tensor) -> Tensor:
        return round_to(t.double(), recipe.out_format)

    held = stream(x)[:, None]
    granularity = "tensor" if layer.weight_scale == "tensor" else "token"
    how = operand_recipe(recipe, granularity)
    matrices = {n: quantize(getattr(weights, n).mT[None, None], "q", how) for n in MATRICES}
    return StoredLayer(
        held, store_operand(held, recipe), matrices, stream(weights.gamma), stream(weights.beta)
    )


def unstored(x: Tensor, weights: Weights) -> StoredLayer:
    """The exact values in the same form."""
    matrices = {n: Stored(getattr(weights, n).double().mT[None, None]) for n in MATRICES}
    held = x.double()[:, None]
    return StoredLayer(held, Stored(held), matrices, weights.gamma.double(), weights.beta.double())


def turns(rope: float, positions: Tensor, width: int) -> Tensor:
    """Angles `[T, H/2]` in FP64: position · base^(−2i/H), of channels i and i + H/2 (2104.09864, section 3.2.2)."""
    i = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    return positions.double()[:, None] * rope ** (-i / width)
