"""Messages between a run and the process of a user's kernel: a JSON text and tensors as safetensors. No pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, BinaryIO

from safetensors.torch import load, save
from torch import Tensor

_LENGTH = 8  # bytes of each part's length


def send(file: BinaryIO, text: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write one message. Tensors are contiguous, on the CPU."""
    for part in (json.dumps(text).encode(), save(dict(tensors)) if tensors else b""):
        file.write(len(part).to_bytes(_LENGTH, "little"))
        file.write(part)
    file.flush()


def receive(file: BinaryIO) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read one message. Raises EOFError when the other side is gone."""
    text, tensors = (_part(file) for _ in range(2))
    return json.loads(text), load(tensors) if tensors else {}


def _part(file: BinaryIO) -> bytes:
    return _exactly(file, int.from_bytes(_exactly(file, _LENGTH), "little"))


def _exactly(file: BinaryIO, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = file.read(left)
        if not part:
            raise EOFError("the other process is gone")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
