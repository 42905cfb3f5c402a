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
