"""Wrong keys: causality, windows, alignment, lengths, masks, biases and sinks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.mutants.attention import Attention, State
from benchmarks.mutants.table import Edit, Family

FAMILY = Family("masks")
add = FAMILY.add
CAUSAL = "naive/causal triangle/causal online/causal"


def _edges(change: Any) -> Edit:
    return {"edges": lambda self: change(*Attention.edges(self))}


def _option(name: str, change: Any) -> Edit:
    def option(self: Attention) -> Tensor | None:
        x = getattr(Attention, name)(self)
        return None if x is None else change(x)

    return {name: option}


def _no_rule_in_tile(self: Attention, rows: slice, keys: slice) -> Tensor:
    """Tiles of 16 × 16 that the diagonal crosses are not masked."""
    j = torch.arange(keys.start, keys.stop).view(1, 1, 1, -1)
    return Attention.seen(self, rows, keys) | ((j // 16) == (self.position(rows) // 16))


def _skips_a_block(self: Attention, rows: slice, keys: slice) -> Tensor:
    """Each row skips the 16 keys of the tile before its own: an off-by-one in the loop's end."""
    j = torch.arange(keys.start, keys.stop).view(1, 1, 1, -1)
    return Attention.seen(self, rows, keys) & ((j // 16) != (self.position(rows) // 16) - 1)


def _masked_after(self: Attention, p: Tensor, keys: slice) -> Tensor:
    return p * self.shown @ self.v[:, :, keys]


def _softmax_of_all(self: Attention, s: Tensor, seen: Tensor) -> Tensor:
    self.shown = seen.to(s)
    return s


# fmt: off
add("next key leaks", "causality shows one key too many", CAUSAL + " decode/causal",
    _edges(lambda left, right: (left, 1)), "right + 1; next key")
add("own key hidden", "causality hides the own key", CAUSAL, _edges(lambda left, right: (left, -1)),
    "right − 1; last key; empty rows")
add("not causal", "causality is ignored", "naive/causal online/gqa", _edges(lambda left, right: (left, None)),
    "not causal")
add("causal where it is not", "causality is applied to full attention", "naive/full online/mean",
    _edges(lambda left, right: (left, 0)), "causal")
add("top-left alignment", "positions are aligned top-left", "naive/cross online/cross triangle/cross",
    {"shift": lambda self: 0}, "alignment")
add("alignment one off", "positions lie one key too far left", "online/cross decode/decode",
    {"shift": lambda self: Attention.shift(self) - 1}, "right − 1; last key")
add("window left + 1", "the window shows one key too many", "naive/window online/window",
    _edges(lambda left, right: (left + 1, right)), "left + 1")
add("window left − 1", "the window hides its last key", "naive/window online/window",
    _edges(lambda left, right: (left - 1, right)), "left − 1")
add("window ignored", "the window's left side is ignored", "naive/window online/window",
    _edges(lambda left, right: (None, right)), "no window")
add("window on both sides", "the window's right side is its left", "naive/window online/window",
    _edges(lambda left, right: (left, left)), "window on both sides")
add("diagonal tiles not masked", "16 × 16 tiles on the diagonal are not masked", CAUSAL,
    {"seen": _no_rule_in_tile}, "diagonal tiles of 16 not masked")
add("tile before the diagonal skipped", "the 16 keys before a row's own tile are lost", "triangle/causal online/gqa",
    {"seen": _skips_a_block}, "tile of 16 before the diagonal lost")
add("masked after softmax", "hidden keys are in the denominator", CAUSAL + " naive/mask",
    {"hidden": _softmax_of_all, "product": _masked_after}, "masked after softmax")
add("weak mask", "hidden scores are lowered by 10 and not to −∞", "naive/causal online/mask",
    {"hidden": lambda self, s, seen: torch.where(seen, s, s - 10.0)}, "hidden keys leak")
add("mask multiplied onto the scores", "hidden scores are multiplied by 0, not lowered to −∞: exp(0) = 1",
    "naive/causal online/mask", {"hidden": lambda self, s, seen: s * seen},
    "mask multiplied")
add("lengths ignored", "keys beyond a sequence's length are seen", "naive/lengths online/lengths",
    {"lengths": lambda self: torch.tensor([self.keys]).view(-1, 1, 1, 1)}, "no kv_lens")
add("length + 1", "one key beyond each sequence's length is seen", "naive/lengths online/lengths",
    {"lengths": lambda self: (Attention.lengths(self) + 1).clamp(max=self.keys)}, "kv_lens + 1")
add("length − 1", "the last key of each sequence is lost", "naive/lengths online/lengths split/lengths",
    {"lengths": lambda self: Attention.lengths(self) - 1}, "last key; kv_lens − 1")
add("lengths of sequence 0", "all sequences have the first one's length", "naive/lengths online/lengths",
    {"lengths": lambda self: Attention.lengths(self)[:1].clone()}, "kv_lens of sequence 0; no kv_lens")
add("mask inverted", "the mask has the other polarity", "naive/mask online/mask", _option("mask", lambda m: ~m),
    "mask inverted")
add("mask ignored", "the mask is ignored", "naive/mask online/mask", {"mask": lambda self: None}, "no mask")
add("mask of head 0", "all heads take the mask of head 0", "naive/mask split/mask", _option("mask", lambda m: m[:, :1]),
    "mask of head 0")
add("mask one key off", "the mask is shifted by one key", "naive/mask online/mask",
    _option("mask", lambda m: m.roll(1, 3)), "mask one key off")
add("bias ignored", "the bias is ignored", "naive/bias online/bias", {"bias": lambda self: None}, "no bias")
add("bias scaled", "the bias is scaled with the scores", "naive/bias online/bias",
    _option("bias", lambda b: b / 8), "bias scaled")
add("bias − 1 %", "the bias is 0.99 of itself", "naive/bias split/bias", _option("bias", lambda b: 0.99 * b), "bias")
add("bias of head 0", "all heads take the bias of head 0", "naive/bias online/bias",
    _option("bias", lambda b: b[:, :1]), "bias of head 0")
add("bias transposed", "row and key of the bias are exchanged", "naive/bias online/bias",
    _option("bias", lambda b: b.mT), "bias transposed")
add("sink dropped", "the sink is not in the denominator", "naive/sinks online/sinks split/sinks",
    {"sink": lambda self: None}, "no sink")
add("sink twice", "the sink is counted twice", "naive/sinks online/sinks",
    _option("sink", lambda x: x + math.log(2)), "sink twice")
add("sink scaled", "the sink is scaled with the scores", "naive/sinks online/sinks", _option("sink", lambda x: x / 8),
    "sink scaled")
add("sink of head 0", "all heads take the sink of head 0", "naive/sinks split/sinks",
    _option("sink", lambda x: x[:, :1].expand_as(x)), "sink of head 0")
add("sink as a key of value 1", "the sink's value is 1 and not 0", "naive/sinks online/sinks",
    {"divided": lambda self, state: _with_value(self, state)}, "sink with a value")
# fmt: on


def _with_value(self: Attention, state: State) -> tuple[Tensor, Tensor]:
    m, l, o = state
    sink = self.sink()
    assert sink is not None
    weight = torch.exp(sink - m) * self.p_scale()
    return Attention.divided(self, (m, l, o + weight / self.descaled("v")))
