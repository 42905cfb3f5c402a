"""Attention from its definition, one scalar at a time: no tensor code, and nothing of `harness`.

Sums are `math.fsum` (exact but for one rounding), exp, log and tanh are the C library's. Slow on purpose.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

INF = math.inf
Lengths = Sequence[int]


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    empty_row: str = "zero", mask: np.ndarray | None = None, bias: np.ndarray | None = None,
    sinks: Any = None, kv_lens: Any = None, alibi: bool = False, padded: tuple[str, Lengths] | None = None,
    packed: tuple[Lengths, Lengths] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """out `[B, H, L, E]`, lse and row_max `[B, H, L]` of q `[B, H, L, D]`, k `[B, Hkv, S, D]`, v `[B, Hkv, S, E]`.

    `alibi`: −slope·|j − position| joins the bias. `padded=(side, lengths [B])`: which keys are real. `packed=(query
    lengths, key lengths)` of sequences in one axis, each with its own position.
    """
    (batch, heads, q_len, d), (_, kv_heads, kv_len, e) = q.shape, v.shape
    if scale is None:
        scale = 1.0 / math.sqrt(d) if d else 1.0
    slopes = alibi_slopes(heads) if alibi else [0.0] * heads
    queries, keys, channels = q.tolist(), k.tolist(), v.tolist()
    out, lse = np.empty((batch, heads, q_len, e)), np.empty((batch, heads, q_len))
    row_max = np.empty_like(lse)
    for b, h, i in itertools.product(range(batch), range(heads), range(q_len)):
        kv_head = h // (heads // kv_heads)
        length = kv_len if kv_lens is None else int(kv_lens[b])
        start, stop, position = sequence_of(i, q_len, length, align, packed)
        scores: dict[int, float] = {}  # of the visible keys
        for j in range(start, min(stop, length)):
            seen = mask is None or bool(broadcast_at(mask, b, h, i, j))
            seen = seen and (padded is None or is_real(j, kv_len, padded[0], padded[1][b]))
            added = 0.0 if bias is None else broadcast_at(bias, b, h, i, j)
            if seen and added != -INF and in_reach(j, position, causal, window):
                s = scale * total(a * c for a, c in zip(queries[b][h][i], keys[b][kv_head][j], strict=True))
                if softcap is not None:
                    s = softcap * math.tanh(s / softcap)
                scores[j] = s + (added - slopes[h] * abs(j - position))
        sink = -INF if sinks is None else float(sinks[h])
        values = {j: channels[b][kv_head][j] for j in scores}
        out[b, h, i], lse[b, h, i], row_max[b, h, i] = one_row(scores, values, sink, e, empty_row)
    return out, lse, row_max


def sequence_of(
    i: int, q_len: int, length: int, align: str, packed: tuple[Lengths, Lengths] | None
) -> tuple[int, int, int]:
    """First key and end of row i's own sequence, and where the row stands: all three as places on the key axis."""
    if packed is None:
        return 0, length, i + (length - q_len if align == "bottom-right" else 0)
    row = key = 0
    for m, n in zip(*packed, strict=True):
        if i < row + m:
            return key, key + n, key + (i - row) + (n - m if align == "bottom-right" else 0)
        row, key = row + m, key + n
    raise ValueError(f"row {i} is in none of the packed sequences; allowed: 0 to {row - 1}")


def in_reach(j: int, position: int, causal: bool, window: tuple[int | None, int | None] | None) -> bool:
    """Whether causality and window let a query at this position see key j."""
    left, right = window or (None, None)
    if causal and j > position:
        return False
    if left is not None and j < position - left:
        return False
    return right is None or j <= position + right


def is_real(j: int, kv_len: int, side: str, length: int) -> bool:
    """Whether slot j holds a key, and not the padding that lies on this side."""
    return j < length if side == "right" else j >= kv_len - length


def alibi_slopes(heads: int) -> list[float]:
    """Press, Smith and Lewis: a geometric series for powers of two, filled up from every other one of twice as many."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8.0 * k / heads) for k in range(1, heads + 1)]
    below = 2 ** int(math.log2(heads))
    return alibi_slopes(below) + alibi_slopes(2 * below)[::2][: heads - below]


def one_row(
    scores: dict[int, float], values: dict[int, list[float]], sink: float, width: int, empty_row: str
) -> tuple[list[float], float, float]:
    top = largest(scores.values())
    m = largest([top, sink])
    if m == -INF:
        rule = (0.0, -INF) if empty_row == "zero" else (math.nan, math.nan)
        return [rule[0]] * width, rule[1], top
    if math.isnan(m) or m == INF:
        return [math.nan] * width, math.nan, top
    weights = {j: math.exp(s - m) for j, s in scores.items()}
    l = math.fsum([*weights.values(), math.exp(sink - m)])  # noqa: E741
    weighing = [j for j, s in scores.items() if s != -INF]
    out = [channel([(weights[j], values[j][c]) for j in weighing]) / l for c in range(width)]
    return out, m + math.log(l), top


def channel(terms: list[tuple[float, float]]) -> float:
    """Σ w·x of keys that weigh: a non-finite x passes its own on, however small its weight."""
    special = [x for _, x in terms if not math.isfinite(x)]
    return sum(special) if special else math.fsum(w * x for w, x in terms)  # ∞ − ∞ is NaN


def largest(xs: Iterable[float]) -> float:
    """Max with NaN on top; −∞ of nothing."""
    xs = list(xs)
    return math.nan if any(math.isnan(x) for x in xs) else max(xs, default=-INF)


def total(xs: Iterable[float]) -> float:
    """`fsum`, which refuses ∞ − ∞ and is not needed where an addend is not finite."""
    xs = list(xs)
    return math.fsum(xs) if all(math.isfinite(x) for x in xs) else sum(xs)


def broadcast_at(x: np.ndarray, *index: int) -> Any:
    """`x[index]` of an array that broadcasts to the rank of `index`."""
    own = index[len(index) - x.ndim :]
    return x[tuple(0 if size == 1 else n for size, n in zip(x.shape, own, strict=True))].item()
