"""The named recipes as they are declared, what a recipe refuses, and recipes from files."""

from __future__ import annotations

import itertools
import math
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Accumulator, Recipe, Scaling, get_recipe, recipes
from harness.formats import FORMATS
from harness.quantize import quantize
from harness.recipe import DEFAULT_RECIPES, GRANULARITIES, RECIPES, SOURCES, STAGES, TENSORS, load_recipe

HEAD_AMAX = Scaling("head", "amax")
# name → (base, storage of q, k, v, stages rounded, scaled tensors, P's factor, when P is normalised)
FP8 = ("fp32", ("fp8_e4m3",) * 3, {"probs": "fp8_e4m3", "out": "bf16"})
DEFINITIONS: dict[str, tuple[Any, ...]] = {
    "fp64": ("fp64", ("fp64",) * 3, {}, {}, 1.0, "late"),
    "fp32": ("fp32", ("fp32",) * 3, {}, {}, 1.0, "late"),
    "bf16": ("fp32", ("bf16",) * 3, {"probs": "bf16", "out": "bf16"}, {}, 1.0, "late"),
    "fp16": ("fp32", ("fp16",) * 3, {"probs": "fp16", "out": "fp16"}, {}, 1.0, "late"),
    "fp8_e4m3": (*FP8, dict.fromkeys(TENSORS, HEAD_AMAX), 256.0, "late"),
    "bf16_eager": ("fp32", ("bf16",) * 3, dict.fromkeys(STAGES, "bf16"), {}, 1.0, "early"),
    "fp16_eager": ("fp32", ("fp16",) * 3, dict.fromkeys(STAGES, "fp16"), {}, 1.0, "early"),
    "fp16_eager_clamped": ("fp32", ("fp16",) * 3, dict.fromkeys(STAGES, "fp16"), {}, 1.0, "early"),
    "fp8_e4m3_unscaled": (*FP8, dict.fromkeys(TENSORS, Scaling("tensor", "unit")), 256.0, "late"),
    "fp8_kv": (
        "fp32", ("bf16", "fp8_e4m3", "fp8_e4m3"), {"probs": "bf16", "out": "bf16"},
        {"k": HEAD_AMAX, "v": HEAD_AMAX}, 1.0, "late",
    ),
    "fp8_e4m3_block": (*FP8, dict.fromkeys(TENSORS, Scaling("block", rows=128)), 256.0, "late"),
    "fp8_e4m3_hadamard": (*FP8, dict.fromkeys(TENSORS, Scaling("block", rows=128)), 256.0, "late"),
    "mxfp8": (*FP8, dict.fromkeys(TENSORS, Scaling("mx", "amax", True)), 256.0, "late"),
    "fp8_e4m3fnuz": (
        "fp32", ("fp8_e4m3fnuz",) * 3, {"probs": "fp8_e4m3fnuz", "out": "bf16"}, dict.fromkeys(TENSORS, HEAD_AMAX),
        128.0, "late",
    ),
    "fp8_e4m3_hopper": (*FP8, dict.fromkeys(TENSORS, HEAD_AMAX), 256.0, "late"),
    "fp8_e4m3_promoted": (*FP8, dict.fromkeys(TENSORS, HEAD_AMAX), 256.0, "late"),
}  # fmt: skip

ACCUMULATORS = {
    "fp8_e4m3_hopper": Accumulator(bits=13, depth=32, promote=None),
    "fp8_e4m3_promoted": Accumulator(bits=13, depth=32, promote=128),
}


