"""Scores and weights of a block of rows, which all recipes of one storage share."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from harness.error_model.problem import BLOCK_KEYS, NEGLIGIBLE, Heads
from harness.finite import all_finite, finite_or_zero

SMALL_SCORES = 32.0  # whose products FP32 gives within 1e-4
NEAR_SCORES = -NEGLIGIBLE / 2  # no key that is seen is weightless beside another


class Weights:
    """Some rows of some heads against the keys they can see. Matrices `[n, R, K]` with R = G·rows, columns
    `[n, R, 1]`, outputs `[n, R, E]`.

    `d` = s − m and `p` are 0 where a key is hidden or weightless (`NEGLIGIBLE`). A row whose scores are not finite is
    NaN throughout.
    """

    def __init__(self, heads: Heads, rows: slice) -> None:
        self.heads, self.rows, self.p_ = heads, rows, heads.p
        p = heads.p
        self.group, self.width = p.shape.group, rows.stop - rows.start
        self.keys, self.span = self._key_range(rows), self._key_range(slice(0, p.shape.q_len))
        self.scale = p.spec.scale_for(p.shape.head_dim)
        self.q = p.q[heads.part, :, rows].flatten(1, 2)
        self.k = heads.k[:, self.keys]
        self.o = p.out[heads.part, :, rows].flatten(1, 2)
        self._corner: tuple[int, int] | None = None
        if self._near:
            self._weights_of_truth()
        else:
            self._softmax()

    @cached_property
    def _short(self) -> bool:
        """Whether FP32 gives the scores of a large call within 1e-4: plain, finite and small."""
        p = self.p_
        if (
            not p.large
            or p.dtype is not torch.float32
            or p.extras.bias is not None
            or p.spec.softcap is not None
        ):
            return False
        return self._longest < SMALL_SCORES and all_finite(self.q) and self.heads.k_finite

    @property
    def _near(self) -> bool:
        return self._short and self._longest < NEAR_SCORES and self.p_.extras.sinks is None

    def _blank(self) -> None:
        self.bias: Tensor | None = None
        self.sink: Tensor | None = None
        self._lin: Tensor | None = None
        self._capped: Tensor | None = None

    def _weights_of_truth(self) -> None:
        """The same as `_softmax` where the truth's lse says it all: no maximum, sum or quotient of the weights."""
        p = self.p_
        s = self._products()
        self._blank()
        self._hide(s, late=True)
        top, lse = (x[self.heads.part, :, self.rows].flatten(1, 2) for x in (p.row_max, p.lse))
        self.empty = top == -math.inf
        if bool(self.empty.any()):
            top, lse = (x.masked_fill(self.empty, 0.0) for x in (top, lse))
        self.m, self.lse, self.l = (x.to(p.dtype) for x in (top, lse, (lse - top).exp()))
        self.sink_e = torch.zeros_like(self.m)
        self.p = s.sub_(self.lse).exp_()
        self._clear_corner()

    @cached_property
    def far(self) -> Tensor:
        """s − m, −∞ where hidden."""
        return (self.p * self.l).log_()

    def _softmax(self) -> None:
        p, dtype = self.p_, self.p_.dtype
        s = self._products()
        self._blank()
        if p.spec.softcap is not None:
            self._lin = s.to(dtype)
            s = p.spec.softcap * torch.tanh(s / p.spec.softcap)
            self._capped = s.to(dtype)
        if p.extras.bias is not None:
            self._lin = s.to(dtype) if self._lin is None else self._lin
            self._capped = s.to(dtype) if self._capped is None else self._capped
            bias = self._pick(p.extras.bias).double()
            self.bias = torch.where(bias == -math.inf, 0.0, bias).to(dtype)
            s = s + bias
        self._hide(s)
        top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
        m, sink = top, None
        if p.extras.sinks is not None:
            sink = p.extras.sinks.double().view(p.shape.Hkv, -1)[self.heads.index % p.shape.Hkv]
            sink = sink[:, :, None].expand(-1, -1, self.width).reshape(top.shape)
            m = torch.maximum(top, sink)
        self.empty = m == -math.inf
        m = m.masked_fill(self.empty, 0.0)
        d = s.sub_(m).to(dtype)
        e = torch.threshold_(torch.exp(d), math.exp(NEGLIGIBLE), 0.0)
        self.far = d
        self.m = m.to(dtype)
        self.sink = None if sink is None else (sink - m).to(dtype)
        self.sink_e = torch.zeros_like(self.m) if self.sink is None else torch.exp(self.sink)
        self.l = e.sum(-1, keepdim=True) + self.sink_e
        self.p = e.div_(self.l.masked_fill(self.l == 0, 1.0))
        if self.bias is not None:  # of a weightless key, −1e9 say, it errs by much and matters to nobody
            self.bias = torch.where(self.p > 0, self.bias, 0.0)
        self.l.masked_fill_(self.empty, 1.0)
        self.lse = self.m + self.l.log()

    def _products(self) -> Tensor:
        """scale·q·k: in FP64, or in FP32 for a large call whose scores that gives within 1e-4."""
        if self._short:
            q, k = self._finite_qk
            return torch.bmm(q, k.mT, out=self.p_.space("scores", *q.shape[:2], k.shape[1]))
        q, step = self.q * self.scale, BLOCK_KEYS
        if self.k.shape[1] <= step:
            return q @ self.k.double().mT
        s = q.new_empty(*q.shape[:2], self.k.shape[1])
        for start in range(0, s.shape[-1], step):  # a long context needs no FP64 copy of itself
            s[..., start : start + step] = q @ self.k[:, start : start + step].double().mT
        return s

    @cached_property
    def d(self) -> Tensor:
        """s − m, 0 where a key is hidden or weightless."""
        d: Tensor = torch.nn.functional.threshold(self.far, NEGLIGIBLE, 0.0)
        return d

    def _hide(self, s: Tensor, late: bool = False) -> None:
        """−∞ where hidden, in place; how many keys each row sees. `late`: what causality alone hides is left to
        `_clear_corner`."""
        spec, extras = self.p_.spec, self.p_.extras
        causal = spec.right is not None and spec.left is None and extras.rows is None
        if causal and extras.given in ((), ("sinks",)):
            self._hide_corner(s, spec.right or 0, late)
            return
        self.count = (
            torch.full_like(s[..., :1], s.shape[-1]) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
        )
        if (far := self._shown_to_all()) is not None:
            at = self.p_.extras.at(self.rows, s.device) + self._shift + (self.p_.spec.right or 0)
            later = torch.arange(self.keys.start + far, self.keys.stop, device=s.device) > at[:, None]
            s[..., far:].masked_fill_(later.repeat(self.group, 1), -math.inf)
            self.count -= later.sum(-1, keepdim=True).repeat(self.group, 1)
            return
        hidden = self._hidden()
        if hidden is not None:
            s.masked_fill_(hidden, -math.inf)
            self.count -= hidden.sum(-1, keepdim=True)

    def _hide_corner(self, s: Tensor, right: int, late: bool) -> None:
        """The same where causality alone hides: nothing left of a block's corner is touched."""
        keys = s.shape[-1]
        first = (
            self.rows.start
            + self.p_.spec.shift(self.p_.shape.q_len, self.p_.shape.S)
            + right
            + 1
            - self.keys.start
        )
        row = torch.arange(self.width, dtype=s.dtype, device=s.device)
        count = (row + first).clamp_(0, keys).repeat(self.group)
        self.count = count[None, :, None].expand(*s.shape[:2], 1)
        start = min(max(first, 0), keys)
        if late:
            self._corner = (start, first - start - 1) if start < keys else None
        elif start < keys:
            corner = self.heads.corner(self.width, keys - start, first - start)
            s.view(-1, self.width, keys)[..., start:].masked_fill_(corner, -math.inf)

    def _clear_corner(self) -> None:
        """0 where causality alone hides: a tenth of the time of −∞ beforehand, where no exp overflows."""
        if self._corner is not None:
            start, diagonal = self._corner
            self.p.view(-1, self.width, self.p.shape[-1])[..., start:].tril_(diagonal)

    @property
    def _shift(self) -> int:
        p = self.p_
        return p.spec.shift(p.extras.length(p.shape.q_len), p.shape.S)

    def _shown_to_all(self) -> int | None:
        """How many of the keys every row sees, where nothing but the right edge hides any; else None."""
        spec, extras = self.p_.spec, self.p_.extras
        hiding = (spec.left, extras.kv_lens, extras.mask, extras.bias)
        if extras.rows is None or spec.right is None or any(x is not None for x in hiding):
            return None
        last: int = extras.ends(self.rows)[0] + self._shift + spec.right
        shown: int = min(max(0, last + 1 - self.keys.start), self.keys.stop - self.keys.start)
        return shown

    def _key_range(self, rows: slice) -> slice:
        p = self.p_
        lens = [p.shape.S]
        if p.extras.kv_lens is not None and p.spec.align == "bottom-right" and p.shape.batch:
            lens = p.extras.kv_lens.tolist()
        shifts = [p.spec.shift(p.extras.length(p.shape.q_len), n) for n in lens]
        first, last = p.extras.ends(rows)
        start = 0 if p.spec.left is None else max(0, first + min(shifts) - p.spec.left)
        stop = p.shape.S if p.spec.right is None else last + max(shifts) + p.spec.right
        start = min(start, p.shape.S)
        return slice(start, max(start, min(stop, p.shape.S)))

    def _pick(self, x: Tensor) -> Tensor:
        """These heads, rows and keys of a broadcast `[B|1, H|1, L|1, S|1]`: `[n, R, K]`."""
        p, keys = self.p_, self.keys.stop - self.keys.start
        x = x if x.shape[2] == 1 else x[:, :, self.rows]
        x = x if x.shape[3] == 1 else x[..., self.keys]
        x = x.expand(p.shape.batch, p.shape.heads, self.width, keys)
        x = x.reshape(p.shape.batch, p.shape.Hkv, self.group, self.width, keys)
        return x[self.heads.index // p.shape.Hkv, self.heads.index % p.shape.Hkv].flatten(1, 2)

    def _hidden(self) -> Tensor | None:
        p, left, right = self.p_, self.p_.spec.left, self.p_.spec.right
        hidden = None
        if left is not None or right is not None or p.extras.kv_lens is not None:
            i = p.extras.at(self.rows, p.q.device)[:, None]
            j = torch.arange(self.keys.start, self.keys.stop, device=p.q.device)
            n: Tensor | int = p.shape.S
            if p.extras.kv_lens is not None:
                n = p.extras.kv_lens.view(-1, 1, 1, 1)
            at = i + (n - p.extras.length(p.shape.q_len)) if p.spec.align == "bottom-right" else i
            hidden = j >= n
            if right is not None:
                hidden = hidden | (j > at + right)
            if left is not None:
                hidden = hidden | (j < at - left)
            hidden = hidden[(None,) * (4 - hidden.dim())]
        for given, shown in ((p.extras.mask, None), (p.extras.bias, -math.inf)):
            if given is not None:
                more = ~given if shown is None else given == shown
                x = self._pick(more)
                hidden = x if hidden is None else self._as_matrix(hidden) | x
        return None if hidden is None else self._as_matrix(hidden)

    def _as_matrix(self, x: Tensor) -> Tensor:
        """A mask of positions, which holds these rows and keys alone, as `[n, R, K]` or what broadcasts to it."""
        if x.dim() == 3:
            return x
        if x.shape[0] == 1 and self.group == 1:
            return x[0]
        x = x.expand(self.p_.shape.batch, 1, *x.shape[2:])[self.heads.index // self.p_.shape.Hkv]
        return x.expand(-1, self.group, self.width, -1).flatten(1, 2)

    @cached_property
    def _finite_qk(self) -> tuple[Tensor, Tensor]:
        q = self.q * self.scale
        return finite_or_zero(q).to(self.p_.dtype), self.heads.finite_k[:, self.keys]

    @cached_property
    def length_bound(self) -> Tensor:
        """‖scale·q‖·max ‖k‖ ≥ scale·|q|·|k|, of a row."""
        bound: Tensor = (
            torch.linalg.vector_norm(self._finite_qk[0], dim=-1, keepdim=True) * self.heads.longest
        )
        return bound

    @cached_property
    def _longest(self) -> float:
        return float(self.length_bound.amax()) if self.length_bound.numel() else 0.0
