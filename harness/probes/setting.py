"""One probed call: how its inputs are made, cut and stored, and how an output is held to bits or to a ceiling."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.error_model import Expectation, expect
from harness.operands import Extras, slice_rows_keys
from harness.probes.runs import Output, Run, Tensors
from harness.quantize import Stored, quantize
from harness.recipe import TENSORS, Recipe
from harness.records import Status
from harness.result import Refusal
from harness.spec import AttentionSpec, Shape
from harness.truth import Truth, reference

MOST_SCORES = 2**16
BITS = "the same bits"


@dataclass(frozen=True)
class Probe:
    """`what` is asked, `expected` and `seen` are the answer in words, `where` its worst element (b, h, i, c). REFUSED:
    these options leave nothing to ask, or the implementation does not claim the call; `detail` says which."""

    name: str
    what: str
    outcome: Status
    expected: str = ""
    seen: str = ""
    where: tuple[int, ...] | None = None
    detail: str = ""

    def __str__(self) -> str:
        at = "" if self.where is None else f" at {self.where}"
        told = f"should be {self.expected}, is {self.seen}{at}" if self.expected else ""
        return f"{self.outcome.value} {self.name}: " + "; ".join(x for x in (told, self.detail) if x)


@dataclass(frozen=True)
class Finding:
    """An answer before it has a name."""

    ok: bool
    expected: str
    seen: str
    where: tuple[int, ...] | None = None
    detail: str = ""


class NothingToAsk(Refusal):
    """The options leave this probe nothing to ask."""


@dataclass(frozen=True)
class Setting:
    """What is probed, and the call that the probes vary."""

    run: Run
    shape: Shape
    spec: AttentionSpec
    recipe: Recipe
    extras: Extras
    seed: int

    @property
    def positioned(self) -> bool:
        """Whether it matters where a key stands."""
        return self.spec.causal or self.spec.window is not None

    # --- inputs ------------------------------------------------------------------------------------------------------

    def generator(self, name: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self.seed}\0{name}".encode()).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))

    def normal(self, name: str, tensor: str, mean: float = 0.0) -> Tensor:
        """q, k or v of standard normals."""
        return torch.from_numpy(mean + self.generator(name).standard_normal(self.shape.tensor(tensor)))

    def coarse(self, name: str, tensor: str, low: int, high: int) -> Tensor:
        """Integers over 4: products and sums of few are exact in every format, and none is subnormal."""
        return torch.from_numpy(self.generator(name).integers(low, high, self.shape.tensor(tensor)) / 4.0)

    def store(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        a, b, c = (quantize(x, n, self.recipe) for x, n in zip((q, k, v), TENSORS, strict=True))
        return a, b, c

    @cached_property
    def base(self) -> Tensors:
        """Normal q and k, v of mean ½: lost mass moves it. Truth, expectation and output of it are kept."""
        return self.store(self.normal("q", "q"), self.normal("k", "k"), self.normal("v", "v", 0.5))

    @cached_property
    def base_truth(self) -> tuple[Truth, Expectation]:
        return self.expect(self.base)

    @cached_property
    def base_output(self) -> Output:
        return self.call(self.base)

    @cached_property
    def visible(self) -> Tensor:
        """Which keys each row sees, bool `[B, H, L, S]`, by the truth's rule: the weights of equal scores."""
        s = self.shape
        one = torch.zeros(s.batch, s.heads, s.q_len, 1), torch.zeros(s.batch, s.Hkv, s.S, 1)
        eye = torch.eye(s.S, dtype=torch.float64).expand(s.batch, s.Hkv, -1, -1)
        bias = self.extras.bias
        flat = None if bias is None else torch.where(bias == -math.inf, bias, 0.0)
        rules = replace(self.spec, softcap=None, empty_row="zero")
        return reference(*one, eye, rules, **replace(self.extras, bias=flat, sinks=None).as_options()).out > 0

    # --- answers -----------------------------------------------------------------------------------------------------

    def call(
        self, stored: Tensors, spec: AttentionSpec | None = None, extras: Extras | None = None
    ) -> Output:
        """The implementation's output in FP64, checked for its shape."""
        spec, extras = spec or self.spec, self.extras if extras is None else extras
        out, lse = self.run(stored, spec, extras)
        size = (*stored[0].codes.shape[:3], stored[2].codes.shape[3])
        for name, x, want in (("out", out, size), ("lse", lse, size[:3])):
            if x is not None and tuple(x.shape) != want:
                raise ValueError(f"{name} is {tuple(x.shape)}; allowed: {want}")
        return Output(out.detach().double(), None if lse is None else lse.detach().double())

    def expect(
        self, stored: Tensors, spec: AttentionSpec | None = None, extras: Extras | None = None
    ) -> tuple[Truth, Expectation]:
        """The truth of a call, and the error model's ceiling."""
        q, k, v = (x.values for x in stored)
        options = (self.extras if extras is None else extras).as_options()
        scales = (stored[0].scale, stored[1].scale, stored[2].scale)
        return expect(q, k, v, spec or self.spec, self.recipe, self.run.form, **options, scales=scales)

    def against_truth(self, stored: Tensors) -> Finding:
        """A call within its ceiling."""
        truth, expected = self.expect(stored)
        return within(self.call(stored).out, truth.out, expected.ceiling)