def test_every_built_in_recipe_has_a_definition_here() -> None:
    assert recipes() == tuple(RECIPES) == tuple(DEFINITIONS)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_built_in_recipe_is_what_its_definition_says(name: str) -> None:
    r = get_recipe(name)
    storage = tuple(r.storage[t] for t in TENSORS)
    assert (r.base, storage, dict(r.at), dict(r.scaling), r.p_scale, r.normalise) == DEFINITIONS[name]
    assert r.name == name
    assert r.row_sum == "before"
    assert r.inputs is None
    assert r.rotate == ("hadamard" if name == "fp8_e4m3_hadamard" else None)
    assert r.accumulator == ACCUMULATORS.get(name)
    # FP32 accumulation and statistics: whatever is not named stays in the base.
    for stage in STAGES:
        assert r.format_of(stage) == r.at.get(stage, r.base)
    assert r.out_format == r.at.get("out", r.base)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_overflow_follows_the_format_except_in_the_clamped_recipe(name: str) -> None:
    r = get_recipe(name)
    for place in (*STAGES, *TENSORS):
        clamped = name == "fp16_eager_clamped" and place in ("scores_raw", "scores")
        default = FORMATS[r.format_of(place)].default_overflow
        assert r.policy(place) == ("saturate" if clamped else default), place


def test_a_default_run_takes_coarse_scales_and_whole_accumulators_and_no_second_truth() -> None:
    assert DEFAULT_RECIPES == (
        "fp32", "bf16", "fp16", "fp8_e4m3", "bf16_eager", "fp16_eager", "fp16_eager_clamped", "fp8_e4m3_unscaled",
        "fp8_kv",
    )  # fmt: skip


@pytest.mark.parametrize(("base", "bits"), [("fp32", 126), ("fp64", 1022)])
def test_p_scale_reaches_as_far_as_the_base_holds_it_and_its_inverse(base: str, bits: int) -> None:
    for edge, beyond in ((2.0**bits, math.inf), (2.0**-bits, 0.0)):
        assert Recipe("x", base=base, p_scale=edge).p_scale == edge
        with pytest.raises(
            ValueError, match=rf"allowed: a finite number > 0, 2\^-{bits} to 2\^{bits}, which"
        ):
            Recipe("x", base=base, p_scale=math.nextafter(edge, beyond))


