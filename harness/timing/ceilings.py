"""The rates that this machine reaches: matrix products by dtype, and copying. To be measured in the run they judge.

A product is `torch.mm` of square matrices, A·B and A·Bᵀ, of FP8 `torch._scaled_mm`; the best of several sizes and runs
counts: a ceiling is what the machine can do, and other work only ever lowers it. Copying reads and writes every byte
once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from harness.arithmetic import DTYPES
from harness.clock import seconds

FORMATS = ("fp64", "fp32", "bf16", "fp16", "fp8_e4m3")
SIZES = {"cpu": (128, 256, 512), "cuda": (4096, 8192)}  # short enough for some run to meet no other work
COPIED = {"cpu": 2**27, "cuda": 2**30}  # bytes: beyond the last cache
EACH_S = 0.25  # for one ceiling, and at least FEWEST runs of each size
FEWEST = 2


def copy_rate(device: str = "cpu", each_s: float = EACH_S) -> float:
    """Bytes a second that copying moves: read and written."""
    size = COPIED[torch.device(device).type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(partial(target.copy_, source), device, each_s)


def product_rate(fmt: str, device: str = "cpu", each_s: float = EACH_S) -> float:
    """FLOPs a second of matrix products in a format. Raises ValueError for a format that torch multiplies nowhere here,
    in a line that says why."""
    if fmt not in FORMATS:
        raise ValueError(f"no products of {fmt} are measured; allowed: {', '.join(FORMATS)}")
    rates = []
    for n in SIZES[torch.device(device).type]:
        try:
            took = min(_best(call, device, each_s / 6) for call in _products(fmt, n, device))
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(f"torch has no {fmt} product here: {error}".partition("\n")[0]) from None
        rates.append(2 * n**3 / took)
        if took > each_s / 8:  # a larger one takes eight times as long, and says no more
            break
    return max(rates)


def _products(fmt: str, n: int, device: str) -> list[Callable[[], object]]:
    a, b = (torch.randn(n, n, device=device).to(DTYPES[fmt]) for _ in range(2))
    if fmt == "fp8_e4m3":
        one = torch.ones((), device=device)
        return [lambda: torch._scaled_mm(a, b.mT, one, one, out_dtype=torch.float32)]
    return [lambda: torch.mm(a, b), lambda: torch.mm(a, b.mT)]


def _best(call: Callable[[], object], device: str, each_s: float) -> float:
    """Seconds of the quickest run, after one that warms up."""
    call()
    took: list[float] = []
    end = time.perf_counter() + each_s
    while len(took) < FEWEST or time.perf_counter() < end:
        took.append(seconds(call, 1, device))
    return min(took)
