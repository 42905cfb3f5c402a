"""Runs on a Dask cluster: records are those of a run here, a killed worker costs nothing, a mistake is one line."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import cluster as clusters
from harness.case import load_cases
from harness.cell import run_unit
from harness.cli.selection import select
from harness.cluster import Address, cluster, parse, run_there, versions
from harness.journal import record, workers
from harness.pipeline import plan, run_units
from harness.records import Record, read_records, to_json

UNITS = plan(load_cases("smoke"), ["naive_masked", "online_softmax"], ["bf16"], seeds=2)


def timeless(records: list[Record]) -> list[str]:
    return [to_json(replace(r, run_ms=0.0, truth_ms=0.0, created="")) for r in records]


@pytest.fixture(scope="module")
def serial() -> list[str]:
    with workers(1):
        return timeless([r for _, batch in run_units(UNITS) for r in batch])


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    pytest.importorskip("distributed", reason="the dask extra is not installed")
    with cluster("dask://local?workers=2") as executor:
        yield executor


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("dask://local?workers=2", Address(workers=2)),
        ("dask://scheduler:8786", Address("scheduler:8786")),
        ("dask://10.0.0.1:8786/", Address("10.0.0.1:8786")),
        ("dask://[::1]:8786", Address("[::1]:8786")),
        ("dask://local:8786", Address("local:8786")),
    ],
)
def test_address_is_a_scheduler_or_so_many_processes_here(url: str, address: Address) -> None:
    pytest.importorskip("distributed", reason="the dask extra is not installed")
    assert parse(url) == address


@pytest.mark.parametrize(
    "url",
    ["", "ray://local", "dask://", "dask://local", "dask://local?workers=0", "dask://local?workers=2&gpus=1",
     "dask://host", "dask://host:99999", "dask://host:1?workers=2", "dask://host:1/path", "http://host:8786",
     "dask://me@host:1", "dask://local?workers"],
)  # fmt: skip
def test_another_address_is_told_in_one_line_what_is_allowed(url: str) -> None:
    with pytest.raises(ValueError, match=r"^executor is .*; allowed: dask://[^\n]*$"):
        parse(url)


def test_absent_extra_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"^[^\n]*install the extra: pip install 'attention-harness\[dask\]'$"
    ):
        chosen(executor="dask://local?workers=2")


def chosen(**options: Any) -> Any:
    return select(
        cases=("smoke",),
        only=(),
        implementations=(),
        recipes=(),
        **{"seeds": 1, "device": "cpu", "jobs": None, **options},
    )


def test_jobs_beside_an_executor_are_refused_and_the_selection_says_where_it_runs() -> None:
    pytest.importorskip("distributed", reason="the dask extra is not installed")
    with pytest.raises(ValueError, match="--jobs 2 was given with --executor"):
        chosen(executor="dask://local?workers=2", jobs=2)
    assert str(chosen(executor="dask://local?workers=2")).endswith("1 seed, cpu on dask://local?workers=2")


def test_scheduler_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="the dask extra is not installed")
    monkeypatch.setattr(clusters, "TIMEOUT_S", 1)
    with socket.socket() as taken:  # bound and not listening: nobody else answers there
        taken.bind(("127.0.0.1", 0))
        url = f"dask://127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(ValueError, match=r"^no Dask scheduler answers at 127\.0\.0\.1:[^\n]*$"),
            cluster(url),
        ):
            pass


def test_killed_worker_is_tolerated_and_records_are_the_serial_ones_in_order(
    pool: Executor, serial: list[str]
) -> None:
    futures = [pool.submit(run_unit, unit) for unit in UNITS[:1]]
    futures[0].result()
    worker = pool.submit(os.getpid).result()
    futures = [pool.submit(run_unit, unit) for unit in UNITS]
    os.kill(worker, signal.SIGKILL)
    records = [r for future in futures for r in future.result()]
    assert timeless(records) == serial
    assert {r.machine.threads for r in records} == {1}


def test_a_run_on_a_cluster_is_kept_on_disk_and_resumed(
    pool: Executor, serial: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Given:
        def __init__(self, url: str, device: str) -> None:
            assert (url, device) == ("dask://local?workers=2", "cpu")

        def __enter__(self) -> Executor:
            return pool

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("harness.journal.cluster", Given)
    path = tmp_path / "records.jsonl"
    found = [
        r for _, batch in record(path, UNITS[:3], 1, False, executor="dask://local?workers=2") for r in batch
    ]
    assert timeless(found) == serial[: len(found)] == timeless(read_records(path))
    again = [r for _, batch in record(path, UNITS, 1, True, executor="dask://local?workers=2") for r in batch]
    assert timeless(again) == serial == timeless(read_records(path))
    assert [r.created for r in again[: len(found)]] == [r.created for r in found]  # kept, not run again


def test_worker_of_another_version_runs_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"runs harness .* and this is harness 0\.0\.0 .*install the same version"
    ):
        run_there(("0.0.0", *versions()[1:]), UNITS[0])


def test_workers_lost_more_often_than_is_retried_break_the_run_as_a_pools_do() -> None:
    class KilledWorker(Exception): ...

    class Lost(Executor):
        def submit(self, *_: Any, **__: Any) -> Future[Any]:  # type: ignore[override]
            future: Future[Any] = Future()
            future.set_exception(KilledWorker("unit", "tcp://worker"))
            return future

    with pytest.raises(BrokenExecutor):
        clusters._Pool(Lost()).submit(run_unit, UNITS[0]).result()


def test_workers_differing_from_the_client_are_told_before_anything_runs() -> None:
    class Client:
        def run(self, function: Any) -> dict[str, tuple[str, ...]]:
            return {"tcp://a": versions(), "tcp://b": ("9.9", *versions()[1:])}

    with pytest.raises(
        ValueError, match=r"^worker tcp://b runs harness 9\.9 [^\n]*; install the same version on both$"
    ):
        clusters._check(Client(), Address("host:1"))
