"""One attention call kept in a file, by any language: the tensors q, k, v and out in safetensors, and the rules.

The format holds names, types, shapes and bytes. Nothing of a file is executed, and a pickle is refused unopened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness.dump_layout import LAYOUTS, Held, arrange
from harness.dump_options import SPEC, spec_of
from harness.operands import Extras, check
from harness.spec import AttentionSpec

FP8 = {
    "e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2,
}  # fmt: skip
TENSORS = (
    "q", "k", "v", "out", "lse", "mask", "bias", "sinks", "kv_lens", "q_scale", "k_scale", "v_scale",
    "exact_q", "exact_k", "exact_v", "cu_seqlens_q", "cu_seqlens_k", "block_table",
)  # fmt: skip
OPTIONS = (*SPEC, "recipe", "layout", "fp8", "implementation")
_IGNORED = ("format", "note")  # `format` is what safetensors' own writers put there
_MAGIC = (
    (b"\x80\x02", "a pickle"), (b"\x80\x03", "a pickle"), (b"\x80\x04", "a pickle"), (b"\x80\x05", "a pickle"),
    (b"PK", "a zip archive of torch.save or numpy.savez"), (b"\x93NUMPY", "a NumPy file"), (b"GGUF", "a GGUF file"),
)  # fmt: skip
_NATIVE = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e4m3fnuz: "fp8_e4m3fnuz",
}  # fmt: skip


@dataclass(frozen=True)
class Dump:
    """One call. `q`, `k`, `v`: FP64 values (code · scale) `[B, H, L, D]`, or what is to be stored where `quantize` asks
    for it; `scales` theirs. `out` `[B, H, L, E]` in its own dtype, an 8-bit one in FP32. `recipe`: its name or file,
    None where the types of q, k and v name none. `implementation`: what the file says made it."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    scales: tuple[Tensor | None, Tensor | None, Tensor | None]
    lse: Tensor | None
    extras: Extras
    exact: tuple[Tensor, Tensor, Tensor] | None
    spec: AttentionSpec
    recipe: str | None
    implementation: str


def read_dump(path: Path, given: Mapping[str, str | None] | None = None, quantize: bool = False) -> Dump:
    """The call in a file. `given`: options that go before those in the file's metadata, as text.

    With `quantize` q, k and v are values before their rounding, and scales only divide them. NaN and ±Inf are allowed
    in every tensor of numbers but scales. Raises ValueError in one line for a file that is no safetensors file, lacks a
    tensor, has one that is not known, or whose shapes, types or options do not fit.
    """
    tensors, metadata = _read(path)
    options = {**metadata, **{k: v for k, v in (given or {}).items() if v is not None}}
    if strange := [n for n in options if n not in (*OPTIONS, *_IGNORED)]:
        raise ValueError(f"{path} gives the option {strange[0]!r}; allowed: {', '.join(OPTIONS)}")
    try:
        return _dump(tensors, options, quantize)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _dump(tensors: dict[str, Tensor], options: Mapping[str, str], quantize: bool) -> Dump:
    _fp8_fits(tensors, options.get("fp8"))
    for name in ("q", "k", "v", "out"):
        tensors[name] = _numbers(name, tensors[name], options.get("fp8"))
    dtypes = tuple(tensors[n].dtype for n in ("q", "k", "v"))
    layout = options.get("layout", "bhsd")
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; allowed: {', '.join(LAYOUTS)}")
    held = arrange(_wide(tensors), layout, spec_of(options))
    q, k, v = (held.tensors[n] for n in ("q", "k", "v"))
    shape, extras = check(
        q, k, v, held.spec, **{n: held.tensors.get(n) for n in ("mask", "bias", "sinks", "kv_lens")}
    )
    if 0 in (*shape.tensor("q"), *shape.tensor("k"), *shape.tensor("out")):
        raise ValueError(f"the call is {shape}, which holds nothing to judge; allowed: sizes ≥ 1")
    scales = tuple(_scale(name, held, x) for name, x in (("q", q), ("k", k), ("v", v)))
    if not quantize:
        q, k, v = (x if s is None else x * s for x, s in zip((q, k, v), scales, strict=True))
    recipe = options.get("recipe") or _recipe(dtypes)
    return Dump(
        q, k, v, held.tensors["out"], scales, held.tensors.get("lse"), extras, _exact(held), held.spec, recipe,  # type: ignore[arg-type]
        options.get("implementation", "file"),
    )  # fmt: skip


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path} is no file; give the path of a safetensors file")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if strange := [n for n in names if n not in TENSORS]:
                raise ValueError(f"{path} holds a tensor {strange[0]!r}; allowed: {', '.join(TENSORS)}")
            if missing := [n for n in ("q", "k", "v", "out") if n not in names]:
                raise ValueError(
                    f"{path} has no {', '.join(missing)}; it holds {', '.join(sorted(names)) or 'nothing'}"
                )
            return {n: file.get_tensor(n) for n in names}, dict(file.metadata() or {})
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        KeyError,
        AttributeError,
        TypeError,
        OverflowError,
    ) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {_unlike(path) or error}") from None


