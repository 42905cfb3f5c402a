"""Matrix products with a limited accumulator, bit by bit: what `harness.accumulator` describes, on tensors.

Everything runs in FP64, where products of FP32 values and sums of aligned integers are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.accumulator import Accumulator

ELEMENTS = 2**19  # products of one step held at a time


def limited_matmul(a: Tensor, b: Tensor, accumulator: Accumulator) -> Tensor:
    """a `[…, M, K]` @ b `[…, K, N]`, both FP32, as the accumulator adds: FP32.

    NaN and infinities come out as IEEE 754 has them; a sum beyond FP32 is infinite. Exponents are unbounded within a
    sum, and an operand counts with its own binade: where the largest operands of a step are subnormals of their format,
    hardware aligns to that format's least exponent instead, and loses up to its mantissa bits more.
    """
    x, y = a.double(), b.double()
    if bool(torch.isfinite(x).all()) and bool(torch.isfinite(y).all()):
        return _by_rows(x, y, accumulator)
    plain = x @ y
    finite = _by_rows(x.nan_to_num(0.0, 0.0, 0.0), y.nan_to_num(0.0, 0.0, 0.0), accumulator)
    return torch.where(torch.isfinite(plain), finite, plain.float())


def _by_rows(x: Tensor, y: Tensor, accumulator: Accumulator) -> Tensor:
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])  # type: ignore[no-untyped-call]
    width = max(1, batch.numel() * accumulator.depth * y.shape[-1])
    rows = max(1, ELEMENTS // width)
    out = torch.zeros(*batch, x.shape[-2], y.shape[-1], dtype=torch.float32, device=x.device)
    tops = binade(y)
    for start in range(0, x.shape[-2], rows):
        part = x[..., start : start + rows, :]
        out[..., start : start + rows, :] = _sum(
            part, y, tops, accumulator, out[..., start : start + rows, :]
        )
    return out


def _sum(x: Tensor, y: Tensor, y_tops: Tensor, accumulator: Accumulator, total: Tensor) -> Tensor:
    """Sums of a few rows, from a `total` of zeros."""
    x_tops, held = binade(x), torch.zeros_like(total, dtype=torch.float64)
    n, depth, promote = x.shape[-1], accumulator.depth, accumulator.promote
    for start in range(0, n, depth):
        k = slice(start, min(start + depth, n))
        products = x[..., k, None] * y[..., None, k, :]
        top = (x_tops[..., k, None] * y_tops[..., None, k, :]).amax(-2)
        held = step(products, top, held, accumulator.bits)
        if promote is not None and (start + depth) % promote == 0:
            total = total + held.float()
            held = torch.zeros_like(held)
    return total + held.float()


def step(products: Tensor, top: Tensor, held: Tensor, bits: int) -> Tensor:
    """One step: `held` `[…, N]` and `products` `[…, depth, N]` (overwritten), the largest of whose exponents is 2^e =
    `top`, aligned, truncated, added and truncated again."""
    unit = torch.maximum(top, binade(held)) * 2.0**-bits
    unit = torch.where(unit == 0, 1.0, unit)
    aligned = products.div_(unit[..., None, :]).trunc_().sum(-2).add_((held / unit).trunc_())
    return significant(aligned.mul_(unit), bits + 1)


def significant(x: Tensor, bits: int) -> Tensor:
    """FP64 truncated toward zero to so many significant bits."""
    return (x.view(torch.int64) & (-1 << (53 - bits))).view(torch.float64)


def binade(x: Tensor) -> Tensor:
    """2^⌊log2|x|⌋ of normal FP64 values, 0 of 0: the exponent field, read as a number."""
    return (x.contiguous().view(torch.int64) & (0x7FF << 52)).view(torch.float64)
