"""Sizes and rates as people write them, in and out. A K of tokens and a KiB are 1024; GB/s and TFLOP powers of ten."""

from __future__ import annotations

import math
import re

_TOKENS = {"": 1, "K": 1024, "M": 1024**2}
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{p}i": 1024.0**i for i, p in enumerate("KMGTPE", 1)}
_NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*"


def parse_tokens(text: str | int) -> int:
    """`131072`, `128K` (·1024) or `1M` (·1024²) tokens. Raises ValueError."""
    found = re.fullmatch(_NUMBER + r"([KkM]?)", str(text))
    tokens = float(found[1]) * _TOKENS[found[2].upper()] if found else 0.0
    if not 1 <= tokens < 2**53 or tokens != int(tokens):
        raise ValueError(
            f"context is {text!r}; allowed: a whole number of tokens ≥ 1, such as 4096, 128K, 1M"
        )
    return int(tokens)


def parse_bandwidth(text: str) -> float:
    """`4.8TB/s` or `900GiB/s` in bytes per second. Raises ValueError."""
    return _rate(text, r"([KkMGTP]i?|)B/s", "bandwidth", "4.8TB/s, 900GB/s")


def parse_flop_rate(text: str) -> float:
    """`989TFLOP/s` (also TFLOPS, TFLOPs) in FLOPs per second. Raises ValueError."""
    return _rate(text, r"([KkMGTP]|)FLOP(?:s?/s|S|s)", "flops", "989TFLOP/s, 2PFLOP/s")


def _rate(text: str, unit: str, name: str, examples: str) -> float:
    found = re.fullmatch(_NUMBER + unit, str(text))
    prefix = found[2].replace("k", "K") if found else ""
    rate = float(found[1]) * {**_DECIMAL, **_BINARY}[prefix] if found else 0.0
    if not 0 < rate < math.inf:
        raise ValueError(f"{name} is {text!r}; allowed: a number > 0 with its unit, such as {examples}")
    return rate


def _digits(x: float) -> str:
    """Three of them at least: 0.512, 6.50, 49.5, 5242, and 4.07e-5 or 1.20e6 where that is shorter."""
    if x == 0:
        return "0"
    if not 9.995e-4 <= abs(x) < 999999.5:
        significand, _, exponent = f"{x:.2e}".partition("e")
        return f"{significand}e{int(exponent)}"
    return f"{x:.{max(0, 2 - math.floor(math.log10(abs(x) * (1 + 5e-4))))}f}"


def _scaled(x: float, steps: list[tuple[float, str]]) -> str:
    """x in the largest unit in which it is at least 1, or in the smallest."""
    factor, unit = next(((f, u) for f, u in steps if abs(x) >= f * (1 - 5e-4)), steps[-1])
    return f"{_digits(x / factor)} {unit}"


def show_bytes(count: float) -> str:
    """480 KiB, 60.0 GiB."""
    if count < 1024 and count == int(count):
        return f"{int(count)} B"
    return _scaled(
        count, [(1024.0**i, f"{p}iB") for i, p in zip(range(6, 0, -1), "EPTGMK", strict=True)] + [(1.0, "B")]
    )


def show_flops(count: float) -> str:
    """1.05 PFLOP."""
    return _scaled(count, [(_DECIMAL[p], f"{p}FLOP") for p in "EPTGM"] + [(1e3, "kFLOP"), (1.0, "FLOP")])


def show_time(seconds: float) -> str:
    """6.50 ms, 50.5 min."""
    longer = [(86400.0, "d"), (3600.0, "h"), (60.0, "min")]
    return _scaled(seconds, [*longer, (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")])


def show_rate(rate: float, unit: str) -> str:
    """4.80 TB/s."""
    return _scaled(rate, [(_DECIMAL[p], f"{p}{unit}") for p in "EPTGM"] + [(1.0, unit)])


def show_count(count: float) -> str:
    """8.03 G, 135 M."""
    return _scaled(count, [(_DECIMAL[p], p) for p in "TGM"] + [(1.0, "")]).rstrip()


def show_ratio(x: float) -> str:
    return _digits(x)


def show_tokens(tokens: int) -> str:
    """128K where that is exact."""
    for factor, letter in ((1024**2, "M"), (1024, "K")):
        if tokens % factor == 0:
            return f"{tokens // factor}{letter}"
    return str(tokens)
