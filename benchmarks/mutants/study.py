"""The study: every mutant and every honest implementation on its cases, judged by us and by the others' rules.

One unit is (implementation, arrangement, case, recipe): one JSON line, appended whole. Units of one call share its
truth, twins and references.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.mutants.attention import ARRANGEMENTS, Attention
from benchmarks.mutants.calls import CASES, RECIPES, Call, made
from benchmarks.mutants.limit import limit
from benchmarks.mutants.rules import DTYPES, Field, shown, verdicts
from benchmarks.mutants.table import Mutant, mutants
from harness.docket import Docket
from harness.error_model import BLACK_BOX

HONEST, SDPA = "honest", "torch SDPA"
BATCH = 6  # outputs judged at once


@dataclass(frozen=True)
class Unit:
    name: str
    arrangement: str
    case: str
    recipe: str


def units(full: bool = True) -> list[Unit]:
    """All of them; or, for CI, each mutant once, its precision in turn, and the honest ones on a few cases."""
    table = list(mutants().values())
    if not full:
        found = [Unit(m.name, *m.runs[0], m.recipes[i % len(m.recipes)]) for i, m in enumerate(table)]
        found += [
            Unit(HONEST, a, c, r) for a in ARRANGEMENTS for c in ("full", "causal", "sinks") for r in RECIPES
        ]
        return found + [Unit(SDPA, "fused", c, r) for c in ("full", "causal") for r in RECIPES[:3]]
    found = [Unit(m.name, *run, r) for m in table for run in m.runs for r in m.recipes]
    found += [Unit(HONEST, a, c, r) for c in CASES for a in ARRANGEMENTS for r in RECIPES]
    plain = [c for c in CASES.values() if "softcap" not in c.rules and "sinks" not in c.options]
    # The fused kernel takes a bias in its own dtype alone: another bias than the case's, but for FP32.
    fits = [(c, r) for c in plain for r in RECIPES[:3] if "bias" not in c.options or r == "fp32"]
    return found + [Unit(SDPA, "fused", c.name, r) for c, r in fits]


def sdpa(call: Call) -> Tensor:
    """torch's fused CPU kernel."""
    q, k, v = (x.to(DTYPES[call.recipe.name]) for x in call.values)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask, bias = shown(call), call.extras.bias
    if bias is not None:
        mask = bias.to(q.dtype).expand(1, 1, *mask.shape[-2:]) if bias.shape[1] == 1 else bias.to(q.dtype)
        mask = mask.masked_fill(~shown(call), -math.inf)
    whole = bias is None and bool(mask.all())
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=None if whole else mask)


def output(unit: Unit, call: Call, table: dict[str, Mutant]) -> tuple[Tensor, Tensor | None]:
    if unit.name == SDPA:
        return sdpa(call), None
    if unit.name == HONEST:
        return Attention(call, unit.arrangement).run()
    return table[unit.name].output(call, unit.arrangement)


class Bar:
    """One call: judge and rules over its units."""

    def __init__(self, case: str, recipe: str) -> None:
        self.call = made(case, recipe)
        self.docket = Docket(
            self.call.stored, self.call.spec, self.call.extras, self.call.recipe, self.call.exact
        )
        self.field = Field(self.call)
        self.table = mutants()

    def records(
        self, batch: Sequence[Unit], named: Callable[[Unit], bool] = lambda unit: True
    ) -> Iterator[dict[str, Any]]:
        """`named`: whose fault is looked for, which takes most of the time."""
        outs = [output(u, self.call, self.table) for u in batch]
        found = self.docket.verdicts([o for o, _ in outs], [BLACK_BOX] * len(outs))
        for unit, (out, lse), verdict in zip(batch, outs, found, strict=True):
            mutant = self.table.get(unit.name)
            given = lse if mutant is not None and mutant.of_lse else None
            j = self.docket.judgement(
                out, verdict, given, BLACK_BOX, self.docket.hazards(), precise=named(unit)
            )
            said: dict[str, Any] = {"status": j.status.value, "t": _short(j.margins.statistic),
                                    "along": j.margins.direction, "ratio": _short(j.margins.ratio)}  # fmt: skip
            if j.status.value != "PASS":
                said["why"] = "; ".join(j.reasons)[:200]
            said["named"] = named(unit)
            if j.diagnosis is not None:
                d = j.diagnosis
                said |= {"fault": d.fault, "rivals": list(d.rivals), "size": _short(d.size),
                         "explained": _short(d.explained), "what": d.what[:160]}  # fmt: skip
            record = {"unit": [unit.name, unit.arrangement, unit.case, unit.recipe], "ours": said,
                      "rules": verdicts(out, self.field)}  # fmt: skip
            if mutant is not None:
                record["limit"] = self.limit(mutant, unit, out)
            yield record

    def limit(self, mutant: Mutant, unit: Unit, out: Tensor) -> dict[str, Any]:
        g, of_lse = mutant.effect(self.call, unit.arrangement)
        bench = self.docket.bench(BLACK_BOX)
        honest = Attention(self.call, unit.arrangement).run()[0] if mutant.random else None
        found = limit(bench, g, honest).as_json()
        if not bool((torch.isfinite(out) == torch.isfinite(self.field.golden)).all()):
            return {**found, "above": True, "classes": True}
        if mutant.of_lse:
            ceiling = self.docket.expected([BLACK_BOX])[0].lse_ceiling
            share = of_lse.double().abs() / ceiling.clamp(min=1e-300)
            return {**found, "size": _short(float(share.nan_to_num(math.inf).max())),
                    "above": not bool((share <= 2).all())}  # fmt: skip
        return found


def _short(x: float) -> float | str:
    return float(f"{x:.4g}") if math.isfinite(x) else str(x)


def read(path: Path) -> list[dict[str, Any]]:
    """Records of a file; a last line that was cut off by a kill is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def run(path: Path, wanted: Sequence[Unit], fresh: bool = False, every: int = 1) -> list[dict[str, Any]]:
    """Records of all wanted units: those of the file, and the rest run now and appended to it. The fault of one unit in
    `every` is named."""
    named = set(wanted[::every])
    if fresh:
        path.unlink(missing_ok=True)
    records = read(path)
    done = {tuple(r["unit"]) for r in records}
    groups: dict[tuple[str, str], list[Unit]] = defaultdict(list)
    for u in wanted:
        if (u.name, u.arrangement, u.case, u.recipe) not in done:
            groups[u.case, u.recipe].append(u)
    path.parent.mkdir(parents=True, exist_ok=True)
    total = sum(map(len, groups.values()))
    with tqdm(total=total, unit="unit", disable=not total) as bar:
        for (case, recipe), members in groups.items():
            court = Bar(case, recipe)
            for start in range(0, len(members), BATCH):
                for record in court.records(members[start : start + BATCH], named.__contains__):
                    append(path, record)
                    records.append(record)
                    bar.update()
    asked = {(u.name, u.arrangement, u.case, u.recipe) for u in wanted}
    return [r for r in records if tuple(r["unit"]) in asked]


def append(path: Path, record: dict[str, Any]) -> None:
    """One whole line: what a kill leaves behind a complete line is one that `read` leaves out."""
    line = json.dumps(record, ensure_ascii=False, allow_nan=True) + "\n"
    whole = not path.exists() or path.stat().st_size == 0 or _last_byte(path) == b"\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (line if whole else "\n" + line).encode())
    finally:
        os.close(handle)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
