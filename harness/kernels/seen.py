"""What torch really ran: the operators that it dispatched to while a kernel was called."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.records import Ran

# What attention is made of; views, copies and masks say nothing about which kernel ran.
_TELLING = ("_scaled_dot_product", "_scaled_mm", "bmm", "baddbmm", "softmax", "_safe_softmax")


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the telling operators under it, each once. An operator made of others is taken apart first: under
    inference mode the whole of SDPA arrives as one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []
        self.places: list[tuple[str, str]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would load its compiler, two seconds of imports, to keep it away from what never meets it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose():
            with self:
                parts = _decompose(func, args, kwargs)
            if parts is not NotImplemented:
                return parts
        name = func.name().removeprefix("aten::")
        if name.startswith(_TELLING):
            tensor = next(x for x in args if isinstance(x, torch.Tensor))
            self.places.append((str(tensor.dtype).removeprefix("torch."), str(tensor.device)))
            if name not in self.operators:
                self.operators.append(name)
        return func(*args, **kwargs)

    def ran(self, backend: str) -> Ran:
        """All of it. Dtypes and devices in the order met, each once."""
        dtypes, devices = (
            (dict.fromkeys(x) for x in zip(*self.places, strict=True)) if self.places else ((), ())
        )
        return Ran(backend, tuple(self.operators), "+".join(dtypes), "+".join(devices))


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By torch's C++ where it has that: `decompose` prefers Python, which first loads sympy for half a second."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
        return func._op_dk(key, *args, **kwargs)
    return func.decompose(*args, **kwargs)
