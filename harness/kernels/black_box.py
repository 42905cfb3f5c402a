"""A black box as an implementation: what it can be judged under, its inputs in their own dtype, and what it ran.

A black box rounds where it likes. It is judged under the recipes whose formats and places of rounding it has, and
refuses the others; what it cannot do it refuses too, and no option is passed over in silence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness._frozen import FrozenMap
from harness.arithmetic import DTYPES, Watcher
from harness.operands import NO_EXTRAS, Extras, check
from harness.quantize import Stored, store
from harness.recipe import Recipe, get_recipe
from harness.result import Refusal, Result
from harness.spec import AttentionSpec, Shape, rules_in_spec


@dataclass(frozen=True)
class Call:
    """One call of a black box. `q`, `k`, `v` are stored inputs with codes in the dtype of their format, in the memory
    layout that they came in."""

    shape: Shape
    spec: AttentionSpec
    extras: Extras
    recipe: Recipe
    q: Stored
    k: Stored
    v: Stored

    @property
    def device(self) -> torch.device:
        return self.q.codes.device


@dataclass(frozen=True)
class BlackBox(ABC):
    """One kernel under test. `recipes`: names of those it computes as. `cuda_only`: torch has it nowhere else."""

    name: str
    recipes: tuple[str, ...]
    cuda_only: bool = False
    options: Mapping[str, int] = field(default_factory=FrozenMap)
    subtracts_max: ClassVar[bool] = True

    @abstractmethod
    def unable(self, spec: AttentionSpec, shape: Shape, extras: tuple[str, ...]) -> tuple[str, ...]:
        """What of these rules, sizes and extras the kernel cannot do, and why."""

    @abstractmethod
    def call(self, call: Call) -> Result:
        """The kernel itself."""

    def unlike(self, recipe: Recipe) -> str:
        """How a recipe is none that the kernel computes as; empty when it is one. What is done to the inputs before
        they are stored is not the kernel's business."""
        stored = replace(recipe, inputs=None, rotate=None)
        if any(get_recipe(name).digest == stored.digest for name in self.recipes):
            return ""
        return f"{self.name} rounds as {', '.join(self.recipes)} do; {recipe.name} rounds elsewhere"

    def refusals(
        self, spec: AttentionSpec, shape: Shape, recipe: str | Recipe, extras: tuple[str, ...] = ()
    ) -> tuple[str, ...]:
        """Why this kernel cannot do the case; empty when it can."""
        if self.cuda_only and not torch.cuda.is_available():
            return (f"{self.name} needs CUDA, and torch {torch.__version__} sees no device",)
        unlike = self.unlike(get_recipe(recipe))
        return (*((unlike,) if unlike else ()), *self.unable(spec, shape, extras))

    @rules_in_spec
    def run(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec | None = None, *, recipe: str | Recipe = "fp32",
        mask: Tensor | None = None, bias: Tensor | None = None, sinks: Tensor | None = None,
        kv_lens: Tensor | None = None, scales: Any = None, quantize: bool = False,
        watch: Watcher | None = None, **options: int,
    ) -> Result:  # fmt: skip
        """Attention of q `[B, H, L, D]`, k `[B, Hkv, S, D]`, v `[B, Hkv, S, E]`, stored values as for an algorithm.

        NaN and ±Inf do as the kernel does. `watch` sees nothing: a black box has no rounding points. Raises ValueError
        for shapes that do not fit, a value the storage format cannot hold, and a case this kernel refuses.
        """
        recipe, spec = get_recipe(recipe), spec or AttentionSpec()
        shape, extras = check(q, k, v, spec, mask, bias, sinks, kv_lens)
        if refused := self.refusals(spec, shape, recipe, extras.given):
            raise ValueError("; ".join(refused))
        return self.run_stored(
            store((q, k, v), recipe, scales, quantize), spec, recipe, extras, watch, **options
        )

    def run_stored(
        self, stored: tuple[Stored, Stored, Stored], spec: AttentionSpec, recipe: Recipe,
        extras: Extras = NO_EXTRAS, watch: Watcher | None = None, **options: int,
    ) -> Result:  # fmt: skip
        """`run` on inputs that are stored already. Raises Refusal where only the tensors tell that it cannot be."""
        if options:
            raise ValueError(f"{self.name} was given {', '.join(options)}; allowed: no options")
        with torch.no_grad():
            return self.call(self._native(stored, spec, recipe, extras))

    def ready(
        self,
        stored: tuple[Stored, Stored, Stored],
        spec: AttentionSpec,
        recipe: Recipe,
        extras: Extras = NO_EXTRAS,
    ) -> Callable[[], object]:
        """The kernel's call alone, inputs and options in place: what is timed. Raises Refusal as `run_stored` does."""
        with torch.no_grad():
            return self.bare(self._native(stored, spec, recipe, extras))

    def bare(self, call: Call) -> Callable[[], object]:
        """A call without what watches it, where a kernel knows one."""
        return lambda: self.call(call)

    def _native(
        self, stored: tuple[Stored, Stored, Stored], spec: AttentionSpec, recipe: Recipe, extras: Extras
    ) -> Call:
        device = stored[0].codes.device
        (b, h, length, d), (_, hk, s, e) = stored[0].codes.shape, stored[2].codes.shape
        shape = Shape(b, h, length, d, kv_heads=hk, kv_len=s, value_dim=e)
        if self.cuda_only and device.type != "cuda":
            raise Refusal(f"{self.name} runs on CUDA alone; the case is on {device}")
        native = (
            replace(x, codes=in_dtype(x.codes, DTYPES[recipe.storage[name]]))
            for x, name in zip(stored, ("q", "k", "v"), strict=True)
        )
        return Call(shape, spec, extras, recipe, *native)


def in_dtype(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes in their own dtype, which holds them exactly, with the strides they have; NaN where those leave gaps."""
    if codes.numel() == 0:
        return codes.to(dtype)
    reach = 1 + sum((n - 1) * step for n, step in zip(codes.shape, codes.stride(), strict=True))
    buffer = torch.full((reach,), torch.nan, dtype=dtype, device=codes.device)
    return buffer.as_strided(codes.shape, codes.stride()).copy_(codes)
