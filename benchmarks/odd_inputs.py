"""How often does `judge` fail an honest kernel on odd inputs? `python -m benchmarks.odd_inputs --seeds 2500`

`benchmarks/false_alarms.py` asks on ordinary calls; here each seed draws another one: shape (q_len 1, head_dim 1, few
keys, GQA), rules and options, recipe, implementation of this package, and a kind of data that ties the errors of keys,
rows or heads together (flat rows, repeated and clustered keys, V far from 0, tiny heads …). Any FAIL is a false alarm.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import harness
from harness.error_model import BLACK_BOX, form_of
from harness.files import write_atomically

NAMES = ("online_softmax", "naive_masked", "split_kv", "decode_with_cache", "lower_triangle")
Data = tuple[Tensor, Tensor, Tensor]
SAID = "# False alarms on odd inputs"


def _times(q: float = 1.0, k: float = 1.0, v: float = 1.0, more: float = 0.0) -> Callable[[Data], Data]:
    return lambda x: (q * x[0], k * x[1], v * x[2] + more)


def _repeated(parts: int, both: bool, more: float = 0.0) -> Callable[[Data], Data]:
    """Keys, or keys and values, that stand `parts` times."""

    def again(x: Tensor) -> Tensor:
        n = max(1, x.shape[2] // parts)
        return x[:, :, :n].repeat(1, 1, math.ceil(x.shape[2] / n), 1)[:, :, : x.shape[2]]

    return lambda x: (x[0], again(x[1]), again(x[2]) if both else x[2] + more)


def _clustered(count: int) -> Callable[[Data], Data]:
    """Keys that are one of a few, with values near one of a few."""

    def made(x: Data) -> Data:
        q, k, v = x
        which = (k[0, 0, :, 0] * 997).long() % count
        return q, 1.5 * k[:, :, which % k.shape[2]], 0.2 * v + v.flip(2)[:, :, which % k.shape[2]]

    return made


def _heads(x: Data) -> Data:
    q, k, v = x
    return q, k, v * torch.logspace(0, -5, v.shape[1])[None, :, None, None]


def _outliers(x: Data) -> Data:
    q, k, v = (t.clone() for t in x)
    q[..., 0], k[..., 0], v[..., 0] = 3 * q[..., 0], 20 * k[..., 0], 50 * v[..., 0]
    return q, k, v


KINDS: dict[str, Callable[[Data], Data]] = {
    "normal": _times(), "flat": _times(q=0.01), "no scores": _times(q=0.0), "flat, V + 1": _times(q=0.01, more=1.0),
    "flat, V near 8": _times(q=0.003, v=0.1, more=8.0), "V + 10": _times(more=10.0), "peaked": _times(q=8.0),
    "constant V": lambda x: (x[0], x[1], x[2][:, :, :1].expand_as(x[2]).contiguous()),
    "keys × 16": _repeated(16, False), "keys × 32, V + 2": _repeated(32, False, 2.0),
    "keys and values × 8": _repeated(8, True), "2 clusters": _clustered(2), "3 clusters": _clustered(3),
    "channel outliers": _outliers, "all × 1e-4": _times(1e-4, 1e-4, 1e-4), "V × 1e-6": _times(v=1e-6),
    "V × 3000": _times(v=3000.0), "heads to 1e-5": _heads, "|V|": lambda x: (x[0], x[1], x[2].abs()),
    "equal queries": lambda x: (x[0][:, :, :1] + 1e-3 * x[0], x[1], x[2]),
}  # fmt: skip


def call(seed: int) -> tuple[str, str, str, Data, dict[str, Any], dict[str, Any], bool]:
    """Kind, recipe, implementation, tensors, rules, options, and whether the judge is told the implementation."""
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    recipes = [r for r in harness.recipes() if r != "fp64"]
    kind, recipe, name = (draw.choice(x) for x in (list(KINDS), recipes, NAMES))
    kv_heads, keys, width = (
        draw.choice((1, 2, 4)),
        draw.choice((1, 7, 64, 129, 256, 512, 700)),
        draw.choice((1, 2, 3, 8, 16, 64)),
    )
    batch, heads = draw.choice((1, 1, 2)), kv_heads * draw.choice((1, 1, 2, 4))
    rows, value_dim = draw.choice((1, 4, 33, keys, keys)), draw.choice((width, width, 1, 8, 32))
    rules: dict[str, Any] = {"causal": name == "lower_triangle" or draw.random() < 0.4}
    options: dict[str, Any] = {}
    if draw.random() < 0.15:
        rules["window"] = (draw.choice((0, 3, 31)), draw.choice((0, None, 5)))
    if draw.random() < 0.12:
        rules["softcap"] = draw.choice((1.0, 20.0))
    if draw.random() < 0.15:
        options["sinks"] = draw.choice((1, 4)) * torch.randn(heads, generator=g)
    if draw.random() < 0.12:
        options["mask"] = torch.rand(1, 1, rows, keys, generator=g) < draw.choice((0.1, 0.9))
    if draw.random() < 0.12:
        options["kv_lens"] = torch.randint(0, keys + 1, (batch,), generator=g)
    q = torch.randn(batch, heads, rows, width, generator=g)
    k, v = (torch.randn(batch, kv_heads, keys, n, generator=g) for n in (width, value_dim))
    return kind, recipe, name, KINDS[kind]((q, k, v)), rules, options, draw.random() < 0.5


def judged(seed: int) -> tuple[str, str]:
    """The status, or REFUSED, and a line on the call."""
    kind, recipe, name, (q, k, v), rules, options, told = call(seed)
    spec = harness.AttentionSpec(**rules)
    shape = f"q {tuple(q.shape)}, v {tuple(v.shape)}"
    line = f"seed {seed}: {kind}, {recipe}, {name}, {shape}, {rules}, {', '.join(options) or 'no options'}"
    try:
        out = harness.get(name).run(q, k, v, spec, recipe=recipe, quantize=True, **options).out
    except ValueError:
        return "REFUSED", line
    form = form_of(name) if told else BLACK_BOX
    found = harness.judge(out, q, k, v, spec=spec, recipe=recipe, quantize=True, form=form, **options)
    return found.status.value, f"{line}: {found.reasons[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2500)
    parser.add_argument("--out", type=Path, help="write what is printed there, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    met: Counter[str] = Counter()
    failed = []
    for seed in tqdm(range(given.seeds), unit="call"):
        status, line = judged(seed)
        met[status] += 1
        failed += [f"* {line}"] if status == "FAIL" else []
    counts = ", ".join(f"{n} {status}" for status, n in sorted(met.items()))
    about = (__doc__ or "").partition("\n\n")[2]
    text = "\n".join(
        (
            SAID,
            "",
            f"`python -m benchmarks.odd_inputs --seeds {given.seeds}`: {counts}.",
            "",
            about,
            *failed,
            "",
        )
    )
    print(text, end="")
    if given.out:
        write_atomically(given.out, text)


if __name__ == "__main__":
    main()
