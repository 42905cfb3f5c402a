"""Fault directions: how the output moves, to first order, when one thing is slightly wrong (NUMERICS section 5).

Rounding errors are random, faults are not: the error of a kernel with a wrong scale points along ∂o/∂log scale in every
row. For a direction g with error variance σ² (all per element of the output),

    F_i = Σ_c g²/σ²      f_i = √F_i      a_i = ⟨Δ_i, g_i/σ_i²⟩ / f_i

is computed here for every row i and any number of differences Δ; `harness.statistics` makes tests of it. Beside the
named directions, `lost_key` scans every single key: g = −p_j (v_j − o) for key j, in one product (Δ/σ²) Vᵀ.

With p the softmax, o the output, z = scale·q·k, t = tanh(z/softcap) (0 without one), ṡ = z(1 − t²):

    scale         Σ p ṡ (v − o)                        per unit of log scale
    shrink        o                                     the output times 1 + θ
    uniform       mean of the visible v − o             θ of the mass spread evenly
    next key      w (v_next − o), w = exp(s_next − lse) the first key that position hides leaks in
    last key      −p (v_last − o)                       the last visible key is lost
    first key     −p (v_first − o)                      the first one is
    sink          o·p_sink                              the sink is lost from the denominator
    bias          −Σ p b (v − o)                        the bias shrinks by θ
    softcap       Σ p (s − ṡ)(v − o)                    per unit of log softcap
    truncated O   −½ulp(o) sign(o)                      the output is cut instead of rounded
    truncated P   −Σ p ½ulp(x)/x v                      so is P (x is what is cast)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.attention.rows import Problem, key_range, visible
from harness.by_head import head_parts, of_heads, scaled
from harness.finite import all_finite, finite_or_zero
from harness.formats import get_format
from harness.operands import Extras, squares_fit_fp32
from harness.recipe import Recipe
from harness.rounding import ulp
from harness.sample import Sample
from harness.spec import AttentionSpec, Shape
from harness.truth import Truth

BLOCK = 2**21  # scores of a block of rows, all heads: 8 MB in FP32
EXACT = 2**18  # up to so many scores everything runs in FP64
DIRECTIONS = {
    "scale": "the softmax scale is off",
    "shrink": "the output is scaled",
    "uniform": "mass is spread evenly over the visible keys",
    "next key": "the first key hidden by position leaks in",
    "last key": "the last visible key is lost",
    "first key": "the first visible key is lost",
    "sink": "the sink is missing from the denominator",
    "bias": "the bias is scaled",
    "softcap": "the softcap is off",
    "truncated O": "the output is truncated, not rounded",
    "truncated P": "P is truncated, not rounded",
}


@dataclass(frozen=True)
class Call:
    """One judged call: stored values q `[B, H, L, D]`, k, v in FP64, rules, truth, σ² `[B, H, L, E]`, and the rows
    that directions are computed for (None: all). `k` and `v` of a long context are codes in a narrow type, `scales`
    theirs: `values` makes FP64 of one kv head at a time."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    extras: Extras
    recipe: Recipe
    truth: Truth
    variance: Tensor
    sample: Sample | None = None
    scales: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def rows(self) -> Sample:
        """The rows looked at."""
        return self.sample or Sample(self.q.shape[2])

    @property
    def shape(self) -> Shape:
        (b, h, n, d), (_, hk, s, e) = self.q.shape, self.v.shape
        return Shape(b, h, n, d, kv_heads=hk, kv_len=s, value_dim=e)

    def values(self, name: str, kv: slice) -> Tensor:
        """Stored values of k or v `[B, kv, S, D]`, FP64."""
        x, scale = (self.k, self.scales[0]) if name == "k" else (self.v, self.scales[1])
        return scaled(x, scale, kv)

    def by_head(self) -> Iterator[tuple[slice, Call]]:
        """The call as it is, or of a long context a kv head at a time, with its query heads."""
        shape = self.shape
        parts = head_parts(shape)
        if len(parts) == 1 and self.k.dtype is torch.float64 and self.scales == (None, None):
            yield parts[0][0], self
            return
        for heads, kv in parts:
            truth = Truth(self.truth.out[:, heads], self.truth.lse[:, heads], self.truth.row_max[:, heads])
            extras = of_heads(self.extras, heads)
            k, v = (self.values(n, kv) for n in "kv")
            yield heads, replace(
                self, q=self.q[:, heads], k=k, v=v, extras=extras, truth=truth, variance=self.variance[:, heads],
                scales=(None, None),
            )  # fmt: skip


