"""How an implementation arranges its sums: what the error model has to know of an algorithm besides its recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.error_model.problem import CHUNK
from harness.formats import FloatFormat, get_format
from harness.recipe import Recipe

ARRANGEMENTS = ("whole", "stream", "split")


@dataclass(frozen=True)
class Form:
    """`whole`: all keys of a row in one piece. `stream`: blocks of `size` keys under a running max, always normalised
    late. `split`: `size` parts of the keys attended apart and merged by their lse. Without `subtract_max` the
    exponent is the score itself (`whole` only). The last `alone` rows are computed one at a time: a product with one
    row adds its keys up in sequence, where one with many adds sums of `CHUNK` keys.

    Raises ValueError for another arrangement, a size below 1, a missing max where it is needed, and alone < 0.
    """

    arrangement: str = "stream"
    size: int = 128
    subtract_max: bool = True
    alone: int = 0

    def __post_init__(self) -> None:
        if self.arrangement not in ARRANGEMENTS:
            raise ValueError(f"arrangement is {self.arrangement!r}; allowed: {', '.join(ARRANGEMENTS)}")
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"size is {self.size!r}; allowed: an integer ≥ 1")
        if not isinstance(self.alone, int) or self.alone < 0:
            raise ValueError(f"alone is {self.alone!r}; allowed: an integer ≥ 0, of rows")
        if not self.subtract_max and self.arrangement != "whole":
            raise ValueError(f"subtract_max is False in a {self.arrangement}; allowed: True, or a whole row")

    def groups(self, keys: int) -> tuple[int, int]:
        """Keys in a group and the number of groups (≥ 1) over `keys` keys."""
        if self.arrangement == "whole" or keys == 0:
            return max(keys, 1), 1
        size = self.size if self.arrangement == "stream" else -(-keys // self.size)
        return size, -(-keys // size)

    def under(self, recipe: Recipe, keys: int) -> Form:
        """What matters of it: rows alone show only where the base's own sums are the error, over more than a chunk."""
        plain = keys <= CHUNK or rounded(recipe, "out") is not None
        return replace(self, alone=0) if self.alone and plain else self

    def normalises_early(self, recipe: Recipe) -> bool:
        return recipe.normalise == "early" and self.arrangement != "stream"


WHOLE = Form("whole")
SERIAL = Form("whole", alone=2**31)  # every row by itself
BLACK_BOX = Form("stream", 128)  # flash-like: what most fused kernels do


def form_of(name: str, options: Mapping[str, int] | None = None) -> Form:
    """The form of a registered algorithm run with `options`; of anything unknown, a flash-like kernel's."""
    options = options or {}
    if name == "decode_with_cache":
        return Form("whole", alone=options.get("steps", 4))
    if name in ("naive_masked", "lower_triangle", "chunked_decode", "paged_decode"):
        return WHOLE
    if name == "naive_unsafe":
        return Form("whole", subtract_max=False)
    if name == "split_kv":
        return Form("split", options.get("splits", 4))
    return Form("stream", options.get("block", 128)) if name == "online_softmax" else BLACK_BOX


def rounded(recipe: Recipe, stage: str) -> FloatFormat | None:
    """The format a stage is rounded to, None where it keeps the base."""
    name = recipe.format_of(stage)
    return None if name == recipe.base else get_format(name)


def roundoff(recipe: Recipe, stage: str) -> float:
    """u of a stage that is rounded, else 0: the base's own roundings are counted apart."""
    fmt = rounded(recipe, stage)
    return 0.0 if fmt is None else fmt.unit_roundoff


def spacing(recipe: Recipe, stage: str) -> float:
    """The subnormal spacing η of a stage that is rounded, else 0."""
    fmt = rounded(recipe, stage)
    return 0.0 if fmt is None else fmt.min_subnormal


def within(inner: FloatFormat | None, outer: FloatFormat | None) -> bool:
    """Whether a value stored in `inner` needs no rounding in `outer` (None: the base)."""
    if outer is None or inner is None:
        return outer is None
    return (
        inner.precision <= outer.precision
        and inner.min_subnormal >= outer.min_subnormal
        and inner.max <= outer.max
    )
