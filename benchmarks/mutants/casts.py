"""Wrong precision: what is rounded, cut, flushed, saturated, scaled or not scaled back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.mutants.attention import Attention
from benchmarks.mutants.table import Edit, Family
from harness.rounding import round_to, ulp

FAMILY = Family("casts")
add = FAMILY.add
NARROW, FP8 = ("bf16", "fp16", "fp8_e4m3"), ("fp8_e4m3",)
SUMS = "online/full online/heavy online/mean"


def _cut(x: Tensor, fmt: str) -> Tensor:
    """Towards zero: the rounded value, less an ulp where that went up."""
    near = round_to(x, fmt, "saturate" if fmt == "fp8_e4m3" else None)
    spacing = ulp(x, fmt)
    return torch.where(near.abs() > x.abs(), near - spacing * near.sign(), near)


def _cut_at(stage: str) -> Edit:
    def rounded(self: Attention, x: Tensor, at: str) -> Tensor:
        if at != stage or (self.exact and stage not in self.keeps):
            return Attention.rounded(self, x, at)
        return _cut(x, self.recipe.format_of(stage))

    return {"rounded": rounded}


def _held(l: str | None = None, o: str | None = None) -> Edit:
    """Sums held in a format between blocks."""
    edit = {}
    if l is not None:
        edit["add_l"] = lambda self, a, x, part: round_to(Attention.add_l(self, a, x, part), l)
    if o is not None:
        edit["add_o"] = lambda self, a, x, part: round_to(Attention.add_o(self, a, x, part), o)
    return edit


def _serial_l(fmt: str, step: int) -> Edit:
    """The row sum inside a block, too, is held in a format: after every `step` keys."""

    def summed(self: Attention, e: Tensor, p: Tensor) -> Tensor:
        total = torch.zeros_like(e[..., :1])
        for start in range(0, e.shape[-1], step):
            total = round_to(total + e[..., start : start + step].sum(-1, keepdim=True), fmt)
        return total

    return {"summed": summed}


def _p_in(fmt: str, scale: float | None = None) -> Edit:
    def probs(self: Attention, e: Tensor) -> Tensor:
        x = e * self.p_scale()
        return round_to(x, fmt) if not self.exact or "probs" in self.keeps else x

    edit = {"probs": probs}
    return edit if scale is None else {**edit, "p_scale": lambda self: scale}


def _scores_in(fmt: str) -> Edit:
    return {"raw": lambda self, rows, keys: round_to(Attention.raw(self, rows, keys), fmt)}


def _step_in(fmt: str) -> Edit:
    """s − m, and exp of it, in a format."""
    return {"exp": lambda self, x: round_to(torch.exp(round_to(x, fmt)), fmt)}


def _through(name: str, fmt: str) -> Edit:
    """An operand goes through a narrower format."""

    def prepare(self: Attention) -> None:
        Attention.prepare(self)
        setattr(self, name, round_to(getattr(self, name), fmt))

    return {"prepare": prepare}


def _scales(name: str, change: Any) -> Edit:
    def descaled(self: Attention, n: str) -> Tensor | float:
        scale = Attention.descaled(self, n)
        return change(scale) if n == name and isinstance(scale, Tensor) else scale

    return {"descaled": descaled}


def _one_head(s: Tensor) -> Tensor:
    s = s.clone()
    s[:, 1] = 1.0
    return s


def _prescaled_q(self: Attention) -> None:
    """q·scale is stored again before the product."""
    Attention.prepare(self)
    fmt = self.recipe.storage["q"]
    x = self.q * Attention.scale(self)
    x = x * 2.0 ** -(torch.floor(torch.log2(x.abs().amax())) - 8) if fmt == "fp8_e4m3" else x
    self.back = Attention.scale(self) * float(self.q.abs().amax() / x.abs().amax())
    self.q = x if fmt == self.recipe.base else round_to(x, fmt)


def _unclamped(self: Attention, e: Tensor) -> Tensor:
    return round_to(e * 512.0, "fp8_e4m3", "saturate")


def _coarse_out(self: Attention, x: Tensor, stage: str) -> Tensor:
    if stage != "out" or (self.exact and stage not in self.keeps):
        return Attention.rounded(self, x, stage)
    return round_to(x, {"fp32": "bf16", "fp16": "bf16"}[self.recipe.name])


# fmt: off
add("P cut", "P is truncated to its format", "online/full naive/causal split/mean online/heavy", _cut_at("probs"),
    "truncated P", recipes=NARROW, keeps=("probs",))
add("O cut", "the output is truncated to its format", "online/full naive/causal decode/causal", _cut_at("out"),
    "truncated O", recipes=NARROW, keeps=("out",))
add("BF16 running sum", "l is held in BF16 between blocks", SUMS, _held(l="bf16"),
    "bf16 running sum; row sum", random=True)
add("BF16 sum key by key", "l is held in BF16 from key to key", "naive/full naive/mean", _serial_l("bf16", 1),
    "bf16 running sum; row sum; shrink", random=True)
add("FP16 running sum", "l is held in FP16 between blocks", SUMS, _held(l="fp16"),
    "fp16 running sum; row sum", random=True)
add("BF16 accumulator", "O is held in BF16 between blocks", SUMS, _held(o="bf16"), "bf16 accumulator", random=True)
add("FP16 accumulator", "O is held in FP16 between blocks", SUMS, _held(o="fp16"),
    "fp16 accumulator; overflow in acc", random=True)
add("l from rounded P", "l sums P after its cast", "online/full naive/causal online/heavy",
    {"summed": lambda self, e, p: p.sum(-1, keepdim=True) / self.p_scale()}, "row sum after cast",
    recipes=NARROW, keeps=("probs",), random=True)
add("P in BF16", "P is cast to BF16", "online/full naive/causal", _p_in("bf16"), "bf16 P",
    recipes=("fp32", "fp16"), keeps=("probs",), random=True)
add("P in E4M3", "P is cast to E4M3 under a scale of 256", "online/full naive/causal", _p_in("fp8_e4m3", 256.0),
    "fp8_e4m3 P", recipes=("fp32", "bf16", "fp16"), keeps=("probs",), random=True)
add("P flushed", "P is cast to E4M3 without its scale", "online/heavy naive/sinks online/full online/long",
    _p_in("fp8_e4m3", 1.0), "P scale 1", recipes=FP8, keeps=("probs",), random=True)
add("P saturates", "P × 512 is cast to E4M3: what exceeds 0.875 is clipped", "online/full naive/heavy",
    {"probs": _unclamped, "p_scale": lambda self: 512.0}, recipes=FP8, keeps=("probs",))
add("P scale not undone", "O is divided by 1 and not by 256", "online/full decode/causal",
    {"divided": lambda self, state: _times(Attention.divided(self, state), self.recipe.p_scale)},
    "shrink", recipes=FP8)
add("P scale of 224 undone as 256", "P is scaled by 224 and O divided by 256", "online/full naive/causal",
    {"divided": lambda self, state: _times(Attention.divided(self, state), 224 / 256)}, "shrink", recipes=FP8)
add("scores in BF16", "q·k is stored in BF16", "online/full naive/causal", _scores_in("bf16"), "bf16 q·k",
    random=True)
add("scores in FP16", "q·k is stored in FP16", "online/full naive/peaked", _scores_in("fp16"), "fp16 q·k",
    random=True)
add("exponent in BF16", "s − m and its exp are stored in BF16", "online/full naive/causal", _step_in("bf16"),
    "bf16 exponent; bf16 P", random=True)
add("V through BF16", "V is rounded to BF16", "online/full naive/causal", _through("v", "bf16"),
    "v through bf16", recipes=("fp32", "fp16"), random=True)
add("K through TF32", "K is rounded to TF32", "online/full naive/causal", _through("k", "tf32"),
    "k through tf32", recipes=("fp32",), random=True)
add("V through E4M3", "V goes through an unscaled E4M3 cache", "decode/causal online/full", _through("v", "fp8_e4m3"),
    "v through fp8_e4m3", recipes=("fp32", "bf16", "fp16"), random=True)
add("q scaled before it is stored", "q·scale is rounded to the storage format", "online/wide naive/wide",
    {"prepare": _prescaled_q, "scale": lambda self: self.back}, recipes=NARROW, random=True)
add("output in BF16", "the output is rounded to BF16", "online/full decode/causal", {"rounded": _coarse_out},
    "bf16 output", recipes=("fp32", "fp16"), keeps=("out",), random=True)
for tensor in "qkv":
    add(f"{tensor} not descaled", f"the scale of {tensor} is left out", "online/full naive/causal",
        _scales(tensor, torch.ones_like), f"{tensor} not descaled", recipes=FP8)
add("k descaled twice", "the scale of k is applied twice", "online/full split/causal",
    _scales("k", lambda s: s * s), "k descaled twice", recipes=FP8)
add("v scale of head 0", "all heads take the scale of v of head 0", "online/full decode/gqa",
    _scales("v", lambda s: s[:, :1].expand_as(s)), "scale of v of head 0", recipes=FP8)
add("k scale of head 0", "all heads take the scale of k of head 0", "online/full naive/causal",
    _scales("k", lambda s: s[:, :1].expand_as(s)), "scale of k of head 0", recipes=FP8)
add("v of head 1 not descaled", "one head's scale of v is left out", "online/full decode/causal",
    _scales("v", _one_head), "v not descaled; shrink", recipes=FP8)
add("v scale through BF16", "the scale of v is rounded to BF16", "online/full naive/causal",
    _scales("v", lambda s: round_to(s, "bf16")), "shrink", recipes=FP8)
# fmt: on


def _times(x: tuple[Tensor, Tensor], factor: float) -> tuple[Tensor, Tensor]:
    return x[0] * factor, x[1]
