"""Measured against expected error, cell by cell.

`PYTHONPATH=. python tests/error_study.py` prints the table of docs/error-model.md.

A cell is one kind of data, length, masking, recipe and algorithm; squares are pooled over all elements and seeds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness import AttentionSpec, Case, Draw, Shape, get, get_recipe
from harness.error_model import Expectation, expectations, form_of
from harness.inputs import make_inputs
from harness.quantize import quantize
from harness.recipe import TENSORS
from harness.truth import reference

DATA = {
    "normal": Draw(), "q × 3": Draw("normal", {"q": 3.0}), "q × 8": Draw("normal", {"q": 8.0}),
    "V mean 1": Draw("normal", {"v_mean": 1.0}), "outliers": Draw("outliers"),
    "channel outliers": Draw("channel_outliers"), "heavy first key": Draw("heavy_key"), "tied maxima": Draw("tied"),
    "uniform offset": Draw("uniform"), "flat + V mean 1": Draw("normal", {"q": 0.01, "v_mean": 1.0}),
}  # fmt: skip
RECIPES = (
    "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e4m3_unscaled", "fp8_kv", "bf16_eager", "fp16_eager", "fp16_eager_clamped",
)  # fmt: skip
CAUSAL_ONLY = ("lower_triangle", "chunked_decode", "paged_decode")
ALGORITHMS = ("naive_masked", "online_softmax", "split_kv", "decode_with_cache", *CAUSAL_ONLY)


@dataclass
class Cell:
    """Mean squares summed over seeds, and the largest share of a ceiling that an error took (1 is a violation)."""

    error: float = 0.0
    expected: float = 0.0
    used: float = 0.0

    @property
    def ratio(self) -> float:
        """Measured ÷ expected RMSE."""
        if self.expected == 0:
            return 0.0 if self.error == 0 else math.inf
        return math.sqrt(self.error / self.expected)

    def see(self, got: Tensor, want: Tensor, variance: Tensor, ceiling: Tensor) -> None:
        error = got.double() - want
        told = torch.isfinite(error) & torch.isfinite(variance)
        if bool(told.any()):
            self.error += float(error[told].square().mean())
            self.expected += float(variance[told].mean())
        self.used = max(self.used, used(error, want, ceiling))


def used(error: Tensor, want: Tensor, ceiling: Tensor) -> float:
    """Largest |error| / ceiling where the truth is finite; a non-finite error is infinite under a finite ceiling."""
    bounded = torch.isfinite(want) & torch.isfinite(ceiling)
    e, c = error.abs()[bounded].nan_to_num(nan=math.inf, posinf=math.inf), ceiling[bounded]
    share = torch.where(e == 0, 0.0, e / c)
    return float(share.max()) if share.numel() else 0.0


def measure(
    data: str,
    n: int,
    causal: bool,
    recipes: Sequence[str],
    algorithms: Iterable[str],
    seeds: int,
    head_dim: int = 64,
) -> dict[tuple[str, str], tuple[Cell, Cell]]:
    """(recipe, algorithm) → cells of out and lse, at up to 256 rows of 1 to 4 heads."""
    names = [a for a in algorithms if causal or a not in CAUSAL_ONLY]
    heads = 4 if n <= 256 else 2 if n <= 1024 else 1
    shape, spec = Shape(1, heads, min(n, 256), head_dim, kv_len=n), AttentionSpec(causal=causal)
    name = f"{''.join(data.split())}-{n}-{causal}"
    case = Case("study", name, shape, "measures the error model", spec, DATA[data])
    cells = {(r, a): (Cell(), Cell()) for r in recipes for a in names}
    for seed in range(seeds):
        exact = make_inputs(case, seed).tensors
        for r in recipes:
            for a, (got, lse), truth, expected in _runs(exact, spec, r, names):
                out_cell, lse_cell = cells[r, a]
                out_cell.see(got, truth[0], expected.variance, expected.ceiling)
                lse_cell.see(lse, truth[1], expected.lse_variance, expected.lse_ceiling)
    return cells


def _runs(
    exact: Sequence[Tensor], spec: AttentionSpec, name: str, algorithms: Sequence[str]
) -> Iterator[tuple[str, tuple[Tensor, Tensor], tuple[Tensor, Tensor], Expectation]]:
    recipe = get_recipe(name)
    q, k, v = (quantize(x, t, recipe) for x, t in zip(exact, TENSORS, strict=True))
    values = (q.values, k.values, v.values)
    truth = reference(*values, spec)
    forms = [form_of(a, get(a).options) for a in algorithms]
    scales = (q.scale, k.scale, v.scale)
    found = expectations(truth, *values, spec, [(recipe, f) for f in forms], scales=scales)
    for a, expected in zip(algorithms, found, strict=True):
        y = get(a).run_stored((q, k, v), spec, recipe)
        yield a, (y.out, y.lse), (truth.out, truth.lse), expected


def main(lengths: Sequence[int] = (64, 128, 256, 512, 1024, 2048, 4096), seeds: int = 3) -> None:
    """Lowest and highest ratio of out over lengths and masking, one row per recipe and algorithm."""
    print("| recipe | algorithm | " + " | ".join(DATA) + " | ceiling used |")
    print("|---" * (len(DATA) + 3) + "|")
    seen: dict[tuple[str, str], dict[str, list[Cell]]] = {(r, a): {} for r in RECIPES for a in ALGORITHMS}
    for data, n, causal in itertools.product(DATA, lengths, (False, True)):
        for key, (out, _) in measure(data, n, causal, RECIPES, ALGORITHMS, seeds).items():
            seen[key].setdefault(data, []).append(out)
    for (recipe, algorithm), by_data in seen.items():
        spans = [f"{min(c.ratio for c in x):.2f}–{max(c.ratio for c in x):.2f}" for x in by_data.values()]
        top = max(c.used for x in by_data.values() for c in x)
        print(f"| {recipe} | {algorithm} | " + " | ".join(spans) + f" | {top:.2f} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
