"""How large an error is normal, and how large none may be: per element, from the FP64 truth's own inputs.

`variance` is the mean square error that a correct implementation of a recipe shows, `ceiling` what none exceeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.error_model.block import Block
from harness.error_model.ceiling import ceiling
from harness.error_model.form import BLACK_BOX, SERIAL, WHOLE, Form, form_of
from harness.error_model.problem import Problem
from harness.error_model.variance import spread, unpredicted
from harness.finite import all_finite
from harness.operands import check, squares_fit_fp32
from harness.query_rows import Rows
from harness.recipe import Recipe, get_recipe
from harness.spec import AttentionSpec
from harness.truth import Truth, reference

__all__ = ["BLACK_BOX", "SERIAL", "WHOLE", "Expectation", "Form", "expect", "expectations", "form_of"]


@dataclass(frozen=True)
class Expectation:
    """FP64: `variance`, `ceiling` `[B, H, L, E]`, `lse_variance`, `lse_ceiling` `[B, H, L]`.

    NaN where the truth is not finite; +Inf where the recipe promises nothing (scores that may leave their format), and
    the variances of a recipe with a limited accumulator.
    A row that sees no key has 0 everywhere.
    """

    variance: Tensor
    ceiling: Tensor
    lse_variance: Tensor
    lse_ceiling: Tensor


@torch.no_grad()
def expectations(
    truth: Truth, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, pairs: Sequence[tuple[str | Recipe, Form]], *,
    mask: Tensor | None = None, bias: Tensor | None = None, sinks: Tensor | None = None,
    kv_lens: Tensor | None = None, rows: Rows | None = None,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> tuple[Expectation, ...]:  # fmt: skip
    """One Expectation for each (recipe, form); equal pairs share one, and all share scores and weights.

    `truth` is that of these q `[B, H, L, D]`, k `[B, Hkv, S, D]`, v `[B, Hkv, S, E]` (stored values) and options;
    `scales` those of q, k and v as the arithmetic applies them. Raises ValueError as `reference` does.
    """
    shape, extras = check(q, k, v, spec, mask, bias, sinks, kv_lens, rows)
    named = [(recipe, f.under(recipe, shape.S)) for recipe, f in ((get_recipe(r), f) for r, f in pairs)]
    wide = any(r.base == "fp64" for r, _ in named) or not squares_fit_fp32(v)
    dtype = torch.float64 if wide else torch.float32
    split = (shape.batch * shape.Hkv, shape.group, shape.q_len)
    problem = Problem(
        shape, spec, extras, q.double().reshape(*split, shape.head_dim),
        k.flatten(0, 1), v.flatten(0, 1), truth.out.reshape(*split, shape.E),
        truth.lse.reshape(*split, 1), truth.row_max.reshape(*split, 1), scales or (None, None, None), dtype,
    )  # fmt: skip
    results: dict[tuple[str, Form], Expectation] = {}
    for recipe, form in named:
        if (recipe.digest, form) not in results:
            results[recipe.digest, form] = _blank(truth)
    for heads, part in problem.parts():
        block = Block(heads, part)
        for recipe, form in {(r.digest, f): (r, f) for r, f in named}.values():
            _fill(results[recipe.digest, form], block, recipe, form)
    for result in results.values():
        _mask(result, truth)
    return tuple(results[r.digest, f] for r, f in named)


def expect(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec | None = None, recipe: str | Recipe = "fp32",
    form: Form = BLACK_BOX, *, mask: Tensor | None = None, bias: Tensor | None = None,
    sinks: Tensor | None = None, kv_lens: Tensor | None = None,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> tuple[Truth, Expectation]:  # fmt: skip
    """The truth and the Expectation of one recipe and form. Arguments and errors as in `expectations`."""
    spec = spec or AttentionSpec()
    truth = reference(q, k, v, spec, mask=mask, bias=bias, sinks=sinks, kv_lens=kv_lens)
    found = expectations(
        truth,
        q,
        k,
        v,
        spec,
        [(recipe, form)],
        mask=mask,
        bias=bias,
        sinks=sinks,
        kv_lens=kv_lens,
        scales=scales,
    )
    return truth, found[0]


def _blank(truth: Truth) -> Expectation:
    out, lse = torch.zeros_like(truth.out), torch.zeros_like(truth.lse)
    return Expectation(out, out.clone(), lse, lse.clone())


def _fill(result: Expectation, b: Block, recipe: Recipe, form: Form) -> None:
    shape = b.p_.shape
    found = spread(b, recipe, form) if recipe.accumulator is None else unpredicted(b)
    bound = ceiling(b, recipe, form)
    for target, part in (
        (result.variance, found.out), (result.ceiling, bound.out),
        (result.lse_variance[..., None], found.lse), (result.lse_ceiling[..., None], bound.lse),
    ):  # fmt: skip
        heads = target.view(shape.batch * shape.Hkv, shape.group, shape.q_len, target.shape[-1])
        heads[b.heads.part, :, b.rows] = part.reshape(part.shape[0], shape.group, b.width, part.shape[-1])


def _mask(result: Expectation, truth: Truth) -> None:
    finite = all_finite(truth.out)
    if finite and all_finite(truth.lse):  # no row is empty either
        return
    empty = truth.lse == -math.inf
    for x in (result.variance, result.ceiling):
        x.masked_fill_(empty[..., None], 0.0)
        if not finite:
            x.masked_fill_(~torch.isfinite(truth.out), math.nan)
    for x in (result.lse_variance, result.lse_ceiling):
        x.masked_fill_(~torch.isfinite(truth.lse), math.nan).masked_fill_(empty, 0.0)
