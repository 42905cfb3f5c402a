"""The process of one checkout: runs its implementations on inputs that come in, and times them.

Started as `python -P worker.py ROOT`, with ROOT, whose `harness` it imports, first on the path. That harness may be
older than this file, which therefore uses no more of it than `registry.get`, `get_recipe`, `AttentionSpec`,
`Shape`, `Stored`, `NO_EXTRAS` and `run_stored`, and takes the clock and the messages from beside itself.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Held = dict[int, tuple[Callable[[], Any], Callable[[], Any] | None]]
NAMES = ("q", "k", "v")


def beside(name: str, path: str) -> ModuleType:
    """A module of this file's own package, by its path in there."""
    place = Path(__file__).resolve().parents[1] / path
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(
    held: Held, asked: dict[str, Any], tensors: dict[str, Tensor], seconds: Callable[..., float]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What one request gives: its inputs are held and run once, or what is held is timed."""
    if "again" in asked:
        full, alone = held[asked["again"]]
        run = alone if asked["bare"] and alone else full
        return {"seconds": seconds(run, asked["calls"], asked["device"])}, {}
    from harness import registry
    from harness.operands import NO_EXTRAS
    from harness.quantize import Stored
    from harness.recipe import get_recipe, load_recipe
    from harness.spec import AttentionSpec, Shape

    torch.set_num_threads(asked["threads"])
    name, rules = asked["recipe"], dict(asked["spec"])
    recipe = load_recipe(Path(name)) if name.endswith(".toml") else get_recipe(name)
    spec = AttentionSpec(**{**rules, "window": rules["window"] and tuple(rules["window"])})
    implementation = registry.get(asked["name"])
    if refused := implementation.refusals(spec, Shape(**asked["shape"]), recipe):
        return {"refused": "; ".join(refused)}, {}
    placed = {n: x.to(asked["device"]) for n, x in tensors.items()}
    q, k, v = (Stored(placed[n], placed.get(f"{n}_scale")) for n in NAMES)

    def whole() -> Any:
        return implementation.run_stored((q, k, v), spec, recipe, NO_EXTRAS)

    result = whole()
    bare = implementation.ready((q, k, v), spec, recipe) if hasattr(implementation, "ready") else None
    held[asked["hold"]] = (whole, bare)
    out = result.out.detach().cpu().contiguous()
    return {"digest": recipe.digest, "bare": bare is not None}, {"out": out}


def main(root: str) -> None:
    requests, replies = (os.fdopen(os.dup(fd), mode) for fd, mode in ((0, "rb"), (1, "wb")))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what code prints goes to stderr
    wire, clock = beside("_wire", "kernels/wire.py"), beside("_clock", "clock.py")
    try:
        import harness

        found = Path(harness.__file__ or "").resolve()
        if found.parent != Path(root).resolve() / "harness":
            raise ImportError(f"harness was found at {found}")
    except Exception as error:
        wire.send(replies, {"unloaded": f"{type(error).__name__}: {error}"})
        return
    wire.send(replies, {"loaded": str(found)})
    held: Held = {}
    while True:
        try:
            asked, tensors = wire.receive(requests)
        except EOFError:
            return
        try:
            reply, results = answer(held, asked, tensors, clock.seconds)
        except Exception as error:
            reply = {"raised": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            results = {}
        wire.send(replies, reply, results)


if __name__ == "__main__":
    main(sys.argv[1])
