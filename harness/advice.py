"""What a wrong input looks like where it is another thing than it is called: layouts, and log-sum-exps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from harness.operands import TOKENS_FIRST, Extras
from harness.spec import AttentionSpec
from harness.truth import Truth, reference

_FITS, _FAR = 0.1, 0.3  # rel_l2: attention of another layout is further off than any precision takes it
_LSE: tuple[tuple[str, Callable[[Tensor, Truth, int], Tensor]], ...] = (
    ("it is in base 2: multiply it by ln 2", lambda x, t, n: x * math.log(2)),
    ("it is in base 10: multiply it by ln 10", lambda x, t, n: x * math.log(10)),
    ("it lacks the row's max: lse is m + ln l", lambda x, t, n: x + t.row_max),
    ("it is the sum and not its logarithm", lambda x, t, n: x.clamp(min=0).log()),
    ("it has the wrong sign", lambda x, t, n: -x),
    ("it is of the mean over all keys and not of the sum: add ln S", lambda x, t, n: x + math.log(n)),
)


def lse_advice(lse: Tensor, truth: Truth, ceiling: Tensor, keys: int) -> str:
    """What a log-sum-exp `[B, H, L]` in FP64 is, where undoing one slip makes it right everywhere; else empty."""
    for said, undone in _LSE:
        fixed = undone(lse, truth, keys)
        # The slip's own arithmetic rounds once in FP32, at the size of what it was applied to.
        room = ceiling + 2.0**-22 * torch.maximum(lse.abs(), truth.lse.abs()).nan_to_num(0.0, 0.0)
        same = (fixed - truth.lse).abs() <= room
        if bool((same | ((fixed == truth.lse) & torch.isinf(fixed))).all()):
            return said
    return ""


def unscaled_advice(lse: Tensor, values: tuple[Tensor, ...], spec: AttentionSpec, extras: Extras) -> str:
    """Whether a log-sum-exp `[B, H, L]` is that of scores without their scale; else empty."""
    q, k, v = values
    if spec.scale_for(q.shape[3]) == 1:
        return ""
    bare = reference(q, k, v, replace(spec, scale=1.0), **extras.as_options()).lse
    found = torch.isfinite(bare)
    near = (lse - bare).abs() <= 2.0**-7 * bare.abs().clamp(
        min=1
    )  # a rounding of BF16: a scale is further off
    return "it is of scores that were not scaled" if bool(near[found].all()) and bool(found.any()) else ""


def layout_advice(out: Tensor, rel_l2: float, values: tuple[Tensor, ...], spec: AttentionSpec) -> str:
    """Whether an output that is far off is right once axes 1 and 2 of all tensors are exchanged; else empty."""
    q, k, v = (x.transpose(1, 2) for x in values)
    if not rel_l2 > _FAR or 0 in q.shape or 0 in k.shape or q.shape[1] % k.shape[1]:
        return ""
    truth = reference(q, k, v, spec).out
    size = float(truth.norm())
    apart = float((out.transpose(1, 2).double() - truth).norm())
    return f"q, k, v and out are not [B, H, L, D]; {TOKENS_FIRST}" if apart <= _FITS * size else ""
