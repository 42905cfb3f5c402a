"""What users of real kernels pass, as this project's `mask`, `bias` and `kv_lens`: ALiBi, padding, packed sequences.

`docs/options.md` has every option's formula beside the conventions of other libraries. Position of query row i among
the keys: as in `harness.spec`, i + S − L bottom-right and i top-left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.operands import Extras, check, shown, slice_rows_keys
from harness.spec import AttentionSpec

SIDES = ("right", "left")

# --- ALiBi -------------------------------------------------------------------------------------------------------


def alibi_slopes(heads: int) -> Tensor:
    """The slopes of ALiBi, FP64 `[H]`, in head order.

    For n = 2^⌊log₂ H⌋ heads 2^(−8k/n), k = 1 … n; a further head takes the next of 2^(−4k/n), k = 1, 3, 5 …, which are
    the slopes of 2n heads that the first n do not have. Slopes with a whole exponent are exact; an exponent is always
    exact, so the others carry the one error of the C library's pow.

    Raises ValueError for a number of heads below 1. Source: Press, Smith and Lewis, "Train Short, Test Long" (ICLR
    2022), section 3, and `get_slopes` of its published code for head counts that are no power of two.
    """
    _whole("heads", heads, 1)
    n = 1 << (heads.bit_length() - 1)
    exponents = [8 * k / n for k in range(1, n + 1)] + [4 * k / n for k in range(1, 2 * (heads - n), 2)]
    return torch.tensor([2.0**-e for e in exponents], dtype=torch.float64)


def alibi_bias(
    heads: int, q_len: int, kv_len: int, align: str = "bottom-right", *, symmetric: bool = True, kv_lens: Any = None
) -> Tensor:  # fmt: skip
    """The bias −slope·|j − position| of ALiBi, FP64 `[1, H, L, S]`; finite, 0 at the query's own position.

    For the past (j ≤ position) this is slope·(j − position) ≤ 0, the paper's form. The future gets the mirror image,
    ≤ 0 too, which is what flash-attn adds and what an encoder wants; `symmetric=False` continues the line instead,
    slope·(j − position) > 0 for the future. Under a causal spec the two are one. `kv_lens` `[B]` moves the bottom-right
    position of each sequence to its own length and gives `[B, H, L, S]`. Left padding on both sides moves nothing;
    packed sequences of equal query and key lengths take `alibi_bias(H, T, T)`, distances being relative.

    A value is exact where the slope is a power of two (the first n heads for n ≤ 8), otherwise one rounding of
    slope times an integer. Raises ValueError for sizes below 0 (heads: 1), an unknown alignment, and lengths that are
    no integers 0 … kv_len.
    """
    _whole("q_len", q_len, 0)
    _whole("kv_len", kv_len, 0)
    spec = AttentionSpec(align=align)
    lengths = torch.tensor([kv_len]) if kv_lens is None else _lengths("kv_lens", kv_lens, kv_len).cpu()
    shift = torch.tensor([spec.shift(q_len, int(n)) for n in lengths], dtype=torch.float64)
    position = torch.arange(q_len, dtype=torch.float64) + shift[:, None]
    distance = torch.arange(kv_len, dtype=torch.float64) - position[..., None]
    if symmetric:
        distance = -distance.abs()
    # + 0.0: the own position is 0 and not −0
    return alibi_slopes(heads)[None, :, None, None] * distance[:, None] + 0.0


# --- padding -----------------------------------------------------------------------------------------------------


def padding_mask(lengths: Any, kv_len: int, side: str = "right") -> Tensor:
    """Which of kv_len slots hold one of a sequence's `lengths` `[B]` keys: bool `[B, 1, 1, S]`, True = attend.

    `side` is where the padding is. "right": j < n, what `kv_lens` says too; but this mask leaves alignment alone, and
    `kv_lens` moves bottom-right to key n − 1. "left": j ≥ S − n. With the queries padded on the same side, m real ones
    of L, row r and key c of the unpadded sequence see each other when

        left,  bottom-right:  c ≤ r + (n − m)                     the unpadded rule, whatever the padding
        left,  top-left:      c ≤ r + (L − m) − (S − n)           the unpadded rule (c ≤ r) if both pads are equal
        right, bottom-right:  c ≤ r + (S − L)                     the unpadded rule if S − n = L − m
        right, top-left:      c ≤ r                               the unpadded rule

    and windows shift alike. A padded query row is a row like any other: left-padded under causality it sees nothing
    and is an empty row. `padding_mask(q_lengths, q_len, side).mT` `[B, 1, L, 1]` empties every padded row.

    Raises ValueError for lengths that are no integers 0 … kv_len, and for an unknown side.
    """
    _whole("kv_len", kv_len, 0)
    n = _lengths("lengths", lengths, kv_len)
    j = torch.arange(kv_len, device=n.device)
    if side not in SIDES:
        raise ValueError(f"side is {side!r}; allowed: {', '.join(SIDES)}")
    real = j < n[:, None] if side == "right" else j >= kv_len - n[:, None]
    return real[:, None, None, :]


# --- packed sequences --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """`out` in the layout of the packed q, `[T, H, E]` or `[1, H, T, E]`; `lse` `[H, T]` or `[1, H, T]`, or None where
    the implementation gives none."""

    out: Tensor
    lse: Tensor | None


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    """Cumulative lengths from 0, int32 `[n + 1]`, as flash-attn's varlen functions take them.

    Raises ValueError for a length that is no integer ≥ 0.
    """
    for n in lengths:
        _whole("a length", n, 0)
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)


def check_cu_seqlens(cu: Any, total: int | None = None, name: str = "cu_seqlens") -> tuple[int, ...]:
    """Cumulative lengths `[n + 1]` as integers: sequence i is tokens cu[i] … cu[i + 1] − 1, possibly none.

    Raises ValueError unless they are integers that start at 0, never fall, and end at `total` where that is given.
    """
    ends = f" and end at {total}" if total is not None else ""
    allowed = f"integers [sequences + 1] that start at 0, never fall{ends}"
    x = _tensor(cu)
    if x is None or x.dim() != 1 or x.numel() == 0 or not _integer(x):
        raise ValueError(f"{name} is {shown(cu)}; allowed: {allowed}")
    at = tuple(int(n) for n in x.tolist())
    if at[0] != 0 or any(b < a for a, b in itertools.pairwise(at)) or (total is not None and at[-1] != total):
        raise ValueError(f"{name} is {shown(x)}; allowed: {allowed}")
    return at


def packed_mask(
    cu_q: Any, cu_k: Any = None, causal: bool = False, window: tuple[int | None, int | None] | None = None,
    align: str = "bottom-right",
) -> Tensor:  # fmt: skip
    """Packed sequences as one problem: bool `[1, 1, Tq, Tk]`, True = attend, block-diagonal.

    Row r of a sequence with m queries and n keys is at position r + n − m (bottom-right) or r (top-left) among its own
    keys, and causality and window count from there. Use it with a spec that has neither: alignment over the whole
    of T is another thing. `cu_k` None is `cu_q`.

    Raises ValueError as `check_cu_seqlens` and `AttentionSpec` do, and for differing numbers of sequences.
    """
    at_q, at_k = _both(cu_q, cu_k)
    spec = AttentionSpec(causal=causal, window=window, align=align)
    mask = torch.zeros(at_q[-1], at_k[-1], dtype=torch.bool)
    for rows, keys in _sequences(at_q, at_k):
        block = mask[rows, keys]
        block.fill_(True)
        shift = spec.shift(*block.shape)
        if spec.right is not None:
            block.tril_(shift + spec.right)
        if spec.left is not None:
            block.triu_(shift - spec.left)
    return mask[None, None]


def run_packed(
    run: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any = None,
    spec: AttentionSpec | None = None, **extras: Any,
) -> Packed:  # fmt: skip
    """Each packed sequence alone through `run`, and the results packed again.

    q `[T, H, D]` ("thd"; k and v likewise) or `[1, H, T, D]`. `run(q, k, v, spec, **extras)` is an implementation's
    `.run` or `harness.reference`: anything whose result has `.out` and `.lse`. `mask` and `bias` broadcast to
    `[1, H, Tq, Tk]` and are cut; `kv_lens` `[sequences]` limits each sequence's keys (flash-attn's seqused_k);
    `scales` of a token each, `[1, H, T, 1]`, are cut; everything else is passed on. `quantize=True` therefore scales
    every sequence by its own amax: round before packing where the scale belongs to the whole. A sequence without
    queries gives no rows and is not run; one without keys gives empty rows by `spec.empty_row`.

    Raises ValueError for shapes and cumulative lengths that do not fit, and what `run` raises.
    """
    spec = spec or AttentionSpec()
    thd = _is_thd(q, k, v)
    q, k, v = (x.transpose(0, 1)[None] if thd else x for x in (q, k, v))
    whole = {name: extras.pop(name, None) for name in ("mask", "bias", "sinks")}
    _, given = check(q, k, v, spec, **whole)
    at_q, at_k = _both(cu_q, cu_k, q.shape[2], k.shape[2])
    kv_lens, scales = extras.pop("kv_lens", None), extras.pop("scales", None)
    if kv_lens is not None:
        kv_lens = _lengths("kv_lens", kv_lens, k.shape[2], len(at_q) - 1)
    if scales is not None and not (isinstance(scales, (tuple, list)) and len(scales) == 3):
        raise ValueError(
            f"scales is {shown(scales)}; allowed: three, for q, k and v, each a tensor, a number or None"
        )
    todo = [(i, *at) for i, at in enumerate(_sequences(at_q, at_k)) if at[0].start < at[0].stop]
    if not todo:  # no query at all: an empty call tells the dtypes
        todo, kv_lens = [(0, slice(0, 0), slice(0, 0))], None
    parts = []
    for i, rows, keys in todo:
        own = _own_extras(given, rows, keys)
        if kv_lens is not None:
            own["kv_lens"] = kv_lens[i : i + 1]
        if scales is not None:
            own["scales"] = tuple(
                _cut(s, at, x.shape[2])
                for s, at, x in zip(scales, (rows, keys, keys), (q, k, v), strict=True)
            )
        pieces = (x[:, :, at].contiguous() for x, at in ((q, rows), (k, keys), (v, keys)))
        parts.append(run(*pieces, spec, **own, **extras))
    out = torch.cat([part.out for part in parts], 2)
    lse = None if any(part.lse is None for part in parts) else torch.cat([part.lse for part in parts], 2)
    if thd:
        out, lse = out[0].transpose(0, 1).contiguous(), None if lse is None else lse[0]
    return Packed(out, lse)


def _is_thd(q: Tensor, k: Tensor, v: Tensor) -> bool:
    for name, x in (("q", q), ("k", k), ("v", v)):
        fits = (
            isinstance(x, Tensor) and x.dim() == q.dim() and (x.dim() == 3 or (x.dim() == 4 and len(x) == 1))
        )
        if not fits:
            raise ValueError(
                f"{name} is {shown(x)}; allowed: [T, H, D] for all of q, k, v, or [1, H, T, D] for all"
            )
    return q.dim() == 3


def _own_extras(given: Extras, rows: slice, keys: slice) -> dict[str, Any]:
    cut = {
        n: slice_rows_keys(x, rows, keys) for n in ("mask", "bias") if (x := getattr(given, n)) is not None
    }
    return cut if given.sinks is None else {**cut, "sinks": given.sinks}


def _cut(scale: Any, tokens: slice, total: int) -> Any:
    """A scale's own tokens. One per block of tokens is refused: where sequences meet inside a block it is cut askew."""
    if not isinstance(scale, Tensor) or scale.dim() < 2 or scale.shape[-2] == 1:
        return scale
    if scale.shape[-2] != total:
        raise ValueError(
            f"a scale has shape {tuple(scale.shape)}; allowed for packed tokens: one for all, or for each of {total}"
        )
    return scale[..., tokens, :]


