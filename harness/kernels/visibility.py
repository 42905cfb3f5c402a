"""What a kernel without an option of its own is given in its place: a mask of visible keys, or a bias of −∞."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.operands import Extras
from harness.spec import AttentionSpec, Shape


def bounds(spec: AttentionSpec, shape: Shape, extras: Extras, device: torch.device) -> Tensor:
    """int64 `[B|1, 2]`: of each sequence the position of query row 0 and its number of keys. Without kv_lens one row
    stands for all."""
    lens = torch.tensor([shape.S], device=device) if extras.kv_lens is None else extras.kv_lens
    first = lens - shape.q_len if spec.align == "bottom-right" else torch.zeros_like(lens)
    return torch.stack([first, lens], 1)


def visible(spec: AttentionSpec, shape: Shape, extras: Extras, device: torch.device) -> Tensor | None:
    """Which keys each row sees by causality, window, lengths and mask: bool `[B|1, H|1, L|1, S|1]`, None for all.
    A bias of −∞ hides by itself."""
    seen = None
    if spec.left is not None or spec.right is not None or extras.kv_lens is not None:
        first, lens = bounds(spec, shape, extras, device).unbind(1)
        position = torch.arange(shape.q_len, device=device)[:, None] + first.view(-1, 1, 1, 1)
        j = torch.arange(shape.S, device=device)
        seen = (j < lens.view(-1, 1, 1, 1)).expand(-1, -1, shape.q_len, -1)
        if spec.left is not None:
            seen = seen & (j >= position - spec.left)
        if spec.right is not None:
            seen = seen & (j <= position + spec.right)
    if extras.mask is not None:
        seen = extras.mask if seen is None else seen & extras.mask
    return seen


def additive(bias: Tensor, seen: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """The bias with −∞ where hidden, in the first of these dtypes that holds it exactly; the last one, the base of the
    arithmetic, takes it as that does."""
    value = bias.to(dtypes[-1])
    dtype = next((d for d in dtypes if torch.equal(value.to(d).to(value.dtype), value)), dtypes[-1])
    value = value.to(dtype)
    return value if seen is None else torch.where(seen, value, -math.inf)
