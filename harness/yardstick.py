"""The yardstick: error ÷ expectation over the tensor, each head, each block of 32 rows, each row and each element,
against the limit that honest errors pass with the chance of `significance`; and the rows that count."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from harness.compare import Target, unravel
from harness.directions import Call
from harness.finite import all_finite, argmax
from harness.formats import get_format
from harness.operands import row_numbers
from harness.rounding import round_to, ulp
from harness.significance import (
    ratio_limit,
    threshold,
)  # fmt: skip

BLOCK_ROWS = 32
FEW_CHANNELS = 32  # below which rows that are rounded alike leave too few samples


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
class Ground:
    """What a yardstick stands on, for outputs of `shape` `[B, H, L, E]`: the rows that count `[B·H·L]`, and ulp²/12 of
    each element of the truth."""

    shape: tuple[int, ...]
    limits: Limits
    independent: Tensor
    own_rounding: Tensor | float
    number: Callable[[int], int] = int  # that a row has in the whole call
    fresh: Tensor | None = None  # `[B·H·L]`: `fresh_rows`


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
        counted = weigh if ground.fresh is None else weigh * ground.fresh.view(shape[:3])
        samples = self.groups(counted)
        self.levels = {name: _Level(x, samples[name], tests, slack) for name, x in self.groups(weigh).items()}
        self.limit = ratio_limit(int(counted.sum()), tests, slack)

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
    """Groups of rows along the first axis: weights, how many rows there are, and the limit of their ratio, by how many
    of them are samples."""

    def __init__(self, weigh: Tensor, samples: Tensor, tests: int, slack: float) -> None:
        self.weigh, rows = weigh, weigh.sum(-1)
        self.some, self.rows = rows > 0, rows.clamp(min=1)
        self.limits = _limits(samples.sum(-1), tests, slack).to(rows)


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
        for b, h, x in itertools.product(range(q.shape[0]), range(q.shape[1]), rows):
            kept[b, h] &= _first_of_like(x[b, h])
    return kept.flatten()


def fresh_rows(truth: Target) -> Tensor | None:
    """Rows `[B·H·L]` whose truth, rounded to the output's format, is no earlier one's of their head; None: all. Nearly
    equal rows of few channels are rounded alike: their errors are one sample."""
    out = truth.truth
    if not 0 < out.shape[3] < FEW_CHANNELS or not truth.finite or get_format(truth.fmt).precision >= 24:
        return None
    rounded, kept = (
        round_to(out, truth.fmt, "saturate"),
        torch.ones(out.shape[:3], dtype=torch.bool, device=out.device),
    )
    for b, h in itertools.product(range(out.shape[0]), range(out.shape[1])):
        kept[b, h] = _first_of_like(rounded[b, h])
    return None if bool(kept.all()) else kept.flatten()


def _first_of_like(rows: Tensor) -> Tensor:
    """Whether a row `[L, E]` is the first with its values."""
    count = rows.shape[0]
    values, inverse = torch.unique(rows, dim=0, return_inverse=True)
    order = torch.arange(count, device=rows.device)
    first = order.new_full((len(values),), count).scatter_reduce_(0, inverse, order, "amin")
    return first[inverse] == order


def _all_differ(x: Tensor) -> bool:
    """Whether no two rows of a head of `[B, H, L, E]` can be equal, seen from one number a row, whose sort settles most
    calls. False where some are not finite."""
    if not x.numel():
        return True
    low, high = torch.aminmax(row_numbers(x).sort(-1).values.diff(dim=-1))
    return low.item() > 0 and math.isfinite(high.item())


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
