"""Is this output as accurate as its recipe allows, and how is that decided? (NUMERICS section 5)

In this order, the first that fails deciding: classes (NaN and ±Inf where the stored truth has them), the ceiling that
no correct run exceeds, the yardstick (error ÷ expectation over the tensor, each head, each block of 32 rows, each row
and each element; its upper side alone), and the fault directions against twins of the recipe. What passes them all on
inputs that could not have shown a fault is INCONCLUSIVE.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from harness.compare import Target, unravel
from harness.directions import DIRECTIONS, Call, Projection, key_powers, project
from harness.finite import all_finite, argmax
from harness.formats import get_format
from harness.records import Errors, Margins, Status
from harness.rounding import ulp
from harness.significance import (
    NO_SHIFT,
    NO_SPREAD,
    SPREAD_RATIO,
    TWIN_LIMIT,
    Shift,
    Spread,
    ratio_limit,
    shift,
    spread,
    threshold,
    upper_quartile,
)  # fmt: skip
from harness.twins import Twins

BLOCK_ROWS = 32
FEWEST_ROWS = 4  # independent rows below which nothing is concluded
YARDSTICK_LIMIT = 0.25  # expected error over the output's own size, beyond which the yardstick says nothing
SHRINK_LIMIT = 0.1  # a smallest visible shrink beyond which the inputs say nothing
TOLD = 2  # directions that are told with their figures
KEY_CHANNELS = 8  # of a row, of which a number is made that tells it from others
FEWEST_KEY_ROWS = 40  # |T| ≤ √n: with fewer rows than τ² no lost key can show


@dataclass(frozen=True)
class Limits:
    """What the model is not sharper than, by the recipe's widest rounding. `slack`: measured ÷ predicted on honest
    runs at most. `mean` and `dispersion`: effects, relative to the output, that honest kernels show (a vectorised exp
    that is 5e-5 low)."""

    slack: float
    mean: float
    dispersion: float


NARROW = Limits(1.25, 1e-4, 3e-5)
FP32_LIMITS = Limits(1.6, 5e-7, 5e-7)


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


@dataclass(frozen=True)
class Ground:
    """What a yardstick stands on, for outputs of `shape` `[B, H, L, E]`: the rows that count `[B·H·L]`, and ulp²/12 of
    each element of the truth."""

    shape: tuple[int, ...]
    limits: Limits
    independent: Tensor
    own_rounding: Tensor | float
    number: Callable[[int], int] = int  # that a row has in the whole call


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
        return Ground(self.call.truth.out.shape, self.limits, self.independent, self.own_rounding, number)

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


# --- yardstick -------------------------------------------------------------------------------------------------------


class Weights:
    """What a yardstick takes from a variance, for all outputs that are held to it: rows that count, and limits."""

    def __init__(self, variance: Tensor, finite: Tensor | None, ground: Ground) -> None:
        """`finite`: where output and truth are, None: everywhere."""
        self.ground, slack, shape = ground, ground.limits.slack, ground.shape
        self.allowed = variance if all_finite(variance) else variance.nan_to_num(math.inf, math.inf, math.inf)
        self.row_v = (self.allowed if finite is None else torch.where(finite, self.allowed, 0.0)).sum(-1)
        known = (self.row_v > 0) & torch.isfinite(self.row_v)
        weigh = (ground.independent.view(shape[:3]) & known).double()
        blocks = -(-shape[2] // BLOCK_ROWS)
        self.pad = blocks * BLOCK_ROWS - shape[2]
        tests = 1 + shape[0] * shape[1] * (1 + blocks + shape[2])
        self.levels = {name: _Level(x, tests, slack) for name, x in self.groups(weigh).items()}
        self.limit = ratio_limit(int(weigh.sum()), tests, slack)

    def groups(self, x: Tensor) -> dict[str, Tensor]:
        """`[B, H, L]` by level: groups along the first axis."""
        in_blocks = torch.nn.functional.pad(x, (0, self.pad)).reshape(-1, BLOCK_ROWS)
        return {
            "tensor": x.reshape(1, -1),
            "head": x.flatten(0, 1),
            "rows": in_blocks,
            "row": x.reshape(-1, 1),
        }


class _Level:
    """Groups of rows along the first axis: weights, how many rows count, and the limit of their ratio."""

    def __init__(self, weigh: Tensor, tests: int, slack: float) -> None:
        self.weigh, rows = weigh, weigh.sum(-1)
        self.some, self.rows = rows > 0, rows.clamp(min=1)
        self.limits = _limits(rows, tests, slack).to(rows)


class Yardstick:
    """Error ÷ expectation at every level. A row without expected error is exact: compared, not divided."""

    def __init__(self, e: Tensor, weights: Weights) -> None:
        self.ground = weights.ground
        row_e, row_v = (e * e).sum(-1), weights.row_v
        self.exact = (row_v == 0) & (row_e > 0)
        ratio = torch.where(row_v > 0, row_e / row_v, 0.0)
        self.levels: list[tuple[str, float, float]] = []
        first = {
            name: self._level(name, x, weights.levels[name]) for name, x in weights.groups(ratio).items()
        }
        self.ratio, self.limit = first["tensor"], weights.limit
        self._elements(e, weights.allowed, self.ground.limits.slack)
        self.worst_at, self.worst = max(
            ((name, share) for name, share, _ in self.levels), key=lambda x: x[1], default=("", 0.0)
        )

    def _level(self, name: str, ratio: Tensor, level: _Level) -> float:
        """The group that is largest against its limit is kept. Returns the first group's ratio."""
        value = torch.where(level.some, ((ratio * level.weigh).sum(-1) / level.rows).sqrt(), 0.0)
        if not value.numel():
            return 0.0
        share = value / level.limits
        worst = argmax(share)
        self.levels.append(
            (f"{name} {self._place(name, worst)}".strip(), float(share[worst]), float(value[worst]))
        )
        return float(value[0])

    def _place(self, name: str, index: int) -> str:
        _, heads, rows, _ = self.ground.shape
        if name == "tensor":
            return ""
        per = {"head": 1, "rows": max(-(-rows // BLOCK_ROWS), 1), "row": max(rows, 1)}[name]
        which, i = divmod(index, per)
        b, h = divmod(which, heads)
        number = self.ground.number
        at = (
            "" if name == "head" else f" i={number(i * BLOCK_ROWS)}…" if name == "rows" else f" i={number(i)}"
        )
        return f"b={b} h={h}{at}"

    def _elements(self, e: Tensor, variance: Tensor, slack: float) -> None:
        if not e.numel():
            return
        z = e.abs().div_((variance + self.ground.own_rounding).sqrt_())
        if not bool(variance.min() > 0):
            z = torch.where(variance > 0, z, 0.0)
        limit = slack * threshold(e.numel())
        worst = argmax(z)
        at = unravel(worst, e.shape)
        at = (*at[:2], self.ground.number(at[2]), at[3])
        self.levels.append((f"element {at}", float(z.flatten()[worst]) / limit, float(z.flatten()[worst])))

    def reasons(self) -> list[str]:
        found = []
        if bool(self.exact.any()):
            b, h, i = (int(n) for n in self.exact.nonzero()[0])
            i = self.ground.number(i)
            found.append(f"row b={b} h={h} i={i} has no rounding to excuse it and differs from the truth")
        name, share, value = max(self.levels, key=lambda x: x[1], default=("", 0.0, 0.0))
        if share > 1:
            found.append(f"error of {name} is {value:.3g} × what is normal, {share:.3g} × the limit")
        return found


def own_rounding(truth: Target) -> Tensor | float:
    """ulp²/12 of each element."""
    fmt = get_format(truth.fmt)
    if fmt.precision >= 53:
        return 0.0
    return (truth.spacing if truth.finite else ulp(truth.truth.nan_to_num(0.0, 0.0, 0.0), fmt)) ** 2 / 12


def _limits(rows: Tensor, tests: int, slack: float) -> Tensor:
    """`ratio_limit` for each number of rows."""
    if rows.numel() and int(rows.max()) <= BLOCK_ROWS:
        return _small_limits(tests, slack)[rows.long().cpu()]
    known = {n: ratio_limit(int(n), tests, slack) for n in set(rows.tolist())}
    return torch.tensor([known[n] for n in rows.tolist()], dtype=torch.float64)


@lru_cache(4096)  # a run meets each shape many times
def _small_limits(tests: int, slack: float) -> Tensor:
    return torch.tensor([ratio_limit(n, tests, slack) for n in range(BLOCK_ROWS + 1)], dtype=torch.float64)


def independent_rows(call: Call) -> Tensor:
    """The rows that count, `[B·H·L]`: of those of a head with equal q and equal visible keys, or with equal outputs,
    the first: their errors are one sample."""
    spec, extras, q = call.spec, call.extras, call.q
    same_keys = spec.left is None and spec.right is None
    same_keys &= all(x is None or x.shape[2] == 1 for x in (extras.mask, extras.bias))
    kept = torch.ones(q.shape[:3], dtype=torch.bool, device=q.device)
    # Outputs that FP32 cannot tell apart are equal: FP64's own last bits are no difference.
    rows = [call.truth.out.float()] if call.truth.out.shape[3] else []
    rows += [q] if same_keys and q.shape[3] else []
    rows = [x for x in rows if q.shape[2] > 1 and not _all_differ(x)]
    if rows:
        order = torch.arange(q.shape[2], device=q.device)
        for b, h, x in itertools.product(range(q.shape[0]), range(q.shape[1]), rows):
            values, inverse = torch.unique(x[b, h], dim=0, return_inverse=True)
            if len(values) < q.shape[2]:
                first = order.new_full((len(values),), q.shape[2]).scatter_reduce_(0, inverse, order, "amin")
                kept[b, h] &= first[inverse] == order
    return kept.flatten()


def _all_differ(x: Tensor) -> bool:
    """Whether no two rows of a head of `[B, H, L, E]` can be equal, seen from a sum of a few of their channels: equal
    rows have equal sums, element by element in one order, so that a sort of one number a row settles most calls. False
    where some are not finite."""
    if not x.numel():
        return True
    key = x[..., 0].double()
    for c in range(1, min(x.shape[3], KEY_CHANNELS)):
        key = key * math.pi + x[..., c]
    low, high = torch.aminmax(key.sort(-1).values.diff(dim=-1))
    return low.item() > 0 and math.isfinite(high.item())


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


def over_ceiling(e: Tensor, ceiling: Tensor, number: Callable[[int], int] = int) -> tuple[float, list[str]]:
    """The largest error ÷ ceiling, and what it says when it is above 1. A bound of 0 allows no error. `number`: what a
    row is called."""
    bound = torch.where(torch.isnan(ceiling), math.inf, ceiling)
    share = (e.abs() / bound).masked_fill_(e == 0, 0.0)
    if not share.numel():
        return 0.0, []
    worst = argmax(share)
    value = float(share.flatten()[worst])
    if value <= 1:
        return value, []
    b, h, i, c = unravel(worst, e.shape)
    size, most = float(e[b, h, i, c].abs()), float(bound[b, h, i, c])
    return value, [
        f"error {size:.3g} at b={b} h={h} i={number(i)} c={c} exceeds {most:.3g}, which no correct run does"
    ]


def _expected(variance: Tensor) -> float:
    return math.sqrt(_mean(variance)) if variance.numel() else math.nan


def _mean(x: Tensor) -> float:
    kept = x if all_finite(x) else x[torch.isfinite(x)]
    return float(kept.mean()) if kept.numel() else math.nan


def _rms(x: Tensor) -> float:
    return math.sqrt(_mean(x * x)) if x.numel() else 0.0
