"""What the algorithms share: masked scores of a block, P·V, and the last division.

Query heads of one kv head are folded into the rows, `[B, Hkv, G·rows, …]`: grouped attention copies neither K nor V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Block
from harness.operands import Extras, slice_rows_keys
from harness.spec import AttentionSpec, Shape


@dataclass(frozen=True)
class Problem:
    """One call in the base dtype. `q`, `k`, `v` are codes; a scale is `[B|1, H|1, L|1, 1]`, `[B|1, H|1, L, D]` where
    it differs within a row, or None.

    `shape` keeps the full lengths, against which rows and keys are aligned, even when `k` and `v` are a cache that
    is still filling.
    """

    shape: Shape
    spec: AttentionSpec
    extras: Extras
    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    v_finite: bool

    @property
    def scales_each_value(self) -> bool:
        """Whether v has a scale per token, which cannot wait until the sum over keys is done."""
        return self.v_scale is not None and (self.v_scale.shape[2] > 1 or _within_row(self.v_scale))

    def fold(self, x: Tensor) -> Tensor:
        """`[B|1, H|1, rows, n]` → `[B|1, Hkv|1, G·rows, n]`."""
        heads = self.shape.Hkv if x.shape[1] > 1 or self.shape.heads == 1 else 1
        if x.shape[1] == 1 and self.shape.heads > 1:
            x = x.expand(-1, self.shape.group, -1, -1)
        return x.reshape(x.shape[0], heads, x.shape[1] // heads * x.shape[2], x.shape[3])

    def unfold(self, x: Tensor) -> Tensor:
        """`[B, Hkv, G·rows, n]` → `[B, H, rows, n]`."""
        return x.reshape(x.shape[0], self.shape.heads, x.shape[2] // self.shape.group, x.shape[3])


def _within_row(scale: Tensor | None) -> bool:
    """Whether a scale differs within a row: of q and k, along the axis that q·k sums over."""
    return scale is not None and scale.shape[3] > 1


def descaled(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """code · scale, rounded to the base format once. Of a power of two this is exact, FP32's subnormals included (E4M3
    times 2^-127 ends at 2^-136), up to its max: beyond that the value is ±Inf in FP32, as it is to a kernel that
    descales there."""
    return (codes.double() * scale).to(dtype)


def key_range(p: Problem, rows: slice) -> slice:
    """The keys that some of these rows may see by causality and window; mask and lengths can only hide more."""
    length = p.extras.length(p.shape.q_len)
    first, last = p.extras.ends(rows)
    shifts = [p.spec.shift(length, p.shape.S)]
    if p.extras.kv_lens is not None and p.spec.align == "bottom-right" and p.shape.batch:
        lens = p.extras.kv_lens.tolist()
        shifts = [min(lens) - length, max(lens) - length]
    low = 0 if p.spec.left is None else max(0, first + min(shifts) - p.spec.left)
    high = p.shape.S if p.spec.right is None else min(p.shape.S, last + max(shifts) + p.spec.right)
    return slice(min(low, p.shape.S), max(high, min(low, p.shape.S)))


def visible(p: Problem, rows: slice, keys: slice) -> Tensor | None:
    """Which keys each row sees, bool, broadcastable to `[B, Hkv, G·rows, keys]`; None when all are seen."""
    seen = _seen_by_position(p, rows, keys)
    if p.extras.mask is not None:
        mask = slice_rows_keys(p.extras.mask, rows, keys)
        seen = mask if seen is None else seen & mask
    if p.extras.bias is not None:
        shown = slice_rows_keys(p.extras.bias, rows, keys) != -math.inf
        seen = shown if seen is None else seen & shown
    if seen is None:
        return None
    n_rows, n_keys = rows.stop - rows.start, keys.stop - keys.start
    return p.fold(seen.expand(-1, -1, n_rows, n_keys))


def _seen_by_position(p: Problem, rows: slice, keys: slice) -> Tensor | None:
    """Causality, window and lengths as `[B|1, 1, rows, keys]`; None when this block is wholly visible."""
    left, right, lens = p.spec.left, p.spec.right, p.extras.kv_lens
    length = p.extras.length(p.shape.q_len)
    shift = p.spec.shift(length, p.shape.S)
    if lens is None:
        first, last = (n + shift for n in p.extras.ends(rows))
        last -= 1
        if (left is None or keys.start >= last - left) and (right is None or keys.stop - 1 <= first + right):
            return None
    device = p.q.device
    i = p.extras.at(rows, device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)[None, :]
    if lens is None:
        position, seen = (i + shift)[None, None], torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    else:
        n = lens.view(-1, 1, 1, 1)
        position = i + (n - length) if p.spec.align == "bottom-right" else i[None, None]
        seen = j < n
    if left is not None:
        seen = seen & (j >= position - left)
    if right is not None:
        seen = seen & (j <= position + right)
    return seen


def scores(ar: Arithmetic, p: Problem, rows: slice, keys: slice) -> Tensor:
    """S = scale·QKᵀ, softcapped, plus bias, −∞ where hidden: `[B, Hkv, G·rows, keys]`.

    The −∞ is selected, not added: added, it would turn a NaN or an overflowed +∞ at a hidden place into a visible NaN.
    """
    ar.block = Block(rows.start, rows.stop - rows.start, keys.start)
    q, k = p.q[:, :, rows], p.k[:, :, keys]
    if p.q_scale is not None and _within_row(p.q_scale):  # inside the sum over channels: descaled on load
        q = descaled(q, _part(p.q_scale, rows), ar.dtype)
    if p.k_scale is not None and _within_row(p.k_scale):
        k = descaled(k, _part(p.k_scale, keys), ar.dtype)
    s = ar.matmul(p.fold(q), k.mT, "scores_raw")
    s = ar.mul(s, _score_factor(ar, p, rows, keys), "scores", own=True)
    if p.spec.softcap is not None:
        s = ar.div(s, p.spec.softcap, "scores")
        s = ar.mul(ar.tanh(s, "scores"), p.spec.softcap, "scores")
    if p.extras.bias is not None:
        bias = slice_rows_keys(p.extras.bias, rows, keys).to(s.dtype)
        s = ar.add(s, p.fold(bias.expand(-1, -1, rows.stop - rows.start, keys.stop - keys.start)), "scores")
    return _hide(p, s, rows, keys)


def _hide(p: Problem, s: Tensor, rows: slice, keys: slice) -> Tensor:
    """−∞ where hidden, in place. Where causality alone hides nothing left of the block's corner is touched."""
    apart = p.extras.rows is not None or p.extras.given not in ((), ("sinks",))
    if p.spec.right is None or p.spec.left is not None or apart:
        seen = visible(p, rows, keys)
        return s if seen is None else s.masked_fill_(~seen, -math.inf)
    first = rows.start + p.spec.shift(p.shape.q_len, p.shape.S) + p.spec.right + 1 - keys.start
    height, width = rows.stop - rows.start, keys.stop - keys.start
    start = min(max(first, 0), width)
    if start < width and height:
        hidden = torch.ones(height, width - start, dtype=torch.bool, device=s.device).triu_(first - start)
        s.view(-1, height, width)[..., start:].masked_fill_(hidden, -math.inf)
    return s


