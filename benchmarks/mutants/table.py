"""What a mutant is, and all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from benchmarks.mutants.attention import Attention
from benchmarks.mutants.calls import RECIPES, Call

Run = tuple[str, str]  # arrangement and case
Edit = Mapping[str, Any]  # methods of `Attention` by name


@dataclass(frozen=True)
class Mutant:
    """One wrong implementation: methods of `Attention` replaced by `edit`, on some runs and recipes.

    `names`: what a diagnosis may call it; none: it has no name for this. `keeps`: stages whose rounding is part of the
    fault. `random`: the fault is noise and not a bias. `ranged`: the formula is right and its numbers leave their
    format. `of_lse`: the output is right and the lse is not."""

    name: str
    what: str
    runs: tuple[Run, ...]
    edit: Edit
    names: tuple[str, ...] = ()
    recipes: tuple[str, ...] = RECIPES
    keeps: tuple[str, ...] = ()
    random: bool = False
    ranged: bool = False
    of_lse: bool = False

    def kernel(self) -> type[Attention]:
        return type("Mutant", (Attention,), {**self.edit, "keeps": frozenset(self.keeps)})

    def honest(self) -> type[Attention]:
        """The same without the fault, rounding in `exact` what the mutant rounds."""
        return type("Honest", (Attention,), {"keeps": frozenset(self.keeps)})

    def output(self, call: Call, arrangement: str) -> tuple[Tensor, Tensor]:
        return self.kernel()(call, arrangement).run()

    def effect(self, call: Call, arrangement: str) -> tuple[Tensor, Tensor]:
        """What the fault alone moves output and lse by, in FP64; where it is one of range, under the recipe."""
        wrong, right = (
            cls(call, arrangement, exact=not self.ranged).run() for cls in (self.kernel(), self.honest())
        )
        return wrong[0] - right[0], wrong[1] - right[1]


@dataclass
class Family:
    """Mutants that are edits of one kind."""

    name: str
    members: list[Mutant] = field(default_factory=list)

    def add(self, name: str, what: str, runs: str, edit: Edit, names: str = "",
            **options: Any) -> None:  # fmt: skip
        """`runs`: "arrangement/case …"; `names` are separated by "; "."""
        pairs = tuple((a, c) for a, c in (run.split("/") for run in runs.split()))
        said = tuple(n for n in names.split("; ") if n)
        self.members.append(Mutant(name, what, pairs, dict(edit), said, **options))


def families() -> tuple[Family, ...]:
    from benchmarks.mutants import cache, casts, index, masks, merge, numeric

    return tuple(m.FAMILY for m in (numeric, casts, masks, index, cache, merge))


def mutants() -> dict[str, Mutant]:
    """By name. Raises ValueError for a name that is there twice."""
    found: dict[str, Mutant] = {}
    for family in families():
        for mutant in family.members:
            if mutant.name in found:
                raise ValueError(f"two mutants are named {mutant.name!r}; allowed: a name once")
            found[mutant.name] = mutant
    return found


def family_of() -> dict[str, str]:
    return {m.name: f.name for f in families() for m in f.members}
