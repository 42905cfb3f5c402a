"""Wrong places: heads, sequences, rows, keys and channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.mutants.attention import Attention
from benchmarks.mutants.table import Edit, Family

FAMILY = Family("index")
add = FAMILY.add
PLAIN = "naive/full online/causal"


def _heads(change: Any) -> Edit:
    return {"head_of": lambda self, h, hk: change(torch.arange(h), h, hk)}


def _operand(change: Any) -> Edit:
    """K and V of every query head, changed as tensors."""

    def prepare(self: Attention) -> None:
        Attention.prepare(self)
        self.k, self.v = change(self.k, self.v)

    return {"prepare": prepare}


def _output(change: Any) -> Edit:
    return {"deliver": lambda self, out: change(out)}


def _without(*keys: int) -> Edit:
    def seen(self: Attention, rows: slice, part: slice) -> Tensor:
        j = torch.arange(part.start, part.stop)
        lost = torch.isin(j, torch.tensor([k % self.keys for k in keys]))
        return Attention.seen(self, rows, part) & ~lost.view(1, 1, 1, -1)

    return {"seen": seen}


def _twice(key: int) -> Edit:
    def biased(self: Attention, s: Tensor, rows: slice, keys: slice) -> Tensor:
        j = torch.arange(keys.start, keys.stop)
        return Attention.biased(self, s, rows, keys) + 0.6931471805599453 * (j == key)

    return {"biased": biased}


def _whole_blocks(self: Attention, rows: slice, keys: slice) -> Tensor:
    j = torch.arange(keys.start, keys.stop).view(1, 1, 1, -1)
    return Attention.seen(self, rows, keys) & (j < self.keys // 64 * 64)


def _padded_sum(self: Attention, e: Tensor, p: Tensor) -> Tensor:
    """Rows of the last block are padded with scores of 0 that nobody hides."""
    short = -e.shape[-1] % 64
    return Attention.summed(self, e, p) + short * torch.exp(-self.base)


def _keeps_base(self: Attention, s: Tensor, m: Tensor) -> Tensor:
    self.base = Attention.top(self, s, m)
    return self.base


def _repeated(x: Tensor, at: int, of: int, size: int) -> Tensor:
    x = x.clone()
    x[:, :, at : at + size] = x[:, :, of : of + size]
    return x


def _row(out: Tensor) -> Tensor:
    out = out.clone()
    out[:, 1, 100] = out[:, 1, 101]
    return out


def _element(out: Tensor) -> Tensor:
    out = out.clone()
    out[:, 1, 100, 7] = out[:, 1, 100, 8]
    return out


def _channel(out: Tensor) -> Tensor:
    out = out.clone()
    out[..., -1] = 0.0
    return out


def _half(self: Attention, rows: slice, keys: slice) -> Tensor:
    return self.q[:, :, rows, :64] @ self.k[:, :, keys, :64].mT


def _one_head_scale(self: Attention, rows: slice, keys: slice) -> Tensor:
    s = Attention.raw(self, rows, keys)
    s[:, 2] *= 1.01
    return s


def _tile_of_rows(out: Tensor) -> Tensor:
    return _repeated(out, 64, 0, 64)


# fmt: off
add("GQA interleaved", "query head h reads kv head h mod Hkv", "naive/gqa online/gqa decode/decode",
    _heads(lambda i, h, hk: i % hk), "GQA interleaved")
add("kv head 0", "all heads read kv head 0", "naive/gqa online/full", _heads(lambda i, h, hk: 0 * i), "kv head 0")
add("kv heads in reverse", "kv heads are read in reverse order", "naive/gqa split/full",
    _heads(lambda i, h, hk: hk - 1 - i // (h // hk)), "kv heads reversed")
add("K of the next head", "K is the next head's", PLAIN, _operand(lambda k, v: (k.roll(-1, 1), v)), "K of another head")
add("V of the next head", "V is the next head's", PLAIN, _operand(lambda k, v: (k, v.roll(-1, 1))), "V of another head")
add("heads swapped", "neighbouring heads are swapped", PLAIN,
    _output(lambda o: o.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)), "heads swapped")
add("heads in reverse", "heads are in reverse order", PLAIN, _output(lambda o: o.flip(1)), "heads reversed")
add("heads and tokens transposed", "the output is written [B, L, H, E]", PLAIN,
    _output(lambda o: o.transpose(1, 2).reshape(o.shape)), "heads and tokens transposed")
add("sequences swapped", "each sequence has the next one's output", "naive/lengths online/lengths",
    _output(lambda o: o.roll(-1, 0)), "next sequence")
add("V of sequence 0", "all sequences read the first one's V", "naive/lengths split/lengths",
    _operand(lambda k, v: (k, v[:1].expand_as(v))), "V of sequence 0")
add("rows off by one", "each row has the next one's output", PLAIN, _output(lambda o: o.roll(-1, 2)), "next row")
add("rows of the first tile", "rows 64 to 127 are rows 0 to 63", "naive/full triangle/causal",
    _output(_tile_of_rows), "rows of the first 64")
add("one row wrong", "one row of one head is its neighbour's", PLAIN, {"deliver": lambda self, o: _row(o)},
    "previous row; next row")
add("one element wrong", "one element is its neighbour's", PLAIN, {"deliver": lambda self, o: _element(o)},
    "single elements")
add("last channel zero", "the last channel is not written", "naive/full decode/causal", _output(_channel),
    "last channel zero")
add("channels one off", "channels are rotated by one", PLAIN, _output(lambda o: o.roll(1, 3)), "channels rotated")
add("head_dim cut", "64 of 80 channels are read", "naive/wide online/wide", {"raw": _half}, "head_dim cut")
add("scale of one head", "one head's scores are 1 % too large", PLAIN, {"raw": _one_head_scale}, "scale")
add("key 37 lost", "no row sees key 37", "naive/full online/causal decode/heavy", _without(37), "key 37 lost")
add("one key of 4,096 lost", "no row sees key 1,000", "online/long split/long", _without(1000), "key 1000 lost")
add("first key lost", "no row sees key 0", "naive/full online/heavy", _without(0), "key 0 lost; first key")
add("last key lost", "no row sees the last key", "naive/full split/full", _without(-1), "last key; key 255 lost")
add("key 37 twice", "key 37 is counted twice", "online/full naive/causal", _twice(37), "key 37 twice")
add("tail lost", "the keys after the last whole block are lost", "online/ragged naive/ragged", {"seen": _whole_blocks},
    "tail of 64 lost; last block of 64 lost")
add("padding in the sum", "the last block's padding counts in l with scores of 0", "online/ragged",
    {"top": _keeps_base, "summed": _padded_sum}, "padding to 64 in the sum")
add("stale block", "keys and values of the last block are the ones before", "online/full naive/mean",
    _operand(lambda k, v: (_repeated(k, 192, 128, 64), _repeated(v, 192, 128, 64))), "stale block of 64")
add("stale V block", "values of the last block are the ones before", "online/full naive/mean",
    _operand(lambda k, v: (k, _repeated(v, 192, 128, 64))), "stale V block of 64")
add("stale second block", "values of the second block are the first one's", "online/full online/causal",
    _operand(lambda k, v: (k, _repeated(v, 64, 0, 64))), "stale second V block of 64")
add("V rotated by a block", "V is read 64 keys further", "online/full naive/mean",
    _operand(lambda k, v: (k, v.roll(-64, 2))), "V rotated by 64")
add("V one key off", "V is read one key further", "naive/full online/mean", _operand(lambda k, v: (k, v.roll(-1, 2))),
    "V one key off")
add("second block lost", "keys 64 to 127 are lost", "online/full online/causal", _without(*range(64, 128)),
    "second block of 64 lost")
add("first block twice", "keys 0 to 63 are counted twice", "online/full naive/mean",
    {"biased": lambda self, s, rows, keys: Attention.biased(self, s, rows, keys)
     + 0.6931471805599453 * (torch.arange(keys.start, keys.stop) < 64)}, "first block of 64 twice")
# fmt: on
