"""Figures as the cells of tables: the words, what they sort by, and a tone."""

from __future__ import annotations

import math

from harness.cost.units import show_bytes, show_ratio, show_time
from harness.evidence import Quality
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


def signed_share(value: float, digits: int = 2, half: float = 0.0) -> Value:
    """`half`: of its interval, where it has one."""
    text = minus(f"{value:+.{digits}%}") + (f" ± {half:.{digits}%}" if half > 0 else "")
    return Value(words.NONE if math.isnan(value) else text, _key(value))


def change(q: Quality) -> Value:
    """Of perplexity, with half of its 95 % interval."""
    low, high = q.change_range
    return signed_share(q.perplexity_change, half=(high - low) / 2)


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
