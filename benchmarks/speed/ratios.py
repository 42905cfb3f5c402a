"""What is compared with what. Every function measures one ratio, on one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import harness
from benchmarks.speed import session
from benchmarks.speed.paired import Ratio, paired, summary
from harness.quantize import store
from harness.recipe import get_recipe

sdpa = torch.nn.functional.scaled_dot_product_attention
CAUSAL = harness.AttentionSpec(causal=True)
LONG, HEADS, ROWS, WIDTH = 32768, 8, 256, 64
BLOCK = 256  # rows of the emulated eager attention


@dataclass(frozen=True)
class Measured:
    """One figure: what it is, its value with its interval, and whether `limit` is kept (at most, or at least)."""

    what: str
    value: float
    low: float
    high: float
    limit: float
    at_most: bool = True
    unit: str = "×"
    more: str = ""

    @property
    def kept(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def _measured(what: str, r: Ratio, limit: float, at_most: bool = True) -> Measured:
    more = f"{1e3 * r.a_s:.3g} and {1e3 * r.b_s:.3g} ms, {r.rounds} rounds"
    return Measured(what, r.value, r.low, r.high, limit, at_most, "×", more)


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=g).to(dtype) for _ in "qkv")
    return q, k, v


def truth(rounds: int) -> list[Measured]:
    q, k, v = _draw(1, 8, 4096, 64, dtype=torch.float64)
    theirs = lambda: sdpa(q, k, v, is_causal=True)  # noqa: E731
    plain = paired(lambda: harness.reference(q, k, v, CAUSAL), theirs, rounds)
    ranged = paired(lambda: harness.reference(q, k, v, CAUSAL, ranges=True), theirs, rounds)
    return [
        _measured("FP64 truth ÷ SDPA in FP64, [1, 8, 4096, 64] causal", plain, 1.2),
        _measured("the same with the ranges that hazards are predicted from", ranged, float("inf")),
    ]


# Peak resident sizes on Linux in KiB. The last rows of the long call, each over all keys: a block is as large as in the
# whole, for its size depends on kv_len alone; what the whole adds is the rest of its outputs.
_CHILD = f"""
import json, resource, torch
from harness.spec import AttentionSpec
from harness.truth import reference
torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
g = torch.Generator().manual_seed(0)
k, v = (torch.randn(1, {HEADS}, {LONG}, {WIDTH}, generator=g) for _ in "kv")
q = torch.randn(1, {HEADS}, {ROWS}, {WIDTH}, generator=g)
spec = AttentionSpec(causal=True)
reference(q[:, :1, :16], k[:, :1, :16], v[:, :1, :16], spec)
before = peak()
truth = reference(q, k, v, spec)
print(json.dumps([before, peak(), sum(x.nbytes for x in (truth.out, truth.lse, truth.row_max))]))
"""


def truth_memory(rounds: int) -> list[Measured]:
    found = []
    for _ in range(min(rounds, 3)):
        done = subprocess.run(
            [sys.executable, "-c", _CHILD],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        before, after, outputs = json.loads(done.stdout)
        found.append((after - before - outputs) / 2**20)
    found.sort()
    what = "FP64 truth beyond its inputs and outputs, 8 heads, L = 32k"
    return [Measured(what, found[len(found) // 2], found[0], found[-1], 64.0, True, "MiB")]


def judge(rounds: int) -> list[Measured]:
    q, k, v = _draw(1, 8, 4096, 64, dtype=torch.bfloat16)
    out = harness.get("online_softmax").run(q, k, v, CAUSAL, recipe="bf16").out
    wide = tuple(x.double() for x in (q, k, v))
    r = paired(
        lambda: harness.judge(out, q, k, v, spec=CAUSAL, recipe="bf16"),
        lambda: sdpa(*wide, is_causal=True),
        rounds,
    )
    return [_measured("judge, its truth included ÷ SDPA in FP64, [1, 8, 4096, 64] causal BF16", r, 3.0)]


def fp16(rounds: int) -> list[Measured]:
    q, k, v = _draw(1, 1, 4096, 64, dtype=torch.float16)
    stored = store((q, k, v), get_recipe("fp16_eager"))
    blocks = [slice(i, i + BLOCK) for i in range(0, 4096, BLOCK)]
    naive, spec = harness.get("naive_masked"), harness.AttentionSpec()

    def ours() -> Tensor:
        out: Tensor = naive.run_stored(stored, spec, get_recipe("fp16_eager"), rows=blocks).out
        return out

    def theirs() -> Tensor:
        return torch.softmax(q @ k.mT * 0.125, -1) @ v

    apart = float((ours().float() - theirs().float()).norm() / theirs().float().norm())
    r = paired(ours, theirs, min(rounds, 3)).inverse
    what = f"torch's native FP16 eager ÷ ours emulated, [1, 1, 4096, 64] (apart by {apart:.1e} of the output)"
    return [_measured(what, r, 25.0, at_most=False)]


def rounding(rounds: int) -> list[Measured]:
    import ml_dtypes
    import numpy as np

    x = torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 50
    array = x.numpy()
    ours = lambda: harness.round_to(x, "fp8_e4m3", "saturate")  # noqa: E731
    cast = paired(ours, lambda: x.to(torch.float8_e4m3fn).float(), rounds).inverse
    other = paired(ours, lambda: array.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), rounds).inverse
    speed = 2 * x.nbytes / cast.b_s / 1e9
    return [
        _measured(
            f"torch's E4M3 cast and back ÷ round_to, 4M elements (ours {speed:.1f} GB/s)", cast, 1.0, False
        ),
        _measured("ml_dtypes' E4M3 cast and back ÷ round_to", other, 8.0, False),
    ]


def algorithms(rounds: int) -> list[Measured]:
    q, k, v = _draw(1, 8, 4096, 64)

    def run(name: str) -> Callable[[], object]:
        return lambda: harness.get(name).run(q, k, v, CAUSAL, recipe="fp32")

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        online = paired(run("online_softmax"), lambda: sdpa(q, k, v, is_causal=True), rounds)
    triangle = paired(run("lower_triangle"), run("naive_masked"), min(rounds, 5))
    return [
        _measured("online_softmax in FP32 ÷ SDPA flash, [1, 8, 4096, 64] causal", online, 1.5),
        _measured("lower_triangle ÷ naive_masked in FP32, the same", triangle, 0.65),
    ]


def startup(rounds: int) -> list[Measured]:
    """CPU seconds, since wall time is other work's too; the wall's median beside."""
    import resource

    found = []
    kept = {
        n: x for n, x in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"
    }  # as installed: bytecode kept
    for command in (["list"], ["cost", "--model", "llama-3.1-8b"], ["report", "--help"]):
        cpu, wall = [], []
        for _ in range(max(rounds, 5)):
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "harness", *command],
                stdout=subprocess.DEVNULL,
                check=True,
                cwd=Path(__file__).parents[2],
                env=kept,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall.append(time.perf_counter() - start)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        r = summary(cpu, cpu, wall)
        what = f"start-up of {' '.join(command[:1])}, CPU"
        found.append(Measured(what, r.value, r.low, r.high, 0.3, True, "s", f"wall {r.b_s:.2f} s"))
    return found


def whole(rounds: int) -> list[Measured]:
    bare, judged = session.plain(rounds)
    return [
        _measured(
            "the accuracy session ÷ its implementation runs and one truth a storage",
            session.over_runs(rounds),
            1.3,
        ),
        _measured(
            "a plain script that judges each of the same cells by itself ÷ the session", judged, 5.0, False
        ),
        _measured(
            "a plain script that runs and compares them, and judges nothing ÷ the session", bare, float("inf")
        ),
    ]


RATIOS: dict[str, Callable[[int], list[Measured]]] = {
    "truth": truth, "truth-memory": truth_memory, "judge": judge, "fp16": fp16, "rounding": rounding,
    "algorithms": algorithms, "startup": startup, "session": whole,
}  # fmt: skip
