"""Enclosures: true attention of the inputs given, in ball arithmetic.

Every number is a ball (python-flint's `arb`) that contains the exact real value: inputs are exact, sums and products
keep a rigorous radius. It shares nothing with the truth and has its own visibility rule. Small calls only (`LIMIT`);
python-flint is needed here and nowhere else in the package, and imported when asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.operands import NO_EXTRAS, Extras, check
from harness.spec import AttentionSpec, Shape

if TYPE_CHECKING:
    from flint import arb as Ball

LIMIT = 2**20  # scores times width: a second or two
U = 2.0**-53
BITS, MOST_BITS = 192, 6144  # exp(s − m) needs the bits of |s|: BF16's scores reach 2^260
BLUR = 2.0**-80  # what a ball may add to a distance, relative to the largest |v|: far below u
_LEAST = 2.0**-1021  # FP64's exp flushes below here at the latest


@dataclass(frozen=True)
class Enclosure:
    """Balls by row (b, h, i): `out` one for each of E channels, `lse` one. `bounds`: what FP64 may be off by, out's
    channels and lse (inf where it promises nothing). `empty`: rows without any weight. `left_out`: rows that meet NaN
    or an infinity among what they see, which have no enclosure. `bits`: the precision it took."""

    out: dict[tuple[int, int, int], list[Ball]]
    lse: dict[tuple[int, int, int], Ball]
    bounds: dict[tuple[int, int, int], tuple[Tensor, float]]
    empty: tuple[tuple[int, int, int], ...]
    left_out: tuple[tuple[int, int, int], ...]
    bits: int


def certifiable(shape: Shape, limit: int = LIMIT) -> bool:
    """Whether a call is small enough: scores times width."""
    return shape.batch * shape.heads * shape.q_len * shape.S * max(shape.head_dim, shape.E, 1) <= limit


def enclose(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec | None = None, extras: Extras = NO_EXTRAS
) -> Enclosure:
    """Balls around out and lse of one call, every option included; precision doubles until they are small.

    Hidden NaN and infinities have no effect; rows that see one are left out. Raises ValueError for shapes that do not
    fit and for a call beyond `LIMIT`, ModuleNotFoundError where python-flint is not installed.
    """
    flint, spec = _flint(), spec or AttentionSpec()
    shape, extras = check(q, k, v, spec, **extras.as_options())
    if not certifiable(shape):
        raise ValueError(f"{shape} is too large to certify; allowed: scores times width ≤ {LIMIT}")
    before, bits = flint.ctx.prec, BITS
    try:
        while True:
            flint.ctx.prec = bits
            result = _attend(flint, (q, k, v), shape, spec, extras, bits)
            size = float(torch.where(torch.isfinite(v), v.double(), 0.0).abs().max()) if v.numel() else 0.0
            blur = max((upper(x.rad()) for row in result.out.values() for x in row), default=0.0)
            log = max((upper(x.rad()) / (1 + abs(float(x.mid()))) for x in result.lse.values()), default=0.0)
            if (blur <= BLUR * size and log <= BLUR) or bits >= MOST_BITS:
                return result
            bits *= 2
    finally:
        flint.ctx.prec = before


def _flint() -> Any:
    try:
        import flint
    except ModuleNotFoundError as error:
        message = "certificates need python-flint; install it with `pip install python-flint`"
        raise ModuleNotFoundError(message, name=error.name) from None
    return flint


def _attend(
    flint: Any,
    tensors: tuple[Tensor, Tensor, Tensor],
    shape: Shape,
    spec: AttentionSpec,
    extras: Extras,
    bits: int,
) -> Enclosure:
    out: dict[tuple[int, int, int], list[Ball]] = {}
    lse: dict[tuple[int, int, int], Ball] = {}
    bounds: dict[tuple[int, int, int], tuple[Tensor, float]] = {}
    empty, left_out = [], []
    for b in range(shape.batch):
        for h in range(shape.heads):
            head = _Head(flint, b, h, tensors, shape, spec, extras)
            rows = [head.row(i) for i in range(shape.q_len)]
            for i, (row, sums) in enumerate(zip(rows, head.times_v(rows), strict=True)):
                at = (b, h, i)
                if row is None:
                    left_out.append(at)
                elif row.lse is None:
                    empty.append(at)
                else:
                    out[at], lse[at] = [x / row.total for x in sums], row.lse
                    bounds[at] = head.bound(i, row, [_float(x) for x in out[at]])
    return Enclosure(out, lse, bounds, tuple(empty), tuple(left_out), bits)


@dataclass(frozen=True)
class _Row:
    """One row's balls over the keys it sees: `parts` are scale·q·k, that softcapped, and the score, `logits` the scores
    and the sink, `e` exp(logit − m), `total` their sum. `lse` None: it sees nothing and has no sink."""

    seen: list[int]
    parts: tuple[list[Ball], list[Ball], list[Ball]]
    logits: list[Ball]
    e: list[Ball]
    m: Ball
    total: Ball
    lse: Ball | None


class _Head:
    """One head of one sequence, its inputs as exact balls."""

    def __init__(
        self, flint: Any, b: int, h: int, tensors: tuple[Tensor, Tensor, Tensor], shape: Shape, spec: AttentionSpec,
        extras: Extras,
    ) -> None:  # fmt: skip
        self.flint, self.shape, self.spec = flint, shape, spec
        q, k, v = tensors
        kv = h // shape.group
        self.q, self.k, self.v = (x.detach().double() for x in (q[b, h], k[b, kv], v[b, kv]))
        self.length = shape.S if extras.kv_lens is None else int(extras.kv_lens[b])
        full = (shape.batch, shape.heads, shape.q_len, shape.S)
        self.mask = None if extras.mask is None else extras.mask.expand(full)[b, h].tolist()
        self.bias = None if extras.bias is None else extras.bias.double().expand(full)[b, h].tolist()
        self.sink = -math.inf if extras.sinks is None else float(extras.sinks[h].double())
        d = shape.head_dim
        exact = spec.scale is not None or d == 0
        self.scale = flint.arb(spec.scale_for(d)) if exact else 1 / flint.arb(d).sqrt()
        self.finite = torch.isfinite(self.k).all(-1) & torch.isfinite(self.v).all(-1)
        self.sane = torch.isfinite(self.q).all(-1)
        clean = [torch.where(torch.isfinite(x), x, 0.0) for x in (self.q, self.k, self.v)]
        # Σ|q||k| for the bound, and q·k in balls
        self.absolute = (clean[0].abs() @ clean[1].abs().T) * abs(float(self.scale.mid()))
        self.dots = self._product(clean[0], clean[1])
        self.balls_v = [[flint.arb(c) for c in row] for row in clean[2].tolist()]
        self.abs_v = clean[2].abs()

    def _product(self, q: Tensor, k: Tensor) -> list[list[Ball]]:
        arb, mat = self.flint.arb, self.flint.arb_mat
        if 0 in (*q.shape, *k.shape):
            return [[arb(0)] * k.shape[0] for _ in range(q.shape[0])]
        left, right = (mat([[arb(c) for c in row] for row in x.tolist()]) for x in (q, k))
        product: list[list[Ball]] = (left * right.transpose()).tolist()
        return product

    def _sees(self, i: int, j: int) -> bool:
        ahead = j - i - (self.length - self.shape.q_len if self.spec.align == "bottom-right" else 0)
        left, right = self.spec.window or (None, None)
        return (
            j < self.length
            and not (self.spec.causal and ahead > 0)
            and not (left is not None and ahead < -left)
            and not (right is not None and ahead > right)
            and (self.mask is None or self.mask[i][j])
            and (self.bias is None or self.bias[i][j] != -math.inf)
        )

    def row(self, i: int) -> _Row | None:
        """None where what the row sees is not finite."""
        arb = self.flint.arb
        seen = [j for j in range(self.shape.S) if self._sees(i, j)]
        if not seen and self.sink == -math.inf:
            return _Row([], ([], [], []), [], [], arb(0), arb(1), None)
        if (
            (seen and not bool(self.sane[i]))
            or not bool(self.finite[seen].all())
            or not self._extras_finite(i, seen)
        ):
            return None
        x = [self.dots[i][j] * self.scale for j in seen]
        cap = self.spec.softcap
        c = x if cap is None else [arb(cap) * (y / arb(cap)).tanh() for y in x]
        s = c if self.bias is None else [y + arb(self.bias[i][j]) for y, j in zip(c, seen, strict=True)]
        # Any shift is exact; the largest keeps exponents small. Its own midpoint is a number without a radius.
        logits = s if self.sink == -math.inf else [*s, arb(self.sink)]
        m = max((y.mid() for y in logits), key=_float)
        e = [(y - m).exp() for y in logits]
        total = sum(e, arb(0))
        return _Row(seen, (x, c, s), logits, e, m, total, m + total.log())

    def times_v(self, rows: list[_Row | None]) -> list[list[Ball]]:
        """Σ e·v of each row, all at once: hidden keys weigh an exact 0."""
        arb, mat = self.flint.arb, self.flint.arb_mat
        if 0 in (len(rows), self.shape.S, self.shape.E):
            return [[arb(0)] * self.shape.E for _ in rows]
        weights = [[arb(0)] * self.shape.S for _ in rows]
        for line, row in zip(weights, rows, strict=True):
            for j, e in zip(row.seen, row.e, strict=False) if row is not None else ():
                line[j] = e
        product: list[list[Ball]] = (mat(weights) * mat(self.balls_v)).tolist()
        return product

    def _extras_finite(self, i: int, seen: list[int]) -> bool:
        return (self.bias is None or all(math.isfinite(self.bias[i][j]) for j in seen)) and (
            math.isfinite(self.sink) or self.sink == -math.inf
        )

    def bound(self, i: int, row: _Row, out: list[float]) -> tuple[Tensor, float]:
        """What FP64 may be off by in out and lse: the usual γ_n analysis, with any order of the sums.

        δ_j = γ_d·scale·Σ|q||k| + 3u·|x| (the scale is pow(d, −½), within 1 ulp = 2u, and one product)
              + u·|x| + 4u·|c| with softcap (a quotient; tanh within 1 ulp, and a product; |tanh'| ≤ 1)
              + u·|s| with a bias + u·|s − m| + 2u (exp, within 1 ulp; SLEEF claims it)
        η_j = expm1(δ_j), a sink's δ without the score's part; A = Σ p_j·η_j over both; Δ = A + γ_n
        |Δo| ≤ (Σ p_j·(η_j + γ_n·(1 + η_j))|v_j| + Δ|o|)/(1 − Δ) + u·|ô|
        |Δlse| ≤ −ln(1 − Δ) + 2u·|ln l| + u·|lse|
        1.001 covers the few products of u with these, and that they are evaluated in FP64.
        """
        seen, count, n, d = row.seen, len(row.seen), len(row.e) + 1, self.shape.head_dim
        x, c, s = (torch.tensor([abs(_float(y)) for y in part], dtype=torch.float64) for part in row.parts)
        p = torch.tensor([_float(e / row.total) for e in row.e], dtype=torch.float64)
        gaps = torch.tensor([abs(_float(y - row.m)) for y in row.logits], dtype=torch.float64)
        log = _float(row.total.log())
        lse = _float(row.m) + log
        delta = 1.01 * d * U * self.absolute[i, seen] + 3 * U * x + 2 * U
        if self.spec.softcap is not None:
            delta = delta + U * x + 4 * U * c
        delta = delta + (0.0 if self.bias is None else U * s) + U * gaps[:count]
        eta, gamma = torch.expm1(1.001 * delta), n * U / (1 - n * U)
        a = float(p[:count] @ eta) + float((p[count:] * torch.expm1(U * gaps[count:] + 3 * U)).sum())
        spread = (a + gamma) * 1.001
        if not spread < 0.5:  # scores so large that FP64 does not know their differences
            return torch.full((self.shape.E,), math.inf, dtype=torch.float64), math.inf
        size = torch.tensor(out, dtype=torch.float64).abs()
        wide = self.abs_v[seen]
        error = (p[:count] * (eta + gamma * (1 + eta))) @ wide + spread * size + _LEAST * wide.sum(0)
        bound = 1.001 * (error / (1 - spread) + U * (size + error))
        return bound, 1.001 * (-math.log1p(-spread) + 2 * U * abs(log) + U * abs(lse)) + n * _LEAST


def _float(x: Ball) -> float:
    return float(x.mid())


def upper(x: Any) -> float:
    """An upper bound of a ball's magnitude, as a double."""
    return float(abs(x).abs_upper()) * (1 + 2 * U)