@dataclass(frozen=True)
class Projection:
    """`a` `[differences, directions, rows]` and `f` `[directions, rows]`, of the rows looked at; `rms` is the
    root mean square of each direction's elements. `keys`: for each difference and key, Σ_i n_ij and Σ_i n_ij² of the
    numerators n = ⟨Δ, g/σ²⟩ of a lost key, `[differences, S]`, and how many rows see the key, `[S]`.

    A row whose truth or variance is not finite, or whose variance is 0, has f = a = 0 everywhere.
    """

    names: tuple[str, ...]
    a: Tensor
    f: Tensor
    rms: Tensor
    key_sum: Tensor
    key_square: Tensor
    key_rows: Tensor


def project(call: Call, differences: Sequence[Tensor]) -> Projection:
    """The directions of a call, and each difference `[B, H, rows, E]` along them, for the rows looked at."""
    found = [(heads, _project(part, [d[:, heads] for d in differences])) for heads, part in call.by_head()]
    if len(found) == 1:
        return found[0][1]
    first, count = found[0][1], call.rows.count

    def joined(parts: Sequence[Tensor]) -> Tensor:
        """Rows of each part's heads, `[…, B·heads·rows]`, in the order of all heads."""
        shaped = [x.reshape(*x.shape[:-1], call.shape.batch, -1, count) for x in parts]
        return torch.cat(shaped, -2).flatten(-3)

    share = [len(range(*heads.indices(call.shape.heads))) / call.shape.heads for heads, _ in found]
    energy = torch.stack([p.rms**2 * n for n, (_, p) in zip(share, found, strict=True)]).sum(0)
    key_sum, key_square, key_rows = (
        torch.stack([getattr(p, n) for _, p in found]).sum(0) for n in ("key_sum", "key_square", "key_rows")
    )
    return Projection(
        first.names, joined([p.a for _, p in found]), joined([p.f for _, p in found]), energy.sqrt(), key_sum,
        key_square, key_rows,
    )  # fmt: skip


def _project(call: Call, differences: Sequence[Tensor]) -> Projection:
    walk = _Walk(call)
    deltas = [finite_or_zero(x.double()) for x in differences]
    parts = [walk.block(rows, [d[:, :, taken] for d in deltas]) for rows, taken in walk.blocks()]
    names = walk.names
    shape = call.shape
    rows_of = (shape.batch, shape.heads, call.rows.count)
    a, f = (torch.cat([part[i] for part in parts], -1) for i in (0, 1))
    square = torch.stack([part[2] for part in parts]).sum(0)
    key_sum, key_square, key_rows = (torch.stack([p[i] for p in parts]).sum(0) for i in (3, 4, 5))
    count = max(1, math.prod(rows_of) * shape.E)
    return Projection(
        names, a.reshape(len(deltas), len(names), math.prod(rows_of)), f.reshape(len(names), math.prod(rows_of)),
        (square / count).sqrt(), key_sum, key_square, key_rows,
    )  # fmt: skip


def key_powers(call: Call) -> tuple[Tensor, Tensor]:
    """Of the direction of each lost key, over the rows looked at: Σ g²/σ² and Σ g², `[S]`."""
    parts = []
    for _, part in call.by_head():
        walk = _Walk(part)
        parts += [walk.keys(rows) for rows, _ in walk.blocks()]
    power, square = (torch.stack([part[i] for part in parts]).sum(0) for i in (0, 1))
    return power, square


