"""Values that a kernel read as others are found by fitting what it read, and told by what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import harness
from harness.docket import Docket
from harness.error_model import BLACK_BOX
from harness.misread import ROWS, misread
from harness.operands import NO_EXTRAS
from harness.part import choose
from harness.quantize import store
from harness.records import Diagnosis
from harness.suspects import Setting, Trial

SIZE = 64
Change = Callable[[Tensor], Tensor]


def draw(heads: int, kv_heads: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, h, length, SIZE, generator=g).bfloat16() for h in (heads, kv_heads, kv_heads))
    return q, k, v


def found(
    q: Tensor, k: Tensor, v: Tensor, read: Tensor, causal: bool = False, keys: Tensor | None = None
) -> Diagnosis | None:
    """What is found in a kernel that reads `read` for v, and `keys` for k."""
    spec = harness.AttentionSpec(causal=causal)
    out = harness.get("online_softmax").run(q, k if keys is None else keys, read, spec, recipe="bf16").out
    recipe = harness.get_recipe("bf16")
    stored = store((q, k, v), recipe)
    call = Docket(stored, spec, NO_EXTRAS, recipe).bench(BLACK_BOX).call
    return misread(call, out, Trial(Setting(choose(call, out), call, stored), out))


def told(*given: Any, **changes: Any) -> str:
    diagnosis = found(*given, **changes)
    assert diagnosis is not None
    return diagnosis.what


def changed(v: Tensor, at: slice, change: Change) -> Tensor:
    read = v.clone()
    read[:, :, at] = change(v[:, :, at])
    return read


CHANGES: dict[str, Change] = {
    "are taken as 0, and what they weigh counts": torch.zeros_like,
    "are doubled": lambda x: 2 * x,
    "have the other sign": torch.neg,
    "are in reverse order, or their keys are": lambda x: x.flip(2),
    "are rotated by 2 among themselves, or their keys by -2": lambda x: x.roll(2, 2),
    "are all the first of them": lambda x: x[:, :, :1].expand_as(x),
    "are transposed, key and channel exchanged": lambda x: x.mT,
    "have neighbouring channels exchanged": lambda x: x.unflatten(3, (-1, 2)).flip(4).flatten(3),
    "have the halves of their channels exchanged": lambda x: x.roll(SIZE // 2, 3),
    "are 0 in the second half of their channels": lambda x: torch.cat(
        [x[..., : SIZE // 2], 0 * x[..., SIZE // 2 :]], 3
    ),
    "have their channels rotated by 1": lambda x: x.roll(1, 3),
    "have their channels in reverse order": lambda x: x.flip(3),
    "are those of the next kv head": lambda x: x.roll(-1, 1),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_arrangement_of_one_tile_of_values_is_named(what: str, causal: bool) -> None:
    q, k, v = draw(6, 3, 256)
    diagnosis = found(q, k, v, changed(v, slice(128, 192), CHANGES[what]), causal)
    assert diagnosis is not None
    assert diagnosis.what == f"the values of keys 128 to 191 {what}"
    assert diagnosis.fault == "V of a block misread"
    assert diagnosis.explained > 0.99


def test_values_of_other_keys_are_named() -> None:
    q, k, v = draw(2, 2, 256)
    read = changed(v, slice(128, 192), lambda _: v[:, :, 64:128])
    assert told(q, k, v, read) == "the values of keys 128 to 191 are those of keys 64 to 127"
    read = changed(v, slice(128, 192), lambda _: v[:, :, 129:193])
    assert told(q, k, v, read) == "the values of keys 128 to 191 are those 1 key on"


@settings(max_examples=12)
@example(64, 3, True, 0)
@given(st.sampled_from([16, 32, 64]), st.integers(0, 3), st.booleans(), st.integers(0, 99))
def test_whatever_was_read_its_block_is_found(size: int, block: int, causal: bool, seed: int) -> None:
    """Garbage in any block: where it lies is told to the key."""
    q, k, v = draw(2, 1, 256, seed)
    at = slice(block * size, (block + 1) * size)
    g = torch.Generator().manual_seed(seed)
    read = changed(v, at, lambda x: torch.randn(x.shape, generator=g).bfloat16())
    if causal and (256 - at.start) * 2 < ROWS * size:  # of 2 heads: too few rows see the block
        assert found(q, k, v, read, causal) is None
        return
    assert f"keys {at.start} to {at.stop - 1} (or the keys themselves) are not as given" in told(
        q, k, v, read, causal
    )


def test_garbage_in_the_value_of_one_key_is_found() -> None:
    q, k, v = draw(2, 1, 256)
    read = changed(v, slice(77, 78), lambda x: 3 + x.flip(3))
    assert told(q, k, v, read).startswith("the value of key 77 (or the key itself) is not as given")


def test_tile_of_a_call_too_large_to_be_taken_whole_is_found_by_the_judge() -> None:
    q, k, v = draw(2, 1, 512)
    out = (
        harness.get("online_softmax")
        .run(q, k, changed(v, slice(256, 320), lambda x: x.mT), recipe="bf16")
        .out
    )
    diagnosis = harness.judge(out, q, k, v, recipe="bf16").diagnosis
    assert diagnosis is not None
    assert diagnosis.what == "the values of keys 256 to 319 are transposed, key and channel exchanged"


def test_block_that_is_doubled_in_v_is_not_called_one_that_is_counted_twice() -> None:
    """Which explains most of it, but not all: its weight would be in the denominator too."""
    q, k, v = draw(1, 1, 192)
    out = (
        harness.get("online_softmax")
        .run(q, k, changed(v, slice(64, 128), lambda x: 2 * x), recipe="bf16")
        .out
    )
    diagnosis = harness.judge(out, q, k, v, recipe="bf16").diagnosis
    assert diagnosis is not None
    assert diagnosis.what == "the values of keys 64 to 127 are doubled"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("change", [lambda x: x.roll(1, 3), torch.zeros_like, lambda x: 2 * x, torch.neg])
def test_wrong_keys_of_a_tile_are_not_taken_for_wrong_values(change: Change, causal: bool) -> None:
    q, k, v = draw(2, 2, 256)
    assert found(q, k, v, v, causal, keys=changed(k, slice(128, 192), change)) is None


def test_keys_in_another_order_are_the_same_as_values_in_the_inverse_of_it() -> None:
    q, k, v = draw(2, 2, 256)
    keys = changed(k, slice(128, 192), lambda x: x.roll(-2, 2))
    what = "the values of keys 128 to 191 are rotated by 2 among themselves, or their keys by -2"
    assert told(q, k, v, v, keys=keys) == what


def test_too_few_rows_say_nothing() -> None:
    """One row's error lies along any two keys."""
    q, k, v = draw(1, 1, 256)
    assert found(q[:, :, :1], k, v, changed(v, slice(128, 192), lambda x: x.flip(2))) is None
