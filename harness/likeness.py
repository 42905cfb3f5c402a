"""Is the error as large, element by element, as another precision makes it?

Rounding that falls otherwise than in any twin (another order of sums, other blocks) cannot be followed, but its size
can: the error model says how large each element's error is under a recipe with one stage held in another format. The
log-likelihood of the error under that recipe is compared with those under errors of no particular kind: larger than
expected by one factor, of one size everywhere, or in proportion to the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.error_model import BLACK_BOX, WHOLE, Form, expectations
from harness.recipe import Recipe
from harness.suspects import Trial
from harness.variants import variants

FORMS = (WHOLE, *(Form("stream", n) for n in (16, 32, 48, 64, 96)), BLACK_BOX)
AS_LARGE = (0.6, 1.6)  # error² ÷ variance, over the part and within each head
NARROW_STAGES = ("accumulator", "running sum", "q·k", "P", "output")


@dataclass(frozen=True)
class Likeness:
    """A precision that makes errors of this size. `gain`: twice the log-likelihood over that of the recipe."""

    name: str
    what: str
    gain: float


def likest(trial: Trial) -> Likeness | None:
    """The one-stage change of the recipe under which the error is likeliest, if none of no particular kind is
    likelier by as much as one free parameter finds by chance."""
    used = trial.weight > 0
    if not bool(used.any()):
        return None
    square = (trial.out - trial.truth.nan_to_num(0.0, 0.0, 0.0)).square()[used]
    own = 1 / trial.weight[used]
    base = _surprise(square, own)
    best: tuple[float, Likeness] | None = None
    for name, what, variance in _expected(trial):
        rows = trial.within(name)
        if rows is not None and not bool(rows.all()):
            continue  # errors as large, but other numbers than that format's
        allowed = variance[used]
        if not bool(torch.isfinite(allowed).all() & (allowed > 0).all()) or not _as_large(
            square, allowed, used
        ):
            continue
        surprise = _surprise(square, allowed)
        if best is None or surprise < best[0]:
            best = (surprise, Likeness(name, what, base - surprise))
    if best is None or best[1].gain < 0.25 * trial.against_truth:
        return None
    plain = min(_surprise(square, v) for v in _plain(square, own, trial.truth[used].square()))
    return best[1] if best[0] < plain + math.sqrt(2 * len(square)) else None


def _surprise(square: Tensor, variance: Tensor) -> float:
    """−2 log-likelihood, but for a constant, of errors of these squares."""
    return float((square / variance + variance.log()).sum())


def _as_large(square: Tensor, variance: Tensor, used: Tensor) -> bool:
    """Whether error² is near its variance over the part, and near enough in each head."""
    low, high = AS_LARGE
    if not low < float(square.sum() / variance.sum()) < high:
        return False
    ratio = torch.zeros(used.shape, dtype=square.dtype, device=square.device)
    ratio[used] = square / variance
    count = used.sum((2, 3))
    heads = (ratio.sum((2, 3)) / count.clamp(min=1))[count > 0]
    return bool((heads > low / 2).all() & (heads < 2 * high).all())


def _plain(square: Tensor, own: Tensor, size: Tensor) -> Iterator[Tensor]:
    """Variances of no particular kind, each with the factor that fits best."""
    for shape in (own, torch.ones_like(own), size + 1e-6 * size.mean()):
        shape = shape.clamp(min=1e-300)
        yield shape * (square / shape).mean()


def _expected(trial: Trial) -> Iterator[tuple[str, str, Tensor]]:
    call = trial.call
    q, k, v = call.q, call.k, call.v
    known: list[tuple[str, str, Recipe]] = [
        x for x in variants(call.recipe) if any(x[0].endswith(stage) for stage in NARROW_STAGES)
    ]
    pairs = [(recipe, form) for _, _, recipe in known for form in FORMS]
    scales = tuple(x.scale for x in trial.stored)
    found = expectations(
        call.truth,
        q,
        k,
        v,
        call.spec,
        pairs,
        **call.extras.as_options(),
        scales=scales,  # type: ignore[arg-type]
    )
    names = [(name, what) for name, what, _ in known for _ in FORMS]
    for (name, what), e in zip(names, found, strict=True):
        yield name, what, e.variance
