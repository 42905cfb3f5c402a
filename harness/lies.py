"""Biases that hide keys by large finite numbers, and what a kernel makes of them (F01, F05).

A sentinel such as finfo.min looks like hiding and is not: a row with nothing else attends to what was meant as hidden,
and two of them added become −∞ in their own format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.formats import BF16, FP16, FP32, FP64, FloatFormat, get_format
from harness.operands import Extras, shown
from harness.options import packed_mask
from harness.records import MaskRow
from harness.rounding import round_to
from harness.spec import AttentionSpec

# Half of -1e4, the smallest number in use for "hidden" (BERT's): the others, -1e9 and finfo.min, lie far below, and
# neither a rounding (-9984 in BF16) nor a real bias added on top lifts one above it. A guess about intent all the
# same: ALiBi gets there 10,000 keys away (slope 1/2), where its keys are as good as hidden.
SENTINEL = -5000.0
_INSPECTED = (FP16, BF16, FP32, FP64)


@dataclass(frozen=True)
class Lies:
    """What a bias hides, row by row, when a kernel adds it in format `fmt`. Tensors are `[…, L]` on the bias's device.

    `sentinels`: keys whose bias is finite and ≤ `threshold`, so meant as hidden. `hidden`: −∞ as given, in bias or
    scores, or hidden by the mask. `overflowing`: finite as given, −∞ in the format. `undefined`: NaN or +∞, as given or
    in the format. `visible`: keys whose weight, relative to the row's best key, the format does not round to 0; 0 in a
    row that is empty or undefined. `sentinel_rows`: no key is left but sentinels, so that the truth attends to what was
    meant as hidden: these rows are not empty. `emptied_rows`: rows with finite keys of which the format leaves none:
    NaN in a softmax without a rule for empty rows.
    """

    fmt: FloatFormat
    threshold: float
    keys: int
    sentinels: Tensor
    hidden: Tensor
    overflowing: Tensor
    undefined: Tensor
    visible: Tensor
    sentinel_rows: Tensor
    emptied_rows: Tensor

    @property
    def honest(self) -> bool:
        """Whether −∞ alone hides, and nothing else became non-finite."""
        return not any(bool(x.any()) for x in (self.sentinels, self.overflowing, self.undefined))

    def __str__(self) -> str:
        rows = self.visible.numel()
        counts = "; ".join(
            f"{int(n.sum())} {text}"
            for n, text in (
                (self.sentinels, f"finite but ≤ {self.threshold:g} (sentinels)"), (self.hidden, "hidden by −∞"),
                (self.overflowing, f"finite but −∞ in {self.fmt.name}"), (self.undefined, "NaN or +∞"),
            )
        )  # fmt: skip
        lines = [f"bias in {self.fmt.name}, {rows} rows × {self.keys} keys: {counts}"]
        if rows:
            low, high = int(self.visible.min()), int(self.visible.max())
            lines.append(f"effectively visible keys per row: {low if low == high else f'{low} to {high}'}")
        for at in (self.sentinel_rows & ~self.emptied_rows).nonzero().tolist()[:_ROWS_SHOWN]:
            n, end = int(self.visible[tuple(at)]), "the row is not empty"
            lines.append(
                f"row {at}: every key left is a sentinel; the weight goes to {n} keys meant as hidden: {end}"
            )
        for at in self.emptied_rows.nonzero().tolist()[:_ROWS_SHOWN]:
            lines.append(
                f"row {at}: no finite key is left in {self.fmt.name}; NaN without a rule for empty rows"
            )
        for name, flags in (("sentinel", self.sentinel_rows), ("emptied", self.emptied_rows)):
            if int(flags.sum()) > _ROWS_SHOWN:
                lines.append(f"… {int(flags.sum())} {name} rows in all")
        lines.append("hides by −∞ alone" if self.honest else "to hide a key, pass mask= or a bias of −∞")
        return "\n".join(lines)


_ROWS_SHOWN = 4


def inspect_bias(
    bias: Tensor, fmt: str | FloatFormat, *, scores: Tensor | None = None, mask: Tensor | None = None,
    threshold: float = SENTINEL,
) -> Lies:  # fmt: skip
    """Which keys a bias `[…, L, S]` only seems to hide when it is added in `fmt` (fp16, bf16, fp32 or fp64).

    `scores` (scaled and softcapped, same broadcast) are rounded to the format and added there; without them every
    score counts as 0. `mask`, bool, True = attend, hides for good. Sum the biases in FP64 before this call: two
    `finfo.min` are finite there and −∞ in their format, which is what `overflowing` then shows.

    Raises ValueError for a bias or scores that are no floating-point tensors, a mask that is not bool, shapes that
    do not broadcast, another format, and a threshold that is not below 0.
    """
    f = get_format(fmt)
    if f not in _INSPECTED:
        raise ValueError(f"fmt is {f.name}; allowed: {', '.join(x.name for x in _INSPECTED)}")
    if not (math.isfinite(threshold) and threshold < 0):
        raise ValueError(f"threshold is {threshold}; allowed: a finite number below 0")
    given, s = _inspected(bias, scores, mask)
    finite = torch.isfinite(given)
    sentinel = finite & (given <= threshold)
    t = round_to(round_to(s, f) + round_to(given, f), f)
    gone = finite & (t == -math.inf)
    undefined = torch.isnan(t) | (t == math.inf)
    hidden = (given == -math.inf) & ~undefined
    best = t.amax(-1, keepdim=True) if t.shape[-1] else t.new_zeros((*t.shape[:-1], 1))
    weighs = round_to(torch.exp(t - best), f) > 0  # NaN, and −∞ − (−∞), are not
    return Lies(
        f, threshold, t.shape[-1], sentinel.sum(-1), hidden.sum(-1), gone.sum(-1), undefined.sum(-1), weighs.sum(-1),
        sentinel_rows=sentinel.any(-1) & (sentinel | hidden).all(-1),
        emptied_rows=gone.any(-1) & (gone | hidden).all(-1),
    )  # fmt: skip


def _inspected(bias: Any, scores: Any, mask: Any) -> tuple[Tensor, Tensor]:
    """Bias (−∞ where masked) and scores in FP64, broadcast together."""
    for name, x in (("bias", bias), ("scores", scores)):
        fits = isinstance(x, Tensor) and x.dtype.is_floating_point and x.dim() >= 1
        if not fits and (name == "bias" or x is not None):
            raise ValueError(f"{name} is {shown(x)}; allowed: a floating-point tensor […, L, S]")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dtype is torch.bool):
        raise ValueError(f"mask is {shown(mask)}; allowed: a bool tensor, True = attend")
    s = torch.zeros((), device=bias.device) if scores is None else scores.detach()
    seen = torch.ones((), dtype=torch.bool, device=bias.device) if mask is None else mask
    try:
        # Not torch.broadcast_shapes: it loads sympy, half a second once.
        b, s, seen = torch.broadcast_tensors(bias.detach().double(), s.double(), seen)  # type: ignore[no-untyped-call]
    except RuntimeError:
        given = ", ".join(f"{n} {tuple(x.shape)}" for n, x in (("bias", bias), ("scores", s), ("mask", seen)))
        raise ValueError(f"shapes are {given}; allowed: ones that broadcast together") from None
    hidden = ~seen | ((s == -math.inf) & torch.isfinite(b))
    return b.masked_fill(hidden, -math.inf), s.masked_fill(~seen, 0.0)


# --- rows of a run -----------------------------------------------------------------------------------------------

ROWS_RECORDED = 32


def lying_rows(
    q: Tensor, k: Tensor, spec: AttentionSpec, extras: Extras, fmt: str | FloatFormat
) -> tuple[int, tuple[MaskRow, ...]]:  # fmt: skip
    """Rows of q `[B, H, L, D]` over k `[B, Hkv, S, D]` (FP64) in which the bias only seems to hide keys when it is
    added to the scores in `fmt`: how many, and the first ROWS_RECORDED of them. None without a sentinel in the bias.

    A format narrower than FP16 is inspected as FP16: no kernel adds a bias there.
    """
    bias = extras.bias
    if bias is None or not bool((torch.isfinite(bias) & (bias <= SENTINEL)).any()):
        return 0, ()
    f = get_format(fmt)
    scores = spec.scale_for(q.shape[3]) * (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    seen = seen_keys(q.shape[2], k.shape[2], spec, extras)
    found = inspect_bias(bias, f if f in _INSPECTED else FP16, scores=scores, mask=seen)
    shape = scores.shape[:3]
    sentinels, hidden, visible, lying = (
        x.expand(shape)
        for x in (found.sentinels, found.hidden, found.visible, found.sentinel_rows | found.emptied_rows)
    )
    rows = tuple(
        MaskRow(
            tuple(at), found.fmt.name, shown=found.keys - int(hidden[tuple(at)]),
            meant=found.keys - int(hidden[tuple(at)]) - int(sentinels[tuple(at)]), effective=int(visible[tuple(at)]),
        )
        for at in lying.nonzero()[:ROWS_RECORDED].tolist()
    )  # fmt: skip
    return int(lying.sum()), rows


def seen_keys(q_len: int, kv_len: int, spec: AttentionSpec, extras: Extras) -> Tensor:
    """Keys that causality, window, lengths and mask leave, bool `[B|1, H|1, L|1, S]`."""
    lengths = [kv_len] if extras.kv_lens is None else extras.kv_lens.tolist()
    seen = torch.zeros(len(lengths), 1, q_len, kv_len, dtype=torch.bool)
    for b, n in enumerate(lengths):
        if extras.rows is None:
            seen[b, :, :, :n] = packed_mask([0, q_len], [0, n], spec.causal, spec.window, spec.align)[0]
            continue
        far = torch.arange(n) - (extras.rows.index.cpu()[:, None] + spec.shift(extras.rows.of, n))
        left, right = -n - extras.rows.of if spec.left is None else -spec.left, spec.right
        seen[b, :, :, :n] = (far >= left) & (far <= (n + extras.rows.of if right is None else right))
    return seen if extras.mask is None else seen & extras.mask.cpu()
