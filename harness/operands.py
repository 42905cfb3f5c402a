"""The tensors of one attention call, checked once: nothing after this asks whether shapes fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness.query_rows import Rows, check_rows
from harness.spec import AttentionSpec, Shape

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TOKENS_FIRST = "as [B, L, H, D] they fit: give them with transpose(1, 2), or in a file the option layout bshd"
KEY_CHANNELS = 8  # of a row, of which a number is made that tells it from others
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Extras:
    """What an attention call may carry besides q, k and v.

    `mask`: bool, True = attend, broadcasts to `[B, H, L, S]`. `bias`: added to the scaled and softcapped scores,
    same broadcast, −∞ hides. `sinks`: `[H]`, logits that join the denominator with a value of 0. `kv_lens`: `[B]`
    integers, keys from there on are hidden, and bottom-right alignment meets each sequence's own last key. `rows`: q
    holds these rows of a longer call, which keep their positions; mask and bias hold as many.
    """

    mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    kv_lens: Tensor | None = None
    rows: Rows | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options in use."""
        return tuple(n for n in ("mask", "bias", "sinks", "kv_lens") if getattr(self, n) is not None)

    def as_options(self) -> dict[str, Any]:
        """As keyword arguments; `rows` only where there are any, which few callables take."""
        options = {"mask": self.mask, "bias": self.bias, "sinks": self.sinks, "kv_lens": self.kv_lens}
        return options if self.rows is None else {**options, "rows": self.rows}

    def row(self, i: int) -> int:
        """The number that row i of q has in the whole call."""
        return i if self.rows is None else int(self.rows.index[i])

    def at(self, rows: slice, device: torch.device) -> Tensor:
        """Numbers in the whole call of these rows of q, `[rows]`."""
        if self.rows is None:
            return torch.arange(rows.start, rows.stop, device=device)
        return self.rows.index[rows].to(device)

    def length(self, q_len: int) -> int:
        """How many rows the whole call has."""
        return q_len if self.rows is None else self.rows.of

    def ends(self, rows: slice) -> tuple[int, int]:
        """Numbers of the first of these rows of q, and of the last and one."""
        if self.rows is None or rows.stop <= rows.start:
            return rows.start, rows.stop
        return self.row(rows.start), self.row(rows.stop - 1) + 1

    def to(self, device: torch.device | str) -> Extras:
        """All tensors on a device."""
        return Extras(**{n: None if x is None else x.to(device) for n, x in self.as_options().items()})


NO_EXTRAS = Extras()


def check(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Any = None, bias: Any = None,
    sinks: Any = None, kv_lens: Any = None, rows: Any = None,
) -> tuple[Shape, Extras]:  # fmt: skip
    """The shape of q, k, v and the extras as tensors on q's device.

    Raises ValueError for anything that is not a tensor of the right rank, type, size or device, saying what was given
    and what is allowed. Non-finite values are allowed everywhere.
    """
    if not isinstance(spec, AttentionSpec):
        raise ValueError(f"spec is {spec!r}; allowed: a harness.AttentionSpec")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() != 4:
            raise ValueError(f"{name} is {_name(x)}; allowed: a torch tensor [B, H, L, D]")
        if x.dtype not in _FLOATS:
            raise ValueError(f"{name} is {x.dtype}; allowed: {', '.join(str(d) for d in _FLOATS)}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; allowed: one device for all")
        _has_numbers(name, x)
    if rows is not None:
        check_rows(rows, q.shape[2])
    return _shape_or_hint(q, k, v), replace(_extras(q, k, mask, bias, sinks, kv_lens), rows=rows)


def _has_numbers(name: str, x: Tensor) -> None:
    if x.layout is not torch.strided:
        raise ValueError(f"{name} is {x.layout}; allowed: a dense tensor, which to_dense() makes of it")
    if x.device.type == "meta":
        raise ValueError(f"{name} is on meta, where tensors hold no numbers; allowed: cpu, cuda")


