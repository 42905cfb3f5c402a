"""The unit of a run, and what its records share whether they are of attention or of a layer."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

from harness import registry
from harness.case import Case
from harness.recipe import Recipe
from harness.spec import Shape
from harness.truth import Truth


@dataclass(frozen=True)
class Unit:
    """One case and seed, and the cells to run on it."""

    case: Case
    seed: int
    implementations: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    device: str = "cpu"

    @property
    def cells(self) -> int:
        return len(self.implementations) * len(self.recipes)

    @property
    def keys(self) -> set[tuple[str, str, str, int]]:
        """Keys of the records it gives."""
        return {(self.case.id, i, r.name, self.seed) for i in self.implementations for r in self.recipes}


def facts(truth: Truth, shape: Shape) -> dict[str, float]:
    """What the exact inputs are like: Var(q·k)/D, the largest |score|, the mean over rows of the top probability."""
    ranges = truth.ranges
    assert ranges is not None
    top = torch.exp(truth.row_max - truth.lse)[torch.isfinite(truth.lse)]
    return {
        "var_qk_per_dim": ranges.raw_square / ranges.pairs / shape.head_dim
        if ranges.pairs and shape.head_dim
        else math.nan,
        "score_peak": ranges.score.value,
        "mean_top_prob": float(top.mean()) if top.numel() else math.nan,
    }


def is_emulated(name: str, recipe: Recipe) -> bool:
    """Whether time says nothing about the formats: some are narrower than what the arithmetic runs in."""
    narrow = {*recipe.storage.values(), *recipe.at.values()} - {recipe.base}
    return registry.entry(name).emulated and bool(narrow)


def hash_of(out: torch.Tensor) -> str:
    """SHA-256 of an output's bytes."""
    return hashlib.sha256(out.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
