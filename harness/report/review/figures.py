"""Figures as the cells of tables: the words, what they sort by, and a tone."""

from __future__ import annotations

import math

from harness.cost.units import show_bytes, show_ratio, show_time
from harness.records import Status
from harness.report import words
from harness.report.model import Pooled
from harness.report.review.blocks import Value

_TONES = {Status.PASS: "good", Status.FAIL: "bad", Status.ERROR: "bad", Status.INCONCLUSIVE: "fair"}


def error(value: float) -> Value:
    return Value(words.optional(value), _key(value))


def pooled(value: Pooled) -> Value:
    return Value(words.pooled(value), _key(value.rel_l2))


def times(value: float) -> Value:
    return Value(words.times(value), _key(value))


def ratio(value: float) -> Value:
    """Three digits, for a factor whose small changes matter."""
    return Value(words.NONE if math.isnan(value) else f"×{show_ratio(value)}", _key(value))


def share(value: float, digits: int = 1) -> Value:
    return Value(words.NONE if math.isnan(value) else f"{value:.{digits}%}", _key(value))


def signed_share(value: float, digits: int = 2) -> Value:
    return Value(words.NONE if math.isnan(value) else minus(f"{value:+.{digits}%}"), _key(value))


def minus(text: str) -> str:
    """A sign as wide as a plus."""
    return text.replace("-", "−")


def small_share(value: float) -> Value:
    """A share that may be far below a percent; a dash for none."""
    if not value:
        return Value(words.NONE, 0.0)
    return Value(f"{value:.2%}" if value >= 5e-5 else words.short(value), _key(value))


def bits(value: float) -> Value:
    if math.isnan(value):
        return Value(words.NONE)
    if abs(value) < 0.05:  # an amax scale leaves −1e-8 bits
        return Value("0", value)
    text = f"{value:+.0f}" if abs(value) >= 10 else f"{value:+.1f}"
    return Value(minus(text), value, "bad" if value < 0 else "")


def size(value: float) -> Value:
    return Value(words.NONE if math.isnan(value) else show_bytes(value), _key(value))


def time(value: float | None) -> Value:
    return Value(words.NONE) if value is None else Value(show_time(value), value)


def status(value: Status | None) -> Value:
    return Value(words.NONE) if value is None else Value(value.value, None, _TONES.get(value, "none"))


def _key(value: float) -> float | None:
    """NaN sorts as text does: last."""
    return None if math.isnan(value) else value
