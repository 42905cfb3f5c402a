"""The gate: is a run worse than the stored baseline? Pure functions of records and of the baseline's lines.

`make_baseline` gives the text of a baseline, `read_baseline` reads one, `compare` gives an `Outcome` with its
text and exit code; `scope` says what of both a user selected. Neither torch nor numpy is loaded.
"""

from __future__ import annotations

from harness.gate.baseline import Pooled, make_baseline, read_baseline
from harness.gate.rules import Outcome, compare
from harness.gate.scope import scope

__all__ = ["Outcome", "Pooled", "compare", "make_baseline", "read_baseline", "scope"]
