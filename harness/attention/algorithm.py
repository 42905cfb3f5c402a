"""An attention algorithm as an implementation: inputs admitted, body run under a recipe, output in its dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from harness._frozen import FrozenMap
from harness.arithmetic import DTYPES, Arithmetic, Watcher
from harness.attention.rows import Problem, descaled
from harness.finite import all_finite
from harness.operands import NO_EXTRAS, Extras, check
from harness.quantize import Stored, store
from harness.recipe import Recipe, get_recipe
from harness.result import Result
from harness.scaling import MX_BLOCK
from harness.spec import AttentionSpec, Shape, rules_in_spec


@dataclass(frozen=True)
class Algorithm:
    """One algorithm written over `Arithmetic`. `options` are the body's parameters and their defaults; `part` is the
    body for some rows alone, where there is one: `part(arithmetic, problem, rows, **options)`.
    `appends_scales`: scales arrive with their tokens, so none of V may span several."""

    name: str
    body: Callable[..., tuple[Tensor, Tensor]]
    part: Callable[..., tuple[Tensor, Tensor]] | None = None
    causal_only: bool = False
    subtracts_max: bool = True
    appends_scales: bool = False
    options: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", FrozenMap(self.options))

    def refusals(
        self, spec: AttentionSpec, shape: Shape, recipe: str | Recipe, extras: tuple[str, ...] = ()
    ) -> tuple[str, ...]:
        """Why this algorithm cannot do the case; empty when it can."""
        scaling = get_recipe(recipe).scaling.get("v")
        if self.causal_only and not spec.causal:
            return (f"{self.name} computes causal attention alone; the case is not causal",)
        if self.appends_scales and scaling and scaling.granularity == "mx" and scaling.source != "unit":
            return (
                f"{self.name} takes scales with their tokens; an mx scale of v spans {MX_BLOCK} keys and is not known"
                " before the last of them",
            )
        return ()

    @rules_in_spec
    def run(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec | None = None, *, recipe: str | Recipe = "fp32",
        mask: Tensor | None = None, bias: Tensor | None = None, sinks: Tensor | None = None,
        kv_lens: Tensor | None = None, scales: Any = None, quantize: bool = False,
        watch: Watcher | None = None, **options: int,
    ) -> Result:  # fmt: skip
        """Attention of q `[B, H, L, D]`, k `[B, Hkv, S, D]`, v `[B, Hkv, S, E]` under a recipe.

        NaN and ±Inf of visible inputs propagate, those of hidden keys do not; a row that sees nothing follows
        `spec.empty_row`. q, k and v hold stored values: codes times `scales=(q, k, v)` where the recipe scales.
        `quantize=True` rounds (and scales) them first. `watch` sees every rounding. Runs on q's device, without
        gradients.

        Raises ValueError for shapes that do not fit, a value the storage format cannot hold, an unknown recipe or
        option, and a case this algorithm refuses.
        """
        recipe, spec = get_recipe(recipe), spec or AttentionSpec()
        shape, extras = check(q, k, v, spec, mask, bias, sinks, kv_lens)
        if refused := self.refusals(spec, shape, recipe, extras.given):
            raise ValueError("; ".join(refused))
        stored = store((q, k, v), recipe, scales, quantize)
        return self.run_stored(stored, spec, recipe, extras, watch, None, arithmetic=Arithmetic, **options)

    def run_stored(
        self, stored: tuple[Stored, Stored, Stored], spec: AttentionSpec, recipe: Recipe,
        extras: Extras = NO_EXTRAS, watch: Watcher | None = None, rows: Sequence[slice] | None = None, *,
        arithmetic: Callable[[Recipe, Watcher | None], Arithmetic] = Arithmetic, **options: int,
    ) -> Result:  # fmt: skip
        """`run` on inputs that are stored already. With `rows`, out and lse hold these rows alone, one after the
        other. `arithmetic` makes what the body computes with."""
        chosen = {**self.options, **options}
        for name, value in options.items():
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if name not in self.options or not whole:
                allowed = ", ".join(f"{o}, an integer ≥ 1" for o in self.options) or "none"
                raise ValueError(f"option {name}={value!r} for {self.name}; allowed: {allowed}")
        ar = arithmetic(recipe, watch)
        with torch.no_grad():  # bias and sinks may ask for gradients; rounding has none
            problem = _problem(stored, spec, extras, ar.dtype)
            if rows is None:
                out, lse = self.body(ar, problem, **chosen)
            else:
                out, lse = self._rows(ar, problem, rows, chosen)
        dtype = DTYPES[recipe.out_format]
        return Result(out.to(dtype) if dtype.itemsize > 1 else out, lse, ar.flops)

    def ready(
        self,
        stored: tuple[Stored, Stored, Stored],
        spec: AttentionSpec,
        recipe: Recipe,
        extras: Extras = NO_EXTRAS,
    ) -> Callable[[], object]:
        """The computation alone, its inputs in place: what is timed."""
        arithmetic = Arithmetic(recipe)
        problem = _problem(stored, spec, extras, arithmetic.dtype)
        return lambda: self.body(arithmetic, problem, **self.options)

    def _rows(
        self, ar: Arithmetic, p: Problem, rows: Sequence[slice], options: Mapping[str, int]
    ) -> tuple[Tensor, Tensor]:
        if self.part is None:
            raise ValueError(f"{self.name} cannot be run for some rows alone; allowed: rows=None")
        parts = [self.part(ar, p, part, **options) for part in rows]
        return torch.cat([o for o, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _problem(
    stored: tuple[Stored, Stored, Stored], spec: AttentionSpec, extras: Extras, dtype: torch.dtype
) -> Problem:
    q, k, v = stored
    (b, h, length, d), (_, hk, s, e) = q.codes.shape, v.codes.shape
    # Contiguous: the last bits of a GEMM depend on its operands' strides.
    q_codes, k_codes, v_codes = (x.codes.to(dtype).contiguous() for x in stored)
    p = Problem(
        Shape(b, h, length, d, kv_heads=hk, kv_len=s, value_dim=e), spec, extras,
        q_codes, k_codes, v_codes, q.scale, k.scale, v.scale,
        v_finite=all_finite(v.codes),
    )  # fmt: skip
    if p.v_finite and p.v_scale is not None and p.scales_each_value:  # finite codes may leave the base format
        p = replace(p, v_finite=all_finite(descaled(p.v, p.v_scale, dtype)))
    return p
