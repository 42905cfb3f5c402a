"""The throughput session: its options, one core for all it times, and what its JSON holds beside the benchmarks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from harness import registry

COMPILES = ("flex_attention",)  # 8 to 15 s for each shape and rule
BY_NAME_ONLY = "flex_attention, which compiles, and what needs a device that is not here"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("throughput")
    group.addoption(
        "--implementations", metavar="NAMES", help=f"with commas; by default all but {BY_NAME_ONLY}"
    )
    group.addoption(
        "--threads", type=int, default=1, metavar="N", help="of torch, on as many cores (default: 1)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """pytest-benchmark's own table is 200 columns wide and knows no errors: where the timings are stored,
    `python -m harness report --throughput` shows them instead."""
    if config.getoption("benchmark_json", None):
        config.option.benchmark_quiet = True
    config.stash[NOT_TIMED] = []
    config.stash[CONTEXT] = {}
    chosen(config)  # an unknown name is wrong usage, not a failed collection


NOT_TIMED = pytest.StashKey[list[dict[str, str]]]()
CONTEXT = pytest.StashKey[dict[str, Any]]()


def chosen(config: pytest.Config) -> tuple[str, ...]:
    """The implementations to time."""
    given = config.getoption("--implementations")
    if given is None:
        entries = registry.table().values()
        return tuple(e.name for e in entries if e.name not in COMPILES and not registry.unavailable(e))
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",")))
    if kernels := [name for name in names if registry.is_kernel(name)]:
        raise pytest.UsageError(f"{', '.join(kernels)}: time your own with `python -m harness compare`")
    try:
        return tuple(registry.entry(name).name for name in names)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        cells = metafunc.module.cells(chosen(metafunc.config))
        metafunc.parametrize(("case", "implementation", "recipe"), cells, ids=map("-".join, cells))


@pytest.fixture(autouse=True, scope="session")
def measured(pytestconfig: pytest.Config) -> Iterator[None]:
    """Pinned, and with the machine's ceilings measured first: in the same run, whatever -k leaves."""
    from harness.clock import pinned
    from harness.machine import machine
    from harness.timing.ceilings import FORMATS, copy_rate, product_rate

    try:
        with pinned(pytestconfig.getoption("--threads")) as how:
            products = {}
            for fmt in FORMATS:
                try:
                    products[fmt] = product_rate(fmt)
                except ValueError as error:
                    print(error)
            m = machine()
            pytestconfig.stash[CONTEXT] = {
                "products": products, "copy": copy_rate(), "loads": [os.getloadavg()[0]],
                "machine": f"{m.device}: {m.cpu}, {m.cores} cores, {m.isa}, torch {m.torch}, {how}",
            }  # fmt: skip
            yield
            pytestconfig.stash[CONTEXT]["loads"].append(os.getloadavg()[0])
    except ValueError as error:
        pytest.exit(f"--threads: {error}", 4)


@pytest.fixture
def not_timed(pytestconfig: pytest.Config) -> list[dict[str, str]]:
    """Cells that did not pass, for the report to say so."""
    return pytestconfig.stash[NOT_TIMED]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Where nothing was timed pytest-benchmark warns and writes nothing: the session says it, without a traceback."""
    warnings.filterwarnings("ignore", message="Not saving anything")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    output_json["throughput"] = {**config.stash[CONTEXT], "not_timed": config.stash[NOT_TIMED]}
