"""Wrong caches: tokens written or read in the wrong place, at the wrong time, or not at all."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.mutants.attention import Attention
from benchmarks.mutants.pages import PAGE, Pages
from benchmarks.mutants.table import Edit, Family

FAMILY = Family("cache")
add = FAMILY.add
DECODE = "decode/causal decode/gqa decode/decode"


def _cache(**edit: Any) -> Edit:
    kind = type("Wrong", (Pages,), edit)
    return {"cache": lambda self: kind(self.k, self.v)}


def _late(self: Pages, start: int, k: Tensor, v: Tensor) -> None:
    """A step's token is written when the next one comes."""
    if hasattr(self, "waiting"):
        Pages.write(self, *self.waiting)
    if k.shape[2] > 1:
        Pages.write(self, start, k, v)
    else:
        self.waiting = (start, k, v)


def _k_alone(self: Pages, start: int, k: Tensor, v: Tensor) -> None:
    Pages.write(
        self, start, k, v if k.shape[2] > 1 else self.pool[1][:, :, self.slots(start, start + k.shape[2])]
    )


def _one_back(self: Pages, start: int, k: Tensor, v: Tensor) -> None:
    """A step's token overwrites the one before it."""
    Pages.write(self, start - 1 if k.shape[2] == 1 else start, k, v)


def _same_slot(self: Pages, start: int, k: Tensor, v: Tensor) -> None:
    """Tokens of steps wrap in their page a token early: the last slot of a page is never written."""
    if k.shape[2] > 1 or start % PAGE < PAGE - 1:
        Pages.write(self, start, k, v)


def _swapped(self: Pages, stop: int) -> tuple[Tensor, Tensor]:
    """V is read through a table whose first two entries are exchanged."""
    k, _ = Pages.read(self, stop)
    table, self.table = self.table, self.table.clone()
    self.table[:2] = table[:2].flip(0)
    _, v = Pages.read(self, stop)
    self.table = table
    return k, v


def _stale_page(self: Pages, stop: int) -> tuple[Tensor, Tensor]:
    """The page that holds the last token is read as it was before this sequence."""
    k, v = Pages.read(self, stop)
    first = (stop - 1) // PAGE * PAGE
    k, v = k.clone(), v.clone()
    k[:, :, first:], v[:, :, first:] = k[:, :, : stop - first], v[:, :, : stop - first]
    return k, v


def _first_lost(self: Pages, stop: int) -> tuple[Tensor, Tensor]:
    """The oldest token is evicted a step early: the second one stands in its place."""
    k, v = (x.clone() for x in Pages.read(self, stop))
    if stop > 1:
        k[:, :, 0], v[:, :, 0] = k[:, :, 1], v[:, :, 1]
    return k, v


def _through_e4m3(self: Pages, stop: int) -> tuple[Tensor, Tensor]:
    """Tokens come out of an unscaled E4M3 cache."""
    from harness.rounding import round_to

    k, v = (round_to(x, "fp8_e4m3", "saturate") for x in Pages.read(self, stop))
    return k, v


def _of_sequence_0(self: Pages, stop: int) -> tuple[Tensor, Tensor]:
    k, v = (x[:1].expand_as(x) for x in Pages.read(self, stop))
    return k, v


def _short(self: Attention, rows: slice) -> Tensor:
    """Steps count their tokens from 0 again: a row sees one key less than it has."""
    return Attention.position(self, rows) - (rows.stop - rows.start == 1) * 1


# fmt: off
add("token written late", "a step attends before its own token is in the cache", DECODE, _cache(write=_late),
    "last key; right − 1")
add("V not appended", "steps append K and not V", DECODE, _cache(write=_k_alone),
    "V of the last key missing; V of the last block of 32 missing; V of a block misread")  # another request's
add("slot one back", "a step's token overwrites the one before", DECODE, _cache(write=_one_back))
add("last slot of a page", "steps never write the last slot of a page", DECODE, _cache(write=_same_slot))
add("pages swapped", "V is read through a table with two entries exchanged", DECODE, _cache(read=_swapped),
    "first V blocks of 16 swapped")
add("last page stale", "the newest page is read from the oldest", "decode/causal decode/decode",
    _cache(read=_stale_page), "stale page of 16")
add("evicted a step early", "the oldest token is overwritten by the second", "decode/heavy decode/causal",
    _cache(read=_first_lost), "first key is the second; key 0 lost; first key")
add("cache in E4M3", "K and V go through an unscaled E4M3 cache", "decode/causal decode/decode",
    _cache(read=_through_e4m3), "cache in fp8_e4m3", recipes=("fp32", "bf16", "fp16"), random=True)
add("cache of sequence 0", "all sequences read the first one's cache", "decode/decode decode/lengths",
    _cache(read=_of_sequence_0), "cache of sequence 0")
add("step length one short", "steps see one key less", "decode/causal decode/decode", {"position": _short},
    "last key; right − 1")
# fmt: on
