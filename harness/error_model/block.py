"""The products of a block's weights and values that errors ride on, each computed once for all recipes and forms."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from harness.error_model.form import rounded
from harness.error_model.problem import CHUNK, Heads, early
from harness.error_model.weights import Weights
from harness.formats import get_format
from harness.recipe import Recipe

SLIGHT = 1e-3


class Block(Weights):
    """The weights of some rows, and sums over their keys."""

    def __init__(self, heads: Heads, rows: slice) -> None:
        super().__init__(heads, rows)
        self.kept: dict[object, tuple[Tensor, Tensor]] = {}  # what several pairs of recipe and form share

    @cached_property
    def alive_gross(self) -> Tensor:
        """Σ_j |v_jc| over the keys that weigh something, FP64."""
        return ((self.p > 0).to(self.p.dtype) @ self.heads.abs_v[:, self.keys]).double()

    @cached_property
    def wide_m(self) -> Tensor:
        return self.m.double()

    @cached_property
    def wide_l(self) -> Tensor:
        return self.l.double()

    @cached_property
    def wide_lse(self) -> Tensor:
        return self.lse.double()

    @cached_property
    def o2(self) -> Tensor:
        return self.o.square()

    @cached_property
    def abs_o(self) -> Tensor:
        return self.o.abs()

    @cached_property
    def nonzero(self) -> Tensor | None:
        """Where the output is not 0; None: everywhere."""
        where = self.o != 0
        return None if bool(where.all()) else where

    @cached_property
    def keys_seen(self) -> Tensor:
        """`count` in FP64."""
        return self.count.double()

    @cached_property
    def mean_weight_square(self) -> Tensor:
        """Σ_j p_j² times the head's mean of v_jc², FP64: `weight_square` where the sum is not what decides."""
        return self.p2_sum.double() * (self.heads.mean_square.double() + self.heads.centre**2)

    @property
    def lin(self) -> Tensor:
        """scale·q·k; anything finite where a key is weightless."""
        return self.d + self.m if self._lin is None else self._lin

    @property
    def capped(self) -> Tensor:
        """The same after softcap."""
        return self.d + self.m if self._capped is None else self._capped

    @property
    def plain(self) -> bool:
        """Whether s = scale·q·k, without softcap and bias."""
        return self._lin is None

    def leaves(self, recipe: Recipe) -> Tensor:
        """Rows `[n, R, 1]` in which a score may be more than its format holds: nothing is promised there."""
        key = ("leaves", recipe.format_of("scores_raw"), recipe.format_of("scores"))
        if key not in self.kept:
            self.kept[key] = (self._leaves(recipe), self.m)
        return self.kept[key][0]

    def _leaves(self, recipe: Recipe) -> Tensor:
        never = torch.zeros_like(self.empty)
        raw, stored = (get_format(recipe.format_of(s)) for s in ("scores_raw", "scores"))
        if self.scale == 0 or not self.p.shape[-1]:
            return never
        q, k = self._finite_qk
        factor = self._code_scale()
        within = (
            self.length_bound / (abs(self.scale) * factor) if factor != 0 else self.length_bound * math.inf
        )
        if bool((within < 0.99 * raw.max).all()) and bool((self.length_bound < 0.99 * stored.max).all()):
            return never  # by Cauchy and Schwarz, whatever the signs
        size = (q @ k.mT).abs().masked_fill(self.hidden_keys(), 0.0).amax(-1, keepdim=True)
        return (size / (abs(self.scale) * factor) > 0.999 * raw.max) | (size > 0.999 * stored.max)

    def _code_scale(self) -> float:
        """The least product of the scales of q and k: codes are that much larger than values, or less."""
        product = 1.0
        for name in "qk":
            x = self.heads.scale(name)
            if x is not None and self.heads.scales_rows(name):
                product *= float(x.min())
        return product

    def hidden_keys(self) -> Tensor:
        """Hidden pairs as a mask that broadcasts to `[n, R, K]`."""
        hidden = self._hidden()
        return torch.zeros((), dtype=torch.bool, device=self.d.device) if hidden is None else hidden

    @cached_property
    def p2(self) -> Tensor:
        return self.p * self.p

    @cached_property
    def top(self) -> Tensor:
        """Index of each row's heaviest key `[n, R, 1]`."""
        return self.p.argmax(-1, keepdim=True)

    @cached_property
    def squares(self) -> Tensor:
        """scale²·Σ_c g_c q_c²k_c², g from `early`."""
        q, k = self._finite_qk
        at = torch.arange(q.shape[-1], dtype=q.dtype, device=q.device)
        return (q * q * early(at % CHUNK / min(CHUNK, max(q.shape[-1], 1)))) @ (k * k).mT

    @cached_property
    def absolute(self) -> Tensor:
        """scale·|q|·|k|."""
        q, k = self._finite_qk
        return q.abs() @ k.abs().mT

    @cached_property
    def mean_abs(self) -> Tensor:
        """Σ_j p_j |v_jc|, FP64."""
        return (self.p @ self.heads.abs_v[:, self.keys]).double()

    def slight(self, recipe: Recipe, u: float) -> bool:
        """Whether what the base itself does to scores is nothing beside the output's rounding, whatever their signs:
        bounds then stand for the errors of single keys."""
        out = rounded(recipe, "out")
        if out is None or not self.plain or self.sink is not None or recipe.accumulator is not None:
            return False
        if any(rounded(recipe, s) is not None for s in ("scores_raw", "scores", "shifted")):
            return False
        most = (self.q.shape[-1] + 16) * u * self._longest
        return most**2 < SLIGHT * out.unit_roundoff**2

    def weight_square(self, chunk: Tensor | float) -> Tensor:
        """Σ_j g_j p_j² v_jc², g from `early`, of sums in chunks (of each row)."""
        key = ("weight_square", None if isinstance(chunk, Tensor) else chunk)
        if key not in self.kept:
            n = self.count.to(self.p.dtype).clamp(min=1.0)
            at = torch.arange(self.p.shape[-1], dtype=n.dtype, device=n.device) % chunk
            weights = self.p2 * early(at / (n / torch.ceil(n / chunk))).to(self.p.dtype)
            self.kept[key] = (self.about(weights, None), self.m)
        return self.kept[key][0]

    @property
    def gross(self) -> tuple[Tensor, Tensor]:
        """Σ_j |v_jc| and Σ_j v_jc² over all keys, hidden ones too: what weightless keys can add."""
        return self.heads.gross

    @property
    def any_v(self) -> Tensor:
        """1 where a channel of V is not 0 throughout, else 0."""
        return self.heads.any_v

    @cached_property
    def p2_sum(self) -> Tensor:
        squares: Tensor = torch.linalg.vector_norm(self.p, dim=-1, keepdim=True).square_()
        return squares

    def about(self, w: Tensor, point: Tensor | None) -> Tensor:
        """Σ_j w_j (v_jc − point_c)² in FP64 for w ≥ 0; `point` None is 0. The heaviest key is taken apart: where
        point ≈ v of that key the expanded square would cancel."""
        v = self.heads
        if point is None:
            return (w @ v.squares[:, self.keys]).double()
        at = point - v.centre
        if w.shape[-1]:
            own = w.gather(-1, self.top).double()
            w = w.scatter(-1, self.top, 0.0)
            values = v.v[:, self.keys].gather(1, self.top.expand(-1, -1, self.o.shape[-1])).double()
            apart = own * (values - point) ** 2
        else:
            apart = torch.zeros_like(self.o)
        first, second, mass = torch.split(
            (w @ v.moments[:, self.keys]).double(), [self.o.shape[-1]] * 2 + [1], -1
        )
        return apart + (first - 2 * at * second + at * at * mass).clamp_(min=0.0)

    def shift(self, w: Tensor, point: Tensor | None) -> Tensor:
        """Σ_j w_j (v_jc − point_c)."""
        v = self.heads
        at = v.centre if point is None else v.centre - point
        return (w @ v.low[:, self.keys]).double() + at * w.sum(-1, keepdim=True).double()

    def column(self, x: Tensor | None) -> Tensor | None:
        """A scale of q for these rows: `[n, R|1, 1]`."""
        if x is None:
            return None
        x = x if x.shape[2] == 1 else x[:, :, self.rows]
        return x.expand(-1, -1, self.width, -1).flatten(1, 2)
