"""A recipe whose roundings can be switched one by one: everything that is off runs in FP64.

The algorithm's text is the same, its base is FP64, and a stage that is on is rounded to the recipe's format, FP32
included. Where the recipe's base is FP32, a product, a sum and an exponential are more than one rounding of their exact
value. For operands x, and x' the same in FP32, such a step gives

    f(x) + (f₃₂(x') − f(x')),

what FP32 adds to it and nothing that rounding x would: the step's own FP32 value where FP32 holds x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Watcher
from harness.quantize import Stored
from harness.recipe import STAGES, TENSORS, Recipe
from harness.rotation import rotate
from harness.tensor_core import limited_matmul

ACCUMULATION = "accumulation"
# Everything that can be switched, in the order data meets it: the casts of the inputs, the rounding points, and how
# both matrix products add up.
PLACES = (*TENSORS, *STAGES[:-1], ACCUMULATION, STAGES[-1])


def format_of(recipe: Recipe, place: str) -> str:
    """What a place rounds to; of the accumulation, what it adds up in."""
    if place == ACCUMULATION:
        return recipe.base if recipe.accumulator is None else recipe.accumulator.digest
    return recipe.format_of(place)


def rounds(recipe: Recipe, place: str) -> bool:
    """Whether anything happens at a place: FP64 is exact here."""
    return format_of(recipe, place) != "fp64" or (place in TENSORS and recipe.inputs is not None)


def switched(recipe: Recipe, on: frozenset[str]) -> Recipe:
    """The recipe in FP64, with the rounding points of `on`."""
    at = {s: recipe.format_of(s) for s in STAGES if s in on and rounds(recipe, s)}
    return replace(
        recipe, base="fp64", storage={}, at=at, overflow={s: p for s, p in recipe.overflow.items() if s in at},
        scaling={}, inputs=None, rotate=None, accumulator=None,
    )  # fmt: skip


def unrounded(x: Tensor, name: str, recipe: Recipe) -> Stored:
    """Tensor `name`, FP64 `[B, H, L, D]`, as the recipe would store it if storing were exact: rotated where it
    rotates, never scaled."""
    return Stored(rotate(x) if recipe.rotates(name) else x)


def arithmetic(recipe: Recipe, on: frozenset[str]) -> Callable[[Recipe, Watcher | None], Arithmetic]:
    """What makes the arithmetic of `switched(recipe, on)`."""
    return partial(_Switched, of=recipe, on=on)


class _Switched(Arithmetic):
    def __init__(self, recipe: Recipe, watch: Watcher | None, of: Recipe, on: frozenset[str]) -> None:
        super().__init__(recipe, watch)
        self._limited = of.accumulator
        self._narrow = on if of.base == "fp32" else frozenset[str]()

    def fuses(self, *stages: str) -> bool:
        return False  # products are this class's own

    def matmul(self, a: Tensor, b: Tensor, stage: str) -> Tensor:
        self.flops += 2 * a.numel() * b.shape[-1]
        if ACCUMULATION not in self._narrow:
            return self.cast(a @ b, stage)
        low = torch.matmul if self._limited is None else partial(limited_matmul, accumulator=self._limited)
        return self.cast(_in_fp32(torch.matmul, low, a, b), stage)

    def exp(self, x: Tensor, stage: str, own: bool = False) -> Tensor:
        return self.cast(_in_fp32(torch.exp, torch.exp, x) if stage in self._narrow else torch.exp(x), stage)

    def tanh(self, x: Tensor, stage: str) -> Tensor:
        return self.cast(
            _in_fp32(torch.tanh, torch.tanh, x) if stage in self._narrow else torch.tanh(x), stage
        )

    def sum(self, x: Tensor, stage: str) -> Tensor:
        return self.cast(_in_fp32(_sum, _sum, x) if stage in self._narrow else _sum(x), stage)


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _in_fp32(exact: Callable[..., Tensor], low: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """What FP32 gives, or what it adds to the exact value where it does not hold the operands. Where either is not
    finite, FP32's value."""
    narrow = [x.float() for x in operands]
    wide = [x.double() for x in narrow]
    found = low(*narrow).double()
    if all(torch.equal(x, y) for x, y in zip(operands, wide, strict=True)):
        return found
    corrected = exact(*operands) + (found - exact(*wide))
    return torch.where(torch.isfinite(corrected), corrected, found)
