"""A run kept on disk as it goes: whole lines appended, a killed run resumed, cells run in parallel.

torch takes seconds to load, so each function here that computes imports what it needs: a run in several processes
loads it in these alone.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

from harness.cluster import cluster
from harness.files import append
from harness.interrupts import interrupts_held
from harness.records import Machine, Record, read_records, to_json, write_records
from harness.unit import Unit


def record(
    path: Path, units: Sequence[Unit], jobs: int, resume: bool, tell: Callable[[str], None] | None = None,
    executor: str = "",
) -> Iterator[tuple[Unit, list[Record]]]:  # fmt: skip
    """Run the units, append each one's records to `path`, and yield them. `executor`: the address of a cluster
    (`harness.cluster`) to run them on, instead of `jobs` processes here.

    With `resume`, records of `path` that belong to these units are kept, and yielded, and units that are complete are
    not run again; records of other units go, and `tell` is given a line that counts them. Otherwise the file starts
    anew. Lines are flushed to disk unit by unit: a killed run leaves whole records, and at most one cut line at the
    end, which resuming drops. Until the first unit is done an earlier file stays as it was: a run that cannot start
    loses nothing.

    Raises ValueError for a damaged file, BrokenExecutor when a worker process dies.
    """
    done, dropped = _kept(path, units) if resume else ({}, "")
    if dropped and tell is not None:
        tell(dropped)
    return _recorded(path, units, jobs, done, executor)


def _recorded(
    path: Path, units: Sequence[Unit], jobs: int, done: Mapping[tuple[str, int], list[Record]], executor: str
) -> Iterator[tuple[Unit, list[Record]]]:
    kept = [r for unit in units for r in done.get((unit.case.id, unit.seed), [])]
    left = [u for u in units if (u.case.id, u.seed) not in done]
    if not left:
        write_records(path, kept)
    for unit in units:
        if (unit.case.id, unit.seed) in done:
            yield unit, done[unit.case.id, unit.seed]
    if not left:
        return
    started = False
    where: AbstractContextManager[Executor | None] = (
        cluster(executor, left[0].device) if executor else workers(min(jobs, len(left)))
    )
    with where as pool:
        for unit, records in _results(left, pool):
            if started:
                append(path, "".join(to_json(r) + "\n" for r in records))
            else:
                write_records(path, [*kept, *records])
                started = True
            yield unit, records


def _results(units: Sequence[Unit], pool: Executor | None) -> Iterator[tuple[Unit, list[Record]]]:
    """`run_units`, but nothing is cancelled on the way out: a pool that loses its processes while it holds cancelled
    futures prints a traceback (Python 3.11)."""
    if pool is None:
        from harness.pipeline import run_units

        yield from run_units(units)
        return
    if isinstance(pool, ProcessPoolExecutor):
        run_unit = _run_unit
    else:
        from harness.cell import run_unit
    futures = [pool.submit(run_unit, unit) for unit in units]
    for unit, future in zip(units, futures, strict=True):
        yield unit, future.result()


def _run_unit(unit: Unit) -> list[Record]:
    from harness.cell import run_unit

    return run_unit(unit)


def _kept(path: Path, units: Sequence[Unit]) -> tuple[dict[tuple[str, int], list[Record]], str]:
    """Records of the units that `path` holds completely, and a line on those that go, if any do."""
    if not path.exists():
        return {}, ""
    from harness.machine import machine

    by_unit: dict[tuple[str, int], dict[tuple[str, str, str, int], Record]] = {}
    for r in read_records(path):
        by_unit.setdefault((r.case, r.seed), {})[r.key] = r
    kept = {}
    for unit in units:
        found = by_unit.get((unit.case.id, unit.seed), {})
        wanted, here = unit.keys, machine(unit.device)
        if wanted <= found.keys() and all(_belongs(found[key], unit, here) for key in wanted):
            kept[unit.case.id, unit.seed] = [r for key, r in found.items() if key in wanted]
    return kept, _dropped(path, by_unit.values(), units, sum(map(len, kept.values())))


def _dropped(
    path: Path, found: Iterable[Mapping[tuple[str, str, str, int], Record]], units: Sequence[Unit], kept: int
) -> str:
    keys = {key for of_unit in found for key in of_unit}
    other = len(keys - {key for unit in units for key in unit.keys})
    again = len(keys) - other - kept
    parts = (
        (other, "are not of this selection and go"),
        (again, "are of units that were cut off, or of other code or another machine, and run again"),
    )
    told = "; ".join(f"{n} {what}" for n, what in parts if n)
    return f"of {len(keys)} records in {path}, {told}" if told else ""


def _belongs(r: Record, unit: Unit, here: Machine) -> bool:
    """Whether a record is what running its cell here would give, as far as it can tell: the same recipe, case, device
    and software. It cannot tell a changed implementation from an unchanged one."""
    there = r.machine
    digests = {recipe.name: recipe.digest for recipe in unit.recipes}
    return (
        r.recipe_digest == digests[r.recipe]
        and (r.case_digest, r.why) == (unit.case.digest, unit.case.why)
        and all(
            getattr(here, name) == getattr(there, name)
            for name in ("device", "isa", "torch", "numpy", "harness")
        )
    )


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """`jobs` processes of one thread each; None for one job, which then runs here, on one thread as well: the number
    of threads can change the order of a sum, and results must not depend on `jobs`."""
    if jobs == 1:
        with interrupts_held():  # what torch imports has swallowed an interrupt
            import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield None
        finally:
            torch.set_num_threads(threads)
        return
    others = set(active_children())
    # spawn: a forked child of a process that has used OpenMP may hang
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        # Workers never see Ctrl-C, not even while they import: they are ended below, in silence.
        with interrupts_held():
            for _ in range(jobs):
                pool.submit(int)  # each starts a process
        yield pool
    except BaseException:
        for child in set(active_children()) - others:  # a cell may take minutes: do not wait for it
            child.terminate()
        raise
    finally:
        pool.shutdown()


_KEPT_BYTES = 2**28  # of freed memory: more than a unit of the built-in cases holds at a time
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def _start_worker() -> None:
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what torch made on loading lives on: no pass need walk through it again
    _keep_memory()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _keep_memory() -> None:
    """Freed memory stays with the process. As glibc is set, each tensor of more than 128 KiB is fetched from the system
    anew and given back, at the price of a page fault a page. Elsewhere nothing is done."""
    mallopt = None if sys.platform != "linux" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # its largest
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _end_with_parent() -> None:
    """A killed parent closes nothing: without this its workers would wait for work for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