def _both(
    cu_q: Any, cu_k: Any, q_total: int | None = None, k_total: int | None = None
) -> tuple[tuple[int, ...], ...]:
    at_q = check_cu_seqlens(cu_q, q_total, "cu_q")
    at_k = check_cu_seqlens(cu_q if cu_k is None else cu_k, k_total, "cu_k")
    if len(at_q) != len(at_k):
        raise ValueError(
            f"cu_q has {len(at_q) - 1} sequences and cu_k {len(at_k) - 1}; allowed: one number for both"
        )
    return at_q, at_k


def _sequences(at_q: tuple[int, ...], at_k: tuple[int, ...]) -> list[tuple[slice, slice]]:
    rows, keys = ([slice(a, b) for a, b in itertools.pairwise(at)] for at in (at_q, at_k))
    return list(zip(rows, keys, strict=True))


# --- what is given, in one line ----------------------------------------------------------------------------------


def _whole(name: str, n: Any, least: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < least:
        raise ValueError(f"{name} is {n!r}; allowed: an integer ≥ {least}")


def _lengths(name: str, x: Any, most: int, count: int | None = None) -> Tensor:
    """Lengths 0 … most as int64 `[B]`."""
    allowed = f"integers [{'B' if count is None else count}], each 0 to {most}"
    n = _tensor(x)
    if n is None or n.dim() != 1 or not _integer(n) or (count is not None and len(n) != count):
        raise ValueError(f"{name} is {shown(x)}; allowed: {allowed}")
    if n.numel() and (int(n.min()) < 0 or int(n.max()) > most):
        raise ValueError(f"{name} is {shown(n)}; allowed: {allowed}")
    return n.to(torch.int64)


def _tensor(x: Any) -> Tensor | None:
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        return None


def _integer(x: Tensor) -> bool:
    """An empty list is a float tensor and has no wrong number in it."""
    return x.numel() == 0 or not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype is torch.bool)
