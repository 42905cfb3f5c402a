"""The run: cases × seeds × recipes × implementations → records.

The unit of work is one case and seed: its inputs are drawn once, its truths are computed once per storage, and every
implementation meets the same tensors. Units are independent, so any `concurrent.futures.Executor` can run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

from harness import registry
from harness.case import Case, load_cases
from harness.cell import Unit, run_unit
from harness.devices import use_device
from harness.recipe import DEFAULT_RECIPES, Recipe, get_recipe
from harness.records import Record


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


def run(
    cases: str | Path | Iterable[Case] = "all", implementations: str | Sequence[str] | None = None,
    recipes: str | Recipe | Sequence[str | Recipe] | None = None, device: str = "cpu", seeds: int = 3,
    executor: Executor | None = None,
) -> list[Record]:  # fmt: skip
    """Every cell's record, in a fixed order whatever the executor. See `plan` for what raises."""
    use_device(device)
    chosen = load_cases(cases) if isinstance(cases, (str, Path)) else cases
    return [
        r
        for _, batch in run_units(plan(chosen, implementations, recipes, device, seeds), executor)
        for r in batch
    ]


def run_units(units: Sequence[Unit], executor: Executor | None = None) -> Iterator[tuple[Unit, list[Record]]]:
    """Records unit by unit, in the order of the units."""
    mapped: Callable[..., Iterable[list[Record]]] = map if executor is None else executor.map
    yield from zip(units, mapped(run_unit, units), strict=True)
