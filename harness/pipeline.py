"""The run: cases × seeds × recipes × implementations → records.

The unit of work is one case and seed: its inputs are drawn once, its truths are computed once per storage, and every
implementation meets the same tensors. Units are independent, so any `concurrent.futures.Executor` can run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

from harness.case import Case, load_cases
from harness.cell import Unit, run_unit
from harness.devices import use_device
from harness.recipe import Recipe
from harness.records import Record
from harness.unit import plan

__all__ = ["Unit", "plan", "run", "run_units"]


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
