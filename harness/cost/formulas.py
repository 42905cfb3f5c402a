"""The textbook's formulas, one product at a time. All counts are integers, of one layer unless `layers` is named.

B batch · T query tokens · S keys · D width of the model · N query heads · K kv heads · H head_dim · F inner width of
the FFN. A product of [M, R] by [R, C] is 2·M·R·C FLOPs: a multiply-add counts as two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """One matrix product: its FLOPs, the parameters of its weights, and the shape of its output."""

    flops: int
    params: int
    output: tuple[int, ...]


def product_flops(rows: int, inner: int, columns: int) -> int:
    """FLOPs of [rows, inner] by [inner, columns]."""
    return 2 * rows * inner * columns


def projections(
    batch: int, tokens: int, width: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, Product]:
    """W_Q, W_K, W_V and W_O: 2BTDNH, 2BTDKH, 2BTDKH and 2BTDNH FLOPs, with as many parameters as FLOPs ÷ 2BT.

    Q is [B, T, N, H], not [B, T, D, H]: N·H is often D, but N never is.
    """
    rows = batch * tokens

    def made(out_heads: int) -> Product:
        flops = product_flops(rows, width, out_heads * head_dim)
        return Product(flops, width * out_heads * head_dim, (batch, tokens, out_heads, head_dim))

    back = product_flops(rows, heads * head_dim, width)
    return {
        "q": made(heads),
        "k": made(kv_heads),
        "v": made(kv_heads),
        "o": Product(back, heads * head_dim * width, (batch, tokens, width)),
    }


def score_products(batch: int, tokens: int, keys: int, heads: int, head_dim: int) -> dict[str, Product]:
    """Q·Kᵀ and P·V with nothing hidden: 2BTSNH FLOPs each. Grouped keys save bytes and no FLOPs: K is not in it."""
    flops = batch * heads * product_flops(tokens, keys, head_dim)
    return {
        "scores": Product(flops, 0, (batch, tokens, keys, heads)),
        "values": Product(flops, 0, (batch, tokens, heads, head_dim)),
    }


def full_attention_flops(length: int, width: int) -> int:
    """4·L²·d of Q·Kᵀ and P·V over all heads, width = heads · head_dim: the number of heads is not in it."""
    return 4 * length**2 * width


def causal_attention_flops(length: int, width: int) -> int:
    """2·L·(L + 1)·d: the half of `full_attention_flops` that a causal mask leaves, and half the diagonal."""
    return 2 * length * (length + 1) * width


def ffn_flops(tokens: int, width: int, inner: int, matrices: int = 2) -> int:
    """FLOPs of `matrices` products between width and inner: 2, or 3 where a gate is one of them. Each is 2·T·D·F, hence
    8·L·d² of each where F = 4d."""
    return matrices * product_flops(tokens, width, inner)


def attention_over_ffn(length: int, width: int, products: int = 2) -> float:
    """4·L²·d of full attention ÷ 8·L·d² of each FFN product with F = 4d: L/(4d) for the two an FFN has.

    The source notes' L/(2d) is `products=1`. Their 8·L·d² are the FLOPs of one of the two products (or the
    multiply-adds of both), while attention's 4·L²·d are FLOPs of both of its own.
    """
    return full_attention_flops(length, width) / ffn_flops(length, width, 4 * width, products)


def parity_length(width: int, products: int = 2) -> int:
    """L at which full attention takes as many FLOPs as `products` FFN products with F = 4d: 2·d of each."""
    return 2 * width * products


def kv_bytes(tokens: int, layers: int, kv_width: int, value_bytes: int) -> int:
    """Bytes of K and V in all layers, 2·L·layers·d_kv·b, and bytes that a decode step reads of them. d_kv is kv heads ·
    head_dim. Scales are not counted: `harness.cost.kv_cache_bytes` does."""
    return 2 * tokens * layers * kv_width * value_bytes
