"""From the layouts that kernels take to `[B, H, L, D]`: heads inside tokens, packed sequences, pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.operands import shown
from harness.options import check_cu_seqlens, packed_mask
from harness.spec import AttentionSpec

# `bhsd` [B, H, L, D] · `bshd` [B, L, H, D] · `thd` [T, H, D], sequences one after the other with cu_seqlens_q
LAYOUTS = ("bhsd", "bshd", "thd")
_ROWS = ("q", "k", "v", "out", "q_scale", "k_scale", "v_scale", "exact_q", "exact_k", "exact_v")
_MOST = 2**31  # bytes of the mask that keeps packed sequences apart


@dataclass(frozen=True)
class Held:
    """The tensors by name, those of q's kind `[B, H, L, D]`, and the rules that are left once packing is undone."""

    tensors: dict[str, Tensor]
    spec: AttentionSpec


def arrange(given: Mapping[str, Tensor], layout: str, spec: AttentionSpec) -> Held:
    """Undo a layout. Packed sequences become one problem whose mask keeps them apart, and causality and the window go
    into it; pages are gathered by `block_table` `[B, pages]` up to each of `kv_lens`.

    Raises ValueError for tensors of the wrong rank, or that belong to another layout.
    """
    tensors = dict(given)
    rank = 3 if layout == "thd" else 4
    for name in ("q", "k", "v", "out", "exact_q", "exact_k", "exact_v"):
        if name in tensors and tensors[name].dim() != rank:
            axes = {"bhsd": "[B, H, L, D]", "bshd": "[B, L, H, D]", "thd": "[T, H, D]"}[layout]
            raise ValueError(
                f"{name} has shape {tuple(tensors[name].shape)}; allowed in layout {layout}: {axes}"
            )
    if layout == "thd":
        return _packed(tensors, spec)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in tensors:
            raise ValueError(f"{name} was given in layout {layout}; allowed: in layout thd")
    if layout == "bshd":
        for name in _ROWS:
            if name in tensors and tensors[name].dim() >= 3:
                tensors[name] = tensors[name].transpose(1, 2)
    if "block_table" in tensors:
        _gather(tensors)
    _same_size(tensors)
    return Held(tensors, spec)


def _packed(tensors: dict[str, Tensor], spec: AttentionSpec) -> Held:
    for name in ("kv_lens", "block_table"):
        if name in tensors:
            raise ValueError(
                f"{name} was given in layout thd; allowed: cu_seqlens_k says how many keys there are"
            )
    if "cu_seqlens_q" not in tensors:
        raise ValueError(
            "layout thd without cu_seqlens_q; give the cumulative lengths of the sequences, from 0"
        )
    cu_q = tensors.pop("cu_seqlens_q")
    cu_k = tensors.pop("cu_seqlens_k", cu_q)
    queries, keys = tensors["q"].shape[0], tensors["k"].shape[0]
    if len(check_cu_seqlens(cu_q, queries, "cu_seqlens_q")) != len(
        check_cu_seqlens(cu_k, keys, "cu_seqlens_k")
    ):
        raise ValueError(
            f"cu_seqlens_q is {shown(cu_q)}, cu_seqlens_k {shown(cu_k)}; allowed: as many sequences"
        )
    if queries * keys > _MOST:
        raise ValueError(
            f"{queries} × {keys} packed tokens are too many for one file; allowed: {_MOST} pairs"
        )
    for name in _ROWS:
        if name in tensors and tensors[name].dim() >= 2:
            tensors[name] = tensors[name].transpose(0, 1)[None]
    if "lse" in tensors:
        tensors["lse"] = tensors["lse"][None]
    apart = packed_mask(cu_q, cu_k, spec.causal, spec.window, spec.align)
    mask = tensors.get("mask")
    if mask is not None and mask.dtype is torch.bool:
        try:
            apart = apart & mask
        except RuntimeError:
            raise ValueError(f"mask is {shown(mask)}; allowed: broadcast to {tuple(apart.shape)}") from None
    tensors["mask"] = apart
    _same_size(tensors)
    return Held(tensors, replace(spec, causal=False, window=None))


def _gather(tensors: dict[str, Tensor]) -> None:
    """K and V `[pages, Hkv, page, D]` as `[B, Hkv, S, D]`."""
    table, lens = tensors.pop("block_table"), tensors.get("kv_lens")
    batch, pages = tensors["q"].shape[0], tensors["k"].shape[0]
    if table.dim() != 2 or table.dtype not in (torch.int32, torch.int64) or table.shape[0] != batch:
        raise ValueError(f"block_table is {shown(table)}; allowed: integers [{batch}, pages of a sequence]")
    if lens is None or lens.shape != (batch,) or lens.dtype.is_floating_point:
        raise ValueError(f"a block_table needs kv_lens; allowed: integers [{batch}]")
    for name in ("k", "v"):
        if tensors[name].shape[0] != pages:
            raise ValueError(
                f"k has {pages} pages and {name} {tensors[name].shape[0]}; allowed: one number for both"
            )
        size = tensors[name].shape[2]
        used = torch.arange(table.shape[1])[None] * size < lens[:, None]  # what lies behind may hold anything
        if bool((used & ((table < 0) | (table >= pages))).any()):
            raise ValueError(f"block_table names a page that is not there; allowed: 0 to {pages - 1}")
        taken = tensors[name][table.masked_fill(~used, 0).long()]  # [B, n, Hkv, page, D]
        tensors[name] = taken.transpose(1, 2).flatten(2, 3)


def _same_size(tensors: Mapping[str, Tensor]) -> None:
    """What came out has one row for each query, of v's width; the log-sum-exp likewise."""
    q, v = tensors["q"], tensors["v"]
    wanted = {"out": (*q.shape[:3], v.shape[3]), "lse": tuple(q.shape[:3])}
    for name, size in wanted.items():
        x = tensors.get(name)
        if x is not None and (tuple(x.shape) != size or not x.dtype.is_floating_point):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)} as [B, H, L{', E' * (name == 'out')}]; allowed: {size}"
            )
