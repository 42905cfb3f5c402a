"""The assertion for test suites: what it lets through, and the story it tells."""

from __future__ import annotations

import pytest
import torch
from planted import Kernel, made

from harness import Status
from harness.testing import assert_attention_close

CALL = made((1, 2, 64, 32), "bf16", causal=True)
OPTIONS = {"spec": CALL.spec, "quantize": True}


def test_honest_output_passes_and_its_judgement_comes_back() -> None:
    j = assert_attention_close(Kernel()(CALL), *CALL.exact, recipe="bf16", **OPTIONS)
    assert (j.status, j.precision) == (Status.PASS, Status.PASS)


def test_failure_tells_what_where_and_how_to_go_on() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_attention_close(Kernel(scale=1.1)(CALL), *CALL.exact, recipe="bf16", **OPTIONS)
    story = str(caught.value)
    for part in (
        "attention is FAIL under recipe bf16\n", "likeliest fault: scale\n", "the softmax scale is off: size +0.095",
        "is normal", "but should be ≤", "ulps of bf16) at b=0 h=", "to go on: mend the fault named above",
    ):  # fmt: skip
        assert part in story, story


def test_unknown_fault_is_not_blamed_on_another() -> None:
    out = Kernel()(CALL)
    out += torch.randn(out.shape, generator=torch.Generator().manual_seed(1)) * 0.05
    with pytest.raises(AssertionError, match=r"likeliest fault: unknown(.|\n)*compare with another recipe"):
        assert_attention_close(out, *CALL.exact, **OPTIONS)


def test_nan_is_never_close() -> None:
    out = Kernel()(CALL)
    out[0, 0, 3, 0] = float("nan")
    with pytest.raises(AssertionError, match="classes differ from the stored truth: 1 NaN"):
        assert_attention_close(out, *CALL.exact, **OPTIONS)


def test_inconclusive_is_no_pass_unless_it_is_allowed() -> None:
    call = made((1, 1, 2, 32), "bf16", kv_len=40)
    out = Kernel()(call)
    with pytest.raises(AssertionError, match=r"INCONCLUSIVE(.|\n)*allow_inconclusive=True"):
        assert_attention_close(out, *call.exact, quantize=True)
    j = assert_attention_close(out, *call.exact, quantize=True, allow_inconclusive=True)
    assert j.status is Status.INCONCLUSIVE
    with pytest.raises(AssertionError, match="FAIL"):
        assert_attention_close(out + 1, *call.exact, quantize=True, allow_inconclusive=True)


def test_wrong_argument_is_no_assertion() -> None:
    with pytest.raises(ValueError, match="unknown recipe"):
        assert_attention_close(Kernel()(CALL), *CALL.exact, recipe="bf17")