def test_the_peak_of_p_times_its_factor_fits_e4m3_and_the_next_power_of_two_does_not() -> None:
    assert get_recipe("fp8_e4m3").p_scale <= FORMATS["fp8_e4m3"].max < 2 * get_recipe("fp8_e4m3").p_scale


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "recipe name is ''; allowed: a non-empty string"),
    ({"name": 3}, "recipe name is 3; allowed"),
    ({"name": "a b"}, "recipe name is 'a b'; allowed: a non-empty string of letters, digits and - _ . "),
    ({"name": "../x"}, "recipe name is '../x'; allowed"),
    ({"name": "bf16,fp16"}, "recipe name is 'bf16,fp16'; allowed"),
    (
        {"p_scale": 1e300},
        r"p_scale is 1e\+300; allowed: a finite number > 0, 2\^-126 to 2\^126, which fp32 holds",
    ),
    ({"p_scale": 10**400}, "allowed: a finite number > 0"),
    ({"inputs": "fp12"}, "format of inputs is 'fp12'; allowed: fp64, fp32"),
    ({"inputs": 16}, "format of inputs is 16; allowed: fp64, fp32"),
    ({"inputs": "fp64"}, "fp64 holds more than the base fp32; allowed"),
    ({"rotate": "q"}, "rotate is 'q'; allowed: hadamard, or None; q and k are rotated together"),
    ({"rotate": ("q", "k")}, "allowed: hadamard, or None"),
    ({"accumulator": 13}, "accumulator is 13; allowed: an Accumulator, or None"),
    (
        {"accumulator": Accumulator(), "base": "fp64"},
        "an accumulator was given with base fp64; allowed: base fp32",
    ),
    ({"base": "bf16"}, "base is 'bf16'; allowed: fp32, fp64"),
    ({"base": ["fp32"]}, "allowed: fp32, fp64"),
    ({"row_sum": "never"}, "row_sum is 'never'; allowed: before, after"),
    ({"normalise": "twice"}, "normalise is 'twice'; allowed: late, early"),
    ({"normalise": "early", "row_sum": "after"}, "allowed: 'before' with normalise='early'"),
    ({"p_scale": 0.0}, r"p_scale is 0.0; allowed: a finite number > 0"),
    ({"p_scale": float("inf")}, "p_scale is inf; allowed"),
    ({"p_scale": float("nan")}, "p_scale is nan; allowed"),
    ({"p_scale": "256"}, "p_scale is '256'; allowed"),
    ({"p_scale": True}, "p_scale is True; allowed"),
    ({"storage": {"x": "fp16"}}, "storage names 'x'; allowed: q, k, v"),
    ({"storage": "fp16"}, "storage is 'fp16'; allowed: a mapping with keys among q, k, v"),
    ({"storage": {"q": "fp12"}}, "format of q is 'fp12'; allowed: fp64, fp32, tf32"),
    ({"storage": {"q": FORMATS["fp16"]}}, "allowed: fp64, fp32, tf32"),
    ({"storage": {"q": "fp64"}}, "fp64 holds more than the base fp32; allowed: formats within the base"),
    ({"at": {"softmax": "fp16"}}, "at names 'softmax'; allowed: scores_raw, scores, shifted"),
    ({"at": ["probs"]}, r"at is \['probs'\]; allowed: a mapping"),
    ({"at": {"probs": None}}, "format of probs is None; allowed"),
    ({"at": {"probs": "fp64"}}, "fp64 holds more than the base"),
    ({"scaling": {"p": Scaling()}}, "scaling names 'p'; allowed: q, k, v"),
    ({"scaling": {"k": "head"}}, "scaling of k is 'head'; allowed: a Scaling"),
    ({"overflow": {"lse": "inf"}}, "overflow names 'lse'; allowed: scores_raw"),
    ({"overflow": {"scores": "wrap"}}, "unknown overflow policy 'wrap'; allowed: saturate, nan, inf"),
    ({"overflow": {"k": "inf"}, "storage": {"k": "fp8_e4m3"}}, "fp8_e4m3 has no infinity; allowed"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_a_wrong_field_is_refused_in_one_line_that_lists_the_allowed(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Recipe(**{"name": "x", **fields})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"granularity": "row"}, "granularity is 'row'; allowed: tensor, head, token, block, mx"),
        (
            {"granularity": "mx"},
            "power_of_two is False for mx, whose scales are E8M0; allowed: True, 'floor'",
        ),
        ({"granularity": "block", "rows": 0}, "rows is 0; allowed: an integer ≥ 1"),
        ({"granularity": "block", "rows": True}, "rows is True; allowed: an integer ≥ 1"),
        ({"granularity": "block", "rows": 1.5}, "rows is 1.5; allowed: an integer ≥ 1"),
        ({"granularity": "head", "rows": 64}, "rows is 64 for granularity head; allowed: with block alone"),
        ({"power_of_two": 1}, "power_of_two is 1; allowed: True, False"),
        ({"source": "max"}, "scale source is 'max'; allowed: amax, given, unit"),
        ({"power_of_two": "yes"}, "power_of_two is 'yes'; allowed: True, False"),
    ],
)
def test_a_wrong_scaling_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scaling(**fields)


@pytest.mark.parametrize("wrong", ["fp17", "", None, 3, ["fp16"]])
def test_an_unknown_recipe_is_answered_with_the_names(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"allowed: fp64, fp32, bf16, fp16, fp8_e4m3"):
        get_recipe(wrong)


def test_recipes_hash_compare_and_pickle() -> None:
    for a in RECIPES.values():
        copy = pickle.loads(pickle.dumps(a))
        assert copy == a
        assert hash(copy) == hash(a)
        assert copy.digest == a.digest
        assert copy.storage_key == a.storage_key
        assert get_recipe(a) is a
    assert len(set(RECIPES.values())) == len(RECIPES)


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        get_recipe("fp16").base = "fp64"  # type: ignore[misc]
    with pytest.raises(TypeError):
        get_recipe("fp16").at["out"] = "fp32"  # type: ignore[index]
    at = {"out": "fp16"}
    recipe = Recipe("x", at=at)
    at["out"] = "bf16"
    assert recipe.format_of("out") == "fp16"


