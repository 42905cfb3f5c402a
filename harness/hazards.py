"""The range ledger: where numbers leave their format, per stage.

Observed in a run by `RangeLedger` (`harness.ledger`); here, what storing the inputs did and what FP64 values predict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from harness.formats import FP32, FP64, get_format
from harness.ledger import NEAR_BITS, RESOLUTION_ULP, RangeLedger, beyond, coarse, headroom_bits
from harness.quantize import Stored
from harness.recipe import TENSORS, Recipe
from harness.records import Hazard, HazardKind
from harness.truth import Ranges, Truth

__all__ = [
    "NEAR_BITS", "RESOLUTION_ULP", "RangeLedger", "beyond", "coarse", "headroom_bits", "predict", "storage_hazards",
]  # fmt: skip


def storage_hazards(
    exact: tuple[torch.Tensor, ...], stored: tuple[Stored, ...], recipe: Recipe
) -> Iterator[Hazard]:
    """What storing q, k and v did: saturated, overflowed, flushed to zero, blocks of zeros.

    An infinity that became ±max counts as saturated. A flush is located by the largest value that became 0.
    """
    for name, x, kept in zip(TENSORS, exact, stored, strict=True):
        fmt = get_format(recipe.storage[name])
        scaled = x if kept.scale is None else x / kept.scale
        size = scaled.abs()
        finite = torch.where(torch.isfinite(size), size, 0.0)
        peak = float(finite.max()) if size.numel() else 0.0
        hits = {
            HazardKind.OVERFLOW: torch.isfinite(x) & ~torch.isfinite(kept.codes),
            HazardKind.SATURATION: beyond(fmt, size) & torch.isfinite(kept.codes),
            HazardKind.FLUSH: (kept.codes == 0) & (x != 0),
        }
        bits = headroom_bits(fmt, peak)
        for kind, hit in hits.items():
            if count := int(hit.sum()):
                worst = hit & (size == size[hit].max())
                where = tuple(int(n) for n in worst.nonzero()[0])
                yield Hazard(kind, name, fmt.name, "observed", peak, bits, count, x.numel(), where)
        if kept.zero_blocks:
            assert kept.scale is not None
            total = kept.scale.numel()
            yield Hazard(
                HazardKind.ZERO_AMAX, name, fmt.name, "observed", peak, bits, kept.zero_blocks, total
            )


def predict(truth: Truth, recipe: Recipe, subtracts_max: bool = True) -> Iterator[Hazard]:
    """What the FP64 values say must happen at each stage of a recipe. The truth must have been made with ranges."""
    ranges = truth.ranges
    if ranges is None:
        raise ValueError("this truth has no ranges; make it with reference(..., ranges=True)")
    for stage, peak in (("scores_raw", ranges.raw), ("scores", ranges.score)):
        fmt = get_format(recipe.format_of(stage))
        bits = headroom_bits(fmt, peak.value)
        if bits < NEAR_BITS:
            kind = HazardKind.NEAR_OVERFLOW
            if bool(beyond(fmt, torch.tensor(peak.value, dtype=torch.float64))):
                kind = HazardKind.SATURATION if recipe.policy(stage) == "saturate" else HazardKind.OVERFLOW
            yield Hazard(kind, stage, fmt.name, "predicted", peak.value, bits, 1, ranges.pairs, peak.where)
        if stage == "scores" and coarse(fmt, peak.value):
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
    else:
        yield from _predict_unsafe(ranges, recipe)


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
            ranges.pairs,
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
            yield Hazard(kind, stage, fmt.name, "predicted", peak, bits, count, ranges.pairs, top.where)
            return  # later stages only inherit it