Block = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class _Walk:
    """Blocks of rows of all heads; within one, everything is folded to `[B, Hkv, G·rows, …]` as algorithms do."""

    def __init__(self, call: Call) -> None:
        self.call, self.shape = call, call.shape
        pairs = self.shape.batch * self.shape.heads * self.shape.q_len * self.shape.S
        self.dtype = torch.float64 if pairs <= EXACT or not squares_fit_fp32(call.v) else torch.float32
        q, k, v = (finite_or_zero(x.double()).to(self.dtype) for x in (call.q, call.k, call.v))
        self.p = Problem(self.shape, call.spec, call.extras, q, k, v, None, None, None, True)
        self.scale = call.spec.scale_for(self.shape.head_dim)
        self.names = tuple(self._names())
        unusable = [
            ~torch.isfinite(x).all(-1, keepdim=True)
            for x in (call.truth.out, call.variance)
            if not all_finite(x)
        ]
        variance, self.out = call.variance, call.truth.out
        for rows in unusable:
            variance, self.out = variance.masked_fill(rows, 0.0), self.out.masked_fill(rows, 0.0)
        # An element of far smaller variance than its row (an exact zero of V) must not rule the row alone.
        floor = 1e-3 * variance.mean(-1, keepdim=True) if variance.shape[-1] else variance
        variance = torch.maximum(variance, floor)
        self.weight = (1 / variance).masked_fill_(variance <= 0, 0.0)

    def _names(self) -> Iterator[str]:
        spec, extras = self.call.spec, self.call.extras
        absent = {
            "next key": spec.right is None, "sink": extras.sinks is None, "bias": extras.bias is None,
            "softcap": spec.softcap is None, "truncated O": False,
        }  # fmt: skip
        return (name for name in DIRECTIONS if not absent.get(name, False))

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Slices of the call's rows, and of those looked at."""
        heads = max(1, self.shape.batch * self.shape.heads * max(1, self.shape.S))
        return self.call.rows.parts(max(1, BLOCK // heads))

    def _reach(self, rows: slice) -> slice:
        """The keys that a block of rows is worked on with: all of a small call, else those that position shows and the
        next."""
        if self.dtype is torch.float64 or self.call.spec.right is None:
            return slice(0, self.shape.S)
        return slice(0, min(self.shape.S, key_range(self.p, rows).stop + 1))

    def _start(self, rows: slice) -> tuple[Tensor, ...]:
        """Of a block of rows: weight, o, lse, z, s, ∂s/∂log scale and p."""
        p, fold = self.p, self.p.fold
        weight, o, lse = (
            fold(x[:, :, rows]).to(self.dtype)
            for x in (self.weight, self.out, self.call.truth.lse[..., None])
        )
        keys = self._reach(rows)
        z = (fold(p.q[:, :, rows]) @ p.k[:, :, keys].mT) * self.scale
        seen = visible(p, rows, keys)
        s, slope = self._scores(z, rows)
        lse = torch.where(torch.isfinite(lse), lse, math.inf)  # a row without mass weighs nothing
        prob = torch.exp(s - lse)
        return weight, o, lse, z, s, slope, prob if seen is None else prob.masked_fill(~seen, 0.0)

    def keys(self, rows: slice) -> tuple[Tensor, Tensor]:
        """`key_powers` of a block of rows."""
        weight, o, *_, prob = self._start(rows)
        v, p2 = self.p.v[:, :, self._reach(rows)], prob * prob
        found = []
        for w in (weight, torch.ones_like(weight)):  # Σ_c w (v − o)², multiplied out
            far = w @ (v * v).mT - 2 * (w * o) @ v.mT + (w * o * o).sum(-1, keepdim=True)
            found.append(self._of_all_keys((p2 * far.clamp(min=0.0)).double().sum((0, 1, 2))))
        return found[0], found[1]

    def block(self, rows: slice, deltas: Sequence[Tensor]) -> Block:
        fold = self.p.fold
        weight, o, lse, z, s, slope, prob = self._start(rows)
        seen = visible(self.p, rows, self._reach(rows))
        g = torch.stack(list(self._directions(rows, z, s, slope, prob, seen, o, lse))).double()
        weight, w_g = weight.double(), g * weight.double()
        power = (g * w_g).sum(-1)
        f = power.sqrt()
        folded = [fold(d) for d in deltas]
        a = torch.stack([(w_g * d).sum(-1) for d in folded]) if folded else f.new_zeros(0, *f.shape)
        a = torch.where(f > 0, a / f, 0.0)
        lost = self._lost_keys(prob, o, weight.to(self.dtype), folded)
        return self._unfold(a), self._unfold(f), (g * g).sum((1, 2, 3, 4)), *lost

    def _of_all_keys(self, x: Tensor) -> Tensor:
        """`[keys]` of a block, 0 for those it does not reach."""
        rest = self.shape.S - x.shape[0]
        return torch.nn.functional.pad(x, (0, rest)) if rest else x

    def _unfold(self, x: Tensor) -> Tensor:
        """`[…, B, Hkv, G·rows]` → `[…, B, H, rows]`: blocks of rows are then joined along the last axis."""
        return x.reshape(*x.shape[:-2], self.shape.heads, x.shape[-1] // self.shape.group)

    def _scores(self, z: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Scores with softcap and bias, and ∂s/∂log scale."""
        s, slope, cap, extras = z, z, self.call.spec.softcap, self.call.extras
        if cap is not None:
            t = torch.tanh(z / cap)
            s, slope = cap * t, z * (1 - t * t)
        if extras.bias is not None:
            s = s + self._bias(rows)
        return s, slope

    def _bias(self, rows: slice) -> Tensor:
        bias = self.call.extras.bias
        assert bias is not None
        bias = bias[:, :, rows] if bias.shape[2] > 1 else bias
        keys = self._reach(rows)
        bias = bias[..., keys] if bias.shape[3] > 1 else bias
        bias = torch.where(torch.isfinite(bias), bias, 0.0).to(self.dtype)
        return self.p.fold(bias.expand(-1, -1, rows.stop - rows.start, keys.stop))

    def _directions(
        self,
        rows: slice,
        z: Tensor,
        s: Tensor,
        slope: Tensor,
        prob: Tensor,
        seen: Tensor | None,
        o: Tensor,
        lse: Tensor,
    ) -> Iterator[Tensor]:
        v = self.p.v[:, :, : prob.shape[-1]]
        for name in self.names:
            if name == "scale":
                yield _moved(prob * slope, v, o)
            elif name == "shrink":
                yield o
            elif name == "uniform":
                shown = torch.ones_like(prob) if seen is None else seen.to(self.dtype).expand_as(prob)
                count = shown.sum(-1, keepdim=True)
                yield torch.where(count > 0, shown @ v / count.clamp(min=1) - o, 0.0)
            elif name in ("next key", "last key", "first key"):
                yield self._one_key(name, rows, s, prob, o, lse)
            elif name == "sink":
                sinks = self.call.extras.sinks
                assert sinks is not None
                logit = self.p.fold(
                    sinks.to(self.dtype).view(1, -1, 1, 1).expand(-1, -1, rows.stop - rows.start, -1)
                )
                yield o * torch.exp(logit - lse)
            elif name == "bias":
                yield -_moved(prob * self._bias(rows), v, o)
            elif name == "softcap":
                bias = self._bias(rows) if self.call.extras.bias is not None else 0.0
                yield _moved(prob * (s - bias - slope), v, o)
            elif name == "truncated O":
                yield -0.5 * ulp(o.double(), self.call.recipe.out_format).to(self.dtype) * o.sign()
            else:
                yield self._truncated(prob, lse, s, v)

    def _one_key(self, name: str, rows: slice, s: Tensor, prob: Tensor, o: Tensor, lse: Tensor) -> Tensor:
        """Rows gain the key after those their position shows, or lose the first or last that weighs anything."""
        n = prob.shape[-1]
        if n == 0:
            return torch.zeros_like(o)
        if name == "next key":
            index = self._next(rows)
            valid = (index >= 0) & (index < self._lengths())
            index = index.clamp(0, n - 1).expand(*prob.shape[:-1], 1)
            w = torch.exp(s.gather(-1, index) - lse).clamp(max=1e3) * valid
            return _pick(self.p.v, index, w, o)
        shown = prob > 0
        some = shown.any(-1, keepdim=True)
        first = shown.to(torch.int8).argmax(-1, keepdim=True)
        index = (
            first if name == "first key" else n - 1 - shown.flip(-1).to(torch.int8).argmax(-1, keepdim=True)
        )
        return -_pick(self.p.v, index, prob.gather(-1, index) * some, o)

    def _lengths(self) -> Tensor:
        lens = self.call.extras.kv_lens
        return torch.tensor(self.shape.S, device=self.p.q.device) if lens is None else lens.view(-1, 1, 1, 1)

    def _next(self, rows: slice) -> Tensor:
        """The key after the last one that position shows, `[B|1, 1, G·rows, 1]`."""
        spec, lengths = self.call.spec, self._lengths()
        extras = self.call.extras
        i = extras.at(rows, self.p.q.device).view(1, 1, -1, 1)
        position = i + (lengths - extras.length(self.shape.q_len) if spec.align == "bottom-right" else 0)
        return (position + (spec.right or 0) + 1).repeat(1, 1, self.shape.group, 1)

    def _truncated(self, prob: Tensor, lse: Tensor, s: Tensor, v: Tensor) -> Tensor:
        """Half an ulp less of each P that is cast. It moves o by less where the sum takes P after the cast."""
        recipe = self.call.recipe
        fmt = get_format(recipe.format_of("probs"))
        top = s.masked_fill(prob == 0, -math.inf).amax(-1, keepdim=True) if s.shape[-1] else lse
        top = torch.where(torch.isfinite(top), top, 0.0)
        late = recipe.normalise == "late"
        x = (torch.exp(s - top) if late else prob) * recipe.p_scale
        x = torch.where(prob > 0, x, 0.0)
        half = 0.5 * torch.minimum(ulp(x, fmt), x)
        share = torch.where(x > 0, half / x, 0.0)
        if late:  # the row's largest P is exact
            share = share * (s < top)
        if recipe.row_sum == "after":
            return -_moved(prob * share, v, prob @ v)
        return -((prob * share) @ v)

    def _lost_keys(
        self, prob: Tensor, o: Tensor, weight: Tensor, deltas: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        shown = self._of_all_keys((prob > 0).double().sum((0, 1, 2)))
        v, sums, squares = self.p.v[:, :, : prob.shape[-1]], [], []
        for delta in deltas:
            w = delta.to(self.dtype) * weight
            n = prob * ((w * o).sum(-1, keepdim=True) - w @ v.mT)
            sums.append(self._of_all_keys(n.double().sum((0, 1, 2))))
            squares.append(self._of_all_keys((n * n).double().sum((0, 1, 2))))
        empty = shown.new_zeros(0, self.shape.S)
        return (torch.stack(sums) if sums else empty), (torch.stack(squares) if squares else empty), shown


def _moved(w: Tensor, v: Tensor, o: Tensor) -> Tensor:
    """Σ w (v − o)."""
    return w @ v - o * w.sum(-1, keepdim=True)


def _pick(v: Tensor, index: Tensor, w: Tensor, o: Tensor) -> Tensor:
    """w (v_index − o), with one key a row."""
    return w * (v.gather(2, index.expand(-1, -1, -1, v.shape[-1])) - o)
