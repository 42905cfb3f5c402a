"""FlashAttention-3, table 3: RMS error in FP16 and FP8 on data with outliers, against the exact truth.

q, k, v ~ N(0, 1) + N(0, 100)·Bernoulli(0.001). Every FP8 row rounds its inputs to FP16 first. `eager` holds scores in
FP16, takes the softmax in FP32 and normalises P before its cast to FP16; `flash` is an online softmax over blocks of
128 keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from benchmarks.published.rows import Paper, Row, number, told
from harness import Case, Draw, Recipe, Scaling, Shape, get, get_recipe, reference
from harness.inputs import make_inputs
from harness.recipe import TENSORS

PAPER = Paper("flash_attention_3", "FlashAttention-3, table 3", "arXiv 2407.08608")
D = 128
HEAD = dict.fromkeys(TENSORS, Scaling("head", "amax"))


def fp8(name: str, like: str, **changes: Any) -> Recipe:
    """A variant of an FP8 recipe of the house, on FP16 inputs and with an FP16 output."""
    recipe = get_recipe(like)
    return replace(recipe, **{"name": name, "inputs": "fp16", "at": {**recipe.at, "out": "fp16"}, **changes})


# S is rounded to FP16 before its scale and after it, in FP8 once: after it is descaled.
EAGER = {"scores": "fp16", "probs": "fp16", "out": "fp16"}
# Row → algorithm, recipe, published RMSE and what is accepted.
SETTINGS: dict[str, tuple[str, Recipe, float, tuple[float, float]]] = {
    "FP16 eager": (
        "naive_masked",
        replace(get_recipe("fp16"), name="fa3_fp16_eager", at={"scores_raw": "fp16", **EAGER}, normalise="early"),
        3.2e-4, (2.0e-4, 4.2e-4),
    ),
    "FP16 flash": ("online_softmax", get_recipe("fp16"), 1.9e-4, (1.3e-4, 2.7e-4)),
    "FP8 eager": (
        "naive_masked",
        fp8("fa3_fp8_eager", "fp8_e4m3", at=EAGER, p_scale=1.0, normalise="early"),
        2.4e-2, (1.9e-2, 3.1e-2),
    ),
    "FP8 flash": ("online_softmax", fp8("fa3_fp8", "fp8_e4m3_hadamard"), 9.1e-3, (7.8e-3, 10.6e-3)),
    "FP8 flash without block scales": (
        "online_softmax", fp8("fa3_fp8_head", "fp8_e4m3_hadamard", scaling=HEAD), 9.3e-3, (8.2e-3, 10.7e-3),
    ),
    "FP8 flash without Hadamard": (
        "online_softmax", fp8("fa3_fp8_plain", "fp8_e4m3_block"), 2.4e-2, (1.8e-2, 2.7e-2),
    ),
}  # fmt: skip
RATIOS = {
    "FP8 eager ÷ FP8 flash": (1.5, 2.3),
    "FP16 eager ÷ FP16 flash": (1.3, 1.9),
}  # bands at the small size


def measure(shape: Shape, seeds: int, settings: tuple[str, ...]) -> dict[str, float]:
    """RMSE against the exact truth, pooled over heads and seeds by mean square."""
    case = Case("published", f"fa3-{shape.S}", shape, "table 3's inputs", draw=Draw("outliers"))
    squares = dict.fromkeys(settings, 0.0)
    units = [(seed, head) for seed in range(seeds) for head in range(shape.heads)]
    drawn: tuple[int, tuple[Tensor, Tensor, Tensor]] | None = None
    for seed, head in told(units, f"{PAPER.name}, n = {shape.S}"):
        if drawn is None or drawn[0] != seed:
            drawn = seed, make_inputs(case, seed).tensors
        q, k, v = (x[:, head : head + 1] for x in drawn[1])
        truth = reference(q, k, v).out
        for name in settings:
            algorithm, recipe, *_ = SETTINGS[name]
            out = get(algorithm).run(q, k, v, recipe=recipe, quantize=True).out
            squares[name] += float((out.double() - truth).square().mean())
    return {name: math.sqrt(x / len(units)) for name, x in squares.items()}


def rows(full: bool) -> Iterator[Row]:
    """The table at the paper's size; two quotients of it at the small one."""
    shape, seeds = (Shape(1, 16, 256, D, kv_len=8448), 5) if full else (Shape(1, 4, 128, D, kv_len=2048), 20)
    size = f"n = {shape.S}, d = {D}, {shape.heads} heads × {shape.q_len} rows, {seeds} seeds, exact truth"
    if full:
        found = measure(shape, seeds, tuple(SETTINGS))
        for name, (_, _, published, band) in SETTINGS.items():
            yield Row(f"RMSE, {name}", number(published), found[name], *band, size)
        return
    found = measure(shape, seeds, tuple(dict.fromkeys(n for pair in RATIOS for n in pair.split(" ÷ "))))
    for pair, band in RATIOS.items():
        a, b = pair.split(" ÷ ")
        printed = SETTINGS[a][2] / SETTINGS[b][2]
        note = f"RMSE {number(found[a])} and {number(found[b])}; published at n = 8448"
        yield Row(f"RMSE, {pair}", f"{printed:.2f}", found[a] / found[b], *band, size, note)
