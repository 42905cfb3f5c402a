"""The range ledger: where numbers leave their format, per stage.

Observed in a run by `RangeLedger` (`harness.ledger`); here, what storing the inputs did and what FP64 values predict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from harness.compare import unravel
from harness.finite import argmax, finite_or_zero
from harness.formats import FP32, FP64, FloatFormat, get_format
from harness.ledger import NEAR_BITS, RESOLUTION_ULP, RangeLedger, beyond, coarse, headroom_bits
from harness.quantize import Stored, prepare, round_inputs
from harness.ranges import Ranges
from harness.recipe import TENSORS, Recipe
from harness.records import Hazard, HazardKind
from harness.rotation import rotate
from harness.truth import Truth

__all__ = [
    "NEAR_BITS", "RESOLUTION_ULP", "RangeLedger", "beyond", "coarse", "headroom_bits", "predict", "storage_hazards",
]  # fmt: skip


def storage_hazards(
    exact: tuple[torch.Tensor, ...], stored: tuple[Stored, ...], recipe: Recipe
) -> Iterator[Hazard]:
    """What storing q, k and v did: saturated, overflowed, flushed to zero, blocks of zeros.

    Seen against what was scaled: inputs after their rounding and rotation, in whose coordinates the places are. What
    the rounding to the input format did before is told apart, under that format's name. An infinity that became ±max
    counts as saturated. A flush is located by the largest value that became 0.
    """
    for name, x, kept in zip(TENSORS, exact, stored, strict=True):
        yield from _input_hazards(x.double(), name, recipe)
        fmt, x = get_format(recipe.storage[name]), prepare(x, name, recipe)
        size = (x if kept.scale is None else x / kept.scale).abs()
        hits = {
            HazardKind.OVERFLOW: torch.isfinite(x) & ~torch.isfinite(kept.codes),
            HazardKind.SATURATION: beyond(fmt, size) & torch.isfinite(kept.codes),
            HazardKind.FLUSH: (kept.codes == 0) & (x != 0),
        }
        yield from _hits(hits, name, fmt, size)
        if kept.zero_blocks:
            peak, zero = _peak(size), HazardKind.ZERO_AMAX
            bits = headroom_bits(fmt, peak)
            yield Hazard(zero, name, fmt.name, "observed", peak, bits, kept.zero_blocks, kept.blocks)


def _input_hazards(x: torch.Tensor, name: str, recipe: Recipe) -> Iterator[Hazard]:
    """What rounding to the input format did, before and after the rotation. The FP64 residue that a rotation leaves
    where its sum cancels is no value lost, so flushes are those of the inputs themselves."""
    if recipe.inputs is None:
        return
    fmt, rounded = get_format(recipe.inputs), round_inputs(x, recipe)
    lost = {
        HazardKind.OVERFLOW: torch.isfinite(x) & ~torch.isfinite(rounded),
        HazardKind.SATURATION: beyond(fmt, x.abs()) & torch.isfinite(rounded),
        HazardKind.FLUSH: (rounded == 0) & (x != 0),
    }
    yield from _hits(lost, name, fmt, x.abs())
    if recipe.rotates(name):
        turned = rotate(rounded)
        again = torch.isfinite(turned) & ~torch.isfinite(round_inputs(turned, recipe))
        yield from _hits({HazardKind.OVERFLOW: again}, name, fmt, turned.abs())


def _peak(size: torch.Tensor) -> float:
    """The largest finite magnitude."""
    return float(torch.where(torch.isfinite(size), size, 0.0).max()) if size.numel() else 0.0


def _hits(
    hits: Mapping[HazardKind, torch.Tensor], name: str, fmt: FloatFormat, size: torch.Tensor
) -> Iterator[Hazard]:
    """A hazard for each kind that hit, placed where the largest magnitude was hit."""
    peak = _peak(size)
    for kind, hit in hits.items():
        if count := int(hit.sum()):
            worst = hit & (size == size[hit].max())
            where = tuple(int(n) for n in worst.nonzero()[0])
            bits = headroom_bits(fmt, peak)
            yield Hazard(kind, name, fmt.name, "observed", peak, bits, count, size.numel(), where)


def predict(
    truth: Truth, recipe: Recipe, subtracts_max: bool = True, v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> Iterator[Hazard]:  # fmt: skip
    """What the FP64 values say must happen at each stage of a recipe. The truth must have been made with ranges.
    `v_scale`: of the stored V, whose codes are what is summed; `sinks` `[H]`, which may be a row's maximum."""
    ranges = truth.ranges
    if ranges is None:
        raise ValueError("this truth has no ranges; make it with reference(..., ranges=True)")
    for stage, peak in (("scores_raw", ranges.raw), ("scores", ranges.score)):
        yield from _foreseen(recipe, stage, peak.value, peak.where, ranges.pairs)
        fmt = get_format(recipe.format_of(stage))
        if stage == "scores" and coarse(fmt, peak.value):
            bits = headroom_bits(fmt, peak.value)
            yield Hazard(
                HazardKind.RESOLUTION,
                stage,
                fmt.name,
                "predicted",
                peak.value,
                bits,
                1,
                ranges.pairs,
                peak.where,
            )
    if subtracts_max:
        yield from _predict_flush(ranges, recipe)
        yield from predict_sums(truth, recipe, v_scale, sinks)
    else:
        yield from _predict_unsafe(ranges, recipe)
    yield from _foreseen_in(recipe, "out", truth.out.abs())


