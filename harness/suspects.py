"""What is suspected of an error: the directions, the faults that are there or not, and twins of other recipes, each
with what it explains row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from harness.directions import DIRECTIONS, Call, Projection, key_powers, project
from harness.faults import BLOCKS, Subject, cut_p, doubled, faults, leak, value_missing, without
from harness.formats import FORMATS, get_format
from harness.part import Part
from harness.quantize import Stored
from harness.rounding import round_to
from harness.significance import threshold
from harness.twins import FIRST, Twins
from harness.variants import orders, variants

CUT = (0.25, 2.0)  # sizes of a truncation: it is there (1) or not
CUT_EXPLAINS = (
    0.6  # of the error of a cut result, whose place within its ulp is anywhere: mean² ÷ mean square
)
KEPT = 2**16  # elements of a part whose suspects (some 250, FP64: 130 MB) are kept for the next output
FITS = 4  # steps to the size of a scale that is far off
FAR = 0.02  # log scale from which a direction is no longer straight


Wrong = tuple[str, str, Tensor]


@dataclass(frozen=True)
class Suspect:
    """`power` Σg²/σ² and `cross` Σeg/σ² of each row `[B, H, rows]`. `degrees`: its size is fitted to them; `tried`: the
    size whose output g is. `explainable`: the share of the error that it explains if it is all that is wrong."""

    name: str
    what: str
    power: Tensor
    cross: Tensor
    degrees: bool
    explainable: float = 1.0
    tried: float | None = None
    whole: bool = (
        False  # an output in FP64, there or not, that rounds nothing: it leaves nothing but rounding
    )
    within: Tensor | None = None  # rows that it may be in at all, by their values

    def gain(self, power: Tensor, cross: Tensor) -> Tensor:
        """What it explains where these are its sums."""
        if not self.degrees:
            return 2 * cross - power
        fit = torch.where(power > 0, cross / power.clamp(min=1e-300), 0.0)
        cut = (fit >= CUT[0]) & (fit <= CUT[1])
        whole = cross * fit
        return torch.where(cut, whole, 0.0) if self.name.startswith("truncated") else whole

    @property
    def size(self) -> float:
        if self.tried is not None:
            return self.tried
        power = float(self.power.sum())
        return float(self.cross.sum()) / power if power else 0.0

    @property
    def fitted(self) -> float:
        """How free its size is: 0 of what is there or not, ½ of a cut that fits as one, 1."""
        if self.name.startswith("truncated") and 0.8 < self.size < 1.2:
            return 0.5
        return float(self.degrees or self.tried is not None)

    def narrowed(self, hit: Tensor) -> Suspect:
        return replace(self, power=self.power * hit, cross=self.cross * hit)


class Setting:
    """A part of a call and what is suspected there whatever the output: shared by all outputs judged on the call."""

    def __init__(self, part: Part, call: Call, stored: tuple[Stored, Stored, Stored]) -> None:
        self.part, self.call = part, part.call(call)
        self.of, self.whole = call, stored
        q, k, v = (part.stored(x, name) for x, name in zip(stored, "qkv", strict=True))
        self.stored, self.truth = (q, k, v), self.call.truth.out
        whole = call.truth.out
        self.transposed = part.outputs(whole.transpose(1, 2).reshape(whole.shape))
        self.subject = Subject(
            self.call.q, self.call.k, self.call.v, self.call.spec, self.call.extras, (q.scale, k.scale, v.scale),
            part.rows.start, call.shape.q_len,
        )  # fmt: skip
        self.base = Twins(
            self.stored, self.call.spec, self.call.recipe, self.call.extras, BLOCKS, split=False
        )
        self.is_whole = self.truth.shape == whole.shape
        self._kept: list[Wrong] | None = None
        # Names of faults whose outputs are made in FP64; of those that pass through a format, some values lie so near
        # the middle of two of its numbers that a kernel's own rounding before it decides.
        self.exact: set[str] = set()

    def wrongs(self) -> Iterator[Wrong]:
        """Every fault that is there or not: its name, a sentence, and what it moves the output by."""
        if self._kept is not None:
            yield from self._kept
            return
        kept, keep = [], self.truth.numel() <= KEPT
        for name, what, g in self._wrongs():
            # NaN says nothing: the gain of these places is 0.
            g = torch.where(torch.isfinite(g), g, 0.0)
            if keep:
                kept.append((name, what, g))
            yield name, what, g
        self._kept = kept if keep else None

    def _wrongs(self) -> Iterator[Wrong]:
        for name, what, make in faults(self.subject):
            if not FORMATS.keys() & set(name.replace(",", "").split()):
                self.exact.add(name)
            yield name, what, make() - self.truth
        apart = self.call.extras.rows is not None  # the other rows' outputs are not known
        if self.truth.shape[1] > 1 and self.truth.shape[2] > 1 and not apart:
            what = "the output is laid out [B, L, H, E] but read as [B, H, L, E]"
            yield "heads and tokens transposed", what, self.transposed - self.truth
        recipe = self.call.recipe
        if get_format(recipe.format_of("probs")).precision < get_format(recipe.base).precision:
            for size in (None, *(n for n in BLOCKS if n < self.subject.k.shape[2])):
                yield "truncated P", DIRECTIONS["truncated P"], cut_p(self.subject, recipe, size)
        for name, what, changed in variants(recipe):
            twins = Twins(self.stored, self.call.spec, changed, self.call.extras, BLOCKS, split=False)
            for i in range(len(twins)):
                yield name, what, twins[i] - self.base[i]

    @cached_property
    def orders(self) -> list[Wrong]:
        """Outputs with P normalised before its cast where the recipe does it after P·V, or the other way round."""
        return [
            (name, what, Twins(self.stored, self.call.spec, r, self.call.extras, (), split=False)[0])
            for name, what, r in orders(self.call.recipe)
        ]

    def arrangement(self, twin: int) -> str:
        """Which of the twins it is."""
        if not twin:
            return FIRST
        sizes = [n for n in BLOCKS if n < self.subject.k.shape[2]]
        return f"online_softmax in blocks of {[*sizes, max(BLOCKS)][twin - 1]} keys"

    @cached_property
    def leak(self) -> Tensor:
        return leak(self.subject)


class Trial:
    """An output in a setting: its error less that of the nearest twin, and all that is suspected of it."""

    def __init__(self, setting: Setting, out: Tensor) -> None:
        self.setting, self.call, self.subject = setting, setting.call, setting.subject
        self.stored, self.base = setting.stored, setting.base
        self.truth, out = self.call.truth.out, setting.part.outputs(out.double())
        usable = torch.isfinite(self.call.variance) & torch.isfinite(out) & torch.isfinite(self.truth)
        variance = torch.where(usable, self.call.variance, 0.0)
        variance = torch.maximum(variance, 1e-3 * variance.mean(-1, keepdim=True))
        self.weight = torch.where(usable & (variance > 0), 1 / variance.clamp(min=1e-300), 0.0)
        self.out = torch.where(usable, out, self.truth.nan_to_num(0.0, 0.0, 0.0))
        self.nearest = min(range(len(self.base)), key=lambda i: self._distance(self.base[i]))
        self.twin = self._finite(self.base[self.nearest])
        self.e = torch.where(self.weight > 0, self.out - self.twin, 0.0)
        self.total = self._energy(self.e)
        self.noise = float((self.weight > 0).sum())

    @cached_property
    def against_truth(self) -> float:
        """Σe²/σ² of the error itself, no twin's taken off."""
        return self._energy(self.out - self.truth.nan_to_num(0.0, 0.0, 0.0))

    def _energy(self, x: Tensor) -> float:
        return float((torch.where(self.weight > 0, x, 0.0) ** 2 * self.weight).sum())

    def _finite(self, twin: Tensor) -> Tensor:
        return torch.where(torch.isfinite(twin), twin, self.truth)

    def _distance(self, twin: Tensor) -> float:
        return self._energy(self.out - self._finite(twin))

    @cached_property
    def weighed(self) -> Call:
        """The part under variances that are all usable."""
        return replace(self.call, variance=1 / self.weight.clamp(min=1e-300))

    @cached_property
    def along(self) -> Projection:
        return project(self.weighed, [self.e])

    def suspects(self) -> Iterator[Suspect]:
        for name in self.along.names:
            yield self.direction(name)
        yield from self._far_scale()
        of_key, of_value = self._one_key()
        yield from of_key
        exact = self.setting.exact
        for name, what, g in self.setting.wrongs():
            yield replace(self.discrete(name, what, g), whole=name in exact, within=self.within(name))
        for name, what, out in self.setting.orders:  # as a whole: no twin of the recipe has its roundings
            yield self.discrete(name, what, self._finite(out) - self.twin)
        yield from of_value
        yield from self._leak()

    def within(self, name: str) -> Tensor | None:
        """The rows that a fault of this name may be in: of an output held in a format, those of its numbers alone."""
        fmt = name.removesuffix(" output")
        if fmt == name or fmt not in FORMATS:
            return None
        kept = round_to(self.out, fmt, overflow="saturate") == self.out
        return (kept | (self.weight == 0)).all(-1)

    def direction(self, name: str) -> Suspect:
        i = self.along.names.index(name)
        f, a = (x.view(self.truth.shape[:3]) for x in (self.along.f[i], self.along.a[0][i]))
        share = CUT_EXPLAINS if name == "truncated O" else 1.0
        return Suspect(name, DIRECTIONS[name], f * f, a * f, True, share)

    def discrete(self, name: str, what: str, g: Tensor) -> Suspect:
        g = torch.where((self.weight > 0) & torch.isfinite(g), g, 0.0)
        weighed = g * self.weight
        share = CUT_EXPLAINS if name.startswith("truncated") else 1.0
        return Suspect(name, what, (g * weighed).sum(-1), (self.e * weighed).sum(-1), False, share)

    def _far_scale(self) -> Iterator[Suspect]:
        """The scale again, where its direction is no longer straight: the size that explains most, by secant steps."""
        first, spec = self.direction("scale"), self.call.spec
        scale, theta = spec.scale_for(self.subject.q.shape[3]), first.size
        if (
            not scale
            or abs(theta) < FAR
            or float(first.gain(first.power.sum(), first.cross.sum())) < 0.2 * self.total
        ):
            return
        theta = max(-2.0, min(2.0, theta))
        best = None
        for _ in range(FITS):
            g, h = (
                self.subject.run(replace(spec, scale=scale * math.exp(t))) - self.truth
                for t in (theta, theta + 1e-3)
            )
            found = self.discrete("scale", DIRECTIONS["scale"], g)
            gain = float(found.gain(found.power.sum(), found.cross.sum()))
            if best is None or gain > best[0]:
                best = (gain, theta, found)
            step = torch.where(self.weight > 0, (h - g) / 1e-3, 0.0)  # ∂o/∂θ: Gauss and Newton's step
            power = float((step * step * self.weight).sum())
            theta += float(((self.e - g) * step * self.weight).sum()) / power if power else 0.0
            theta = max(-4.0, min(4.0, theta))
        assert best is not None
        yield replace(best[2], tried=best[1])

    def _leak(self) -> Iterator[Suspect]:
        if bool(self.subject.seen.all()):
            return
        found = self.discrete(
            "hidden keys leak", "hidden keys keep a share of their weight", self.setting.leak
        )
        yield replace(found, degrees=True)

    def _one_key(self) -> tuple[list[Suspect], list[Suspect]]:
        """The key that explains most when lost or counted twice, and the one that does when its value is missing. Of
        one key, the one of both that explains more, where chance is not it: what they differ by is small beside either.
        """
        key, found = self._lost_or_twice()
        missing = value_missing(self.subject, self.e, self.weight)
        if missing is None:
            return found, []
        own, g = missing
        value = self.discrete(
            f"V of key {own} missing", f"the value of key {own} is 0, and its weight counts", g
        )
        if own != key or not found:
            return found, [value]
        lost, alone = (s.gain(s.power, s.cross) for s in (found[0], value))
        apart = float((lost - alone)[torch.maximum(lost, alone) > 0].sum())  # in rows that have it
        if abs(apart) <= threshold(self.subject.k.shape[2]) ** 2:
            return found, [value]
        return (found, []) if apart > 0 else ([], [value])

    def _lost_or_twice(self) -> tuple[int, list[Suspect]]:
        power, _ = key_powers(self.weighed)
        total = self.along.key_sum[0]
        gain = torch.where(power > 0, total * total / power.clamp(min=1e-300), 0.0)
        if not gain.numel():
            return -1, []
        key = int(gain.argmax())
        if float(total[key]) > 0:
            name, what = f"key {key} lost", f"key {key} is lost"
            output = self.subject.over(without(self.subject, slice(key, key + 1)))
        else:
            name, what = f"key {key} twice", f"key {key} is counted twice"
            output = doubled(self.subject, slice(key, key + 1))
        return key, [self.discrete(name, what, output - self.truth)]
