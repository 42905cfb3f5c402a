"""Library adapters against fakes with the libraries' own signatures, which compute what their arguments mean.

The signatures are those that `harness/kernels/libraries.py` cites, written down by hand: a fake that is asked for
anything else raises.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import harness
from harness import registry
from harness.kernels import libraries
from harness.kernels.libraries import LIBRARIES, Library
from harness.operands import Extras, check
from harness.quantize import store
from harness.result import Result
from harness.spec import AttentionSpec

BY_NAME = {x.name: x for x in LIBRARIES}


def truth(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **extras: Any) -> tuple[Tensor, Tensor]:
    found = harness.reference(q.double(), k.double(), v.double(), spec, **extras)
    return found.out, found.lse


def _window(window: tuple[Any, Any], off: Any, causal: bool) -> Any:
    left, right = (None if side == off else side for side in window)
    return None if left is right is None else (left, 0 if causal else right)


def _tokens_first(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **extras: Any
) -> tuple[Tensor, Tensor]:
    assert all(x.dim() == 4 for x in (q, k, v))
    out, lse = truth(*(x.transpose(1, 2) for x in (q, k, v)), spec, **extras)
    return out.transpose(1, 2), lse


def flash_2(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    spec = AttentionSpec(
        causal, scale=softmax_scale, softcap=softcap or None, window=_window(window_size, -1, causal)
    )
    out, lse = _tokens_first(q, k, v, spec)
    return (out.to(q.dtype), lse.float(), None) if return_attn_probs else out.to(q.dtype)


def flash_2_cached(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: int | Tensor | None = None, cache_batch_idx: Any = None,
    cache_leftpad: Any = None, block_table: Any = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    assert isinstance(cache_seqlens, Tensor)
    assert cache_seqlens.dtype == torch.int32
    window = _window(window_size, -1, causal)
    spec = AttentionSpec(causal, scale=softmax_scale, softcap=softcap or None, window=window)
    out, lse = _tokens_first(q, k_cache, v_cache, spec, kv_lens=cache_seqlens)
    return (out.to(q.dtype), lse.float()) if return_softmax_lse else out.to(q.dtype)


def flash_3_cached(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, qv: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: int | Tensor | None = None, cache_batch_idx: Any = None,
    cache_leftpad: Any = None, page_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None,
    max_seqlen_q: Any = None, rotary_seqlens: Any = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Any = None, num_splits: int = 0, pack_gqa: Any = None,
    sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    assert q_descale is k_descale is v_descale is None
    return flash_2_cached(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, return_softmax_lse=return_softmax_lse,
    )  # fmt: skip


def flash_3(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, qv: Any = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    wide = []
    for x, scale in ((q, q_descale), (k, k_descale), (v, v_descale)):
        assert scale is None or (scale.dtype, tuple(scale.shape)) == (torch.float32, (k.shape[0], k.shape[2]))
        own = (
            1.0
            if scale is None
            else scale.repeat_interleave(x.shape[2] // k.shape[2], 1)[:, None, :, None].double()
        )
        wide.append(x.double() * own)
    spec = AttentionSpec(
        causal, scale=softmax_scale, softcap=softcap or None, window=_window(window_size, -1, causal)
    )
    out, lse = _tokens_first(*wide, spec)
    return (out.to(dtype), lse.float()) if return_attn_probs else out.to(dtype)


def flash_4(
    q: Tensor, k: Tensor, v: Tensor, qv: Any = None, gather_kv_indices: Any = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None, return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    assert learnable_sink is None or learnable_sink.dtype == torch.bfloat16
    spec = AttentionSpec(
        causal, scale=softmax_scale, softcap=softcap or None, window=_window(window_size, None, causal)
    )
    out, lse = _tokens_first(q, k, v, spec, sinks=learnable_sink)
    return out.to(q.dtype), lse.float() if return_lse else None


def flash_4_varlen(
    q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, min_seqlen_k: Any = None, seqused_q: Any = None,
    seqused_k: Tensor | None = None, gather_kv_indices: Any = None, page_table: Any = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: Any = None, deterministic: bool = False, score_mod: Any = None,
    score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None, aux_tensors: Any = None,
    aux_scalars: Any = None, return_lse: bool = False, scheduler_metadata: Any = None,
    seqlen_k_per_split: Any = None, disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    assert seqused_k is not None
    assert seqused_k.dtype == torch.int32
    window = _window(window_size, None, causal)
    spec = AttentionSpec(causal, scale=softmax_scale, softcap=softcap or None, window=window)
    out, lse = _tokens_first(q, k, v, spec, sinks=learnable_sink, kv_lens=seqused_k)
    return out.to(q.dtype), lse.float() if return_lse else None


def flashinfer(
    q: Tensor, k: Tensor, v: Tensor, scale_q: Any = None, scale_k: Any = None, scale_v: Any = None, o_dtype: Any = None,
    custom_mask: Any = None, packed_custom_mask: Any = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
    window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: Any = None, rope_theta: Any = None,
    backend: str = "auto", return_lse: bool = False,
) -> Any:  # fmt: skip
    assert (q.dim(), kv_layout) == (3, "NHD")
    window = None if window_left == -1 else (window_left, 0)
    spec = AttentionSpec(causal, scale=sm_scale, softcap=logits_soft_cap, window=window)
    out, lse = _tokens_first(q[None], k[None], v[None], spec)
    return (out[0].to(q.dtype), lse[0].mT.float() / math.log(2)) if return_lse else out[0].to(q.dtype)


def sage(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False, sm_scale: float | None = None,
    return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    assert (tensor_layout, kwargs) == ("HND", {})
    out, lse = truth(q, k, v, AttentionSpec(is_causal, scale=sm_scale))
    return (out.to(q.dtype), lse.float()) if return_lse else out.to(q.dtype)


class LowerTriangularMask:
    align = "top-left"


class LowerTriangularFromBottomRightMask:
    align = "bottom-right"


def xformers(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *,
    op: Any = None,
) -> Tensor:  # fmt: skip
    if attn_bias is None or isinstance(attn_bias, Tensor):
        assert attn_bias is None or attn_bias.dtype == query.dtype
        return _tokens_first(query, key, value, AttentionSpec(scale=scale), bias=attn_bias)[0].to(query.dtype)
    return _tokens_first(query, key, value, AttentionSpec(True, attn_bias.align, scale=scale))[0].to(
        query.dtype
    )


class DotProductAttention:
    def __init__(
        self, num_attention_heads: int, kv_channels: int, num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: Any = None, bottom_right_diagonal: bool | None = None, sequence_parallel: bool = False,
        tp_size: int = 1, get_rng_state_tracker: Any = None, tp_group: Any = None, layer_number: int | None = None,
        attention_type: str = "self", cp_group: Any = None, cp_global_ranks: Any = None, cp_stream: Any = None,
        cp_comm_type: str = "p2p", softmax_scale: float | None = None, softmax_type: str = "vanilla",
        return_max_logit: bool | None = False, name: str | None = None,
    ) -> None:  # fmt: skip
        assert (attention_dropout, qkv_format) == (0.0, "bshd")
        self.heads, self.groups, self.kind, self.scale = (
            num_attention_heads,
            num_gqa_groups,
            attn_mask_type,
            softmax_scale,
        )

    def eval(self) -> DotProductAttention:
        return self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (q.shape[2], k.shape[2]) == (self.heads, self.groups)
        align = "bottom-right" if self.kind == "causal_bottom_right" else "top-left"
        spec = AttentionSpec(self.kind != "no_mask", align, scale=self.scale)
        return _tokens_first(q, k, v, spec)[0].to(q.dtype).flatten(2)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def module(name: str, **members: Any) -> None:
        found = types.ModuleType(name)
        found.__dict__.update(members)
        found.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, name, found)

    module("flash_attn", flash_attn_func=flash_2, flash_attn_with_kvcache=flash_2_cached)
    module("flash_attn_interface", flash_attn_func=flash_3, flash_attn_with_kvcache=flash_3_cached)
    module("flash_attn.cute", flash_attn_func=flash_4, flash_attn_varlen_func=flash_4_varlen)
    module("flashinfer", single_prefill_with_kv_cache=flashinfer)
    module("sageattention", sageattn=sage)
    module("transformer_engine")
    module("transformer_engine.pytorch", DotProductAttention=DotProductAttention)
    masks = types.SimpleNamespace(
        LowerTriangularMask=LowerTriangularMask,
        LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRightMask,
    )
    fmha = types.SimpleNamespace(attn_bias=masks)
    module("xformers")
    module("xformers.ops", memory_efficient_attention=xformers, fmha=fmha)
    libraries._found.cache_clear()
    yield
    libraries._found.cache_clear()


def here(name: str) -> Library:
    return replace(BY_NAME[name], cuda_only=False)


G = torch.Generator().manual_seed(0)
CALLS: dict[str, tuple[AttentionSpec, tuple[int, int, int, int], dict[str, Any]]] = {
    "full": (AttentionSpec(), (2, 2, 24, 24), {}),
    "causal": (AttentionSpec(True), (2, 2, 24, 24), {}),
    "scale": (AttentionSpec(scale=0.5), (2, 2, 24, 24), {}),
    "GQA": (AttentionSpec(True), (4, 2, 24, 24), {}),
    "bottom-right": (AttentionSpec(True), (2, 2, 24, 40), {}),
    "top-left": (AttentionSpec(True, "top-left"), (2, 2, 24, 40), {}),
    "sliding window": (AttentionSpec(True, window=(7, 0)), (2, 2, 24, 24), {}),
    "window": (AttentionSpec(window=(7, 3)), (2, 2, 24, 24), {}),
    "half window": (AttentionSpec(window=(None, 3)), (2, 2, 24, 24), {}),
    "softcap": (AttentionSpec(softcap=2.0), (2, 2, 24, 24), {}),
    "lengths": (AttentionSpec(True), (4, 2, 3, 24), {"kv_lens": torch.tensor([17, 24])}),
    "lengths in a window": (AttentionSpec(True, window=(7, 0)), (2, 2, 3, 24), {"kv_lens": torch.tensor([17, 24])}),
    "sinks": (AttentionSpec(), (2, 2, 24, 24), {"sinks": torch.tensor([1.0, -2.0])}),
    "mask": (AttentionSpec(), (2, 2, 24, 24), {"mask": torch.rand(24, 24, generator=G) < 0.7}),
    "bias": (AttentionSpec(True), (2, 2, 24, 24), {"bias": torch.randn(2, 24, 24, generator=G).bfloat16()}),
}  # fmt: skip
TAKES = {
    "flash_attn_2": {
        "full",
        "causal",
        "scale",
        "GQA",
        "bottom-right",
        "sliding window",
        "window",
        "half window",
        "softcap",
        "lengths",
        "lengths in a window",
    },
    "flashinfer": {"full", "causal", "scale", "GQA", "bottom-right", "sliding window", "softcap"},
    "sage_attention": {"full", "causal", "scale", "GQA"},
    "transformer_engine": {"full", "causal", "scale", "GQA", "bottom-right", "top-left"},
    "xformers": {
        "full",
        "causal",
        "scale",
        "bottom-right",
        "top-left",
        "sliding window",
        "window",
        "half window",
        "mask",
        "bias",
    },
}
TAKES["flash_attn_3"] = TAKES["flash_attn_2"]
TAKES["flash_attn_4"] = TAKES["flash_attn_2"] | {"sinks"}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", BY_NAME)
def test_an_option_reaches_the_library_in_its_own_convention_or_is_refused(name: str, call: str) -> None:
    spec, (heads, kv_heads, rows, keys), extras = CALLS[call]
    g = torch.Generator().manual_seed(1)
    q = torch.randn(2, heads, rows, 16, generator=g).bfloat16()
    k, v = (torch.randn(2, kv_heads, keys, 16, generator=g).bfloat16() for _ in range(2))
    library = here(name)
    shape, given = check(q, k, v, spec, **extras)
    refused = library.refusals(spec, shape, "bf16", given.given)
    assert (not refused) == (call in TAKES[name]), refused
    if refused:
        return
    result: Result = library.run(q, k, v, spec, recipe="bf16", **extras)
    want, lse = truth(q, k, v, spec, **extras)
    assert torch.equal(result.out, want.to(torch.bfloat16))
    assert (result.lse is None) == (name in ("transformer_engine", "xformers"))
    if result.lse is not None:
        torch.testing.assert_close(
            result.lse.double(), lse, rtol=2**-22, atol=2**-20
        )  # of FP32, twice rounded


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_fp8_codes_reach_flash_attention_3_with_a_descale_for_each_kv_head(kv_heads: int) -> None:
    g = torch.Generator().manual_seed(1)
    exact = tuple(torch.randn(2, h, 24, 16, generator=g).double() for h in (2, kv_heads, kv_heads))
    recipe = harness.get_recipe("fp8_e4m3")
    stored = store(exact, recipe, round_first=True)
    library = here("flash_attn_3")
    if kv_heads == 1:  # two query heads, whose scales differ, share one descale
        with pytest.raises(ValueError, match="one scale for the query heads of a group"):
            library.run_stored(stored, AttentionSpec(), recipe, Extras())
        return
    out = library.run_stored(stored, AttentionSpec(), recipe, Extras()).out
    assert torch.equal(out, truth(*(x.values for x in stored), AttentionSpec())[0].bfloat16())


@pytest.mark.parametrize("name", BY_NAME)
def test_an_absent_library_is_refused_with_its_name(name: str) -> None:
    libraries._found.cache_clear()
    (why,) = here(name).refusals(AttentionSpec(), harness.Shape(1, 1, 8, 8), "bf16")
    assert "is not installed" in why
    assert BY_NAME[name].module.partition(".")[0] in why


@pytest.mark.parametrize("name", BY_NAME)
def test_a_library_is_registered_by_its_name_and_never_runs_by_default(name: str) -> None:
    entry = registry.entry(name)
    assert (entry.default, entry.needs) == (False, "cuda")
    assert harness.get(name) is BY_NAME[name]