def _score_factor(ar: Arithmetic, p: Problem, rows: slice, keys: slice) -> Tensor | float:
    """scale, times the scales of q and k that a row has one of: kernels descale with the softmax scale."""
    factor: Tensor | float = p.spec.scale_for(p.shape.head_dim)
    if p.q_scale is not None and not _within_row(p.q_scale):
        scale = _part(p.q_scale, rows)
        factor = factor * p.fold(scale.expand(-1, -1, rows.stop - rows.start, -1)).to(ar.dtype)
    if p.k_scale is not None and not _within_row(p.k_scale):
        factor = factor * _part(p.k_scale, keys).mT.to(ar.dtype)
    return factor


def _part(scale: Tensor, tokens: slice) -> Tensor:
    return scale[:, :, tokens] if scale.shape[2] > 1 else scale


def sink_logits(ar: Arithmetic, p: Problem, rows: slice) -> Tensor | None:
    """The learned sinks as `[1, Hkv, G·rows, 1]`."""
    if p.extras.sinks is None:
        return None
    sinks = p.extras.sinks.to(ar.dtype).view(1, -1, 1, 1)
    return p.fold(sinks.expand(-1, -1, rows.stop - rows.start, -1))


def probs_times_v(ar: Arithmetic, p: Problem, w: Tensor, s: Tensor, keys: slice, stage: str) -> Tensor:
    """P·V. A key whose score is −∞ has P = 0, but 0·NaN is NaN: with non-finite values in V those are left out.
    A probability that became 0 by rounding does make 0·∞ = NaN."""
    v = p.v[:, :, keys]
    if p.scales_each_value:  # inside the sum over keys: V is descaled on load, in the base format
        assert p.v_scale is not None
        v = descaled(v, _part(p.v_scale, keys), ar.dtype)
    if p.v_finite:
        return ar.matmul(w, v, stage)
    seen = (s != -math.inf).to(w.dtype)
    finite = torch.isfinite(v)
    o = ar.matmul(w, v.masked_fill(~finite, 0), stage)
    inf = torch.isinf(v)
    positive = ((seen * (w > 0)) @ (inf & (v > 0)).to(w.dtype)) > 0
    negative = ((seen * (w > 0)) @ (inf & (v < 0)).to(w.dtype)) > 0
    undefined = ((seen @ torch.isnan(v).to(w.dtype)) > 0) | (((seen * (w == 0)) @ inf.to(w.dtype)) > 0)
    o = torch.where(positive, math.inf, torch.where(negative, -math.inf, o))
    return torch.where(undefined | (positive & negative), math.nan, o)


def rescale_add_probs_times_v(
    ar: Arithmetic, p: Problem, a: Tensor, o: Tensor, w: Tensor, s: Tensor, keys: slice
) -> Tensor:
    """a·O + P·V, O its own: the step of an algorithm that streams over key blocks."""
    if p.v_finite and not p.scales_each_value and w.shape[2] >= 4 and ar.fuses("block_out", "acc"):
        return ar.rescale_add_matmul(a, o, w, p.v[:, :, keys])
    return ar.rescale_add(a, o, probs_times_v(ar, p, w, s, keys, "block_out"), "acc", own=True)


def finish(
    ar: Arithmetic, p: Problem, o: Tensor, divisor: Tensor | None, lse: Tensor, empty: Tensor
) -> tuple[Tensor, Tensor]:
    """o · v_scale / divisor, rounded to the output format; rows that saw no key by the declared rule.

    Returns out `[B, H, rows, E]` and lse `[B, H, rows]`.
    """
    factor = 1.0 / ar.recipe.p_scale  # exact: p_scale is a power of two in every built-in recipe
    if factor != 1.0:
        o = o * factor
    if p.v_scale is not None and not p.scales_each_value:
        o = o * p.v_scale.to(ar.dtype)
    rule = 0.0 if p.spec.empty_row == "zero" else math.nan
    some = bool(empty.any())
    if divisor is not None:
        o = o / (divisor.masked_fill(empty, 1.0) if some else divisor)
    out = ar.cast(o.masked_fill(empty, rule) if some else o, "out")
    if some:
        lse = lse.masked_fill(empty, -math.inf if p.spec.empty_row == "zero" else math.nan)
    return p.unfold(out), p.unfold(lse)[..., 0]
