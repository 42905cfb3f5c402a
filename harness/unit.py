"""The unit of a run, and the units of a selection. Nothing here loads torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness import registry
from harness.case import Case
from harness.recipe import DEFAULT_RECIPES, Recipe, get_recipe


@dataclass(frozen=True)
class Unit:
    """One case and seed, and the cells to run on it."""

    case: Case
    seed: int
    implementations: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    device: str = "cpu"

    @property
    def cells(self) -> int:
        return len(self.implementations) * len(self.recipes)

    @property
    def keys(self) -> set[tuple[str, str, str, int]]:
        """Keys of the records it gives."""
        return {(self.case.id, i, r.name, self.seed) for i in self.implementations for r in self.recipes}


def plan(
    cases: Iterable[Case], implementations: str | Sequence[str] | None = None,
    recipes: str | Recipe | Sequence[str | Recipe] | None = None, device: str = "cpu", seeds: int = 3,
) -> list[Unit]:  # fmt: skip
    """The units of a run, in order. Cases whose inputs do not depend on the seed run once.

    Raises ValueError for an unknown name, a recipe name used twice, or fewer than one seed.
    """
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise ValueError(f"seeds is {seeds!r}; allowed: an integer ≥ 1")
    implementations = (implementations,) if isinstance(implementations, str) else implementations
    recipes = (recipes,) if isinstance(recipes, (str, Recipe)) else recipes
    names = None if implementations is None else tuple(dict.fromkeys(implementations))
    for name in names or ():
        registry.entry(name)
    chosen = tuple(dict.fromkeys(get_recipe(r) for r in (DEFAULT_RECIPES if recipes is None else recipes)))
    if len({r.name for r in chosen}) < len(chosen):
        raise ValueError("two recipes share one name; give each its own, since records are keyed by it")
    return [
        Unit(
            case,
            seed,
            registry.default_implementations(case.group) if names is None else names,
            tuple(r for r in chosen if recipes is not None or case.chooses(r.name)),
            device,
        )
        for case in cases
        for seed in range(case.draws(seeds))
    ]


def is_emulated(name: str, recipe: Recipe) -> bool:
    """Whether time says nothing about the formats: some are narrower than what the arithmetic runs in."""
    narrow = {*recipe.storage.values(), *recipe.at.values()} - {recipe.base}
    return registry.entry(name).emulated and bool(narrow)
