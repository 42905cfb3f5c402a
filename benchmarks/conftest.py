"""One thread, whatever the machine: times of two runs are then comparable, and equal the ones of `run --jobs`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """pytest-benchmark's own table is 200 columns wide and knows no errors: where the timings are stored,
    `python -m harness report --throughput` shows them instead."""
    if config.getoption("benchmark_json", None):
        config.option.benchmark_quiet = True


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
