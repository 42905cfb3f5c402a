"""How a case's mask, bias, sinks and lengths are drawn: a kind from the tables below and its numbers.

Drawn numbers are rounded to a format that every kernel takes without rounding them again (BF16 unless the case says
otherwise), so that a bias is no part of any implementation's error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.case import Case, Draw
from harness.formats import get_format
from harness.options import alibi_bias, cu_seqlens, packed_mask, padding_mask
from harness.rounding import round_to

Generators = Callable[..., np.random.Generator]


class ExtraSource:
    """Random numbers and sizes of one case and seed."""

    def __init__(self, case: Case, generator: Generators) -> None:
        self.case, self.generator = case, generator

    def size(self, axes: str) -> tuple[int, ...]:
        """The axes named in `axes` at full size, the others 1: "HS" is [1, H, 1, S]."""
        shape = self.case.shape
        full = {"B": shape.batch, "H": shape.heads, "L": shape.q_len, "S": shape.S}
        if not isinstance(axes, str) or set(axes) - set(full):
            raise TypeError(f"axes is {axes!r}; allowed: letters among B, H, L, S")
        return tuple(n if name in axes else 1 for name, n in full.items())


def draw_extras(case: Case, generator: Generators) -> dict[str, Tensor]:
    """The case's extras by name. `generator(name)` gives the random numbers of one of them.

    Raises ValueError for an unknown kind or parameters that the kind does not take.
    """
    source = ExtraSource(case, generator)
    return {name: _draw(source, name, draw) for name, draw in sorted(case.extras.items())}


def _draw(source: ExtraSource, name: str, draw: Draw) -> Tensor:
    kinds = KINDS[name]
    if draw.kind not in kinds:
        raise ValueError(
            f"case {source.case.id} draws its {name} as {draw.kind!r}; allowed: {', '.join(kinds)}"
        )
    try:
        return kinds[draw.kind](source, **draw.params)
    except (TypeError, ValueError, ArithmeticError, IndexError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"case {source.case.id} draws its {name} as {draw.kind!r} with wrong parameters: {first_line}"
        ) from None


# --- masks: bool, True = attend ----------------------------------------------------------------------------------


def _mask_random(source: ExtraSource, keep: float = 0.7, axes: str = "BHLS") -> Tensor:
    """Each place is shown with probability `keep`, over the named axes and broadcast over the others."""
    if not 0 <= keep <= 1:
        raise TypeError(f"keep is {keep!r}; allowed: a probability, 0 to 1")
    return torch.from_numpy(source.generator("mask").random(source.size(axes)) < keep)


def _mask_padding(
    source: ExtraSource, lengths: Sequence[int], side: str = "right", queries: bool = False
) -> Tensor:
    """Padding of the keys, and with `queries` of the same rows."""
    shape = source.case.shape
    mask = padding_mask(list(lengths), shape.S, side)
    if queries:
        mask = mask & padding_mask([n - shape.S + shape.q_len for n in lengths], shape.q_len, side).mT
    return mask


def _mask_packed(
    source: ExtraSource, lengths: Sequence[int], causal: bool = True, window: Any = None
) -> Tensor:
    """Sequences of these lengths, one after the other, each alone."""
    return packed_mask(cu_seqlens(list(lengths)), causal=causal, window=window)


def _mask_rows(source: ExtraSource, hidden: Sequence[int]) -> Tensor:
    """Rows that see nothing, `[L, 1]`."""
    mask = torch.ones(source.case.shape.q_len, 1, dtype=torch.bool)
    mask[list(hidden)] = False
    return mask


def _mask_keys(source: ExtraSource, visible: Sequence[int]) -> Tensor:
    """These keys alone, `[S]`; negative ones count from the end."""
    mask = torch.zeros(source.case.shape.S, dtype=torch.bool)
    mask[list(visible)] = True
    return mask


def _mask_values(_: ExtraSource, values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


# --- biases ------------------------------------------------------------------------------------------------------


def _bias_alibi(source: ExtraSource, symmetric: bool = True, format: str = "bf16") -> Tensor:
    shape, align = source.case.shape, source.case.spec.align
    return round_to(alibi_bias(shape.heads, shape.q_len, shape.S, align, symmetric=symmetric), format)


def _bias_normal(source: ExtraSource, std: float = 1.0, axes: str = "HLS", format: str = "bf16") -> Tensor:
    """Normals over the named axes, as relative position biases are."""
    if not 0 <= std < math.inf:
        raise TypeError(f"std is {std!r}; allowed: a finite number ≥ 0")
    drawn = std * source.generator("bias").standard_normal(source.size(axes))
    return round_to(torch.from_numpy(drawn), format)


def _bias_hiding(
    source: ExtraSource, value: float | str, lengths: Sequence[int] = (), side: str = "left",
    causal: bool = False, window: Any = None, format: str = "fp32",
) -> Tensor:  # fmt: skip
    """A mask by numbers: `value` (a number, "-inf", or a format's name for its finfo.min) on padding, and again on what
    causality and window hide, added up in `format`, where the sum may overflow."""
    shape = source.case.shape
    named = isinstance(value, str) and value != "-inf"
    number = -get_format(str(value)).max if named else float(value)
    total = torch.zeros(1, 1, shape.q_len, shape.S, dtype=torch.float64)
    if causal or window is not None:
        seen = packed_mask([0, shape.q_len], [0, shape.S], causal, window, source.case.spec.align)
        total = total.masked_fill(~seen, number)
    if lengths:
        total = total + torch.where(padding_mask(list(lengths), shape.S, side), 0.0, number)
    return round_to(total, format)


def _bias_values(_: ExtraSource, values: Any, format: str = "fp32") -> Tensor:
    """The numbers themselves; "-inf" hides."""
    return round_to(torch.tensor(_numbers(values), dtype=torch.float64), format)


def _numbers(x: Any) -> Any:
    return [_numbers(v) for v in x] if isinstance(x, (tuple, list)) else float(x)


# --- sinks and lengths -------------------------------------------------------------------------------------------


def _sinks_values(source: ExtraSource, values: Sequence[float]) -> Tensor:
    return torch.tensor(_numbers(values), dtype=torch.float64)


def _sinks_normal(source: ExtraSource, mean: float = 0.0, std: float = 1.0, format: str = "bf16") -> Tensor:
    drawn = source.generator("sinks").standard_normal(source.case.shape.heads)
    return round_to(torch.from_numpy(mean + std * drawn), format)


def _lens_values(_: ExtraSource, values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _lens_uniform(source: ExtraSource, low: int = 0, high: int | None = None) -> Tensor:
    """Whole lengths from `low` to `high` (kv_len where it is None), both included."""
    shape = source.case.shape
    top = shape.S if high is None else high
    return torch.from_numpy(source.generator("kv_lens").integers(low, top, shape.batch, endpoint=True))


KINDS: Mapping[str, Mapping[str, Callable[..., Tensor]]] = {
    "mask": {
        "random": _mask_random, "padding": _mask_padding, "packed": _mask_packed, "rows": _mask_rows,
        "keys": _mask_keys, "values": _mask_values,
    },
    "bias": {"alibi": _bias_alibi, "normal": _bias_normal, "hiding": _bias_hiding, "values": _bias_values},
    "sinks": {"values": _sinks_values, "normal": _sinks_normal},
    "kv_lens": {"values": _lens_values, "uniform": _lens_uniform},
}  # fmt: skip
