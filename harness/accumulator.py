"""How a matrix unit adds up its products, where that is not FP32."""

from __future__ import annotations

from dataclasses import dataclass

# FP32 holds what is left of a sum (bits + 1 significant bits), FP64 every integer of a step's sum.
MOST_BITS, MOST_DEPTH = 23, 1024


@dataclass(frozen=True)
class Accumulator:
    """A sum that keeps `bits` fractional bits and truncates: Hopper's FP8 tensor core with the defaults.

    Products are taken `depth` at a time, exactly. They and the sum so far are aligned to the largest exponent among
    them, truncated toward zero at `bits` fractional bits, added exactly, and the sum is truncated to as many
    fractional bits of its own. Every `promote` products it is added to an FP32 sum, rounded to nearest, and starts
    again from zero; None: never. Source: MMA-Sim (2511.10909), its truncating fused dot-product-add; DeepSeek-V3
    (2412.19437), section 3.3.2, for the promotion.

    Raises ValueError for values outside bits 1 … 23 and depth 1 … 1024, and for a promotion within a step.
    """

    bits: int = 13
    depth: int = 32
    promote: int | None = None

    def __post_init__(self) -> None:
        for name, value, most in (("bits", self.bits, MOST_BITS), ("depth", self.depth, MOST_DEPTH)):
            if not _whole(value) or not 1 <= value <= most:
                raise ValueError(f"accumulator {name} is {value!r}; allowed: an integer, 1 to {most}")
        if self.promote is not None and not (
            _whole(self.promote) and self.promote >= 1 and self.promote % self.depth == 0
        ):
            raise ValueError(
                f"accumulator promote is {self.promote!r}; allowed: a multiple of the depth, {self.depth}, or None"
            )

    def loss(self, products: int) -> float:
        """Bound on |error| ÷ Σ|products| of a sum of so many.

        2^e of a step is at most the largest product or the sum so far, and that at most Σ|products|, since truncation
        only shrinks. So each truncation takes less than 2^−bits of Σ|products|: one for each product, two a step for
        the sum (aligned, and cut at its own exponent). What a promotion adds up is bounded by its own products.
        """
        held = products if self.promote is None else min(products, self.promote)
        return float((held + 2 * -(-held // self.depth)) * 2.0**-self.bits)

    @property
    def digest(self) -> str:
        """All of it, as text."""
        return f"{self.bits}bits/{self.depth}" + ("" if self.promote is None else f"/promote{self.promote}")


def _whole(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
