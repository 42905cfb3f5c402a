"""Attention libraries as black boxes: each imported when it is called, and refused with the reason where it is absent.

What they call things differs; a row of `LIBRARIES` says how, by the signatures of Dao-AILab/flash-attention@0251105
(flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py, flash_attn/cute/interface.py),
flashinfer-ai/flashinfer@fb28d72 (flashinfer/prefill.py), thu-ml/SageAttention@d1a57a5 (sageattention/core.py),
NVIDIA/TransformerEngine@d0067d0 (dot_product_attention.py) and facebookresearch/xformers@ca6d2aa (ops/fmha).

None rounds as another recipe than bf16 and fp16 do, but for FlashAttention-3 in FP8 and SageAttention, which stores Q
and K in INT8 whatever it is given.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from harness._frozen import FrozenMap
from harness.kernels.black_box import BlackBox, Call
from harness.kernels.visibility import additive, visible
from harness.records import Ran
from harness.result import Refusal, Result
from harness.spec import AttentionSpec, Shape

_16_BITS = ("bf16", "fp16")
_OFF = {"minus": -1, "none": None}


@dataclass(frozen=True)
class Library(BlackBox):
    """One function of a library. `layout`: `bhsd`, `bshd`, or `lhd`, a call for each sequence. `names`: option of the
    harness → keyword of the library. `fixed`: keywords always passed. `unlimited`: what an open side of a window is,
    `minus` −1 or `none` None; `left`: it takes the left side alone, and needs causality. `bottom_right`, `top_left`:
    how causality of unequal lengths may be aligned. `lse_unit`: what its lse is multiplied by. `many_heads`: whether it
    takes more query heads than kv heads. `build`: makes the function from the module and the call. `ragged`: the
    function that takes `kv_lens`, with `ragged_fixed` in the place of `fixed`."""

    module: str = ""
    function: str = ""
    layout: str = "bshd"
    names: Mapping[str, str] = field(default_factory=FrozenMap)
    fixed: Mapping[str, Any] = field(default_factory=FrozenMap)
    unlimited: str = "minus"
    left: bool = False
    bottom_right: bool = True
    top_left: bool = False
    lse_unit: float = 1.0
    many_heads: bool = True
    ragged: str = ""
    ragged_fixed: Mapping[str, Any] = field(default_factory=FrozenMap)
    build: Callable[[Any, Call], tuple[Callable[..., Any], dict[str, Any]]] | None = None

    def unable(self, spec: AttentionSpec, shape: Shape, extras: tuple[str, ...]) -> tuple[str, ...]:
        if not _found(self.module):
            return (f"{self.module.partition('.')[0]} is not installed, or has no {self.module}",)
        why = [f"{self.name} has no {n}" for n in extras if n not in self.names]
        why += (
            [f"{self.name} has no softcap"]
            if spec.softcap is not None and "softcap" not in self.names
            else []
        )
        if spec.window is not None and "window" not in self.names:
            why.append(f"{self.name} has no window")
        if spec.window is not None and self.left and (spec.right != 0):
            why.append(f"{self.name} has windows to the left of the diagonal alone")
        aligned = self.bottom_right if spec.align == "bottom-right" else self.top_left
        if (spec.causal or spec.window is not None) and shape.q_len != shape.S and not aligned:
            why.append(f"{self.name} does not align {spec.align}")
        if shape.group > 1 and not self.many_heads:
            why.append(f"{self.name} needs as many kv heads as query heads")
        if spec.empty_row == "nan":
            why.append(f"{self.name} gives 0 for a row that sees no key, never NaN")
        return tuple(why)

    def call(self, call: Call) -> Result:
        if why := self.unable(call.spec, call.shape, call.extras.given):
            raise Refusal("; ".join(why))
        module = importlib.import_module(self.module)
        ragged = call.extras.kv_lens is not None and bool(self.ragged)
        name = self.ragged if ragged else self.function
        keywords = {**(self.ragged_fixed if ragged else self.fixed), **self._options(call)}
        if self.build is None:
            function = getattr(module, name)
        else:
            function, built = self.build(module, call)
            keywords |= built
        tensors = [x.codes for x in (call.q, call.k, call.v)]
        if self.layout == "lhd":
            given = [
                function(*(x[b].transpose(0, 1) for x in tensors), **keywords)
                for b in range(call.shape.batch)
            ]
            outs = [_two(x) for x in given]
            out = torch.stack([o.transpose(0, 1) for o, _ in outs])
            lse = (
                None
                if outs[0][1] is None
                else torch.stack([x.transpose(0, 1) for _, x in outs if x is not None])
            )
        else:
            turned = [x.transpose(1, 2) if self.layout == "bshd" else x for x in tensors]
            out, lse = _two(function(*turned, **keywords))
            out = out.reshape(*turned[0].shape[:3], -1)  # TransformerEngine joins heads
            out = out.transpose(1, 2) if self.layout == "bshd" else out
        dtype = str(call.q.codes.dtype).removeprefix("torch.")
        ran = Ran(f"{self.module}.{name}", (), dtype, str(call.device))
        return Result(out, None if lse is None else lse.float() * self.lse_unit, ran=ran)

    def _options(self, call: Call) -> dict[str, Any]:
        spec, names = call.spec, self.names
        found: dict[str, Any] = {"scale": spec.scale_for(call.shape.head_dim), "causal": spec.causal}
        if spec.softcap is not None:
            found["softcap"] = spec.softcap
        if spec.window is not None:
            left, right = (_OFF[self.unlimited] if side is None else side for side in (spec.left, spec.right))
            found["window"] = left if self.left else (left, right)
        if call.extras.sinks is not None:
            found["sinks"] = call.extras.sinks.to(torch.bfloat16)
            if not torch.equal(found["sinks"].double(), call.extras.sinks.double()):
                raise Refusal(f"{self.name} takes sinks in BF16, which these are not")
        if call.extras.kv_lens is not None:
            found["kv_lens"] = call.extras.kv_lens.to(torch.int32)
        for name, x in (("q_scale", call.q), ("k_scale", call.k), ("v_scale", call.v)):
            if x.scale is not None:
                found[name] = _descale(x.scale, call.shape, self.name)
        return {names[n]: x for n, x in found.items() if n in names and names[n] != "attn_bias"}


def _two(given: Any) -> tuple[Tensor, Tensor | None]:
    """Output and lse of a function that may give one alone."""
    return (given[0], given[1]) if isinstance(given, (tuple, list)) else (given, None)


def _descale(scale: Tensor, shape: Shape, name: str) -> Tensor:
    """FP32 `[B, Hkv]`, one for the query heads of a group too."""
    flat = scale.float().expand(shape.batch, -1, -1, -1)
    if flat.shape[2] != 1:
        raise Refusal(f"{name} takes one scale a head")
    flat = flat[:, :, 0, 0].expand(shape.batch, max(flat.shape[1], shape.Hkv))
    if flat.shape[1] == shape.Hkv:
        return flat.contiguous()
    grouped = flat.reshape(shape.batch, shape.Hkv, -1)
    if not bool((grouped == grouped[..., :1]).all()):
        raise Refusal(f"{name} takes one scale for the query heads of a group, and these differ")
    return grouped[..., 0].contiguous()


@cache
def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent that is not there, or is no package
        return False


def _xformers(module: Any, call: Call) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Causality is a class, everything else a bias `[B, H, L, S]` in the dtype of q."""
    spec, shape, extras = call.spec, call.shape, call.extras
    plain = spec.causal and spec.left is None and not extras.given
    if plain:
        kind = "LowerTriangularFromBottomRightMask" if spec.align == "bottom-right" else "LowerTriangularMask"
        return module.memory_efficient_attention, {"attn_bias": getattr(module.fmha.attn_bias, kind)()}
    seen = visible(spec, shape, extras, call.device)
    if seen is None and extras.bias is None:
        return module.memory_efficient_attention, {}
    dtype = call.q.codes.dtype
    bias = torch.zeros((), dtype=dtype, device=call.device) if extras.bias is None else extras.bias
    given = additive(bias, seen, (dtype,)).to(dtype)
    if extras.bias is not None and not torch.equal(bias.to(dtype).double(), bias.double()):
        raise Refusal("xformers takes a bias in the dtype of q, which does not hold this one")
    return module.memory_efficient_attention, {
        "attn_bias": given.expand(shape.batch, shape.heads, shape.q_len, shape.S)
    }


