"""Inputs in FP64 from NumPy's Philox generator, keyed by case, seed, tensor and block.

A block is up to 4,096 rows of one head, so any part of a long tensor can be drawn alone and gives the same numbers.
NumPy may change a distribution's stream between versions: the hash in the record says which numbers were used.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.case import Case, cases_folder
from harness.extras import draw_extras
from harness.operands import NO_EXTRAS, Extras, check
from harness.recipe import TENSORS

BLOCK_ROWS = 4096


@dataclass(frozen=True)
class Inputs:
    """Exact q `[B, H, L, D]`, k `[B, Hkv, S, D]` and v `[B, Hkv, S, E]`, FP64 (FP32 where rows are
    judged), the extras, and the SHA-256 of all their bytes."""

    q: Tensor
    k: Tensor
    v: Tensor
    hash: str
    extras: Extras = NO_EXTRAS

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


class Source:
    """Random numbers of one case and seed."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.seed = case, seed

    def generator(self, tensor: str, *block: int) -> np.random.Generator:
        """The generator of one block of one tensor (any name may stand for a tensor)."""
        text = "\0".join((self.case.id, str(self.seed), tensor, *map(str, block)))
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
        return np.random.Generator(np.random.Philox(key=key))

    def fill(self, tensor: str, draw: Callable[[np.random.Generator, tuple[int, int]], Any]) -> Tensor:
        """A whole tensor, block by block, from `draw(generator, (rows, width))`."""
        batch, heads, rows, width = self.case.shape.tensor(tensor)
        x = np.empty((batch, heads, rows, width), np.float64 if self.case.rows is None else np.float32)
        for b, h, start in itertools.product(range(batch), range(heads), range(0, rows, BLOCK_ROWS)):
            stop = min(start + BLOCK_ROWS, rows)
            x[b, h, start:stop] = draw(self.generator(tensor, b, h, start), (stop - start, width))
        return torch.from_numpy(x)

    def normal(self, tensor: str, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return self.fill(tensor, lambda g, size: mean + std * g.standard_normal(size))

    def uniform(self, tensor: str, low: float, high: float) -> Tensor:
        return self.fill(tensor, lambda g, size: g.uniform(low, high, size))


def make_inputs(case: Case, seed: int) -> Inputs:
    """The case's inputs for one seed.

    Raises ValueError for an unknown kind, a parameter the kind does not take, tensors or extras that do not fit the
    case's shape, or a data file that cannot be read.
    """
    draw = KINDS.get(case.draw.kind)
    if draw is None:
        raise ValueError(f"case {case.id} draws {case.draw.kind!r}; allowed: {', '.join(KINDS)}")
    source = Source(case, seed)
    try:
        wide = torch.float64 if case.rows is None else torch.float32
        q, k, v = (x.to(wide).contiguous() for x in draw(source, **case.draw.params))
    except (TypeError, ArithmeticError, IndexError, MemoryError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"case {case.id} draws {case.draw.kind!r} with wrong parameters: {first_line}"
        ) from None
    except ValueError as error:
        error.add_note(f"in case {case.id}")
        raise
    drawn = draw_extras(case, source.generator)
    try:
        got, extras = check(q, k, v, case.spec, **drawn)
    except ValueError as error:
        raise ValueError(f"case {case.id}: {error}") from None
    if got != case.shape:
        raise ValueError(f"case {case.id} has shape {case.shape} but its inputs have {got}; make them agree")
    digest = hashlib.sha256()
    for x in (q, k, v, *drawn.values()):
        whole = np.ascontiguousarray(x.numpy())
        digest.update(whole.tobytes() if case.rows is None else whole.data)  # a long context needs no copy
    return Inputs(q, k, v, digest.hexdigest(), extras)


Tensors = tuple[Tensor, Tensor, Tensor]


def _normal(source: Source, q: float = 1.0, k: float = 1.0, v: float = 1.0, v_mean: float = 0.0) -> Tensors:
    """Independent normals with these standard deviations. `q=8` makes peaked rows."""
    return source.normal("q", std=q), source.normal("k", std=k), source.normal("v", v_mean, v)


def _outliers(source: Source, rate: float = 0.001, std: float = 10.0) -> Tensors:
    """N(0, 1) + N(0, std²)·Bernoulli(rate) in every tensor (FlashAttention-3, section 4.3)."""

    def draw(g: np.random.Generator, size: tuple[int, int]) -> Any:
        return g.standard_normal(size) + std * g.standard_normal(size) * (g.random(size) < rate)

    q, k, v = (source.fill(t, draw) for t in TENSORS)
    return q, k, v


def _channel_outliers(source: Source, channel: int = 3, factor: float = 30.0) -> Tensors:
    """One channel of K is `factor` times the others, as trained models show."""
    q, k, v = _normal(source)
    k[..., channel] *= factor
    return q, k, v


def _amplitude(source: Source, raw: float | None = None, score: float | None = None) -> Tensors:
    """Normals, with q scaled (and turned, if need be) so that the q·k (`raw`) or scale·q·k (`score`) of largest
    magnitude is this, among the pairs that causality leaves visible."""
    if (raw is None) == (score is None):
        raise TypeError("give raw= or score=, one of them")
    q, k, v = _normal(source)
    shape, spec = source.case.shape, source.case.spec
    pairs = q @ k.repeat_interleave(shape.group, 1).mT
    if spec.causal:
        pairs = pairs.tril(spec.shift(shape.q_len, shape.S))
    peak = float(pairs.flatten()[pairs.abs().argmax()]) if pairs.numel() else 0.0
    if not peak:
        raise TypeError("a shape where no visible q·k differs from 0 has no amplitude")
    target = raw if raw is not None else (score or 0.0) / spec.scale_for(q.shape[-1])
    return q * (target / peak), k, v


def _tied(source: Source, ties: int = 4, score: float = 12.0) -> Tensors:
    """The first `ties` keys are one vector, on which every query scores exactly `score`: P = 1 there, and V lies in
    [−4, −2] (the setting of arXiv 2510.04212, where tied maxima bias BF16 sums)."""
    d = source.case.shape.head_dim
    q, k, _ = _normal(source, q=0.05, k=0.05)
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[..., :ties, 1:] = 0.0
    k[..., :ties, 0] = score / source.case.spec.scale_for(d)
    return q, k, source.uniform("v", -4.0, -2.0)


def _deep_negative(source: Source, depth: float = 200.0) -> Tensors:
    """Every score lies near −depth: exp without max subtraction gives 0, and the row has no mass."""
    q, k, v = _normal(source)
    q[..., 0] = 1.0
    k[..., 0] = -depth / source.case.spec.scale_for(source.case.shape.head_dim)
    return q, k, v


def _heavy_key(source: Source, shift: float = 1.0, key: int = 0) -> Tensors:
    """One key draws most of the mass of every row, as the first token of real models does."""
    q, k, v = _normal(source)
    q += shift
    k[..., key, :] += shift
    return q, k, v


def _uniform(source: Source, centre: float = 20.0, half_width: float = 10.0) -> Tensors:
    """q and k uniform around a mean far from 0 (PASA, arXiv 2503.01873): raw scores grow like D·centre²."""
    low, high = centre - half_width, centre + half_width
    return source.uniform("q", low, high), source.uniform("k", low, high), source.normal("v")


def _values(source: Source, q: Any, k: Any, v: Any) -> Tensors:
    """The numbers themselves, as nested lists of rank 4."""
    try:
        return tuple(torch.tensor(x, dtype=torch.float64) for x in (q, k, v))  # type: ignore[return-value]
    except ValueError as error:  # ragged lists
        raise TypeError(str(error)) from None


_EDITS: dict[str, Callable[[Tensor, float], Any]] = {
    "set": lambda x, number: number,
    "times": lambda x, number: x * number,
    "add": lambda x, number: x + number,
    "sign": lambda x, number: torch.where(x < 0, -number, number),
}


def _edited(source: Source, edits: Any = (), **normal: float) -> Tensors:
    """Normals (`normal` are that kind's parameters), then edits in their order: (tensors, heads, rows, channels, what,
    number). `tensors` is any of "qkv"; heads, rows and channels are an index, a list of them (negative ones count from
    the end) or None for all; `what` is set, times, add or sign (the number with the drawn sign). "nan", "inf" and
    "-inf" are numbers."""
    tensors = dict(zip(TENSORS, _normal(source, **normal), strict=True))
    for edit in edits:
        try:
            names, *parts, what, number = edit
            change, number = _EDITS[what], float(number)
            chosen = [tensors[name] for name in names]
            heads, rows, channels = parts
        except (KeyError, ValueError) as error:
            allowed = f"(letters among qkv, heads, rows, channels, one of {', '.join(_EDITS)}, a number)"
            raise TypeError(f"an edit is {edit!r}; allowed: {allowed}") from error
        for x in chosen:
            axes = zip(x.shape, (None, heads, rows, channels), strict=True)
            at = torch.meshgrid(*(_places(n, part) for n, part in axes), indexing="ij")
            x[at] = torch.as_tensor(change(x[at], number), dtype=x.dtype)
    return tensors["q"], tensors["k"], tensors["v"]


def _places(size: int, part: Any) -> Tensor:
    """Indices of an axis of this size that `part` names."""
    return torch.arange(size)[
        list(part) if isinstance(part, tuple) else slice(None) if part is None else [part]
    ]


def _rope(source: Source, start: int = 0, base: float = 1e4) -> Tensors:
    """Normals, q and k rotated at the positions of their tokens, the first key at `start`: channels 2c and 2c + 1 turn
    by position·base^(−2c/D). Angles are FP64: near a position of 2^14 they are good to 2^-38."""
    q, k, v = _normal(source)
    shape = source.case.shape
    shift = source.case.spec.shift(shape.q_len, shape.S)
    return (
        rotate_at(q, start + shift + torch.arange(shape.q_len), base),
        rotate_at(k, start + torch.arange(shape.S), base),
        v,
    )


def rotate_at(x: Tensor, position: Tensor, base: float = 1e4) -> Tensor:
    """`x` `[B, H, L, D]` (D even) rotated as RoPE does at `position` `[L]`, in FP64."""
    d = x.shape[3]
    if d % 2:
        raise TypeError(f"head_dim is {d}; allowed: an even one, channels turn in pairs")
    turn = base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = position.double()[:, None] * turn
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], torch.cos(angle), torch.sin(angle)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def _layer(source: Source, **params: Any) -> Tensors:
    """What a layer's projections make of its X, in FP64: what attention inside it is given."""
    from harness.layer_inputs import attention_inputs  # it draws with this module's Source
    from harness.optional import MissingExtra

    try:
        return attention_inputs(source.case, source.seed)
    except MissingExtra as error:
        raise ValueError(f"case {source.case.id}: {error}") from None