def test_digests_differ_wherever_recipes_compute_different_things() -> None:
    digests = {r.digest for r in RECIPES.values()}
    assert len(digests) == len(RECIPES)
    assert replace(get_recipe("fp16"), name="other").digest == get_recipe("fp16").digest
    third = replace(get_recipe("bf16"), p_scale=1 / 3)
    assert third.digest != replace(third, p_scale=0.333333).digest
    for change in (
        {"row_sum": "after"}, {"normalise": "early"}, {"overflow": {"probs": "saturate"}}, {"at": {"out": "bf16"}},
        {"inputs": "fp16"}, {"rotate": "hadamard"}, {"scaling": {"k": Scaling(power_of_two="floor")}},
        {"scaling": {"k": Scaling()}}, {"scaling": {"k": Scaling(power_of_two=True)}}, {"storage": {"q": "bf16"}},
        {"accumulator": Accumulator(bits=14)}, {"accumulator": Accumulator(depth=16)},
        {"accumulator": Accumulator(promote=64)},
    ):  # fmt: skip
        assert replace(get_recipe("bf16"), **{"scaling": {}, **change}).digest != get_recipe("bf16").digest, (
            change
        )


def test_recipes_share_a_truth_exactly_when_they_store_equal_inputs() -> None:
    """Values as a kernel finds them, over inputs that saturate, flush, and tell every scaling apart."""
    g = torch.Generator().manual_seed(0)
    x = (
        torch.randn(2, 3, 130, 40, generator=g, dtype=torch.float64) * 3
    )  # a block more, and a short one, of each kind
    x[0, 0, 0, :2] = torch.tensor([1e5, 1e-9], dtype=torch.float64)
    power = dict.fromkeys(TENSORS, Scaling("head", "amax", power_of_two=True))
    more = [
        Recipe("unit", storage=RECIPES["fp8_e4m3"].storage, scaling={"q": Scaling("head", "unit")}),
        Recipe("none", storage=RECIPES["fp8_e4m3"].storage),
        Recipe("nan", storage=RECIPES["fp8_e4m3"].storage, overflow={"q": "nan"}),
        replace(RECIPES["fp8_e4m3"], name="power", scaling=power),
        replace(RECIPES["fp8_e4m3"], name="token", scaling=dict.fromkeys(TENSORS, Scaling("token"))),
        replace(RECIPES["fp8_e4m3"], name="rotated", rotate="hadamard"),
        replace(RECIPES["fp8_e4m3"], name="from-e5m2", inputs="fp8_e5m2"),
        replace(
            RECIPES["fp8_e4m3"],
            name="blocks-of-two",
            scaling=dict.fromkeys(TENSORS, Scaling("block", rows=2)),
        ),
        replace(
            RECIPES["mxfp8"], name="floor", scaling=dict.fromkeys(TENSORS, Scaling("mx", "amax", "floor"))
        ),
        Recipe("clamped", storage=RECIPES["fp16"].storage, overflow={"v": "saturate"}),
    ]
    every = [*RECIPES.values(), *more]
    stored = {r.name: [quantize(x, t, r).values for t in TENSORS] for r in every}
    for a, b in itertools.combinations(every, 2):
        equal = all(
            torch.equal(p.nan_to_num(nan=7.5), q.nan_to_num(nan=7.5))
            for p, q in zip(stored[a.name], stored[b.name], strict=True)
        )
        assert (a.storage_key == b.storage_key) == equal, (a.name, b.name)


# --- files --------------------------------------------------------------------------------------------------------


