"""One measurement: an algorithm at a length. Time and resident memory are taken in processes of their own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

import harness
from harness.attention.algorithm import Result, store
from harness.cost import attention_flops
from harness.spec import AttentionSpec, Shape

HEADS, HEAD_DIM = 2, 64
RECIPE, CAUSAL = "fp32", AttentionSpec(causal=True)
WARM_LENGTH = 64
ROUNDS, LEAST_ROUNDS, ROUND_S, LONGEST_S = 5, 3, 0.02, 2.0
MMAP_THRESHOLD = 16 * 1024
T = TypeVar("T")
FORKS = "forkserver" in multiprocessing.get_all_start_methods()


@dataclass(frozen=True)
class Algorithm:
    """`name`: as shown. `target`: the implementation. `queries`: how many of the L rows are asked for; None is all."""

    name: str
    target: str
    queries: int | None = None


ALGORITHMS = (
    Algorithm("naive_masked", "naive_masked"),
    Algorithm("lower_triangle", "lower_triangle"),
    Algorithm("online_softmax", "online_softmax"),
    Algorithm("decode_with_cache", "decode_with_cache"),
    Algorithm("one decode step", "naive_masked", queries=1),
)


@dataclass(frozen=True)
class Point:
    """`seconds`: CPU time of one call, the median of rounds. `allocated`: peak bytes by torch's own allocator, inputs
    not among them. `resident`: growth of a fresh process's peak resident set, None where the system does not tell.
    `flops`: of the products that were computed; `needed`: of those that causality leaves visible."""

    algorithm: str
    length: int
    seconds: float
    allocated: int
    resident: int | None
    flops: int
    needed: int


def measure(algorithm: Algorithm, length: int) -> Point:
    """The allocator's peak in this process: it is the same in every run. The rest in two processes of their own."""
    allocated, result = allocator_peak(prepared(algorithm, length))
    shape = Shape(heads=HEADS, q_len=algorithm.queries or length, kv_len=length, head_dim=HEAD_DIM)
    resident = apart(resident_growth, algorithm, length)
    seconds = apart(cpu_seconds, algorithm, length)
    assert seconds is not None
    needed = attention_flops(shape, CAUSAL)
    return Point(algorithm.name, length, seconds, allocated, resident, result.flops, needed)


def prepared(algorithm: Algorithm, length: int) -> Callable[[], Result]:
    """A call whose inputs are stored already."""
    generator = torch.Generator().manual_seed(length)
    rows = algorithm.queries or length
    q, k, v = (torch.randn(1, HEADS, n, HEAD_DIM, generator=generator) for n in (rows, length, length))
    recipe = harness.get_recipe(RECIPE)
    stored = store((q, k, v), recipe)
    found = harness.get(algorithm.target)
    return lambda: found.run_stored(stored, CAUSAL, recipe)


def allocator_peak(run: Callable[[], Result]) -> tuple[int, Result]:
    """Most bytes that torch's CPU allocator had given out at once during the call, and the call's result. tracemalloc
    would see none of them."""
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # or the profiler writes to stderr when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    held = peak = 0
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, result


def resident_growth(run: Callable[[], Result]) -> int | None:
    """By how many bytes the call raised the peak resident set above what was resident before. Linux."""
    with suppress(OSError, AttributeError):
        # glibc keeps what is freed and gives it out again, unseen: here it asks the system for every block and returns
        # it at once (mallopt(3): M_MMAP_THRESHOLD is -3).
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, MMAP_THRESHOLD)
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak to what is resident now
        before = _status("VmRSS")
        run()
        return max(_status("VmHWM") - before, 0)
    return None


def _status(name: str) -> int:
    """A size of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def cpu_seconds(run: Callable[[], Result]) -> float:
    """CPU time of one call on one thread, which other work on the machine disturbs least."""
    times: list[float] = []
    calls, begun = 1, time.process_time()
    while len(times) < ROUNDS and (len(times) < LEAST_ROUNDS or time.process_time() - begun < LONGEST_S):
        start = time.process_time()
        for _ in range(calls):
            run()
        spent = time.process_time() - start
        if spent < ROUND_S and not times:
            calls *= 2
            continue
        times.append(spent / calls)
    return statistics.median(times)


# --- a process of its own -----------------------------------------------------------------------------------


def apart(measured: Callable[[Callable[[], Result]], T], algorithm: Algorithm, length: int) -> T:
    """What `measured` finds in a process that has only called the algorithm at a small length before.

    Raises RuntimeError with what the process said, or how it ended.
    """
    context = multiprocessing.get_context("forkserver" if FORKS else "spawn")
    if FORKS:  # children then start with torch loaded and nothing run
        context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, measured, algorithm, length))
    child.start()
    theirs.close()
    try:
        said, found = ours.recv()
    except EOFError:
        said, found = "", None
    child.join()
    if said is not None or child.exitcode:
        raise RuntimeError(
            f"{algorithm.name} at L = {length} ended with code {child.exitcode}. {said or ''}".strip()
        )
    return found  # type: ignore[no-any-return]


def _child(
    pipe: Connection, measured: Callable[[Callable[[], Result]], Any], algorithm: Algorithm, length: int
) -> None:
    torch.set_num_threads(1)
    try:
        prepared(algorithm, WARM_LENGTH)()  # what a first call sets up, without large tensors
        pipe.send((None, measured(prepared(algorithm, length))))
    except Exception:
        pipe.send((traceback.format_exc(), None))
    pipe.close()
