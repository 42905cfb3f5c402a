"""The cases of the study: each makes some fault visible, and says which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import harness
from harness.operands import Extras
from harness.quantize import Stored, quantize

RECIPES = ("fp32", "bf16", "fp16", "fp8_e4m3")


@dataclass(frozen=True)
class Case:
    """`[B, H, L, D]`, kinds of data and options; see `_draw` for what they mean."""

    name: str
    why: str
    shape: tuple[int, int, int, int] = (1, 4, 256, 64)
    kv_heads: int | None = None
    kv_len: int | None = None
    kind: str = "normal"
    options: tuple[str, ...] = ()
    rules: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One case under one recipe: exact inputs, how they are stored, rules and options."""

    case: Case
    exact: tuple[Tensor, Tensor, Tensor]
    stored: tuple[Stored, Stored, Stored]
    spec: harness.AttentionSpec
    extras: Extras
    recipe: harness.Recipe

    @property
    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        """The stored values, FP64."""
        q, k, v = (x.values for x in self.stored)
        return q, k, v


_CAUSAL = {"causal": True}
CASES = {
    c.name: c
    for c in (
        Case("full", "plain softmax over 256 keys"),
        Case("causal", "rows of 1 to 256 keys", rules=_CAUSAL),
        Case("long", "4,096 keys: what one of them weighs", (1, 4, 128, 64), kv_len=4096),
        Case("heavy", "a first key that holds most of the mass, as sink tokens do", kind="heavy", rules=_CAUSAL),
        Case("mean", "V with a mean: sums do not cancel", kind="mean"),
        Case("peaked", "scores of four times the spread", kind="peaked"),
        Case("gqa", "eight query heads on two kv heads", (1, 8, 192, 64), kv_heads=2, rules=_CAUSAL),
        Case("window", "64 keys a row", rules={"causal": True, "window": (63, 0)}),
        Case("cross", "192 rows at the end of 320 keys", (1, 4, 192, 64), kv_len=320, rules=_CAUSAL),
        Case("ragged", "250 keys: no whole number of blocks", (1, 4, 200, 64), kv_len=250),
        Case("lengths", "two sequences of 256 and 200 keys", (2, 2, 256, 64), options=("kv_lens",)),
        Case("sinks", "learned sinks of 2 to 5", options=("sinks",), rules=_CAUSAL),
        Case("bias", "a finite bias per head", options=("bias",)),
        Case("mask", "a mask per head that hides three keys in ten", options=("mask",)),
        Case("softcap", "a softcap of 2", rules={"softcap": 2.0}),
        Case("wide", "head_dim 80: the scale is no power of two", (1, 4, 256, 80), rules=_CAUSAL),
        Case("large", "scores to ±150: exp overflows without the max", kind="large"),
        Case("low", "all scores near −95: exp underflows without the max", options=("low",)),
        Case("decode", "24 last rows of 1,024 keys, GQA", (2, 8, 24, 64), kv_heads=2, kv_len=1024, rules=_CAUSAL),
    )
}  # fmt: skip


def made(name: str, recipe: str, seed: int = 0) -> Call:
    """The call of a case: the same exact inputs under every recipe. Raises KeyError for an unknown name."""
    case = CASES[name]
    exact, extras = _draw(case, seed)
    r = harness.get_recipe(recipe)
    q, k, v = (quantize(x, n, r) for x, n in zip(exact, "qkv", strict=True))
    return Call(case, exact, (q, k, v), harness.AttentionSpec(**case.rules), extras, r)


def _draw(case: Case, seed: int) -> tuple[tuple[Tensor, Tensor, Tensor], Extras]:
    b, h, n, d = case.shape
    s, hk = case.kv_len or n, case.kv_heads or h
    g = torch.Generator().manual_seed(1000 * list(CASES).index(case.name) + seed)
    q, k, v = (
        torch.randn(b, heads, rows, d, generator=g, dtype=torch.float64)
        for heads, rows in ((h, n), (hk, s), (hk, s))
    )
    if case.kind == "heavy":
        q += 1
        k[:, :, 0] += 0.75
    q *= {"peaked": 4.0, "large": 40.0}.get(case.kind, 1.0)
    v += case.kind == "mean"
    made: dict[str, Tensor] = {}
    if "kv_lens" in case.options:
        made["kv_lens"] = torch.tensor([s, s - 56])
    if "sinks" in case.options:
        made["sinks"] = torch.arange(2.0, 2.0 + h)
    if "bias" in case.options:
        made["bias"] = torch.randn(1, h, n, s, generator=g)
    if "mask" in case.options:
        made["mask"] = torch.rand(1, h, n, s, generator=g) < 0.7
    if "low" in case.options:
        made["bias"] = torch.full((1, 1, 1, s), -95.0)
    return (q, k, v), Extras(**made)
