"""Between `[B, H, L, D]` and the layout a user's kernel takes, and what is wrong with what it returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("bhsd", "bshd", "thd")


def to_kernel(tensors: dict[str, Tensor], call: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """q, k, v as the kernel takes them, and its options. In `bhsd` they keep the strides they come with."""
    layout, options = call["layout"], dict(call["options"])
    qkv = {n: _strided(tensors[n], call["strides"][n], call["shapes"][n]) for n in ("q", "k", "v")}
    options |= {n: x for n, x in tensors.items() if n not in qkv}
    if isinstance(options.get("window"), list):
        options["window"] = tuple(options["window"])
    if layout == "bhsd":
        return qkv, options
    qkv = {n: x.transpose(1, 2).contiguous() for n, x in qkv.items()}
    if layout == "bshd":
        return qkv, options
    lens = call["lengths"]
    packed = {n: torch.cat([x[b, : lens[n][b]] for b in range(x.shape[0])]) for n, x in qkv.items()}
    for n in ("q", "k"):
        ends = torch.tensor([0, *lens[n]], device=packed[n].device).cumsum(0).to(torch.int32)
        options |= {f"cu_seqlens_{n}": ends, f"max_seqlen_{n}": max(lens[n], default=0)}
    return packed, {n: x for n, x in options.items() if n in call["passes"]}


def from_kernel(
    given: Any, call: dict[str, Any], device: torch.device
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`out` `[B, H, L, E]` and, where it came, `lse` `[B, H, L]`; or what is wrong with them."""
    parts = given if isinstance(given, (tuple, list)) else (given,)
    if not 1 <= len(parts) <= 2 or not isinstance(parts[0], Tensor):
        shown = f"{type(given).__name__} of {len(parts)}" if parts is given else type(given).__name__
        return {"wrong": f"it returned a {shown}, but should return a tensor, or (out, lse)"}, {}
    out, lse = parts[0], parts[1] if len(parts) > 1 else None
    b, h, length, e = call["out"]
    shapes = {"bhsd": (b, h, length, e), "bshd": (b, length, h, e), "thd": (b * length, h, e)}
    wanted = {
        "out": shapes[call["layout"]],
        "lse": (h, b * length) if call["layout"] == "thd" else (b, h, length),
    }
    for name, x in (("out", out), ("lse", lse)):
        if x is not None and (
            fault := _fault(x, wanted[name], device, call["dtype"] if name == "out" else None)
        ):
            return {"wrong": f"{name} {fault}"}, {}
    results = {"out": _to_bhsd(out, call)}
    if lse is not None:
        lse = lse.view(h, b, length).transpose(0, 1) if call["layout"] == "thd" else lse
        results["lse"] = lse.detach().float().contiguous().cpu()
    return {}, results


def _fault(x: Any, size: tuple[int, ...], device: torch.device, dtype: str | None) -> str:
    if not isinstance(x, Tensor):
        return f"is a {type(x).__name__}, but should be a tensor {size}"
    if x.layout is not torch.strided:
        return f"is {x.layout}, but should be a dense tensor {size}"
    if tuple(x.shape) != size:
        return f"has shape {tuple(x.shape)}, but should have {size}"
    if (dtype is None and not x.dtype.is_floating_point) or (dtype is not None and str(x.dtype) != dtype):
        return f"is {x.dtype}, but should be {dtype or 'floating-point numbers'}"
    if x.device != device and x.device.type != device.type:
        return f"is on {x.device}, but q is on {device}"
    return ""


def _to_bhsd(out: Tensor, call: dict[str, Any]) -> Tensor:
    b, h, length, e = call["out"]
    out = out.detach()
    if call["layout"] == "thd":
        out = out.view(b, length, h, e)
    if call["layout"] != "bhsd":
        out = out.transpose(1, 2)
    return out.contiguous().cpu()


def _strided(flat: Tensor, strides: list[int], shape: list[int]) -> Tensor:
    return flat.as_strided(shape, strides) if flat.numel() else flat.view(shape)
