"""When a number is too large for chance: quantiles, thresholds and the tests made of projections (NUMERICS section 5).

No threshold here is chosen: each follows from how many statistics are looked at and from the family-wise probability
ALPHA of a false alarm in a cell. Self-normalised sums of independent symmetric d obey P(|Σωd| > τ√Σω²d²) ≤ 2 exp(−τ²/2)
whatever their sizes, so K of them stay below τ = √(2 ln(2K/α)) but with probability α.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

ALPHA = 1e-6  # false alarms a cell, over all its statistics
FEW_ROWS = 150  # below, Σω²d² is too uncertain to divide by: the model's variance takes its place
TWIN_LIMIT = 12.0  # |T| for few rows; seen ≤ 6.1 over 3,600 null runs of 4 to 64 rows
CLIP, CLIP_SPREAD = 6.0, 4.0  # medians beyond which one row may not rule a mean, a dispersion
SPREAD_RATIO = 1.25  # least ratio of variances that counts as dispersion


def threshold(statistics: int, alpha: float = ALPHA) -> float:
    """τ for so many statistics."""
    return math.sqrt(2 * math.log(2 * max(statistics, 1) / alpha))


@cache
def chi_square_quantile(degrees: int, upper: float) -> float:
    """x with P(χ²_degrees > x) = upper, from the regularised incomplete gamma function: an interval cut in 64 again and
    again."""
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    # P(χ² > ν + 2√(νt) + 2t) ≤ e^−t (Laurent and Massart 2000, lemma 1) bounds it from above.
    t = -math.log(upper)
    low, high = 0.0, degrees + 2 * math.sqrt(degrees * t) + 2 * t
    while high - low > 1e-9 * high:
        at = torch.linspace(low, high, 65, dtype=torch.float64)
        below = int((torch.special.gammaincc(half, at[1:-1] / 2) > upper).sum())  # the tail falls with x
        low, high = float(at[below]), float(at[below + 1])
    return high


def ratio_limit(rows: int, tests: int, slack: float, alpha: float = ALPHA) -> float:
    """Largest honest root-mean-square ratio of error to expectation over so many independent rows."""
    return slack * math.sqrt(chi_square_quantile(max(rows, 1), alpha / max(tests, 1)) / max(rows, 1))


@dataclass(frozen=True)
class Shift:
    """A common part of all errors along one direction: its size `theta` ± `se` in the direction's own unit, and the
    statistic `t`. `few`: computed against the model's variance, for few rows."""

    t: float
    theta: float
    se: float
    few: bool


def upper_quartile(x: Tensor) -> Tensor:
    """`torch.quantile(x, 0.75)`, without its sort and its 0.2 ms."""
    at = 0.75 * (x.numel() - 1)
    low, high = math.floor(at), math.ceil(at)
    near = torch.from_numpy(np.partition(x.numpy(force=True), (low, high))[[low, high]])
    return torch.lerp(near[0], near[1], at - low).to(x.device)


def shift(kernel: Tensor, twin: Tensor, f: Tensor, omega: Tensor | None = None) -> Shift:
    """`kernel` and `twin`: a_i of one direction, independent rows only; `f`: f_i > 0. All `[rows]`. `omega`: the
    weights that follow from f, where known."""
    if f.numel() == 0:
        return Shift(0.0, 0.0, math.inf, True)
    omega = torch.minimum(f, upper_quartile(f)) if omega is None else omega
    d = kernel - twin
    scale = float((omega * f).sum())
    if f.numel() < FEW_ROWS:
        spread = math.sqrt(2 * max(float(((omega * twin) ** 2).sum()), float((omega**2).sum())))
        total = float((omega * d).sum())
        return Shift(total / spread, total / scale, spread / scale, True)
    median = float(d.abs().median())
    # Where most rows agree to the bit, the median says nothing of the others.
    d = d.clamp(-CLIP * median, CLIP * median) if median > 0 else d
    w = omega * d
    spread, total = float(w.norm()), float(w.sum())
    return Shift(total / spread if spread else 0.0, total / scale, spread / scale, False)


@dataclass(frozen=True)
class Spread:
    """Errors along a direction that differ from row to row by more than the twin's: `t`, the ratio of variances, and
    √(difference of the variances) in the direction's unit."""

    t: float
    ratio: float
    excess: float


NO_SHIFT, NO_SPREAD = Shift(0.0, 0.0, math.inf, False), Spread(0.0, 1.0, 0.0)


def spread(kernel: Tensor, twin: Tensor, f: Tensor, omega: Tensor | None = None) -> Spread:
    """Dispersion beyond the twin's. Arguments as for `shift`."""
    if f.numel() < FEW_ROWS:
        return NO_SPREAD
    omega = torch.minimum(f, upper_quartile(f)) if omega is None else omega
    scale = (omega * f).sum()
    r_kernel, r_twin = ((a - (omega * a).sum() / scale * f).abs() for a in (kernel, twin))
    cap = CLIP_SPREAD * float(torch.maximum(r_kernel.median(), r_twin.median()))
    if cap == 0:
        return NO_SPREAD
    r_kernel, r_twin = r_kernel.clamp(max=cap), r_twin.clamp(max=cap)
    h = r_kernel - r_twin
    norm = float(h.norm())
    k2, t2 = float((r_kernel**2).mean()), float((r_twin**2).mean())
    excess = math.sqrt(max(0.0, k2 - t2) / float((f * f).mean()))
    return Spread(float(h.sum()) / norm if norm else 0.0, k2 / t2 if t2 else math.inf, excess)
