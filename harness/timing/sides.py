"""What is timed: an implementation of this checkout, in this process, or one of another, in a process of that one's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from harness import registry
from harness.clock import seconds
from harness.kernels.child import Child
from harness.operands import NO_EXTRAS
from harness.quantize import Stored
from harness.recipe import TENSORS, Recipe
from harness.result import Refusal
from harness.spec import AttentionSpec, Shape

WORKER = Path(__file__).with_name("worker.py")
# glibc moves the sizes from which it asks the system for memory, and gives it back, by what it has freed before. Of two
# processes that do the same, one then pays for fresh pages at each call and the other does not, while they live
# (ratios of 0.54 and 1.78 were seen). Sizes that are given do not move. Other C libraries do not read these.
MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_TOP_PAD_": str(2**27),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One call: its sizes and rules, the recipe (`written`: by name or TOML path, as it was given), stored inputs."""

    shape: Shape
    spec: AttentionSpec
    recipe: Recipe
    written: str
    stored: tuple[Stored, Stored, Stored]

    @property
    def device(self) -> torch.device:
        return self.stored[0].codes.device


@dataclass(frozen=True)
class Ready:
    """A call that has run once, its output `[B, H, L, E]`, and its clock. `clock(calls, bare)`: without `bare` the
    implementation's whole `run_stored` is timed, which also brings codes into its own dtype."""

    out: Tensor
    clock: Callable[[int, bool], float]
    bare: bool


class Side(Protocol):
    """One of two that are compared."""

    def close(self) -> None:
        """End its process, if it has one. The next call starts another."""

    def ready(self, name: str, problem: Problem) -> Ready:
        """Raises Refusal for a case that the implementation does not do, and whatever it raises."""


class Here:
    """This checkout."""

    def close(self) -> None:
        """Nothing: it has none of its own."""

    def ready(self, name: str, problem: Problem) -> Ready:
        p, implementation = problem, registry.get(name)
        if refused := implementation.refusals(p.spec, p.shape, p.recipe):
            raise Refusal("; ".join(refused))
        out: Tensor = implementation.run_stored(p.stored, p.spec, p.recipe, NO_EXTRAS).out
        whole = partial(implementation.run_stored, p.stored, p.spec, p.recipe, NO_EXTRAS)
        bare = hasattr(implementation, "ready")  # a package's own implementation need not have it
        call = implementation.ready(p.stored, p.spec, p.recipe) if bare else whole
        own = getattr(call, "seconds", None)  # a kernel in a process of its own is timed in there

        def clock(calls: int, alone: bool) -> float:
            if own is not None:
                return float(own(calls))
            return seconds(call if alone else whole, calls, p.device)

        return Ready(out, clock, bare)


class Checkout:
    """A checkout of this project, in a process of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not (self.root / "harness" / "registry.py").is_file():
            raise ValueError(f"{root} holds no harness/registry.py; give the root of another checkout")
        self._child = Child(str(self.root), ("-P", str(WORKER)), str(self.root), MEMORY)
        self._held = 0

    def close(self) -> None:
        self._child.close()

    def ready(self, name: str, problem: Problem) -> Ready:
        p = problem
        tensors = {n: x.codes.cpu() for n, x in zip(TENSORS, p.stored, strict=True)}
        tensors |= {
            f"{n}_scale": x.scale.cpu().contiguous()
            for n, x in zip(TENSORS, p.stored, strict=True)
            if x.scale is not None
        }
        self._held += 1
        common: dict[str, Any] = {"device": str(p.device)}
        text = {
            **common, "hold": self._held, "name": name, "recipe": p.written, "spec": asdict(p.spec),
            "shape": asdict(p.shape), "threads": torch.get_num_threads(),
        }  # fmt: skip
        reply, results = self._child.call(text, tensors)
        if "refused" in reply:
            raise Refusal(reply["refused"])
        if reply["digest"] != p.recipe.digest:
            raise Refusal(f"recipe {p.written} is another one there: {reply['digest']}")
        again = {**common, "again": self._held}

        def clock(calls: int, alone: bool) -> float:
            return float(self._child.call({**again, "calls": calls, "bare": alone}, {})[0]["seconds"])

        return Ready(results["out"].to(p.device), clock, bool(reply["bare"]))
