"""Where a run takes place, for its records."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from harness.records import Machine


def machine(device: str = "cpu") -> Machine:
    """The machine and its software. `device` adds the accelerator's own name."""
    return replace(_machine(device), threads=torch.get_num_threads())  # which may change during a process


@cache
def _machine(device: str) -> Machine:
    name = device
    if device.startswith("cuda"):
        name = f"{device} ({torch.cuda.get_device_name(device)})"
    try:
        own = version("attention-harness")
    except PackageNotFoundError:  # run from a source tree that is not installed
        own = "source"
    return Machine(
        device=name,
        cpu=_cpu(),
        isa=torch.backends.cpu.get_cpu_capability(),
        cores=os.cpu_count() or 0,
        threads=0,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),  # a class of its own, which only torch can unpickle
        numpy=np.__version__,
        harness=own,
        commit=_commit(),
    )


def _cpu() -> str:
    """The processor's own name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the source tree, `+` when it has uncommitted changes; empty outside one."""
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return ""
    try:
        head = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return head.stdout.strip()
