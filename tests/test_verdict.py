"""The bench: its yardstick at every level, its ceiling, its directions and its doubts, on outputs made for each."""

from __future__ import annotations

import math

import pytest
import torch
from planted import Kernel, Made, made
from torch import Tensor

from harness import Status
from harness.docket import Docket
from harness.error_model import BLACK_BOX, SERIAL, form_of
from harness.operands import Extras
from harness.significance import ratio_limit
from harness.verdict import Verdict
from harness.yardstick import FP32_LIMITS, NARROW, over_ceiling

SIZE = (1, 2, 64, 32)


class Bench:
    """One call and its expectation."""

    def __init__(self, recipe: str = "bf16", causal: bool = False, size: tuple[int, ...] = SIZE) -> None:
        self.call: Made = made(size, recipe, causal=causal)
        self.docket = Docket(self.call.stored, self.call.spec, Extras(), self.call.recipe)
        (self.expected,) = self.docket.expected([BLACK_BOX])
        self.truth = self.docket.truth.out

    def drawn(self, factor: float = 1.0, seed: int = 0) -> Tensor:
        """The truth and an error that is `factor` × what is expected."""
        g = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.truth.shape, generator=g, dtype=torch.float64)
        return self.truth + factor * noise * self.expected.variance.sqrt()

    def judge(self, *outs: Tensor) -> list[Verdict]:
        return self.docket.verdicts(outs, [BLACK_BOX] * len(outs))


def yard(v: Verdict) -> bool:
    return any("× the limit" in r for r in v.reasons)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16", "fp8_e4m3"])
def test_error_as_expected_is_within_the_yardstick_and_thrice_it_is_not(recipe: str) -> None:
    b = Bench(recipe)
    one, two = b.judge(b.drawn(), b.drawn(3.0))
    assert one.margins.ratio == pytest.approx(1.0, abs=5 / math.sqrt(2 * 4096))
    assert not yard(one)
    assert yard(two)
    assert two.status is Status.FAIL


def test_error_smaller_than_expected_is_no_fault() -> None:
    b = Bench()
    (v,) = b.judge(b.truth.clone())
    assert v.status is Status.PASS
    assert v.margins.ratio == 0.0


@pytest.mark.parametrize(
    ("where", "level"),
    [
        ((0, 1), "head b=0 h=1"),
        ((0, 1, slice(32, 64)), "rows b=0 h=1 i=32"),
        ((0, 1, 40), "row b=0 h=1 i=40"),
        ((0, 1, 40, 7), "element (0, 1, 40, 7)"),
    ],
)
def test_worst_place_is_named_at_the_level_it_has(where: tuple[object, ...], level: str) -> None:
    b = Bench(causal=True)
    out = b.truth.clone()
    size = {2: 3.0, 3: 4.0, 4: 40.0}[len(where)] if where[-1] != 40 else 12.0
    out[where] += size * b.expected.variance.sqrt()[where]  # type: ignore[index]
    (v,) = b.judge(out)
    assert v.status is Status.FAIL
    assert v.margins.worst > 1
    assert v.margins.worst_at.startswith(level), v.margins.worst_at


def test_row_without_a_variance_is_exact() -> None:
    b = Bench("fp32", causal=True)
    assert not b.expected.variance[:, :, 0].any()  # the first causal row is one value
    out = b.truth.clone()
    out[0, 0, 0, 0] = torch.nextafter(out[0, 0, 0, 0], torch.tensor(math.inf, dtype=torch.float64))
    (v,) = b.judge(out)
    assert "row b=0 h=0 i=0 has no rounding to excuse it" in "; ".join(v.reasons)


def test_bound_of_zero_allows_no_error_and_an_unknown_one_any() -> None:
    e = torch.zeros(1, 1, 1, 3, dtype=torch.float64)
    bound = torch.tensor([0.0, math.nan, math.inf], dtype=torch.float64).view(1, 1, 1, 3)
    assert over_ceiling(e, bound) == (0.0, [])
    e[..., 1:] = 1e9
    assert over_ceiling(e, bound) == (0.0, [])
    e[..., 0] = 1e-300
    over, reasons = over_ceiling(e, bound)
    assert over == math.inf
    assert "which no correct run does" in reasons[0]


def test_all_finite_errors_at_their_ceiling_are_within_it() -> None:
    b = Bench()
    # Of a kernel whose arrangement is not known, the widest of those that it may have.
    forms = b.docket.expected([BLACK_BOX, SERIAL, form_of("split_kv")])
    ceiling = torch.stack([e.ceiling for e in forms]).amax(0)
    (v,) = b.judge(b.truth + 0.999 * ceiling)
    assert v.margins.ceiling == pytest.approx(0.999)
    assert not any("no correct run" in r for r in v.reasons)
    (v,) = b.judge(b.truth + 1.001 * ceiling)
    assert any("no correct run" in r for r in v.reasons)


def test_limits_are_wider_where_nothing_is_rounded_to_less_than_the_base() -> None:
    assert Bench("fp32").docket.bench(BLACK_BOX).limits is FP32_LIMITS
    b = Bench("bf16")
    (v,) = b.judge(b.drawn())
    assert b.docket.bench(BLACK_BOX).limits is NARROW
    assert v.margins.limit == ratio_limit(128, 1 + 2 * (1 + 2 + 64), NARROW.slack)


def test_verdicts_of_one_docket_do_not_depend_on_their_company() -> None:
    b = Bench(causal=True)
    outs = [Kernel(block=40)(b.call), Kernel(scale=1.1)(b.call), b.drawn(3.0)]
    together = b.judge(*outs)
    for out, v in zip(outs, together, strict=True):
        (alone,) = Bench(causal=True).judge(out)
        assert alone.status is v.status
        assert alone.margins.ratio == v.margins.ratio
        assert alone.margins.statistic == pytest.approx(v.margins.statistic, rel=1e-9)


def test_shift_of_one_promised_size_is_seen_and_half_of_it_is_not() -> None:
    b = Bench("bf16", size=(1, 4, 128, 32))
    twin = b.docket.bench(BLACK_BOX).twins[0]
    unseen = b.judge(twin)[0].margins.unseen["shrink"]
    far, near = b.judge(twin + 3 * unseen * b.truth, twin + 0.3 * unseen * b.truth)
    assert any("shrink" in r for r in far.reasons), far.reasons
    assert near.status is Status.PASS


def test_one_key_lost_everywhere_is_found_by_number() -> None:
    b = Bench("bf16", size=(1, 4, 128, 32))

    def without(seen: Tensor) -> Tensor:
        seen = seen.clone()
        seen[..., 71] = False
        return seen

    (v,) = b.judge(Kernel(seen=without)(b.call))
    assert any(r.startswith("key 71 is lost") for r in v.reasons), v.reasons
