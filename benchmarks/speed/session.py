"""The accuracy run against the least that it must do, and against a plain script."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks import plain_script
from benchmarks.speed.paired import Ratio, paired, summary
from harness.cell import run_unit
from harness.inputs import make_inputs
from harness.pipeline import Unit
from harness.quantize import quantize
from harness.recipe import TENSORS
from harness.truth import reference

EVERY = 30  # units of the default run: some 10 of 300


def _truths_s(unit: Unit) -> float:
    """Seconds of one truth, without ranges, for the exact inputs and for each storage."""
    inputs = make_inputs(unit.case, unit.seed)
    storages = {r.storage_key: r for r in unit.recipes}
    stored = [
        [quantize(x, n, r).values for x, n in zip(inputs.tensors, TENSORS, strict=True)]
        for r in storages.values()
    ]
    start = time.perf_counter()
    for q, k, v in [inputs.tensors, *stored]:
        reference(q, k, v, unit.case.spec, **inputs.extras.as_options())
    return time.perf_counter() - start


def over_runs(rounds: int) -> Ratio:
    """Wall time of units ÷ that of their implementation runs (as their records hold it) and truths."""
    units = plain_script.chosen(EVERY)
    for unit in units[:2]:
        run_unit(unit)
    whole, least = [], []
    for _ in range(min(rounds, 3)):
        total = floor = 0.0
        for unit in units:
            start = time.perf_counter()
            records = run_unit(unit)
            total += time.perf_counter() - start
            runs = [r.run_ms for r in records if r.run_ms == r.run_ms]
            floor += sum(runs) / 1e3 + statistics.mean(_truths_s(unit) for _ in "ab")
        whole.append(total)
        least.append(floor)
    return summary([a / b for a, b in zip(whole, least, strict=True)], whole, least)


def plain(rounds: int) -> tuple[Ratio, Ratio]:
    """Plain script ÷ session, CPU time of the same units: judging nothing, and judging each cell by itself."""
    units = plain_script.chosen(EVERY)

    def script() -> None:
        with torch.inference_mode():
            plain_script.run(units)

    def judged() -> None:
        plain_script.run_judged(units)

    def ours() -> None:
        for unit in units:
            run_unit(unit)

    return paired(script, ours, min(rounds, 3)), paired(judged, ours, min(rounds, 3))
