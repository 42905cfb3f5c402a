"""Rules of a call: what is allowed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from harness.spec import AttentionSpec


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"softcap": 1e39}, "softcap is 1e+39; allowed: a finite number > 0 that FP32 holds"),
        ({"softcap": 1e-300}, "softcap is 1e-300; allowed: a finite number > 0 that FP32 holds"),
        ({"scale": -1e39}, "scale is -1e+39; allowed: a finite number, up to FP32's"),
        ({"window": (10**30, None)}, "window is (1000000000000000000000000000000, None); allowed: a pair"),
    ],
    ids=["large-cap", "small-cap", "scale", "window"],
)
def test_a_number_that_no_kernel_can_take_is_refused(rules: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        AttentionSpec(**rules)


@pytest.mark.parametrize(
    "rules", [{"softcap": 3.4e38}, {"softcap": 2.0**-126}, {"scale": 0.0}, {"window": (2**62, 2**62)}]
)
def test_the_ends_of_what_is_allowed_are_allowed(rules: dict[str, Any]) -> None:
    AttentionSpec(**rules)
