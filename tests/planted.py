"""Attention of its own, written on torch alone, with a switch for every mistake: what the judging is tried on.

It takes codes and scales as a kernel does, computes in FP32 by blocks of keys under a running max, and rounds where the
recipe rounds with torch's own casts. Nothing of the harness computes here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import harness
from harness.quantize import Stored, quantize

DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn,
}  # fmt: skip
RECIPES = tuple(DTYPES)


@dataclass
class Made:
    """One call: exact inputs, how they are stored, rules and extras."""

    exact: tuple[Tensor, Tensor, Tensor]
    recipe: harness.Recipe
    spec: harness.AttentionSpec
    extras: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stored: tuple[Stored, ...] = tuple(
            quantize(x, n, self.recipe) for x, n in zip(self.exact, "qkv", strict=True)
        )

    def judge(self, out: Tensor, **options: Any) -> Any:
        q, k, v = self.exact
        given = {"spec": self.spec, "recipe": self.recipe, "quantize": True, **self.extras, **options}
        return harness.judge(out, q, k, v, **given)


def made(
    shape: tuple[int, ...] = (1, 4, 512, 64), recipe: str | harness.Recipe = "bf16", seed: int = 0, *,
    causal: bool = False, kv_heads: int | None = None, kind: str = "normal", kv_len: int | None = None,
    extras: Mapping[str, Any] | None = None, **rules: Any,
) -> Made:  # fmt: skip
    """A call `[B, H, L, D]` of drawn inputs."""
    b, h, n, d = shape
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(b, heads, rows, d, generator=g, dtype=torch.float64)
        for heads, rows in ((h, n), (kv_heads or h, kv_len or n), (kv_heads or h, kv_len or n))
    )
    if kind == "peaked":
        q *= 4
    elif kind == "heavy key":
        q += 1
        k[:, :, 0] += 1
    elif kind == "V mean 1":
        v += 1
    elif kind == "outliers":
        for x in (q, k, v):
            x += (
                10
                * torch.randn(x.shape, generator=g, dtype=torch.float64)
                * (torch.rand(x.shape, generator=g) < 0.001)
            )
    elif kind != "normal":
        raise ValueError(f"kind is {kind!r}")
    spec = harness.AttentionSpec(causal=causal, **rules)
    return Made((q, k, v), harness.get_recipe(recipe), spec, dict(extras or {}))


KINDS = ("normal", "peaked", "heavy key", "V mean 1", "outliers")


@dataclass(frozen=True)
class Kernel:
    """The switches. `seen`, `bias`, `sinks`: what replaces the call's own (None: the call's own)."""

    block: int = 64
    scale: float = 1.0  # a factor on the scale
    softcap: Any = "call"
    seen: Callable[[Tensor], Tensor] | None = None
    bias: Callable[[Tensor], Tensor] | None = None
    sinks: bool = True
    acc: torch.dtype | None = None  # of O between blocks
    running: torch.dtype | None = None  # of l
    sum_of: str | None = None  # "before", "after"
    rescale: bool = True
    p_scale: float | None = None
    unscale: float | None = None  # what O is divided by for P's scale
    cut_p: bool = False
    cut_o: bool = False
    normalise: bool = True
    k: Callable[[Tensor], Tensor] | None = None  # other codes
    v: Callable[[Tensor], Tensor] | None = None
    scales: Callable[[Tensor, str], Tensor] | None = None
    start: float = -math.inf  # where the running max starts
    two_passes: bool = False  # the row's max is known before the first block
    guarded: bool = True  # a max of −∞ is not subtracted
    empty: float = 0.0  # what a row without keys is
    kv_index: Callable[[Tensor, int], Tensor] | None = None

    def __call__(self, call: Made) -> Tensor:
        r, spec = call.recipe, call.spec
        (q, k, v), (sq, sk, sv) = [x.codes.float() for x in call.stored], [x.scale for x in call.stored]
        k, v = (k if self.k is None else self.k(k)), (v if self.v is None else self.v(v))
        sq, sk, sv = (
            None if s is None else (s if self.scales is None else self.scales(s, n)).float()
            for s, n in ((sq, "q"), (sk, "k"), (sv, "v"))
        )
        heads = q.shape[1]
        index = torch.arange(heads) // (heads // k.shape[1])
        if self.kv_index is not None:
            index = self.kv_index(index, k.shape[1])
        k, v = k[:, index], v[:, index]
        sk, sv = (None if s is None else s[:, index] for s in (sk, sv))
        scale = spec.scale_for(q.shape[3]) * self.scale
        s = q @ k.mT
        for x in (sq, sk if sk is None else sk.mT):
            s = s if x is None else s * x
        s = s * scale
        cap = spec.softcap if self.softcap == "call" else self.softcap
        s = s if cap is None else cap * torch.tanh(s / cap)
        bias = call.extras.get("bias")
        if bias is not None:
            bias = bias if self.bias is None else self.bias(bias)
            s = s + bias.float()
        seen = visible(call)
        seen = seen if self.seen is None else self.seen(seen)
        return self._sum(call, s.masked_fill(~seen, -math.inf), v, sv, r)

    def _sum(self, call: Made, s: Tensor, v: Tensor, sv: Tensor | None, r: harness.Recipe) -> Tensor:
        m = s.amax(-1, keepdim=True) if self.two_passes else s.new_full((*s.shape[:3], 1), self.start)
        l, o = torch.zeros_like(m), v.new_zeros(*s.shape[:3], v.shape[3])  # noqa: E741
        sinks = call.extras.get("sinks")
        if sinks is not None and self.sinks:
            m = sinks.float().view(1, -1, 1, 1).expand_as(m)
            l = torch.ones_like(m)  # noqa: E741
        p_scale = r.p_scale if self.p_scale is None else self.p_scale
        for start in range(0, s.shape[-1], self.block):
            keys = slice(start, start + self.block)
            new = torch.maximum(m, s[..., keys].amax(-1, keepdim=True))
            safe = new.masked_fill(new == -math.inf, 0.0) if self.guarded else new
            a = torch.exp(m - safe) if self.rescale else (m > -math.inf).float()
            e = torch.exp(s[..., keys] - safe)
            p = cast(e * p_scale, r.format_of("probs"), self.cut_p)
            part = p / p_scale if (self.sum_of or r.row_sum) == "after" else e
            l = held(a * l + part.sum(-1, keepdim=True), self.running)  # noqa: E741
            pv = p @ (v[:, :, keys] if sv is None or sv.shape[2] == 1 else v[:, :, keys] * sv[:, :, keys])
            o, m = held(a * o + pv, self.acc), new
        o = o / (self.unscale or p_scale)
        o = o * sv if sv is not None and sv.shape[2] == 1 else o
        if self.normalise:  # a max that does not start at −∞ leaves 0/0 where all is below it
            o = o / (torch.where(l == 0, 1.0, l) if self.start == -math.inf else l)
        o = o.masked_fill((l == 0) & (m == -math.inf), self.empty)
        return cast(o, r.out_format, self.cut_o)


def visible(call: Made) -> Tensor:
    """Keys that the call's rules show, `[B, H, L, S]`, from their definition."""
    (b, h, n, _), keys = call.exact[0].shape, call.exact[1].shape[2]
    lens = call.extras.get("kv_lens", torch.full((b,), keys)).view(-1, 1, 1, 1)
    i, j = torch.arange(n).view(1, 1, -1, 1), torch.arange(keys).view(1, 1, 1, -1)
    position = i + (lens - n if call.spec.align == "bottom-right" else 0)
    seen = j < lens
    left, right = (None, None) if call.spec.window is None else call.spec.window
    right = 0 if call.spec.causal else right
    seen = seen if right is None else seen & (j <= position + right)
    seen = seen if left is None else seen & (j >= position - left)
    mask = call.extras.get("mask")
    seen = seen if mask is None else seen & mask
    return seen.expand(b, h, n, keys)


