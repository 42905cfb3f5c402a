"""Recipes: which number is rounded to which format at which stage, and how inputs are scaled.

A recipe holds no arithmetic. `harness.arithmetic` reads it while an algorithm runs, `harness.quantize` while its
inputs are stored.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness._frozen import FrozenMap
from harness.accumulator import Accumulator
from harness.formats import FORMATS, get_format
from harness.scaling import GRANULARITIES, SOURCES, Scaling

__all__ = [
    "DEFAULT_RECIPES", "GRANULARITIES", "LAYER_STAGES", "RECIPES", "SOURCES", "STAGES", "TENSORS", "Accumulator",
    "Recipe", "Scaling", "get_recipe", "load_recipe", "recipes",
]  # fmt: skip

# Rounding points in the order data meets them. `scores_raw`: q·k. `scores`: every later store of S (scale, softcap,
# bias). `shifted`: s − m. `block_out`: P·V of one KV block. `acc`: the output before it is divided.
STAGES = (
    "scores_raw", "scores", "shifted", "exp", "rescale", "row_sum", "probs", "block_out", "acc", "out",
)  # fmt: skip
# Those of the layer around it: a projection's product, its store, q and k once turned, W_O's store, X + Z, LayerNorm's.
LAYER_STAGES = ("gemm", "proj", "rope", "z", "residual", "norm")
TENSORS = ("q", "k", "v")
ROTATIONS = ("hadamard",)


@dataclass(frozen=True)
class Recipe:
    """One way to compute attention in limited precision.

    `base`: format of the arithmetic between rounding points, fp32 or fp64. `storage`: format of q, k and v.
    `at`: stage → format rounded to there; a stage left out keeps the base. `overflow`: stage or tensor → policy,
    else the format's own. `scaling`: tensor → Scaling, for those that have one. `p_scale`: factor on P before its
    cast, divided out again. `row_sum`: the denominator sums P `before` or `after` its cast. `normalise`: divide by
    the denominator `late` (after PV: flash kernels) or `early` (P is normalised before its cast: eager softmax;
    algorithms that stream over key blocks always divide late).

    `inputs`: format that q, k and v are rounded to before anything else is done with them, and q and k again once
    rotated (None: not at all). `rotate`: `hadamard` stores q and k multiplied by the orthonormal matrix of
    `harness.rotation`, always both, which leaves every q·k as it was. q and k given as *stored* values are rotated
    ones already. `accumulator`: how both matrix products add up (None: in the base format). Each product starts from
    zero: an algorithm that streams over key blocks adds theirs in the base format, a promotion every block.

    Raises ValueError for a name, stage, format or policy that does not exist, a p_scale that the base does not hold
    together with its inverse, and an accumulator over another base than fp32.
    """

    name: str
    base: str = "fp32"
    storage: Mapping[str, str] = field(default_factory=dict)
    at: Mapping[str, str] = field(default_factory=dict)
    overflow: Mapping[str, str] = field(default_factory=dict)
    scaling: Mapping[str, Scaling] = field(default_factory=dict)
    p_scale: float = 1.0
    row_sum: str = "before"
    normalise: str = "late"
    inputs: str | None = None
    rotate: str | None = None
    accumulator: Accumulator | None = None

    def __post_init__(self) -> None:
        _name(self.name)
        _one_of("base", self.base, ("fp32", "fp64"))
        _one_of("row_sum", self.row_sum, ("before", "after"))
        _one_of("normalise", self.normalise, ("late", "early"))
        if self.normalise == "early" and self.row_sum == "after":
            raise ValueError(
                "row_sum='after' needs the cast of P before the sum; allowed: 'before' with normalise='early'"
            )
        _p_scale(self.p_scale, self.base)
        if self.rotate is not None:
            _one_of("rotate", self.rotate, ROTATIONS, ", or None; q and k are rotated together")
        _accumulator(self.accumulator, self.base)
        _keys("storage", self.storage, TENSORS)
        _keys("at", self.at, (*STAGES, *LAYER_STAGES))
        _keys("scaling", self.scaling, TENSORS)
        _keys("overflow", self.overflow, (*STAGES, *LAYER_STAGES, *TENSORS))
        for tensor, scaling in self.scaling.items():
            if not isinstance(scaling, Scaling):
                raise ValueError(f"scaling of {tensor} is {scaling!r}; allowed: a Scaling")
        object.__setattr__(self, "storage", FrozenMap({t: self.storage.get(t, self.base) for t in TENSORS}))
        for name in ("at", "overflow", "scaling"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))
        inputs = () if self.inputs is None else (("inputs", self.inputs),)
        for place, fmt in (*inputs, *self.storage.items(), *self.at.items()):
            if not isinstance(fmt, str) or fmt not in FORMATS:
                raise ValueError(f"format of {place} is {fmt!r}; allowed: {', '.join(FORMATS)}")
            if get_format(fmt).precision > get_format(self.base).precision:
                raise ValueError(
                    f"{fmt} holds more than the base {self.base}; allowed: formats within the base"
                )
        for place, policy in self.overflow.items():
            get_format(self.format_of(place)).check_overflow(policy)

    def format_of(self, place: str) -> str:
        """Format of a stage or of a stored tensor."""
        return self.storage[place] if place in TENSORS else self.at.get(place, self.base)

    def policy(self, place: str) -> str:
        """Overflow policy of a stage or of a stored tensor. Where none is given an mx tensor saturates: OCP MX v1.0
        section 6.3 clamps what exceeds the element format, which has infinities or not."""
        policy = self.overflow.get(place)
        if policy is None and place in self.scaling and self.scaling[place].granularity == "mx":
            policy = "saturate"
        return get_format(self.format_of(place)).check_overflow(policy)

    def rotates(self, tensor: str) -> bool:
        """Whether a tensor is stored rotated: q and k, where the recipe rotates."""
        return self.rotate is not None and tensor in ("q", "k")

    @property
    def out_format(self) -> str:
        """Format of the output, in which its ulps are counted."""
        return self.format_of("out")

    @cached_property
    def storage_key(self) -> tuple[object, ...]:
        """Recipes with equal keys store equal inputs, hence share one stored truth. A unit scale is no scale."""
        scaled = {t: s for t, s in self.scaling.items() if s.source != "unit"}
        before = (self.inputs, self.rotate)
        return (*before, *((self.storage[t], self.policy(t), scaled.get(t)) for t in TENSORS))

    @cached_property
    def digest(self) -> str:
        """Everything but the name, as text: two recipes with equal digests compute the same."""
        parts = [
            f"base={self.base}",
            f"p_scale={self.p_scale:.17g}",
            f"row_sum={self.row_sum}",
            f"normalise={self.normalise}",
        ]
        parts += [f"{t}={self.storage[t]}" for t in TENSORS]
        parts += [f"{t}×{s.digest}" for t, s in sorted(self.scaling.items())]
        parts += [f"{s}→{self.at[s]}" for s in (*STAGES, *LAYER_STAGES) if s in self.at]
        parts += [f"{p}!{self.overflow[p]}" for p in sorted(self.overflow)]
        parts += [f"{n}={x}" for n, x in (("inputs", self.inputs), ("rotate", self.rotate)) if x is not None]
        parts += [] if self.accumulator is None else [f"accumulator={self.accumulator.digest}"]
        return " ".join(parts)


def _one_of(name: str, value: object, allowed: tuple[str, ...], note: str = "") -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}{note}")


def _name(name: object) -> None:
    """Names stand in file names, globs and comma-separated lists: the characters of case names."""
    if not isinstance(name, str) or not name or not all(c.isalnum() or c in "-_.+=×" for c in name):
        raise ValueError(
            f"recipe name is {name!r}; allowed: a non-empty string of letters, digits and - _ . + = ×"
        )


def _p_scale(p_scale: object, base: str) -> None:
    """P is multiplied by it in the base format, and O by its inverse: both have to be normal numbers there."""
    limit = -get_format(base).emin
    number = isinstance(p_scale, (int, float)) and not isinstance(p_scale, bool)
    if not (number and 2.0**-limit <= p_scale <= 2.0**limit):  # type: ignore[operator]
        shown = f"a finite number > 0, 2^-{limit} to 2^{limit}, which {base} holds with its inverse"
        raise ValueError(f"p_scale is {p_scale!r}; allowed: {shown}")


def _accumulator(accumulator: object, base: str) -> None:
    if accumulator is not None and not isinstance(accumulator, Accumulator):
        raise ValueError(f"accumulator is {accumulator!r}; allowed: an Accumulator, or None")
    if accumulator is not None and base != "fp32":
        raise ValueError(f"an accumulator was given with base {base}; allowed: base fp32")


def _keys(name: str, mapping: Mapping[str, object], allowed: tuple[str, ...]) -> None:
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{name} is {mapping!r}; allowed: a mapping with keys among {', '.join(allowed)}")
    for key in mapping:
        if key not in allowed:
            raise ValueError(f"{name} names {key!r}; allowed: {', '.join(allowed)}")


def _stored(fmt: str) -> dict[str, str]:
    return dict.fromkeys(TENSORS, fmt)


def _flash(fmt: str) -> Recipe:
    """FP32 accumulation and statistics; P is cast to the storage format unnormalised, the output rounded once."""
    return Recipe(fmt, storage=_stored(fmt), at={"probs": fmt, "out": fmt})


def _eager(fmt: str) -> Recipe:
    """Every stage rounded, softmax finished before P·V: what a chain of separate low-precision operators does."""
    return Recipe(f"{fmt}_eager", storage=_stored(fmt), at=dict.fromkeys(STAGES, fmt), normalise="early")


_FP8 = Recipe(
    "fp8_e4m3",
    storage=_stored("fp8_e4m3"),
    at={"probs": "fp8_e4m3", "out": "bf16"},
    scaling=dict.fromkeys(TENSORS, Scaling("head", "amax")),
    p_scale=256.0,  # 2^8: exact, and P = 1 stays below 448 (FlashAttention-3, section 3.3)
)

# AMD's E4M3 of CDNA 3, max 240: P×128 stays in range.
_FNUZ = replace(
    _FP8,
    name="fp8_e4m3fnuz",
    storage=_stored("fp8_e4m3fnuz"),
    at={"probs": "fp8_e4m3fnuz", "out": "bf16"},
    p_scale=128.0,
)

# FlashAttention-3's scales (section 3.3), which are known as soon as a tile of rows is.
_FP8_BLOCK = replace(_FP8, name="fp8_e4m3_block", scaling=dict.fromkeys(TENSORS, Scaling("block")))
# Hopper's FP8 tensor core keeps 13 fractional bits of a sum (MMA-Sim, 2511.10909); DeepSeek-V3 (2412.19437, section
# 3.3.2) promotes it to FP32 every 128 products.
_HOPPER = replace(_FP8, name="fp8_e4m3_hopper", accumulator=Accumulator())
# The exponent is rounded up, as Transformer Engine does. OCP's floor rule saturates a value in one block of normal data
# in five, and the finer steps it has there are worth nothing to a floating format. Seen of attention at n = 2048,
# d = 128: total error 1.09 times as large on normal data, 1.4 to 1.9 times with outliers.
_MX = Scaling("mx", "amax", power_of_two=True)

RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe("fp64", base="fp64"),
        Recipe("fp32"),
        _flash("bf16"),
        _flash("fp16"),
        _FP8,
        _eager("bf16"),
        _eager("fp16"),
        # The notes' clamping: scores that overflow FP16 stay at ±65504 instead of becoming infinite.
        replace(
            _eager("fp16"),
            name="fp16_eager_clamped",
            overflow={"scores_raw": "saturate", "scores": "saturate"},
        ),
        replace(_FP8, name="fp8_e4m3_unscaled", scaling=dict.fromkeys(TENSORS, Scaling("tensor", "unit"))),
        # An FP8 cache under a BF16 kernel: the scales of K and V join the softmax scale and the output.
        Recipe(
            "fp8_kv",
            storage={"q": "bf16", "k": "fp8_e4m3", "v": "fp8_e4m3"},
            at={"probs": "bf16", "out": "bf16"},
            scaling=dict.fromkeys(("k", "v"), Scaling("head", "amax")),
        ),
        _FP8_BLOCK,
        replace(_FP8_BLOCK, name="fp8_e4m3_hadamard", rotate="hadamard"),
        replace(_FP8, name="mxfp8", scaling=dict.fromkeys(TENSORS, _MX)),
        _FNUZ,
        _HOPPER,
        replace(_HOPPER, name="fp8_e4m3_promoted", accumulator=Accumulator(promote=128)),
    )
}


def get_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe by name (or itself). Raises ValueError naming the valid ones."""
    if isinstance(recipe, Recipe):
        return recipe
    try:
        return RECIPES[recipe]
    except (KeyError, TypeError):
        raise ValueError(f"unknown recipe {recipe!r}; allowed: {', '.join(RECIPES)}") from None


