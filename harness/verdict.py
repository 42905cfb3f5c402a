"""Is this output as accurate as its recipe allows, and how is that decided? (NUMERICS section 5)

In this order, the first that fails deciding: classes (NaN and ±Inf where the stored truth has them), the ceiling that
no correct run exceeds, the yardstick (error ÷ expectation over the tensor, each head, each block of 32 rows, each row
and each element; its upper side alone), and the fault directions against twins of the recipe. What passes them all on
inputs that could not have shown a fault is INCONCLUSIVE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.compare import Target
from harness.directions import DIRECTIONS, Call, Projection, key_powers, project
from harness.finite import all_finite
from harness.records import Errors, Margins, Status
from harness.significance import (
    NO_SHIFT,
    NO_SPREAD,
    SPREAD_RATIO,
    TWIN_LIMIT,
    Shift,
    Spread,
    shift,
    spread,
    threshold,
    upper_quartile,
)  # fmt: skip
from harness.twins import Twins
from harness.yardstick import (
    FP32_LIMITS,
    NARROW,
    Ground,
    Weights,
    Yardstick,
    fresh_rows,
    independent_rows,
    over_ceiling,
    own_rounding,
)

FEWEST_ROWS = 4  # independent rows below which nothing is concluded
YARDSTICK_LIMIT = 0.25  # expected error over the output's own size, beyond which the yardstick says nothing
SHRINK_LIMIT = 0.1  # a smallest visible shrink beyond which the inputs say nothing
TOLD = 2  # directions that are told with their figures
FEWEST_KEY_ROWS = 40  # |T| ≤ √n: with fewer rows than τ² no lost key can show


@dataclass(frozen=True)
class Along:
    """What one direction showed: the shift against the twin that leaves least, and the dispersion likewise."""

    name: str
    shift: Shift
    spread: Spread
    effect: float
    excess: float
    significant: bool
    unseen: float


@dataclass(frozen=True)
class Verdict:
    """`reasons` of the status, `margins`, and what the directions showed, largest statistic first."""

    status: Status
    reasons: tuple[str, ...]
    errors: Errors
    margins: Margins
    along: tuple[Along, ...]


Wider = Callable[[], tuple[Tensor, Tensor]]


class Bench:
    """One call, its twins and its directions, to judge any number of outputs on."""

    def __init__(self, call: Call, ceiling: Tensor, twins: Twins) -> None:
        self.call, self.ceiling, self.twins = call, ceiling, twins
        narrow = {*call.recipe.at.values()} - {call.recipe.base}
        self.limits = NARROW if narrow else FP32_LIMITS
        self.independent = independent_rows(call)
        # A row that repeats another counts once, in every direction.
        alone = self.independent.view(call.truth.out.shape[:3])[..., None]
        self.counted = replace(call, variance=call.variance.masked_fill(~alone, math.inf))
        self.target = Target(call.truth.out, call.recipe.out_format)
        self.finite = self.target.finite
        self.fresh = fresh_rows(self.target)
        self.usable = self.independent
        for x, whole in ((call.truth.out, self.finite), (call.variance, all_finite(call.variance))):
            self.usable = self.usable if whole else self.usable & torch.isfinite(x).all(-1).flatten()
        self._like_twin: tuple[tuple[Along, ...], float] | None = None  # what every copy of the twin shows
        self._rounding: Tensor | float | None = None
        self._weights: dict[int, tuple[Tensor, Weights]] = {}  # by the identity of the variance kept beside
        self._twin_finite: bool | None = None
        self.truth = call.rows.take(call.truth.out)  # where twins and directions are looked at
        self.rows = int(self.usable.sum())
        promised = not torch.isinf(call.variance).any()
        self.unjudged = (
            0
            if promised
            else int((torch.isfinite(call.truth.out).all(-1) & torch.isinf(call.variance).any(-1)).sum())
        )
        self.size = _rms(call.truth.out)
        self.expected = _expected(call.variance)

    @property
    def ground(self) -> Ground:
        number = self.call.extras.row
        return Ground(
            self.call.truth.out.shape, self.limits, self.independent, self.own_rounding, number, self.fresh
        )  # fmt: skip

    @property
    def own_rounding(self) -> Tensor | float:
        """ulp²/12 of each element of the truth: near a power of two a rounding is larger than its mean over a binade,
        which is what the variance holds."""
        if self._rounding is None:
            self._rounding = own_rounding(self.target)
        return self._rounding

    @property
    def twin_finite(self) -> bool:
        """Whether all of the first twin is finite."""
        if self._twin_finite is None:
            self._twin_finite = all_finite(self.twins[0])
        return self._twin_finite

    def _yardstick(self, e: Tensor, variance: Tensor, finite: Tensor | None) -> Yardstick:
        if finite is not None:
            return Yardstick(e, Weights(variance, finite, self.ground))
        if id(variance) not in self._weights:
            self._weights[id(variance)] = (variance, Weights(variance, None, self.ground))
        return Yardstick(e, self._weights[id(variance)][1])

    def judge(
        self, outs: Sequence[Tensor], variances: Sequence[Tensor] | None = None,
        ceilings: Sequence[Tensor] | None = None, directed: Sequence[bool] | None = None,
        wider: Sequence[Wider | None] | None = None,
    ) -> list[Verdict]:  # fmt: skip
        """The verdicts on outputs `[B, H, L, E]`. An implementation that arranges its sums otherwise than the call's
        own model says has its own variance and ceiling; one that no twin is like is not `directed`; `wider` gives a
        variance and a ceiling for one whose arrangement is not known, asked for when it fails the first."""
        outs = [out.detach().double() for out in outs]
        variances = variances or [self.call.variance] * len(outs)
        ceilings = ceilings or [self.ceiling] * len(outs)
        directed = directed or [True] * len(outs)
        wider = wider or [None] * len(outs)
        twin, take = self.twins[0], self.call.rows.take
        # Only what differs from the twin has directions to test.
        differ = [directed[i] and not torch.equal(take(out), twin) for i, out in enumerate(outs)]
        deltas = [take(out) - twin for out, apart in zip(outs, differ, strict=True) if apart]
        first = project(self.counted, [twin - self.truth, *deltas] if deltas else [])
        places = [sum(differ[: i + 1]) if apart else 0 for i, apart in enumerate(differ)]
        verdicts: list[Verdict] = []
        for at, out in enumerate(outs):
            # Algorithms that do the same sums give the same bits: judged once.
            twice = (
                j for j in range(at) if (variances[j] is variances[at]) and directed[j] == directed[at]
                and wider[j] is wider[at] is None and torch.equal(outs[j], out)
            )  # fmt: skip
            same = next(twice, None)
            verdicts.append(
                self._one(out, variances[at], ceilings[at], first, places[at], wider[at])
                if same is None
                else verdicts[same]
            )
        return verdicts

    def _one(
        self, out: Tensor, variance: Tensor, ceiling: Tensor, first: Projection, at: int,
        wider: Wider | None = None,
    ) -> Verdict:  # fmt: skip
        truth = self.call.truth.out
        whole = all_finite(out)
        errors = self.target.errors(out, whole)
        finite = None if self.finite and whole else torch.isfinite(out) & torch.isfinite(truth)
        e = out - truth if finite is None else torch.where(finite, out - truth, 0.0)
        reasons = list(class_reasons(errors))
        over, reason = over_ceiling(e, ceiling, self.call.extras.row)
        yard = self._yardstick(e, variance, finite)
        if wider is not None and (reason or yard.reasons()):
            variance, ceiling = (
                torch.maximum(x, y) for x, y in zip((variance, ceiling), wider(), strict=True)
            )
            over, reason = over_ceiling(e, ceiling, self.call.extras.row)
            yard = Yardstick(e, Weights(variance, finite, self.ground))
        reasons += reason + yard.reasons()
        taken = self.call.rows.take(out)
        # Of a large call that has failed already, directions are told and decide nothing: one twin will do.
        twins = 1 if reasons and not self.call.rows.whole else len(self.twins)
        along, tau = self._directions(taken, whole or all_finite(taken), first, at, twins)
        found = [x for x in along if x.significant]  # a large fault shows along most directions
        reasons += [self._told(x) for x in found[:TOLD]]
        if found[TOLD:]:
            reasons.append(f"so it does along {', '.join(x.name for x in found[TOLD:])}")
        reasons += self._lost_key(taken, first, at, tau) if whole or all_finite(taken) else []
        # An output of another form than the call's has an expectation of its own.
        expected = self.expected if variance is self.call.variance else _expected(variance)
        largest = max(along, key=lambda x: abs(x.shift.t), default=None)
        margins = Margins(
            yard.ratio, yard.limit, yard.worst, yard.worst_at, over,
            abs(largest.shift.t) if largest else 0.0, TWIN_LIMIT if largest and largest.shift.few else tau,
            largest.name if largest else "", expected / self.size if self.size else math.nan,
            {x.name: x.unseen for x in along},
        )  # fmt: skip
        if reasons:
            return Verdict(Status.FAIL, tuple(reasons), errors, margins, along)
        doubts = tuple(self._doubts(along, expected))
        status = Status.INCONCLUSIVE if doubts else Status.PASS
        told = doubts or (
            f"error {yard.ratio:.2f} × what is normal, no fault direction significant{self._looked()}",
        )
        return Verdict(status, told, errors, margins, along)

    def _looked(self) -> str:
        rows = self.call.rows
        return "" if rows.whole else f" (looked for in {rows.count} of {rows.rows} rows of every head)"

    def _doubts(self, along: Sequence[Along], expected: float) -> list[str]:
        """Why these inputs cannot tell right from wrong."""
        doubts = []
        rows = self.rows
        if rows < FEWEST_ROWS:
            doubts.append(f"{rows} independent rows to judge by; at least {FEWEST_ROWS} are needed")
        if not self.call.truth.out.numel():
            doubts.append("the output has no elements")
        elif not self.size:
            doubts.append("the truth is 0 everywhere, as an output that was never written may be")
        if self.unjudged:
            doubts.append(
                f"{self.unjudged} rows were not judged: the recipe promises nothing there (scores too coarse, or they"
                " overflow, or an accumulator that truncates)"
            )
        if self.size and expected / self.size > YARDSTICK_LIMIT:
            doubts.append(
                f"the recipe's own error is {expected / self.size:.0%} of the output; beyond {YARDSTICK_LIMIT:.0%}"
                " its yardstick passes anything"
            )
        shrink = next((x.unseen for x in along if x.name == "shrink"), math.nan)
        if shrink > SHRINK_LIMIT:
            doubts.append(f"a shrink below {shrink:.0%} could not have been seen (limit {SHRINK_LIMIT:.0%})")
        return doubts

    def _told(self, x: Along) -> str:
        what = DIRECTIONS[x.name]
        if abs(x.shift.t) > x.spread.t:
            told = f"{x.name} {x.shift.theta:+.3g} ± {x.shift.se:.2g}, |T| = {abs(x.shift.t):.1f}"
            return f"the error points to: {what} ({told})"
        return f"errors along “{x.name}” scatter {x.spread.ratio:.2f} × as much as the twin's (T = {x.spread.t:.1f})"

    # --- directions --------------------------------------------------------------------------------------------------

    def _directions(
        self, out: Tensor, out_finite: bool, first: Projection, at: int, twins: int
    ) -> tuple[tuple[Along, ...], float]:
        tau = threshold(2 * len(first.names) + first.key_sum.shape[1])
        same = not at  # to the bit what the twin is, or like none: nothing to test
        finite = [out_finite, self.twin_finite]
        if same and all(finite) and self._like_twin is not None:
            return self._like_twin
        ok = self._taken(self.usable)
        for x, whole in zip((out, self.twins[0]), finite, strict=True):
            ok = ok if whole else ok & torch.isfinite(x).all(-1).flatten()
        found = {}
        marked = ok & (first.f > 0)
        for i, (name, count) in enumerate(zip(first.names, marked.sum(1).tolist(), strict=True)):
            if count >= FEWEST_ROWS:
                rows = None if count == marked.shape[1] else marked[i]
                found[name] = _Tested(first, i, rows, at, same)
        suspects = [name for name, x in found.items() if x.suspect(tau)]
        index = 1
        while suspects and index < twins:  # an honest kernel is near one of the twins
            twin = self.twins[index]
            again = project(self.counted, [twin - self.truth, out - twin])
            for name in suspects:
                i = again.names.index(name)
                rows = ok & (again.f[i] > 0) & torch.isfinite(twin).all(-1).flatten()
                if int(rows.sum()) >= FEWEST_ROWS:  # a twin that overflows there says nothing
                    found[name].also(_Tested(again, i, rows, 1))
            suspects = [name for name in suspects if found[name].suspect(tau)]
            index += 1
        along = [self._along(name, x, tau) for name, x in found.items()]
        told = tuple(sorted(along, key=lambda x: -max(abs(x.shift.t), x.spread.t))), tau
        if same and all(finite):
            self._like_twin = told
        return told

    def _taken(self, rows: Tensor) -> Tensor:
        """Of `[B·H·L]`, the rows looked at."""
        return self.call.rows.take(rows.view(self.call.truth.out.shape[:3])).flatten()

    def _along(self, name: str, x: _Tested, tau: float) -> Along:
        size = x.rms / self.size if self.size else math.inf
        limit = TWIN_LIMIT if x.shift.few else tau
        effect = max(0.0, abs(x.shift.theta) - limit * x.shift.se) * size
        excess = x.spread.excess * size
        moved = abs(x.shift.t) > limit and effect > self.limits.mean
        scattered = x.spread.t > tau and excess > self.limits.dispersion and x.spread.ratio > SPREAD_RATIO
        return Along(name, x.shift, x.spread, effect, excess, moved or scattered, math.sqrt(2) * tau / x.norm)

    def _lost_key(self, out: Tensor, first: Projection, at: int, tau: float) -> list[str]:
        """Whether one key is missing from all rows that see it, of an output that is finite."""
        if not at or not self.twin_finite:
            return []
        worst = self._key_statistic(first, at)
        if worst is None or abs(worst[1]) <= tau:
            return []
        for index in range(1, len(self.twins)):
            again = project(self.counted, [out - self.twins[index]])
            t = self._key_statistic(again, 0, worst[0])
            if t is None or abs(t[1]) <= tau:
                return []
        power, square = key_powers(self.call)
        theta = first.key_sum[at] / power.clamp(min=1e-300)
        se = first.key_square[at].sqrt() / power.clamp(min=1e-300)
        size = (
            (square / max(out.numel(), 1)).sqrt() / self.size
            if self.size
            else torch.full_like(power, math.inf)
        )
        effect = (theta.abs() - tau * se).clamp(min=0.0) * size
        if float(effect[worst[0]]) <= self.limits.mean:  # as a biased exp moves a heavy key
            return []
        key = int(
            (theta * theta * power).argmax()
        )  # errors along one key lie along its like too: energy names it
        what = "lost" if float(theta[key]) > 0 else "counted twice"
        return [f"key {key} is {what} (size {float(theta[key]):+.3g}, |T| = {abs(worst[1]):.1f} along keys)"]

    def _key_statistic(self, x: Projection, at: int, key: int | None = None) -> tuple[int, float] | None:
        total, square, rows = x.key_sum[at], x.key_square[at], x.key_rows
        t = torch.where(
            (rows >= FEWEST_KEY_ROWS) & (square > 0), total / square.sqrt().clamp(min=1e-300), 0.0
        )
        if t.numel() == 0:
            return None
        key = int(t.abs().argmax()) if key is None else key
        return key, float(t[key])


class _Tested:
    """One direction against one twin, or the least that several twins leave."""

    def __init__(self, p: Projection, i: int, rows: Tensor | None, at: int, same: bool = False) -> None:
        f = p.f[i] if rows is None else p.f[i][rows]
        self.rms, self.norm = float(p.rms[i]), max(float(f.norm()), 1e-300)
        if same:
            self.shift, self.spread = NO_SHIFT, NO_SPREAD
            return
        own, moved = p.a[0][i], p.a[at][i]
        own, moved = (own, moved) if rows is None else (own[rows], moved[rows])
        kernel, omega = own + moved, torch.minimum(f, upper_quartile(f))
        self.shift, self.spread = shift(kernel, own, f, omega), spread(kernel, own, f, omega)

    def suspect(self, tau: float) -> bool:
        return abs(self.shift.t) > (TWIN_LIMIT if self.shift.few else tau) or self.spread.t > tau

    def also(self, other: _Tested) -> None:
        self.shift = min(self.shift, other.shift, key=lambda s: abs(s.t))
        self.spread = min(self.spread, other.spread, key=lambda s: s.t)


def class_reasons(errors: Errors) -> list[str]:
    if not errors.class_mismatch:
        return []
    counts = (
        ("NaN", errors.nan_mismatch),
        ("+Inf", errors.posinf_mismatch),
        ("−Inf", errors.neginf_mismatch),
    )
    found = ", ".join(f"{n} {name}" for name, n in counts if n)
    return [f"classes differ from the stored truth: {found}"]


def _expected(variance: Tensor) -> float:
    return math.sqrt(_mean(variance)) if variance.numel() else math.nan


def _mean(x: Tensor) -> float:
    kept = x if all_finite(x) else x[torch.isfinite(x)]
    return float(kept.mean()) if kept.numel() else math.nan


def _rms(x: Tensor) -> float:
    return math.sqrt(_mean(x * x)) if x.numel() else 0.0
