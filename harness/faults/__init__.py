"""Faults that are there or not: what the output would be if one thing were done wrong, in FP64.

Each is a name, a sentence, and the wrong output of a call. They are made only when something has failed, to name it;
`harness.directions` has those that come in degrees.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.faults.casts import cut_p, storage
from harness.faults.order import blocks, doubled, heads_and_rows, value_missing, without
from harness.faults.rules import leak, options, positions, scales, tiles
from harness.faults.subject import BLOCKS, Fault, Subject
from harness.faults.sums import arithmetic, merges, nothing, rescales

__all__ = ["BLOCKS", "Fault", "Subject", "cut_p", "doubled", "faults", "leak", "value_missing", "without"]


def faults(x: Subject) -> Iterator[Fault]:
    """Every fault that this call could have; of equal ones the first is the likelier."""
    for family in (
        nothing,
        scales,
        positions,
        options,
        heads_and_rows,
        blocks,
        rescales,
        arithmetic,
        storage,
        tiles,
        merges,
    ):
        yield from family(x)
