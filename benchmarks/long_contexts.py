"""Error against length, n = 256 … 1M, and what an audit of a long call costs: `python -m benchmarks.long_contexts`.

Every length, and each audit, runs in a process of its own, on one thread, whose peak resident size is its own. Points
are kept in --points as they come: a run that is stopped goes on where it was. The figure needs the extra `report`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = tuple(4**i for i in range(4, 11))  # 256 … 1,048,576
RECIPES = ("fp32", "bf16", "fp16", "fp8_e4m3")
ALGORITHMS = ("naive_masked", "online_softmax", "split_kv")
MEANS = (0.0, 1.0)  # of V: with 0 the output shrinks as 1/√n, with 1 it stays
HEADS, KV_HEADS, ROWS, DIM = 2, 1, 8, 64
AUDITS = {
    "prefill of 131,072 tokens": {"q_len": 2**17, "kv_len": 2**17},
    "decode step over 1,048,576 keys": {"q_len": 1, "kv_len": 2**20},
}
AUDIT_HEADS, AUDIT_KV_HEADS, AUDIT_ROWS = 8, 2, 512
COLOURS = {"fp32": "#0072B2", "bf16": "#D55E00", "fp16": "#009E73", "fp8_e4m3": "#CC79A7"}
MARKERS = {"naive_masked": "s", "online_softmax": "o", "split_kv": "^"}


def peak_bytes() -> int:
    """The largest resident size so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- in a process of its own -----------------------------------------------------------------------------------------


def drawn(name: str, size: Sequence[int], dtype: Any, mean: float = 0.0) -> Any:
    """Normals, drawn 2^16 tokens at a time."""
    import torch

    g = torch.Generator().manual_seed(sum(map(ord, name)))
    x = torch.empty(*size, dtype=dtype)
    for start in range(0, size[2], 2**16):
        part = x[:, :, start : start + 2**16]
        part.copy_(torch.randn(part.shape, generator=g) + mean)
    return x


def growth_points(n: int) -> Iterator[dict[str, Any]]:
    """Error and expectation of every recipe and algorithm over n keys."""
    import torch

    from harness import AttentionSpec, registry
    from harness.by_head import expectations_by_head, parts_of, store_narrow, truth_by_head
    from harness.error_model import form_of
    from harness.operands import NO_EXTRAS
    from harness.quantize import Stored
    from harness.recipe import TENSORS, get_recipe

    spec, forms = AttentionSpec(), [form_of(name) for name in ALGORITHMS]
    for mean in MEANS:
        q = drawn("q", (1, HEADS, ROWS, DIM), torch.float32)
        k = drawn("k", (1, KV_HEADS, n, DIM), torch.float32)
        v = drawn("v", (1, KV_HEADS, n, DIM), torch.float32, mean)
        for name in RECIPES:
            recipe, start = get_recipe(name), time.process_time()
            made = [store_narrow(x, t, recipe, None, True) for x, t in zip((q, k, v), TENSORS, strict=True)]
            stored = (Stored(made[0].codes.double(), made[0].scale), made[1], made[2])
            truth = truth_by_head(stored, spec, NO_EXTRAS)
            expected = expectations_by_head(truth, stored, spec, NO_EXTRAS, recipe, forms)
            size = float(truth.out.norm())
            for algorithm, e in zip(ALGORITHMS, expected, strict=True):
                run = registry.get(algorithm).run_stored
                outs = [run(own, spec, recipe, extras).out for _, own, extras in parts_of(stored, NO_EXTRAS)]
                error = float((torch.cat(outs, 1).double() - truth.out).norm())
                yield {
                    "kind": "growth", "n": n, "v_mean": mean, "recipe": name, "algorithm": algorithm,
                    "rel_l2": error / size, "expected": math.sqrt(float(e.variance.sum())) / size,
                    "cpu_s": time.process_time() - start, "peak": peak_bytes(),
                }  # fmt: skip


def audit_point(name: str, recipe: str = "bf16") -> Iterator[dict[str, Any]]:
    """What judging one call costs, its kernel's run apart."""
    import torch

    import harness
    from harness import AttentionSpec
    from harness.by_head import parts_of
    from harness.judging import store_rows
    from harness.operands import Extras
    from harness.recipe import get_recipe

    sizes, spec = AUDITS[name], AttentionSpec(causal=True)
    q = drawn("q", (1, AUDIT_HEADS, sizes["q_len"], DIM), torch.bfloat16)
    k, v = (drawn(t, (1, AUDIT_KV_HEADS, sizes["kv_len"], DIM), torch.bfloat16) for t in "kv")
    rows = harness.choose_rows(q, k, spec, rows=AUDIT_ROWS)
    stored = store_rows((q, k, v), rows, get_recipe(recipe), None, False)
    run = harness.get("online_softmax").run_stored
    start = time.process_time()
    parts = [
        run(own, spec, get_recipe(recipe), extras, block=512).out
        for _, own, extras in parts_of(stored, Extras(rows=rows))
    ]
    out, kernel_s = torch.cat(parts, 1), time.process_time() - start
    del stored, parts
    cpu, wall = time.process_time(), time.perf_counter()
    judged = harness.judge(
        out, q, k, v, spec=spec, recipe=recipe, rows=AUDIT_ROWS if len(rows) < rows.of else rows
    )
    yield {
        "kind": "audit", "name": name, "recipe": recipe, "status": judged.status.value, "rows": str(judged.rows),
        "ratio": judged.margins.ratio, "rel_l2": judged.errors.rel_l2, "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall, "kernel_s": kernel_s, "peak": peak_bytes(),
    }  # fmt: skip


