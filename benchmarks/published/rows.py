"""What one measurement of a published number is, and what the modules share."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from harness import Case, Shape
from harness.cli.progress import EVERY_S
from harness.inputs import Source

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """`published`: the figure as it is printed. `ours` belongs within `low` … `high`, both included; NaN does not.
    `size`: what was run for it. `note`: what a reader of the figure has to know."""

    setting: str
    published: str
    ours: float
    low: float
    high: float
    size: str
    note: str = ""
    digits: int = field(default=3, compare=False)

    @property
    def within(self) -> bool:
        return self.low <= self.ours <= self.high

    @property
    def verdict(self) -> str:
        return "within" if self.within else "OUTSIDE"

    @property
    def shown(self) -> str:
        return number(self.ours, self.digits)

    @property
    def band(self) -> str:
        """`low … high`, or the side that has a limit."""
        if math.isinf(self.high):
            return f"≥ {number(self.low)}"
        if math.isinf(self.low) or (self.low == 0 < self.high):
            return f"≤ {number(self.high)}"
        return number(self.low) if self.low == self.high else f"{number(self.low)} … {number(self.high)}"


@dataclass(frozen=True)
class Paper:
    """A source of rows: `name` is what `--only` takes, `source` where the figures are printed."""

    name: str
    title: str
    source: str


def number(x: float, digits: int = 3) -> str:
    """A figure in few characters: powers of ten below 0.01."""
    if not math.isfinite(x) or x == 0 or abs(x) >= 0.01:
        return f"{x:.{digits}g}"
    mantissa, _, exponent = f"{x:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def around(x: float, share: float) -> tuple[float, float]:
    """The band x ± share·|x|."""
    return x - share * abs(x), x + share * abs(x)


def source(name: str, shape: Shape, seed: int = 0) -> Source:
    """Random numbers of one setting and seed: NumPy's Philox, keyed as those of the cases are."""
    return Source(Case("published", name, shape, "a published setting"), seed)


def normal(src: Source, name: str, *size: int) -> Tensor:
    """N(0, 1) of any size, FP64, under a name of its own."""
    return torch.from_numpy(src.generator(name).standard_normal(size))


def relative(x: Tensor, truth: Tensor) -> float:
    """‖x − truth‖ ÷ ‖truth‖."""
    return float((x.double() - truth).norm() / truth.norm())


def told(units: Iterable[T], what: str) -> Iterator[T]:
    """The units, with a bar on a terminal's stderr, or a line every ten seconds in a log."""
    units = list(units)
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(units, what, file=sys.stderr, ncols=90, leave=False, delay=1.0)
        return
    start = last = time.monotonic()
    for done, unit in enumerate(units, 1):
        yield unit
        now = time.monotonic()
        if now - last >= EVERY_S:
            print(f"{what}: {done} of {len(units)}, {now - start:.0f} s", file=sys.stderr, flush=True)
            last = now
