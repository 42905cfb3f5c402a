"""The process of one user's kernel: loads it, runs it on the calls that come in, and tells what came of each.

Started as `python -m harness.kernels.served TARGET`. What the kernel prints goes to stderr; it meets an empty stdin.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from harness.clock import seconds
from harness.kernels.shapes import from_kernel, to_kernel
from harness.kernels.takes import taken
from harness.kernels.wire import receive, send

GRACE_S = 10.0  # after which the process ends itself, should nobody be left to end it


def load(target: str) -> Callable[..., Any]:
    """The function of `path/to/file.py:name` or `package.module:name`. Runs the file, as an import does.

    Raises ValueError where there is none, and what the module raises.
    """
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).resolve()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ValueError(f"{place} is no Python file")
        found: Any = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, found)  # what dataclasses and compilers look a module up in
        spec.loader.exec_module(found)
    else:
        sys.path.insert(0, os.getcwd())
        found = importlib.import_module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n in vars(found) if callable(getattr(found, n)) and not n.startswith("_")]
            raise ValueError(f"{place} has no {name}; it has {', '.join(public[:20]) or 'no functions'}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name} of {place} is a {type(found).__name__}; allowed: a function of q, k and v")
    return found  # type: ignore[no-any-return]


def serve(requests: BinaryIO, replies: BinaryIO, target: str) -> None:
    """Answer calls until the other side is gone."""
    try:
        function = load(target)
        names, needed = taken(function)
    except BaseException as error:  # the module is its user's own code
        send(replies, {"unloaded": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        return
    send(replies, {"takes": names, "needs": needed})
    held: dict[int, Callable[[], Any]] = {}
    while True:
        try:
            call, tensors = receive(requests)
        except EOFError:
            return
        _alarm(call["limit_s"] + GRACE_S)
        reply, results = (
            (again(held[call["again"]], call), {})
            if "again" in call
            else answer(function, names, call, tensors)
        )
        if "hold" in call:
            held[call["hold"]] = _held(function, names, call, tensors)
        _alarm(0)
        send(replies, reply, results)


def again(run: Callable[[], Any], call: dict[str, Any]) -> dict[str, Any]:
    """Seconds that a held call takes, made so many times."""
    torch.set_num_threads(call["threads"])
    try:
        return {"seconds": seconds(run, call["calls"], call["device"])}
    except BaseException as error:
        return {"raised": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def _held(
    function: Callable[..., Any], names: dict[str, str], call: dict[str, Any], tensors: dict[str, Tensor]
) -> Callable[[], Any]:
    """The kernel's call alone, its inputs in place."""
    inputs, options = to_kernel({n: x.to(call["device"]) for n, x in tensors.items()}, call)
    named = {names[n]: x for n, x in options.items()}
    return lambda: function(*inputs.values(), **named)


def answer(
    function: Callable[..., Any], names: dict[str, str], call: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What one call gave: tensors, what is wrong with them, or what was raised."""
    torch.set_num_threads(call["threads"])
    device = torch.device(call["device"])
    memory = {n: x.to(device) for n, x in tensors.items()}
    inputs, options = to_kernel(memory, call)
    passed = {n: x for n, x in (*inputs.items(), *options.items()) if isinstance(x, Tensor)}
    watched = {
        **passed,
        **(memory if call["layout"] == "bhsd" else {}),
    }  # gaps between rows are no less the caller's
    before = {n: x.clone() for n, x in watched.items()}
    try:
        with torch.no_grad():
            given = function(*inputs.values(), **{names[n]: x for n, x in options.items()})
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except BaseException as error:  # SystemExit too: it is the kernel's own
        return {"raised": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}, {}
    written = [n for n, x in watched.items() if not _equal(x, before[n])]
    if written:
        return {"wrong": f"it wrote its inputs: {', '.join(written)} changed during the call"}, {}
    return from_kernel(given, call, device)


def _equal(x: Any, before: Tensor) -> bool:
    """Bit for bit: NaN is itself here. Of a tensor whose shape or type was changed in place, never."""
    if x.shape != before.shape or x.dtype != before.dtype:
        return False
    x, before = (t.contiguous().flatten().view(torch.uint8) for t in (x, before))
    return torch.equal(x, before)


def _alarm(seconds: float) -> None:
    """End this process after so long, in whatever code it is. A second line: the run ends it first."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    requests, replies = (os.fdopen(os.dup(fd), mode) for fd, mode in ((0, "rb"), (1, "wb")))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    faulthandler.enable()
    serve(requests, replies, sys.argv[1])  # type: ignore[arg-type]
    replies.flush()
    os._exit(0)  # threads and exit handlers of the kernel are not waited for


if __name__ == "__main__":
    main()
