"""Whether two runs that should agree do: bits equal, or how many ulps apart.

ulps apart at an element = |a − b| / ulp(max(|a|, |b|)), in the format the outputs are stored in. It is no error: both
may be as near to the truth as their precision allows and still differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.attention.algorithm import Result
from harness.rounding import ulp


@dataclass(frozen=True)
class Invariance:
    """`bits_equal`: same values, signs of zero and places of NaN. `max_ulps`: infinite where only one of the two is NaN
    or infinite, or they are opposite infinities. `differing` of `count` elements differ, most at index `worst`."""

    fmt: str
    bits_equal: bool
    max_ulps: float
    differing: int
    count: int
    worst: tuple[int, ...] | None

    def __str__(self) -> str:
        if self.bits_equal:
            return f"equal bits in {self.count} elements"
        place = "" if self.worst is None else f" at {self.worst}"
        apart = f"at most {self.max_ulps:.3g} ulps of {self.fmt}{place}"
        return f"{self.differing} of {self.count} elements differ, {apart}"


def invariance(a: Result | Tensor, b: Result | Tensor, fmt: str) -> Invariance:
    """Distance of two outputs of one shape, any float dtype.

    Raises ValueError when the shapes differ.
    """
    x, y = ((r.out if isinstance(r, Result) else r).detach().double() for r in (a, b))
    if x.shape != y.shape:
        raise ValueError(f"outputs are {tuple(x.shape)} and {tuple(y.shape)}; allowed: one shape")
    both_nan = torch.isnan(x) & torch.isnan(y)
    differs = ~(((x == y) & (torch.signbit(x) == torch.signbit(y))) | both_nan)
    if not bool(differs.any()):
        return Invariance(fmt, True, 0.0, 0, x.numel(), None)
    finite = torch.isfinite(x) & torch.isfinite(y)
    apart = (x - y).abs() / ulp(torch.maximum(x.abs(), y.abs()), fmt)
    apart = torch.where(finite, apart, math.inf).masked_fill(~differs, 0.0)
    index = int(apart.argmax())
    worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), x.shape))
    return Invariance(fmt, False, float(apart.max()), int(differs.sum()), x.numel(), worst)
