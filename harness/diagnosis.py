"""Which fault is it? The one that explains most of the error, weighed by what was expected.

For an error e with expected variance σ² a fault of output g_F removes, per head and row,

    in degrees      ⟨e, g⟩²/⟨g, g⟩           θ̂ = ⟨e, g⟩/⟨g, g⟩, g a direction
    there or not    2⟨e, g⟩ − ⟨g, g⟩         g = o_F − o

of ⟨e, e⟩, all sums weighed by 1/σ². What is compared is the error less that of the twin that leaves least of it, so
that what the recipe does to every kernel plays no part. Two faults explain it equally when the difference is below what
the threshold of a single statistic could tell, τ², or below 1 % of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.directions import DIRECTIONS, Call, Projection, key_powers, project
from harness.faults import BLOCKS, Subject, cut_p, doubled, faults, without
from harness.operands import Extras
from harness.quantize import Stored
from harness.recipe import Recipe
from harness.records import Diagnosis
from harness.significance import threshold
from harness.spec import Shape
from harness.truth import Truth
from harness.twins import Twins

PAIRS = 2**18  # scores of the part of a call that is diagnosed
LEAST = 16  # rows of it
EXPLAINS = 0.5  # of the error, below which a fault does not explain it
TIE = 0.01
RIVALS = 4
SIGMAS = 6  # of a sum of squares, that chance does not reach
NOTHING = "unknown"


@dataclass(frozen=True)
class _Suspect:
    name: str
    what: str
    gain: float
    size: float
    degrees: bool


def diagnose(
    call: Call, out: Tensor, stored: tuple[Stored, Stored, Stored], sizes: Mapping[str, float]
) -> Diagnosis:
    """The likeliest fault of `out` `[B, H, L, E]`, or that none known explains it. Non-finite places are left out.
    `sizes`: of the directions, as fitted to all rows looked at; a part's own are the less certain the smaller it is.
    """
    part = _Part(call, out, stored)
    suspects = _ranked(list(part.suspects()))
    total = part.total
    best = suspects[0] if suspects else _Suspect(NOTHING, "", 0.0, 0.0, False)
    tau = threshold(len(suspects))
    explained = best.gain / total if total > 0 else 0.0
    rows = part.row_by_row() if explained < EXPLAINS else best
    if rows.gain > best.gain + tau**2 and rows.gain >= part.least() * total:
        return Diagnosis(rows.name, rows.what, rows.size, rows.gain**0.5, rows.gain / total)
    if best.gain <= tau**2 or explained < part.least():
        near = "" if best.name == NOTHING else f"; nearest: {best.what} ({best.name}), {explained:.0%}"
        return Diagnosis(NOTHING, f"no known fault explains it{near}", 0.0, 0.0, explained)
    rivals = [s for s in suspects[1:] if _equal(best, s, tau)]
    names = tuple(s.name for s in rivals[:RIVALS])
    size = sizes.get(best.name, best.size) if best.degrees else best.size
    return Diagnosis(best.name, best.what, size, best.gain**0.5, explained, names)


def _equal(best: _Suspect, other: _Suspect, tau: float) -> bool:
    return abs(best.gain - other.gain) < max(tau**2, TIE * max(best.gain, other.gain))


def _ranked(suspects: list[_Suspect]) -> list[_Suspect]:
    """By gain; of those that explain as much as the first, one that is there or not comes first: its size was not
    fitted."""
    best: dict[str, _Suspect] = {}
    for suspect in suspects:
        if suspect.name not in best or suspect.gain > best[suspect.name].gain:
            best[suspect.name] = suspect
    ranked = sorted(best.values(), key=lambda s: -s.gain)
    tau = threshold(len(ranked))
    return sorted(
        ranked, key=lambda s: (not _equal(ranked[0], s, tau), s.degrees if _equal(ranked[0], s, tau) else 0)
    )


class _Part:
    """A part of the call small enough to be computed a hundred times."""

    def __init__(self, call: Call, out: Tensor, stored: tuple[Stored, Stored, Stored]) -> None:
        shape = call.shape
        self._choose(shape, call, out)
        self.call = self._cut(call)
        q, k, v = (self._stored(x, name) for x, name in zip(stored, "qkv", strict=True))
        self.stored = (q, k, v)
        scales = (q.scale, k.scale, v.scale)
        self.subject = Subject(
            self.call.q,
            self.call.k,
            self.call.v,
            call.spec,
            self.call.extras,
            scales,
            self.rows.start,
            shape.q_len,
        )
        self.out, self.truth = self._outputs(out.double()), self.call.truth.out
        whole = call.truth.out
        self.transposed = self._outputs(whole.transpose(1, 2).reshape(whole.shape))
        usable = torch.isfinite(self.call.variance) & torch.isfinite(self.out) & torch.isfinite(self.truth)
        variance = torch.where(usable, self.call.variance, 0.0)
        floor = 1e-3 * variance.mean(-1, keepdim=True)
        variance = torch.maximum(variance, floor)
        self.weight = torch.where(usable & (variance > 0), 1 / variance.clamp(min=1e-300), 0.0)
        self.out = torch.where(usable, self.out, self.truth.nan_to_num(0.0, 0.0, 0.0))
        self.base = Twins(self.stored, self.call.spec, self.call.recipe, self.call.extras, BLOCKS)
        self.twin = self._finite(min((self.base[i] for i in range(len(self.base))), key=self._distance))
        self.e = torch.where(self.weight > 0, self.out - self.twin, 0.0)
        self.total = self._energy(self.e)
        self.noise = float((self.weight > 0).sum())

    def _choose(self, shape: Shape, call: Call, out: Tensor) -> None:
        """Rows at the aligned end, of all heads and sequences as long as LEAST rows of each fit: many faults take one
        head's or sequence's numbers for another's. Else the sequences, then neighbouring heads, that err most."""
        row = max(1, shape.S)
        rows = min(shape.q_len, max(LEAST, PAIRS // (row * max(1, shape.batch * shape.heads))))
        bottom = call.spec.align == "bottom-right"
        self.rows = slice(shape.q_len - rows, shape.q_len) if bottom else slice(0, rows)
        fit = PAIRS // (row * max(1, rows))  # heads, of all sequences
        e = (out.double() - call.truth.out)[:, :, self.rows].square().nan_to_num(0.0, 0.0, 0.0).sum((2, 3))
        count = min(shape.batch, max(1, fit // shape.heads))
        self.batches = e.sum(1).topk(count).indices.sort().values
        kv = min(shape.Hkv, max(2, fit // shape.group))
        worst = e[self.batches].sum(0).reshape(shape.Hkv, shape.group).sum(1)
        first = min(int(worst.argmax()) // kv * kv, shape.Hkv - kv) if worst.numel() else 0
        self.kv, self.q = slice(first, first + kv), slice(first * shape.group, (first + kv) * shape.group)

    def least(self) -> float:
        """The share a fault must explain: half of an error that is larger than what is expected of two honest runs."""
        return EXPLAINS if self.total > 4 * self.noise else 0.0

    def _energy(self, x: Tensor) -> float:
        return float((torch.where(self.weight > 0, x, 0.0) ** 2 * self.weight).sum())

    def _finite(self, twin: Tensor) -> Tensor:
        return torch.where(torch.isfinite(twin), twin, self.truth)

    def _distance(self, twin: Tensor) -> float:
        return self._energy(self.out - self._finite(twin))

    def _outputs(self, x: Tensor) -> Tensor:
        return x[self.batches][:, self.q, self.rows]

    def _stored(self, x: Stored, name: str) -> Stored:
        heads = self.q if name == "q" else self.kv
        rows = self.rows if name == "q" else slice(None)

        def cut(t: Tensor) -> Tensor:
            t = t[self.batches] if t.shape[0] > 1 else t
            t = t[:, heads] if t.shape[1] > 1 else t
            return t[:, :, rows] if t.shape[2] > 1 else t

        return replace(x, codes=cut(x.codes), scale=None if x.scale is None else cut(x.scale))

    def _cut(self, call: Call) -> Call:
        extras = call.extras
        cut = {}
        for name in ("mask", "bias"):
            x = getattr(extras, name)
            if x is not None:
                x = x[self.batches] if x.shape[0] > 1 else x
                x = x[:, self.q] if x.shape[1] > 1 else x
                cut[name] = x[:, :, self.rows] if x.shape[2] > 1 else x
        if extras.sinks is not None:
            cut["sinks"] = extras.sinks[self.q]
        if extras.kv_lens is not None:
            cut["kv_lens"] = extras.kv_lens[self.batches]
        out, lse, row_max = (self._outputs(x) for x in (call.truth.out, call.truth.lse, call.truth.row_max))
        truth = Truth(out, lse, row_max)
        k, v = (x[self.batches][:, self.kv] for x in (call.k, call.v))
        return Call(
            self._outputs(call.q),
            k,
            v,
            call.spec,
            Extras(**cut),
            call.recipe,
            truth,
            self._outputs(call.variance),
        )

    def suspects(self) -> Iterator[_Suspect]:
        along = project(replace(self.call, variance=1 / self.weight.clamp(min=1e-300)), [self.e])
        for i, name in enumerate(along.names):
            f, a = along.f[i], along.a[0][i]
            power, cross = float((f * f).sum()), float((a * f).sum())
            if power > 0:
                yield _Suspect(name, DIRECTIONS[name], cross * cross / power, cross / power, True)
        for name, what, make in faults(self.subject):
            yield self._discrete(name, what, make() - self.truth)
        if self.truth.shape[1] > 1 and self.truth.shape[2] > 1:
            what = "the output is laid out [B, L, H, E] but read as [B, H, L, E]"
            yield self._discrete("heads and tokens transposed", what, self.transposed - self.truth)
        yield from self._one_key(along)
        if "truncated P" in along.names:
            for size in (None, *(n for n in BLOCKS if n < self.subject.k.shape[2])):
                g = cut_p(self.subject, self.call.recipe, size)
                yield self._discrete("truncated P", DIRECTIONS["truncated P"], g)
        yield from self._variants()

    def _one_key(self, along: Projection) -> Iterator[_Suspect]:
        """The key that explains most when lost or counted twice."""
        power, _ = key_powers(replace(self.call, variance=1 / self.weight.clamp(min=1e-300)))
        total = along.key_sum[0]
        gain = torch.where(power > 0, total * total / power.clamp(min=1e-300), 0.0)
        if not gain.numel():
            return
        key = int(gain.argmax())
        if float(total[key]) > 0:
            name, what = f"key {key} lost", f"key {key} is lost"
            output = self.subject.over(without(self.subject, slice(key, key + 1)))
        else:
            name, what = f"key {key} twice", f"key {key} is counted twice"
            output = doubled(self.subject, slice(key, key + 1))
        yield self._discrete(name, what, output - self.truth)

    def _discrete(self, name: str, what: str, g: Tensor) -> _Suspect:
        g = torch.where((self.weight > 0) & torch.isfinite(g), g, 0.0)
        power, cross = self._energy(g), float((self.e * g * self.weight).sum())
        return _Suspect(name, what, 2 * cross - power, cross / power if power else 0.0, False)

    def _variants(self) -> Iterator[_Suspect]:
        """Twins under a recipe that differs in one thing, less the twin of the same arrangement."""
        for name, what, recipe in variants(self.call.recipe):
            changed = Twins(self.stored, self.call.spec, recipe, self.call.extras, BLOCKS)
            for i in range(len(changed)):
                yield self._discrete(name, what, changed[i] - self.base[i])

    def row_by_row(self) -> _Suspect:
        """A factor for each row: no fault by itself, but the trace of a denominator that is imprecise. Its gain is less
        what as many factors find in noise."""
        along = project(replace(self.call, variance=1 / self.weight.clamp(min=1e-300)), [self.e])
        i = along.names.index("shrink")
        a, f = along.a[0][i], along.f[i]
        a, f = a[f > 0], f[f > 0]
        gain = float((a * a).sum()) - len(a) - SIGMAS * (2 * len(a)) ** 0.5
        size = float((a / f).square().mean().sqrt()) if len(a) else 0.0
        return _Suspect("row sum", "each row is off by a factor of its own, as its sum is", gain, size, True)


def variants(recipe: Recipe) -> Iterator[tuple[str, str, Recipe]]:
    """Recipes one mistake away."""
    at = dict(recipe.at)
    if recipe.p_scale != 1:
        yield "P scale 1", "P is cast without its scale", replace(recipe, p_scale=1.0)
    if recipe.normalise == "late":
        other = "after" if recipe.row_sum == "before" else "before"
        yield f"row sum {other} cast", f"the row sum takes P {other} its cast", replace(recipe, row_sum=other)
    for fmt in ("fp16", "bf16"):
        stages = (("acc", "accumulator"), ("row_sum", "running sum"), ("scores_raw", "q·k"), ("probs", "P"))
        for stage, name in stages:
            if at.get(stage, recipe.base) == recipe.base:
                changed = replace(recipe, at={**at, stage: fmt})
                yield f"{fmt} {name}", f"the {name} is held in {fmt.upper()}", changed
