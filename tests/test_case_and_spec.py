"""Shapes, rules and cases: what they refuse, how they are found, and that the shipped ones hold together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from harness.case import Case, Draw, case_files, cases_folder, load_cases
from harness.inputs import make_inputs
from harness.spec import AttentionSpec, Shape

SHIPPED = load_cases("all")
ONE = "from harness import Case, Shape\nCASES = [Case('mine', '{}', Shape(q_len=4, head_dim=8), 'a why')]\n"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch": -1}, "batch is -1; allowed: an integer ≥ 0"),
        ({"heads": 0}, "heads is 0; allowed: an integer ≥ 1"),
        ({"heads": 2, "kv_heads": 0}, "kv_heads is 0"),
        ({"q_len": 1.0}, "q_len is 1.0"),
        ({"kv_len": -1}, "kv_len is -1"),
        ({"head_dim": True}, "head_dim is True"),
        ({"value_dim": "64"}, "value_dim is '64'"),
        ({"heads": 3, "kv_heads": 2}, "3 query heads over 2 kv heads"),
    ],
)
def test_shape_refuses(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Shape(**fields)


def test_shape_fills_in_what_is_left_out_and_prints_what_differs() -> None:
    assert Shape(1, 4, 9, 64).tensor("k") == (1, 4, 9, 64)
    assert str(Shape(1, 4, 9, 64)) == "[1, 4, 9, 64]"
    shape = Shape(2, 4, 1, 64, kv_heads=2, kv_len=9, value_dim=80)
    assert str(shape) == "[2, 4/2, 1×9, 64→80]"
    assert [shape.tensor(t) for t in ("q", "k", "v", "out")] == [
        (2, 4, 1, 64), (2, 2, 9, 64), (2, 2, 9, 80), (2, 4, 1, 80),
    ]  # fmt: skip
    assert shape.group == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"align": "left"}, "align is 'left'; allowed: bottom-right, top-left"),
        ({"empty_row": "one"}, "empty_row is 'one'; allowed: zero, nan"),
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": math.inf}, "scale is inf"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"softcap": math.nan}, "softcap is nan"),
        ({"softcap": math.inf}, "softcap is inf"),
        ({"window": 4}, "window is 4; allowed: a pair"),
        ({"window": (1,)}, "window is"),
        ({"window": (1, -1)}, "window is"),
        ({"window": (1.0, None)}, "window is"),
        ({"window": (True, None)}, "window is"),
    ],
)
def test_spec_refuses(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AttentionSpec(**fields)


def test_spec_derives_scale_sides_and_shift() -> None:
    assert AttentionSpec().scale_for(64) == 0.125
    assert AttentionSpec().scale_for(0) == 1.0
    assert AttentionSpec(scale=2).scale_for(64) == 2.0
    assert (AttentionSpec(window=(3, 1)).left, AttentionSpec(window=(3, 1)).right) == (3, 1)
    assert AttentionSpec(causal=True, window=(3, 1)).right == 0
    assert (AttentionSpec().left, AttentionSpec().right) == (None, None)
    assert AttentionSpec(window=[3, None]) == AttentionSpec(window=(3, None))  # hashes too
    assert AttentionSpec().shift(3, 10) == 7
    assert AttentionSpec(align="top-left").shift(3, 10) == 0


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a\n", "a*"])
def test_case_refuses_a_name_that_cannot_be_an_id(name: str) -> None:
    with pytest.raises(ValueError, match=r"case name is .*; allowed: letters, digits"):
        Case("group", name, Shape(), "why")
    with pytest.raises(ValueError, match="case name is"):
        Case(name, "name", Shape(), "why")


def test_case_refuses_to_exist_without_a_reason() -> None:
    with pytest.raises(ValueError, match="case g/n gives no reason; say in `why`"):
        Case("g", "n", Shape(), " \n")


def test_draw_hashes_and_copies_its_parameters() -> None:
    params = {"q": [[1, 2], [3, 4]]}
    draw = Draw("values", params)
    params["q"] = []
    assert draw.params["q"] == ((1, 2), (3, 4))
    assert hash(draw) == hash(Draw("values", {"q": [[1, 2], [3, 4]]}))


def test_cases_are_found_by_name_by_path_and_all_together(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ONE.format("a"))
    assert [c.id for c in load_cases(tmp_path / "mine.py")] == ["mine/a"]
    smoke = load_cases("smoke")
    assert {c.group for c in smoke} == {"smoke"}
    assert load_cases(["smoke", str(tmp_path / "mine.py")]) == (*smoke, *load_cases(tmp_path / "mine.py"))
    assert set(smoke) < set(load_cases("all"))
    assert load_cases(["smoke", "all"])[: len(smoke)] == smoke


def test_file_named_twice_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cases_folder().parent)
    assert load_cases(["smoke", "smoke", str(case_files()["smoke"])]) == load_cases("smoke")
    assert load_cases(["smoke", f"{cases_folder().name}/smoke.py"]) == load_cases("smoke")


@pytest.mark.parametrize("name", ["nope", "nope.py", "", "smoke.py.bak"])
def test_unknown_cases_are_told_the_valid_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"unknown cases .*; allowed: all, .*smoke.*, or a path\.py"):
        load_cases(name)


@pytest.mark.parametrize("text", ["", "CASES = 3", "CASES = [3]", "CASES = {}"])
def test_file_without_cases_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.py").write_text(text)
    with pytest.raises(ValueError, match=r"f\.py does not define CASES; allowed: a list of harness\.Case"):
        load_cases(tmp_path / "f.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("CASES = [", "f.py: SyntaxError"),
        ("x = 1\nCASES = [nope]", "f.py, line 2: NameError: name 'nope' is not defined"),
        ("import nope_nope", "f.py, line 1: ModuleNotFoundError"),
        ("from harness import Shape\n\nShape(heads=0)", "f.py, line 3: ValueError: heads is 0"),
    ],
)
def test_mistake_in_a_case_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "f.py").write_text(text)
    with pytest.raises(ValueError, match=r"mend the case file") as caught:
        load_cases(tmp_path / "f.py")
    assert said in str(caught.value)


def test_id_used_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(ONE.format("same"))
    (tmp_path / "b.py").write_text(ONE.format("same"))
    with pytest.raises(ValueError, match="case id 'mine/same' is used twice"):
        load_cases([tmp_path / "a.py", tmp_path / "b.py"])


@pytest.mark.parametrize("case", SHIPPED, ids=lambda c: c.id)
def test_shipped_case_draws_inputs_of_its_declared_shape(case: Case) -> None:
    inputs = make_inputs(case, 0)
    for name, x in zip("qkv", inputs.tensors, strict=True):
        assert tuple(x.shape) == case.shape.tensor(name)
    assert case.why.strip() == case.why
    assert case.group in case_files()


def test_shipped_files_hold_the_group_they_are_named_after() -> None:
    for name in case_files():
        assert {c.group for c in load_cases(name)} == {name}


@pytest.mark.parametrize(
    ("field", "value"),
    [("causal", "yes"), ("causal", 1), ("scale", "a"), ("scale", True), ("softcap", "a"), ("softcap", True)],
)
def test_a_rule_of_the_wrong_type_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} is {value!r}; allowed: "):
        AttentionSpec(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    ["assert False, 'boo'", "raise RuntimeError('boo')", "import sys; sys.exit(7)", "f = lambda: f()\nf()"],
)
def test_whatever_a_case_file_raises_is_one_line_with_its_place(tmp_path: Path, line: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"mine\.py, line \d+: .*; mend the case file$"):
        load_cases(file)


def test_parts_of_a_case_of_the_wrong_type_are_refused_by_name() -> None:
    for field, value in (("shape", 3), ("spec", 3), ("draw", 3)):
        with pytest.raises(ValueError, match=f"^{field} of x/y is 3; allowed: a "):
            Case(**{"group": "x", "name": "y", "shape": Shape(), "why": "z", field: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draw is"):
        Draw([], {})  # type: ignore[arg-type]
