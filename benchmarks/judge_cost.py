"""What a judgement costs beside the FP64 truth it needs: `python benchmarks/judge_cost.py`.

CPU time of both in one process and one run, on [1, 8, 4096, 64] BF16 by default: a ratio, since machines differ.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from tabulate import tabulate

import harness


def seconds(work: Callable[[], object]) -> float:
    """CPU time, which other work on the machine disturbs least."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(shape: tuple[int, ...], recipe: str, causal: bool) -> list[object]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        harness.round_to(torch.randn(shape, generator=g), harness.get_recipe(recipe).storage["q"])
        for _ in "qkv"
    )
    spec = harness.AttentionSpec(causal=causal)
    out = harness.get("online_softmax").run(q, k, v, spec, recipe=recipe).out
    truth = min(seconds(lambda: harness.reference(q, k, v, spec)) for _ in range(3))
    options = {"spec": spec, "recipe": recipe}
    good = seconds(lambda: harness.judge(out, q, k, v, **options))
    bad = seconds(lambda: harness.judge(out * 1.02, q, k, v, **options))
    return ["causal" if causal else "full", f"{truth:.2f}", f"{good / truth:.1f}", f"{bad / truth:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1,8,4096,64", help="B,H,L,D")
    parser.add_argument("--recipe", default="bf16")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = tuple(int(n) for n in given.shape.split(","))
    rows = [measure(shape, given.recipe, causal) for causal in (False, True)]
    print(f"[{given.shape}] {given.recipe}, one thread, CPU time")
    print(tabulate(rows, ["rows", "truth s", "judge ÷ truth", "judge and diagnosis ÷ truth"]))


if __name__ == "__main__":
    main()