def cast(x: Tensor, fmt: str, cut: bool = False) -> Tensor:
    """Rounded to a format and back, or cut to it towards zero."""
    dtype = DTYPES[fmt]
    y = x.clamp(-448, 448).to(dtype).float() if fmt == "fp8_e4m3" else x.to(dtype).float()
    if not cut:
        return y
    drop = {"bf16": 16, "fp16": 13, "fp8_e4m3": 20}[fmt]
    z = (x.contiguous().view(torch.int32) >> drop << drop).view(torch.float32)
    low = {"bf16": 0.0, "fp16": 2.0**-14, "fp8_e4m3": 2.0**-6}[fmt]  # subnormals: rounded, a trifle
    return torch.where(x.abs() >= low, z, y)


def held(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype).float()


# --- faults ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plant:
    """One fault: the call it is planted in, the kernel that has it (or what is done to an honest output), the names
    that say it, its size where it comes in degrees, and the recipes (of each mask) where nothing can show it."""

    name: str
    said: tuple[str, ...]
    kernel: Kernel = field(default_factory=Kernel)
    after: Callable[[Tensor, Made], Tensor] | None = None
    call: Mapping[str, Any] = field(default_factory=dict)
    size: float | None = None
    hidden: tuple[str, ...] = ()  # "recipe" or "recipe causal", "recipe full"
    recipes: tuple[str, ...] = RECIPES
    masks: tuple[bool, ...] = (False, True)

    def is_hidden(self, recipe: str, causal: bool) -> bool:
        return recipe in self.hidden or f"{recipe} {'causal' if causal else 'full'}" in self.hidden

    def output(self, call: Made) -> Tensor:
        out = self.kernel(call)
        return out if self.after is None else cast(self.after(out, call), call.recipe.out_format)


