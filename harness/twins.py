"""Twins: the same recipe on the same inputs by algorithms known to be right.

What a kernel does beyond its twin is its own: the recipe's systematic errors (a biased cast, a flushed tail) are in
both. A kernel cannot be expected to take keys in blocks of the twin's size, so there are several.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness import registry
from harness.by_head import parts_of
from harness.operands import Extras
from harness.quantize import Stored
from harness.recipe import Recipe
from harness.sample import Sample
from harness.spec import AttentionSpec

# Nearest first for a kernel that holds whole rows, then an online softmax of these keys a block, then parts of the keys
# merged by their lse.
FIRST, BLOCKS, SPLITS = "naive_masked", (128, 16), 4


_ALGORITHMS: dict[int | str | None, tuple[str, dict[str, int]]] = {
    None: (FIRST, {}),
    "split": ("split_kv", {"splits": SPLITS}),
}


class Twins:
    """Outputs of the twins of one call, FP64 `[B, H, rows, E]`, made when asked for; of all rows, or of a sample."""

    def __init__(
        self, stored: tuple[Stored, Stored, Stored], spec: AttentionSpec, recipe: Recipe, extras: Extras,
        blocks: tuple[int, ...] = BLOCKS, sample: Sample | None = None, split: bool = True,
    ) -> None:  # fmt: skip
        self._stored, self._spec, self._recipe, self._extras = stored, spec, recipe, extras
        self._sample = sample or Sample(stored[0].codes.shape[2])
        self._keys = keys = stored[1].codes.shape[2]
        # A block that holds every key does what the one before it does, unless P is normalised early.
        early = recipe.normalise == "early"
        self._left: list[int | str | None] = [
            None,
            *(b for b in blocks if b < keys or (early and b == max(blocks))),
        ]
        if split and keys > 1:
            self._left.append("split")
        self._made: list[Tensor] = []

    def add(self, out: Tensor) -> None:
        """An output `[B, H, L, E]` known already, of the twin that comes first."""
        self._left.pop(0)
        self._made.append(self._sample.take(out).double())

    def __len__(self) -> int:
        return len(self._made) + len(self._left)

    def __getitem__(self, index: int) -> Tensor:
        while len(self._made) <= index:
            block = self._left.pop(0)
            name, options = _ALGORITHMS.get(block, ("online_softmax", {"block": block}))
            rows = self._sample.slices(self._keys * self._stored[0].codes.shape[1])
            with torch.no_grad():
                parts = [
                    registry.get(name)
                    .run_stored(own, self._spec, self._recipe, extras, rows=rows, **options)
                    .out
                    for _, own, extras in parts_of(self._stored, self._extras)
                ]
            self._made.append(torch.cat(parts, 1).double())
        return self._made[index]
