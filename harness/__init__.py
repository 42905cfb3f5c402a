"""attention-harness: is this attention, in this precision, as accurate as it can be?

Public names are imported when first used (PEP 562): `import harness` loads neither torch nor NumPy.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "AttentionSpec": "harness.spec",
    "LayerSpec": "harness.spec",
    "Shape": "harness.spec",
    "Case": "harness.case",
    "Draw": "harness.case",
    "load_cases": "harness.case",
    "Accumulator": "harness.recipe",
    "Recipe": "harness.recipe",
    "Scaling": "harness.recipe",
    "get_recipe": "harness.recipe",
    "recipes": "harness.recipe",
    "implementations": "harness.registry",
    "get": "harness.registry",
    "judge": "harness.judging",
    "Rows": "harness.query_rows",
    "choose_rows": "harness.query_rows",
    "reference": "harness.truth",
    "round_to": "harness.rounding",
    "alibi_bias": "harness.options",
    "alibi_slopes": "harness.options",
    "inspect_bias": "harness.lies",
    "packed_mask": "harness.options",
    "padding_mask": "harness.options",
    "run_packed": "harness.options",
    "run": "harness.pipeline",
    "read_records": "harness.records",
    "write_records": "harness.records",
    "Record": "harness.records",
    "Status": "harness.records",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        if name == "testing":  # as numpy.testing: a room that users call by its name
            return importlib.import_module("harness.testing")
        raise AttributeError(
            f"module 'harness' has no attribute {name!r}; it has {', '.join(__all__)}"
        ) from None
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