def as_toml(r: Recipe) -> str:
    lines = [f'name = "{r.name}"', f'base = "{r.base}"', f"p_scale = {r.p_scale!r}"]
    lines += [f'row_sum = "{r.row_sum}"', f'normalise = "{r.normalise}"']
    lines += [f'{n} = "{x}"' for n, x in (("inputs", r.inputs), ("rotate", r.rotate)) if x is not None]
    for table in ("storage", "at", "overflow"):
        lines += [f"[{table}]", *(f'{k} = "{v}"' for k, v in getattr(r, table).items())]
    for tensor, s in r.scaling.items():
        power = repr(s.power_of_two).lower()
        lines += [f"[scaling.{tensor}]", f'granularity = "{s.granularity}"', f'source = "{s.source}"']
        lines += [f"power_of_two = {power}", f"rows = {s.rows}"]
    if r.accumulator is not None:
        lines += ["[accumulator]", f"bits = {r.accumulator.bits}", f"depth = {r.accumulator.depth}"]
        lines += [] if r.accumulator.promote is None else [f"promote = {r.accumulator.promote}"]
    return "\n".join(lines)


MX_FLOOR = {"k": Scaling("mx", "given", "floor"), "v": Scaling("block", rows=7)}
EVERY_FIELD = Recipe(
    "every", storage={"k": "fp8_e5m2"}, scaling=MX_FLOOR, inputs="fp16", rotate="hadamard",
    accumulator=Accumulator(7, 8, 24),
)  # fmt: skip


@pytest.mark.parametrize("recipe", [*RECIPES.values(), EVERY_FIELD], ids=lambda r: r.name)
def test_a_recipe_file_gives_the_recipe_back(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text(as_toml(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "file.toml") == recipe


def test_a_recipe_without_a_name_takes_its_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('storage = {k = "fp8_e5m2"}\n[scaling.k]\nsource = "given"\n', encoding="utf-8")
    recipe = load_recipe(path)
    assert recipe == Recipe("mine", storage={"k": "fp8_e5m2"}, scaling={"k": Scaling(source="given")})


WRONG_FILES = {
    "base = ": "cannot be read",
    'bases = "fp32"': "the file names 'bases'; allowed: name, base, storage, at",
    'base = "fp16"': "base is 'fp16'; allowed: fp32, fp64",
    "p_scale = 'a'": "p_scale is 'a'; allowed",
    "at = 3": "at is 3; allowed: a mapping",
    "scaling = 3": "scaling is 3; allowed: a mapping",
    "scaling = {k = 3}": "scaling.k is 3; allowed: a mapping with keys among granularity, source, power_of_two",
    "scaling = {p = {}}": "scaling names 'p'; allowed: q, k, v",
    'scaling = {k = {source = "x"}}': "scale source is 'x'; allowed: amax, given, unit",
    "scaling = {k = {amax = 1}}": "scaling.k names 'amax'; allowed: granularity, source, power_of_two",
    "accumulator = 3": "accumulator is 3; allowed: a mapping with keys among bits, depth, promote",
    "accumulator = {width = 3}": "accumulator names 'width'; allowed: bits, depth, promote",
    "accumulator = {depth = 0}": "accumulator depth is 0; allowed",
    "name = 3": "recipe name is 3; allowed",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_wrong_recipe_file_is_refused_in_one_line_with_its_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=WRONG_FILES[text]) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_absent_or_binary_recipe_file_is_refused_with_its_path(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.toml", tmp_path, binary):
        with pytest.raises(ValueError, match="cannot be read") as caught:
            load_recipe(path)
        assert str(path) in str(caught.value)


def test_the_allowed_words_are_the_ones_documented() -> None:
    assert GRANULARITIES == ("tensor", "head", "token", "block", "mx")
    assert SOURCES == ("amax", "given", "unit")


def test_a_file_cannot_give_a_built_in_name_another_meaning(tmp_path: Path) -> None:
    path = tmp_path / "bf16.toml"
    path.write_text('name = "bf16"\nstorage = { q = "fp16", k = "fp16", v = "fp16" }\n')
    with pytest.raises(ValueError, match="name is 'bf16', a built-in recipe with another definition"):
        load_recipe(path)
