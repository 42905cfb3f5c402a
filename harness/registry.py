"""Implementations by name: a table to read, joined by the entry points of installed packages.

An entry is `"module:object"`; nothing is imported until `get()`. The object is a function f(q, k, v, *, causal, scale,
…), which then runs in a process of its own (`harness.kernels.user`), or has `run(q, k, v, spec, *, recipe, …) ->
Result`, `run_stored(stored, spec, recipe, …, watch) -> Result`, which the pipeline calls, and `refusals(spec, shape,
recipe, …) -> tuple[str, ...]` (see `harness.attention.Algorithm`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ENTRY_POINTS = "attention_harness.implementations"
OWN = "harness.kernels.user:open_kernel"  # what makes an implementation of a user's function
LIMIT_VARIABLE = (
    "HARNESS_KERNEL_LIMIT_S"  # seconds for one call of a user's kernel; worker processes inherit it
)


@dataclass(frozen=True)
class Entry:
    """One implementation: where it lives, whether its low precision is emulated, and what it is, in a line. A run
    takes those of `default` where none are named, on cases of these `groups` alone where there are some. `needs`: cuda,
    for one that torch has nowhere else."""

    name: str
    target: str
    emulated: bool
    summary: str
    default: bool = True
    groups: tuple[str, ...] = ()
    needs: str = ""

    def runs_by_default(self, group: str) -> bool:
        """Whether a run takes it on cases of this group where no implementation is named."""
        return self.default and (not self.groups or group in self.groups)


_BUILT_IN = (
    Entry("naive_masked", "harness.attention.naive:NAIVE_MASKED", True, "full S, −∞ mask, softmax, P·V"),
    Entry(
        "lower_triangle",
        "harness.attention.lower_triangle:LOWER_TRIANGLE",
        True,
        "row blocks, only visible keys",
    ),
    Entry(
        "online_softmax", "harness.attention.online:ONLINE_SOFTMAX", True, "key blocks, running max, rescale"
    ),
    Entry(
        "decode_with_cache",
        "harness.attention.decode:DECODE_WITH_CACHE",
        True,
        "prefill, then a query a step",
    ),
    Entry(
        "naive_unsafe",
        "harness.attention.naive:NAIVE_UNSAFE",
        True,
        "softmax without max subtraction: overflows",
    ),
    Entry(
        "chunked_decode", "harness.attention.session:CHUNKED_DECODE", True,
        "a cache session, `chunk` rows a step", default=False,
    ),
    Entry(
        "paged_decode", "harness.attention.session:PAGED_DECODE", True,
        "the same over shuffled pages of a poisoned pool", default=False,
    ),
    Entry(
        "split_kv", "harness.attention.split_kv:SPLIT_KV", True,
        "key parts attended apart, merged by their lse", default=False,
    ),
    Entry(
        "sdpa_math", "harness.kernels.sdpa:SDPA_MATH", False,
        "torch SDPA, backend MATH (16-bit inputs are computed in FP32)", groups=("smoke",),
    ),
    Entry(
        "sdpa_flash", "harness.kernels.sdpa:SDPA_FLASH", False, "torch SDPA, backend FLASH_ATTENTION",
        groups=("smoke",),
    ),
    Entry(
        "sdpa_efficient", "harness.kernels.sdpa:SDPA_EFFICIENT", False, "torch SDPA, backend EFFICIENT_ATTENTION",
        default=False, needs="cuda",
    ),
    Entry(
        "sdpa_cudnn", "harness.kernels.sdpa:SDPA_CUDNN", False, "torch SDPA, backend CUDNN_ATTENTION",
        default=False, needs="cuda",
    ),
    Entry(
        "flex_attention", "harness.kernels.flex:FLEX_ATTENTION", False,
        "torch flex_attention, compiled: about 10 s for each shape", default=False,
    ),
    Entry(
        "scaled_mm", "harness.kernels.scaled_mm:SCALED_MM", False,
        "FP8 products by torch._scaled_mm, softmax in FP32 between them", default=False,
    ),
    *(
        Entry(name, f"harness.kernels.libraries:{name.upper()}", False, summary, default=False, needs="cuda")
        for name, summary in (
            ("flash_attn_2", "flash-attn, flash_attn_func"), ("flash_attn_3", "flash-attn for Hopper, FP8 too"),
            ("flash_attn_4", "flash-attn in CuTe DSL, with sinks"), ("flashinfer", "FlashInfer, single prefill"),
            ("sage_attention", "SageAttention: Q and K in INT8"), ("xformers", "xformers, memory_efficient_attention"),
            ("transformer_engine", "TransformerEngine, DotProductAttention"),
        )
    ),
)  # fmt: skip


@cache
def table() -> dict[str, Entry]:
    """Every implementation: the built-in ones, then those of installed packages, which cannot replace a built-in."""
    entries = {e.name: e for e in _BUILT_IN}
    for point in entry_points(group=ENTRY_POINTS):
        entries.setdefault(point.name, Entry(point.name, point.value, False, f"from {point.value}"))
    return entries


def implementations() -> tuple[str, ...]:
    """Names of the implementations."""
    return tuple(table())


def default_implementations(group: str) -> tuple[str, ...]:
    """Those that a run takes on cases of a group where none are named."""
    return tuple(name for name, e in table().items() if e.runs_by_default(group))


def is_kernel(name: object) -> bool:
    """Whether a name is a user's kernel, `path/to/file.py:name` or `package.module:name`, and not of the table."""
    return isinstance(name, str) and ":" in name


def entry(name: str) -> Entry:
    """The entry of a name, or of a user's kernel. Raises ValueError naming the valid ones."""
    if is_kernel(name):
        return Entry(
            name, "harness.kernels.user:open_kernel", False, "a kernel of its user's own", default=False
        )
    try:
        return table()[name]
    except (KeyError, TypeError):
        raise ValueError(
            f"unknown implementation {name!r}; allowed: {', '.join(table())}, or file.py:function"
        ) from None


def unavailable(e: Entry) -> str:
    """Why an implementation cannot run on this machine as far as that is seen without loading torch; else empty."""
    if e.needs != "cuda":
        return ""
    found = find_spec("torch")
    built = Path(found.origin).with_name("version.py") if found and found.origin else Path()
    if not built.is_file() or "cuda: Optional[str] = None" in built.read_text(encoding="utf-8"):
        return "needs CUDA, which this torch is built without"
    return (
        ""
        if Path("/dev/nvidiactl").exists() or os.name == "nt"
        else "needs CUDA, and no NVIDIA device is seen"
    )


def get(name: str) -> Any:
    """The implementation itself. Imports its module. Raises ValueError for an unknown name."""
    target = entry(name).target
    found = EntryPoint(name, target, ENTRY_POINTS).load()
    if is_kernel(name):
        return found(name)
    if hasattr(found, "run_stored"):
        return found
    return EntryPoint(name, OWN, ENTRY_POINTS).load()(
        target
    )  # a package's plain function, as a kernel by its place
