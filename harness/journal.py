"""A run kept on disk as it goes: whole lines appended, a killed run resumed, cells run in parallel."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch

from harness.pipeline import Unit, run_units
from harness.records import Record, read_records, to_json, write_records


def record(path: Path, units: Sequence[Unit], jobs: int, resume: bool) -> Iterator[tuple[Unit, list[Record]]]:
    """Run the units, append each one's records to `path`, and yield them.

    With `resume`, records of `path` that belong to these units are kept, and yielded, and units that are complete are
    not run again; otherwise the file starts empty. Lines are flushed to disk unit by unit: a killed run leaves whole
    records, and at most one cut line at the end, which resuming drops. Raises ValueError for a damaged file.
    """
    done = _kept(path, units) if resume else {}
    write_records(path, [r for unit in units for r in done.get((unit.case.id, unit.seed), [])])
    for unit in units:
        if (unit.case.id, unit.seed) in done:
            yield unit, done[unit.case.id, unit.seed]
    left = [u for u in units if (u.case.id, u.seed) not in done]
    if not left:
        return
    with path.open("a", encoding="utf-8", newline="\n") as file, workers(min(jobs, len(left))) as executor:
        for unit, records in run_units(left, executor):
            file.write("".join(to_json(r) + "\n" for r in records))
            file.flush()
            os.fsync(file.fileno())
            yield unit, records


def _kept(path: Path, units: Sequence[Unit]) -> dict[tuple[str, int], list[Record]]:
    """Records of the units that `path` holds completely."""
    if not path.exists():
        return {}
    by_unit: dict[tuple[str, int], dict[tuple[str, str, str, int], Record]] = {}
    for r in read_records(path):
        by_unit.setdefault((r.case, r.seed), {})[r.key] = r
    kept = {}
    for unit in units:
        found = by_unit.get((unit.case.id, unit.seed), {})
        digests = {r.name: r.digest for r in unit.recipes}
        whole = unit.keys <= found.keys()
        if whole and all(found[k].recipe_digest == digests[k[2]] for k in unit.keys):
            kept[unit.case.id, unit.seed] = [r for k, r in found.items() if k in unit.keys]
    return kept


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """`jobs` processes of one thread each; None for one job, which then runs here, on one thread as well: the number
    of threads can change the order of a sum, and results must not depend on `jobs`."""
    if jobs == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield None
        finally:
            torch.set_num_threads(threads)
        return
    # spawn: a forked child of a process that has used OpenMP may hang
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
