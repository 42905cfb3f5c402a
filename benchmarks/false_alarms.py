"""How often does `judge` fail an honest kernel? Never, if its thresholds hold.

    python benchmarks/false_alarms.py runs/false-alarms.jsonl --seeds 500

judges torch's fused CPU kernel, an online softmax with blocks unlike the twins' and a kernel written on torch alone
(`tests/planted.py`), in every recipe that stores what they can take, on shapes × masks × kinds of data × seeds. Seeds
are the outer loop and each unit is one line of the file, so that a run that was stopped goes on where it was, and a
shorter one is a smaller sample of the same thing. `--table` prints what the file holds so far; several processes may
share the work by `--part i/n`, each with a file of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

import planted  # noqa: E402

import harness  # noqa: E402
from harness.docket import Docket  # noqa: E402
from harness.error_model import BLACK_BOX, form_of  # noqa: E402
from harness.operands import Extras  # noqa: E402

SHAPES = ((1, 2, 128, 64), (1, 4, 256, 64))
RECIPES = tuple(r for r in harness.recipes() if r != "fp64")
SDPA = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def sdpa(call: planted.Made) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.values.to(SDPA[call.recipe.name]) for x in call.stored)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=call.spec.causal)


def kernels(call: planted.Made) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Name, output and form of every honest kernel of a call."""
    online = harness.get("online_softmax")
    for block in (48, 96):
        out = online.run_stored(call.stored, call.spec, call.recipe, Extras(), block=block).out
        yield f"online {block}", out, form_of("online_softmax", {"block": block})
    naive = harness.get("naive_masked").run_stored(call.stored, call.spec, call.recipe, Extras()).out
    yield "naive", naive, form_of("naive_masked")
    if call.recipe.name in planted.RECIPES:
        yield "torch alone", planted.Kernel()(call), BLACK_BOX
    if call.recipe.name in SDPA:
        yield "SDPA", sdpa(call), BLACK_BOX


def units(seeds: int, rotate: bool = False) -> Iterator[tuple[int, str, tuple[int, ...], bool, str]]:
    """Every combination; with `rotate` one shape and one kind of data a seed, in turn."""
    kinds = tuple(planted.KINDS)
    for seed in range(seeds):
        shapes = SHAPES[seed % len(SHAPES) :][:1] if rotate else SHAPES
        chosen = kinds[seed % len(kinds) :][:1] if rotate else kinds
        yield from itertools.product((seed,), RECIPES, shapes, (False, True), chosen)


def judged(seed: int, recipe: str, shape: tuple[int, ...], causal: bool, kind: str) -> dict[str, Any]:
    call = planted.made(shape, recipe, seed, causal=causal, kind=kind)
    names, outs, forms = zip(*kernels(call), strict=True)
    docket = Docket(call.stored, call.spec, Extras(), call.recipe)
    found = {}
    for name, v in zip(names, docket.verdicts(outs, forms), strict=True):
        t = max((abs(x.shift.t) for x in v.along), default=0.0)
        d = max((x.spread.t for x in v.along), default=0.0)
        m = v.margins
        figures = (round(t, 2), round(d, 2), round(m.worst, 3), round(m.ratio, 3), round(m.ceiling, 4))
        found[name] = [v.status.value, *figures]
        if v.status.value != "PASS":
            found[name].append("; ".join(v.reasons))
    return found


def table(lines: list[dict[str, Any]]) -> str:
    cells: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for line in lines:
        for name, value in line["found"].items():
            cells[line["unit"][1], name].append(value)
    rows = ["| recipe | kernel | cells | FAIL | INCONCLUSIVE | \\|T\\| | T_d | of its limit | ratio | of the ceiling |",
            "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for (recipe, name), found in cells.items():
        counts = [sum(x[0] == s for x in found) for s in ("FAIL", "INCONCLUSIVE")]
        tops = [max(x[i] for x in found) for i in range(1, 6)]
        rows.append(
            f"| {recipe} | {name} | {len(found)} | {counts[0]} | {counts[1]} | "
            + " | ".join(f"{t:.3g}" for t in tops) + " |"
        )  # fmt: skip
    total = [x for found in cells.values() for x in found]
    fails = sum(x[0] == "FAIL" for x in total)
    rows.append(f"\n{len(total)} cells, {fails} false alarms")
    failures = [
        (line["unit"], n, v[-1]) for line in lines for n, v in line["found"].items() if v[0] == "FAIL"
    ]
    rows += [f"{unit} {name}: {why}" for unit, name, why in failures[:20]]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--rotate", action="store_true", help="one shape and kind of data a seed, in turn")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    lines = [json.loads(x) for f in options.file if f.exists() for x in f.read_text().splitlines() if x]
    if not options.table:
        torch.set_num_threads(1)
        part, parts = (int(x) for x in options.part.split("/"))
        done = {json.dumps(x["unit"]) for x in lines}
        options.file[0].parent.mkdir(parents=True, exist_ok=True)
        with options.file[0].open("a") as file:
            for number, unit in enumerate(units(options.seeds, options.rotate)):
                if number % parts != part or unit[1] not in options.recipes.split(","):
                    continue
                if json.dumps(unit) in done:
                    continue
                line = {"unit": unit, "found": judged(*unit)}
                lines.append(json.loads(json.dumps(line)))
                file.write(json.dumps(line) + "\n")
                file.flush()
    print(table(lines))


if __name__ == "__main__":
    main()
