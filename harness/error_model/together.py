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

import torch
from torch import Tensor

from harness.error_model.block import Block

Rows = slice | Tensor

SMALL = 2**18  # weights of a block that are all looked at
SAMPLE = 8  # rows of a larger one that are, beside its flat rows
GROUP = 32  # rows of a head, as the yardstick takes them
LOOK, SURE = 2.0, 3.0  # standard errors of a mean square that chance passes seldom
ALONE = 8.0  # the same of one row: of many, the few by chance may not raise what is expected


def together(
    b: Block, moved: Callable[[Rows], Tensor], independent: Tensor, point: Tensor | None, precision: int
) -> Tensor | None:
    """What to add to the variance `independent` `[n, R, E]` of Σ_j δ_j (v_jc − point_c); None: nothing. `moved`: the
    δ_j `[n, r, K]` of some rows, of a format of so many bits of `precision`."""
    if not independent.numel() or not b.p.shape[-1]:
        return None
    if b.p.numel() > SMALL:
        rows = _looked_at(b, precision)
        some = independent[:, rows]
        if not bool(_beyond(_squares(b, moved(rows), point, rows), some, LOOK, 1).any()):
            return None
    every = slice(None)
    squares = _squares(b, moved(every), point, every)
    apart = _beyond(squares, independent, SURE, b.group)
    if not bool(apart.any()):
        return None
    return (squares - independent).clamp_(min=0.0).masked_fill_(~apart, 0.0).nan_to_num_(0.0, 0.0, 0.0)


def _looked_at(b: Block, precision: int) -> Tensor:
    """Rows evenly spaced, and those whose weights are spread by less than the format's spacing in some head."""
    count = b.p.shape[1]
    spread = (b.p2_sum.double() * b.keys_seen - 1).clamp(min=0.0).sqrt()  # of a row's weights, ÷ their mean
    flat = (spread < 2.0 ** (1 - precision)).any(0).flatten()
    step = max(1, -(-count // SAMPLE))
    flat[step // 2 :: step] = True
    return flat.nonzero()[:, 0]


def _squares(b: Block, w: Tensor, point: Tensor | None, rows: Rows) -> Tensor:
    """(Σ_j w_j (v_jc − point_c))²."""
    return b.shift(w, None if point is None else point[:, rows]).square_()


def _beyond(squares: Tensor, expected: Tensor, sigmas: float, group: int) -> Tensor:
    """Where `[n, R, 1]` the sums' mean square is above its expectation by more than chance: in a row, in `GROUP` rows
    of one of the `group` query heads, in a head or over all of them. The channels of a row may share one error, so that
    a row is one sample."""
    got, want = (x.nan_to_num(0.0, 0.0, 0.0).sum(2, keepdim=True) for x in (squares, expected))

    def limit(n: int) -> float:
        return 1 + sigmas * math.sqrt(2 / max(n, 1))

    n, rows = got.shape[:2]
    if float(got.sum()) > limit(n * rows) * float(want.sum()):
        return got > want
    apart = (got > (1 + ALONE * math.sqrt(2)) * want) | (
        got.sum(1, keepdim=True) > limit(rows) * want.sum(1, keepdim=True)
    )
    width = rows // group
    if width > GROUP:
        pad = -width % GROUP

        def sums(x: Tensor) -> Tensor:
            x = torch.nn.functional.pad(x.reshape(n, group, width), (0, pad))
            return x.view(n, group, -1, GROUP).sum(-1, keepdim=True)

        tight = (sums(got) > limit(GROUP) * sums(want)).expand(-1, -1, -1, GROUP)
        apart |= tight.flatten(2)[..., :width].reshape(n, rows, 1)
    return apart
