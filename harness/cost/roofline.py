"""Time at given rates: bytes ÷ bandwidth or FLOPs ÷ FLOP rate, the longer (Williams, Waterman and Patterson 2009).

A bound from below: both at full rate, wholly overlapped, and every byte counted once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """`bandwidth` in bytes per second, `flops` in FLOPs per second; None where it is not known."""

    bandwidth: float | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        for name, rate in (("bandwidth", self.bandwidth), ("flops", self.flops)):
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} is {rate!r}; allowed: a number > 0, or None")

    @property
    def ridge(self) -> float | None:
        """FLOPs per byte at which both limits take equally long; None without both rates."""
        return None if self.bandwidth is None or self.flops is None else self.flops / self.bandwidth

    def memory_s(self, moved: float) -> float | None:
        """Seconds that `moved` bytes take."""
        return None if self.bandwidth is None else moved / self.bandwidth

    def compute_s(self, flops: float) -> float | None:
        """Seconds that `flops` FLOPs take."""
        return None if self.flops is None else flops / self.flops

    def time_s(self, flops: float, moved: float) -> float | None:
        """Seconds of both at once: of the longer. What is not known does not limit."""
        known = [t for t in (self.compute_s(flops), self.memory_s(moved)) if t is not None]
        return max(known, default=None)

    def side(self, flops: float, moved: float) -> str | None:
        """`compute` or `memory`, whichever limits (`memory` below the ridge); None without both rates."""
        if self.ridge is None:
            return None
        return "memory" if flops < self.ridge * moved else "compute"
