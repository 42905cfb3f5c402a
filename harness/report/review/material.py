"""Records and evidence, sorted for a review: what each section reads. Nothing is recomputed; figures are pooled."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TypeVar

from harness.cost.phases import Work, decode_step
from harness.cost.settings import Settings
from harness.deviations import Review
from harness.evidence import Attribution, Evidence, Quality
from harness.recipe import Recipe
from harness.records import Record, Status, pooled_rms
from harness.report.model import Pooled, pool, pool_ratio
from harness.report.precision import CaseRecipe, Precision, precisions
from harness.report.tables import latest

FAILING = (Status.FAIL, Status.ERROR)
REAL = ("real/*",)
E = TypeVar("E", Attribution, Quality)


@dataclass(frozen=True)
class Source:
    """A file that was read: its name, SHA-256 and number of lines."""

    name: str
    sha256: str
    lines: int


@dataclass(frozen=True)
class Asked:
    """What is reviewed. `recipes`: the first is the baseline. `known`: definitions of those that are built in or whose
    file was given, for their cost. `real`: globs of cases that hold real activations."""

    recipes: tuple[str, ...]
    known: tuple[Recipe, ...]
    setting: Settings
    real: tuple[str, ...] = REAL
    sources: tuple[Source, ...] = ()


class Material:
    """Everything a review says comes from here. `records` of other recipes than those asked for are left out, and of
    records of the same cell and device the last stands for all."""

    def __init__(
        self, records: Iterable[Record], listed: Review, evidence: Iterable[Evidence], asked: Asked
    ) -> None:
        self.asked = asked
        self.baseline = asked.recipes[0]
        self.records = latest([r for r in records if r.recipe in asked.recipes])
        self._known = {_cell(r) for r, _ in listed.known}
        found = list(evidence)
        self.attributions = _newest(
            (e for e in found if isinstance(e, Attribution) and e.recipe in asked.recipes), asked.recipes
        )
        self.qualities = _newest(
            (e for e in found if isinstance(e, Quality) and e.recipe in asked.recipes), asked.recipes
        )

    @property
    def evidence(self) -> list[Evidence]:
        return [*self.attributions, *self.qualities]

    @cached_property
    def precise(self) -> dict[CaseRecipe, Precision]:
        return precisions(self.records)

    @cached_property
    def cases(self) -> tuple[str, ...]:
        """Ids in the order met."""
        return tuple(dict.fromkeys(r.case for r in self.records))

    @cached_property
    def real(self) -> tuple[str, ...]:
        return tuple(sorted(c for c in self.cases if self.is_real(c)))

    @cached_property
    def hard(self) -> tuple[str, ...]:
        return tuple(c for c in self.cases if not self.is_real(c))

    @cached_property
    def implementations(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.implementation for r in self.records))

    @cached_property
    def _by_cell(self) -> dict[tuple[str, str, str], list[Record]]:
        found: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
        for r in self.records:
            found[r.group_key].append(r)
        return found

    def is_real(self, case: str) -> bool:
        return any(fnmatchcase(case, glob) for glob in self.asked.real)

    def of(self, recipe: str) -> list[Record]:
        return [r for r in self.records if r.recipe == recipe]

    def cell(self, case: str, implementation: str, recipe: str) -> list[Record]:
        return self._by_cell.get((case, implementation, recipe), [])

    def cells(self) -> Iterator[tuple[tuple[str, str, str], list[Record]]]:
        yield from self._by_cell.items()

    def is_known(self, record: Record) -> bool:
        """Whether it failed as `deviations.toml` says."""
        return _cell(record) in self._known

    def failed(self, record: Record) -> bool:
        """Whether it failed and no deviation explains it."""
        return record.status in FAILING and not self.is_known(record)

    def sound(self, case: str, recipe: str) -> list[Record]:
        """Those whose error is the recipe's: of implementations that did not fail, where there are any."""
        found = self.precise.get((case, recipe))
        return [] if found is None else list(found.records)

    def total(self, cases: Iterable[str], recipe: str) -> Pooled:
        """rel_l2 against the exact truth, over cases, sound implementations and seeds."""
        return pool(r.total_errors for case in cases for r in self.sound(case, recipe))

    def kernel(self, cases: Iterable[str], recipe: str) -> Pooled:
        """The same against the stored truth."""
        return pool(r.errors for case in cases for r in self.sound(case, recipe))

    def heads(self, case: str, recipe: str) -> tuple[float, ...]:
        """Total rel_l2 of each head, pooled over sound implementations and seeds; empty where records hold none."""
        found = [r.head_rel_l2 for r in self.sound(case, recipe) if r.head_rel_l2]
        if len({len(x) for x in found}) != 1:
            return ()
        return tuple(pooled_rms(x) for x in zip(*found, strict=True))

    def ratio(self, cases: Iterable[str], recipe: str) -> float:
        return pool_ratio([r for case in cases for r in self.sound(case, recipe)])

    def times_baseline(self, recipe: str) -> float:
        """Total error on the real cases that both have ÷ the baseline's; NaN where that says nothing."""
        shared = [c for c in self.real if self.sound(c, recipe) and self.sound(c, self.baseline)]
        own, base = self.total(shared, recipe).rel_l2, self.total(shared, self.baseline).rel_l2
        return own / base if base > 0 and math.isfinite(own) else math.nan

    def quality(self, recipe: str) -> list[Quality]:
        return [q for q in self.qualities if q.recipe == recipe]

    def work(self, recipe: str) -> Work | None:
        """One decode step of the model asked for; None for a recipe whose definition is not at hand."""
        known = next((r for r in self.asked.known if r.name == recipe), None)
        s = self.asked.setting
        return None if known is None else decode_step(s.model, known, s.weights, s.context, s.batch)

    def kv_bytes(self, recipe: str) -> float:
        """Of one token, in all layers of the model; NaN where it is not known."""
        work, s = self.work(recipe), self.asked.setting
        return math.nan if work is None else work.kv_cache / (s.batch * s.context)

    def decode_s(self, recipe: str) -> float | None:
        work = self.work(recipe)
        return None if work is None else self.asked.setting.rates.time_s(work.total_flops, work.moved)


def _cell(record: Record) -> tuple[tuple[str, str, str, int], str]:
    return record.key, record.machine.device


def _measured(e: Evidence) -> tuple[object, ...]:
    if isinstance(e, Attribution):
        return e.case, e.implementation, e.recipe
    return e.model, e.text_hash, e.tokens, e.implementation, e.recipe


def _newest(found: Iterable[E], order: Sequence[str]) -> list[E]:
    """Of measurements of the same thing the last, by recipe in the order asked for."""
    kept: dict[tuple[object, ...], E] = {}
    for e in found:
        kept[_measured(e)] = e
    return sorted(kept.values(), key=lambda e: order.index(e.recipe))