def _lose(*keys: int) -> Callable[[Tensor], Tensor]:
    def without(seen: Tensor) -> Tensor:
        seen = seen.clone()
        seen[..., list(keys)] = False
        return seen

    return without


def _edge(by: int, side: str) -> Callable[[Tensor], Tensor]:
    def moved(seen: Tensor) -> Tensor:
        beside = torch.zeros_like(seen)
        step = by if side == "right" else -by
        if step > 0:
            beside[..., step:] = seen[..., :-step]
        else:
            beside[..., :step] = seen[..., -step:]
        if by > 0:
            return seen | beside
        count = seen.sum(
            -1, keepdim=True
        )  # rows whose window is cut short by the first or last key keep theirs
        return torch.where((count == count.max()) | (side == "right"), seen & beside, seen)

    return moved


def _stale(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :, -64:] = x[:, :, -128:-64]
    return x


def _head0(s: Tensor, name: str, which: str) -> Tensor:
    return s[:, :1].expand_as(s) if name == which else s


def _mean_seen(out: Tensor, call: Made) -> Tensor:
    seen = visible(call).float()
    v = call.stored[2].values.float()
    v = v.repeat_interleave(out.shape[1] // v.shape[1], 1)
    return seen @ v / seen.sum(-1, keepdim=True).clamp(min=1)


_N = 256
_WINDOW = {"window": (63, 0)}
_LARGE = {"shape": (1, 4, 512, 64)}


def _extras(seed: int = 7) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "bias": torch.randn(1, 4, _N, _N, generator=g),
        "mask": torch.rand(1, 4, _N, _N, generator=g) < 0.7,
        "sinks": torch.tensor([2.0, 3.0, 4.0, 5.0]),
        "kv_lens": torch.tensor([_N, 200]),
    }


def _with(*names: str) -> dict[str, Any]:
    return {"extras": {n: _extras()[n] for n in names}}