def child(task: str) -> None:
    import torch

    torch.set_num_threads(1)
    kind, _, what = task.partition(":")
    for point in growth_points(int(what)) if kind == "growth" else audit_point(what):
        print(json.dumps({"task": task, **point}), flush=True)


# --- the run ---------------------------------------------------------------------------------------------------------


def measured(tasks: Sequence[str], path: Path) -> list[dict[str, Any]]:
    """Points of every task: those that `path` holds, and what is missing, which is added to it."""
    held: dict[str, list[dict[str, Any]]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            point = json.loads(line)
            held.setdefault(point["task"], []).append(point)
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, task in enumerate(tasks, 1):
        known = "  (held)" if task in held else ""
        print(f"{number}/{len(tasks)} {task}{known}", file=sys.stderr, flush=True)
        if known:
            continue
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.long_contexts", "--child", task], cwd=ROOT, stdout=subprocess.PIPE,
            text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{task}: the child ended with {done.returncode}")
        with path.open("a", encoding="utf-8") as file:  # a task's points all at once: a killed run repeats it
            file.write(done.stdout)
        held[task] = [json.loads(line) for line in done.stdout.splitlines()]
    return [point for task in tasks for point in held[task]]


def slope(points: Sequence[dict[str, Any]]) -> float:
    """b of rel_l2 ∝ n^b by least squares on logarithms."""
    x, y = [math.log(p["n"]) for p in points], [math.log(p["rel_l2"]) for p in points]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mx) ** 2 for a in x)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread if spread else math.nan


def figure(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Error against length, the expectation as a line. The same points give the same bytes."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no figure: matplotlib is not installed (extra `report`)", file=sys.stderr)
        return
    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "long-contexts", "svg.fonttype": "none", "font.size": 9})
    drawn_on, axes = plt.subplots(1, len(MEANS), figsize=(10, 4.2), sharey=True, layout="constrained")
    for axis, mean in zip(axes, MEANS, strict=True):
        for recipe in RECIPES:
            for algorithm in ALGORITHMS:
                own = series(points, recipe, algorithm, mean)
                x, expected = [p["n"] for p in own], [p["expected"] for p in own]
                style = {"naive_masked": "--", "online_softmax": "-", "split_kv": ":"}[algorithm]
                axis.plot(x, expected, style, color=COLOURS[recipe], linewidth=1)
                label = f"{recipe}, {algorithm}" if axis is axes[0] else None
                axis.plot(
                    x, [p["rel_l2"] for p in own], MARKERS[algorithm], color=COLOURS[recipe], markersize=4,
                    markerfacecolor="none", label=label,
                )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="keys n", title=f"V ~ N({mean:g}, 1)")
        axis.set_xticks(
            LENGTHS, [f"{n}" if n < 1024 else f"{n // 1024}k" if n < 2**20 else "1M" for n in LENGTHS]
        )
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("rel_l2 against the stored truth; lines: expected")
    drawn_on.legend(loc="outside lower center", ncols=4, fontsize=7)
    drawn_on.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(drawn_on)


def series(
    points: Sequence[dict[str, Any]], recipe: str, algorithm: str, mean: float
) -> list[dict[str, Any]]:
    return [
        p for p in points
        if p["kind"] == "growth" and (p["recipe"], p["algorithm"], p["v_mean"]) == (recipe, algorithm, mean)
    ]  # fmt: skip


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return ["| " + " | ".join(line) + " |" for line in (headers, rule, *rows)]


