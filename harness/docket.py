"""A call under judgement: what it is held to, computed once for all outputs that are judged on it, and what is said of
each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.advice import layout_advice, lse_advice, unscaled_advice
from harness.by_head import (
    expectations_by_head,
    hazards_by_head,
    holds,
    is_long,
    truth_by_head,
)  # fmt: skip
from harness.compare import Target, unravel
from harness.diagnosis import NOTHING, diagnose
from harness.directions import Call
from harness.error_model import BLACK_BOX, SERIAL, WHOLE, Expectation, Form, form_of
from harness.finite import all_finite
from harness.floor import Floors
from harness.formats import get_format
from harness.hazards import predict, predict_sums, storage_hazards
from harness.operands import Extras
from harness.precision import Precision
from harness.quantize import Stored
from harness.query_rows import Rows
from harness.recipe import TENSORS, Recipe
from harness.records import Diagnosis, Errors, Hazard, HazardKind, Margins, Status
from harness.sample import choose
from harness.spec import AttentionSpec
from harness.suspects import Setting
from harness.truth import Truth
from harness.twins import Twins
from harness.verdict import YARDSTICK_LIMIT, Bench, Verdict

_LOUD = (HazardKind.OVERFLOW, HazardKind.NON_FINITE, HazardKind.SATURATION)
_NEAR = 3.0  # e-folds
NAMED_KEYS = 2**18  # a hundred suspects over more take minutes and gigabytes


@dataclass(frozen=True)
class Judgement:
    """`errors` are against the stored truth, `total_errors` against the exact truth (None without it), `lse_errors`
    where an lse was given. `diagnosis` is None unless something failed. `floor`: the rel_l2 against the exact truth
    that this recipe would have with ideal scales, or with V in its formats' range (`harness.floor`). `rows`: those
    that were judged, None for all; every row number is that of the whole call."""

    status: Status
    precision: Status
    reasons: tuple[str, ...]
    precision_reasons: tuple[str, ...]
    errors: Errors
    total_errors: Errors | None
    lse_errors: Errors | None
    hazards: tuple[Hazard, ...]
    diagnosis: Diagnosis | None
    margins: Margins
    floor: float = math.nan
    rows: Rows | None = None

    def __str__(self) -> str:
        m = self.margins
        lines = [f"implementation: {self.status.value}"]
        if self.rows is not None:
            lines.append(f"  judged by {self.rows}")
            lines += [f"  {self.rows.unseen}"] if self.rows.unseen else []
        lines += [f"  {reason}" for reason in self.reasons]
        if self.diagnosis is not None:
            lines.append(f"  likeliest: {self.diagnosis}")
        lines.append(
            f"  rel_l2 {self.errors.rel_l2:.3g} where {m.expected_rel_l2:.3g} is normal; {m.ratio:.2f} × expected"
            f" (limit {m.limit:.2f}), {m.ceiling:.2g} of the ceiling"
        )
        seen = ", ".join(f"{name} {size:.1g}" for name, size in m.unseen.items())
        if seen:
            lines.append(f"  smallest faults these inputs can show: {seen}")
        lines.append(f"recipe: {self.precision.value}")
        lines += [f"  {reason}" for reason in self.precision_reasons]
        lines += [f"  {hazard}" for hazard in self.hazards]
        return "\n".join(lines)


def _promised(e: Expectation) -> Expectation:
    """Without a variance where the ceiling is infinite: an error of scores that may double a weight has no first
    order, and no error there can be called large."""
    if all_finite(e.ceiling):
        return e
    boundless = torch.isinf(e.ceiling)
    return replace(e, variance=e.variance.masked_fill(boundless, math.inf)) if bool(boundless.any()) else e


class Docket:
    """One call under one recipe: its truths, expectations, twins and directions, shared by all that is judged on it.

    What is not given is computed: truths, expectations, and what storing did (`storage`).
    """

    def __init__(
        self, stored: tuple[Stored, Stored, Stored], spec: AttentionSpec, extras: Extras, recipe: Recipe,
        exact: Sequence[Tensor] | None = None, truth: Truth | None = None, exact_truth: Truth | None = None,
        ideal_truth: Truth | None = None, expected: Mapping[Form, Expectation] | None = None,
        storage: Sequence[Hazard] | None = None,
    ) -> None:  # fmt: skip
        self.stored, self.spec, self.extras, self.recipe = stored, spec, extras, recipe
        self.long = is_long(stored[1].codes, stored[2].codes)
        self.exact = None if exact is None else tuple(exact)
        self.truth = truth or self._truth(stored, ranges=True)
        self.exact_truth = exact_truth
        if exact_truth is None and self.exact is not None:
            same = all(
                holds(y, x) for x, y in zip(self.exact, stored, strict=True)
            )  # BF16 inputs stored in BF16
            self.exact_truth = self.truth if same else self._truth([Stored(x) for x in self.exact])
        self._first_twin: Tensor | None = None
        self._expected: dict[Form, Expectation] = dict(expected or {})
        self._promises: dict[Form, Expectation] = {}
        self._totals: dict[int, Errors] = {}  # by the identity of a verdict: equal outputs share theirs
        self._exact: Target | None = None  # of total errors
        self._lse_target: Target | None = None
        self._lse: list[tuple[Tensor, Errors]] = []  # equal ones share their errors
        self._bench: Bench | None = None
        self._settings: dict[str, Setting] = {}
        self._storage = storage
        self._hazards: tuple[Hazard, ...] | None = None
        floors = None
        if self.exact_truth is not None:
            floors = Floors(
                recipe, stored, spec, extras, self.truth, self.exact, self.exact_truth,
                lambda form: self.expected([form])[0], ideal_truth, self.long,
            )  # fmt: skip
        self._precision = Precision(recipe, self.truth, floors)

    def _truth(self, stored: Sequence[Stored], ranges: bool = False) -> Truth:
        q, k, v = stored
        return truth_by_head((q, k, v), self.spec, self.extras, ranges)

    def _values(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.values for x in self.stored)
        return q, k, v

    def expected(self, forms: Sequence[Form]) -> list[Expectation]:
        """What each form should show, computed together."""
        new = [f for f in dict.fromkeys(forms) if f not in self._expected]
        if new:
            found = expectations_by_head(self.truth, self.stored, self.spec, self.extras, self.recipe, new)
            self._expected.update(zip(new, found, strict=True))
        return [self._promise(f) for f in forms]

    def _promise(self, form: Form) -> Expectation:
        if form not in self._promises:
            self._promises[form] = _promised(self._held(form))
        return self._promises[form]

    def _held(self, form: Form) -> Expectation:
        """What an implementation is held to. That exp(s) overflows or vanishes without the max is its own doing and not
        the recipe's: in rows where its form is promised nothing, or so little that zeros would pass, it is held to what
        the recipe can do."""
        own = self._expected[form]
        if form.subtract_max:
            return own
        self.expected([WHOLE])
        best, lost = self._expected[WHOLE], torch.isinf(own.ceiling) | torch.isinf(own.variance)
        size = self.truth.out.square().sum(-1, keepdim=True)
        lost |= own.variance.sum(-1, keepdim=True) > YARDSTICK_LIMIT**2 * size
        lse_lost = torch.isinf(own.lse_ceiling) | torch.isinf(own.lse_variance)
        return Expectation(
            torch.where(lost, best.variance, own.variance), torch.where(lost, best.ceiling, own.ceiling),
            torch.where(lse_lost, best.lse_variance, own.lse_variance),
            torch.where(lse_lost, best.lse_ceiling, own.lse_ceiling),
        )  # fmt: skip

    def knows(self, out: Tensor) -> None:
        """An output of the algorithm that is the first twin, so that it need not run again."""
        self._first_twin = out

    def bench(self, form: Form) -> Bench:
        """Twins and directions, under the expectation of the form that comes first."""
        if self._bench is None:
            (expected,) = self.expected([form])
            q, k, v = self.stored
            call = Call(
                q.values, k.codes if self.long else k.values, v.codes if self.long else v.values, self.spec,
                self.extras, self.recipe, self.truth, expected.variance,
                scales=(k.scale, v.scale) if self.long else (None, None),
            )  # fmt: skip
            call = replace(call, sample=choose(call.shape, expected.variance))
            twins = Twins(self.stored, self.spec, self.recipe, self.extras, sample=call.rows)
            if self._first_twin is not None:
                twins.add(self._first_twin)
            self._bench = Bench(call, expected.ceiling, twins)
        return self._bench

    def verdicts(self, outs: Sequence[Tensor], forms: Sequence[Form]) -> list[Verdict]:
        """A verdict for each output `[B, H, L, E]`, each arranged as its form says."""
        if not outs:
            return []
        expected = self.expected(forms)
        return self.bench(forms[0]).judge(
            outs,
            [e.variance for e in expected],
            [e.ceiling for e in expected],
            [f.subtract_max for f in forms],
            [self._whole if f == BLACK_BOX else None for f in forms],
        )

    def _whole(self) -> tuple[Tensor, Tensor]:
        """Variance and ceiling of whole rows. Which values of P are exact depends on a kernel's blocks, and those of a
        black box are not known: where a block's own max is rounded, whole rows say how much, and parts that are merged
        where weights are. Nor is it known whether it adds its keys up one by one."""
        whole, parts = self.expected([SERIAL, form_of("split_kv")])
        return torch.maximum(whole.variance, parts.variance), torch.maximum(whole.ceiling, parts.ceiling)

    def judgement(
        self, out: Tensor, verdict: Verdict, lse: Tensor | None, form: Form, hazards: tuple[Hazard, ...],
        budget: float | None = None, precise: bool = True,
    ) -> Judgement:  # fmt: skip
        """The whole answer about one output. `hazards`: those of the run, or those foreseen. Without `precise` no fault
        is looked for beyond the directions: what one draw shows, the others repeat."""
        status, reasons, lse_errors = verdict.status, verdict.reasons, None
        if lse is not None:
            lse_errors = self._lse_errors(lse)
            wrong = self.lse_reasons(lse, form)
            if wrong:
                reasons = (*(() if status is not Status.FAIL else reasons), *wrong)
                status = Status.FAIL
        diagnosis = self.diagnosis(out, verdict, hazards, precise)
        total = None
        if self.exact_truth is not None:
            total = self._totals.get(id(verdict))
            if total is None:
                self._exact = self._exact or Target(self.exact_truth.out, self.recipe.out_format)
                total = self._exact.errors(out)
                self._totals[id(verdict)] = total
        precision, why, floor = self._precision.judged(form, total, self.hazards(), budget)
        rows = self.extras.rows
        errors, total, lse_errors = (self._renumbered(e) for e in (verdict.errors, total, lse_errors))
        assert errors is not None
        hazards = tuple(
            h
            if rows is None or h.where is None or h.stage in ("k", "v")
            else replace(h, where=self._place(h.where))
            for h in hazards
        )
        return Judgement(
            status, precision, reasons, why, errors, total, lse_errors, hazards, diagnosis, verdict.margins, floor,
            rows,
        )  # fmt: skip

    def _place(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """The same place in the whole call."""
        return (*at[:2], self.extras.row(at[2]), *at[3:])

    def _renumbered(self, errors: Errors | None) -> Errors | None:
        if self.extras.rows is None or errors is None or errors.worst is None:
            return errors
        return replace(errors, worst=self._place(errors.worst))

    def advised(self, out: Tensor, judged: Judgement) -> Judgement:
        """The judgement of an output that came from outside, where what is wrong may be how it was given."""
        if judged.status is not Status.FAIL or self.extras.given or judged.errors.class_mismatch:
            return judged
        if self.long or self.extras.rows is not None:
            return judged
        said = layout_advice(out, judged.errors.rel_l2, self._values(), self.spec)
        return replace(judged, reasons=(said, *judged.reasons)) if said else judged

    def diagnosis(
        self, out: Tensor, verdict: Verdict, hazards: Sequence[Hazard], precise: bool = True
    ) -> Diagnosis | None:
        """The likeliest fault of an output that failed."""
        if verdict.status is not Status.FAIL or self._bench is None:
            return None
        # A run that was watched tells where its numbers left their format; nothing else need be looked for.
        watched = any(h.source == "observed" and h.kind in _LOUD and h.stage not in TENSORS for h in hazards)
        if verdict.errors.class_mismatch or watched:
            return self._of_classes(out, hazards)
        if not precise:
            return None
        if self.stored[1].codes.shape[2] > NAMED_KEYS:
            told = f"no name is looked for beyond {NAMED_KEYS} keys: judge a shorter call of the same kind"
            return Diagnosis(NOTHING, told, 0.0, 0.0, 0.0)
        sizes = {x.name: x.shift.theta for x in verdict.along}
        return diagnose(self._bench.call, out, self.stored, sizes, self._settings)

    def _without_max(self, wrong: Tensor) -> Diagnosis | None:
        """Whether the wrong rows are those in which exp(s) itself leaves its format."""
        top, lse = self.truth.row_max, self.truth.lse
        fmt, stored = (get_format(self.recipe.format_of(s)) for s in ("exp", "probs"))
        if self.recipe.policy("probs") != "saturate" and stored.max < fmt.max:
            fmt = stored
        high, low = math.log(fmt.max), math.log(fmt.min_normal)
        # Sums leave it before single terms do, and subnormals may count as 0 or not.
        over, under = f"exp(s) is taken without its max, and leaves {fmt.name}", "every exp(s − max) is 0"
        cases = (
            ("overflow in exp", top > high, lse > high - _NEAR, over),
            (
                "underflow in exp",
                lse < math.log(fmt.min_subnormal) - _NEAR,
                lse < low,
                f"the max is no row's: {under}",
            ),
        )
        for name, must, may, what in cases:
            if bool(wrong.any()) and not bool((must & ~wrong).any()) and not bool((wrong & ~may).any()):
                return Diagnosis(name, what, 1.0, 0.0, 1.0)
        return None

    def _undivided(self) -> Diagnosis | None:
        """Whether Σ P·V leaves its format when the row sum divides it last, as kernels do that stream over keys."""
        late = replace(self.recipe, normalise="late")
        for h in predict_sums(self.truth, late, self.stored[2].scale, self.extras.sinks):
            if h.kind in _LOUD:
                said = f"{h}, where P·V is divided by its sum at the end"
                return Diagnosis(f"{h.kind.value} in {h.stage}", said, 1.0, 0.0, 1.0)
        return None

    def _of_classes(self, out: Tensor, hazards: Sequence[Hazard]) -> Diagnosis:
        """NaN and infinities have no size: rows without keys, or the first stage that left its format."""
        wrong = (torch.isfinite(out) != torch.isfinite(self.truth.out)).any(-1)
        empty = self.truth.row_max == -math.inf
        share = 1.0
        if bool(wrong.any()) and bool((wrong & empty).sum() == wrong.sum()):
            return Diagnosis("empty rows", "rows that see no key are not what the rule says", 1.0, 0.0, share)
        seen = [h for h in hazards if h.kind in _LOUD or h.kind is HazardKind.SENTINEL]
        if seen:
            first = min(seen, key=lambda h: h.source != "observed")
            return Diagnosis(f"{first.kind.value} in {first.stage}", str(first), 1.0, 0.0, share)
        if (ranged := self._without_max(wrong)) is not None:
            return ranged
        if (held := self._undivided()) is not None:
            return held
        what = "NaN or infinities that the recipe does not explain: none of its stages leaves its format here"
        return Diagnosis(NOTHING, what, 0.0, 0.0, 0.0)

    def _lse_errors(self, lse: Tensor) -> Errors:
        for known, errors in self._lse:
            if torch.equal(known, lse):
                return errors
        self._lse_target = self._lse_target or Target(self.truth.lse[..., None], self.recipe.base)
        errors = self._lse_target.errors(lse[..., None])
        self._lse.append((lse, errors))
        return errors

    def lse_reasons(self, lse: Tensor, form: Form) -> tuple[str, ...]:
        """What is wrong with a log-sum-exp `[B, H, L]`: its classes, or more than its ceiling."""
        (expected,) = self.expected([form])
        x, t = lse.detach().double(), self.truth.lse
        if bool(((x - t).abs() <= expected.lse_ceiling).all()):  # NaN and infinities fail this
            return ()
        finite = torch.isfinite(x) & torch.isfinite(t)
        # Where the recipe promises nothing, any class will do.
        same = finite | (x == t) | (torch.isnan(x) & torch.isnan(t)) | ~torch.isfinite(expected.lse_ceiling)
        if not bool(same.all()):
            wrong = f"{int((~same).sum())} of {same.numel()}"
            return (f"lse: {wrong} are NaN or infinite where the truth is not, or not where it is",)
        over = torch.where(
            torch.isfinite(x) & torch.isfinite(t), (x - t).abs() - expected.lse_ceiling, -math.inf
        )
        if over.numel() and float(over.nan_to_num(-math.inf).max()) > 0:
            at = unravel(int(over.nan_to_num(-math.inf).argmax()), over.shape)
            size = float((x - t).abs()[at])
            most = float(expected.lse_ceiling[at])
            said = f"lse is off by {size:.3g} at b, h, i = {self._place(at)}, beyond {most:.3g}"
            what = lse_advice(x, self.truth, expected.lse_ceiling, self.stored[1].codes.shape[2])
            if not what and not self.long:
                what = unscaled_advice(x, self._values(), self.spec, self.extras)
            return (said, f"lse: {what}") if what else (said,)
        return ()

    def hazards(self) -> tuple[Hazard, ...]:
        """What storing the inputs did, where they are known, and what FP64 values say of the stages: of the recipe,
        whatever an implementation does."""
        if self._hazards is None:
            found = [] if self._storage is None else list(self._storage)
            if self._storage is None and self.exact is not None:
                found += (
                    hazards_by_head(self.exact, self.stored, self.recipe)
                    if self.long
                    else storage_hazards(tuple(x.double() for x in self.exact), self.stored, self.recipe)
                )
            if self.truth.ranges is not None:
                found += predict(
                    self.truth, self.recipe, v_scale=self.stored[2].scale, sinks=self.extras.sinks
                )
            self._hazards = tuple(found)
        return self._hazards
