"""How far the FP64 truth's own numbers reach: what the hazards of a recipe are predicted from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from harness.finite import argmax, finite_or_zero

COUNTED_PAIRS = 2**20  # of a head, about: its histograms need no more
_MANTISSA = 2**52 - 1
_OCTAVES = 1100  # 2^-1074 is FP64's smallest number: every non-zero exp(s − m) has a bin

_PEAKS = ("raw", "score", "score_max", "row_sum")


@dataclass(frozen=True)
class Place:
    """Which block of the scores is at work: its sequence and head, first row and first key."""

    b: int
    h: int
    row: int
    key: int


@dataclass
class Peak:
    """The largest magnitude seen, and its (b, h, i, j)."""

    value: float = 0.0
    where: tuple[int, ...] | None = None

    def see(self, top: float, values: Tensor, at: Place, unit: float = 1.0) -> None:
        """`top`: the largest finite magnitude of `values` `[rows, keys]`; both are `unit` times what is
        noted."""
        if top / unit > self.value:
            i, j = divmod(argmax(values.abs() == top), values.shape[-1])
            self.value, self.where = top / unit, (at.b, at.h, at.row + i, at.key + j)


@dataclass
class Ranges:
    """Ranges of the visible values, from FP64.

    `raw`: |q·k| before scaling. `score`: |s|. `score_max`: max(s, 0), what exp without max subtraction meets.
    `row_sum`: l. `raw_square`: Σ(q·k)² over `pairs` visible pairs. `probs_count[e]` and `probs_mass[e]`: how many
    exp(s − m) lie in (2^−(e+1), 2^−e], and their share of the rows' denominators, summed over `rows`: those with a
    denominator that is finite and not 0. `exp_count[e]`: how many scores have ⌈s·log₂e⌉ = e, clipped to 0 … 1099
    (NaN and ±Inf count at 0).

    What FP64 finds infinite comes of an input that is: no format is to blame. Peaks and sums pass it over, like NaN.

    Peaks and sums are of all visible pairs. Of a head with more than `COUNTED_PAIRS` the three histograms are those of
    evenly spaced rows, with `counted_pairs` visible pairs.
    """

    raw: Peak = field(default_factory=Peak)
    score: Peak = field(default_factory=Peak)
    score_max: Peak = field(default_factory=Peak)
    row_sum: Peak = field(default_factory=Peak)
    raw_square: float = 0.0
    pairs: int = 0
    counted_pairs: int = 0
    rows: int = 0
    probs_count: Tensor = field(default_factory=lambda: torch.zeros(_OCTAVES, dtype=torch.float64))
    probs_mass: Tensor = field(default_factory=lambda: torch.zeros(_OCTAVES, dtype=torch.float64))
    exp_count: Tensor = field(default_factory=lambda: torch.zeros(_OCTAVES, dtype=torch.float64))

    def of_heads(self, first: int) -> Ranges:
        """The same, of heads that count from `first` in the whole call."""
        moved: dict[str, Any] = {
            name: Peak(p.value, p.where and (p.where[0], p.where[1] + first, *p.where[2:]))
            for name in _PEAKS
            for p in (getattr(self, name),)
        }
        return replace(self, **moved)

    def joined(self, other: Ranges) -> Ranges:
        """Those of both, of different heads."""
        peaks = {n: max(getattr(self, n), getattr(other, n), key=lambda p: p.value) for n in _PEAKS}
        rest = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(self)
            if f.name not in _PEAKS
        }
        return Ranges(**peaks, **rest)

    def note_raw(
        self, x: Tensor, unit: float, seen: tuple[int, int], at: Place
    ) -> tuple[float, float] | None:
        """unit · q·k of a block `[rows, keys]`, 0 where hidden; how many pairs are seen, in all and in the rows that
        histograms take. Returns the extremes of `x`."""
        if not x.numel():
            return None
        self.pairs += seen[0]
        self.counted_pairs += seen[1]
        square = float(x.flatten().dot(x.flatten()))
        if not math.isfinite(square):
            square = float(finite_or_zero(x).square().sum())
        self.raw_square += square / unit**2
        low, high = extremes = _extremes(x)
        self.raw.see(max(-low, high), x, at, abs(unit))
        return extremes

    def note_scores(
        self, x: Tensor, extremes: tuple[float, float] | None, seen: int, counted: slice, at: Place
    ) -> None:
        """Scores of a block, 0 where hidden, their extremes where known, and the rows that histograms take, in which
        `seen` pairs are seen."""
        if not x.numel():
            return
        low, high = extremes or _extremes(x)
        self.score.see(max(-low, high), x, at)
        if high > self.score_max.value:
            self.score_max.see(high, x.clamp(min=0.0), at)
        taken = x[counted]
        octave = (taken * math.log2(math.e)).ceil_()
        octave = octave.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(0, _OCTAVES - 1).flatten()
        self.exp_count += torch.bincount(octave.long(), minlength=_OCTAVES).double().cpu()
        self.exp_count[0] -= taken.numel() - seen  # hidden ones stand as 0

    def note_probs(self, p: Tensor, total: Tensor, counted: slice, at: Place) -> None:
        """exp(s − m) of a block, which is used up, and its denominators `[rows]`."""
        if total.numel():
            self.row_sum.see(_extremes(total)[1], total[:, None], at)
        p, total = p[counted], total[counted]
        if not p.shape[0]:
            return
        defined = torch.isfinite(total) & (total > 0)
        if not bool(defined.all()):  # rows that are NaN or empty say nothing of ranges
            p, total = p[defined], total[defined]
        self.rows += p.shape[0]
        octave, counts = _octaves(p)
        self.probs_count += counts.double().cpu()
        mass = p.div_(total[:, None]).flatten()
        self.probs_mass += torch.bincount(octave, weights=mass, minlength=_OCTAVES).double().cpu()


def _octaves(p: Tensor) -> tuple[Tensor, Tensor]:
    """e of each p in (2^−(e+1), 2^−e], flat, at most the last bin, and how many are in each bin, zeros in none. p lies
    in [0, 1]."""
    # A normal number's exponent rounded up is in the bits of the number plus a mantissa of ones; 0 gives 1023.
    octave = p.view(torch.int64).add(_MANTISSA).bitwise_right_shift_(52).neg_().add_(1023).flatten()
    counts = torch.bincount(octave, minlength=_OCTAVES)
    if int(counts[1022]):  # subnormal, or the smallest normal number
        mantissa, exponent = torch.frexp(p)  # of a power of two the mantissa is ½: the upper end of its bin
        octave = exponent.neg_().add_(mantissa == 0.5).clamp_(0, _OCTAVES - 1).flatten()
        counts = torch.bincount(octave, minlength=_OCTAVES)
        counts[0] -= p.numel() - int(torch.count_nonzero(p))  # frexp(0) has exponent 0
    else:
        counts[1023] = 0
    return octave, counts


def _extremes(x: Tensor) -> tuple[float, float]:
    """The smallest and the largest, NaN and ±Inf taken as 0."""
    low, high = (float(y) for y in torch.aminmax(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = (float(y) for y in torch.aminmax(finite_or_zero(x)))
    return low, high
