"""Runs that should give the same numbers: other block sizes, a row or a sequence alone, one call for all steps.

What is measured is how far apart they are, bits or ulps; nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness import registry
from harness.attention.invariance import invariance
from harness.operands import Extras, slice_rows_keys
from harness.quantize import Stored
from harness.recipe import Recipe
from harness.records import Relation
from harness.spec import AttentionSpec, Shape

Tensors = tuple[Stored, Stored, Stored]
ONE_SHOT = "naive_masked"
# Values of an algorithm's own options to try beside its default; 0 stands for the number of keys.
_VALUES: Mapping[str, tuple[int, ...]] = {
    "block": (16, 96, 0), "q_block": (1, 32), "steps": (1, 64), "chunk": (1, 7, 0), "block_size": (3, 64),
    "splits": (1, 3, 8),
}  # fmt: skip


def relations(
    name: str, out: Tensor, stored: Tensors, spec: AttentionSpec, recipe: Recipe, extras: Extras, shape: Shape
) -> tuple[Relation, ...]:
    """How far `out` `[B, H, L, E]`, which implementation `name` gave, is from what should equal it, in ulps of the
    recipe's output format. What an implementation refuses, and what it raises, is the caller's to handle: it has run
    this case already."""
    implementation, fmt = registry.get(name), recipe.out_format

    def again(
        what: str, tensors: Tensors, rules: AttentionSpec, own: Extras, part: Any, **options: int
    ) -> Relation:
        result = implementation.run_stored(tensors, rules, recipe, own, **options)
        return invariance(out[part], result.out, fmt, what)

    found = []
    for option, value, shown in _options(implementation, shape):
        found.append(again(f"{option}={shown}", stored, spec, extras, ..., **{option: value}))
    if shape.q_len > 1:
        row = slice(shape.q_len - 1, shape.q_len) if spec.align == "bottom-right" else slice(0, 1)
        what = "last row alone" if spec.align == "bottom-right" else "first row alone"
        q, k, v = stored
        part = (_rows(q, row), k, v)
        found.append(again(what, part, spec, _extras_of(extras, rows=row), (slice(None), slice(None), row)))
    if shape.batch > 1:
        alone = []
        for b in range(shape.batch):
            at = slice(b, b + 1)
            q, k, v = (_sequence(x, at) for x in stored)
            own = _extras_of(extras, batch=at)
            alone.append(implementation.run_stored((q, k, v), spec, recipe, own).out)
        found.append(invariance(out, torch.cat(alone), fmt, "sequences alone"))
    if name != ONE_SHOT:
        one_shot = registry.get(ONE_SHOT).run_stored(stored, spec, recipe, extras)
        found.append(invariance(out, one_shot.out, fmt, ONE_SHOT))
    if not all(x.codes.is_contiguous() for x in stored):
        q, k, v = (replace(x, codes=x.codes.contiguous()) for x in stored)
        found.append(again("contiguous", (q, k, v), spec, extras, ...))
    return tuple(found)


def _options(implementation: Any, shape: Shape) -> Iterator[tuple[str, int, str]]:
    """Options, their values and what to call these."""
    for option, default in getattr(implementation, "options", {}).items():
        values = {value or shape.S: str(value or "all keys") for value in _VALUES.get(option, ())}
        yield from ((option, value, shown) for value, shown in values.items() if value not in (0, default))


def _rows(x: Stored, rows: slice) -> Stored:
    scale = x.scale if x.scale is None or x.scale.shape[2] == 1 else x.scale[:, :, rows]
    return replace(x, codes=x.codes[:, :, rows], scale=scale)


def _sequence(x: Stored, at: slice) -> Stored:
    scale = x.scale if x.scale is None or x.scale.shape[0] == 1 else x.scale[at]
    return replace(x, codes=x.codes[at], scale=scale)


def _extras_of(extras: Extras, batch: slice | None = None, rows: slice | None = None) -> Extras:
    """The extras of one sequence, or of some rows."""
    cut: dict[str, Any] = {}
    for name in ("mask", "bias"):
        x = getattr(extras, name)
        if x is not None:
            x = x if batch is None or x.shape[0] == 1 else x[batch]
            cut[name] = x if rows is None else slice_rows_keys(x, rows, slice(None))
    if extras.kv_lens is not None and batch is not None:
        cut["kv_lens"] = extras.kv_lens[batch]
    return replace(extras, **cut)