def within(got: Tensor, want: Tensor, bound: Tensor, detail: str = "") -> Finding:
    """`got` has `want`'s classes and is no farther from it than `bound`, element by element."""
    free = torch.isinf(bound)  # the recipe promises nothing there
    same = (got == want) | (torch.isnan(got) & torch.isnan(want))
    comparable = torch.isfinite(got) & torch.isfinite(want)
    share = torch.where(comparable, (got - want).abs() / bound, math.inf)
    share = share.masked_fill(same | free, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    if not share.numel():
        return Finding(True, "nothing", "nothing", None, detail)
    if bool(free.all()):
        raise NothingToAsk(
            "the recipe promises nothing here: it does not hold scores as large to a fraction of 1"
        )
    index = int(share.argmax())
    at = tuple(int(n) for n in torch.unravel_index(torch.tensor(index), share.shape))
    if bool(free.any()):
        note = f"{int(free.sum())} of {free.numel()} elements have no bound in this recipe"
        detail = "; ".join(x for x in (detail, note) if x)
    expected = f"{float(want[at]):.6g} ± {float(bound[at]):.2g}"
    return Finding(float(share[at]) <= 1.0, expected, f"{float(got[at]):.6g}", at, detail)


def same_bits(got: Tensor, want: Tensor, rows: Tensor | None = None, detail: str = "") -> Finding:
    """Every element of these rows `[B, H, L]` equal; a zero may be of either sign, and NaN equals itself."""
    differs = ~((got == want) | (torch.isnan(got) & torch.isnan(want)))
    if rows is not None:
        differs = differs & rows[..., None]
    if not bool(differs.any()):
        return Finding(True, BITS, BITS, None, detail)
    at = tuple(int(n) for n in differs.nonzero()[0])
    seen = f"{float(got[at]):.9g} for {float(want[at]):.9g}; {int(differs.sum())} of {differs.numel()} differ"
    return Finding(False, BITS, seen, at, detail)


def cut(
    stored: Tensors, extras: Extras, *, batch: slice | None = None, heads: slice | None = None,
    rows: slice | None = None, keys: slice | None = None,
) -> tuple[Tensors, Extras]:  # fmt: skip
    """Part of a call: sequences, kv heads with their group of query heads, rows, keys."""
    q, k, v = stored
    group = q.codes.shape[1] // k.codes.shape[1]
    of_q = None if heads is None else slice(heads.start * group, heads.stop * group)
    parts = (_cut(q, batch, of_q, rows), _cut(k, batch, heads, keys), _cut(v, batch, heads, keys))
    whole = slice(None)
    some: dict[str, Any] = {}
    for name in ("mask", "bias"):
        x = getattr(extras, name)
        if x is not None:
            x = _axes(x, batch, of_q)
            some[name] = slice_rows_keys(x, rows or whole, keys or whole)
    if extras.sinks is not None and of_q is not None:
        some["sinks"] = extras.sinks[of_q]
    if extras.kv_lens is not None and batch is not None:
        some["kv_lens"] = extras.kv_lens[batch]
    return parts, replace(extras, **some)


def _cut(x: Stored, batch: slice | None, heads: slice | None, tokens: slice | None) -> Stored:
    def part(t: Tensor) -> Tensor:
        t = _axes(t, batch, heads)
        return t if tokens is None or t.shape[2] == 1 else t[:, :, tokens]

    codes = _axes(x.codes, batch, heads)
    codes = codes if tokens is None else codes[:, :, tokens]
    return replace(x, codes=codes, scale=None if x.scale is None else part(x.scale))


def _axes(t: Tensor, batch: slice | None, heads: slice | None) -> Tensor:
    t = t if batch is None or t.shape[0] == 1 else t[batch]
    return t if heads is None or t.shape[1] == 1 else t[:, heads]
