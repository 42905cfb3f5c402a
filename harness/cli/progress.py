"""How far a run is: a moving bar on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

EVERY_S = 10.0


class Progress(Protocol):
    """Told of each finished unit."""

    def update(self, cells: int, place: str) -> None: ...


class _Lines:
    """Whole lines, so that a log stays readable."""

    def __init__(self, total: int, stream: TextIO, unit: str) -> None:
        self.total, self.stream, self.unit, self.done = total, stream, unit, 0
        self.start = self.last = time.monotonic()

    def update(self, cells: int, place: str) -> None:
        self.done += cells
        now = time.monotonic()
        if now - self.last >= EVERY_S or self.done == self.total:
            self.last = now
            left = "" if self.done == self.total else f", last {place}"
            self.stream.write(f"{self.done}/{self.total} {self.unit}s, {now - self.start:.0f} s{left}\n")
            self.stream.flush()


class _Bar:
    """tqdm's bar."""

    def __init__(self, total: int, stream: TextIO, unit: str) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=total, unit=unit, file=stream, mininterval=0.2, ncols=90)

    def update(self, cells: int, place: str) -> None:
        self.bar.set_postfix_str(place, refresh=False)
        self.bar.update(cells)


@contextmanager
def progress(total: int, unit: str = "cell") -> Iterator[Progress]:
    """Progress on stderr over `total` cells, or other units."""
    if not sys.stderr.isatty():
        yield _Lines(total, sys.stderr, unit)
        return
    bar = _Bar(total, sys.stderr, unit)
    try:
        yield bar
    finally:
        bar.bar.close()
