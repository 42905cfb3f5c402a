"""A value with the size of its error, and what the errors of q and k do to one head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.error_model.variance import LINEAR
from harness.formats import FloatFormat
from harness.rounding import ulp
from harness.spec import AttentionSpec, Shape

# Of σ² of a score: beyond, one standard error doubles a weight, and no first order holds.
COARSE = math.log(2) ** 2
FAR = 12.0  # standard deviations that no error reaches


@dataclass(frozen=True)
class Bounded:
    """A value of the truth with the mean square of its error and the error's bound, all of one shape."""

    value: Tensor
    variance: Tensor
    bound: Tensor

    def stored(
        self, fmt: FloatFormat | None, scale: Tensor | None = None, saturates: bool = False
    ) -> Bounded:
        """Rounded to `fmt` (None: kept), after a division by `scale`."""
        if fmt is None:
            return self
        s = torch.ones((), dtype=torch.float64) if scale is None else scale
        x, u = self.value / s, fmt.unit_roundoff
        noise = torch.minimum(ulp(x, fmt) ** 2 / 12, x * x) * s * s
        size = self.value.abs() + self.bound
        bound = self.bound + u * size + s * fmt.min_subnormal
        if scale is None and bool((size > fmt.max).any()):
            if not saturates:  # where an error may carry a value out of the format nothing is promised
                bound = bound.masked_fill(size > fmt.max, math.inf)
                near = self.value.abs() + FAR * self.variance.sqrt() > fmt.max
                return Bounded(self.value, (self.variance + noise).masked_fill(near, math.inf), bound)
            noise = noise + (self.value.abs() - fmt.max).clamp(min=0.0) ** 2
            bound = bound + (size - fmt.max).clamp(min=0.0)
        return Bounded(self.value, self.variance + noise, bound)


class Head:
    """One head of one sequence: weights, and how the errors of its q and k move them."""

    def __init__(
        self, shape: Shape, spec: AttentionSpec, q: Bounded, k: Bounded, b: int, n: int, g: int
    ) -> None:
        self.scale = spec.scale_for(shape.head_dim)
        self.q, self.k = q.value[b, n], k.value[b, g]
        self.q_var, self.k_var = q.variance[b, n], k.variance[b, g]
        s = self.scale * (self.q @ self.k.mT)
        if spec.softcap is not None:
            s = spec.softcap * torch.tanh(s / spec.softcap)
        self.slope = torch.ones_like(s) if spec.softcap is None else 1 - (s / spec.softcap) ** 2
        hidden = self._hidden(spec, shape, s)
        s = s.masked_fill(hidden, -math.inf)
        exact = torch.softmax(s, -1).nan_to_num(0.0)
        noise = self.scale**2 * self.slope**2 * (self.q_var @ (self.k**2).mT + self.q**2 @ self.k_var.mT)
        sigma2 = (exact * noise).sum(-1, keepdim=True)
        # As the attention's model does: where scores are coarse another key may win, and weights are tempered.
        tempered = torch.softmax(s / torch.sqrt(1 + 0.61 * sigma2), -1).nan_to_num(0.0)
        self.coarse = sigma2 > COARSE
        self.p = torch.where(sigma2 > LINEAR, tempered, exact)
        self.p2 = exact * exact
        size_q, size_k = q.bound[b, n], k.bound[b, g]
        eps = size_q @ self.k.abs().mT + self.q.abs() @ size_k.mT + size_q @ size_k.mT
        self.eps = (self.scale * eps).masked_fill(hidden, 0.0)
        self.exact, self.hidden = exact, hidden

    @staticmethod
    def _hidden(spec: AttentionSpec, shape: Shape, s: Tensor) -> Tensor:
        i = torch.arange(s.shape[0], device=s.device)[:, None] + spec.shift(shape.q_len, shape.S)
        j = torch.arange(s.shape[1], device=s.device)[None]
        hidden = torch.zeros(s.shape, dtype=torch.bool, device=s.device)
        if spec.right is not None:
            hidden |= j > i + spec.right
        if spec.left is not None:
            hidden |= j < i - spec.left
        return hidden

    def scores(self, u: Tensor) -> Tensor:
        """Variance `[T, E]` of Σ_j p_ij u_j by the errors of q and k, infinite where these are coarse; `u` `[S, E]`."""
        p, mean = self.p, self.p @ u
        weighed = p * self.slope
        # δq_i: one error for all keys, Σ_h Var(q_ih)·(Σ_j p_ij k_jh (u_j − mean))².
        keys = weighed[:, :, None] * self.k[None]
        moved = keys.mT @ u - keys.sum(1)[..., None] * mean[:, None]
        by_q = torch.einsum("ih,ihe->ie", self.q_var, moved**2)
        # δk_j: one a key.
        w = weighed**2 * (self.q**2 @ self.k_var.mT)
        low = u - u.mean(0)
        at = mean - u.mean(0)
        by_k = (w @ low**2 - 2 * at * (w @ low) + at**2 * w.sum(-1, keepdim=True)).clamp(min=0.0)
        return (self.scale**2 * (by_q + by_k)).masked_fill(self.coarse, math.inf)

    def bound(self, v: Tensor, v_bound: Tensor) -> tuple[Tensor, Tensor]:
        """Of y `[T, H]`: softmax moved by ε and value rows moved; and by how much a weight may grow `[T, 1]`, the
        attention's own bound with it."""
        p, eps = self.exact, self.eps
        least = (p * torch.exp(-eps)).sum(-1, keepdim=True).clamp(min=1e-300)
        alpha, far = torch.expm1(eps.clamp(max=300.0)), []
        for i in _chunks(p.shape[0]):
            apart = (v[None] - (p[i] @ v)[:, None]).abs()
            first = ((p[i] * alpha[i])[..., None] * apart).sum(1) / least[i]
            most = apart.masked_fill(self.hidden[i][..., None], 0.0).amax(1)
            far.append(torch.minimum(first, most))
        grown = torch.exp(eps.amax(-1, keepdim=True).clamp(max=300.0)) / least
        visible = torch.where(self.hidden[..., None], 0.0, v_bound[None]).amax(1)
        rows = torch.minimum(p @ v_bound * grown, visible)
        return torch.cat(far) + rows, grown


def _chunks(rows: int, size: int = 64) -> Iterator[slice]:
    return (slice(a, min(a + size, rows)) for a in range(0, rows, size))
