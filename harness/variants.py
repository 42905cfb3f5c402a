"""Recipes one mistake away, whose errors tell which was made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.formats import get_format
from harness.recipe import Recipe


def orders(recipe: Recipe) -> Iterator[tuple[str, str, Recipe]]:
    """Recipes that normalise P at the other place, where that is another rounding of P."""
    if get_format(recipe.format_of("probs")).precision >= get_format(recipe.base).precision:
        return
    early = recipe.normalise == "late"
    order, name = ("early", "before its cast") if early else ("late", "after P·V")
    other = replace(recipe, normalise=order, row_sum="before")
    judge = f'judge it under a recipe with normalise = "{order}", see docs/doors.md'
    yield f"P normalised {name}", f"P is normalised {name} ({judge})", other
    if early and recipe.p_scale != 1:
        what = f"P is normalised {name} and cast without its scale ({judge}, and p_scale = 1)"
        yield f"P normalised {name}", what, replace(other, p_scale=1.0)


def variants(recipe: Recipe) -> Iterator[tuple[str, str, Recipe]]:
    """Recipes one mistake away."""
    at = dict(recipe.at)
    if recipe.p_scale != 1:
        yield "P scale 1", "P is cast without its scale", replace(recipe, p_scale=1.0)
    if recipe.normalise == "late":
        other = "after" if recipe.row_sum == "before" else "before"
        yield f"row sum {other} cast", f"the row sum takes P {other} its cast", replace(recipe, row_sum=other)
    stages = {
        "acc": "accumulator",
        "row_sum": "running sum",
        "scores_raw": "q·k",
        "probs": "P",
        "out": "output",
    }
    for fmt in ("fp16", "bf16"):
        if not {"shifted", "exp"} & set(at):
            both = replace(recipe, at={**at, "shifted": fmt, "exp": fmt})
            yield f"{fmt} exponent", f"s − max and its exp are held in {fmt.upper()}", both
    for fmt in ("fp16", "bf16", "fp8_e4m3"):
        for stage, name in stages.items():
            if fmt == "fp8_e4m3" and stage not in ("probs", "out"):
                continue
            if get_format(fmt).precision < get_format(recipe.format_of(stage)).precision:
                changed = replace(recipe, at={**at, stage: fmt})
                yield f"{fmt} {name}", f"the {name} is held in {fmt.upper()}", changed
