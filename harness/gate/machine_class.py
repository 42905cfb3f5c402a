"""The class of a machine: what decides the bits of a result, and with them the size of its error.

On a CPU these are the system and architecture (libm, BLAS), torch's CPU capability (its vector kernels sum in lanes of
that width: AVX2, AVX512, DEFAULT) and torch's major and minor version. On CUDA it is the model of the GPU, not its
compute capability alone: libraries choose kernels by the number of multiprocessors as well.

Left out, since the same bits were measured (`reports/gate-study.md`): the number of threads (a cell runs on one) and of
processes. Left out although they may move bits: the model of the processor, by which MKL chooses its products, and
torch's patch releases. Machines that CI lends vary in the first from day to day; the paired test measures that noise
(`gate.drift`).
"""

from __future__ import annotations

import re

from harness.records import Machine


def machine_class(machine: Machine) -> str:
    """A name that is safe as a file's."""
    torch = "torch" + ".".join(machine.torch.split(".")[:2])
    kind, _, model = machine.device.partition(" (")
    if kind.startswith("cpu"):
        return _name("cpu", machine.system, machine.isa, torch)
    return _name(kind.partition(":")[0], model, torch)


def nearness(here: str, there: str) -> int:
    """How many leading parts two classes share."""
    parts = list(zip(here.split("-"), there.split("-"), strict=False))
    return next((n for n, (a, b) in enumerate(parts) if a != b), len(parts))


def _name(*parts: str) -> str:
    clean = (re.sub(r"[^a-z0-9_.]+", "-", part.lower()).strip("-.")[:60] for part in parts)
    return "-".join(part or "unknown" for part in clean)
