"""Masks, biases, sinks and lengths of a case: drawn alike every time, recorded, and refused in one line when wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import harness
from harness import AttentionSpec, Case, Draw, Shape
from harness.case import LAYOUTS
from harness.extras import KINDS
from harness.inputs import make_inputs
from harness.layouts import lay_out
from harness.lies import ROWS_RECORDED, lying_rows, seen_keys
from harness.operands import Extras
from harness.records import HazardKind, Status

SHAPE = Shape(batch=2, heads=4, kv_heads=2, q_len=6, kv_len=9, head_dim=8)
EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "mask": {
        "random": {"axes": "HS"}, "padding": {"lengths": [9, 4], "side": "left", "queries": True},
        "packed": {"lengths": [2, 4]}, "rows": {"hidden": [0, 5]}, "keys": {"visible": [-1]},
        "values": {"values": [[True] * 8 + [False]]},
    },
    "bias": {
        "alibi": {}, "normal": {"std": 2.0, "axes": "S"},
        "hiding": {"value": "fp16", "lengths": [9, 4], "causal": True},
        "values": {"values": [0.5] * 8 + ["-inf"]},
    },
    "sinks": {"values": {"values": [0, 1, 2, 3]}, "normal": {"mean": 3.0}},
    "kv_lens": {"values": {"values": [9, 0]}, "uniform": {"low": 1}},
}  # fmt: skip
PAIRS = [(name, kind) for name in KINDS for kind in KINDS[name]]


def case(name: str, kind: str, **changes: Any) -> Case:
    square = replace(SHAPE, kv_len=6) if kind == "packed" else SHAPE
    made = Case("made", kind, square, "made up", extras={name: Draw(kind, EXAMPLES[name][kind])})
    return replace(made, **changes)


def test_every_kind_has_an_example_here() -> None:
    assert {(n, k) for n in EXAMPLES for k in EXAMPLES[n]} == set(PAIRS)


@pytest.mark.parametrize(("name", "kind"), PAIRS, ids=lambda x: x)
def test_every_kind_is_drawn_alike_every_time_and_moves_the_output(name: str, kind: str) -> None:
    drawn = case(name, kind)
    one, two = make_inputs(drawn, 3), make_inputs(drawn, 3)
    assert one.hash == two.hash
    assert one.extras.given == (name,)
    assert torch.equal(getattr(one.extras, name), getattr(two.extras, name))
    without = make_inputs(replace(drawn, extras={}), 3)
    assert without.hash != one.hash
    assert torch.equal(without.q, one.q), "an extra must not change the other tensors"
    run = harness.get("naive_masked").run
    bare, full = (
        run(*x.tensors, recipe="fp64", quantize=True, **x.extras.as_options()) for x in (without, one)
    )
    assert not torch.equal(bare.out, full.out)


def test_minus_infinity_hides_as_causality_and_window_do() -> None:
    drawn = {"value": "-inf", "causal": True, "window": [3, 0]}
    band = case("bias", "hiding", extras={"bias": Draw("hiding", drawn)})
    bias = make_inputs(band, 0).extras.bias
    assert bias is not None
    seen = seen_keys(SHAPE.q_len, SHAPE.S, AttentionSpec(causal=True, window=(3, 0)), Extras())
    assert torch.equal(bias, torch.where(seen, 0.0, -torch.inf).double())


@pytest.mark.parametrize("kind", ["alibi", "normal"])
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_drawn_biases_are_values_of_their_format(kind: str, fmt: str) -> None:
    drawn = case("bias", kind, extras={"bias": Draw(kind, {"format": fmt})})
    bias = make_inputs(drawn, 0).extras.bias
    assert bias is not None
    assert torch.equal(bias, harness.round_to(bias, fmt))


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"mask": Draw("magic")}, "draws its mask as 'magic'; allowed: random, padding, packed, rows, keys, values"),
        ({"mask": Draw("random", {"axes": "X"})}, "axes is 'X'; allowed: letters among B, H, L, S"),
        ({"mask": Draw("random", {"volume": 11})}, "wrong parameters: .*volume"),
        ({"mask": Draw("padding", {"lengths": [99, 1]})}, "lengths is .*allowed: integers .*each 0 to 9"),
        ({"mask": Draw("keys", {"visible": [99]})}, "wrong parameters"),
        ({"bias": Draw("values", {"values": [[1.0, 2.0], [3.0]]})}, "wrong parameters"),
        ({"bias": Draw("hiding", {"value": "fp17"})}, "unknown format 'fp17'"),
        ({"sinks": Draw("values", {"values": [1.0]})}, r"sinks is torch.float64 \(1,\); allowed: .* \[4\]"),
        ({"kv_lens": Draw("values", {"values": [10, 1]})}, r"kv_lens is \[10, 1\]; allowed: 0 to kv_len = 9"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_extra_is_one_line_that_names_the_case(extras: dict[str, Draw], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_inputs(Case("made", "wrong", SHAPE, "made up", extras=extras), 0)
    assert "made/wrong" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extras": {"masks": Draw()}}, "extras of made/x names 'masks'; allowed: mask, bias, sinks, kv_lens"),
        ({"extras": {"mask": [1]}}, "allowed: a mapping of names to harness.Draw"),
        ({"layout": "bsdh"}, "layout of made/x is 'bsdh'; allowed: contiguous, bshd, padded, interleaved, fused"),
        ({"seeds": 0}, "seeds of made/x is 0; allowed: an integer ≥ 1, or None for no limit"),
        ({"relations": 1}, "relations of made/x is 1; allowed: True, False"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_case_field_says_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case("made", "x", SHAPE, "made up", **changes)


def test_digest_changes_with_the_problem_and_with_nothing_else() -> None:
    made = case("bias", "normal")
    same = replace(made, name="other", why="another", seeds=1, source="elsewhere")
    assert same.digest == made.digest
    others = [
        replace(made, shape=replace(SHAPE, q_len=5)),
        replace(made, spec=AttentionSpec(causal=True)),
        replace(made, draw=Draw("outliers")),
        replace(made, extras={}),
        replace(made, layout="bshd"),
        replace(made, relations=True),
    ]
    assert len({made.digest, *(c.digest for c in others)}) == 7
    assert Case("a", "b", SHAPE, "c", draw=Draw("normal", {"q": 1.0, "k": 2.0})).digest == (
        Case("a", "b", SHAPE, "c", draw=Draw("normal", {"k": 2.0, "q": 1.0})).digest
    )


# --- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@given(size=st.tuples(*(st.integers(0, 3) for _ in range(4))))
def test_layout_moves_values_and_changes_none(layout: str, size: tuple[int, int, int, int]) -> None:
    x = torch.arange(math.prod(size), dtype=torch.float64).reshape(size)
    y = lay_out(x, layout)
    assert torch.equal(x, y)
    if min(size) > 1:
        assert y.is_contiguous() == (layout == "contiguous")


def test_case_in_another_layout_gives_the_same_bits_everywhere() -> None:
    made = Case("made", "plain", SHAPE, "made up", AttentionSpec(causal=True))
    hashes = {
        layout: [r.output_hash for r in harness.run([replace(made, layout=layout)], None, ["bf16"], seeds=1)]
        for layout in LAYOUTS
    }
    assert len({tuple(h) for h in hashes.values()}) == 1


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["fp32", "fp16_eager", "bf16_eager"])
def test_rows_of_sentinels_are_recorded_with_the_keys_they_attend_to(recipe: str) -> None:
    made = case("bias", "hiding")
    (record,) = harness.run([made], ["naive_masked"], [recipe], seeds=1)
    # Row i sees keys up to i + 3, and in sequence 1 keys 0 … 4 are padding: rows 0 and 1 have no others.
    lying = [(1, h, i) for h in range(4) for i in range(2)]
    assert [row.where for row in record.mask_rows] == lying
    assert {row.meant for row in record.mask_rows} == {0}
    (hazard,) = (h for h in record.hazards if h.kind is HazardKind.SENTINEL)
    assert (hazard.count, hazard.total) == (len(lying), 2 * 4 * 6)
    assert all(row.effective > 0 for row in record.mask_rows)


def test_sums_of_sentinels_leave_nothing_in_fp16_and_something_in_fp32() -> None:
    extras = Extras(bias=torch.full((1, 1, 2, 3), -2 * 65504.0, dtype=torch.float64))
    q = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    k = torch.zeros(1, 1, 3, 4, dtype=torch.float64)
    effective = {
        fmt: [row.effective for row in lying_rows(q, k, AttentionSpec(), extras, fmt)[1]]
        for fmt in ("fp32", "bf16", "fp16")
    }
    assert effective == {"fp32": [3, 3], "bf16": [3, 3], "fp16": [0, 0]}


def test_many_lying_rows_are_counted_and_the_first_recorded() -> None:
    extras = Extras(bias=torch.full((1, 1, 1, 2), -1e4, dtype=torch.float64))
    x = torch.zeros(1, 1, 2 * ROWS_RECORDED, 4, dtype=torch.float64)
    count, rows = lying_rows(x, x[:, :, :2], AttentionSpec(), extras, "bf16")
    assert (count, len(rows)) == (2 * ROWS_RECORDED, ROWS_RECORDED)


def test_honest_biases_have_no_lying_rows() -> None:
    bias = torch.tensor([[0.0, -math.inf, -40.0]], dtype=torch.float64)[None, None]
    q = torch.ones(1, 1, 2, 4, dtype=torch.float64)
    k = torch.ones(1, 1, 3, 4, dtype=torch.float64)
    assert lying_rows(q, k, AttentionSpec(), Extras(bias=bias), "fp16") == (0, ())


@pytest.mark.parametrize(
    "spec", [AttentionSpec(causal=True), AttentionSpec(window=(1, 2), align="top-left")], ids=str
)
def test_seen_keys_are_those_that_weigh_in_the_truth(spec: AttentionSpec) -> None:
    lens, mask = (
        torch.tensor([5, 2]),
        torch.rand(2, 1, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.7,
    )
    seen = seen_keys(4, 5, spec, Extras(mask=mask, kv_lens=lens))
    zero, eye = torch.zeros(2, 1, 5, 3), torch.eye(5).expand(2, 1, 5, 5)
    truth = harness.reference(zero[:, :, :4], zero, eye, spec, mask=mask, kv_lens=lens)
    assert torch.equal(truth.out > 0, seen.expand(2, 1, 4, 5))


def test_relations_are_recorded_where_a_case_asks_for_them() -> None:
    made = Case(
        "made", "steps", Shape(batch=2, heads=2, q_len=20, head_dim=8), "made up", AttentionSpec(causal=True)
    )
    names = ["online_softmax", "decode_with_cache", "naive_masked"]
    assert all(not r.relations for r in harness.run([made], names, ["bf16"], seeds=1))
    records = harness.run([replace(made, relations=True, layout="padded")], names, ["bf16"], seeds=1)
    assert {r.status for r in records} == {Status.PASS}
    found = {r.implementation: {x.name: x for x in r.relations} for r in records}
    shared = {"last row alone", "sequences alone", "contiguous"}
    assert found["naive_masked"].keys() == shared
    assert found["decode_with_cache"].keys() == shared | {"steps=1", "steps=64", "naive_masked"}
    assert found["online_softmax"].keys() > shared | {
        "block=16",
        "block=all keys",
        "q_block=1",
        "naive_masked",
    }
    assert all(x["contiguous"].bits_equal for x in found.values())
    assert all(x["sequences alone"].count == 2 * 2 * 20 * 8 for x in found.values())
    assert not found["online_softmax"]["block=16"].bits_equal


def test_relations_leave_mask_bias_sinks_and_lengths_with_their_rows() -> None:
    extras = {
        "mask": Draw("random", {"axes": "BHLS", "keep": 0.8}), "bias": Draw("normal", {"axes": "HLS"}),
        "sinks": Draw("normal"), "kv_lens": Draw("values", {"values": [9, 7]}),
    }  # fmt: skip
    made = Case("made", "all", SHAPE, "made up", AttentionSpec(causal=True), extras=extras, relations=True)
    for record in harness.run([made], None, ["fp64"], seeds=1):
        for (
            relation
        ) in record.relations:  # FP64: what another order of a sum changes, and no row or key mixed up
            assert relation.rel_l2 < 1e-14, (record.implementation, relation)
