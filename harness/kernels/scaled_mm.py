"""Attention over native FP8 products: torch._scaled_mm on the codes, softmax between them in FP32.

    S = scale · s_q s_k (q_code k_codeᵀ)     P = E4M3(256 · exp(S − m))     O = s_v / 256 · (P v_code) / l

It is torch's FP8 GEMM that is under test, in the chain that the recipe describes. Sizes are padded with zeros to
multiples of 16, which the tensor cores ask for; a zero code adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.arithmetic import DTYPES
from harness.kernels.black_box import BlackBox, Call
from harness.kernels.seen import Seen
from harness.kernels.visibility import visible
from harness.quantize import Stored
from harness.recipe import Recipe, get_recipe
from harness.result import Result
from harness.spec import AttentionSpec, Shape

MULTIPLE = 16


class ScaledMm(BlackBox):
    """Both products native, one scale for each of their operands."""

    def unlike(self, recipe: Recipe) -> str:
        fine = [t for t, s in recipe.scaling.items() if s.granularity not in ("tensor", "head")]
        if fine:
            return (
                f"a product of {self.name} takes one scale; {recipe.name} scales {', '.join(fine)} by parts"
            )
        scaled = get_recipe("fp8_e4m3").scaling
        return super().unlike(replace(recipe, scaling=scaled))

    def unable(self, spec: AttentionSpec, shape: Shape, extras: tuple[str, ...]) -> tuple[str, ...]:
        return ()

    def call(self, call: Call) -> Result:
        shape, bare = call.shape, self.bare(call)
        with Seen() as watched:
            out, lse = bare()
        flops = 2 * shape.batch * shape.heads * shape.q_len * shape.S * (shape.head_dim + shape.E)
        return Result(out, lse, flops, watched.ran("torch._scaled_mm"))

    def bare(self, call: Call) -> Callable[[], tuple[Tensor, Tensor]]:
        shape = call.shape
        seen = visible(call.spec, shape, call.extras, call.device)

        def run() -> tuple[Tensor, Tensor]:
            out = torch.empty(shape.tensor("out"), dtype=DTYPES[call.recipe.out_format], device=call.device)
            lse = torch.empty(out.shape[:3], dtype=torch.float32, device=call.device)
            for b in range(shape.batch):
                for h in range(shape.heads):
                    out[b, h], lse[b, h] = _head(call, seen, b, h)
            return out, lse

        return run


def _head(call: Call, seen: Tensor | None, b: int, h: int) -> tuple[Tensor, Tensor]:
    """Out `[L, E]` and lse `[L]` of one query head."""
    shape, spec, extras = call.shape, call.spec, call.extras
    group = h // shape.group
    (q, s_q), (k, s_k), (v, s_v) = (_of(x, b, i) for x, i in ((call.q, h), (call.k, group), (call.v, group)))
    s = _product(q, k, s_q, s_k) * spec.scale_for(shape.head_dim)
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    if extras.bias is not None:
        s = s + _at(extras.bias, b, h).float()
    hidden = None if seen is None else ~_at(seen, b, h)
    if hidden is not None:
        s = s.masked_fill(hidden, -math.inf)
    top = s.amax(-1) if shape.S else s.new_full((shape.q_len,), -math.inf)
    sink = None if extras.sinks is None else extras.sinks[h].float()
    if sink is not None:
        top = torch.maximum(top, sink)
    empty = top == -math.inf
    m = top.masked_fill(empty, 0.0)
    p = torch.exp(s - m[:, None])
    l = p.sum(-1) if sink is None else p.sum(-1) + torch.exp(sink - m)
    factor = call.recipe.p_scale
    weights = (p * factor).to(call.v.codes.dtype)
    o = _product(weights, v.mT, s_v.new_tensor(1 / factor), s_v) / l.masked_fill(empty, 1.0)[:, None]
    nothing = 0.0 if spec.empty_row == "zero" else math.nan
    out = o.masked_fill(empty[:, None], nothing).to(DTYPES[call.recipe.out_format])
    return out, (m + l.log()).masked_fill(empty, -math.inf if nothing == 0 else math.nan)


def _product(a: Tensor, b: Tensor, s_a: Tensor, s_b: Tensor) -> Tensor:
    """s_a s_b · a bᵀ in FP32 of FP8 codes a `[M, K]`, b `[N, K]`."""
    m, n = a.shape[0], b.shape[0]
    a, b = (_padded(x) for x in (a, b))
    return torch._scaled_mm(a, b.mT, s_a, s_b, out_dtype=torch.float32)[:m, :n]


def _padded(x: Tensor) -> Tensor:
    """Row-major, both sizes filled up to a multiple, and to one at least. By bytes: FP8 has no padding of its own."""
    rows, columns = (-n % MULTIPLE or (0 if n else MULTIPLE) for n in x.shape)
    return pad(x.contiguous().view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)


def _of(x: Stored, b: int, h: int) -> tuple[Tensor, Tensor]:
    """Codes `[L, D]` and scale `[]` of one head."""
    if x.scale is None:
        return x.codes[b, h], torch.ones((), device=x.codes.device)
    scale = x.scale.float()
    return x.codes[b, h], _at(scale, b, h).reshape(-1)[0]


def _at(x: Tensor, b: int, h: int) -> Tensor:
    """`[L|1, S|1]` of a tensor that broadcasts over sequences and heads."""
    return x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0]


SCALED_MM = ScaledMm("scaled_mm", ("fp8_e4m3",))
