"""Is the recipe good enough for these inputs? Against the exact truth: what storing and rounding cost them.

A recipe fails where values were lost to a format, where an infinity or NaN of the exact truth is none of the stored
one, and where it errs by more than one bit of its floor (`harness.floor`), in the whole or in a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from harness.error_model import Form
from harness.finite import all_finite
from harness.floor import Floors
from harness.formats import get_format
from harness.recipe import TENSORS, Recipe
from harness.records import Errors, Hazard, HazardKind, Status
from harness.truth import Truth

NO_EXACT = "the exact inputs were not given; pass exact=(q, k, v), or quantize=True"


@dataclass
class Precision:
    """One recipe on one call. `floors`: None where the exact inputs are not known."""

    recipe: Recipe
    truth: Truth
    floors: Floors | None

    def judged(
        self, form: Form, total: Errors | None, hazards: Sequence[Hazard], budget: float | None = None
    ) -> tuple[Status, tuple[str, ...], float]:
        """The recipe's status on these inputs, why, and its floor."""
        if self.floors is None:
            return Status.INCONCLUSIVE, (NO_EXACT,), math.nan
        reasons = [reason for h in hazards if (reason := ruinous(h, self.recipe))]
        lost = self._lost_classes
        if lost:
            reasons.append(
                f"storing the inputs made {lost} elements of the output finite that are NaN or infinite, or the reverse"
            )
        floor = self.floors.of(form)
        if floor.lost:
            reasons.append(floor.lost)
        if budget is not None and total is not None and not total.rel_l2 <= budget:
            reasons.append(
                f"rel_l2 {total.rel_l2:.3g} against the exact truth is over the budget {budget:.3g}"
            )
        if reasons:
            return Status.FAIL, tuple(reasons), floor.least
        infinite = torch.isinf(self.floors.expected(form).variance)
        if bool(infinite.any()):
            rows = int(infinite.any(-1).sum())
            return (
                Status.INCONCLUSIVE,
                (f"the recipe promises nothing for {rows} rows: no error can be expected",),
                floor.least,
            )
        said = f"expected error {floor.error:.3g} against the exact truth, floor {floor.least:.3g}"
        return Status.PASS, (said,), floor.least

    @cached_property
    def _lost_classes(self) -> int:
        """Elements whose class (NaN, +∞, −∞, finite) is another in the stored truth than in the exact one."""
        assert self.floors is not None
        stored, exact = self.truth.out, self.floors.exact_truth.out
        if stored is exact or (all_finite(stored) and all_finite(exact)):
            return 0
        kinds = ((torch.isnan(x), x == math.inf, x == -math.inf) for x in (stored, exact))
        a, b = (x[0].to(torch.int8) + 2 * x[1] + 3 * x[2] for x in kinds)
        return int((a != b).sum())


def ruinous(h: Hazard, recipe: Recipe) -> str:
    """What a hazard says against the recipe, if anything: loud where values were lost, not where they only might."""
    lost = h.kind in (HazardKind.OVERFLOW, HazardKind.NON_FINITE)
    if h.stage in TENSORS:
        scaling = recipe.scaling.get(h.stage)
        fixed = scaling is None or scaling.source != "amax"
        lost = lost or (h.kind is HazardKind.SATURATION and fixed)
    elif h.kind is HazardKind.SATURATION:
        lost = True
    elif h.kind is HazardKind.FLUSH:
        lost = h.lost_mass > get_format(h.format).unit_roundoff
    return str(h) if lost else ""
