"""How large an error of the whole layer is normal, and how large none may be: what its parts add, carried to its end.

Errors are against the FP64 layer on the *stored* X and weights. A store of x in a format has variance ulp(x)²/12, a sum
that of `partial_sums`. With δ the error of what goes in and J = I − (1 + n nᵀ)/D:

    q, k, v:  Σ x²w² and its sum's order, the store, the turn (cos² and sin² of the two channels), the store as q, k, v
    y:        the attention's own `Expectation`, and what q, k, v carry in, to first order of softmax:
              δo_i = scale·Σ_j p_ij (v_j − o_i)(δq_i·k_j + q_i·δk_j) + Σ_j p_ij δv_j
    z:        Σ_c W_cd² Var(y_c), the sum, the store.   residual: + the store
    norm:     J δ / σ, times γ, statistics in the base, the store

δq_i is one error for all keys of a row and δk_j one for all channels of z, so those two are carried through W_O before
they are squared: value rows are u_j = v_j W_O there. The ceilings are the same chain with |·| in place of squares; of
softmax the exact |Δo| ≤ Σ p_j (e^ε_j − 1)|v_j − o| / Σ p_j e^−ε_j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from harness.error_model import Expectation, expectations
from harness.error_model.form import Form, rounded, within
from harness.error_model.layer_parts import Bounded, Head
from harness.error_model.problem import CHUNK
from harness.error_model.running import C2
from harness.error_model.variance import partial_sums
from harness.formats import FloatFormat, get_format
from harness.layer_store import StoredLayer, layer_recipe, operand_recipe, store_operand, turns
from harness.layer_truth import LayerTruth
from harness.quantize import Stored, quantize
from harness.recipe import TENSORS, Recipe
from harness.rotation import block_size, rotate
from harness.spec import AttentionSpec, LayerSpec, Shape
from harness.truth import reference

SLACK = 1.001


@dataclass(frozen=True)
class LayerExpectation:
    """`out` `[B, 1, T, D]`: what `Expectation` is to attention. `stages`: name → what was true, its variance and its
    bound: q, k, v as stored, y `[B, N, T, H]`, z, residual, out."""

    variance: Tensor
    ceiling: Tensor
    stages: dict[str, Bounded] = field(default_factory=dict)


@torch.no_grad()
def layer_expectations(
    truth: LayerTruth, stored: StoredLayer, shape: Shape, spec: AttentionSpec, layer: LayerSpec, recipe: Recipe,
    forms: Sequence[Form],
) -> dict[Form, LayerExpectation]:  # fmt: skip
    """What a layer is expected to show whose attention sums as each form says. Infinite where nothing is promised:
    where a value may leave its format, and the variance under a limited accumulator."""
    return _Chain(truth, stored, shape, spec, layer, recipe).expectations(tuple(dict.fromkeys(forms)))


@dataclass(frozen=True)
class _Carried:
    """What q's, k's and v's errors do: to y `[B, N, T, H]` the variance by v and by the scores and the bound, to z the
    variance by the scores, `folded`; weights grow by at most `grown` `[B, N, T, 1]`."""

    by_v: Tensor
    by_scores: Tensor
    folded: Tensor
    bound: Tensor
    grown: Tensor


class _Chain:
    def __init__(
        self, truth: LayerTruth, stored: StoredLayer, shape: Shape, spec: AttentionSpec, layer: LayerSpec,
        recipe: Recipe,
    ) -> None:  # fmt: skip
        self.truth, self.stored, self.shape, self.spec, self.layer = truth, stored, shape, spec, layer
        self.recipe, self.at = recipe, layer_recipe(recipe)
        self.u = get_format(recipe.base).unit_roundoff

    def expectations(self, forms: tuple[Form, ...]) -> dict[Form, LayerExpectation]:
        q, k, v = (self._projected(i, name) for i, name in enumerate(TENSORS))
        carried = self._carried(q, k, v)
        return {
            form: self._rest({"q": q, "k": k, "v": v}, carried, *own)
            for form, own in self._own(v, forms).items()
        }

    def _rest(
        self, stages: dict[str, Bounded], carried: _Carried, own: Expectation, more: Tensor
    ) -> LayerExpectation:  # fmt: skip
        """From the attention on: y, z, the residual, LayerNorm."""
        independent = own.variance + carried.by_v
        bound = carried.bound + carried.grown * (own.ceiling + more)
        y = Bounded(self.truth.attention.out, independent + carried.by_scores, bound)
        z = self._z(replace(y, variance=independent), carried.folded)
        size = self.truth.residual.abs() + z.bound
        r = Bounded(
            self.truth.residual, z.variance + self._base(self.truth.residual), z.bound + self.u * size
        )
        r = r.stored(rounded(self.at, "residual"))
        out = self._norm(r)
        variance = torch.where(torch.isnan(out.variance) & torch.isfinite(out.value), math.inf, out.variance)
        out = replace(out, variance=variance)
        return LayerExpectation(
            variance, out.bound * SLACK, {**stages, "y": y, "z": z, "residual": r, "out": out}
        )

    def _base(self, x: Tensor, times: float = 1.0) -> Tensor:
        """So many roundings of x to the base."""
        return times * C2 * self.u**2 * x * x

    # --- products ----------------------------------------------------------------------------------------------------

    def _product(self, x: Stored, w: Stored, incoming: Bounded | None = None) -> Bounded:
        """x wᵀ `[B, 1, T, out]` summed in the base, what comes with `incoming` x carried along."""
        a, b = x.values if incoming is None else incoming.value, w.values[0, 0].mT
        value, n = a @ b, a.shape[-1]
        first, second = (float(t) for t in partial_sums(float(n), CHUNK))
        factors = sum(s.scale is not None and s.scale.shape[3] == 1 for s in (x, w))
        variance = self._base(value, first + factors) + C2 * self.u**2 * second * ((a * a) @ (b * b))
        size = a.abs() if incoming is None else a.abs() + incoming.bound
        gross = size @ b.abs()
        lost = 0.0 if self.recipe.accumulator is None else self.recipe.accumulator.loss(n)
        bound = ((n + 2 + 2 * factors) * self.u + lost) * gross
        if lost:
            variance = torch.full_like(variance, math.inf)
        if incoming is not None:
            variance, bound = variance + incoming.variance @ (b * b), bound + incoming.bound @ b.abs()
        return Bounded(value, variance, bound)

    def _projected(self, index: int, name: str) -> Bounded:
        """q, k or v as attention finds it: projected, turned, stored."""
        made = self._product(self.stored.operand, self.stored.matrices[name])
        heads = self.truth.flat[index].shape[1]
        parts = (made.value, made.variance, made.bound)
        made = Bounded(*(t[:, 0].reshape(t.shape[0], t.shape[2], heads, -1).transpose(1, 2) for t in parts))
        made = made.stored(rounded(self.at, "proj"))
        held = rounded(self.at, "proj")
        if name != "v" and self.layer.rope is not None:
            made, held = (
                self._turned(made, self.layer.rope).stored(rounded(self.at, "rope")),
                rounded(self.at, "rope"),
            )
        return self._as_stored(made, name, held)

    def _turned(self, x: Bounded, rope: float) -> Bounded:
        """Products with cosines that are rounded too (two roundings each), and their sum."""
        angles = turns(rope, torch.arange(self.shape.q_len, device=x.value.device), self.shape.head_dim)
        cos, sin = angles.cos(), angles.sin()
        low, high = x.value.chunk(2, -1)
        value = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
        c2, s2 = torch.cat((cos, cos), -1) ** 2, torch.cat((sin, sin), -1) ** 2
        other = torch.cat((high, low), -1)
        variance = c2 * x.variance + s2 * torch.cat(x.variance.chunk(2, -1)[::-1], -1)
        variance = variance + self._base(x.value, 2) * c2 + self._base(other, 2) * s2 + self._base(value)
        c1, s1 = c2.sqrt(), s2.sqrt()
        bound = c1 * x.bound + s1 * torch.cat(x.bound.chunk(2, -1)[::-1], -1)
        bound = bound + 4 * self.u * (c1 * (x.value.abs() + bound) + s1 * (other.abs() + bound))
        return Bounded(value, variance, bound)

    def _as_stored(self, x: Bounded, name: str, held: FloatFormat | None) -> Bounded:
        """Rounded to the recipe's input format, rotated, scaled and stored."""
        r, inputs = self.recipe, None if self.recipe.inputs is None else get_format(self.recipe.inputs)
        if inputs is not None and not (held is not None and within(held, inputs)):
            x, held = x.stored(inputs), inputs
        if r.rotates(name):
            n = block_size(x.value.shape[-1])
            mean, gross = (t.reshape(*t.shape[:-1], -1, n) for t in (x.variance, x.bound))
            mean, gross = mean.mean(-1).repeat_interleave(n, -1), gross.sum(-1).repeat_interleave(n, -1)
            x, held = Bounded(rotate(x.value), mean, gross / math.sqrt(n)), None
            x = x if inputs is None else x.stored(inputs)
        fmt = None if r.storage[name] == r.base else get_format(r.storage[name])
        if fmt is None:
            return x
        scale = self.qkv[TENSORS.index(name)].scale
        if scale is None and held is not None and within(held, fmt):
            return x
        return x.stored(fmt, scale, r.policy(name) == "saturate")

    @cached_property
    def qkv(self) -> tuple[Stored, Stored, Stored]:
        """q, k and v of the truth, stored."""
        t = self.truth
        q, k, v = (quantize(x, n, self.recipe) for x, n in zip((t.q, t.k, t.v), TENSORS, strict=True))
        return q, k, v

    # --- attention ---------------------------------------------------------------------------------------------------

    def _carried(self, q: Bounded, k: Bounded, v: Bounded) -> _Carried:
        """What the errors of q, k and v do to y and z, whatever the attention adds."""
        shape, w = self.shape, self.stored.matrices["o"].values[0, 0].mT
        parts = []
        folded = torch.zeros_like(self.truth.z)
        for b, n in ((b, n) for b in range(shape.batch) for n in range(shape.heads)):
            g = n // shape.group
            head = Head(shape, self.spec, q, k, b, n, g)
            u = v.value[b, g] @ w[n * shape.head_dim : (n + 1) * shape.head_dim]
            folded[b, 0] += head.scores(u)
            parts.append(
                (
                    head.p2 @ v.variance[b, g],
                    head.scores(v.value[b, g]),
                    *head.bound(v.value[b, g], v.bound[b, g]),
                )
            )
        by_v, by_scores, bound, grown = (
            torch.stack(x).view(shape.batch, shape.heads, *x[0].shape) for x in zip(*parts, strict=True)
        )
        return _Carried(by_v, by_scores, folded, bound, grown)

    def _own(self, v: Bounded, forms: tuple[Form, ...]) -> dict[Form, tuple[Expectation, Tensor]]:
        """The attention's expectation on the truth's q, k and v as stored; and the bound of a further channel, twice
        the largest error of each value row: what those errors add to the bound."""
        q, k, s = self.qkv
        extra = 2 * v.bound.amax(-1, keepdim=True)
        wide = torch.cat([s.values, torch.where(torch.isfinite(extra), extra, 0.0)], -1)
        scale = s.scale
        if scale is not None and scale.shape[3] > 1:
            scale = torch.cat([scale, scale[..., -1:]], -1)
        truth = reference(q.values, k.values, wide, self.spec)
        pairs = [(self.recipe, form) for form in forms]
        found = expectations(
            truth, q.values, k.values, wide, self.spec, pairs, scales=(q.scale, k.scale, scale)
        )
        return {
            form: (
                replace(e, variance=e.variance[..., :-1], ceiling=e.ceiling[..., :-1]),
                e.ceiling[..., -1:],
            )
            for form, e in zip(forms, found, strict=True)
        }

    def _z(self, y: Bounded, folded: Tensor) -> Bounded:
        """Heads joined, stored as the projection reads them, multiplied by W_O, stored."""
        flat = [t.transpose(1, 2).flatten(2)[:, None] for t in (y.value, y.variance, y.bound)]
        joined, operand = Bounded(*flat), store_operand(flat[0], self.recipe)
        how = operand_recipe(self.recipe, "token")
        fmt, held = get_format(how.storage["q"]), rounded(self.recipe, "out")
        kept = fmt.name == self.recipe.base or (
            operand.scale is None and held is not None and within(held, fmt)
        )
        if not kept:
            joined = joined.stored(fmt, operand.scale, how.policy("q") == "saturate")
        made = self._product(operand, self.stored.matrices["o"], joined)
        return Bounded(self.truth.z, made.variance + folded, made.bound).stored(rounded(self.at, "z"))

    # --- LayerNorm ---------------------------------------------------------------------------------------------------

    def _norm(self, r: Bounded) -> Bounded:
        """Var (Jδ)_d = var_d (1 − 2(1 + n_d²)/D) + Σ_d′ var_d′ (1 + n_d n_d′)²/D². Of the bound: centring contracts,
        and σ is a norm of the centred row, so it moves by no more than the rms of what is added to it."""
        t, g, n = self.truth, self.stored.gamma, self.truth.normal
        d = n.shape[-1]
        sums = [(r.variance * n**i).sum(-1, keepdim=True) for i in range(3)]
        var = r.variance * (1 - 2 * (1 + n * n) / d) + (sums[0] + 2 * n * sums[1] + n * n * sums[2]) / d**2
        # Mean: Σ of D terms; centring, ε, the root's halves, the product, γ, β.
        mean2 = C2 * self.u**2 * 2 * (r.value**2).sum(-1, keepdim=True) / d**2
        var = (var.clamp(min=0.0) + mean2 + self._base(n * t.sigma)) / t.sigma**2
        var = (var + self._base(n, 3.0)) * g * g + self._base(g * n) + self._base(t.out)
        own = (d + 2) * self.u
        mean = r.value.abs().mean(-1, keepdim=True) + r.bound.mean(-1, keepdim=True)
        moved = (
            r.bound + r.bound.mean(-1, keepdim=True) + own * mean + self.u * (n.abs() * t.sigma + 2 * mean)
        )
        widened = moved.square().mean(-1, keepdim=True).sqrt() + own * t.sigma
        inside = (moved + n.abs() * widened) / (t.sigma - widened)
        most = math.sqrt(d) + n.abs()
        shift = torch.where(widened < t.sigma, torch.minimum(inside, most), most)
        shift = shift + 6 * self.u * (n.abs() + shift)
        bound = g.abs() * shift + 4 * self.u * (g.abs() * (n.abs() + shift) + t.out.abs())
        bound = torch.where(torch.isinf(r.bound).any(-1, keepdim=True), math.inf, bound)
        return Bounded(t.out, var, bound).stored(rounded(self.at, "norm"))
