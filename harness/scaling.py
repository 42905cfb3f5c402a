"""How a tensor is brought into its storage format's range: which values share a scale, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

# `block`: consecutive rows of one head. `mx`: consecutive values along the axis that the product sums over.
GRANULARITIES = ("tensor", "head", "token", "block", "mx")
SOURCES = ("amax", "given", "unit")
POWERS = (False, True, "floor")
BLOCK_ROWS = 128  # rows of a FlashAttention-3 tile (2407.08608, section 3.3)
MX_BLOCK = 32  # values that share a scale in every concrete MX format: OCP MX v1.0, table 1
FP32_BYTES, E8M0_BYTES = 4, 1


@dataclass(frozen=True)
class Scaling:
    """How a tensor is brought into its storage format's range: stored value = code · scale.

    `source`: `amax` maps the largest finite magnitude to the format's max, `given` takes the caller's scales,
    `unit` is 1 everywhere.

    `granularity`: one scale for the tensor, for a head, for a token (row), for a `block` of `rows` rows of one head
    (the last may be short), or `mx`: blocks of 32 values along the axis that the product sums over, which is
    head_dim for q and k and the keys for v (OCP MX v1.0; a last short block where 32 does not divide).

    `power_of_two` makes amax scales powers of two, so that scaling is exact. True: the smallest that saturates
    nothing. `floor`: 2^(⌊log2 amax⌋ − emax), the rule of OCP MX v1.0 section 6.3, where values beyond the format's
    max saturate (E4M3: amax / scale lies in [256, 512), the max is 448). An mx scale is stored as E8M0, a power of
    two in 2^-127 … 2^127, and needs one of the two; every other scale is stored as FP32.

    Raises ValueError for a value that is not among these, and for `rows` without blocks.
    """

    granularity: str = "head"
    source: str = "amax"
    power_of_two: bool | str = False
    rows: int = BLOCK_ROWS

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity is {self.granularity!r}; allowed: {', '.join(GRANULARITIES)}")
        if self.source not in SOURCES:
            raise ValueError(f"scale source is {self.source!r}; allowed: {', '.join(SOURCES)}")
        if not isinstance(self.power_of_two, (bool, str)) or self.power_of_two not in POWERS:
            raise ValueError(f"power_of_two is {self.power_of_two!r}; allowed: True, False, 'floor'")
        if self.granularity == "mx" and not self.power_of_two:
            raise ValueError("power_of_two is False for mx, whose scales are E8M0; allowed: True, 'floor'")
        if not isinstance(self.rows, int) or isinstance(self.rows, bool) or self.rows < 1:
            raise ValueError(f"rows is {self.rows!r}; allowed: an integer ≥ 1")
        if self.granularity != "block" and self.rows != BLOCK_ROWS:
            raise ValueError(
                f"rows is {self.rows} for granularity {self.granularity}; allowed: with block alone"
            )

    def block_of(self, tensor: str) -> tuple[int, int] | None:
        """(axis of `[B, H, L, D]`, values along it) that share a scale; None where no axis is cut."""
        if self.granularity == "block":
            return 2, self.rows
        if self.granularity == "mx":
            return (2 if tensor == "v" else 3), MX_BLOCK
        return None

    @property
    def scale_bytes(self) -> int:
        """Bytes that one stored scale takes."""
        return E8M0_BYTES if self.granularity == "mx" else FP32_BYTES

    @property
    def digest(self) -> str:
        """All of it, as text."""
        rows = f"({self.rows})" if self.granularity == "block" else ""
        power = {False: "", True: "/2^n", "floor": "/2^⌊n⌋"}[self.power_of_two]
        return f"{self.granularity}{rows}/{self.source}{power}"