def _transformer_engine(module: Any, call: Call) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A module is made for each call."""
    shape, spec = call.shape, call.spec
    uneven = "_bottom_right" if spec.align == "bottom-right" and shape.q_len != shape.S else ""
    made = module.DotProductAttention(
        shape.heads, shape.head_dim, num_gqa_groups=shape.Hkv, attention_dropout=0.0, qkv_format="bshd",
        attn_mask_type=f"causal{uneven}" if spec.causal else "no_mask", softmax_scale=spec.scale_for(shape.head_dim),
    )  # fmt: skip
    return made.eval(), {}


_FLASH = {"scale": "softmax_scale", "causal": "causal", "window": "window_size", "softcap": "softcap"}
# The function over a cache aligns causality to each of cache_seqlens. In 4 that is the packed function without packing.
_CACHED = {**_FLASH, "kv_lens": "cache_seqlens"}
_WITH_LSE, _CACHED_LSE = FrozenMap({"return_attn_probs": True}), FrozenMap({"return_softmax_lse": True})
FLASH_ATTN_2 = Library(
    "flash_attn_2", _16_BITS, True, module="flash_attn", function="flash_attn_func", names=FrozenMap(_CACHED),
    fixed=_WITH_LSE, ragged="flash_attn_with_kvcache", ragged_fixed=_CACHED_LSE,
)  # fmt: skip
FLASH_ATTN_3 = Library(
    "flash_attn_3", (*_16_BITS, "fp8_e4m3"), True, module="flash_attn_interface", function="flash_attn_func",
    names=FrozenMap({**_CACHED, **{f"{t}_scale": f"{t}_descale" for t in "qkv"}}),
    fixed=_WITH_LSE, ragged="flash_attn_with_kvcache", ragged_fixed=_CACHED_LSE,
)  # fmt: skip
FLASH_ATTN_4 = Library(
    "flash_attn_4", _16_BITS, True, module="flash_attn.cute", function="flash_attn_func", unlimited="none",
    names=FrozenMap({**_FLASH, "sinks": "learnable_sink", "kv_lens": "seqused_k"}),
    fixed=FrozenMap({"return_lse": True}), ragged="flash_attn_varlen_func",
    ragged_fixed=FrozenMap({"return_lse": True}),
)  # fmt: skip
FLASHINFER = Library(
    "flashinfer", _16_BITS, True, module="flashinfer", function="single_prefill_with_kv_cache", layout="lhd", left=True,
    names=FrozenMap({"scale": "sm_scale", "causal": "causal", "window": "window_left", "softcap": "logits_soft_cap"}),
    fixed=FrozenMap({"kv_layout": "NHD", "return_lse": True}), lse_unit=math.log(2),
)  # fmt: skip
SAGE_ATTENTION = Library(
    "sage_attention", _16_BITS, True, module="sageattention", function="sageattn", layout="bhsd", bottom_right=False,
    names=FrozenMap({"scale": "sm_scale", "causal": "is_causal"}),
    fixed=FrozenMap({"tensor_layout": "HND", "return_lse": True}),
)  # fmt: skip
TRANSFORMER_ENGINE = Library(
    "transformer_engine", _16_BITS, True, module="transformer_engine.pytorch", function="DotProductAttention",
    top_left=True, build=_transformer_engine,
)  # fmt: skip
XFORMERS = Library(
    "xformers", _16_BITS, True, module="xformers.ops", function="memory_efficient_attention", top_left=True,
    many_heads=False, names=FrozenMap({"scale": "scale", **dict.fromkeys(("mask", "bias", "window"), "attn_bias")}),
    build=_xformers,
)  # fmt: skip
LIBRARIES = (
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    FLASH_ATTN_4,
    FLASHINFER,
    SAGE_ATTENTION,
    TRANSFORMER_ENGINE,
    XFORMERS,
)
