"""Drawn problems: every option of one attention call in every combination, for the truth, the oracle and the rest.

Sizes and rules are drawn before values, values come from one seed and lie on a coarse grid unless `fine` is drawn: a
failing case shrinks to few keys, default rules and short numbers, which its `repr` shows and nothing else.

TOL: an output is a weighted mean, so an error δ in every score moves it by at most 2δ·max|v|, and the log-sum-exp by
δ. `problems` keeps Σ|q||k| ≤ 16, |scale| ≤ 2, |bias| ≤ 3 and ALiBi's slope·distance ≤ 17 (S, L ≤ 9): |s| ≤ 52 and
δ ≤ (D + 6)·2⁻⁵³·52 ≤ 6e-14 for D ≤ 4; the sums over at most 9 keys and the roundings of exp, division and log add less
than 40·2⁻⁵³·max(1, |lse|). TOL is over five times 2δ, to be multiplied by max(1, max|v|) for out and max(1, |lse|).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import torch
from hypothesis import strategies as st
from torch import Tensor

from harness.options import alibi_bias, cu_seqlens, packed_mask, padding_mask
from harness.spec import AttentionSpec, Shape
from harness.truth import Truth, reference

TOL = 1e-12


@dataclass
class Problem:
    """One call in NumPy. `extras` are mask, bias, sinks, kv_lens; `made` what `harness.options` makes of `alibi`,
    `padded` and `packed`, which the oracle takes as they are (and computes by its own formulas)."""

    tensors: list[np.ndarray]
    rules: dict[str, Any]
    extras: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        sizes = zip("qkv", self.tensors, strict=True)
        default = AttentionSpec()
        parts = [f"{n}={list(x.shape)} {np.round(x, 3).tolist()}" for n, x in sizes]
        parts += [f"{n}={x!r}" for n, x in self.rules.items() if x != getattr(default, n)]
        parts += [
            f"{n}={list(np.shape(x))} {np.round(np.asarray(x), 3).tolist()}" for n, x in self.extras.items()
        ]
        return f"Problem({', '.join([*parts, *(f'{n}={x!r}' for n, x in self.made.items())])})"

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        """Hypothesis prints a dataclass field by field where it finds no method of this name."""
        printer.text(repr(self))

    @property
    def shape(self) -> Shape:
        (b, h, length, d), (_, kv_heads, s, e) = self.tensors[0].shape, self.tensors[2].shape
        return Shape(b, h, length, d, kv_heads=kv_heads, kv_len=s, value_dim=e)

    def call(self) -> tuple[tuple[Tensor, Tensor, Tensor], AttentionSpec, dict[str, Tensor]]:
        """The call in the words of `harness`: packed sequences as a mask that holds their rules."""
        q, k, v = (torch.from_numpy(x) for x in self.tensors)
        extras = {n: torch.from_numpy(np.asarray(x)) for n, x in self.extras.items()}
        shape, spec = self.shape, AttentionSpec(**self.rules)
        masks = [extras[n] for n in ("mask",) if n in extras]
        if "padded" in self.made:
            side, lengths = self.made["padded"]
            masks.append(padding_mask(lengths, shape.S, side))
        if self.made.get("alibi"):
            bias = alibi_bias(shape.heads, shape.q_len, shape.S, spec.align, kv_lens=extras.get("kv_lens"))
            extras["bias"] = bias + extras["bias"] if "bias" in extras else bias
        if "packed" in self.made:
            offsets = [cu_seqlens(n) for n in self.made["packed"]]
            masks.append(packed_mask(*offsets, spec.causal, spec.window, spec.align))
            spec = AttentionSpec(scale=spec.scale, softcap=spec.softcap, empty_row=spec.empty_row)
        if masks:
            extras["mask"] = masks[0] if len(masks) == 1 else masks[0] & masks[1]
            for more in masks[2:]:
                extras["mask"] = extras["mask"] & more
        return (q, k, v), spec, extras

    def truth(self, **changes: Any) -> Truth:
        (q, k, v), spec, extras = self.call()
        return reference(q, k, v, spec, **{**extras, **changes})

    def by_oracle(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return oracle.attention(*self.tensors, **self.rules, **self.extras, **self.made)


@st.composite
def cuts(draw: st.DrawFn, total: int, parts: int) -> list[int]:
    """`parts` lengths ≥ 0 that add up to `total`."""
    edges = sorted(draw(st.integers(0, total)) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *edges], [*edges, total], strict=True)]


@st.composite
def problems(
    draw: st.DrawFn, special: bool = False, made: bool = False, longest: int = 6, causal: bool | None = None
) -> Problem:
    """Every option in every combination; with `special`, NaN and ±Inf anywhere; with `made`, ALiBi, padding and packed
    sequences too."""
    b, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads = kv_heads * group
    tops = ((0, longest - 1), (0, longest), (0, 4), (0, 3))
    length, s, d, e = (draw(st.integers(low, top)) for low, top in tops)
    side = st.sampled_from([None, 0, 1, 2, 7])
    rules = {
        "causal": draw(st.booleans()) if causal is None else causal,
        "align": draw(st.sampled_from(["bottom-right", "top-left"])),
        "window": draw(st.one_of(st.none(), st.tuples(side, side))),
        "scale": draw(st.sampled_from([None, None, 0.0, 0.3, -1.0, 2.0])),
        "softcap": draw(st.sampled_from([None, None, 0.5, 30.0])),
        "empty_row": draw(st.sampled_from(["zero", "nan"])),
    }
    sizes = {n: _broadcast_size(draw, (b, heads, length, s)) for n in ("mask", "bias") if draw(st.booleans())}
    sunk, ragged = draw(st.booleans()), draw(st.booleans())
    options = draw(_made(b, length, s)) if made else {}
    rng, values = _values(draw, special)
    extras: dict[str, Any] = {}
    if "mask" in sizes:
        extras["mask"] = np.asarray(rng.random(sizes["mask"]) < draw(st.sampled_from([0.95, 0.7, 0.3])))
    if "bias" in sizes:
        bias = values(*sizes["bias"], top=3.0)
        extras["bias"] = np.asarray(np.where(rng.random(bias.shape) < 0.2, -math.inf, bias))
    if sunk:
        extras["sinks"] = np.where(rng.random(heads) < 0.1, -math.inf, values(heads))
    if ragged:
        extras["kv_lens"] = rng.integers(0, s + 1, b)
    tensors = [values(b, heads, length, d), values(b, kv_heads, s, d), values(b, kv_heads, s, e)]
    return Problem(tensors, rules, extras, options)


def _broadcast_size(draw: st.DrawFn, full: tuple[int, ...]) -> tuple[int, ...]:
    """Any axis 1 or whole, leading ones left out."""
    return tuple(n if draw(st.booleans()) else 1 for n in full[4 - draw(st.integers(0, 4)) :])


@st.composite
def _made(draw: st.DrawFn, b: int, length: int, s: int) -> dict[str, Any]:
    some: dict[str, Any] = {}
    if draw(st.booleans()):
        some["padded"] = (
            draw(st.sampled_from(["right", "left"])),
            [draw(st.integers(0, s)) for _ in range(b)],
        )
    kind = draw(
        st.sampled_from(["neither", "alibi", "packed"])
    )  # packed has positions that ALiBi's bias has not
    if kind == "alibi":
        some["alibi"] = True
    if kind == "packed":
        parts = draw(st.integers(1, 3))
        some["packed"] = (draw(cuts(length, parts)), draw(cuts(s, parts)))
    return some


def _values(draw: st.DrawFn, special: bool) -> tuple[np.random.Generator, Any]:
    fine, rng = draw(st.booleans()), np.random.default_rng(draw(st.integers(0, 2**32)))
    rate = draw(st.sampled_from([0.02, 0.2])) if special else 0.0

    def values(*size: int, top: float = 2.0) -> np.ndarray:
        x = rng.uniform(-top, top, size)
        coarse = rng.random(size) < 0.3 if fine else True  # ties and zeros
        x = np.where(coarse, np.rint(x), x)
        return np.where(rng.random(size) < rate, rng.choice([math.nan, math.inf, -math.inf], size), x)

    return rng, values


def assert_near(got: Tensor | np.ndarray, want: Tensor | np.ndarray, tol: float | np.ndarray) -> None:
    """Classes first; then every finite element within `tol`, one for all or one for each."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    for name in ("isnan", "isposinf", "isneginf"):
        np.testing.assert_array_equal(getattr(np, name)(got), getattr(np, name)(want), err_msg=name)
    finite = np.isfinite(want)
    distance, most = np.abs(got[finite] - want[finite]), np.broadcast_to(tol, want.shape)[finite]
    worst = int((distance - most).argmax()) if distance.size else None
    assert worst is None or distance[worst] <= most[worst], (
        f"distance {distance[worst]}, should be ≤ {most[worst]}"
    )


def assert_like_oracle(problem: Problem) -> None:
    """out, lse and row_max of the truth within TOL of their natural size."""
    truth, (out, lse, row_max) = problem.truth(), problem.by_oracle()
    v = np.abs(problem.tensors[2])
    assert_near(truth.out, out, TOL * max(1.0, v[np.isfinite(v)].max(initial=0.0)))
    assert_near(truth.lse, lse, TOL * natural(lse))
    assert_near(truth.row_max, row_max, TOL * natural(row_max))


def natural(x: np.ndarray) -> np.ndarray:
    """max(1, |x|), 1 where x is not finite."""
    return np.maximum(1.0, np.abs(np.where(np.isfinite(x), x, 0.0)))
