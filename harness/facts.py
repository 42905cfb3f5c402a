"""What records hold of tensors: what the inputs are like, and hashes of outputs."""

from __future__ import annotations

import hashlib
import math

import torch

from harness.spec import Shape
from harness.truth import Truth


def facts(truth: Truth, shape: Shape) -> dict[str, float]:
    """What the exact inputs are like: Var(q·k)/D, the largest |score|, the mean over rows of the top probability."""
    ranges = truth.ranges
    assert ranges is not None
    top = torch.exp(truth.row_max - truth.lse)[torch.isfinite(truth.lse)]
    return {
        "var_qk_per_dim": ranges.raw_square / ranges.pairs / shape.head_dim
        if ranges.pairs and shape.head_dim
        else math.nan,
        "score_peak": ranges.score.value,
        "mean_top_prob": float(top.mean()) if top.numel() else math.nan,
    }


def visible_flops(truth: Truth, shape: Shape) -> int:
    """2·D for a score and 2·E for its P·V, of each visible pair."""
    assert truth.ranges is not None
    return 2 * truth.ranges.pairs * (shape.head_dim + shape.E)


def hash_of(out: torch.Tensor) -> str:
    """SHA-256 of an output's bytes."""
    return hashlib.sha256(out.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