def _file(source: Source, path: str, prefix: str, tokens: int | None = None) -> Tensors:
    """Tensors `{prefix}.q`, `.k`, `.v` of a safetensors file, the first `tokens` of each. A relative path starts at the
    folder of the case file, or of the built-in cases."""
    origin = source.case.source
    folder = Path(origin).parent if origin.endswith(".py") else cases_folder()
    return tuple(x[:, :, :tokens] for x in read_tensors(folder / path, [f"{prefix}.{t}" for t in TENSORS]))  # type: ignore[return-value]


def read_tensors(path: Path, names: list[str]) -> list[Tensor]:
    """Named tensors of a safetensors file. Raises ValueError in one line when it is absent, damaged or lacks them."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            if missing := [n for n in names if n not in present]:
                raise ValueError(f"{path} has no {', '.join(missing)}; it holds {', '.join(sorted(present))}")
            return [file.get_tensor(n) for n in names]
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give the path of a safetensors file") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None


KINDS: dict[str, Callable[..., Tensors]] = {
    "normal": _normal,
    "outliers": _outliers,
    "channel_outliers": _channel_outliers,
    "amplitude": _amplitude,
    "tied": _tied,
    "deep_negative": _deep_negative,
    "heavy_key": _heavy_key,
    "uniform": _uniform,
    "edited": _edited,
    "rope": _rope,
    "values": _values,
    "file": _file,
    "layer": _layer,
    "smollm2_layer": _layer,
}
