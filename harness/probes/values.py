"""Probes of one call whose answer the inputs make plain: what V holds, and where the weight lies."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from harness.probes.setting import Finding, NothingToAsk, Setting, same_bits, within

_COLUMNS = 16  # calls that an identity may take
_UNDERFLOW = 112.0  # exp(−112) is 0 in FP32, whose smallest number is e^−103.3


def ones(s: Setting) -> Finding:
    q, k = s.normal("q", "q"), s.normal("k", "k")
    return s.against_truth(s.store(q, k, torch.ones(s.shape.tensor("v"), dtype=torch.float64)))


def identity(s: Setting) -> Finding:
    """E columns of the identity a call, at most `_COLUMNS` calls, the first and the last among them."""
    keys, width = s.shape.S, s.shape.E
    if not width or not keys:
        raise NothingToAsk("there are no values")
    starts = list(range(0, keys, width))
    if len(starts) > _COLUMNS:
        starts = [starts[i * (len(starts) - 1) // (_COLUMNS - 1)] for i in range(_COLUMNS)]
    weights, truths, bounds = [], [], []
    for start in starts:
        v = torch.zeros(s.shape.tensor("v"), dtype=torch.float64)
        columns = torch.arange(min(width, keys - start))
        v[:, :, start + columns, columns] = 1.0
        stored = s.store(s.normal("q", "q"), s.normal("k", "k"), v)
        truth, expected = s.expect(stored)
        used = columns.numel()
        weights.append(s.call(stored).out[..., :used])
        truths.append(truth.out[..., :used])
        bounds.append(expected.ceiling[..., :used])
    p, want, bound = (torch.cat(x, -1) for x in (weights, truths, bounds))
    at = torch.cat([torch.arange(x, min(x + width, keys)) for x in starts])
    seen = s.visible[..., at]
    rows = ~torch.isnan(want)  # empty rows by the NaN rule have no weights
    leaking = rows & ~seen & (p != 0)
    if bool(leaking.any()):
        place = tuple(int(n) for n in leaking.nonzero()[0])
        told = f"{float(p[place]):.6g}; {int(leaking.sum())} hidden weights are not 0"
        return Finding(False, "a hidden weight of 0", told, place)
    found = within(p, want, bound)
    if not found.ok or at.numel() < keys:
        return found
    total = within(p.sum(-1, keepdim=True), want.sum(-1, keepdim=True), bound.sum(-1, keepdim=True))
    return found if total.ok else replace(total, detail="the sum of a row's weights")


def one_hot(s: Setting) -> Finding:
    """Row i's query is c times the code of one key it sees, codes ±1 that differ in a channel or more: all other scores
    are so far below that their weights are 0, and the output is that key's value."""
    width, keys = s.shape.head_dim, s.shape.S
    bits = max(1, (keys - 1).bit_length())
    scale = s.spec.scale_for(width)
    if width < bits or not scale:
        raise NothingToAsk(f"{keys} keys need codes of {bits} channels, and a scale that is not 0")
    codes = torch.from_numpy(s.generator("codes").integers(0, 2, s.shape.tensor("k")) * 2.0 - 1.0)
    index = torch.arange(keys)
    codes[..., :bits] = torch.stack([(index >> b & 1) * 2.0 - 1.0 for b in range(bits)], -1).double()
    chosen = _one_seen(s)
    heads = torch.arange(s.shape.heads) // s.shape.group
    batch = torch.arange(s.shape.batch)[:, None, None]
    size = 2.0 ** math.ceil(math.log2(_UNDERFLOW / (2 * abs(scale))))
    q = math.copysign(size, scale) * codes[batch, heads[None, :, None], chosen]
    v = torch.from_numpy(s.generator("v").integers(1, 15, s.shape.tensor("v")).astype("float64"))
    v[..., :1] = 14.0  # 448/32: the amax of every head and block gives a scale that is a power of two
    stored = s.store(q, codes, v)
    truth, expected = s.expect(stored)
    out = s.call(stored).out
    biased = s.extras.bias is not None or s.extras.sinks is not None
    if s.spec.softcap is not None or biased or not _all_powers(stored[2].scale):
        return within(out, truth.out, expected.ceiling, "other scores are not far below: held to the ceiling")
    want = stored[2].values[batch, heads[None, :, None], chosen]
    empty = ~s.visible.any(-1, keepdim=True)
    return same_bits(out, torch.where(empty, truth.out, want))


def _one_seen(s: Setting) -> Tensor:
    """A key that each row sees, drawn: `[B, H, L]`; 0 where it sees none."""
    seen = s.visible
    if not seen.numel():
        raise NothingToAsk("there are no keys")
    ranks = torch.from_numpy(s.generator("chosen").random(seen.shape))
    return torch.where(seen, ranks, -1.0).argmax(-1)


def _all_powers(scale: Tensor | None) -> bool:
    return scale is None or bool((torch.frexp(scale)[0] == 0.5).all())


def head_tags(s: Setting) -> Finding:
    """V of kv head g of sequence b is the number of (b, g)."""
    if s.shape.batch * s.shape.Hkv == 1:
        raise NothingToAsk("there is one kv head")
    tags = 1.0 + torch.arange(s.shape.batch * s.shape.Hkv, dtype=torch.float64)
    v = tags.view(s.shape.batch, s.shape.Hkv, 1, 1).expand(s.shape.tensor("v"))
    return s.against_truth(s.store(s.normal("q", "q"), s.normal("k", "k"), v))


def last_element(s: Setting) -> Finding:
    """Scores live in the last channel of q and k, values in the last channel of V at the last key that is seen."""
    if 0 in (s.shape.E, s.shape.S, s.shape.q_len):
        raise NothingToAsk("there is no element")
    q, k, v = (torch.zeros(s.shape.tensor(n), dtype=torch.float64) for n in ("q", "k", "v"))
    seen = s.visible.any(1).any(1)  # [B, S]
    index = torch.arange(s.shape.S)
    last = torch.where(seen, index, -1).amax(-1).clamp(min=0)
    if s.shape.head_dim:
        q[..., -1] = 2.0
        k[..., -1] = torch.where(index % 2 == 0, 0.5, -0.5)
        for b, j in enumerate(last.tolist()):
            k[b, :, j, -1] = 1.5
    for b, j in enumerate(last.tolist()):
        v[b, :, j, -1] = 3.0
    return s.against_truth(s.store(q, k, v))


def lse(s: Setting) -> Finding:
    given = s.base_output.lse
    if given is None:
        raise NothingToAsk("the implementation gives no lse")
    truth, expected = s.base_truth
    return within(given, truth.lse, expected.lse_ceiling)
