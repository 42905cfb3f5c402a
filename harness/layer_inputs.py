"""A layer case's X and weights in FP64: drawn, or those of a trained model.

X is what the projections read. In a model that normalises before attention (SmolLM2) that is the normalised input, and
the layer of the source notes, LayerNorm(X + Z), adds the same X.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from harness.capture import layer_weights
from harness.case import Case, cases_folder
from harness.inputs import Source
from harness.layer_store import Weights, unstored
from harness.layer_truth import project

KINDS = ("layer", "smollm2_layer")


def make_layer(case: Case, seed: int) -> tuple[Tensor, Weights]:
    """X `[B, T, D]` and the weights of a layer case.

    Raises ValueError for a draw that is none of a layer, parameters it does not take and sizes that do not fit;
    MissingExtra where the model is not installed.
    """
    if case.layer is None:
        raise ValueError(
            f"case {case.id} draws {case.draw.kind!r} without a layer; give it layer=LayerSpec(…)"
        )
    if case.draw.kind not in KINDS:
        raise ValueError(
            f"case {case.id} has a layer and draws {case.draw.kind!r}; allowed: {', '.join(KINDS)}"
        )
    try:
        made = _drawn if case.draw.kind == "layer" else _captured
        x, weights = made(Source(case, seed), **case.draw.params)
    except TypeError as error:
        raise ValueError(f"case {case.id} draws its layer with wrong parameters: {error}") from None
    shape, width = case.shape, case.layer.width
    wanted = {
        "q": (width, shape.heads * shape.head_dim), "k": (width, shape.Hkv * shape.head_dim),
        "v": (width, shape.Hkv * shape.head_dim), "o": (shape.heads * shape.head_dim, width),
    }  # fmt: skip
    got = {name: tuple(getattr(weights, name).shape) for name in wanted}
    if tuple(x.shape) != (shape.batch, shape.q_len, width) or got != wanted:
        raise ValueError(
            f"case {case.id} has X {tuple(x.shape)} and weights {got}; its sizes ask for {wanted}"
        )
    return x, weights


def _drawn(
    source: Source, gain: float = 1.0, outliers: int = 0, outlier: float = 20.0
) -> tuple[Tensor, Weights]:
    """Normals: X of unit size, with so many channels `outlier` times as large; weights that keep sizes, those of q
    and k times `gain` (scores grow with its square)."""
    case = source.case
    assert case.layer is not None
    shape, d = case.shape, case.layer.width
    wide, narrow = shape.heads * shape.head_dim, shape.Hkv * shape.head_dim

    def normal(name: str, *size: int) -> Tensor:
        return torch.from_numpy(source.generator(name).standard_normal(size))

    x = normal("x", shape.batch, shape.q_len, d)
    if not 0 <= outliers <= d:
        raise TypeError(f"outliers is {outliers}; allowed: 0 to the width, {d}")
    x[..., source.generator("outliers").permutation(d)[:outliers]] *= outlier
    size = 1 / math.sqrt(d)
    return x, Weights(
        normal("w_q", d, wide) * size * gain, normal("w_k", d, narrow) * size * gain, normal("w_v", d, narrow) * size,
        normal("w_o", wide, d) / math.sqrt(wide), 1 + 0.1 * normal("gamma", d), 0.1 * normal("beta", d),
    )  # fmt: skip


def _captured(source: Source, layer: int) -> tuple[Tensor, Weights]:
    """A layer of SmolLM2-135M on the text that is shipped with the cases. γ = 1 and β = 0."""
    text = (cases_folder() / "data" / "text.txt").read_text(encoding="utf-8")
    x, matrices = layer_weights(text, layer, source.case.shape.q_len)
    ones = torch.ones(x.shape[-1], dtype=torch.float64)
    return x.double()[None], Weights(
        **{n: w.double() for n, w in matrices.items()}, gamma=ones, beta=0 * ones
    )


def attention_inputs(case: Case, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v that the layer's projections make of its X in FP64."""
    x, weights = make_layer(case, seed)
    assert case.layer is not None
    _, (q, k, v) = project(unstored(x, weights), case.shape, case.layer)
    return q, k, v


def hash_layer(x: Tensor, weights: Weights) -> str:
    """SHA-256 of all their bytes."""
    digest = hashlib.sha256()
    for t in (x, *(getattr(weights, f.name) for f in fields(weights))):
        digest.update(np.ascontiguousarray(t.numpy()).tobytes())
    return digest.hexdigest()
