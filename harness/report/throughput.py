"""Timings that pytest-benchmark stored, as a table: speed beside the error it was bought with."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.report import markdown, text, words

EMULATED = "emulated: the emulator's time, not the format's"
_TEXTS = ("case", "shape", "implementation", "recipe")
_NUMBERS = ("flops", "rel_l2", "kv_bytes_per_token")
_HEADERS = (*_TEXTS, "median ms", "TFLOP/s", "rel_l2", "KV bytes/token", "note")


@dataclass(frozen=True)
class Timing:
    """One benchmark. `rel_l2` is NaN and `kv_bytes_per_token` NaN where the benchmark did not say."""

    case: str
    shape: str
    implementation: str
    recipe: str
    median_ms: float
    flops: float
    rel_l2: float
    kv_bytes_per_token: float
    emulated: bool

    @property
    def tflops(self) -> float:
        """10¹² floating-point operations a second, by the mathematics' count; NaN for a median of 0."""
        return self.flops / (self.median_ms * 1e9) if self.median_ms > 0 else math.nan


def read_timings(path: Path | str) -> tuple[Timing, ...]:
    """The benchmarks of a pytest-benchmark JSON file, in its order.

    Raises ValueError, in one line, for a file that is not one, or whose benchmarks lack this project's
    extra_info, or that is missing.
    """
    advice = "write one with pytest benchmarks/ --benchmark-json=FILE"
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: No such file; {advice}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON; {advice}") from None
    entries = stored.get("benchmarks") if isinstance(stored, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{path} is not a pytest-benchmark file (no list of benchmarks); {advice}")
    return tuple(_timing(entry, f"{path}, benchmark {number}") for number, entry in enumerate(entries, 1))


def _timing(entry: Any, where: str) -> Timing:
    try:
        median, extra = float(entry["stats"]["median"]), entry["extra_info"]
        missing = [name for name in (*_TEXTS, *_NUMBERS, "emulated") if name not in extra]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{where} is not pytest-benchmark's: no stats.median or no extra_info") from None
    if missing:
        raise ValueError(f"{where} lacks extra_info {', '.join(missing)}")
    try:
        flops, rel_l2, kv = (math.nan if extra[n] is None else float(extra[n]) for n in _NUMBERS)
    except (TypeError, ValueError):
        raise ValueError(
            f"{where} has no number in extra_info; allowed in {', '.join(_NUMBERS)}: one"
        ) from None
    case, shape, implementation, recipe = (str(extra[n]) for n in _TEXTS)
    emulated = extra["emulated"] is True
    return Timing(case, shape, implementation, recipe, median * 1e3, flops, rel_l2, kv, emulated)


def sig3(value: float) -> str:
    """Three significant digits, zeros kept."""
    return f"{value:#.3g}".rstrip(".") if math.isfinite(value) else words.NONE


def _row(t: Timing) -> list[str]:
    kv = f"{t.kv_bytes_per_token:.6g}" if math.isfinite(t.kv_bytes_per_token) else words.NONE
    names = [words.clean(x) for x in (t.case, t.shape, t.implementation, t.recipe)]
    note = "emulated" if t.emulated else ""
    return [*names, sig3(t.median_ms), sig3(t.tflops), words.figure(t.rel_l2), kv, note]


def timings_text(timings: Sequence[Timing]) -> str:
    """For a terminal, at most 100 columns wide."""
    if not timings:
        return "no benchmarks: nothing was timed\n"
    by_case: dict[tuple[str, str], list[list[str]]] = {}
    for case, shape, *rest in map(_row, timings):
        by_case.setdefault((case, shape), []).append(rest)
    headers = [h.replace(" ", "\n") for h in _HEADERS[2:]]
    blocks = [
        "\n".join(textwrap.wrap(f"{case} {shape}", text.WIDTH))
        + "\n"
        + text.table(headers, rows, wrap=(0, 1), right=(2, 3, 4, 5))
        for (case, shape), rows in by_case.items()
    ]
    return "\n\n".join(blocks) + "\n" + f"{EMULATED}\n" * any(t.emulated for t in timings)


def timings_markdown(timings: Sequence[Timing]) -> str:
    """As Markdown, text escaped."""
    if not timings:
        return "# Throughput\n\nno benchmarks: nothing was timed\n"
    rows = [[markdown.escape(x) for x in _row(t)] for t in timings]
    shown = markdown.table(_HEADERS, rows, right=(4, 5, 6, 7))
    return f"# Throughput\n\n{shown}\n" + f"\n{EMULATED}\n" * any(t.emulated for t in timings)
