"""Timings as pytest-benchmark stored them, and what the throughput session stored beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEXTS = ("case", "shape", "implementation", "recipe")
NUMBERS = ("flops", "rel_l2", "kv_bytes_per_token")
LATER = ("bytes", "ratio", "low_s", "high_s")  # files of the first form lack these
ADVICE = "write one with pytest benchmarks/ --benchmark-json=FILE"


@dataclass(frozen=True)
class Timing:
    """One benchmark. Figures are NaN where the benchmark did not say. `ratio`: error ÷ expected. `low_ms`, `high_ms`:
    the interval of the median. `bytes`: of q, k, v and out, each moved once. `format`: that of the products."""

    case: str
    shape: str
    implementation: str
    recipe: str
    median_ms: float
    flops: float
    rel_l2: float
    kv_bytes_per_token: float
    emulated: bool
    bytes: float = math.nan
    ratio: float = math.nan
    low_ms: float = math.nan
    high_ms: float = math.nan
    format: str = ""

    @property
    def tflops(self) -> float:
        """10¹² floating-point operations a second, by the mathematics' count; NaN for a median of 0, and for emulated
        precision, whose rate is no format's."""
        return self._rate(self.flops) / 1e12

    @property
    def gbytes(self) -> float:
        """10⁹ bytes a second; NaN as `tflops` is."""
        return self._rate(self.bytes) / 1e9

    def _rate(self, amount: float) -> float:
        return amount / (self.median_ms * 1e-3) if self.median_ms > 0 and not self.emulated else math.nan


@dataclass(frozen=True)
class NotTimed:
    """A cell that did not pass its verdict."""

    case: str
    shape: str
    implementation: str
    recipe: str
    status: str
    reason: str


@dataclass(frozen=True)
class Context:
    """The run's machine, its load averages, and its ceilings: FLOPs a second of products by format, bytes a second of
    copying, NaN where none was measured."""

    machine: str = ""
    loads: tuple[float, ...] = ()
    products: Mapping[str, float] = field(default_factory=dict)
    copy: float = math.nan
    not_timed: tuple[NotTimed, ...] = ()

    def product(self, fmt: str) -> float:
        """The most that a kernel over this format reaches: its own products, or FP32's over what was widened."""
        rates = [self.products[f] for f in dict.fromkeys((fmt, "fp32")) if f in self.products and fmt]
        return max(rates, default=math.nan) if fmt != "fp64" else self.products.get("fp64", math.nan)

    def shares(self, t: Timing) -> tuple[float, float]:
        """Of the product rate and of the copy rate that a timing reaches; NaN where one is not known."""
        return t.tflops * 1e12 / self.product(t.format), t.gbytes * 1e9 / self.copy


def read_timings(path: Path | str) -> tuple[Timing, ...]:
    """The benchmarks of a pytest-benchmark JSON file, in its order.

    Raises ValueError, in one line, for a file that is not one, or whose benchmarks lack this project's
    extra_info, or that is missing.
    """
    entries = _stored(path).get("benchmarks")
    if not isinstance(entries, list):
        raise ValueError(f"{path} is not a pytest-benchmark file (no list of benchmarks); {ADVICE}")
    return tuple(_timing(entry, f"{path}, benchmark {number}") for number, entry in enumerate(entries, 1))


def read_context(path: Path | str) -> Context:
    """What the same file says of its run: nothing, where the throughput session did not write it. Raises ValueError."""
    stored = _stored(path).get("throughput", {})
    try:
        left = tuple(
            NotTimed(*(str(x[n]) for n in (*TEXTS, "status", "reason"))) for x in stored.get("not_timed", ())
        )
        products = {str(fmt): float(rate) for fmt, rate in stored.get("products", {}).items()}
        loads = tuple(map(float, stored.get("loads", ())))
        copy = float(stored.get("copy", math.nan))
        return Context(str(stored.get("machine", "")), loads, products, copy, left)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: what it says under throughput is not the session's; {ADVICE}") from None


def _stored(path: Path | str) -> dict[str, Any]:
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ValueError(f"{path}: No such file; {ADVICE}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON; {ADVICE}") from None
    return stored if isinstance(stored, dict) else {}


def _timing(entry: Any, where: str) -> Timing:
    try:
        median, extra = float(entry["stats"]["median"]), entry["extra_info"]
        missing = [name for name in (*TEXTS, *NUMBERS, "emulated") if name not in extra]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{where} is not pytest-benchmark's: no stats.median or no extra_info") from None
    if missing:
        raise ValueError(f"{where} lacks extra_info {', '.join(missing)}")
    try:
        numbers = {n: _number(extra.get(n)) for n in (*NUMBERS, *LATER)}
    except (TypeError, ValueError):
        raise ValueError(
            f"{where} has no number in extra_info; allowed in {', '.join((*NUMBERS, *LATER))}: one"
        ) from None
    low, high = (1e3 * numbers[n] for n in ("low_s", "high_s"))
    flops, rel_l2, kv, moved, ratio = (numbers[n] for n in (*NUMBERS, "bytes", "ratio"))
    case, shape, implementation, recipe = (str(extra[n]) for n in TEXTS)
    return Timing(
        case, shape, implementation, recipe, 1e3 * median, flops, rel_l2, kv, extra["emulated"] is True, moved, ratio,
        low, high, str(extra.get("format", "")),
    )  # fmt: skip


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