def page(points: Sequence[dict[str, Any]], figure_name: str) -> str:
    from harness.machine import machine

    here = machine()
    lengths = sorted({p["n"] for p in points if p["kind"] == "growth"})
    lines = [
        "# Long contexts", "",
        f"`python -m benchmarks.long_contexts`: {here.cpu}, {here.cores} cores, {here.isa}, Python"
        f" {platform.python_version()}, torch {here.torch}; one thread a process.", "",
        f"![Error against length]({figure_name})", "",
        "## Error against length", "",
        f"rel_l2 against the stored truth (÷ what the error model expects of that algorithm) of {HEADS} heads × {ROWS}"
        f" rows over n keys, q and k ~ N(0, 1), d = {DIM}, not causal. b: rel_l2 ∝ n^b over these lengths.", "",
    ]  # fmt: skip
    for mean in MEANS:
        rows = []
        for recipe in RECIPES:
            for algorithm in ALGORITHMS:
                own = series(points, recipe, algorithm, mean)
                cells = [f"{p['rel_l2']:.2g} ({p['rel_l2'] / p['expected']:.2f})" for p in own]
                rows.append([f"{recipe} · {algorithm}", *cells, f"{slope(own):+.2f}"])
        lines += [
            f"V ~ N({mean:g}, 1):",
            "",
            *table(["recipe · algorithm", *map(str, lengths), "b"], rows),
            "",
        ]
    lines += ["What is to be expected:", "", *LAWS, "", "## What an audit costs", "", AUDIT_TOLD, ""]
    rows = [
        [
            p["name"], p["recipe"], p["status"], p["rows"], f"{p['ratio']:.2f}", f"{p['cpu_s']:.0f} s",
            f"{p['wall_s']:.0f} s", f"{p['peak'] / 2**30:.2f} GiB", f"{p['kernel_s']:.0f} s",
        ]
        for p in points if p["kind"] == "audit"
    ]  # fmt: skip
    headers = ["call", "recipe", "status", "judged by", "× expected", "CPU", "wall", "peak", "its kernel"]
    lines += [*table(headers, rows), "", "## What a length costs", ""]
    rows = []
    for n in lengths:
        own = [p for p in points if p["kind"] == "growth" and p["n"] == n]
        seconds = sum(
            max(p["cpu_s"] for p in own if (p["recipe"], p["v_mean"]) == key)
            for key in {(p["recipe"], p["v_mean"]) for p in own}
        )
        rows.append([str(n), f"{seconds:.1f} s", f"{max(p['peak'] for p in own) / 2**20:.0f} MiB"])
    lines += [
        "Truth, expectations and runs of all recipes, algorithms and both V; the peak is of the whole process.", "",
        *table(["n", "CPU", "peak"], rows),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


AUDIT_TOLD = f"""\
`harness.judge(…, rows={AUDIT_ROWS})` of [1, {AUDIT_HEADS}/{AUDIT_KV_HEADS}, …, {DIM}], causal, in BF16: choice of rows,
truth, error model, twins, directions and verdict, on one thread. CPU seconds are the measure: wall time counts what
else the machine did. The peak is of the whole process, inputs and libraries included. The output under audit is
`online_softmax`, computed at these rows alone; its time stands apart."""


LAWS = (
    "* FP32: of the roundings of partial sums a whole row has n/192 (chunks) and an online softmax n/128 (blocks), each"
    " in proportion to the sum so far: rel_l2 grows as √n once they outweigh the roundings within a chunk, from about"
    " 10⁴ keys on with V ~ N(1, 1) and 10⁵ with V ~ N(0, 1). Split into parts the growth comes later. The model expects"
    " up to 1.6 × what is seen here of one long running sum: it errs on the side that raises no alarm.",
    "* BF16, FP16 and FP8, V ~ N(0, 1): P and V are rounded key by key, and the errors shrink as the output does:"
    " rel_l2 does not depend on n (b = 0).",
    "* The same, V ~ N(1, 1): the errors of P average, b = −½, down to the rounding of the output (BF16 1.7e-3, FP16"
    " 2.1e-4), which does not.",
    "* Sums kept in fewer bits stagnate instead: with the 13 fractional bits of Hopper's FP8 products, P·V over 131,072"
    " keys is off by 33 % (V mean 0.25) and 58 % (V mean 1), and by less than 1e-3 when promoted every 128 products"
    " ([published figures](published-full.md), by `noxfile.py -s published -- --full`).",
)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_contexts", description=__doc__)
    parser.add_argument("--max", type=int, default=LENGTHS[-1], help="largest length")
    parser.add_argument("--points", type=Path, default=Path("reports/latest/long-contexts.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("reports/long-contexts.md"))
    parser.add_argument("--no-audit", action="store_true", help="the lengths alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(arguments)
    if given.child:
        child(given.child)
        return 0
    from harness.files import write_atomically

    tasks = [f"growth:{n}" for n in LENGTHS if n <= given.max]
    tasks += [] if given.no_audit else [f"audit:{name}" for name in AUDITS]
    points = measured(tasks, given.points)
    drawn_to = given.out.with_suffix(".svg")
    figure(points, drawn_to)
    write_atomically(given.out, page(points, drawn_to.name))
    print(f"written to {given.out} and {drawn_to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