def _shape_or_hint(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """The shape; where it does not fit and would with tokens before heads, the error says so."""
    try:
        return _shape(q, k, v)
    except ValueError as error:
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        try:
            _shape(turned[0], turned[1], turned[2])
        except ValueError:
            raise error from None
        raise ValueError(f"{error}; {TOKENS_FIRST}") from None


def _shape(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    (b, h, length, d), (bk, hk, s, dk), (bv, hv, sv, e) = q.shape, k.shape, v.shape
    if not b == bk == bv:
        raise ValueError(f"batch sizes are q {b}, k {bk}, v {bv}; allowed: one for all")
    if hk != hv:
        raise ValueError(f"kv heads are k {hk}, v {hv}; allowed: one for both")
    if h < 1 or hk < 1 or h % hk:
        raise ValueError(f"q has {h} heads and k {hk}; allowed: at least 1, and q's a multiple of k's (GQA)")
    if d != dk:
        raise ValueError(f"head_dim is q {d}, k {dk}; allowed: one for both (v's width may differ)")
    if s != sv:
        raise ValueError(f"kv_len is k {s}, v {sv}; allowed: one for both")
    return Shape(b, h, length, d, kv_heads=hk, kv_len=s, value_dim=e)


def _extras(q: Tensor, k: Tensor, mask: Any, bias: Any, sinks: Any, kv_lens: Any) -> Extras:
    (b, h, length, _), s = q.shape, k.shape[2]
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            raise ValueError(
                f"mask is {_name(mask)}; allowed: a bool tensor, True = attend (bias= takes numbers)"
            )
        _has_numbers("mask", mask)
        mask = _broadcast("mask", mask, (b, h, length, s)).to(q.device)
    if bias is not None:
        if not isinstance(bias, Tensor) or not bias.dtype.is_floating_point:
            raise ValueError(f"bias is {_name(bias)}; allowed: a floating-point tensor (mask= takes bool)")
        _has_numbers("bias", bias)
        bias = _broadcast("bias", bias, (b, h, length, s)).to(q.device)
    if sinks is not None:
        allowed = f"a floating-point tensor [{h}], one per query head"
        sinks = _tensor("sinks", sinks, allowed)
        if sinks.shape != (h,) or not sinks.dtype.is_floating_point:
            raise ValueError(f"sinks is {_name(sinks)}; allowed: {allowed}")
        _has_numbers("sinks", sinks)
        sinks = sinks.to(q.device)
    if kv_lens is not None:
        allowed = f"integers [{b}], one per sequence"
        kv_lens = _tensor("kv_lens", kv_lens, allowed)
        if kv_lens.shape != (b,) or kv_lens.dtype not in _INTEGERS:
            raise ValueError(f"kv_lens is {_name(kv_lens)}; allowed: {allowed}")
        _has_numbers("kv_lens", kv_lens)
        if kv_lens.numel() and (int(kv_lens.min()) < 0 or int(kv_lens.max()) > s):
            raise ValueError(f"kv_lens is {kv_lens.tolist()}; allowed: 0 to kv_len = {s}")
        kv_lens = kv_lens.to(q.device, torch.int64)
    return Extras(mask, bias, sinks, kv_lens)


def _tensor(name: str, x: Any, allowed: str) -> Tensor:
    """A tensor, or a list of numbers as one."""
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} is {_name(x)} that is no tensor; allowed: {allowed}") from None


def _name(x: Any) -> str:
    if isinstance(x, Tensor) and x.is_nested:
        return f"{x.dtype}, nested"
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(type(x).__name__)


def _broadcast(name: str, x: Tensor, full: tuple[int, int, int, int]) -> Tensor:
    """`x` as a 4-D view whose axes are 1 or full: slices of it stay small."""
    if x.dim() <= 4:
        view = x[(None,) * (4 - x.dim())]
        if all(have in (1, want) for have, want in zip(view.shape, full, strict=True)):
            return view
    raise ValueError(f"{name} is {_name(x)}; allowed: a shape that broadcasts to [B, H, L, S] = {list(full)}")


def slice_rows_keys(x: Tensor, rows: slice, keys: slice) -> Tensor:
    """Rows and keys of a broadcast `[B|1, H|1, L|1, S|1]` tensor."""
    if x.shape[2] != 1:
        x = x[:, :, rows]
    if x.shape[3] != 1:
        x = x[..., keys]
    return x


def shown(x: Any) -> str:
    """A value in an error message: short tensors whole, long ones by type and shape."""
    if not isinstance(x, Tensor):
        return repr(x)
    return str(x.tolist()) if x.dim() == 1 and x.numel() <= 16 else f"{x.dtype} {tuple(x.shape)}"


def row_numbers(x: Tensor) -> Tensor:
    """A number of each row of `[..., E]`, FP64, made of a few of its channels: equal rows have equal ones, element by
    element in one order, and rows that differ there nearly never do."""
    number = x.new_zeros(x.shape[:-1], dtype=torch.float64)
    for c in range(min(x.shape[-1], KEY_CHANNELS)):
        number = number * math.pi + x[..., c]
    return number


def squares_fit_fp32(v: Tensor) -> bool:
    """Whether products of squares of values `[B, H, S, E]`, times the square of an FP32 roundoff (2^-48), stay normal:
    of the largest of each key and of each channel of a head, where that is not 0."""
    size = v.abs().nan_to_num(0.0, 0.0, 0.0)
    if not size.numel():
        return True
    for tops in (size.amax(2), size.amax(3)):
        least, most = float(tops.masked_fill(tops == 0, 1.0).min()), float(tops.max())
        if not (least > 1e-8 and most < 1e8):
            return False
    return True
