"""The groups of keys a form works through: their reference maxima, their sums, and the errors of adding them up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.error_model.block import Block
from harness.error_model.form import Form, rounded, roundoff, within
from harness.error_model.problem import CHUNK, NEGLIGIBLE
from harness.formats import FloatFormat, get_format
from harness.recipe import Recipe

C2 = 1 / (8 * math.log(2))  # mean of (error / u·x)² over log-uniform significands


def binade(x: Tensor, fmt: FloatFormat) -> Tensor:
    """2^⌊log2 x⌋ for x ≥ 0, at least the smallest normal of `fmt`."""
    return power(x.abs()).clamp_(min=fmt.min_normal)


def power(x: Tensor) -> Tensor:
    """±2^⌊log2 |x|⌋ of each element in place, 0 of one below the normal numbers of its type."""
    if x.dtype is torch.float32:
        x.view(torch.int32).bitwise_and_(-0x800000)
    else:
        x.view(torch.int64).bitwise_and_(-0x10000000000000)
    return x


class Groups:
    """Variance so far of a block under one recipe and form; errors of one sign are kept apart, to be squared whole."""

    def __init__(self, b: Block, recipe: Recipe, form: Form) -> None:
        self.b, self.recipe, self.form = b, recipe, form
        self.u = get_format(recipe.base).unit_roundoff
        self.early = form.normalises_early(recipe)
        # Where the output keeps the base, the base's own roundings are the error; else they are a floor, and the
        # head's mean square stands for the keys'.
        self.fine = rounded(recipe, "out") is None
        self.size, self.parts = form.groups(b.span.stop - b.span.start)
        self.chunk: float | Tensor = CHUNK
        length = b.p_.shape.q_len
        if form.alone and b.rows.stop > length - form.alone and b.p.shape[-1] > CHUNK:
            last = torch.arange(b.rows.start, b.rows.stop, device=b.m.device) >= length - form.alone
            last = last.repeat(b.group)[None, :, None]
            self.chunk = torch.where(last, float(b.p.shape[-1]), float(CHUNK)).to(torch.float64)
        # Groups count from where some row's keys start; of this block's they may cut the first and the last.
        self.lead = (b.keys.start - b.span.start) % self.size if form.arrangement != "whole" else 0
        self.here = max(1, -(-(self.lead + b.p.shape[-1]) // self.size))
        self.var = torch.zeros_like(b.o)
        self.bias, self.biased = torch.zeros_like(b.o), False  # errors of one sign, and whether there are any
        self.lse = torch.zeros_like(b.m, dtype=b.o.dtype)
        self.lse_bias = torch.zeros_like(self.lse)
        self.inner = (
            self.lse,
            self.lse,
        )  # `partial_sums` of a group, and Σ p²v² about 0: set with the base's errors
        self.square = self.var
        self._reference()

    # -- the exponent's reference: a row's maximum, a block's running maximum, a part's own, or 0

    def _reference(self) -> None:
        b = self.b
        self.drop = torch.ones_like(b.l)  # exp(reference − m), `[n, R, parts | 1]`
        self.peak: Tensor | None = None  # the largest p under each reference
        if not self.form.subtract_max:
            self.drop = torch.exp(-b.m)
        elif self.form.arrangement != "whole" and b.p.shape[-1]:
            self.peak = self._grouped(b.p).amax(-1)
            if self.form.arrangement == "stream":
                self.peak = torch.maximum(self.peak.cummax(-1).values, b.sink_e / b.l)
            # A group without a key that weighs has no maximum: any reference does, since every p in it is 0.
            self.drop = (self.peak * b.l).clamp(min=math.exp(NEGLIGIBLE))
        elif b.p.shape[-1]:
            self.peak = torch.maximum(b.p.amax(-1, keepdim=True), b.sink_e / b.l)

    def _grouped(self, x: Tensor) -> Tensor:
        """`[n, R, keys]` as `[n, R, parts, size]`, zeros around."""
        rest = self.here * self.size - self.lead - x.shape[-1]
        x = torch.nn.functional.pad(x, (self.lead, rest)) if self.lead or rest else x
        return x.view(*x.shape[:2], self.here, self.size)

    def _facing(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and `x` `[n, R, parts]` in shapes that broadcast."""
        if x.shape[-1] == 1:
            return self.b.p, x
        if self.lead or self.b.p.shape[-1] != self.here * self.size:
            return self.b.p, self._per_key(x)
        return self._grouped(self.b.p), x[..., None]

    def _per_key(self, x: Tensor) -> Tensor:
        """`[n, R, parts]` → one for each key."""
        if x.shape[-1] == 1:
            return x
        whole = x[..., None].expand(-1, -1, -1, self.size).flatten(2)
        return whole[..., self.lead : self.lead + self.b.p.shape[-1]]

    # -- running sums in a narrow format

    def _partials(self) -> tuple[Tensor, Tensor]:
        """Each group's Σ p v `[n, R, parts, E]` and Σ p `[n, R, parts]`, in FP64."""
        b = self.b
        p = self._grouped(b.p)
        v = b.heads.v[:, b.keys].to(p.dtype)
        v = torch.nn.functional.pad(v, (0, 0, self.lead, self.here * self.size - self.lead - v.shape[1]))
        v = v.view(v.shape[0], self.here, self.size, v.shape[-1])
        out = (p.transpose(1, 2) @ v).transpose(1, 2)
        return out.double(), p.sum(-1).double()

    def _stream(self) -> None:
        """Every step of l ← a·l + part and o ← a·o + part is rounded: what is lost is known from exact sums."""
        b, r = self.b, self.recipe
        parts, masses = self._partials()
        sink = (b.sink_e / b.l).double()
        sums, totals = parts.cumsum(2), masses.cumsum(2) + sink
        unit = (b.l / self.drop).double()  # of l as it is held, per unit of p
        before = torch.nn.functional.pad(self.drop[..., :-1], (1, 0))
        before[..., :1] = b.sink_e
        moved = ((self.drop > before) & (before > math.exp(NEGLIGIBLE))).double()
        gap = (before / self.drop).double().clamp(min=1e-30).log()
        held_l = torch.nn.functional.pad(totals[..., :-1], (1, 0)) + (0.0 * sink)
        held_l[..., :1] += sink
        held_o = torch.nn.functional.pad(sums[:, :, :-1], (0, 0, 1, 0))
        # a·(…): every earlier key keeps a common relative error; it acts on their Σ p (v − o).
        u_a2 = roundoff(r, "rescale") ** 2
        shift2 = roundoff(r, "shifted") ** 2 * gap**2
        change = (C2 * (u_a2 + shift2) * moved)[..., None]
        self.var += (change * (held_o - held_l[..., None] * b.o[:, :, None]) ** 2).sum(2)
        self.lse += (change[..., 0] * held_l**2).sum(-1, keepdim=True)
        lost_l = self._running(rounded(r, "row_sum"), totals, masses, held_l, moved, unit)
        scale = r.p_scale / self._v_scale()
        lost_o = self._running(
            rounded(r, "acc"), sums, parts, held_o, moved[..., None], unit[..., None] * scale[:, :, None]
        )
        self.var += lost_o[0] + lost_l[0] * b.o**2
        self.biased = True
        self.bias += lost_o[1] - lost_l[1] * b.o
        self.lse += lost_l[0]
        self.lse_bias += lost_l[1]
        self.var += C2 * roundoff(r, "block_out") ** 2 * (parts**2).sum(2)
        u_l = roundoff(r, "row_sum")  # the block's own sum is stored before it is added
        parts_l = C2 * u_l**2 * (masses**2).sum(-1, keepdim=True)
        self.var += parts_l * b.o**2
        self.lse += parts_l

    def _v_scale(self) -> Tensor:
        x = self.b.heads.scale("v")
        if x is None or max(x.shape[1:]) > 1:
            return torch.ones_like(self.b.m[:, :1], dtype=self.b.o.dtype)
        return x

    @staticmethod
    def _running(
        fmt: FloatFormat | None, after: Tensor, part: Tensor, held: Tensor, moved: Tensor, unit: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Variance and sure loss of a running sum over axis 2 held in `fmt`, in units of the final value."""
        if fmt is None:
            zero = torch.zeros_like(after[:, :, 0])
            return (zero, zero) if after.dim() == 4 else (zero[..., None], zero[..., None])
        step = binade(after * unit, fmt) * 2.0 ** (1 - fmt.precision) / unit
        stuck = (part.abs() < step / 2) & (moved == 0)
        sure = torch.where(stuck, -part, 0.0).sum(2)
        first = (held == 0) & (part == after)  # nothing held: the part is stored as it is
        noise = torch.where(stuck | first, 0.0, step**2 / 12)
        noise = noise + moved * C2 * fmt.unit_roundoff**2 * held**2
        noise = noise.sum(2)
        return (noise, sure) if after.dim() == 4 else (noise[..., None], sure[..., None])

    def _merge(self) -> None:
        """Parts attended apart: each has its own lse, output and weight; a sink is one more part, of value 0."""
        b, u2 = self.b, C2 * self.u**2
        parts, masses = self._partials()
        share = (b.sink_e / b.l).double()
        some = masses > 0
        lse = b.lse.double() + torch.where(some, masses, 1.0).log()
        log = lse - (b.m + self.drop.log()).double()
        most = torch.where(some, lse, -math.inf).amax(-1, keepdim=True)
        sink = None if b.sink is None else (b.sink + b.m).double()
        most = most if sink is None else torch.maximum(most, sink)
        gap = torch.where(some, lse - most, 0.0)
        # The weight of a part: its lse (log, sum), the difference, exp.
        weight = torch.where(some, u2 * (lse**2 + log**2) + self._weight_error(gap), 0.0)
        self.var += (weight[..., None] * (parts - masses[..., None] * b.o[:, :, None]) ** 2).sum(2)
        self.lse += (weight * masses**2).sum(-1, keepdim=True)
        if sink is not None:
            alone = self._weight_error(torch.where(share > 0, sink - most, 0.0)) * share**2
            self.var += alone * b.o**2
            self.lse += alone
        self._merge_sums(
            parts,
            masses,
            share,
            gap < 0,
            torch.exp(b.lse.double() - most.masked_fill(most == -math.inf, 0.0)),
        )

    def _weight_error(self, gap: Tensor) -> Tensor:
        """Relative variance of exp(gap) with the difference stored and the result."""
        shifted, rescale = roundoff(self.recipe, "shifted"), roundoff(self.recipe, "rescale")
        return C2 * ((self.u**2 + shifted**2) * gap**2 + self.u**2 + rescale**2 * (gap < 0))

    def _merge_sums(self, parts: Tensor, masses: Tensor, share: Tensor, scaled: Tensor, unit: Tensor) -> None:
        """o_i: P·V stored, divided, stored; times its weight (1 for the heaviest), stored; added, stored."""
        b, r, u2 = self.b, self.recipe, C2 * self.u**2
        acc, row_sum, stored = (rounded(r, s) for s in ("acc", "row_sum", "block_out"))
        u_acc2, u_l2 = self.u**2 + roundoff(r, "acc") ** 2, self.u**2 + roundoff(r, "row_sum") ** 2
        first, second = self.inner
        once = u2 * (1 + first) + C2 * u_acc2
        if stored is not None and not (self.early and acc is not None and within(acc, stored)):
            once = once + C2 * stored.unit_roundoff**2
        squares = parts**2
        self.var += once * squares.sum(2) + u2 * second * self.square
        self.var += C2 * u_acc2 * (squares * scaled[..., None]).sum(2)
        # Nothing is rounded where one side of a sum is 0. What is added to a narrow sum may be lost on it.
        sums, totals = parts.cumsum(2), masses.cumsum(-1)
        before, held = (
            torch.nn.functional.pad(sums[:, :, :-1], (0, 0, 1, 0)),
            torch.nn.functional.pad(totals[..., :-1], (1, 0)),
        )
        added = (masses > 0) & (held > 0)
        still = torch.zeros_like(held)
        lost_o = self._running(acc, sums, parts, before, still[..., None], unit[..., None])
        lost_l = self._running(row_sum, totals, masses, held, still, unit)
        self.var += lost_o[0] + u2 * (sums**2 * added[..., None]).sum(2)
        self.biased = True
        self.bias += lost_o[1] - lost_l[1] * b.o
        self.lse_bias += lost_l[1]
        rows = lost_l[0] + u2 * (totals**2 * added).sum(-1, keepdim=True) + C2 * u_l2 * (share > 0)
        # A part's own l: its error leaves w_i·o_i alone (lse_i and 1/l_i cancel) but not the sum of weights.
        inner = (4 * u2 + C2 * (0.0 if row_sum is None else row_sum.unit_roundoff**2)) * masses.square().sum(
            -1, keepdim=True
        )
        self.var += (rows + inner + u2) * b.o**2
        self.lse += rows + inner
