"""The observed half of the range ledger: a watcher that counts where numbers leave their format, stage by stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.arithmetic import Block
from harness.finite import argmax
from harness.formats import FloatFormat, get_format
from harness.recipe import LAYER_STAGES, STAGES, Recipe
from harness.records import Hazard, HazardKind
from harness.spec import Shape

NEAR_BITS = 1.0  # headroom below which a stage is called near overflow
# An error of one ulp of s in the exponent changes a probability by that factor: 2^-4 ≈ 6 %, E4M3's own roundoff.
RESOLUTION_ULP = 2.0**-4
_FLUSHES = ("exp", "probs", "out")  # where a value that became 0 was not meant to
_OVER_KEYS = ("scores_raw", "scores", "shifted", "exp", "probs")  # their last axis counts keys


def headroom_bits(fmt: FloatFormat, peak: float) -> float:
    """log2(max / peak): how many doublings are left; negative beyond the format, +∞ for nothing seen."""
    return math.inf if peak == 0 else math.log2(fmt.max / peak) if math.isfinite(peak) else -math.inf


def coarse(fmt: FloatFormat, score: float) -> bool:
    """Whether one ulp of the format at this score is more than RESOLUTION_ULP."""
    if score == 0 or not math.isfinite(score):
        return False
    return 2.0 ** (max(math.frexp(score)[1] - 1, fmt.emin) - fmt.precision + 1) > RESOLUTION_ULP


def beyond(fmt: FloatFormat, magnitude: Tensor) -> Tensor:
    """Where rounding leaves the finite range: past the midpoint, or on it where its tie does not go to max."""
    limit = fmt.overflow_threshold
    return magnitude > limit if fmt.nan_at_top else magnitude >= limit


def _extremes(x: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(x)
    return low.item(), high.item()


@dataclass
class _Stage:
    """What was seen at one stage, which rounds to `fmt` by `policy`."""

    fmt: FloatFormat
    policy: str
    total: int = 0
    peak: float = 0.0
    peak_at: tuple[int, ...] | None = None
    overflowed: int = 0
    overflowed_at: tuple[int, ...] | None = None
    saturated: int = 0
    flushed: int = 0
    stagnated: int = 0
    undefined: int = 0
    undefined_at: tuple[int, ...] | None = None
    mass_before: float = 0.0
    mass_after: float = 0.0


@dataclass
class RangeLedger:
    """A watcher for `Arithmetic`: counts what every rounding did. One ledger a run.

    `shape` turns places in folded blocks into (b, h, i, j). The −∞ of hidden keys does not count, but their scores
    do where an algorithm computes them, and so do the zeros of their probabilities in the totals.
    """

    shape: Shape
    recipe: Recipe
    stages: dict[str, _Stage] = field(default_factory=dict)

    def __call__(self, stage: str, before: Tensor, after: Tensor, block: Block) -> None:
        if after.numel() == 0:
            return
        seen = self._stage(stage)
        seen.total += after.numel()
        low, high = _extremes(after)
        if math.isnan(low):  # aminmax gives NaN as soon as one element is
            nan = torch.isnan(after)
            seen.undefined += int(nan.sum())
            seen.undefined_at = seen.undefined_at or self._place(nan, stage, block)
        if stage == "shifted":  # −∞ of hidden keys, and nothing that can overflow upwards
            return
        if not (math.isfinite(low) and math.isfinite(high)):
            infinite = torch.isinf(after)
            if seen.overflowed_at is None and bool(infinite.any()):
                seen.overflowed_at = self._place(infinite, stage, block)
            seen.overflowed += int(infinite.sum())
        if after is not before:
            low, high = _extremes(before)
            self._cast(seen, stage, before, after, max(-low, high))
        self._peak(seen, stage, max(-low, high), before, block)

    def _stage(self, stage: str) -> _Stage:
        seen = self.stages.get(stage)
        if seen is None:
            fmt = get_format(self.recipe.format_of(stage))
            seen = self.stages[stage] = _Stage(fmt, self.recipe.policy(stage))
        return seen

    def _cast(self, seen: _Stage, stage: str, before: Tensor, after: Tensor, magnitude: float) -> None:
        if not magnitude <= seen.fmt.max and seen.policy == "saturate":
            seen.saturated += int((beyond(seen.fmt, before.abs()) & torch.isfinite(after)).sum())
        if stage in _FLUSHES:
            seen.flushed += int(torch.count_nonzero(before)) - int(torch.count_nonzero(after))
        if stage == "probs":
            seen.mass_before += float(before.sum(dtype=torch.float64))
            seen.mass_after += float(after.sum(dtype=torch.float64))

    def stagnation(self, stage: str, held: Tensor, added: Tensor, after: Tensor) -> None:
        """A running sum that stayed where it was although something was added."""
        stuck = (added != 0) & (after == held) & torch.isfinite(after)
        self._stage(stage).stagnated += int(stuck.sum())

    def _peak(self, seen: _Stage, stage: str, magnitude: float, x: Tensor, block: Block) -> None:
        """Note a new largest magnitude, and its place where a hazard will tell it."""
        if magnitude <= seen.peak:
            return
        if not math.isfinite(magnitude):
            x = torch.where(torch.isfinite(x), x, 0.0)
            magnitude = float(x.abs().amax())
            if magnitude <= seen.peak:
                return
        seen.peak, seen.peak_at = magnitude, None
        near = headroom_bits(seen.fmt, magnitude) < NEAR_BITS
        if near or (stage == "scores" and coarse(seen.fmt, magnitude)):
            seen.peak_at = self._place(x.abs() == magnitude, stage, block)

    def _place(self, hit: Tensor, stage: str, block: Block) -> tuple[int, ...] | None:
        """(b, h, i, j) of the first True of a folded `[B, Hkv, G·rows, n]`. j is a key, or a channel of the output; 0
        where a stage has one value a row."""
        if hit.dim() != 4 or not bool(hit.any()):
            return None
        flat = argmax(hit)
        flat, column = divmod(flat, hit.shape[3])
        flat, row = divmod(flat, hit.shape[2])
        b, kv_head = divmod(flat, hit.shape[1])
        rows = max(block.rows, 1)
        head, row = kv_head * self.shape.group + row // rows, row % rows
        return b, head, block.row + row, column + (block.key if stage in _OVER_KEYS else 0)

    def hazards(self) -> Iterator[Hazard]:
        """Entries in the order data meets the stages."""
        for stage in (*STAGES, *LAYER_STAGES):
            if stage in self.stages:
                yield from self._of(stage, self.stages[stage])

    def _of(self, stage: str, seen: _Stage) -> Iterator[Hazard]:
        fmt = seen.fmt

        def hazard(kind: HazardKind, count: int, where: tuple[int, ...] | None, lost: float = 0.0) -> Hazard:
            bits = headroom_bits(fmt, seen.peak)
            return Hazard(kind, stage, fmt.name, "observed", seen.peak, bits, count, seen.total, where, lost)

        if seen.overflowed:
            yield hazard(HazardKind.OVERFLOW, seen.overflowed, seen.overflowed_at)
        if seen.saturated:
            yield hazard(HazardKind.SATURATION, seen.saturated, seen.peak_at)
        if (
            not (seen.overflowed or seen.saturated)
            and headroom_bits(fmt, seen.peak) < NEAR_BITS
            and stage != "probs"
        ):
            yield hazard(HazardKind.NEAR_OVERFLOW, 1, seen.peak_at)
        if stage == "scores" and coarse(fmt, seen.peak):
            yield hazard(HazardKind.RESOLUTION, 1, seen.peak_at)
        if seen.undefined:
            yield hazard(HazardKind.NON_FINITE, seen.undefined, seen.undefined_at)
        if seen.stagnated:
            yield hazard(HazardKind.STAGNATION, seen.stagnated, None)
        if seen.flushed:
            known = seen.mass_before and math.isfinite(seen.mass_before) and math.isfinite(seen.mass_after)
            lost = 1 - seen.mass_after / seen.mass_before if known else 0.0
            yield hazard(HazardKind.FLUSH, seen.flushed, None, lost)
