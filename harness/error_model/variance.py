"""Expected squared error of each output element (NUMERICS section 4), stage by stage.

A rounding of relative size u has variance c²u²x², c² = 1/(8 ln 2): the mean over log-uniform significands. Of P, of
the row sum and of a running accumulator the spacing itself is used, since exact and vanishing values matter there.
Errors that keep their sign over the keys (what flushes, saturates or stagnates) are summed before they are squared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from harness.error_model.block import Block
from harness.error_model.form import Form, rounded, roundoff, spacing, within
from harness.error_model.problem import CHUNK, NEGLIGIBLE
from harness.error_model.running import C2, Groups, binade, power
from harness.error_model.together import Rows, together
from harness.finite import all_finite
from harness.formats import FloatFormat, get_format
from harness.recipe import Recipe
from harness.rounding import round_to

VANISHING = 1e-30  # far below any e^NEGLIGIBLE / l
_SCORES = ("scores_raw", "scores", "shifted")
LINEAR = 0.03  # of σ² of a score: up to here p changes in proportion to its error


@dataclass(frozen=True)
class Spread:
    """Variances: `out` `[n, R, E]`, `lse` `[n, R, 1]`, FP64."""

    out: Tensor
    lse: Tensor


def partial_sums(n: Tensor | float, chunk: Tensor | float) -> tuple[Tensor, Tensor]:
    """E Σ (partial sum)² = first·(Σx)² + second·Σx² for n exchangeable terms x in chunks, then over chunks."""
    n = torch.as_tensor(n, dtype=torch.float64).clamp(min=1.0)
    r = torch.ceil(n / chunk)
    b = n / r
    return b * b / (3 * n) + (r - 1) / 3, b / 2 - b * b / (3 * n) + (r - 1) / 6


def power_of_two(x: float) -> bool:
    return x != 0 and abs(math.frexp(x)[0]) == 0.5


def spread(b: Block, recipe: Recipe, form: Form) -> Spread:
    """The variances of a block under one recipe and form."""
    return _Spread(b, recipe, form).total()


def unpredicted(b: Block) -> Spread:
    """Of a truncating accumulator: its error has one sign, and no first order is known. The ceiling alone is."""
    return Spread(torch.full_like(b.o, math.inf), torch.full_like(b.lse, math.inf, dtype=torch.float64))


class _Spread(Groups):
    def total(self) -> Spread:
        b = self.b
        self._scores()
        self._casts()
        self._base()
        if self.form.arrangement == "split":
            self._merge()
        elif self.form.arrangement == "stream" and any(
            rounded(self.recipe, s) is not None for s in ("rescale", "row_sum", "block_out", "acc")
        ):
            self._stream()
        else:
            self._whole()
        # A row of one key is that key's value whatever happens to its score.
        alone = (b.count == 1) & (b.sink_e == 0) & self.form.subtract_max  # exp(s)·v / exp(s) is rounded
        var = self.var.addcmul_(self.bias, self.bias) if self.biased else self.var
        if bool(alone.any()):
            var.masked_fill_(alone, 0.0)
        log, full = (b.wide_lse - b.wide_m).square_(), b.wide_lse.square()
        lse = self.lse + self.lse_bias**2 + C2 * self.u**2 * (full + 2 * log)
        out = rounded(self.recipe, "out")
        if out is not None and not self._out_holds(out):
            own = (b.o2 * (C2 * out.unit_roundoff**2)).clamp_(min=out.min_subnormal**2 / 12)
            var += own if b.nonzero is None else own.where(b.nonzero, 0.0)
        leaves = b.leaves(self.recipe)
        if bool(leaves.any()):
            var.masked_fill_(leaves, math.inf)
        lse = lse.nan_to_num_(math.inf, math.inf).masked_fill_(leaves, math.inf)
        return Spread(var if all_finite(var) else var.nan_to_num_(math.inf, math.inf), lse)

    def _out_holds(self, out: FloatFormat) -> bool:
        """An accumulator in the output's format that nothing divides or scales is not rounded again."""
        acc = rounded(self.recipe, "acc")
        return (
            self.early
            and self.form.arrangement == "whole"
            and acc is not None
            and within(acc, out)
            and self.b.heads.scale("v") is None
            and self.recipe.p_scale == 1.0
        )

    # -- scores and exp: relative errors of p_j, weighed by (v_j − o)

    def _scores(self) -> None:
        """Forms of one recipe share this, unless s − m is stored: only then does the running maximum matter."""
        moving = self.drop.shape[-1] > 1 and roundoff(self.recipe, "shifted") > 0
        key = (self.recipe.digest, self.form.subtract_max, self.form if moving else None)
        if key not in self.b.kept:
            self.b.kept[key] = self._score_errors(moving)
        var, mass = self.b.kept[key]
        self.var += var
        self.lse += mass

    def _score_errors(self, moving: bool) -> tuple[Tensor, Tensor]:
        b, r, u = self.b, self.recipe, self.u
        if self.form.subtract_max and b.slight(r, u):
            first, second = (float(x) for x in partial_sums(float(max(b.q.shape[-1], 1)), CHUNK))
            noise = C2 * u * u * (first + second + 8) * b.length_bound.double() ** 2
            mass = b.p2_sum.double() * noise
            return mass * self._mean_square(b.o), mass
        raw, stored, shifted = (roundoff(r, s) for s in ("scores_raw", "scores", "shifted"))
        coarse = max(raw, stored, shifted)
        unit = max(coarse, u) ** 2
        factors = sum(b.heads.scales_rows(n) for n in "qk")
        exact = power_of_two(b.scale) and not factors
        # A product with scale: scale itself rounded, and the product; one more for each scale of q and k.
        kappa = 0.0 if exact else 2.0 + factors
        kept = exact and raw > 0 and within(rounded(r, "scores_raw"), rounded(r, "scores"))
        first, second = (float(x) for x in partial_sums(float(max(b.q.shape[-1], 1)), CHUNK))
        lin = raw**2 + (0.0 if kept else stored**2) + u * u * (kappa + first)
        if b.p_.spec.softcap is not None:
            lin += stored**2 + u * u
        const = self._spacings(C2 * unit) + u * u / unit
        square, shift = lin / unit, (shifted**2 + u * u) / unit if self.form.subtract_max else 0.0
        if b.plain:  # lin = d + m: lin·lin² + shift·d² in one step
            noise = b.squares * (u * u * second / unit)
            noise.addcmul_(b.d, b.d * (square + shift) + (2 * square) * b.m).add_(square * b.m * b.m + const)
        else:
            noise = (b.lin * b.lin * square).add_(b.squares, alpha=u * u * second / unit)
            noise = self._options(noise, stored, unit).addcmul_(b.d, b.d, value=shift).add_(const)
        if moving:  # against the running maximum: d − ln drop in place of d
            ref = self._per_key(self.drop.log())
            noise.addcmul_(ref, ref - 2 * b.d, value=shifted**2 / unit)
        if coarse and noise.numel() and float(noise.amax()) * C2 * unit > LINEAR:
            weights = self._tempered(noise, C2 * unit)
        else:
            weights = noise.mul_(b.p2)
        mass = weights.sum(-1, keepdim=True).double() * (C2 * unit)
        if not (self.fine or coarse):
            return mass * self._mean_square(b.o), mass
        var = b.about(weights, b.o) * (C2 * unit)
        if coarse and b.plain and not factors:
            bits = min(f.precision for s in _SCORES if (f := rounded(r, s)) is not None)
            more = together(b, self._moved_scores, var, b.o, bits)
            var = var if more is None else var + more
        return var, mass

    def _moved_scores(self, rows: Rows) -> Tensor:
        """What storing plain scores moves each p by, to first order: equal keys have equal scores, rounded alike. What
        all keys of a row share has no effect."""
        b, raw, stored, shifted = self.b, *(rounded(self.recipe, s) for s in _SCORES)
        d, m = b.d[:, rows], b.m[:, rows]
        x = d + m
        x = x if raw is None or not b.scale else round_to(x / b.scale, raw, "saturate") * b.scale
        x = x if stored is None else round_to(x, stored, "saturate")
        top = m  # a sink is stored apart, and may be the maximum
        if b.sink is None:
            top = x.masked_fill(b.p[:, rows] == 0, -math.inf).amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
        x = x - top
        x = x if shifted is None else round_to(x, shifted, "saturate")
        return (x - d).clamp_(-1.0, 1.0).mul_(b.p[:, rows])

    def _tempered(self, noise: Tensor, unit: float) -> Tensor:
        """Weights p²σ² where σ is no longer small: another key may win the row.

        A difference of two scores has sd √2 σ, a logistic of scale 0.78 σ: on average the noise divides scores by
        τ = √(1 + 0.61 σ²). A key's share of the mean square is p_τ²σ² while that is small, and p_τ once it decides.
        """
        b = self.b
        sigma2 = (b.p * noise).sum(-1, keepdim=True) * unit
        far = (b.far / torch.sqrt(1 + 0.61 * sigma2)).nan_to_num_(nan=0.0)
        p = torch.exp(torch.nn.functional.threshold(far, NEGLIGIBLE, -math.inf))
        p = p / p.sum(-1, keepdim=True).clamp_(min=1e-30)
        return noise.mul_(p).clamp_(max=1 / unit).mul_(p)

    def _options(self, noise: Tensor, stored: float, unit: float) -> Tensor:
        """Softcap and bias: what was is damped by tanh′, then their own stores are added."""
        b, u, cap = self.b, self.u, self.b.p_.spec.softcap
        if cap is not None:
            noise = noise.mul_((1 - (b.capped / cap).square()).square())
            own = (stored**2 * (1 if power_of_two(cap) else 2) + 4 * u * u) / unit
            noise.addcmul_(b.capped, b.capped, value=own)
        if b.bias is not None:
            s = b.d + b.m
            noise.addcmul_(s, s, value=(stored**2 + u * u) / unit).add_(b.bias * b.bias, alpha=u * u / unit)
        return noise

    def _spacings(self, unit: float) -> float:
        """Subnormal spacings of stored scores, as a floor."""
        raw, stored = spacing(self.recipe, "scores_raw"), spacing(self.recipe, "scores")
        return ((raw * self.b.scale) ** 2 + stored**2) / 12 / unit

    def _mean_square(self, point: Tensor) -> Tensor:
        """Mean over the head's keys of (v − point)²."""
        v = self.b.heads
        return (v.centre - point).square_().add_(v.mean_square)

    # -- casts of exp and of P

    def _casts(self) -> None:
        b, r = self.b, self.recipe
        e, probs = rounded(r, "exp"), rounded(r, "probs")
        self.kappa = b.l / self.drop
        if e is not None:
            self._add(e, 1.0, self.kappa, True, b.o)
        if probs is None:
            return
        if self.early:
            kappa = torch.ones_like(b.l)
            if self.drop.shape[-1] > 1 or self.form.arrangement == "split":
                mass = self._grouped(b.p).sum(-1)
                kappa = 1 / torch.where(mass == 0, 1.0, mass)
            exact_top = False
        elif e is not None and within(e, probs) and power_of_two(r.p_scale):
            return
        else:
            kappa, exact_top = self.kappa, power_of_two(r.p_scale)
        self._add(probs, r.p_scale, kappa, exact_top, b.o if r.row_sum == "after" else None)

    def _add(
        self, fmt: FloatFormat, factor: float, kappa: Tensor, exact_top: bool, point: Tensor | None
    ) -> None:
        """A cast to `fmt` of factor·kappa·p, whose errors are weighed by (v − point)."""
        b = self.b
        noise, lost = self._cast(fmt, factor, kappa, exact_top)
        own = b.about(noise, point)
        self.var += own
        more = together(b, partial(self._moved, fmt, factor * kappa), own, point, fmt.precision)
        if more is not None:
            self.var += more
        if point is not None:
            self.lse += noise.sum(-1, keepdim=True).double()
        if lost is not None:
            self.bias += b.shift(lost, point)
            self.biased = True
            if point is not None:
                self.lse_bias += lost.sum(-1, keepdim=True).double()

    def _cast(
        self, fmt: FloatFormat, factor: float, kappa: Tensor, exact_top: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Variance of p_j when factor·kappa·p_j is rounded to `fmt`, and what surely changes: keys that flush
        (−p_j) or saturate."""
        b = self.b
        noise = self._cast_sizes(fmt, factor, kappa, exact_top).square_()
        if fmt.emin < -30 and factor <= fmt.max and self.form.subtract_max:
            return noise, None
        unit = self._per_key(kappa * factor)
        x = b.p * unit
        lost = None
        if fmt.emin >= -30:
            flushed = x <= fmt.min_subnormal / 2
            lost = torch.where(flushed, -b.p, 0.0)
            noise.masked_fill_(flushed, 0.0)
        if factor > fmt.max or not self.form.subtract_max:
            over = x > fmt.max
            excess = torch.where(over, fmt.max / unit - b.p, 0.0)
            noise.masked_fill_(over, 0.0 if self.recipe.policy("probs") == "saturate" else math.inf)
            lost = excess if lost is None else lost + excess
        return noise, lost

    def _moved(self, fmt: FloatFormat, unit: Tensor, rows: Rows) -> Tensor:
        """What rounding unit·p moves each p by. 0 where it is lost, which `_cast` tells."""
        p, unit = self.b.p[:, rows], self._per_key(unit[:, rows])
        x = p * unit
        lost = (x <= fmt.min_subnormal / 2) | (x > fmt.max)
        return (round_to(x, fmt, "saturate") - x).div_(unit).masked_fill_(lost, 0.0)

    def _cast_sizes(self, fmt: FloatFormat, factor: float, kappa: Tensor, exact_top: bool) -> Tensor:
        """The root mean square error of each p_j: its spacing / √12, at most p_j. 0 where p_j is its reference's own
        peak, which is a power of two and exact."""
        b = self.b
        least = fmt.min_normal / factor
        if exact_top and self.peak is not None and least < 1:
            # x = −p / peak is −1 for the peak, to the bit, and for nothing else.
            p, unit = self._facing(-self.peak.clamp(min=math.exp(2 * NEGLIGIBLE)))
            x = power(torch.div(p, unit, out=b.p_.space("casts", *p.shape)))
            if least > VANISHING:
                x.clamp_(max=-least)
            torch.threshold_(x, -1.0, 0.0).mul_(unit * (2.0 ** (1 - fmt.precision) / math.sqrt(12)))
        else:
            p, unit = self._facing(kappa * factor)
            x = power(torch.mul(p, unit, out=b.p_.space("casts", *p.shape)))
            if fmt.min_normal > VANISHING or not self.form.subtract_max:
                x.clamp_(min=fmt.min_normal)
            x.mul_(2.0 ** (1 - fmt.precision) / math.sqrt(12) / unit)
            if exact_top and self.peak is not None:
                x.masked_fill_(p == self._facing(self.peak)[1], 0.0)
        if least > VANISHING or not self.form.subtract_max:  # else no spacing is larger than its number
            torch.minimum(x, p, out=x)
        return x.view(b.p.shape)

    # -- sums, products and the division in the base

    def _base(self) -> None:
        b, u2 = self.b, C2 * self.u**2
        square = b.weight_square(self.chunk) if self.fine else b.mean_weight_square
        n = b.keys_seen
        scale = b.p_.scales[2]
        inside = scale is not None and max(scale.shape[2:]) > 1  # V is descaled on load, else the output
        extra = 1.0 if inside else 0.0
        factors = (scale is not None and not inside) + 2.0 * (not power_of_two(self.recipe.p_scale))
        if self.form.arrangement == "stream":
            blocks = torch.ceil(n / self.size).clamp(min=1.0)
            first, second = self._partial_sums(min(self.size, CHUNK))
            more = blocks - 1
            rows = 4 / blocks + 2 * more / 3
            of_o, of_terms = more / 3 + rows + (1 + factors), more / 6 + extra
        elif self.form.arrangement == "split":
            first, second = partial_sums(n / self.parts, CHUNK)
            of_o, of_terms = torch.full_like(n, 1 + factors), torch.full_like(n, extra)
            rows = torch.zeros_like(n)  # in _merge
        else:
            first, second = self._partial_sums(self.chunk)
            rows = 4 + n / 768
            of_o, of_terms = rows + (factors + (not self.early)), torch.full_like(n, extra + self.early)
        if (
            self.fine
        ):  # equal addends are rounded alike at each step, as long as their sum stays in one binade
            first, second = first * b.heads.repeats, second * b.heads.repeats
        self.inner = (first, second)
        self.square = square
        if self.form.arrangement != "split":
            of_o, of_terms = of_o + first, of_terms + second
        self.var.addcmul_(b.o2, u2 * of_o)
        self.var.addcmul_(square, u2 * of_terms)
        tiny = self._tiny(n)
        self.var += tiny if b.nonzero is None else tiny.where(b.nonzero, 0.0)
        self.var += math.exp(2 * NEGLIGIBLE) * b.gross[1]
        self.lse += u2 * rows

    def _partial_sums(self, chunk: float | Tensor) -> tuple[Tensor, Tensor]:
        """`partial_sums` of the keys that rows see; recipes and forms of one chunk share them."""
        if isinstance(chunk, Tensor):
            return partial_sums(self.b.keys_seen, chunk)
        key = ("partial sums", chunk)
        if key not in self.b.kept:
            self.b.kept[key] = partial_sums(self.b.keys_seen, chunk)
        return self.b.kept[key]

    def _tiny(self, n: Tensor) -> Tensor:
        """Sums of n subnormal terms and their quotient, each on the base's own spacing: a column."""
        b = self.b
        least = get_format(self.recipe.base).min_subnormal ** 2 / 12
        l = b.wide_l * (1.0 if self.form.subtract_max else torch.exp(b.wide_m))  # noqa: E741
        sums = n if self.early else n / (l * l)
        return least * (sums + 2)

    def _whole(self) -> None:
        """Rounded row sum and accumulator of a row in one piece."""
        b, r = self.b, self.recipe
        row_sum, acc = rounded(r, "row_sum"), rounded(r, "acc")
        if row_sum is not None and self.form.arrangement == "whole":
            l = b.l / self.drop  # noqa: E741
            relative = (binade(l, row_sum) * 2.0 ** (1 - row_sum.precision) / l).double() ** 2 / 12
            relative = relative * (2 if b.p_.extras.sinks is not None else 1)
            self.var += relative * b.o2
            self.lse += relative
        if acc is not None and self.form.arrangement == "whole":
            # Held are codes of V times P's factor, and the row sum where that divides last.
            unit = r.p_scale / self._v_scale() * (1.0 if self.early else (b.l / self.drop).double())
            own = torch.maximum(C2 * acc.unit_roundoff**2 * b.o2, (acc.min_subnormal / unit) ** 2 / 12)
            self.var += own if b.nonzero is None else own.where(b.nonzero, 0.0)
