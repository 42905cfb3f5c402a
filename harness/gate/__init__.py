"""The gate: is a run worse than the stored baseline? Pure functions of records and of the baseline's lines.

`make_baseline` gives the text of a baseline, `read_baseline` reads one, `choose` picks that of a class of machine,
`compare` gives an `Outcome` with its text and exit code; `scope` says what of both a user selected. Neither torch nor
numpy is loaded.
"""

from __future__ import annotations

from harness.gate.baseline import (
    Baseline,
    baseline_in,
    choose,
    differences,
    make_baseline,
    read_baseline,
    read_folder,
)
from harness.gate.machine_class import machine_class
from harness.gate.pooled import Pooled, pool_records
from harness.gate.rules import Outcome, compare
from harness.gate.scope import scope

__all__ = [
    "Baseline",
    "Outcome",
    "Pooled",
    "baseline_in",
    "choose",
    "compare",
    "differences",
    "machine_class",
    "make_baseline",
    "pool_records",
    "read_baseline",
    "read_folder",
    "scope",
]
