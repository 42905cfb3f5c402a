"""`judge`: is this output what its recipe allows, if not, what is wrong, and is the recipe good enough for these
inputs?

Two questions, two answers. `status` is about the implementation, against the stored truth. `precision` is about the
recipe, against the exact truth: what storing and rounding cost these inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness.by_head import (
    is_long,
    store_narrow,
)  # fmt: skip
from harness.docket import Docket, Judgement
from harness.error_model import BLACK_BOX, Form
from harness.operands import check, shown
from harness.precision import NO_EXACT
from harness.quantize import Stored, store, three
from harness.query_rows import Rows, choose_rows, name_rows
from harness.recipe import TENSORS, Recipe, get_recipe
from harness.spec import AttentionSpec, rules_in_spec


@rules_in_spec
@torch.no_grad()
def judge(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec | None = None, recipe: str | Recipe = "bf16",
    lse: Tensor | None = None, mask: Tensor | None = None, bias: Tensor | None = None, sinks: Tensor | None = None,
    kv_lens: Tensor | None = None, scales: Any = None, exact: tuple[Tensor, Tensor, Tensor] | None = None,
    quantize: bool = False, form: Form = BLACK_BOX, budget: float | None = None,
    rows: int | Sequence[int] | Tensor | Rows | None = None, seed: int = 0,
) -> Judgement:  # fmt: skip
    """Judge attention's output `out` `[B, H, L, E]` (any float dtype) for q `[B, H, L, D]`, k `[B, Hkv, S, D]`, v
    `[B, Hkv, S, E]`.

    NaN and ±Inf must stand where the stored truth has them. q, k and v hold stored values: codes times `scales=(q, k,
    v)` where the recipe scales; `quantize=True` rounds (and scales) them first, and they are then the exact inputs too.
    `exact` gives the unrounded inputs for the second answer, `budget` the rel_l2 against their truth that is allowed.
    `form` says how the kernel arranges its sums (a flash-like one by default). `lse` `[B, H, L]` is compared by classes
    and ceiling.

    `rows`: judge a call of many rows by some of them: so many, chosen by `choose_rows` with this seed, or those named
    by number or `harness.Rows`. q, out, lse, mask and bias may then hold all rows or, where `harness.Rows` says which,
    these alone. What they need grows with rows · S; K and V of a long context are never copied whole.

    Raises ValueError for shapes, types or values that do not fit, saying what was given and what is allowed.
    """
    recipe, spec = get_recipe(recipe), spec or AttentionSpec()
    if rows is not None:
        return _judge_rows(
            _Given(out, q, k, v, lse, mask, bias, sinks, kv_lens), spec, recipe, scales, exact, quantize, form, budget,
            rows, seed,
        )  # fmt: skip
    shape, extras = check(q, k, v, spec, mask, bias, sinks, kv_lens)
    _check_output("out", out, shape.tensor("out"), q.device)
    if lse is not None:
        _check_output("lse", lse, shape.tensor("out")[:3], q.device)
    if not isinstance(form, Form):
        raise ValueError(f"form is {form!r}; allowed: a harness.error_model.Form")
    check_budget(budget, exact is not None or quantize)
    stored = store((q, k, v), recipe, scales, quantize)
    if exact is None and quantize:
        exact = (q, k, v)
    if exact is not None:
        _check_exact(exact, (q, k, v))
    docket = Docket(stored, spec, extras, recipe, exact)
    (verdict,) = docket.verdicts([out], [form])
    return docket.advised(out, docket.judgement(out, verdict, lse, form, docket.hazards(), budget))


@dataclass(frozen=True)
class _Given:
    """What is judged by some of its rows."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor | None
    mask: Any
    bias: Any
    sinks: Any
    kv_lens: Any


def _judge_rows(
    x: _Given, spec: AttentionSpec, recipe: Recipe, scales: Any, exact: Any, quantize: bool, form: Form,
    budget: float | None, rows: Any, seed: int,
) -> Judgement:  # fmt: skip
    shape, extras = check(x.q, x.k, x.v, spec, None, None, x.sinks, x.kv_lens)
    if not isinstance(form, Form):
        raise ValueError(f"form is {form!r}; allowed: a harness.error_model.Form")
    check_budget(budget, exact is not None or quantize)
    if exact is not None:
        _check_exact(exact, (x.q, x.k, x.v))
    elif quantize:
        exact = (x.q, x.k, x.v)
    chosen = _chosen(x, spec, rows, seed, extras.kv_lens)
    width = shape.tensor("out")
    size = (*width[:2], len(chosen), width[3])
    out = taken("out", x.out, chosen)
    lse = None if x.lse is None else taken("lse", x.lse, chosen)
    mask, bias = (
        None if m is None else taken(n, m[(None,) * (4 - m.dim())], chosen) if isinstance(m, Tensor) else m
        for n, m in (("mask", x.mask), ("bias", x.bias))
    )
    q = taken("q", x.q, chosen)
    _, extras = check(q, x.k, x.v, spec, mask, bias, x.sinks, x.kv_lens, chosen)
    _check_output("out", out, size, x.q.device)
    if lse is not None:
        _check_output("lse", lse, size[:3], x.q.device)
    stored = store_rows((x.q, x.k, x.v), chosen, recipe, scales, quantize)
    if exact is not None:
        exact = (taken("q", exact[0], chosen), *exact[1:])
    docket = Docket(stored, spec, extras, recipe, exact)
    (verdict,) = docket.verdicts([out], [form])
    return docket.judgement(out, verdict, lse, form, docket.hazards(), budget)


