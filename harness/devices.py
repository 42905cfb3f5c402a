"""Devices: checked by name, and set to compute what the recipe says."""

from __future__ import annotations

import torch


def use_device(name: str) -> torch.device:
    """The device of this name, with its shortcuts off: no TF32 and no reduced-precision sums unless a recipe asks.

    Raises ValueError when torch has no such device here.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; allowed: {', '.join(devices())}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; allowed: {', '.join(devices())}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"torch {torch.__version__} sees no CUDA device; allowed here: cpu (install a CUDA build of torch and a"
                " driver to use cuda)"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"no device {name!r}; allowed: {', '.join(devices())}")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return device


def devices() -> tuple[str, ...]:
    """Devices that can be used here."""
    return ("cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count())))


def synchronise(device: torch.device) -> None:
    """Wait for the device's queue, so that a clock read next is right."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
