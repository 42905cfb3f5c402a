"""Error vectors of single roundings and of all together → shares of the squared error, and whether they add up.

With e the error of the whole and e_i those of single roundings, e = Σ e_i to first order, hence
|e|² = Σ|e_i|² + Σ_{i≠j} e_i·e_j, and the last sum is zero on average where roundings err independently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUPS = 9  # at least, to see how far the sum of shares scatters
# Standard errors: Student's t at 1 % two-sided with GROUPS − 1 degrees of freedom is 3.36.
ERRORS = 3.4
BAND = 0.05  # of the squared error is 2.5 % of the error: nothing hangs on it
WIDEST = 0.25  # what chance may excuse at most: a sum farther from 1 than this adds up to nothing
SAME = 0.99  # correlation from which two roundings are one
ALIKE = 0.2  # correlation from which two roundings meet in part the same numbers: by chance it is 1/√elements
SMALL = 0.005  # shares below it explain nothing


@dataclass(frozen=True)
class Sums:
    """Sums of a seed or several over the elements that are finite in every run. `gram` `[groups, n + 1, n + 1]`: inner
    products of the errors, of the whole first, then of each place alone; `without` `[n]`: squared errors with one off,
    `own`: with none off in the same arithmetic; `left`: with the accumulation alone; `power`: of the truth. Counts of
    elements that are not finite where the truth is: `lost` of the whole, `lost_alone`, `lost_without`; `elements` of
    `all_elements` took part."""

    gram: Tensor
    without: Tensor
    own: float
    left: float
    power: float
    lost: int
    lost_alone: tuple[int, ...]
    lost_without: tuple[int, ...]
    elements: int
    all_elements: int


def measure(
    truth: Tensor, whole: Tensor, own: Tensor, left: Tensor, alone: Sequence[Tensor], without: Sequence[Tensor],
    cuts: int,
) -> Sums:  # fmt: skip
    """The sums of one seed from outputs `[B, H, L, E]`, FP64. Groups are heads, their rows in `cuts` parts each."""
    known = torch.isfinite(truth)
    runs = (whole, own, left, *alone, *without)
    finite = known.clone()
    for x in runs:
        finite &= torch.isfinite(x)
    lost = [int((known & ~torch.isfinite(x)).sum()) for x in runs]
    n = len(alone)
    errors = [torch.where(finite, x - truth, 0.0) for x in runs]
    rows = torch.stack([errors[0], *errors[3 : 3 + n]])
    parts = [part.flatten(3) for part in torch.tensor_split(rows, max(1, min(cuts, truth.shape[2])), 3)]
    gram = torch.cat([torch.einsum("sbhe,tbhe->bhst", p, p).flatten(0, 1) for p in parts])
    squares = [float(e.square().sum()) for e in errors]
    return Sums(
        gram, torch.tensor(squares[3 + n :], dtype=torch.float64), squares[1], squares[2],
        float(torch.where(finite, truth, 0.0).square().sum()), lost[0], tuple(lost[3 : 3 + n]), tuple(lost[3 + n :]),
        int(finite.sum()), finite.numel(),
    )  # fmt: skip


def pool(sums: Sequence[Sums]) -> Sums:
    """Seeds together: squares add."""
    return Sums(
        torch.cat([s.gram for s in sums]),
        torch.stack([s.without for s in sums]).sum(0),
        math.fsum(s.own for s in sums),
        math.fsum(s.left for s in sums),
        math.fsum(s.power for s in sums),
        sum(s.lost for s in sums),
        tuple(map(sum, zip(*(s.lost_alone for s in sums), strict=True))),
        tuple(map(sum, zip(*(s.lost_without for s in sums), strict=True))),
        sum(s.elements for s in sums),
        sum(s.all_elements for s in sums),
    )


@dataclass(frozen=True)
class Balance:
    """Whether shares add up. `sum`: of the shares; `margin`: how far from 1 chance and BAND let it be; `crossed`: twice
    the inner product of two places over the squared error; `linear`: |Σ e_i|² over it, 1 where errors superpose;
    `twins`: places that are one rounding; `once`: the sum with each of those sets counted once; `alike`: places that
    round in part the same numbers."""

    sum: float
    margin: float
    groups: int
    crossed: dict[tuple[int, int], float]
    linear: float
    twins: tuple[tuple[int, ...], ...]
    once: float
    alike: tuple[tuple[int, ...], ...]

    @property
    def within(self) -> float:
        """How far from 1 the sum may be."""
        return min(self.margin, WIDEST)

    @property
    def adds_up(self) -> bool:
        return abs(self.sum - 1) <= self.within


def balance(sums: Sums) -> Balance:
    """Of a whole that errs: its square is not 0."""
    gram = sums.gram.sum(0)
    whole = float(gram[0, 0])
    own = gram[1:, 1:]
    shares = own.diagonal() / whole
    groups = len(sums.gram)
    ratio = float(shares.sum())
    margin = BAND
    if groups > 1:  # of a ratio of sums, by its linearisation
        each = sums.gram.diagonal(dim1=1, dim2=2)
        residual = each[:, 1:].sum(1) - ratio * each[:, 0]
        margin += ERRORS * float(residual.square().sum().sqrt()) * math.sqrt(groups / (groups - 1)) / whole
    n = len(shares)
    crossed = {(i, j): 2 * float(own[i, j]) / whole for i in range(n) for j in range(i + 1, n)}
    twins, alike = (_sets(own, shares, least) for least in (SAME, ALIKE))
    double = sum(float(shares[list(t)].sum() - shares[list(t)].max()) for t in twins)
    return Balance(ratio, margin, groups, crossed, float(own.sum()) / whole, twins, ratio - double, alike)


def _sets(own: Tensor, shares: Tensor, least: float) -> tuple[tuple[int, ...], ...]:
    """Places whose errors correlate with those of the first of their set by `least` or more."""
    sets: list[list[int]] = []
    for i in (i for i, share in enumerate(shares.tolist()) if share >= SMALL):
        for found in sets:
            j = found[0]
            if float(own[i, j]) >= least * math.sqrt(float(own[i, i]) * float(own[j, j])):
                found.append(i)
                break
        else:
            sets.append([i])
    return tuple(tuple(s) for s in sets if len(s) > 1)