def _unlike(path: Path) -> str:
    """What a file is by its first bytes, where it is something that is often passed in the place of safetensors."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError:
        return ""
    for magic, what in _MAGIC:
        if start.startswith(magic):
            return f"it looks like {what}, and was not opened; convert it where you trust it"
    return ""


def _fp8_fits(tensors: Mapping[str, Tensor], fp8: str | None) -> None:
    """The option is for bytes; on numbers that have a type of their own it would be passed over in silence."""
    if fp8 is None:
        return
    if fp8 not in FP8:
        raise ValueError(f"fp8 is {fp8!r}; allowed: {', '.join(FP8)}")
    kinds = {n: tensors[n].dtype for n in ("q", "k", "v", "out")}
    for name, kind in kinds.items():
        if kind in FP8.values() and kind is not FP8[fp8]:
            raise ValueError(f"fp8 = {fp8} was given, but {name} is {kind}; leave it out: the type says it")
    if not {torch.uint8, torch.int8, FP8[fp8]} & set(kinds.values()):
        held = ", ".join(f"{n} {str(x).removeprefix('torch.')}" for n, x in kinds.items())
        raise ValueError(
            f"fp8 = {fp8} was given, but no tensor holds bytes ({held}); leave it out, or give --recipe to say what is"
            " computed, with --quantize where these are values before rounding"
        )


def _numbers(name: str, x: Tensor, fp8: str | None) -> Tensor:
    """A tensor of a float dtype; bytes as the 8-bit format that the options name."""
    if x.dtype in (torch.uint8, torch.int8):
        if fp8 not in FP8:
            said = "no option says which" if fp8 is None else f"fp8 is {fp8!r}"
            raise ValueError(f"{name} holds bytes, and {said}; allowed: fp8 = {', '.join(FP8)}")
        return x.view(FP8[fp8])
    if not x.dtype.is_floating_point or x.dtype is torch.float8_e8m0fnu:
        raise ValueError(
            f"{name} is {x.dtype}; allowed: floating-point numbers, or bytes with fp8 = {', '.join(FP8)}"
        )
    return x


def _wide(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q, k, v and scales in FP64; 8-bit numbers elsewhere in FP32, as dtypes that have arithmetic."""
    wide = dict(tensors)
    for name, x in tensors.items():
        if name in ("q", "k", "v") or name.startswith("exact_"):
            wide[name] = x.double()
        elif name.endswith("_scale"):
            wide[name] = x.float().double()
        elif x.dtype.is_floating_point and x.dtype.itemsize == 1:
            wide[name] = x.float()
    return wide


def _scale(name: str, held: Held, x: Tensor) -> Tensor | None:
    """A scale as it multiplies `x` `[B, H, L, D]`: one, `[H]`, `[B, H]`, or one a token or block of tokens."""
    scale = held.tensors.get(f"{name}_scale")
    if scale is None:
        return None
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(
            f"{name}_scale is not positive and finite everywhere; allowed: numbers > 0 that FP32 holds"
        )
    b, h, n, _ = x.shape
    given = tuple(scale.shape)
    if scale.numel() == 1:
        return scale.reshape(1, 1, 1, 1)
    if given in ((h,), (b, h)):
        return scale.view(-1, h, 1, 1)
    scale = scale[..., None] if scale.dim() == 3 else scale
    if scale.dim() == 4 and scale.shape[2] not in (1, n):  # one for each of so many equal blocks of tokens
        rows = _rows(n, scale.shape[2], name, given)
        scale = scale.repeat_interleave(rows, 2)[:, :, :n]
    if scale.dim() != 4 or any(s not in (1, full) for s, full in zip(scale.shape, x.shape, strict=True)):
        raise ValueError(
            f"{name}_scale has shape {given}; allowed: one number, [{h}], [{b}, {h}], or what broadcasts to "
            f"{tuple(x.shape)} in the layout of {name}, blocks of 32, 64, 128 or 256 tokens included"
        )
    return scale


def _rows(tokens: int, blocks: int, name: str, given: tuple[int, ...]) -> int:
    fits = [rows for rows in (128, 64, 256, 32) if -(-tokens // rows) == blocks]
    if not fits:
        raise ValueError(
            f"{name}_scale has shape {given}, {blocks} blocks for {tokens} tokens; allowed: one a token, or one for"
            " each 32, 64, 128 or 256 of them"
        )
    return fits[0]


def _exact(held: Held) -> tuple[Tensor, Tensor, Tensor] | None:
    found = [held.tensors.get(f"exact_{n}") for n in ("q", "k", "v")]
    if all(x is None for x in found):
        return None
    q, k, v = found
    for name, x in zip(("q", "k", "v"), found, strict=True):
        if x is None or x.shape != held.tensors[name].shape:
            given = "missing" if x is None else tuple(x.shape)
            size = tuple(held.tensors[name].shape)
            raise ValueError(f"exact_{name} is {given}; allowed: {size}, or none of the three")
    assert q is not None
    assert k is not None
    assert v is not None
    return q, k, v


def _recipe(dtypes: tuple[torch.dtype, ...]) -> str | None:
    """The recipe that the types of q, k and v go with."""
    if dtypes == (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fn):
        return "fp8_kv"
    return _NATIVE.get(dtypes[0]) if len(set(dtypes)) == 1 else None