def load_recipe(path: Path) -> Recipe:
    """A recipe from a TOML file: the fields of `Recipe`, with `[scaling.k]` tables for `Scaling` and an
    `[accumulator]` table for `Accumulator`.

    Raises ValueError for a file that cannot be read, a field that does not exist or a value that is not allowed, and
    for the name of a built-in recipe that is another.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"recipe file {path} cannot be read: {error}") from None
    try:
        _keys("the file", table, tuple(f.name for f in fields(Recipe)))
        _keys("scaling", table.get("scaling", {}), TENSORS)
        scaling = {tensor: _scaling(tensor, x) for tensor, x in table.pop("scaling", {}).items()}
        if "accumulator" in table:
            _keys("accumulator", table["accumulator"], tuple(f.name for f in fields(Accumulator)))
            table["accumulator"] = Accumulator(**table["accumulator"])
        made = Recipe(**{"name": path.stem, **table}, scaling=scaling)
        if made.name in RECIPES and made.digest != RECIPES[made.name].digest:
            raise ValueError(
                f"name is {made.name!r}, a built-in recipe with another definition; give it a name of its own"
            )
        return made
    except ValueError as error:
        raise ValueError(f"recipe file {path}: {error}") from None


def _scaling(tensor: str, table: Mapping[str, Any]) -> Scaling:
    _keys(f"scaling.{tensor}", table, tuple(f.name for f in fields(Scaling)))
    return Scaling(**table)


def recipes() -> tuple[str, ...]:
    """Names of the built-in recipes."""
    return tuple(RECIPES)


def _by_default(r: Recipe) -> bool:
    """Whether a run without --recipes takes it. fp64 is the truth's own format, a check of the harness; finer scales,
    rotations, limited accumulators and AMD's E4M3 are variants of fp8_e4m3 that a question about FP8 names."""
    coarse = all(s.granularity in ("tensor", "head") for s in r.scaling.values())
    return r.base == "fp32" and coarse and r.rotate is None and r.accumulator is None and r is not _FNUZ


DEFAULT_RECIPES = tuple(name for name, r in RECIPES.items() if _by_default(r))
