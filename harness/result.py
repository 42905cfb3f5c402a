"""What an implementation gives: its output, or the reason why it cannot give one."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from harness.records import Ran, Status

T = TypeVar("T")


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


@dataclass(frozen=True)
class Fallen:
    """Why a call that was under test gave nothing: REFUSED, FAIL or ERROR, and where it was raised."""

    status: Status
    reasons: tuple[str, ...]
    traceback: str = ""


def tried(call: Callable[[], T]) -> T | Fallen:
    """What `call` gives, or how it fell. Whatever code under test raises is its own doing and no other cell's."""
    try:
        return call()
    except Refusal as refusal:
        return Fallen(Status.REFUSED, (str(refusal),))
    except Breach as breach:
        return Fallen(Status.FAIL, (str(breach),))
    except Exception as error:
        return Fallen(Status.ERROR, (f"{type(error).__name__}: {error}",), traceback.format_exc())
