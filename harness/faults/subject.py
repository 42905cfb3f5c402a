"""The call that went wrong, and what its output would be with some of it replaced, in FP64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.lies import seen_keys
from harness.operands import Extras
from harness.spec import AttentionSpec
from harness.truth import reference

BLOCKS = (16, 32, 64, 128)  # of keys, as kernels take them
Fault = tuple[str, str, Callable[[], Tensor]]  # its name, a sentence, and the wrong output


class Subject:
    """The call that went wrong: q, k, v in FP64, rules and extras, its truth, and the scales of q, k, v where codes
    have them. Rows may be a part of the call's: `start` is the first of them, `length` how many there are in all."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Extras,
        scales: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
        start: int = 0, length: int | None = None,
    ) -> None:  # fmt: skip
        self.start, self.length = start, q.shape[2] if length is None else length
        self.q, self.k, self.v, self.spec, self.extras, self.scales = q, k, v, spec, extras, scales
        self.truth = reference(q, k, v, spec, **extras.as_options())
        self.seen = seen_keys(q.shape[2], k.shape[2], spec, extras).to(q.device)
        if extras.bias is not None:
            self.seen = self.seen & (extras.bias != -math.inf)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def run(
        self, spec: AttentionSpec | None = None, q: Any = None, k: Any = None, v: Any = None, **extras: Any
    ) -> Tensor:  # fmt: skip
        """The output with some of it replaced."""
        options = {**self.extras.as_options(), **extras}
        q, k, v = (
            mine if given is None else given for mine, given in ((self.q, q), (self.k, k), (self.v, v))
        )
        return reference(q, k, v, spec or self.spec, **options).out

    def over(self, seen: Tensor, **changes: Any) -> Tensor:
        """The output over other visible keys, whatever the rules say."""
        bare = replace(self.spec, causal=False, window=None)
        bias = self.extras.bias
        if bias is not None and "bias" not in changes:
            changes["bias"] = torch.where(bias == -math.inf, 0.0, bias)
        return self.run(bare, mask=seen, kv_lens=None, **changes)

    @property
    def lengths(self) -> Tensor:
        """Keys of each sequence, `[B|1, 1, 1, 1]`."""
        n = self.extras.kv_lens
        return (
            torch.tensor([self.k.shape[2]], device=self.q.device).view(1, 1, 1, 1)
            if n is None
            else n.view(-1, 1, 1, 1)
        )

    @property
    def neighbours(self) -> bool:
        """Whether each row is the one after the row before it."""
        rows = self.extras.rows
        return rows is None or int(rows.index[-1] - rows.index[0]) == len(rows) - 1

    @property
    def positions(self) -> Tensor:
        """The key that each row stands at, `[B|1, 1, L, 1]`."""
        count = self.q.shape[2]
        i = self.extras.at(slice(0, count), self.q.device).view(1, 1, -1, 1)
        return i + (
            self.lengths - self.extras.length(count)
            if self.spec.align == "bottom-right"
            else 0 * self.lengths
        )

    @property
    def keys(self) -> Tensor:
        """Key indices, `[1, 1, 1, S]`."""
        return torch.arange(self.k.shape[2], device=self.q.device).view(1, 1, 1, -1)

    def bias(self) -> Tensor:
        """The bias, or zeros."""
        b = self.extras.bias
        return self.q.new_zeros(1, 1, 1, 1) if b is None else b.double()


def scores(x: Subject, capped: Callable[[Tensor, float], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Scores of all keys, hidden ones too (a bias of −∞ counts as 0), `[B, H, L, S]`, and V of every query head.
    `capped` is what stands for the softcap."""
    k, v = (t.repeat_interleave(x.group, 1) for t in (x.k, x.v))
    s = x.spec.scale_for(x.q.shape[3]) * (x.q @ k.mT)
    cap = x.spec.softcap
    if cap is not None:
        s = cap * torch.tanh(s / cap) if capped is None else capped(s, cap)
    bias = x.bias()
    return s + torch.where(bias == -math.inf, 0.0, bias), v


def weights(x: Subject, capped: Callable[[Tensor, float], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Scores −∞ where hidden, `[B, H, L, S]`, and V of every query head."""
    s, v = scores(x, capped)
    return s.masked_fill(~x.seen, -math.inf), v


def softmax(x: Subject, s: Tensor) -> Tensor:
    """P of these scores, the sink in the denominator; 0 in a row that sees nothing."""
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    sink = None if x.extras.sinks is None else x.extras.sinks.double().view(1, -1, 1, 1)
    top = top if sink is None else torch.maximum(top, sink)
    top = torch.where(torch.isfinite(top), top, 0.0)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    total = total if sink is None else total + torch.exp(sink - top)
    return torch.where(total > 0, p / total.clamp(min=1e-300), 0.0)


def running_max(s: Tensor, size: int) -> Tensor:
    """The largest score up to the end of each key's block of `size`."""
    blocks = -(-s.shape[-1] // size)
    padded = torch.nn.functional.pad(s, (0, blocks * size - s.shape[-1]), value=-math.inf)
    running = padded.reshape(*s.shape[:-1], blocks, size).amax(-1).cummax(-1).values
    return running.repeat_interleave(size, -1)[..., : s.shape[-1]]
