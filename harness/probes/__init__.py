"""Probes: relations that need no tolerance, for anything that can be called (NUMERICS section 7).

Inputs are made for the question: values of one show lost mass, an identity reads the probabilities, a poisoned key that
nobody sees must change no bit. What is compared is bits, or the ceiling of the error model: nothing is tuned.
`docs/probes.md` has each probe, what it expects, and which planted fault it was seen to catch.
"""

from __future__ import annotations

from harness.probes.each import PROBES, probes
from harness.probes.runs import Output, Run, of_algorithm, of_callable
from harness.probes.setting import Probe
from harness.result import Refusal

__all__ = ["PROBES", "Output", "Probe", "Refusal", "Run", "of_algorithm", "of_callable", "probes"]
