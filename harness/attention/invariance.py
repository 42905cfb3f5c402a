"""Whether two runs that should agree do: bits equal, or how many ulps apart.

ulps apart at an element = |a − b| / ulp(max(|a|, |b|)), in the format the outputs are stored in. It is no error: both
may be as near to the truth as their precision allows and still differ.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from harness.finite import argmax
from harness.records import Relation
from harness.result import Result
from harness.rounding import ulp


def invariance(a: Result | Tensor, b: Result | Tensor, fmt: str, name: str = "") -> Relation:
    """Distance of two outputs of one shape, any float dtype, in ulps of `fmt`.

    Raises ValueError when the shapes differ.
    """
    x, y = ((r.out if isinstance(r, Result) else r).detach().double() for r in (a, b))
    if x.shape != y.shape:
        raise ValueError(f"outputs are {tuple(x.shape)} and {tuple(y.shape)}; allowed: one shape")
    both_nan = torch.isnan(x) & torch.isnan(y)
    differs = ~(((x == y) & (torch.signbit(x) == torch.signbit(y))) | both_nan)
    if not bool(differs.any()):
        return Relation(name, fmt, True, 0.0, 0, x.numel())
    finite = torch.isfinite(x) & torch.isfinite(y)
    apart = (x - y).abs() / ulp(torch.maximum(x.abs(), y.abs()), fmt)
    apart = torch.where(finite, apart, math.inf).masked_fill(~differs, 0.0)
    index = argmax(apart)
    worst = tuple(int(i) for i in np.unravel_index(index, tuple(x.shape)))
    delta, norm = (float(torch.where(finite, a, 0.0).norm()) for a in (x - y, y))
    distance = delta / norm if norm else math.inf if delta else 0.0
    return Relation(name, fmt, False, float(apart.max()), int(differs.sum()), x.numel(), worst, distance)
