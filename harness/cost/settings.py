"""What a cost is asked for, from a TOML file and the command line, which wins.

model = "llama-3.1-8b"      # a name of `harness.cost.models.MODELS`, or a [model] table with the fields of `Model`
context = "128K"            # tokens of the prompt, and keys of the decode step
batch = 1                   # sequences
kv = ["bf16", "fp8_e4m3"]   # how K and V are stored: recipes, or formats without scales
weights = "bf16"            # a format
bandwidth = "4.8TB/s"       # both rates may be left out, and their columns with them
flops = "989TFLOP/s"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harness.cost.models import LIMIT, Model, get_model
from harness.cost.phases import kv_storage
from harness.cost.roofline import Rates
from harness.cost.units import parse_bandwidth, parse_flop_rate, parse_tokens
from harness.formats import FloatFormat, get_format
from harness.recipe import Recipe

KEYS = ("model", "context", "batch", "kv", "weights", "bandwidth", "flops")
DEFAULTS: Mapping[str, Any] = {
    "context": "4K", "batch": 1, "kv": ("bf16", "fp8_e4m3", "mxfp8"), "weights": "bf16"
}  # fmt: skip
MODEL_KEYS = tuple(f.name for f in fields(Model))
NEEDED = ("width", "layers", "heads", "ffn")


@dataclass(frozen=True)
class Settings:
    """One question: a model, how much of it, and how it is stored."""

    model: Model
    context: int
    batch: int
    kv: tuple[Recipe, ...]
    weights: FloatFormat
    rates: Rates


def read_config(path: Path) -> dict[str, Any]:
    """The table of a TOML file. Raises ValueError for a file that cannot be read and a key that does not exist."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"config file {path} cannot be read: {error}") from None
    _known(table, KEYS, f"config file {path}")
    if isinstance(table.get("model"), dict):
        _known(table["model"], MODEL_KEYS, f"config file {path}, [model]")
    return table


def _known(table: Mapping[str, Any], allowed: Sequence[str], place: str) -> None:
    for key in table:
        if key not in allowed:
            raise ValueError(f"{place}: unknown key {key!r}; allowed: {', '.join(allowed)}")


def settings(given: Mapping[str, Any]) -> Settings:
    """`given` with the defaults for what it leaves out. Raises ValueError for a value that is not allowed."""
    chosen = {**DEFAULTS, **given}
    if "model" not in chosen:
        raise ValueError(
            "no model is given; give --model NAME (--list shows them), or a config with a [model] table"
        )
    batch, names = chosen["batch"], chosen["kv"]
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch < LIMIT:
        raise ValueError(f"batch is {batch!r}; allowed: an integer ≥ 1, below 2^31")
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, (tuple, list)) or not names or not all(isinstance(n, str) for n in names):
        raise ValueError(f"kv is {chosen['kv']!r}; allowed: one name or more of recipes or formats")
    bandwidth, flops = chosen.get("bandwidth"), chosen.get("flops")
    return Settings(
        _model(chosen["model"]),
        parse_tokens(chosen["context"]),
        batch,
        tuple(kv_storage(name) for name in names),
        get_format(chosen["weights"]),
        Rates(
            None if bandwidth is None else parse_bandwidth(bandwidth),
            None if flops is None else parse_flop_rate(flops),
        ),
    )


def _model(given: str | Mapping[str, Any]) -> Model:
    if not isinstance(given, Mapping):
        return get_model(given)
    if missing := [key for key in NEEDED if key not in given]:
        raise ValueError(f"[model] lacks {', '.join(missing)}; needed: {', '.join(NEEDED)}")
    return Model(**{"name": "model", **given})
