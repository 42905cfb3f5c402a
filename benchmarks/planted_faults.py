"""Which fault is named when one is planted, and with what size?

    python benchmarks/planted_faults.py runs/planted-faults.jsonl

plants every fault of `tests/planted.py` in a kernel written on torch alone, in four precisions, full and causal, and
prints what `judge` says: one line of the file each, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

import planted  # noqa: E402


def judged(plant: planted.Plant, recipe: str, causal: bool) -> dict[str, Any]:
    call, out = planted.planted(plant, recipe, causal)
    j = call.judge(out)
    d = j.diagnosis
    m = j.margins
    found = {
        "status": j.status.value,
        "statistic": round(m.statistic, 1),
        "direction": m.direction,
        "ratio": m.ratio,
    }
    if d is not None:
        found |= {"fault": d.fault, "size": d.size, "explained": d.explained, "rivals": d.rivals}
    return found


def told(plant: planted.Plant, found: dict[str, Any]) -> str:
    """A cell of the table: ✓ where the fault is named and its size within 10 %."""
    if found["status"] != "FAIL":
        return f"{found['status']} ({found['statistic']:.1f})"
    fault, size = found.get("fault", "—"), found.get("size", 0.0)
    named = fault in plant.said
    equal = [r for r in found.get("rivals", ()) if r in plant.said]
    sized = plant.size is None or abs(size - plant.size) <= 0.1 * abs(plant.size)
    text = "✓" if named and sized else (f"{fault}" + (f", or {equal[0]}" if equal else ""))
    if plant.size is not None:
        text += f" {size:+.3g}"
    others = [r for r in found.get("rivals", ()) if r not in plant.said]
    return text + (f" or {', '.join(others)}" if named and others else "")


def table(lines: list[dict[str, Any]]) -> str:
    found = {tuple(x["unit"]): x["found"] for x in lines}
    rows = [
        "| fault | mask | " + " | ".join(planted.RECIPES) + " |",
        "|---|---|" + "---|" * len(planted.RECIPES),
    ]
    for plant in planted.PLANTS:
        for causal in plant.masks:
            cells = [found.get((plant.name, r, causal)) for r in planted.RECIPES]
            if any(cells):
                mask = "causal" if causal else "full"
                shown = [told(plant, c) if c else "·" for c in cells]
                rows.append(f"| {plant.name} | {mask} | " + " | ".join(shown) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    file = options.file
    lines = [json.loads(x) for x in file.read_text().splitlines() if x] if file.exists() else []
    if not options.table:
        torch.set_num_threads(1)
        done = {tuple(x["unit"]) for x in lines}
        file.parent.mkdir(parents=True, exist_ok=True)
        units = [
            (p, r, causal) for r in ("bf16", "fp8_e4m3", "fp16", "fp32") for p in planted.PLANTS if r in p.recipes
            for causal in p.masks
        ]  # fmt: skip
        with file.open("a") as stream:
            for plant, recipe, causal in units:
                unit = (plant.name, recipe, causal)
                if unit in done:
                    continue
                lines.append({"unit": unit, "found": judged(plant, recipe, causal)})
                stream.write(json.dumps(lines[-1]) + "\n")
                stream.flush()
    print(table(lines))


if __name__ == "__main__":
    main()
