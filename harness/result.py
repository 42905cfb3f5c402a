"""What an implementation gives: its output, or the reason why it cannot give one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.records import Ran


@dataclass(frozen=True)
class Result:
    """`out` `[B, H, L, E]` in the recipe's output dtype, `lse` `[B, H, L]` (natural log) in the base dtype or None
    where the implementation gives none, the FLOPs of the products that were computed (0: not counted), and what a black
    box was seen to run."""

    out: Tensor
    lse: Tensor | None = None
    flops: int = 0
    ran: Ran | None = None


class Refusal(ValueError):
    """A call that cannot be done, where only its tensors could tell: their device, layout or values."""


class Breach(RuntimeError):
    """What a kernel did that is wrong before any of its numbers is looked at: it wrote its inputs, or returned
    something of another type, shape or place than it should."""
