"""Probes pass every algorithm of the project on every option it takes, and each catches the faults it is for."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flawed import FAULTS, SETTINGS, attention
from torch import Tensor
from torch.nn import functional as F

from harness import registry
from harness.attention.algorithm import Algorithm
from harness.operands import NO_EXTRAS, Extras
from harness.probes import PROBES, Output, Probe, Run, of_algorithm, of_callable, probes
from harness.recipe import get_recipe
from harness.records import Status
from harness.spec import AttentionSpec, Shape

RECIPES = ("fp32", "bf16", "fp16", "fp8_e4m3", "bf16_eager")
SHAPE = Shape(2, 4, 9, 12, kv_heads=2, kv_len=17)  # 12: no power of two; 17: a block and one key
_GENERATOR = torch.Generator().manual_seed(7)
_MASK = torch.rand(2, 1, 9, 17, generator=_GENERATOR) < 0.7
_BIAS = torch.randn(1, 4, 9, 17, generator=_GENERATOR).bfloat16().double()
_MASK[:, :, 4] = False
OPTIONS: dict[str, tuple[AttentionSpec, Extras]] = {
    "plain": (AttentionSpec(), NO_EXTRAS),
    "causal": (AttentionSpec(causal=True), NO_EXTRAS),
    "everything": (
        AttentionSpec(causal=True, window=(6, 0), softcap=3.0, empty_row="nan"),
        Extras(_MASK, _BIAS, torch.tensor([0.0, 1.0, -1.0, -math.inf]), torch.tensor([17, 12])),
    ),
    "sinks": (AttentionSpec(causal=True, align="top-left"), Extras(sinks=torch.tensor([0.0, 1.0, -1.0, 2.0]))),
}  # fmt: skip


def failed(found: tuple[Probe, ...]) -> list[str]:
    return [str(p) for p in found if p.outcome is Status.FAIL]


def outcomes(found: tuple[Probe, ...]) -> dict[str, Status]:
    return {p.name: p.outcome for p in found}


# --- right implementations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "name", [e.name for e in registry.table().values() if e.emulated and e.name != "naive_unsafe"]
)
def test_no_probe_fails_a_registered_algorithm(name: str, recipe: str, options: str) -> None:
    spec, extras = OPTIONS[options]
    found = probes(registry.get(name), SHAPE, spec, recipe, extras=extras)
    assert [p.name for p in found] == list(PROBES)
    assert not failed(found)
    if registry.get(name).refusals(spec, SHAPE, recipe):
        assert {p.outcome for p in found} == {Status.REFUSED}
        assert all(p.detail for p in found)


@pytest.mark.parametrize(
    ("name", "recipe"), [("sdpa_math", "bf16"), ("sdpa_flash", "fp16"), ("scaled_mm", "fp8_e4m3")]
)
def test_hidden_nan_comes_through_torchs_kernels_and_nothing_else_is_wrong(name: str, recipe: str) -> None:
    found = probes(registry.get(name), SHAPE, AttentionSpec(causal=True), recipe)
    wrong = {p.name for p in found if p.outcome is Status.FAIL}
    assert wrong == {"unseen poisoned"}  # 0 · NaN of a hidden value


def test_every_probe_is_asked_by_some_of_these_options() -> None:
    asked = set()
    for spec, extras in OPTIONS.values():
        found = probes(registry.get("paged_decode"), SHAPE, spec, "bf16", extras=extras)
        found += probes(registry.get("naive_masked"), SHAPE, spec, "bf16", extras=extras)
        asked |= {p.name for p in found if p.outcome is Status.PASS}
    assert asked == set(PROBES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_softmax_without_its_maximum_fails_when_a_constant_is_added(recipe: str) -> None:
    found = outcomes(probes(registry.get("naive_unsafe"), SHAPE, AttentionSpec(), recipe))
    # BF16 holds a score of 300 to ±1: an eager chain promises nothing there
    assert found["scores + c"] is (Status.REFUSED if recipe == "bf16_eager" else Status.FAIL)


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_that_faults_are_planted_in_fails_nothing_without_one(seed: int) -> None:
    for setting in SETTINGS.values():
        run = of_callable(functools.partial(attention, fault="", out=setting.out), get_recipe(setting.recipe))
        assert not failed(
            probes(run, setting.shape, setting.spec, setting.recipe, seed, extras=setting.extras)
        )


# --- faults -------------------------------------------------------------------------------------------------------


@functools.cache
def caught(fault: str) -> tuple[str, ...]:
    """Probes that fail a kernel with this fault."""
    setting = SETTINGS[FAULTS[fault].setting]
    run = of_callable(functools.partial(attention, fault=fault, out=setting.out), get_recipe(setting.recipe))
    found = probes(run, setting.shape, setting.spec, setting.recipe, extras=setting.extras)
    return tuple(p.name for p in found if p.outcome is Status.FAIL)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_caught_by_the_probe_of_its_kind(fault: str) -> None:
    assert set(FAULTS[fault].caught_by) <= set(caught(fault))


def test_a_stale_page_is_caught_against_the_other_cache() -> None:
    recipe, spec = get_recipe("bf16"), AttentionSpec(causal=True)
    right = of_algorithm(registry.get("chunked_decode"), recipe, twin=False)

    def stale(stored: Any, rules: AttentionSpec, extras: Extras) -> Output:
        stored[1].codes[:, :, 3] = stored[1].codes[:, :, 2]
        return right(stored, rules, extras)

    found = outcomes(probes(Run(right.call, right.form, Run(stale)), SHAPE, spec, recipe))
    assert found["other cache"] is Status.FAIL


def kill_table() -> str:
    """Faults down, the probes that caught any across."""
    names = [n for n in PROBES if any(n in caught(f) for f in FAULTS)]
    lines = [f"| fault | setting | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for fault, kind in FAULTS.items():
        cells = ["✗" if n in caught(fault) else "" for n in names]
        lines.append(f"| {kind.what} | {kind.setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_kill_table_in_the_documents_is_the_one_measured() -> None:
    text = (Path(__file__).parent.parent / "docs" / "probes.md").read_text(encoding="utf-8")
    assert kill_table() in text


def test_every_probe_stands_in_the_documents() -> None:
    text = (Path(__file__).parent.parent / "docs" / "probes.md").read_text(encoding="utf-8")
    assert [n for n in PROBES if f"| {n} |" not in text] == []


# --- callables ----------------------------------------------------------------------------------------------------


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: Tensor | None = None
) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )


@pytest.mark.parametrize("options", ["plain", "causal", "mask", "gqa"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16"])
def test_torch_sdpa_passes_what_it_claims_but_for_hidden_poison(recipe: str, options: str) -> None:
    """0 · NaN: a hidden value that is not finite reaches the output (F03)."""
    heads, spec, extras = 2 if options == "gqa" else 4, AttentionSpec(causal=options == "causal"), NO_EXTRAS
    shape = Shape(2, 4, 9, 16, kv_heads=heads)
    if options == "mask":
        extras = Extras(mask=torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.7)
    found = probes(of_callable(sdpa, get_recipe(recipe)), shape, spec, recipe, extras=extras)
    assert [p for p in failed(found) if "poisoned" not in p] == []
    asked = {p.name for p in found if p.outcome is Status.PASS}
    assert {"ones", "identity", "one-hot", "head tags", "last element", "2V", "sequence alone"} <= asked
    assert outcomes(found)["padded keys"] is Status.REFUSED  # no kv_lens
    assert outcomes(found)["lse"] is Status.REFUSED


def test_a_callable_without_align_gets_no_causal_call_of_unequal_lengths() -> None:
    found = probes(
        of_callable(sdpa, get_recipe("fp32")), Shape(1, 2, 4, 8, kv_len=6), AttentionSpec(causal=True)
    )
    assert {p.outcome for p in found} == {Status.REFUSED}
    assert any(p.detail == "the callable has no parameter align" for p in found)


def test_what_an_implementation_raises_is_a_failure_with_its_message() -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        raise RuntimeError("no kernel image\nand more")

    found = probes(of_callable(broken, get_recipe("bf16")), Shape(1, 2, 9, 8))
    told = [p for p in found if p.outcome is Status.FAIL]
    assert told
    assert {p.seen for p in told} == {"RuntimeError: no kernel image"}


def test_an_output_of_another_shape_is_a_failure() -> None:
    found = probes(of_callable(lambda q, k, v, **_: v[..., :1], get_recipe("fp32")), Shape(1, 2, 9, 8))
    assert outcomes(found)["ones"] is Status.FAIL
    assert "allowed: (1, 2, 9, 8)" in next(p.seen for p in found if p.name == "ones")


def test_an_output_of_nan_passes_nothing_that_is_asked() -> None:
    def nan(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return torch.full_like(q, math.nan)

    found = probes(of_callable(nan, get_recipe("fp32")), Shape(2, 4, 9, 8, kv_heads=2))
    passing = {p.name for p in found if p.outcome is Status.PASS}
    assert passing <= {"4K, scale/4", "2V", "unseen changed"}  # they compare the kernel with itself


def test_the_same_seed_asks_the_same() -> None:
    first, again, other = (
        probes(registry.get("naive_masked"), SHAPE, AttentionSpec(), "bf16", seed) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_a_shape_too_large_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="allowed: at most 65536, probes need no more"):
        probes(registry.get("naive_masked"), Shape(1, 8, 128, 64))


@pytest.mark.parametrize(
    "shape",
    [Shape(1, 1, 0, 4), Shape(1, 1, 3, 4, kv_len=0), Shape(1, 2, 3, 0, value_dim=2), Shape(1, 1, 1, 1)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_degenerate_shapes_ask_less_and_crash_nothing(shape: Shape, causal: bool) -> None:
    found = probes(registry.get("naive_masked"), shape, AttentionSpec(causal=causal))
    assert not failed(found)
    assert all(p.detail for p in found if p.outcome is Status.REFUSED)


def test_options_of_an_algorithm_reach_it() -> None:
    algorithm: Algorithm = registry.get("online_softmax")
    run = of_algorithm(algorithm, get_recipe("bf16"), block=3)
    assert run.form.size == 3
    assert not failed(probes(run, SHAPE, AttentionSpec(), "bf16"))


def test_a_failure_prints_what_should_be_and_what_is() -> None:
    faulty: Callable[..., Any] = lambda q, k, v, **_: torch.zeros_like(q)  # noqa: E731
    found = probes(of_callable(faulty, get_recipe("fp32")), Shape(1, 1, 9, 8))
    told = str(next(p for p in found if p.name == "ones"))
    assert told.startswith("FAIL ones: should be 1 ± ")
    assert re.search(r", is 0 at \(0, 0, \d, \d\)$", told)
