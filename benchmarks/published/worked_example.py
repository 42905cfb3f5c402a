"""The worked example of the notes: three tokens of two channels, attention without a mask, by hand."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.published.rows import Paper, Row
from harness import get, reference

PAPER = Paper("worked_example", "Worked example", "notes on attention basics, section 8")
Q, K, V = (
    [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],
    [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]],
    [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],
)
PUBLISHED = ((0.802, 0.599), (0.599, 0.599), (0.752, 0.497))
ALGORITHMS = ("naive_masked", "online_softmax", "decode_with_cache")
HALF = 0.0005  # what three decimals leave open


def rows(full: bool) -> Iterator[Row]:
    q, k, v = (torch.tensor([[x]], dtype=torch.float64) for x in (Q, K, V))
    outs = [reference(q, k, v).out, *(get(a).run(q, k, v, recipe="fp64").out for a in ALGORITHMS)]
    for i, published in enumerate(PUBLISHED):
        far = max(
            float((out[0, 0, i] - torch.tensor(published, dtype=torch.float64)).abs().max()) for out in outs
        )
        text = f"({published[0]}, {published[1]})"
        yield Row(
            f"o{i + 1}, largest distance",
            text,
            far,
            0.0,
            HALF,
            f"L = 3, d = 2, truth and {', '.join(ALGORITHMS)}",
        )
