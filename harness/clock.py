"""The clock: seconds of some calls, on the threads and cores that were asked for.

It imports nothing of the harness: `harness.timing.worker` loads it into the process of another checkout, which may be
older than this file.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch

try:
    import resource

    _THREAD = getattr(resource, "RUSAGE_THREAD", None)
except ImportError:  # Windows
    _THREAD = None


def seconds(call: Callable[[], object], calls: int, device: torch.device | str = "cpu") -> float:
    """Seconds that so many calls take, one after the other. On CUDA by events, with the L2 cache emptied before each,
    so that every call finds its inputs in memory; on a CPU by the wall clock, caches as the call before left them, less
    the time in which other programs had the core.

    That time is known where one thread does the work and never waits of its own accord (for a lock, a disk, another
    thread): then the thread's CPU time is all that the calls took. Under load it decides: whoever shares a core is
    stopped every few milliseconds for as long again, in step with spans of a millisecond, so that one side of a
    comparison can be hit again and again."""
    if torch.device(device).type == "cuda":
        return _on_cuda(call, calls, torch.device(device))
    with torch.no_grad(), _no_collection():
        waits, cpu, wall = _waits(), time.thread_time(), time.perf_counter()
        for _ in range(calls):
            call()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        alone = waits is not None and torch.get_num_threads() == 1 and _waits() == waits
    return min(cpu, wall) if alone else wall


def _waits() -> int | None:
    """How often this thread has given its core away; None where the system does not say."""
    return None if _THREAD is None else resource.getrusage(_THREAD).ru_nvcsw


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, whose turn comes by the number of objects and would fall into some calls."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _on_cuda(call: Callable[[], object], calls: int, device: torch.device) -> float:
    buffer, event = _beyond_l2(device), partial(torch.cuda.Event, enable_timing=True)
    marks = []
    with torch.no_grad(), _no_collection(), torch.cuda.device(device):
        for _ in range(calls):
            buffer.zero_()
            mark = (event(), event())
            mark[0].record()
            call()
            mark[1].record()
            marks.append(mark)
        torch.cuda.synchronize(device)
    return float(sum(start.elapsed_time(end) for start, end in marks)) / 1e3


@cache
def _beyond_l2(device: torch.device) -> torch.Tensor:
    """A buffer of twice the L2 cache: writing it leaves nothing else in there."""
    size = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 2**27
    return torch.empty(2 * size, dtype=torch.uint8, device=device)


def clock_mhz(device: torch.device | str) -> float | None:
    """The GPU's present clock, None on a CPU and where the driver's library is not there to ask."""
    if torch.device(device).type != "cuda":
        return None
    try:
        return float(torch.cuda.clock_rate(device))
    except (ImportError, RuntimeError):
        return None


@contextmanager
def pinned(threads: int) -> Iterator[str]:
    """This process, and those it starts, on so many threads and the same number of cores; as before afterwards. What
    shares a core shares its disturbances, so a ratio does not see them. Gives words that say what was done.

    Raises ValueError for more threads than this process may use cores.
    """
    can = hasattr(os, "sched_setaffinity")
    cores = os.sched_getaffinity(0) if can else set(range(os.cpu_count() or 1))
    if not 1 <= threads <= len(cores):
        raise ValueError(f"threads is {threads}; allowed: 1 to {len(cores)}, the cores this process may use")
    before = torch.get_num_threads()
    chosen = sorted(cores)[-threads:]  # the first ones serve most interrupts
    try:
        if can:
            os.sched_setaffinity(0, chosen)
        torch.set_num_threads(threads)
        many = f"{threads} thread{'s' * (threads > 1)}"
        yield f"{many}, on core {', '.join(map(str, chosen))}" if can else f"{many}, not pinned to cores"
    finally:
        torch.set_num_threads(before)
        if can:
            os.sched_setaffinity(0, cores)
