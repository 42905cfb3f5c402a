"""Wrong numbers: scales, exponentials, softcap, the max, the denominator and the rescale."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.mutants.attention import Attention, State
from benchmarks.mutants.table import Edit, Family

FAMILY = Family("numeric")
add = FAMILY.add


def _scale(change: Any) -> Edit:
    return {"scale": lambda self: change(Attention.scale(self), self.q.shape[3])}


def _exp(f: Any) -> Edit:
    """Another exponential for P, and for the rescale."""
    return {"exp": lambda self, x: f(x), "factor": lambda self, old, new: f(old - new)}


def _linear_exp(x: Tensor) -> Tensor:
    """2^i·(1 + f) for 2^(i + f): the bits of the exponent as a line, up to 6 % too large."""
    y = x * math.log2(math.e)
    whole = torch.floor(y)
    return torch.where(y > -1000, torch.exp2(whole) * (1 + y - whole), 0.0)


def _cubic_exp(x: Tensor) -> Tensor:
    """2^f by a polynomial of degree 3, up to 1e-4 off."""
    y = x * math.log2(math.e)
    whole = torch.floor(y)
    f = y - whole
    p = 1 + f * (0.695951 + f * (0.227641 + f * 0.076408))
    return torch.where(y > -1000, torch.exp2(whole) * p, 0.0)


def _capped(cap: Any) -> Edit:
    return {"capped": lambda self, s: cap(s, self.spec.softcap)}


def _l_only(self: Attention, a: Tensor, o: Tensor, part: Tensor) -> Tensor:
    return o * (a > 0) + part


def _first_scale_only(self: Attention, a: Tensor, l: Tensor, part: Tensor) -> Tensor:
    return l * (a > 0) + part


def _without_max(self: Attention, s: Tensor, m: Tensor) -> Tensor:
    return torch.zeros_like(m)


def _max_from_zero(self: Attention, rows: slice) -> State:
    m, l, o = Attention.start(self, rows)
    return m.clamp(min=0.0), l, o


def _divided(change: Any) -> Edit:
    def divided(self: Attention, state: State) -> tuple[Tensor, Tensor]:
        m, l, o = state
        return Attention.divided(self, (m, change(l), o))

    return {"divided": divided}


SOME = "online/full naive/causal split/mean"
# fmt: off
add("scale + 0.2 %", "the softmax scale is 1.002 times its value", f"{SOME} triangle/causal decode/heavy",
    _scale(lambda s, d: 1.002 * s), "scale")
add("scale − 0.2 %", "the softmax scale is 0.998 times its value", "naive/full online/peaked decode/causal",
    _scale(lambda s, d: 0.998 * s), "scale")
add("scale + 0.02 %", "the softmax scale is 1.0002 times its value", "online/full naive/peaked",
    _scale(lambda s, d: 1.0002 * s), "scale")
add("log2e of four digits", "exp2(1.443·x) for exp(x): 1.443 for 1.4427", SOME,
    _exp(lambda x: torch.exp2(1.443 * x)), "scale")
add("scale omitted", "the scores are not scaled", "online/causal naive/full decode/causal",
    _scale(lambda s, d: 1.0), "scale omitted")
add("scale twice", "the scale is applied twice", "naive/full online/wide", _scale(lambda s, d: s * s),
    "scale twice; scale 1/D")
add("scale of padded width", "the scale is that of head_dim 128", "online/wide triangle/wide",
    _scale(lambda s, d: 128**-0.5), "scale")
add("scale through BF16", "the scale is rounded to BF16", "online/wide naive/wide",
    _scale(lambda s, d: float(torch.tensor(s).bfloat16())), "scale")
add("exp2 for exp", "exp is taken to base 2", "online/full naive/causal", _exp(torch.exp2), "exp2 for exp")
add("log2e twice", "log₂e is applied to scores that exp takes to base e", "online/causal naive/full",
    _exp(lambda x: torch.exp(math.log2(math.e) * x)), "log2e twice")
add("exp by a line", "2^f is taken as 1 + f", "online/full naive/causal", _exp(_linear_exp))
add("exp by a cubic", "2^f is a polynomial that is 1e-4 off", "online/full naive/causal", _exp(_cubic_exp))
add("no max", "exp(s) without subtracting the max", "naive/large online/large", {"top": _without_max},
    "overflow in exp", ranged=True)
add("max from zero", "the running max starts at 0", "online/low naive/low", {"start": _max_from_zero},
    "underflow in exp", ranged=True)
add("not normalised", "O is not divided by l", "online/full naive/causal decode/causal",
    _divided(torch.ones_like), "not normalised")
add("l + 0.05", "0.05 is added to the denominator", "online/full naive/causal", _divided(lambda x: x + 0.05),
    "shrink; row sum")
add("l of the next row", "rows are divided by their neighbour's denominator", "online/full triangle/causal",
    _divided(lambda x: x.roll(-1, 2)), "row sum")
add("l of head 0", "all heads take the denominators of head 0", "naive/full online/causal",
    _divided(lambda x: x[:, :1].expand_as(x)), "row sum")
add("no rescale", "O and l are not rescaled when the max grows", "online/full online/causal online/peaked",
    {"factor": lambda self, old, new: (old > -math.inf).to(old)}, "no rescale, blocks of 64")
add("O not rescaled", "O is not rescaled when the max grows", "online/full online/causal", {"add_o": _l_only},
    "O not rescaled, blocks of 64")
add("l not rescaled", "l is not rescaled when the max grows", "online/full online/causal",
    {"add_l": _first_scale_only}, "l not rescaled, blocks of 64")
add("rescale to base 2", "exp to base 2 in the rescale alone", "online/full online/peaked",
    {"factor": lambda self, old, new: torch.exp2(old - new)}, "rescale to base 2, blocks of 64")
add("rescale twice", "the rescale is applied twice", "online/full online/causal",
    {"factor": lambda self, old, new: torch.exp(2 * (old - new))}, "rescale twice, blocks of 64")
add("softcap ignored", "the softcap is ignored", "online/softcap naive/softcap", _capped(lambda s, c: s),
    "no softcap")
add("softcap as a clamp", "scores are clamped to ± the softcap", "online/softcap naive/softcap",
    _capped(lambda s, c: s if c is None else s.clamp(-c, c)), "softcap as a clamp")
add("softcap + 1 %", "the softcap is 1.01 times its value", "online/softcap naive/softcap",
    _capped(lambda s, c: 1.01 * c * torch.tanh(s / (1.01 * c))), "softcap")
add("softcap not multiplied back", "tanh(s/cap) is left between −1 and 1", "online/softcap split/softcap",
    _capped(lambda s, c: torch.tanh(s / c)), "softcap not multiplied back")
# fmt: on
