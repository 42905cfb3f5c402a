"""Hypothesis profiles, the line that says what a run depends on, and the skips that the markers promise."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from typing import Any

import pytest
from hypothesis import settings

# The time of an example says nothing here: the first one pays for loading torch.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
PROFILE = "ci" if os.environ.get("CI") else "dev"
settings.load_profile(PROFILE)  # --hypothesis-profile still overrides it


def _torch_line() -> str:
    version = importlib.metadata.version("torch")
    torch = sys.modules.get("torch")  # never imported for this line alone: it costs seconds
    if torch is None:
        return f"torch {version} (not loaded)"
    return f"torch {version}, ISA {torch.backends.cpu.get_cpu_capability()}"


def _hypothesis_line(config: pytest.Config) -> str:
    seed = config.getoption("--hypothesis-seed", default=None)
    drawn = "derandomized" if settings().derandomize else f"seed {'random' if seed is None else seed}"
    profile = config.getoption("--hypothesis-profile", default=None) or PROFILE
    return f"hypothesis profile {profile}, {drawn}"


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    """After collection rather than in the header: torch is loaded by then if a test needs it; -q shows it."""
    return f"harness: {_torch_line()}; {_hypothesis_line(config)}"


@functools.cache
def _cuda_is_available() -> bool:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a missing or old driver is an answer here
        return torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _cuda_is_available():
        pytest.skip("torch sees no CUDA device")
    if item.get_closest_marker("slow") and "slow" not in item.config.option.markexpr:
        pytest.skip("takes minutes: choose it with -m slow")
    if item.get_closest_marker("capture") and importlib.util.find_spec("gguf") is None:
        pytest.skip("the capture extra is not installed")


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real model, which takes seconds to load; skipped with the reason where it is not installed."""
    from harness.capture import load_model
    from harness.optional import MissingExtra

    try:
        return load_model()
    except MissingExtra as exc:
        pytest.skip(str(exc))
