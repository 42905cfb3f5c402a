"""Python's cycle collector, held off while many objects are made that hold no cycles: each of its passes would walk
through all of them again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Without automatic collections; as it was before on the way out. May be nested."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def leave_to_the_system(kept: object) -> None:
    """For a program that is about to end: the system takes `kept` back with the process, in no time. Python would free
    its objects one by one, after a last pass through all there are.

    The ring is never collected, since all that is there now is taken out of collections.
    """
    ring = [kept]
    ring.append(ring)
    gc.freeze()
