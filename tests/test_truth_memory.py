"""The truth of a long context fits in memory. Its size is measured in a child, whose peak is its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="ru_maxrss is POSIX")

HEADS, LENGTH, DIM, ROWS = 8, 32768, 64, 256
# Peak resident sizes in KiB on Linux (bytes on macOS). A small truth first loads the libraries and their pools.
CHILD = f"""
import json, resource, sys, torch
from harness.spec import AttentionSpec
from harness.truth import reference
torch.set_num_threads(1)
unit = 1 if sys.platform == "darwin" else 1024
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
g = torch.Generator().manual_seed(0)
k, v = (torch.randn(1, {HEADS}, {LENGTH}, {DIM}, generator=g) for _ in "kv")
q = torch.randn(1, {HEADS}, {ROWS}, {DIM}, generator=g)
spec = AttentionSpec(causal=True)
reference(q[:, :1, :16], k[:, :1, :16], v[:, :1, :16], spec)
before = peak()
truth = reference(q, k, v, spec)
print(json.dumps([before, peak(), bool(truth.out.isfinite().all())]))
"""


def test_truth_of_32k_tokens_and_8_heads_takes_at_most_64_mib_beyond_its_inputs_and_outputs() -> None:
    """The last 256 of the 32,768 rows, each over all keys: a block of rows is as large as in the whole problem, for
    its size depends on kv_len alone, and what the whole adds is the rest of its outputs. 16 MiB each are a head's keys,
    its values and a block of scores."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    before, after, finite = json.loads(done.stdout)
    beyond_mib = (after - before - HEADS * ROWS * (DIM + 2) * 8) / 2**20
    print(f"beyond inputs and outputs: {beyond_mib:.0f} MiB")
    assert finite
    assert beyond_mib <= 64
