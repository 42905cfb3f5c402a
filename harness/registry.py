"""Implementations by name: a table to read, joined by the entry points of installed packages.

An entry is `"module:object"`; nothing is imported until `get()`. The object has `run(q, k, v, spec, *, recipe, …) ->
Result`, `run_stored(stored, spec, recipe, …, watch) -> Result`, which the pipeline calls, and `refusals(spec, shape,
recipe, …) -> tuple[str, ...]` (see `harness.attention.Algorithm`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

ENTRY_POINTS = "attention_harness.implementations"


@dataclass(frozen=True)
class Entry:
    """One implementation: where it lives, whether its low precision is emulated, and what it is, in a line. A run
    takes those of `default` where none are named."""

    name: str
    target: str
    emulated: bool
    summary: str
    default: bool = True


_BUILT_IN = (
    Entry("naive_masked", "harness.attention.naive:NAIVE_MASKED", True, "full S, −∞ mask, softmax, P·V"),
    Entry(
        "lower_triangle",
        "harness.attention.lower_triangle:LOWER_TRIANGLE",
        True,
        "row blocks, only visible keys",
    ),
    Entry(
        "online_softmax", "harness.attention.online:ONLINE_SOFTMAX", True, "key blocks, running max, rescale"
    ),
    Entry(
        "decode_with_cache",
        "harness.attention.decode:DECODE_WITH_CACHE",
        True,
        "prefill, then a query a step",
    ),
    Entry(
        "naive_unsafe",
        "harness.attention.naive:NAIVE_UNSAFE",
        True,
        "softmax without max subtraction: overflows",
    ),
    Entry(
        "chunked_decode", "harness.attention.session:CHUNKED_DECODE", True,
        "a cache session, `chunk` rows a step", default=False,
    ),
    Entry(
        "paged_decode", "harness.attention.session:PAGED_DECODE", True,
        "the same over shuffled pages of a poisoned pool", default=False,
    ),
    Entry(
        "split_kv", "harness.attention.split_kv:SPLIT_KV", True,
        "key parts attended apart, merged by their lse", default=False,
    ),
)  # fmt: skip


@cache
def table() -> dict[str, Entry]:
    """Every implementation: the built-in ones, then those of installed packages, which cannot replace a built-in."""
    entries = {e.name: e for e in _BUILT_IN}
    for point in entry_points(group=ENTRY_POINTS):
        entries.setdefault(point.name, Entry(point.name, point.value, False, f"from {point.value}"))
    return entries


def implementations() -> tuple[str, ...]:
    """Names of the implementations."""
    return tuple(table())


def default_implementations() -> tuple[str, ...]:
    """Those that a run takes where none are named."""
    return tuple(name for name, e in table().items() if e.default)


def entry(name: str) -> Entry:
    """Raises ValueError naming the valid ones."""
    try:
        return table()[name]
    except (KeyError, TypeError):
        raise ValueError(f"unknown implementation {name!r}; allowed: {', '.join(table())}") from None


def get(name: str) -> Any:
    """The implementation itself. Imports its module. Raises ValueError for an unknown name."""
    return EntryPoint(name, entry(name).target, ENTRY_POINTS).load()
