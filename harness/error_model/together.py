"""Roundings that go together.

The variance of a cast takes the roundings of keys for independent. Weights that lie in one cell of their format, as
those of a flat row do, or that are equal, as those of repeated keys are, are moved by the same amount: their errors add
up where independent ones would average. What each weight is moved by is known, since the exact weights are; it tells
nothing of a kernel's own roundings where weights are spread out, and all where they are not. So it is summed up, key by
key times its value, and where these sums are larger than chance makes them, what they have too much is expected too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from harness.error_model.block import Block

SAMPLE = 8  # rows of a block that are looked at first
LOOK, SURE = 2.0, 3.0  # standard errors of a mean square that chance passes seldom


def together(
    b: Block, moved: Callable[[slice], Tensor], independent: Tensor, point: Tensor | None
) -> Tensor | None:
    """What to add to the variance `independent` `[n, R, E]` of Σ_j δ_j (v_jc − point_c); None: nothing. `moved`: the
    δ_j `[n, r, K]` of some rows."""
    count = independent.shape[1]
    if not independent.numel() or not b.p.shape[-1]:
        return None
    step = max(1, -(-count // SAMPLE))
    rows = slice(step // 2 if step < count else 0, None, step)
    some = independent[:, rows]
    if not bool(_beyond(_squares(b, moved(rows), point, rows), some, LOOK).any()):
        return None
    squares = _squares(b, moved(slice(None)), point, slice(None))
    apart = _beyond(squares, independent, SURE)
    if not bool(apart.any()):
        return None
    more = (squares - independent).clamp_(min=0.0).masked_fill_(~apart[:, None, None], 0.0)
    return more.nan_to_num_(0.0, 0.0, 0.0)


def _squares(b: Block, w: Tensor, point: Tensor | None, rows: slice) -> Tensor:
    """(Σ_j w_j (v_jc − point_c))²."""
    return b.shift(w, None if point is None else point[:, rows]).square_()


def _beyond(squares: Tensor, expected: Tensor, sigmas: float) -> Tensor:
    """Heads `[n]` in which the sums' mean square is above its expectation by more than chance, by themselves or all
    taken together. The channels of a row may share one error, so that a row is one sample."""
    rows = squares.shape[1]
    got, want = (x.nan_to_num(0.0, 0.0, 0.0).sum((1, 2)) for x in (squares, expected))

    def limit(n: int) -> float:
        return 1 + sigmas * math.sqrt(2 / max(n, 1))

    alone = got > limit(rows) * want
    return alone if float(got.sum()) <= limit(rows * len(got)) * float(want.sum()) else got > want
