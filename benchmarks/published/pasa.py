"""PASA: inputs with a mean far from 0 overflow FP16 scores before they are scaled.

q and k are uniform in x0 ± Am, so that q·k lies about d·x0²: 51,200 for x0 = 20, 80,000 for x0 = 25, beside FP16's
65,504 (65,520 rounds to infinity).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.published.rows import Paper, Row, told
from harness import Case, Draw, Shape, get
from harness.arithmetic import Block
from harness.inputs import make_inputs

PAPER = Paper("pasa", "PASA (overflow of FP16 scores)", "arXiv 2503.01873")
N, D = 1280, 128


@dataclass
class Overflowed:
    """A watcher that counts raw scores, and those that are no longer finite."""

    count: int = 0
    total: int = 0

    def __call__(self, stage: str, before: Tensor, after: Tensor, block: Block) -> None:
        if stage == "scores_raw":
            self.count += int((~torch.isfinite(after)).sum())
            self.total += after.numel()

    def stagnation(self, stage: str, held: Tensor, added: Tensor, after: Tensor) -> None:
        """Nothing but scores is looked at."""


def share(centre: float, half_width: float, heads: int, n: int = N) -> float:
    """Of q·k that overflow when they are stored in FP16."""
    case = Case(
        "published", f"pasa-{centre:g}-{half_width:g}", Shape(1, heads, n, D, value_dim=1), "PASA's inputs",
        draw=Draw("uniform", {"centre": centre, "half_width": half_width}),
    )  # fmt: skip
    seen = Overflowed()
    q, k, v = make_inputs(case, 0).tensors
    get("naive_masked").run(q, k, v, recipe="fp16_eager", quantize=True, watch=seen)
    return seen.count / seen.total


def rows(full: bool) -> Iterator[Row]:
    heads = 16 if full else 1
    size = f"n = {N}, d = {D}, {heads} head{'s' if heads > 1 else ''}"
    settings = ((20, 0.5), (20, 5), (20, 10), (25, 0.5), (25, 10), (30, 0.5), (30, 10))
    for centre, half_width in told(settings, PAPER.name):
        none = centre == 20
        band = (0.0, 0.0) if none else (0.999, 1.0)
        setting = f"scores that overflow, x0 = {centre}, Am = {half_width:g}"
        yield Row(
            setting, "none" if none else "~100 %", share(centre, half_width, heads), *band, size, digits=6
        )
