"""Is the recipe good enough for these inputs? Against the exact truth: what storing and rounding cost them.

The whole tensor is judged: a head whose values are small beside the others' hides among them.

A recipe fails where values were lost to a format, where an infinity or NaN of the exact truth is none of the stored
one, and where it errs by more than `ONE_BIT` times its floor: what it would err by if its formats' ranges were no
matter. The floor is the least of two:

* with one amax scale a head for every tensor that is stored in fewer than 16 bits;
* with V in mid-range. Attention is linear in V, so 2ⁿ·V gives 2ⁿ·out with the same relative error, as long as nothing
  of it falls below a format's normal numbers. It is computed only where that can matter: some format on V's way has t
  for its smallest normal number, and the output's root mean square is below 4·t. Elsewhere the error of an element
  below t, at most t·2^−p, is a quarter of the unit roundoff of that mean, or less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from harness.by_head import expectations_by_head, store_narrow, truth_by_head
from harness.error_model import Expectation, Form
from harness.finite import all_finite, finite_or_zero
from harness.formats import FloatFormat, get_format
from harness.operands import Extras
from harness.quantize import Stored, quantize
from harness.recipe import TENSORS, Recipe, Scaling
from harness.records import Errors, Hazard, HazardKind, Status
from harness.spec import AttentionSpec
from harness.truth import Truth

ONE_BIT = 2.0  # a recipe that errs by more than this × its floor has lost a bit to its scales
NO_EXACT = "the exact inputs were not given; pass exact=(q, k, v), or quantize=True"
NEAR = 4.0  # × the smallest normal number: see above
_OF_V = ("acc", "block_out", "out")  # stages whose values are proportional to V


@dataclass
class Precision:
    """One recipe on one call. `expected` gives what a form should show; `ideal_truth` is computed where not given."""

    recipe: Recipe
    stored: tuple[Stored, Stored, Stored]
    spec: AttentionSpec
    extras: Extras
    truth: Truth
    exact: Sequence[Tensor] | None
    exact_truth: Truth | None
    expected: Callable[[Form], Expectation]
    ideal_truth: Truth | None = None
    long: bool = False
    _floors: dict[Form, tuple[float, float, str]] = field(default_factory=dict)
    _distances: tuple[float, float, float] | None = None  # size of the exact truth, two distances²

    def judged(
        self, form: Form, total: Errors | None, hazards: Sequence[Hazard], budget: float | None = None
    ) -> tuple[Status, tuple[str, ...], float]:
        """The recipe's status on these inputs, why, and its floor."""
        if self.exact_truth is None:
            return Status.INCONCLUSIVE, (NO_EXACT,), math.nan
        reasons = [reason for h in hazards if (reason := ruinous(h, self.recipe))]
        lost = self._lost_classes
        if lost:
            reasons.append(
                f"storing the inputs made {lost} elements of the output finite that are NaN or infinite, or the reverse"
            )
        error, floor, of = self.floor(form)
        if floor > 0 and error > ONE_BIT * floor:
            reasons.append(lost_bits(error, floor, of))
        if budget is not None and total is not None and not total.rel_l2 <= budget:
            reasons.append(
                f"rel_l2 {total.rel_l2:.3g} against the exact truth is over the budget {budget:.3g}"
            )
        if reasons:
            return Status.FAIL, tuple(reasons), floor
        infinite = torch.isinf(self.expected(form).variance)
        if bool(infinite.any()):
            rows = int(infinite.any(-1).sum())
            return (
                Status.INCONCLUSIVE,
                (f"the recipe promises nothing for {rows} rows: no error can be expected",),
                floor,
            )
        return Status.PASS, (f"expected error {error:.3g} against the exact truth, floor {floor:.3g}",), floor

    def floor(self, form: Form) -> tuple[float, float, str]:
        """Expected rel_l2 against the exact truth of this recipe, the floor, and what the floor is of. E‖total‖² is the
        distance of the two truths plus the kernel's variance. 0 where the exact truth is."""
        if form not in self._floors:
            self._floors[form] = self._floor(form)
        return self._floors[form]

    def _floor(self, form: Form) -> tuple[float, float, str]:
        assert self.exact_truth is not None
        variance = float(finite_or_zero(self.expected(form).variance).sum())
        if self._distances is None:
            exact = self.exact_truth.out
            apart = [finite_or_zero(t - exact) for t in (self.truth.out, self._ideal().out)]
            size = float(finite_or_zero(exact).norm())
            own, ideal = (float((x * x).sum()) for x in apart)
            self._distances = (size, own, ideal)
        size, own, ideal = self._distances
        if not size:
            return 0.0, 0.0, ""
        found = [(math.sqrt(variance + ideal) / size, "ideal scales")]
        small = self._small
        if small:
            found.append((self._of_mid_range(form), f"2^{-small}·V, which leaves no format's normal range"))
        return (math.sqrt(variance + own) / size, *min(found))

    @cached_property
    def _lost_classes(self) -> int:
        """Elements whose class (NaN, +∞, −∞, finite) is another in the stored truth than in the exact one."""
        assert self.exact_truth is not None
        stored, exact = self.truth.out, self.exact_truth.out
        if stored is exact or (all_finite(stored) and all_finite(exact)):
            return 0
        kinds = ((torch.isnan(x), x == math.inf, x == -math.inf) for x in (stored, exact))
        a, b = (x[0].to(torch.int8) + 2 * x[1] + 3 * x[2] for x in kinds)
        return int((a != b).sum())

    def _ideal(self) -> Truth:
        """The stored truth under one amax scale a head for what is narrower than 16 bits: this one where the recipe has
        scales from amax, or needs none."""
        if self.ideal_truth is None:
            ideal = ideal_recipe(self.recipe)
            if ideal.storage_key == self.recipe.storage_key or self.exact is None:
                self.ideal_truth = self.truth
            else:
                q, k, v = (self._store(x, n, ideal) for x, n in zip(self.exact, TENSORS, strict=True))
                self.ideal_truth = truth_by_head((q, k, v), self.spec, self.extras, False)
        return self.ideal_truth

    def _store(self, x: Tensor, name: str, recipe: Recipe) -> Stored:
        return store_narrow(x, name, recipe, None, True) if self.long else quantize(x, name, recipe)

    @cached_property
    def _small(self) -> int:
        """The exponent of V's largest magnitude where what depends on V may leave a format's normal range; else 0."""
        if self.exact is None or self.exact_truth is None:
            return 0
        out = finite_or_zero(self.exact_truth.out)
        rms = float(out.square().mean().sqrt()) if out.numel() else 0.0
        if not 0 < rms < NEAR * max(2.0**f.emin for f in _formats_of_v(self.recipe)):
            return 0
        return math.frexp(float(finite_or_zero(self.exact[2]).abs().max()))[1]

    def _of_mid_range(self, form: Form) -> float:
        """Expected rel_l2 of this recipe against the exact truth when V's largest magnitude is in [½, 1)."""
        assert self.exact is not None
        assert self.exact_truth is not None
        up = 2.0**-self._small
        v = self._store(self.exact[2].double() * up, "v", self.recipe)
        stored = (*self.stored[:2], v)
        truth = truth_by_head(stored, self.spec, self.extras, False)
        (e,) = expectations_by_head(truth, stored, self.spec, self.extras, self.recipe, [form])
        exact = self.exact_truth.out * up
        apart = finite_or_zero(truth.out - exact)
        variance = float(finite_or_zero(e.variance).sum()) + float((apart * apart).sum())
        return math.sqrt(variance) / float(finite_or_zero(exact).norm())


def _formats_of_v(recipe: Recipe) -> list[FloatFormat]:
    """Formats that something proportional to V is held in; scales from amax keep a tensor in its format's range."""
    scaling = recipe.scaling.get("v")
    kept = [recipe.storage["v"]] if scaling is None or scaling.source != "amax" else []
    return [get_format(x) for x in (*kept, *(recipe.format_of(s) for s in _OF_V))]


def lost_bits(error: float, floor: float, of: str) -> str:
    """Why an error that is more than `ONE_BIT` × its floor is against the recipe."""
    return (
        f"expected error {error:.3g} against the exact truth is {error / floor:.3g} × that of {of} ({floor:.3g});"
        f" more than {ONE_BIT:g} × is a bit lost"
    )


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


def ideal_recipe(recipe: Recipe) -> Recipe:
    """The recipe with an amax scale a head for every tensor stored in fewer than 16 bits without one."""
    scaling = dict(recipe.scaling)
    for name in TENSORS:
        narrow = get_format(recipe.storage[name]).storage_bits < 16
        if narrow and (name not in scaling or scaling[name].source != "amax"):
            scaling[name] = Scaling("head", "amax")
    return replace(recipe, scaling=scaling) if scaling != dict(recipe.scaling) else recipe
