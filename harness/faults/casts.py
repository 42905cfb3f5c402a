"""Scales and formats of what is stored, and P that is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from harness.faults.subject import Fault, Subject, running_max, weights
from harness.formats import get_format
from harness.recipe import Recipe
from harness.rounding import round_to, ulp


def cut_p(x: Subject, recipe: Recipe, size: int | None = None) -> Tensor:
    """What the output moves by when P is cut to its format and not rounded: whole rows, or blocks of `size` keys under
    their running max."""
    s, v = weights(x)
    fmt, late = get_format(recipe.format_of("probs")), recipe.normalise == "late"
    end = x.truth.row_max if late else x.truth.lse
    end = torch.where(torch.isfinite(end), end, 0.0)[..., None]
    top = end
    if size is not None and late:
        top = running_max(s, size)
        top = torch.where(torch.isfinite(top), top, 0.0)
    p = torch.exp(s - top) * recipe.p_scale
    spacing = ulp(p, fmt)
    moved = torch.floor(p / spacing) - torch.round(p / spacing)  # exact in FP64
    moved = moved * spacing * torch.exp(top - end) / recipe.p_scale
    if not late:
        return moved @ v
    l = torch.exp(x.truth.lse[..., None] - end)  # noqa: E741
    if recipe.row_sum == "after":
        return (moved @ v - x.truth.out * moved.sum(-1, keepdim=True)) / l.clamp(min=1e-300)
    return moved @ v / l.clamp(min=1e-300)


THROUGH = ("tf32", "bf16", "fp16", "fp8_e4m3")


def storage(x: Subject) -> Iterator[Fault]:
    yield from _through(x)
    for name, t, scale in zip("qkv", (x.q, x.k, x.v), x.scales, strict=True):
        if scale is None:
            continue

        def stored(n: str, value: Tensor) -> Callable[[], Tensor]:
            return partial(x.run, None, **{n: value})

        yield f"{name} not descaled", f"the scale of {name} is not applied", stored(name, t / scale)
        yield f"{name} descaled twice", f"the scale of {name} is applied twice", stored(name, t * scale)
        if scale.shape[1] > 1:
            what = f"all heads take the scale of {name} of head 0"
            yield f"scale of {name} of head 0", what, stored(name, t / scale * scale[:, :1])


def _through(x: Subject) -> Iterator[Fault]:
    """Values that pass through a narrower format on their way, without a scale."""
    for fmt in THROUGH:
        kept = {n: round_to(t, fmt, overflow="saturate") for n, t in (("q", x.q), ("k", x.k), ("v", x.v))}
        changed = [n for n, t in (("q", x.q), ("k", x.k), ("v", x.v)) if not torch.equal(kept[n], t)]
        for n in changed:
            yield (
                f"{n} through {fmt}",
                f"{n} passes through {fmt.upper()}",
                partial(x.run, None, **{n: kept[n]}),
            )
        if {"k", "v"} <= set(changed):
            both = {n: kept[n] for n in "kv"}
            yield f"cache in {fmt}", f"K and V pass through {fmt.upper()}", partial(x.run, None, **both)