def predict_sums(
    truth: Truth, recipe: Recipe, v_scale: torch.Tensor | None = None, sinks: torch.Tensor | None = None
) -> Iterator[Hazard]:
    """Row sums and accumulators as they are at the end: Σ P·V is o, times the row sum where that divides it last."""
    top = truth.row_max if sinks is None else torch.maximum(truth.row_max, sinks.double()[:, None])
    mass = finite_or_zero((truth.lse - top).exp()[..., None])
    yield from _foreseen_in(recipe, "row_sum", mass)  # P's factor is taken off before it is summed
    last, fmt = truth.out.abs() * (mass if recipe.normalise == "late" else 1.0), recipe.format_of("acc")
    held = last * recipe.p_scale
    if v_scale is not None and max(v_scale.shape[2:]) == 1:  # else it is applied before the sum
        group = truth.out.shape[1] // v_scale.shape[1]
        held = held / (v_scale if v_scale.shape[1] == 1 else v_scale.repeat_interleave(group, 1))
        if not _has_room(last, recipe.base):  # V's scale is applied before the row sum divides
            held, fmt = last, recipe.base
    yield from _foreseen_in(recipe, "acc", held, fmt)


def _has_room(size: torch.Tensor, fmt: str) -> bool:
    top = float(finite_or_zero(size).max()) if size.numel() else 0.0
    return headroom_bits(get_format(fmt), top) >= NEAR_BITS


def _foreseen_in(recipe: Recipe, stage: str, size: torch.Tensor, fmt: str | None = None) -> Iterator[Hazard]:
    """The same of magnitudes `[B, H, L, …]`; what is not finite comes from the inputs."""
    fmt = fmt or recipe.format_of(stage)
    if _has_room(size, fmt):
        return
    size = finite_or_zero(size)
    where = unravel(argmax(size), size.shape)
    yield from _foreseen(recipe, stage, float(size[where]), where, size.numel(), fmt)


def _foreseen(
    recipe: Recipe, stage: str, peak: float, where: tuple[int, ...] | None, total: int, fmt: str | None = None
) -> Iterator[Hazard]:
    """What the largest magnitude of a stage says of its format: beyond it, or less than a bit within."""
    held = get_format(fmt or recipe.format_of(stage))
    bits = headroom_bits(held, peak)
    if bits >= NEAR_BITS:
        return
    kind = HazardKind.NEAR_OVERFLOW
    if bool(beyond(held, torch.tensor(peak, dtype=torch.float64))):
        kind = HazardKind.SATURATION if recipe.policy(stage) == "saturate" else HazardKind.OVERFLOW
    yield Hazard(kind, stage, held.name, "predicted", peak, bits, 1, total, where)


def _predict_flush(ranges: Ranges, recipe: Recipe) -> Iterator[Hazard]:
    """exp(s − m)·S at or below half a subnormal becomes 0 (the tie goes to even, which is 0)."""
    fmt = get_format(recipe.format_of("probs"))
    if recipe.normalise == "early" or fmt.precision >= FP32.precision:
        return
    limit = round(math.log2(2 * recipe.p_scale / fmt.min_subnormal))  # flushed when exp(s − m) ≤ 2^-limit
    # What underflows in the base's own exp is 0 before its cast, and no scale brings it back.
    base = 1 - round(math.log2(get_format(recipe.base).min_subnormal))
    count = int(ranges.probs_count[limit:base].sum())
    if count:
        lost = float(ranges.probs_mass[limit:base].sum()) / max(ranges.rows, 1)
        bits = headroom_bits(fmt, recipe.p_scale)
        yield Hazard(
            HazardKind.FLUSH,
            "probs",
            fmt.name,
            "predicted",
            recipe.p_scale,
            bits,
            count,
            ranges.counted_pairs,
            None,
            lost,
        )


def _predict_unsafe(ranges: Ranges, recipe: Recipe) -> Iterator[Hazard]:
    """Without max subtraction exp(s) overflows where s > ln(max), and P·S saturates in a format without infinities."""
    top = ranges.score_max
    for stage, factor in (("exp", 1.0), ("probs", recipe.p_scale)):
        if recipe.normalise == "early" and stage == "probs":
            continue
        fmt = get_format(recipe.format_of(stage))
        octaves = top.value * math.log2(math.e)
        bits = math.log2(fmt.max / factor) - octaves
        if math.log2(min(fmt.overflow_threshold, FP64.max) / factor) < octaves:
            saturates = recipe.policy(stage) == "saturate"
            kind = HazardKind.SATURATION if saturates else HazardKind.OVERFLOW
            octave = min(math.floor(math.log2(fmt.max / factor)) + 1, len(ranges.exp_count) - 1)
            count = max(1, int(ranges.exp_count[max(octave, 0) + 1 :].sum()))
            peak = math.exp(min(top.value, 709.0)) * factor
            yield Hazard(
                kind, stage, fmt.name, "predicted", peak, bits, count, ranges.counted_pairs, top.where
            )
            return  # later stages only inherit it
