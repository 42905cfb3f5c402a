"""The accuracy run written the obvious way: `python -m benchmarks.plain_script --every 8`.

For every cell: draw the inputs, store them, compute attention in FP64 with whole matrices, run the implementation,
compare. No judgement, no ranges, no hazards, no second truth, no relations: what a careful afternoon gives.

With `--judged` every cell gets its answer too, by the public door: `harness.judge` on the inputs and the output, which
shares nothing with the cell before. Its statuses are compared with the session's.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

import harness
from harness import registry
from harness.case import load_cases
from harness.cell import Unit, run_unit
from harness.error_model import form_of
from harness.inputs import make_inputs
from harness.operands import Extras
from harness.pipeline import plan
from harness.quantize import quantize
from harness.recipe import TENSORS, Recipe
from harness.records import Status
from harness.result import Refusal
from harness.spec import AttentionSpec


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Extras) -> Tensor:
    """FP64, all scores at once."""
    batch, heads, rows, width = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * spec.scale_for(width)
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    if extras.bias is not None:
        s = s + extras.bias
    lengths = torch.full((batch,), keys) if extras.kv_lens is None else extras.kv_lens
    lengths = lengths.view(-1, 1, 1, 1)
    i, j = torch.arange(rows).view(-1, 1), torch.arange(keys)
    at = i + lengths - rows if spec.align == "bottom-right" else i.view(1, 1, -1, 1)
    seen = j < lengths
    if spec.right is not None:
        seen = seen & (j <= at + spec.right)
    if spec.left is not None:
        seen = seen & (j >= at - spec.left)
    if extras.mask is not None:
        seen = seen & extras.mask
    s = s.masked_fill(~seen, -math.inf)
    if extras.sinks is not None:
        sink = extras.sinks.double().view(1, -1, 1, 1).expand(batch, -1, rows, 1)
        p = torch.softmax(torch.cat([s, sink], -1), -1)[..., :-1]
    else:
        p = torch.softmax(s, -1)
    empty = 0.0 if spec.empty_row == "zero" else math.nan
    return torch.where(seen.expand_as(s).any(-1, keepdim=True), p @ v, empty)


def run(units: Sequence[Unit]) -> int:
    """How many cells gave errors."""
    done = 0
    for unit in units:
        case = unit.case
        for recipe in unit.recipes:
            for name in unit.implementations:
                inputs = make_inputs(case, unit.seed)
                q, k, v = (quantize(x, n, recipe) for x, n in zip(inputs.tensors, TENSORS, strict=True))
                truth = attention(q.values, k.values, v.values, case.spec, inputs.extras)
                implementation = registry.get(name)
                if implementation.refusals(case.spec, case.shape, recipe, inputs.extras.given):
                    continue
                try:
                    out = implementation.run_stored((q, k, v), case.spec, recipe, inputs.extras).out.double()
                except Refusal:
                    continue
                float((out - truth).norm() / truth.norm()), float((out - truth).abs().max())
                done += 1
    return done


def run_judged(units: Sequence[Unit]) -> dict[tuple[str, str, str, int], Status]:
    """The status of each cell, judged by itself."""
    found = {}
    for unit in units:
        case = unit.case
        for recipe in unit.recipes:
            for name in unit.implementations:
                found[case.id, name, recipe.name, unit.seed] = _judged(unit, recipe, name)
    return found


def _judged(unit: Unit, recipe: Recipe, name: str) -> Status:
    case = unit.case
    inputs, implementation = make_inputs(case, unit.seed), registry.get(name)
    options = inputs.extras.as_options()
    if implementation.refusals(case.spec, case.shape, recipe, inputs.extras.given):
        return Status.REFUSED
    try:
        result = implementation.run(*inputs.tensors, case.spec, recipe=recipe, quantize=True, **options)
    except Refusal:
        return Status.REFUSED
    judged = harness.judge(
        result.out, *inputs.tensors, spec=case.spec, recipe=recipe, lse=result.lse, quantize=True,
        form=form_of(name), **options,
    )  # fmt: skip
    status: Status = judged.status
    return status


def chosen(every: int) -> list[Unit]:
    """Every so manieth unit of the default run, whole layers apart."""
    return [u for u in plan(load_cases("all"), seeds=3) if u.case.layer is None][::every]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=8, help="take every so manieth case and seed")
    parser.add_argument("--judged", action="store_true", help="judge each cell by itself")
    given = parser.parse_args()
    torch.set_num_threads(1)
    units = chosen(given.every)
    start, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        found = run_judged(units) if given.judged else {}
        cells = len(found) if given.judged else run(units)
    took = f"{time.perf_counter() - start:.1f} s, CPU {time.process_time() - cpu:.1f} s"
    print(f"{len(units)} units, {cells} cells: {took}")
    if given.judged:
        _compare(units, found)


def _compare(units: Sequence[Unit], found: dict[tuple[str, str, str, int], Status]) -> None:
    """With the session: its time, and cells that it answers otherwise."""
    cpu = time.process_time()
    records = [record for unit in units for record in run_unit(unit)]
    print(f"the session on the same: CPU {time.process_time() - cpu:.1f} s")
    for r in records:
        if found[r.key] is not r.status:
            print(
                f"{' · '.join(map(str, r.key))}: {found[r.key].value} alone, {r.status.value} in the session"
            )


if __name__ == "__main__":
    main()