PLANTS = (
    Plant("scale + 0.2 %", ("scale",), Kernel(scale=1.002), call=_LARGE, size=math.log(1.002)),
    Plant("scale − 0.2 %", ("scale",), Kernel(scale=0.998), call=_LARGE, size=math.log(0.998)),
    Plant("scale omitted", ("scale omitted",), Kernel(scale=8.0)),
    Plant("scale twice", ("scale twice",), Kernel(scale=0.125)),
    Plant("key 37 lost", ("key 37 lost",), Kernel(seen=_lose(37))),
    Plant("next key leaks", ("right + 1", "next key"), Kernel(seen=_edge(1, "right")), masks=(True,)),
    Plant("last key lost", ("right − 1", "last key"), Kernel(seen=_edge(-1, "right")), masks=(True,)),
    Plant("last key lost", ("last key", f"key {_N - 1} lost"), Kernel(seen=_lose(_N - 1)), masks=(False,)),
    Plant(
        "heads swapped", ("heads swapped",),
        after=lambda o, c: o.unflatten(1, (-1, 2)).flip(2).flatten(1, 2),
    ),
    Plant(
        "GQA interleaved", ("GQA interleaved",), Kernel(kv_index=lambda i, n: torch.arange(len(i)) % n),
        call={"kv_heads": 2},
    ),
    Plant("stale block", ("stale block of 64",), Kernel(k=_stale, v=_stale)),
    Plant("stale V block", ("stale V block of 64",), Kernel(v=_stale)),
    Plant("rotated V block", ("V rotated by 64",), Kernel(v=lambda v: v.roll(-64, 2))),
    Plant(
        "K not descaled", ("k not descaled",), Kernel(scales=lambda s, n: torch.ones_like(s) if n == "k" else s),
        recipes=("fp8_e4m3",),
    ),
    Plant(
        "V not descaled", ("v not descaled",), Kernel(scales=lambda s, n: torch.ones_like(s) if n == "v" else s),
        recipes=("fp8_e4m3",),
    ),
    Plant(
        "V scale of head 0", ("scale of v of head 0",), Kernel(scales=lambda s, n: _head0(s, n, "v")),
        recipes=("fp8_e4m3",),
    ),
    Plant(
        "K scale of head 0", ("scale of k of head 0",), Kernel(scales=lambda s, n: _head0(s, n, "k")),
        recipes=("fp8_e4m3",),
    ),
    Plant("P scale not undone", ("P scale",), Kernel(p_scale=256.0, unscale=1.0)),
    Plant("P scale 224 undone as 256", ("shrink",), Kernel(p_scale=224.0, unscale=256.0), size=-1 / 8),
    Plant("l from the other P", ("row sum after cast",), Kernel(sum_of="after")),
    Plant("FP16 accumulator", ("fp16 accumulator",), Kernel(acc=torch.float16)),
    Plant("BF16 accumulator", ("bf16 accumulator",), Kernel(acc=torch.bfloat16)),
    Plant("BF16 running sum", ("bf16 running sum", "row sum"), Kernel(running=torch.bfloat16)),
    Plant("P cut", ("truncated P",), Kernel(cut_p=True), recipes=("bf16", "fp16", "fp8_e4m3")),
    Plant("O cut", ("truncated O",), Kernel(cut_o=True), recipes=("bf16", "fp16", "fp8_e4m3"), size=1.0),
    Plant("no rescale", ("no rescale, blocks of 64",), Kernel(rescale=False)),
    Plant("sink dropped", ("no sink",), Kernel(sinks=False), call=_with("sinks")),
    Plant("bias dropped", ("no bias",), Kernel(bias=torch.zeros_like), call=_with("bias")),
    Plant("bias scaled", ("bias scaled",), Kernel(bias=lambda b: b / 8), call=_with("bias")),
    Plant("bias − 1 %", ("bias",), Kernel(bias=lambda b: 0.99 * b), call=_with("bias"), size=0.01),
    Plant("softcap ignored", ("no softcap",), Kernel(softcap=None), call={"softcap": 2.0}),
    Plant("softcap + 1 %", ("softcap",), Kernel(softcap=2.02), call={"softcap": 2.0}, size=math.log(1.01)),
    Plant("window left + 1", ("left + 1",), Kernel(seen=_edge(1, "left")), call=_WINDOW),
    Plant("window left − 1", ("left − 1",), Kernel(seen=_edge(-1, "left")), call=_WINDOW),
    Plant(
        "alignment swapped", ("alignment",),
        Kernel(seen=lambda s: torch.ones_like(s).tril()), call={"kv_len": 300}, masks=(True,),
    ),
    Plant(
        "kv_lens ignored", ("no kv_lens",), Kernel(seen=torch.ones_like),
        call={"shape": (2, 4, _N, 64), **_with("kv_lens")}, masks=(False,),
    ),
    Plant("mask inverted", ("mask inverted",), call=_with("mask"), masks=(False,), kernel=Kernel(seen=lambda s: ~s)),
    Plant("mask ignored", ("no mask",), call=_with("mask"), masks=(False,), kernel=Kernel(seen=torch.ones_like)),
    Plant("mean of V", ("mean of V",), after=_mean_seen),
    Plant("all zeros", ("all zeros",), after=lambda o, c: torch.zeros_like(o)),
    Plant("not normalised", ("not normalised",), Kernel(normalise=False)),
    Plant("normalised by 1.01", ("shrink",), after=lambda o, c: o / 1.01, size=1 / 1.01 - 1),
)  # fmt: skip


def planted(
    plant: Plant, recipe: str, causal: bool, seed: int = 0, size: tuple[int, ...] = (1, 4, _N, 64)
) -> tuple[Made, Tensor]:
    """A call and the faulty output; extras are cut to the size."""
    options: dict[str, Any] = {"shape": size, "causal": causal, **plant.call}
    if options.get("shape") != size and size[2] != _N:
        options["shape"] = (*options["shape"][:2], *size[2:])
    if "window" in options:
        options["causal"] = False
    n = options["shape"][2]
    extras = {name: x[..., :n, :n] if x.dim() == 4 else x for name, x in options.pop("extras", {}).items()}
    if "kv_lens" in extras:
        extras["kv_lens"] = torch.tensor([n, 3 * n // 4])
    call = made(**options, extras=extras, recipe=recipe, seed=seed)
    return call, plant.output(call)


__all__ = ["KINDS", "PLANTS", "RECIPES", "Kernel", "Made", "Plant", "made", "planted", "replace"]