def _chosen(x: _Given, spec: AttentionSpec, rows: Any, seed: int, kv_lens: Tensor | None) -> Rows:
    """The rows to judge by."""
    if isinstance(rows, int):
        return choose_rows(x.q, x.k, spec, rows=rows, seed=seed, kv_lens=kv_lens)
    chosen = rows if isinstance(rows, Rows) else name_rows(rows, x.q.shape[2])
    if x.q.shape[2] not in (chosen.of, len(chosen)):
        raise ValueError(
            f"q has {x.q.shape[2]} rows, and rows are {len(chosen)} of {chosen.of}; allowed: q of all of them, or of"
            " these alone"
        )
    return chosen


def taken(name: str, x: Any, rows: Rows) -> Tensor:
    """These rows of `x` `[B, H, rows, …]`, which holds all rows, these alone, or one that stands for all."""
    if not isinstance(x, Tensor) or x.dim() < 3:
        raise ValueError(f"{name} is {shown(x)}; allowed: a tensor [B, H, L, …]")
    if x.shape[2] == len(rows) != rows.of or (x.shape[2] == 1 and name in ("mask", "bias")):
        return x
    if x.shape[2] != rows.of:
        raise ValueError(
            f"{name} has {x.shape[2]} rows; allowed: all {rows.of}, or the {len(rows)} that are judged"
        )
    return rows.take(x)


def store_rows(
    tensors: tuple[Tensor, Tensor, Tensor], rows: Rows, recipe: Recipe, scales: Any, quantize: bool
) -> tuple[Stored, Stored, Stored]:
    """q of these rows, k and v as stored inputs, `store`'s; those of a long context keep their narrow type. q is stored
    whole where it is given whole: its scales may be of all its rows."""
    if is_long(tensors[1], tensors[2]) or tensors[0].numel() > tensors[1].numel():
        q, k, v = (
            store_narrow(x, n, recipe, s, quantize)
            for x, n, s in zip(tensors, TENSORS, three(scales), strict=True)
        )
    else:
        q, k, v = store(tensors, recipe, scales, quantize)
    if not is_long(tensors[1], tensors[2]):
        k, v = (replace(x, codes=x.codes.double()) for x in (k, v))
    if q.codes.shape[2] == rows.of:
        scale = q.scale if q.scale is None or q.scale.shape[2] == 1 else rows.take(q.scale)
        q = replace(q, codes=rows.take(q.codes), scale=scale)
    return replace(q, codes=q.codes.double()), k, v


def check_budget(budget: float | None, exact: bool) -> None:
    """Raises ValueError for a budget that is no finite number > 0, and for one without exact inputs to hold to it."""
    if budget is None:
        return
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if not (number and math.isfinite(budget) and budget > 0):
        raise ValueError(
            f"budget is {budget!r}; allowed: a finite number > 0, the rel_l2 against the exact truth"
        )
    if not exact:
        raise ValueError(f"budget is {budget!r}, but {NO_EXACT}")


def _check_output(name: str, x: Any, size: tuple[int, ...], device: torch.device) -> None:
    dense = isinstance(x, Tensor) and x.layout is torch.strided
    if (
        dense
        and len(size) == 4
        and x.shape != size
        and tuple(x.transpose(1, 2).shape if x.dim() == 4 else ()) == size
    ):
        raise ValueError(
            f"{name} is {tuple(x.shape)}; allowed: {size} [B, H, L, E]: transpose(1, 2) makes it fit"
        )
    if not dense or not x.dtype.is_floating_point or tuple(x.shape) != size:
        given = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        given += "" if dense or not isinstance(x, Tensor) else f" {x.layout}"
        raise ValueError(f"{name} is {given}; allowed: a floating-point tensor {size}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} and q on {device}; allowed: one device for all")


def _check_exact(exact: Any, given: tuple[Tensor, ...]) -> None:
    fits = isinstance(exact, (tuple, list)) and len(exact) == 3 and all(
        isinstance(x, Tensor) and x.shape == y.shape and x.dtype.is_floating_point
        and x.layout is torch.strided and x.device == y.device
        for x, y in zip(exact, given, strict=True)
    )  # fmt: skip
    if not fits:
        raise ValueError(
            "exact does not fit q, k and v; allowed: three dense floating-point tensors of their shapes and device"
        )
