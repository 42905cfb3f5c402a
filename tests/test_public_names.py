"""The names that users rely on, and what a wrong one is told."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import harness


@pytest.mark.parametrize("name", harness.__all__)
def test_public_name_resolves_to_what_its_module_defines(name: str) -> None:
    module = importlib.import_module(harness._PUBLIC[name])
    assert getattr(harness, name) is getattr(module, name)


def test_dir_lists_the_public_names() -> None:
    assert set(harness.__all__) <= set(dir(harness))
    assert sorted(harness.__all__) == list(harness.__all__)


def test_unknown_attribute_is_told_what_there_is() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'judgement'; it has .*AttentionSpec.*run"
    ) as caught:
        harness.judgement  # noqa: B018
    assert "\n" not in str(caught.value)
    assert not hasattr(harness, "__wrapped__")


def test_no_submodule_shares_a_public_name() -> None:
    rooms = {module.name for module in pkgutil.iter_modules(harness.__path__)}
    assert not rooms & set(harness.__all__)


def test_implementations_and_recipes_are_tuples_of_names() -> None:
    first = ("naive_masked", "lower_triangle", "online_softmax", "decode_with_cache", "naive_unsafe")
    assert harness.implementations()[: len(first)] == first
    assert {"fp32", "bf16", "fp16", "fp8_e4m3", "bf16_eager", "fp16_eager"} <= set(harness.recipes())
    assert isinstance(harness.recipes(), tuple)


@pytest.mark.parametrize("name", harness.implementations())
def test_every_implementation_is_found_and_has_what_the_pipeline_calls(name: str) -> None:
    found = harness.get(name)
    assert all(callable(getattr(found, method)) for method in ("run", "run_stored", "refusals"))


@pytest.mark.parametrize("name", ["nope", "", None, ["naive_masked"], 3])
def test_unknown_implementation_is_told_the_valid_ones(name: object) -> None:
    with pytest.raises(ValueError, match=r"unknown implementation .*; allowed: naive_masked, lower_triangle"):
        harness.get(name)


@pytest.mark.parametrize("name", ["nope", "", None, ["bf16"], 3])
def test_unknown_recipe_is_told_the_valid_ones(name: object) -> None:
    with pytest.raises(ValueError, match=r"unknown recipe .*; allowed: fp64, fp32, bf16"):
        harness.get_recipe(name)
