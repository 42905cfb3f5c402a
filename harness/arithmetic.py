"""The arithmetic an algorithm is written in: one method is one rounding point, named by its stage.

Every method computes in the recipe's base format and rounds once, to the format of its stage; a stage the recipe
leaves out keeps the base. Under `fp64` the same text is a second truth, under a low-precision recipe it is the
emulation of that precision, and a watcher sees each value before and after its rounding.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from harness.formats import FloatFormat, get_format
from harness.recipe import LAYER_STAGES, STAGES, Recipe
from harness.rounding import round_own, round_to
from harness.tensor_core import limited_matmul

DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16,
    "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
}  # fmt: skip


_STAGES = frozenset((*STAGES, *LAYER_STAGES))


@dataclass(frozen=True)
class Block:
    """Which part of the score matrix is at work: `rows` query rows from `row`, keys from `key`."""

    row: int = 0
    rows: int = 0
    key: int = 0


class Watcher(Protocol):
    """Sees every rounding of a run, and keeps nothing it is given: tensors may be overwritten afterwards."""

    def __call__(self, stage: str, before: Tensor, after: Tensor, block: Block) -> None:
        """One rounding: `before` and `after` are one tensor where the stage keeps the base format."""

    def stagnation(self, stage: str, held: Tensor, added: Tensor, after: Tensor) -> None:
        """One step of a rounded running sum: held + added gave after."""


class Arithmetic:
    """Operations of one recipe. `flops` counts 2·M·N·K of every product (of the products done, not of the visible).

    NaN and ±Inf propagate by IEEE 754, except where the recipe's overflow policy says otherwise. Results are in the
    base dtype. Operations compute and round in place where the tensor that they change is fresh, or said to be their
    `own`: new memory for each step costs as much as the step. Under a watcher each rounding has two tensors.
    """

    def __init__(self, recipe: Recipe, watch: Watcher | None = None) -> None:
        self.recipe = recipe
        self.dtype = DTYPES[recipe.base]
        self.watch = watch
        self.block = Block()
        self.flops = 0
        self._out = "out"
        self._at: dict[str, tuple[FloatFormat, str]] = {
            s: (get_format(recipe.format_of(s)), recipe.policy(s))
            for s in {**recipe.at, **recipe.overflow}
            if s in _STAGES
        }

    def for_partials(self) -> Self:
        """The same for attention whose output is a partial: what it would store as `out`, it stores as `block_out`."""
        other = copy(self)
        other.flops, other._out = 0, "block_out"
        return other

    def cast(self, x: Tensor, stage: str, own: bool = False) -> Tensor:
        """The rounding point."""
        if stage == "out":
            stage = self._out
        target = self._at.get(stage)
        if self.watch is None:
            return x if target is None else (round_own if own else round_to)(x, *target)
        y = x if target is None else round_to(x, *target)
        self.watch(stage, x, y, self.block)
        return y

    def matmul(self, a: Tensor, b: Tensor, stage: str) -> Tensor:
        """a @ b. Operands of up to 11 bits have exact products in FP32: this is a tensor core that accumulates in
        FP32, up to the order of the sum. A recipe's own accumulator adds in its own way instead."""
        self.flops += 2 * a.numel() * b.shape[-1]
        limited = self.recipe.accumulator
        return self.cast(a @ b if limited is None else limited_matmul(a, b, limited), stage, own=True)

    def fuses(self, *stages: str) -> bool:
        """Whether nothing happens at these stages of a matrix product: no rounding, no watcher, no sum of its own."""
        return (
            self.watch is None and self.recipe.accumulator is None and not any(s in self._at for s in stages)
        )

    def rescale_add_matmul(self, a: Tensor, x: Tensor, p: Tensor, v: Tensor) -> Tensor:
        """a·x + p @ v of `[B, H, …]`, x its own, where `fuses` says that nothing happens at product and sum: the
        product adds itself. The bits are those of two steps, but for fewer than four rows (MKL sums those otherwise).
        """
        self.flops += 2 * p.numel() * v.shape[-1]
        into = x.mul_(a).flatten(0, 1)
        torch.baddbmm(into, p.flatten(0, 1), v.flatten(0, 1), out=into)
        return x

    def mul(self, x: Tensor, c: Tensor | float, stage: str, own: bool = False) -> Tensor:
        return self.cast(x.mul_(c) if own else x * c, stage, own=True)

    def add(self, a: Tensor, b: Tensor, stage: str) -> Tensor:
        return self.cast(a + b, stage, own=True)

    def sub(self, a: Tensor, b: Tensor, stage: str, own: bool = False) -> Tensor:
        return self.cast(a.sub_(b) if own else a - b, stage, own=True)

    def div(self, a: Tensor, b: Tensor | float, stage: str) -> Tensor:
        if not isinstance(b, Tensor):
            b = a.new_full((), b)  # by a Python number, CUDA multiplies with the reciprocal: two roundings
        return self.cast(a / b, stage, own=True)

    def exp(self, x: Tensor, stage: str, own: bool = False) -> Tensor:
        return self.cast(x.exp_() if own else torch.exp(x), stage, own=True)

    def tanh(self, x: Tensor, stage: str) -> Tensor:
        return self.cast(torch.tanh(x), stage, own=True)

    def sum(self, x: Tensor, stage: str) -> Tensor:
        """Sum over the last axis, kept. The additions run in the base format."""
        return self.cast(x.sum(-1, keepdim=True), stage, own=True)

    def rescale_add(self, a: Tensor, x: Tensor, y: Tensor, stage: str, own: bool = False) -> Tensor:
        """a·x + y, x its own or not. Where the stage is rounded the product is stored first (an eager multiply, then an
        add)."""
        product = x.mul_(a) if own else a * x
        if stage not in self._at:
            return self.cast(product.add_(y), stage)
        product = round_own(product, *self._at[stage])
        if self.watch is None:
            return self.cast(product.add_(y), stage, own=True)
        total = self.cast(product + y, stage)
        if stage == "row_sum":
            self.watch.stagnation(stage, product, y, total)
        return total
