"""What a recipe errs by on these inputs, and its floor: what it would err by if its formats' ranges were no matter.

The floor is the least of two:

* with one amax scale a head for every tensor that is stored in fewer than 16 bits;
* with the V of each head in mid-range. Attention is linear in V, so 2ⁿ·V gives 2ⁿ·out with the same relative error, as
  long as nothing of it falls below a format's normal numbers. It is computed only where that can matter: some format on
  V's way has t for its smallest normal number, and the root mean square of a head's output is below 4·t. Elsewhere the
  error of an element below t, at most t·2^−p, is a quarter of the unit roundoff of that mean, or less.

Errors are expected ones, E‖total‖² = ‖stored truth − exact truth‖² + Σσ², and relative. They are taken over the whole
tensor and of each head alone: in the whole, a head whose values are small beside the others' would hide.
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
from harness.finite import finite_or_zero
from harness.formats import get_format
from harness.operands import Extras
from harness.quantize import Stored, quantize
from harness.recipe import TENSORS, Recipe, Scaling
from harness.significance import ratio_limit
from harness.spec import AttentionSpec
from harness.truth import Truth

ONE_BIT = 2.0  # a recipe that errs by more than this × its floor has lost a bit to its scales
NEAR = 4.0  # × the smallest normal number: see above
_OF_V = ("acc", "block_out", "out")  # stages whose values are proportional to V
_LARGEST_POWER = 1000  # of two, that FP64 holds with room to spare


@dataclass(frozen=True)
class Floor:
    """rel_l2 against the exact truth over the whole tensor: the `error` that is expected, the `least` it could be, and
    `of` what. 0 where the exact truth is. `lost`: what to say where a bit is lost, in the whole or in a head."""

    error: float
    least: float
    of: str
    lost: str = ""


@dataclass
class Floors:
    """Of one recipe on one call, by form. `expected` gives what a form should show; `ideal_truth` is computed where not
    given."""

    recipe: Recipe
    stored: tuple[Stored, Stored, Stored]
    spec: AttentionSpec
    extras: Extras
    truth: Truth
    exact: Sequence[Tensor] | None
    exact_truth: Truth
    expected: Callable[[Form], Expectation]
    ideal_truth: Truth | None = None
    long: bool = False
    _known: dict[Form, Floor] = field(default_factory=dict)

    def of(self, form: Form) -> Floor:
        if form not in self._known:
            self._known[form] = self._floor(form)
        return self._known[form]

    def _floor(self, form: Form) -> Floor:
        own, ideal = self._distances
        variance = self._squares_of_variance(self.expected(form).variance)
        found = [(variance + ideal, "ideal scales")]
        if self._powers is not None:
            found.append((self._of_mid_range(form), self._mid_range_name))
        return self._compared(variance + own, found)

    def _compared(self, own: Tensor, found: list[tuple[Tensor, str]]) -> Floor:
        """From expected squares of rows `[B, H, L]`, in units of each head."""
        size = self._squares(self._exact_out)
        if not bool(size.any()):
            return Floor(0.0, 0.0, "")
        weight = (self._unit / self._unit.max())[..., 0].square()

        def whole(squares: Tensor) -> float:
            return math.sqrt(float((squares * weight).sum()) / float((size * weight).sum()))

        best = min(found, key=lambda x: whole(x[0]))
        error, least, of = whole(own), whole(best[0]), best[1]
        lost = lost_bits(error, least, of) if least > 0 and error > ONE_BIT * least else ""
        if not lost and own.shape[0] * own.shape[1] > 1:
            lost = _lost_head(own, best, size, self._samples)
        return Floor(error, least, of, lost)

    def _samples(self, b: int, h: int) -> int:
        """How many rows' worth of roundings a head's error holds: as many rows as carry it, each one sample, since a
        score that is off moves all channels. Rows that read the same stored values alike share their errors, and then
        it is the channels that carry it, times the effective rank of the error, (Σσ²)² ÷ Σσ⁴."""
        e = finite_or_zero(self.truth.out[b, h] - self.exact_truth.out[b, h]) / self._unit[b, h]
        gram = e.mT @ e if e.shape[0] > e.shape[1] else e @ e.mT
        rank = _effective(gram.diagonal().sum(), gram.square().sum())
        rows, channels = (_effective(x.sum(), x.square().sum()) for x in (e.square().sum(n) for n in (1, 0)))
        return max(1, int(min(rows, rank * channels)))

    @cached_property
    def _exact_out(self) -> Tensor:
        return finite_or_zero(self.exact_truth.out)

    @cached_property
    def _unit(self) -> Tensor:
        """A power of two over each head's largest magnitude `[B, H, 1, 1]`: squares of 1e-170 would be 0 in FP64."""
        out = self._exact_out
        return _power_over(out) if out.numel() else out.new_ones(*out.shape[:2], 1, 1)

    def _squares(self, x: Tensor) -> Tensor:
        """Of each row `[B, H, L]`, in units of its head."""
        return (x / self._unit).square().sum(3)

    def _squares_of_variance(self, variance: Tensor) -> Tensor:
        return (finite_or_zero(variance) / self._unit / self._unit).sum(3)

    @cached_property
    def _distances(self) -> tuple[Tensor, Tensor]:
        """Of the stored truth and of that with ideal scales to the exact one."""
        own = self._squares(finite_or_zero(self.truth.out - self.exact_truth.out))
        ideal = self._ideal()
        if ideal is self.truth:
            return own, own
        return own, self._squares(finite_or_zero(ideal.out - self.exact_truth.out))

    def _ideal(self) -> Truth:
        """The stored truth under one amax scale a head for what is narrower than 16 bits: this one where the recipe has
        such scales, or needs none."""
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
    def _powers(self) -> Tensor | None:
        """What brings the V of each kv head into mid-range, FP64 `[B, Hkv, 1, 1]`: powers of two, 1 for those whose
        outputs are well within every format's normal range. None where all are."""
        out = self._exact_out
        if self.exact is None or not out.numel():
            return None
        mean = self._squares(out).sum(2) / (out.shape[2] * out.shape[3])
        rms = mean.sqrt()[..., None, None] * self._unit
        small = (rms > 0) & (rms < NEAR * self._smallest_normal(out))
        if not bool(small.any()):
            return None
        v = finite_or_zero(self.exact[2])
        small = small.reshape(v.shape[0], v.shape[1], -1, 1).any(2, keepdim=True)
        return torch.where(small, 1 / _power_over(v).clamp(min=2.0**-_LARGEST_POWER), 1.0)

    def _smallest_normal(self, out: Tensor) -> Tensor:
        """The largest of those of the formats that something proportional to V is held in, `[B|1, H|1, 1, 1]`. Scales
        from amax, of a head or less, keep a tensor in its format's range."""
        stages = max(2.0 ** get_format(self.recipe.format_of(s)).emin for s in _OF_V)
        scaling, normal = self.recipe.scaling.get("v"), 2.0 ** get_format(self.recipe.storage["v"]).emin
        if scaling is not None and scaling.source == "amax" and scaling.granularity != "tensor":
            return out.new_tensor(stages)[None, None, None, None]
        scale = self.stored[2].scale
        kept = out.new_ones(1, 1, 1, 1) if scale is None else scale.amax((2, 3), keepdim=True)
        if kept.shape[1] > 1:
            kept = kept.repeat_interleave(out.shape[1] // kept.shape[1], 1)
        return (kept * normal).clamp(min=stages)

    @property
    def _mid_range_name(self) -> str:
        assert self._powers is not None
        powers = sorted({int(n) for n in self._powers.log2().flatten().tolist()})
        shown = f"2^{powers[0]}·V" if len(powers) == 1 else f"V times 2^{powers[0]} to 2^{powers[-1]} by head"
        return f"{shown}, which leaves no format's normal range"

    def _of_mid_range(self, form: Form) -> Tensor:
        """Expected squares against the exact truth when the largest magnitude of each small head's V is in [½, 1)."""
        assert self.exact is not None
        assert self._powers is not None
        recipe, scaling = self.recipe, self.recipe.scaling.get("v")
        if scaling is not None and scaling.source == "given":  # for the V that was given
            recipe = replace(recipe, scaling={**recipe.scaling, "v": Scaling("head", "amax")})
        v = self._store(self.exact[2].double() * self._powers, "v", recipe)
        stored = (*self.stored[:2], v)
        truth = truth_by_head(stored, self.spec, self.extras, False)
        (e,) = expectations_by_head(truth, stored, self.spec, self.extras, recipe, [form])
        up = self._powers.repeat_interleave(truth.out.shape[1] // self._powers.shape[1], 1)
        apart = self._squares(finite_or_zero(truth.out - self.exact_truth.out * up) / up)
        return apart + self._squares_of_variance(finite_or_zero(e.variance) / up / up)


def _lost_head(
    own: Tensor, floor: tuple[Tensor, str], size: Tensor, samples: Callable[[int, int], int]
) -> str:
    """What to say of the head that errs most beyond its own floor, or that of half of the heads; "" for none.

    The errors of a head are one draw of roundings: by chance they may be as much larger than expected as one of these
    heads is over so many `samples`, with a probability of `significance.ALPHA`.
    """
    heads = size.sum(2)
    known = heads > 0
    scale = torch.where(known, heads, 1.0)
    a, f = ((x.sum(2) / scale).masked_fill(~known, 0.0) for x in (own, floor[0]))
    f = f.clamp(min=float(f[known].median()))
    over = torch.where(f > 0, a / f, 0.0)
    told, most = "", 1.0
    for b, h in (over > ONE_BIT**2).nonzero().tolist():
        chance = ratio_limit(samples(b, h), int(known.sum()), 1.0)
        beyond = math.sqrt(float(over[b, h])) / (ONE_BIT * chance)
        if beyond > most:
            said = lost_bits(math.sqrt(float(a[b, h])), math.sqrt(float(f[b, h])), floor[1])
            told, most = f"in head b={b} h={h}, which the whole hides, {said}", beyond
    return told


def _effective(total: Tensor, squares: Tensor) -> float:
    """How many equal numbers have this sum and this sum of squares; 0 for none."""
    return float(total) ** 2 / float(squares) if squares > 0 else 0.0


def _power_over(x: Tensor) -> Tensor:
    """The least power of two above the largest magnitude of each `[:, :, …]`, `[B, H, 1, 1]`; 1 where all is 0."""
    top = x.abs().amax((2, 3), keepdim=True).double()
    return torch.ldexp(torch.ones_like(top), top.frexp().exponent)


def lost_bits(error: float, least: float, of: str) -> str:
    """Why an error that is more than `ONE_BIT` × its floor is against the recipe."""
    return (
        f"expected error {error:.3g} against the exact truth is {error / least:.3g} × that of {of} ({least:.3g});"
        f" more than {ONE_BIT:g} × is a bit lost"
    )


def ideal_recipe(recipe: Recipe) -> Recipe:
    """The recipe with an amax scale a head for every tensor stored in fewer than 16 bits that has none as fine."""
    scaling = dict(recipe.scaling)
    for name in TENSORS:
        own, narrow = scaling.get(name), get_format(recipe.storage[name]).storage_bits < 16
        if narrow and (own is None or own.source != "amax" or own.granularity == "tensor"):
            scaling[name] = Scaling("head", "amax")
    return replace(recipe, scaling=scaling) if scaling != dict(recipe.scaling) else recipe
