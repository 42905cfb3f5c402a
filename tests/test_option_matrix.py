"""The table of options × implementations, and that no implementation ignores an option it takes.

Both go by `harness.option_table.OPTIONS`: a new option or implementation is tested as soon as it stands there, and an
option without an input in `EXTRAS` or `WITHOUT` fails.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import assert_near
from test_agreement import dense_bounds, enumerate_hidden
from torch import Tensor

from harness import AttentionSpec, Recipe, Shape, get, get_recipe, implementations, option_table, reference
from harness.attention.algorithm import Algorithm
from harness.attention.naive import naive_masked
from harness.attention.rows import Problem
from harness.cli import main
from harness.error_model import WHOLE, expect
from harness.option_table import OPTIONS, SHAPE, Option, base_of, documented, refusals
from harness.options import alibi_bias, packed_mask, padding_mask
from harness.quantize import quantize
from harness.recipe import TENSORS
from harness.registry import Entry
from harness.truth import Truth

DOCS = Path(__file__).parents[1] / "docs" / "options.md"
LONGEST = 7  # of the tokens drawn once: every call below is a cut of one problem
FP64 = get_recipe("fp64")


# --- the table ----------------------------------------------------------------------------------------------------


def test_table_of_the_docs_is_the_one_that_refusals_give() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text == documented(text), (
        "docs/options.md is stale; run: python -m harness.option_table docs/options.md"
    )


@pytest.mark.parametrize("text", ["", option_table.START, f"{option_table.END}\n{option_table.START}"])
def test_document_without_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lacks the lines <!-- option table: python"):
        documented(text)


def test_cell_is_yes_or_the_number_of_the_reason() -> None:
    table = option_table.option_table(["naive_masked", "lower_triangle", "paged_decode"])
    rows = {name: cells for name, *cells in table.rows()}
    assert rows["not causal"] == ["yes", "no [1]", "no [2]"]
    assert rows["causal"] == ["yes", "yes", "yes"]
    assert [note.split()[0] for note in table.notes] == ["lower_triangle", "paged_decode"]


class Refusing:
    """An implementation of another package that takes no call, and says why in a long line."""

    def refusals(self, *_: Any) -> tuple[str, ...]:
        return ("this kernel is not built for a machine that lacks what it was written for, " * 2, "and more")


def test_table_fits_a_terminal_however_many_implementations_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"kernel_number_{i}_of_a_vendor" for i in range(12)]
    more = {n: Entry(n, "test_option_matrix:Refusing", False, "") for n in names}
    known = dict(option_table.registry.table())
    monkeypatch.setattr(option_table.registry, "table", lambda: {**known, **more})
    monkeypatch.setattr(option_table.registry, "get", lambda n: Refusing() if n in more else get(n))
    with pytest.raises(SystemExit) as done:
        main(["list", "--options"])
    shown = capsys.readouterr().out
    assert done.value.code == 0
    assert max(map(len, shown.splitlines())) <= 100
    assert shown.count("vendor") >= 12
    assert shown.count("softcap") > 1  # in every panel
    assert re.search(r"^\[\d+\] this kernel", shown, re.MULTILINE)
    documented_names = documented(DOCS.read_text(encoding="utf-8"))
    assert "kernel_number" not in documented_names  # what is installed beside it stands in no document


def test_options_are_shown_for_implementations_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["list", "recipes", "--options"])
    assert done.value.code == 2
    assert "allowed: implementations, or nothing" in capsys.readouterr().err


# --- an input for every option ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    extras: dict[str, Tensor]
    recipe: Recipe

    def stored(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Stored values and scales."""
        all_stored = [
            quantize(x, n, self.recipe) for n, x in zip(TENSORS, (self.q, self.k, self.v), strict=True)
        ]
        return [s.values for s in all_stored], [s.scale for s in all_stored]

    def truth(self) -> Truth:
        return reference(*self.stored()[0], self.spec, **self.extras)

    def by(self, algorithm: Any) -> Any:
        values, scales = self.stored()
        return algorithm.run(*values, self.spec, recipe=self.recipe, scales=scales, **self.extras)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """How far out and lse may be from the truth: derived for FP64, the ceiling of the recipe for the rest."""
        values, (shape, spec, extras) = self.stored()[0], (self.shape, self.spec, self.extras)
        if self.recipe.base != "fp64":
            scales = tuple(self.stored()[1])
            expected = expect(*values, spec, self.recipe, WHOLE, scales=scales, **extras)[1]
            return expected.ceiling.nan_to_num(0.0), expected.lse_ceiling.nan_to_num(
                0.0
            )  # NaN where the truth is
        hidden = enumerate_hidden(shape, spec, extras.get("mask"), extras.get("kv_lens"))
        return dense_bounds(*values, spec, extras.get("bias"), extras.get("sinks"), hidden)

    @property
    def shape(self) -> Shape:
        (b, h, length, d), (_, kv_heads, s, e) = self.q.shape, self.v.shape
        return Shape(b, h, length, d, kv_heads=kv_heads, kv_len=s, value_dim=e)


