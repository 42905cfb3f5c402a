"""A Dask cluster as an executor: `dask://host:8786` for a scheduler that runs, `dask://local?workers=2` for processes
here. distributed (the extra `dask`) is loaded when one is used.

A unit goes to a worker as it would to a process here: one thread, the same harness. A worker that dies is replaced or
its unit given to another; one that runs another version of harness or torch is refused: its numbers are not these.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qsl, urlsplit

TIMEOUT_S = 10  # for a scheduler to answer
RETRIES = 2  # of a unit whose worker died or raised
GPU = "GPU"  # the resource that workers with an accelerator declare: dask worker --resources "GPU=1"
ALLOWED = "dask://host:port of a scheduler, or dask://local?workers=N"


@dataclass(frozen=True)
class Address:
    """Where a cluster is: a scheduler's `host:port`, or so many processes here."""

    scheduler: str = ""
    workers: int = 0

    def __str__(self) -> str:
        return f"dask://{self.scheduler}" if self.scheduler else f"dask://local?workers={self.workers}"


def parse(url: str) -> Address:
    """The address of an executor. Raises ValueError for what is none, and without the extra. Nothing is loaded."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ValueError(f"executor is {url!r}; allowed: {ALLOWED}") from None
    if parts.scheme != "dask" or not host or parts.path not in ("", "/") or parts.username or parts.fragment:
        raise ValueError(f"executor is {url!r}; allowed: {ALLOWED}")
    if host == "local" and port is None:
        count = query.pop("workers", "")
        if query or not count.isdecimal() or int(count) < 1:
            raise ValueError(f"executor is {url!r}; allowed: dask://local?workers=N, N ≥ 1")
        found = Address(workers=int(count))
    elif query or port is None:
        raise ValueError(f"executor is {url!r}; allowed: {ALLOWED}")
    else:
        found = Address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    if find_spec("distributed") is None:
        raise ValueError(
            f"executor is {url!r}, and distributed is not installed; install the extra: pip install"
            " 'attention-harness[dask]'"
        )
    return found


@contextmanager
def cluster(url: str, device: str = "cpu") -> Iterator[Executor]:
    """An executor over the workers of a cluster; on cuda over those that declare the resource `GPU`, a unit each.

    Raises ValueError when no scheduler answers, when it has no worker, or when a worker's versions differ.
    """
    address = parse(url)
    distributed: Any = import_module("distributed")
    resources = {GPU: 1} if device.startswith("cuda") else None
    local = None
    try:
        if address.workers:
            local = _local(address.workers, resources)
        try:
            client = distributed.Client(
                local or f"tcp://{address.scheduler}", timeout=TIMEOUT_S, set_as_default=False
            )
        except (OSError, TimeoutError) as error:
            raise ValueError(
                f"no Dask scheduler answers at {address.scheduler} within {TIMEOUT_S} s"
                f" ({type(error).__name__}); start one with `dask scheduler`, or use dask://local?workers=N"
            ) from None
        try:
            _check(client, address)
            yield _Pool(
                client.get_executor(
                    retries=RETRIES, pure=False, **({"resources": resources} if resources else {})
                )
            )
        finally:
            with suppress(TimeoutError, OSError):
                client.close(timeout=TIMEOUT_S)
    finally:
        if local is not None:
            local.close(timeout=TIMEOUT_S)


def _local(workers: int, resources: dict[str, int] | None) -> Any:
    import logging

    return import_module("distributed").LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None, resources=resources,
        silence_logs=logging.CRITICAL, memory_limit=0,
    )  # fmt: skip


def versions() -> tuple[str, str, str]:
    """What numbers depend on: the versions of harness and torch, and a digest of harness's own text, which tells two
    states of one version apart."""
    import torch

    from harness import __version__

    return __version__, torch.__version__, _digest()


@cache
def _digest() -> str:
    import hashlib
    from pathlib import Path

    digest, folder = hashlib.sha256(), Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _check(client: Any, address: Address) -> None:
    try:
        found = client.run(versions)
    except Exception as error:  # whatever a worker raises comes here as itself
        raise ValueError(
            f"a worker of {address} cannot load harness ({type(error).__name__}: {error}); install the"
            " same version there"
        ) from None
    if not found:
        raise ValueError(f"{address} has no workers; start some with `dask worker {address.scheduler}`")
    for worker, there in sorted(found.items()):
        if tuple(there) != versions():
            raise ValueError(_unlike(worker, tuple(there), versions()))


def _unlike(worker: str, there: tuple[str, ...], here: tuple[str, ...]) -> str:
    shown = [f"harness {h} ({d}) with torch {t}" for h, t, d in (there, here)]
    return f"worker {worker} runs {shown[0]}, and this is {shown[1]}; install the same version on both"


def run_there(expected: tuple[str, str, str], unit: Any) -> Any:
    """A unit on a worker: on one thread, as everywhere. Raises ValueError on a worker whose versions differ."""
    import socket

    import torch

    from harness.cell import run_unit

    if versions() != expected:  # it may have joined after the run began
        raise ValueError(_unlike(socket.gethostname(), versions(), expected))
    torch.set_num_threads(1)
    return run_unit(unit)


class _Pool(Executor):
    """Dask's executor, whose lost workers are told as those of a process pool are."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs `run_unit(unit)` by `run_there`, anything else as it is."""
        from harness.cell import run_unit

        if fn is run_unit:
            fn, args = run_there, (versions(), *args)
        inner: Future[Any] = self._inner.submit(fn, *args, **kwargs)
        outer: Future[Any] = Future()
        inner.add_done_callback(lambda done: _pass_on(done, outer))
        return outer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._inner.shutdown(wait=wait)


def _pass_on(done: Future[Any], to: Future[Any]) -> None:
    try:
        to.set_result(done.result())
    except CancelledError:
        to.set_exception(BrokenExecutor("the cluster went away"))
    except BaseException as error:
        lost = type(error).__name__ == "KilledWorker"
        to.set_exception(BrokenExecutor(str(error)) if lost else error)
