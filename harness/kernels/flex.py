"""torch's flex_attention, compiled: rules as a block mask, softcap and bias as a score_mod.

Eager flex_attention computes something else (all scores, in one piece), so the compiled graph says itself when it runs.
A graph is compiled for each shape, dtype, scale and kind of mod, about 10 s each; other numbers of the rules are
tensors and need none of their own. Symbolic lengths would save most of them, but inductor's C++ of them (torch 2.13)
confuses the symbols s3 and s37, and compiles for some shapes only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from harness.kernels.black_box import BlackBox, Call
from harness.kernels.visibility import bounds, visible
from harness.records import Ran
from harness.result import Refusal, Result
from harness.spec import AttentionSpec, Shape

Mod = Callable[..., Tensor]
GRAPHS = 1024  # torch stops compiling at 8 of one function, and a run of the suite has more shapes than that
_ran: list[tuple[str, str, str]] = []


class Flex(BlackBox):
    """The one kernel there is of it on a device."""

    def unable(self, spec: AttentionSpec, shape: Shape, extras: tuple[str, ...]) -> tuple[str, ...]:
        why = []
        if "sinks" in extras:
            why.append("flex_attention has no sinks, and on CPU gives no lse to merge them by")
        if spec.empty_row == "nan":
            why.append("flex_attention gives 0 for a row that sees no key, never NaN")
        if not (shape.q_len and shape.S):
            why.append(
                "flex_attention on CPU divides by the number of rows and keys: with none it ends the process"
            )
        if not shape.head_dim:
            why.append("flex_attention on CPU gives wrong numbers where head_dim is 0")
        return tuple(why)

    def call(self, call: Call) -> Result:
        if call.device.type == "cpu" and not _has_compiler():
            raise Refusal(f"{self.name} is compiled, and no C++ compiler is found here")
        _ran.clear()
        limits = torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=GRAPHS)
        with limits, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own deprecated parts while it compiles
            out = self.bare(call)()
        if not _ran:
            raise RuntimeError(f"{self.name} was asked for compiled, but no compiled graph of it ran")
        operator, dtype, device = _ran[-1]
        return Result(out, ran=Ran("torch.compile", (operator,), dtype, device))

    def bare(self, call: Call) -> Callable[[], Tensor]:
        shape, compiled = call.shape, _compiled()
        score_mod, block_mask = _score_mod(call), _block_mask(call)

        def run() -> Tensor:
            return compiled(
                call.q.codes, call.k.codes, call.v.codes, score_mod=score_mod, block_mask=block_mask,
                scale=call.spec.scale_for(shape.head_dim), enable_gqa=shape.group > 1,
            )  # fmt: skip

        return run


@cache
def _has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


@cache
def _compiled() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(
        flex_attention, backend=_backend, dynamic=False, fullgraph=True
    )
    return compiled


def _backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Inductor, whose graph notes each of its runs. Raises RuntimeError for a graph without flex_attention."""
    names = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    if "flex_attention" not in names:
        raise RuntimeError(f"the graph holds no flex_attention, but {', '.join(names)}")
    from torch._inductor.compile_fx import compile_fx

    made: Callable[..., Any] = compile_fx(graph, inputs)  # type: ignore[assignment]

    def noting(*args: Any) -> Any:
        first = next(x for x in args if isinstance(x, Tensor) and x.is_floating_point())
        _ran.append(("flex_attention (inductor)", str(first.dtype).removeprefix("torch."), str(first.device)))
        return made(*args)

    return noting


def _score_mod(call: Call) -> Mod | None:
    bias, softcap = call.extras.bias, call.spec.softcap
    if bias is None and softcap is None:
        return None
    cap = torch.tensor(softcap or math.nan, device=call.device)

    def capped(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(s / cap)

    if bias is None:
        return capped
    added = bias.float().expand(*call.shape.tensor("q")[:3], call.shape.S).contiguous()

    def biased(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + added[b, h, i, j]

    def both(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(s / cap) + added[b, h, i, j]

    return biased if softcap is None else both


def _block_mask(call: Call) -> BlockMask | None:
    """By place where that is the whole rule; a mask of the caller's comes as one tensor with all the rules in it."""
    spec, shape, extras = call.spec, call.shape, call.extras
    device = str(call.device)
    if extras.mask is not None:
        seen = visible(spec, shape, extras, call.device)
        assert seen is not None
        shown = seen.expand(*shape.tensor("q")[:3], shape.S).contiguous()

        def listed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return shown[b, h, i, j]

        return create_block_mask(listed, shape.batch, shape.heads, shape.q_len, shape.S, device=device)
    if spec.left is None and spec.right is None and extras.kv_lens is None:
        return None
    limits = _limits(call)

    def placed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j - i >= limits[b, 0]) & (j - i <= limits[b, 1]) & (j < limits[b, 2])

    return create_block_mask(placed, shape.batch, None, shape.q_len, shape.S, device=device)


def _limits(call: Call) -> Tensor:
    """int64 `[B, 3]`: the least and the largest j − i that a row of each sequence sees, and its number of keys."""
    spec, shape = call.spec, call.shape
    first, lens = bounds(spec, shape, call.extras, call.device).expand(shape.batch, 2).unbind(1)
    left, right = (shape.q_len + shape.S if n is None else n for n in (spec.left, spec.right))
    return torch.stack([first - left, first + right, lens], 1)


FLEX_ATTENTION = Flex("flex_attention", ("fp32", "bf16", "fp16"))