def randn(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(shape: Shape) -> list[Tensor]:
    whole = Shape(shape.batch, shape.heads, LONGEST, SHAPE.head_dim)
    cuts = (slice(None), slice(shape.heads), slice(None), slice(None))
    drawn = [randn(*whole.tensor(t), seed=i)[cuts] for i, t in enumerate(TENSORS)]
    return [x[:, : n[1], : n[2], : n[3]] for x, n in zip(drawn, map(shape.tensor, TENSORS), strict=True)]


# What an option is given, for the shape of its call. Hides some keys of some rows, and no row loses all.
EXTRAS: dict[str, Callable[[Shape], dict[str, Any]]] = {
    "mask": lambda s: {"mask": torch.tensor([True, False, True, True])},
    "bias": lambda s: {"bias": randn(s.q_len, s.S, seed=7)},
    "bias of −∞": lambda s: {"bias": torch.tensor([0.0, -math.inf, 0.0, 0.0]).double()},
    "ALiBi (a bias)": lambda s: {"bias": alibi_bias(s.heads, s.q_len, s.S)},
    "sinks": lambda s: {"sinks": randn(s.heads, seed=8)},
    "kv_lens": lambda s: {"kv_lens": torch.tensor([3, 2])},
    "kv_lens, causal": lambda s: {"kv_lens": torch.tensor([3, 2])},
    "padding, left (a mask)": lambda s: {"mask": padding_mask([3, 2], s.S, "left")},
    "padding, right (a mask)": lambda s: {"mask": padding_mask([3, 2], s.S, "right")},
    "packed sequences (a mask)": lambda s: {"mask": packed_mask([0, 1, 4])},
}  # fmt: skip


def no_group(call: Call) -> Call:
    """Query head h reads kv head h mod Hkv, which is what a wrong grouping does."""
    k, v = (x.repeat(1, call.q.shape[1] // x.shape[1], 1, 1) for x in (call.k, call.v))
    return replace(call, k=k, v=v)


def own_heads(call: Call) -> Call:
    """Every query head has a kv head of its own, the first of which is the shared one."""
    _, k, v = tokens(replace(call.shape, kv_heads=call.shape.heads))
    return replace(call, k=k, v=v)


def resized(**sizes: int) -> Callable[[Call], Call]:
    def change(call: Call) -> Call:
        q, k, v = tokens(replace(call.shape, **sizes))
        return replace(call, q=q, k=k, v=v)

    return change


# The call without an option that cannot be left out: the neighbour that a mistake would compute.
WITHOUT: dict[str, Callable[[Call], Call]] = {
    "causal": lambda call: replace(call, spec=replace(call.spec, causal=False)),
    "not causal": lambda call: replace(call, spec=replace(call.spec, causal=True)),
    "GQA": no_group,
    "MQA": own_heads,
    "E ≠ D": lambda call: replace(call, spec=replace(call.spec, scale=call.v.shape[3] ** -0.5)),
    "D = 0": resized(head_dim=SHAPE.head_dim),
    "L < S": resized(kv_len=SHAPE.q_len),
    "L > S": resized(kv_len=LONGEST),
    "S = 0": resized(kv_len=SHAPE.S),
}


def pair(option: Option, base: AttentionSpec, recipe: Recipe = FP64) -> tuple[Call, Call]:
    """The call with the option and the one without it."""
    beside = replace(base, **option.beside)
    spec, extras = replace(beside, **option.spec), EXTRAS.get(option.name, lambda _: {})(option.shape)
    if option.scaling:  # stored in FP8 with these scales, computed in FP64
        fp8 = option.recipe(recipe)
        recipe = Recipe("scales", base="fp64", storage=fp8.storage, scaling=fp8.scaling)
    call = Call(*tokens(option.shape), spec, extras, recipe)
    if option.name in WITHOUT:
        return call, WITHOUT[option.name](call)
    if option.scaling:
        return call, replace(call, recipe=replace(recipe, scaling=get_recipe("fp8_e4m3").scaling))
    return call, replace(call, spec=beside, extras={})


def test_every_option_has_one_input_that_is_its_own() -> None:
    assert set(EXTRAS) == {o.name for o in OPTIONS if o.extras}
    sizes = {o.name for o in OPTIONS if not (o.extras or o.spec or o.scaling)}
    assert set(WITHOUT) == {*sizes, "causal", "not causal"}
    for option in OPTIONS:
        call, _ = pair(option, AttentionSpec())
        assert set(call.extras) == set(option.extras), option.name
        assert call.shape == option.shape, option.name


def test_every_field_of_the_spec_and_every_extra_stands_in_the_table() -> None:
    spec = AttentionSpec()
    assert {n for o in OPTIONS for n in o.spec} == set(vars(spec))
    assert {n for o in OPTIONS for n in o.extras} == {"mask", "bias", "sinks", "kv_lens"}


# --- no option is ignored -----------------------------------------------------------------------------------------

# A graph is compiled for most of its options, 10 s each: `-m slow` chooses them.
COMPILED = {"flex_attention"}
TAKEN = [
    pytest.param(name, option, marks=[pytest.mark.slow] if name in COMPILED else [])
    for name, option in itertools.product(implementations(), OPTIONS)
    if not refusals(name, option)
]


NO_FP64 = {"flex_attention", "scaled_mm"}  # no kernel of theirs takes it


def moved(with_it: Tensor, without: Tensor, bound: Tensor) -> bool:
    """Whether a class or a value differs by more than two FP64 evaluations may."""
    both = torch.isfinite(with_it) & torch.isfinite(without)
    classes = not torch.equal(torch.isfinite(with_it), torch.isfinite(without))
    return classes or bool(((with_it - without).abs() > bound)[both].any())


def assert_moves_alike(got: list[Tensor], truth: list[Tensor], bound: Tensor) -> None:
    """Classes with and without as the truth's, bits that differ, and a difference that is the truth's."""
    for mine, true in zip(got, truth, strict=True):
        for same_class in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(same_class(mine), same_class(true)), "class of an element is not the truth's"
    assert not torch.equal(got[0].nan_to_num(7.0), got[1].nan_to_num(7.0)), "ignored: not a bit differs"
    finite = torch.isfinite(truth[0]) & torch.isfinite(truth[1])
    differences = [torch.where(finite, x[0] - x[1], 0.0) for x in (got, truth)]
    assert_near(differences[0], differences[1], bound.numpy())


def check(algorithm: Any, option: Option, base: AttentionSpec, recipe: Recipe = FP64) -> None:
    """A call without the option that the algorithm refuses is done by `naive_masked`."""
    calls = pair(option, base, recipe)
    plain = calls[1]
    refused = algorithm.refusals(plain.spec, plain.shape, plain.recipe, tuple(plain.extras))
    truths = [call.truth() for call in calls]
    results = [calls[0].by(algorithm), plain.by(get("naive_masked") if refused else algorithm)]
    bound, lse_bound = (a + b for a, b in zip(calls[0].bounds(), plain.bounds(), strict=True))
    assert moved(truths[0].out, truths[1].out, bound), "the input shows nothing"
    assert_moves_alike([r.out.double() for r in results], [t.out for t in truths], bound)
    if results[0].lse is not None and moved(truths[0].lse, truths[1].lse, lse_bound):
        assert_moves_alike([r.lse.double() for r in results], [t.lse for t in truths], lse_bound)


@pytest.mark.parametrize(("name", "option"), TAKEN, ids=lambda x: getattr(x, "name", x))
def test_option_moves_the_output_by_as_much_as_it_moves_the_truth(name: str, option: Option) -> None:
    base, recipe = base_of(name)
    assert recipe == FP64 or name in NO_FP64, f"{name} does not run under fp64"
    check(get(name), option, base, recipe)


IGNORING: dict[str, Callable[[Problem], Problem]] = {
    "window, left side": lambda p: replace(p, spec=replace(p.spec, window=None)),
    "align top-left": lambda p: replace(p, spec=replace(p.spec, align="bottom-right")),
    "scale": lambda p: replace(p, spec=replace(p.spec, scale=None)),
    "softcap": lambda p: replace(p, spec=replace(p.spec, softcap=None)),
    "mask": lambda p: replace(p, extras=replace(p.extras, mask=None)),
    "sinks": lambda p: replace(p, extras=replace(p.extras, sinks=None)),
    "kv_lens": lambda p: replace(p, extras=replace(p.extras, kv_lens=None)),
    "a scale for each token": lambda p: replace(p, k_scale=p.k_scale if p.k_scale is None else p.k_scale[:, :, :1]),
}  # fmt: skip


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.name in IGNORING], ids=lambda o: o.name)
def test_algorithm_that_ignores_an_option_is_caught(option: Option) -> None:
    forgetful = Algorithm("forgetful", lambda ar, p: naive_masked(ar, IGNORING[option.name](p)))
    with pytest.raises(AssertionError, match=r"ignored|distance|class of"):
        check(forgetful, option, AttentionSpec())
