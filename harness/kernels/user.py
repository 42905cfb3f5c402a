"""A user's own kernel, `path/to/file.py:name` or `package.module:name`, with `@bshd` or `@thd` for its layout.

Any `f(q, k, v, *, causal, scale, …) -> out` or `(out, lse)`. Its signature says which options it takes; a case that
needs another is refused. It runs in a process of its own: one that raises, hangs, writes its inputs, returns something
else than it should, or kills its process is told so in its own cell.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from harness.arithmetic import DTYPES
from harness.kernels.black_box import BlackBox, Call
from harness.kernels.child import Child
from harness.kernels.shapes import LAYOUTS
from harness.kernels.takes import ALWAYS
from harness.quantize import Stored
from harness.recipe import TENSORS, Recipe
from harness.records import Ran
from harness.result import Breach, Refusal, Result
from harness.spec import AttentionSpec, Shape

_NUMBERS = count()


@dataclass(frozen=True)
class UserKernel(BlackBox):
    """One function. `child` runs it, `layout` is how it takes q, k and v."""

    layout: str = "bhsd"
    child: Child = field(default_factory=lambda: Child(""))

    @property
    def takes(self) -> dict[str, str]:
        """Option → the name it has in the function. Raises ValueError when it cannot be loaded."""
        names: dict[str, str] = self.child.signature()["takes"]
        return names

    def unlike(self, recipe: Recipe) -> str:
        """Where it rounds is its own business; its inputs have to be of a type that torch has, with its scales."""
        for t in TENSORS:
            scaling, fmt = recipe.scaling.get(t), recipe.storage[t]
            if fmt == "tf32":
                return f"torch has no dtype for {fmt}, in which {recipe.name} stores {t}"
            if scaling is not None and scaling.granularity == "mx":
                return f"{recipe.name} scales {t} by MX blocks, which no option gives"
            if fmt.startswith("fp8") and f"{t}_scale" not in self.takes:
                return f"{self.name} takes no {t}_scale, and {recipe.name} stores {t} in {fmt}"
        return ""

    def unable(self, spec: AttentionSpec, shape: Shape, extras: tuple[str, ...]) -> tuple[str, ...]:
        takes, why = self.takes, []
        used = {**_rules(spec, shape), **dict.fromkeys(extras)}
        packed = ("kv_lens",) if self.layout == "thd" else ()  # which has cu_seqlens_k instead
        missing = [
            n
            for n in used
            if n not in takes and n not in packed and not (n == "scale" and spec.scale is None)
        ]
        if not spec.causal:
            missing = [n for n in missing if n != "causal"]
        why += [f"{self.name} takes no {n}" for n in missing]
        uneven = shape.q_len != shape.S or "kv_lens" in extras
        if uneven and (spec.causal or spec.window is not None) and "align" not in takes:
            why.append(f"{self.name} takes no align, which causality and windows need where q_len ≠ kv_len")
        if self.layout == "thd":
            why += [f"{n} has no form for packed sequences" for n in ("mask", "bias") if n in extras]
            why += (
                []
                if "cu_seqlens_q" in takes
                else [f"{self.name} takes no cu_seqlens_q, which layout thd needs"]
            )
        return tuple(why)

    def call(self, call: Call) -> Result:
        if why := self.unable(
            call.spec, call.shape, call.extras.given
        ):  # a part of a case may need more than it
            raise Refusal("; ".join(why))
        tensors, text = self._message(call)
        reply, results = self.child.call(text, tensors)
        if "wrong" in reply:
            raise Breach(reply["wrong"])
        device, dtype = str(call.device), text["dtypes"]
        lse = results["lse"].to(call.device) if "lse" in results else None
        return Result(results["out"].to(call.device), lse, ran=Ran(self.name, (), dtype, device))

    def bare(self, call: Call) -> Callable[[], object]:
        if why := self.unable(call.spec, call.shape, call.extras.given):
            raise Refusal("; ".join(why))
        tensors, text = self._message(call)
        held = Held(self.child, next(_NUMBERS), str(call.device))
        reply, _ = self.child.call({**text, "hold": held.number}, tensors)
        if "wrong" in reply:
            raise Breach(reply["wrong"])
        return held

    def _message(self, call: Call) -> tuple[dict[str, Tensor], dict[str, Any]]:
        takes, needs, shape = self.takes, self.child.signature()["needs"], call.shape
        stored = dict(zip(TENSORS, (call.q, call.k, call.v), strict=True))
        tensors = {n: _flat(x.codes) for n, x in stored.items()}
        tensors |= {
            n: x.contiguous().cpu()
            for n, x in call.extras.as_options().items()
            if x is not None and n in takes
        }
        tensors |= {
            f"{n}_scale": _scale(x)
            for n, x in stored.items()
            if f"{n}_scale" in takes
            and (x.scale is not None or f"{n}_scale" in needs or call.recipe.storage[n].startswith("fp8"))
        }
        rules = _rules(call.spec, shape)
        options = {n: rules.get(n) for n in takes if n in rules or (n in needs and n not in tensors)}
        if "align" in takes:
            options["align"] = call.spec.align
        lens = [shape.S] * shape.batch if call.extras.kv_lens is None else call.extras.kv_lens.tolist()
        text = {
            "layout": self.layout, "options": options, "device": str(call.device), "threads": torch.get_num_threads(),
            "strides": {n: list(x.codes.stride()) for n, x in stored.items()},
            "shapes": {n: list(x.codes.shape) for n, x in stored.items()}, "out": list(shape.tensor("out")),
            "dtype": str(DTYPES[call.recipe.out_format]), "passes": list(takes),
            "lengths": {"q": [shape.q_len] * shape.batch, "k": lens, "v": lens},
            "dtypes": "+".join(dict.fromkeys(str(x.codes.dtype).removeprefix("torch.") for x in stored.values())),
        }  # fmt: skip
        return tensors, text


@dataclass(frozen=True)
class Held:
    """A call that waits in the kernel's process, which times it itself: the way there is not the kernel's."""

    child: Child
    number: int
    device: str

    def __call__(self) -> object:
        return self.seconds(1)

    def seconds(self, calls: int) -> float:
        """That so many calls take. Raises KernelEnded and KernelRaised."""
        threads = torch.get_num_threads()
        text = {"again": self.number, "calls": calls, "device": self.device, "threads": threads}
        return float(self.child.call(text, {})[0]["seconds"])


def _rules(spec: AttentionSpec, shape: Shape) -> dict[str, Any]:
    """The options that a call uses: those always passed, then those that differ from what no option means."""
    rules: dict[str, Any] = {"causal": spec.causal, "scale": spec.scale_for(shape.head_dim)}
    assert tuple(rules) == ALWAYS
    if spec.window is not None:
        rules["window"] = list(spec.window)
    if spec.softcap is not None:
        rules["softcap"] = spec.softcap
    if spec.empty_row != "zero":
        rules["empty_row"] = spec.empty_row
    return rules


def _flat(x: Tensor) -> Tensor:
    """The memory that a tensor lies in, gaps included, on the CPU."""
    if not x.numel():
        return x.flatten().cpu()
    reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((reach,), (1,)).cpu()


def _scale(x: Stored) -> Tensor:
    """FP32 `[B, H]`, or `[B, H, L]` where rows have their own."""
    b, h, n, _ = x.codes.shape
    if x.scale is None:
        return torch.ones(b, h)
    scale = x.scale.float().cpu()[..., 0]
    return (
        scale.expand(b, h, n).contiguous() if scale.shape[2] > 1 else scale[..., 0].expand(b, h).contiguous()
    )


@cache
def open_kernel(name: str) -> UserKernel:
    """The kernel of this name, one process for all its calls. Nothing is loaded until it is asked for something."""
    target, at, layout = name.rpartition("@")
    if not at or layout not in LAYOUTS:
        target, layout = name, "bhsd"
    kernel = UserKernel(name, (), layout=layout, child=Child(target))
    atexit.register(kernel.child.close)
    return kernel
