"""Inputs are what their case says: the same for one key, independent between keys, and drawn as each kind promises."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from harness.case import Case, Draw
from harness.inputs import BLOCK_ROWS, KINDS, Source, make_inputs, read_tensors
from harness.spec import AttentionSpec, Shape
from harness.truth import reference

U = 2.0**-53
VALUES = {"q": [[[[1.0, 2.0]]]], "k": [[[[3.0, 4.0]]]], "v": [[[[5.0, 6.0]]]]}


def case(
    kind: str = "normal", shape: Shape | None = None, name: str = "one", spec: AttentionSpec | None = None,
    **params: Any,
) -> Case:  # fmt: skip
    shape = shape or Shape(2, 4, 40, 64, kv_heads=2, kv_len=50)
    return Case("inputs", name, shape, "to test the inputs", spec or AttentionSpec(), Draw(kind, params))


# --- which numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("values", "file", "layer", "smollm2_layer")])
def test_one_case_and_seed_give_the_same_bits_again(kind: str) -> None:
    params = {"score": 3.0} if kind == "amplitude" else {}
    one, again = (make_inputs(case(kind, **params), 7) for _ in range(2))
    assert one.hash == again.hash
    assert all(torch.equal(a, b) for a, b in zip(one.tensors, again.tensors, strict=True))
    assert all(x.dtype == torch.float64 and x.is_contiguous() for x in one.tensors)
    assert make_inputs(case(kind, **params), 8).hash != one.hash


def test_hash_is_the_sha256_of_the_bytes_of_q_k_and_v() -> None:
    made = make_inputs(case(), 0)
    data = b"".join(x.numpy().tobytes() for x in made.tensors)
    assert made.hash == hashlib.sha256(data).hexdigest()


def test_anything_that_changes_the_numbers_changes_the_hash() -> None:
    cases = [
        case(),
        case(name="two"),
        dataclasses.replace(case(), group="other"),
        case(q=2.0),
        case(v_mean=1.0),
    ]
    cases += [
        case(k=2.0),
        case("outliers"),
        case("uniform"),
        case(shape=Shape(2, 4, 40, 64, kv_heads=2, kv_len=51)),
    ]
    hashes = [make_inputs(c, seed).hash for c, seed in itertools.product(cases, range(3))]
    assert len(set(hashes)) == len(hashes)


def test_reason_and_rules_of_a_case_do_not_change_its_numbers() -> None:
    changed = dataclasses.replace(case(), why="another reason", spec=AttentionSpec(causal=True, scale=0.5))
    assert make_inputs(changed, 0).hash == make_inputs(case(), 0).hash


def test_generators_differ_by_case_seed_tensor_and_every_part_of_the_block() -> None:
    keys = itertools.product(
        ("one", "two"), (0, 1, 10), ("q", "k", "v", "q1"), ((), (0,), (0, 0), (0, 1), (1, 0), (1, 10))
    )
    first = [Source(case(name=n), seed).generator(t, *block).random() for n, seed, t, block in keys]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("kind", ["normal", "uniform", "outliers"])
def test_one_block_of_rows_can_be_drawn_alone(kind: str) -> None:
    """Rows from BLOCK_ROWS on, of head 1 of sequence 1, from their own generator."""
    long = case(kind, Shape(2, 2, 3, 2, kv_len=BLOCK_ROWS + 5))
    k = make_inputs(long, 3).k[1, 1]
    for start, rows in ((0, BLOCK_ROWS), (BLOCK_ROWS, 5)):
        g = Source(long, 3).generator("k", 1, 1, start)
        alone = g.uniform(10.0, 30.0, (rows, 2)) if kind == "uniform" else g.standard_normal((rows, 2))
        if kind == "outliers":
            alone = alone + 10.0 * g.standard_normal((rows, 2)) * (g.random((rows, 2)) < 0.001)
        assert np.array_equal(k[start : start + rows].numpy(), alone)


def test_a_longer_tensor_begins_with_the_blocks_of_a_shorter_one() -> None:
    short = make_inputs(case(shape=Shape(1, 1, 2, 3, kv_len=BLOCK_ROWS)), 0)
    long = make_inputs(case(shape=Shape(1, 1, 2, 3, kv_len=BLOCK_ROWS + 1)), 0)
    assert torch.equal(long.k[:, :, :BLOCK_ROWS], short.k)


# --- what each kind promises --------------------------------------------------------------------------------------


def assert_moments(x: torch.Tensor, mean: float, std: float, kurtosis: float = 3.0) -> None:
    """Within 6 standard errors: the mean's is std/√n, the variance's std²·√((kurtosis − 1)/n). Seeds are fixed."""
    n = x.numel()
    assert abs(float(x.mean()) - mean) <= 6 * std / math.sqrt(n)
    assert abs(float(x.var()) / std**2 - 1) <= 6 * math.sqrt((kurtosis - 1) / n)


def test_edits_change_what_they_name_in_their_order_and_nothing_else() -> None:
    edits = [
        ("kv", [1], [0, -1], None, "set", "nan"), ("q", None, None, 2, "times", 3.0), ("q", None, None, 2, "add", 1.0),
        ("v", 0, 3, [0, 1], "sign", 5.0),
    ]  # fmt: skip
    plain, edited = (make_inputs(case(kind, **params), 4) for kind, params in
                     (("normal", {"k": 2.0}), ("edited", {"edits": edits, "k": 2.0})))  # fmt: skip
    q, k, v = (x.clone() for x in plain.tensors)
    k[:, 1, [0, -1]] = v[:, 1, [0, -1]] = math.nan
    q[..., 2] = 3 * q[..., 2] + 1
    v[:, 0, 3, :2] = 5 * torch.sign(v[:, 0, 3, :2])
    for got, want in zip(edited.tensors, (q, k, v), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "edit",
    [
        ("x", None, None, None, "set", 1.0), ("q", None, None, None, "cube", 1.0), ("q", None, None, "set", 1.0),
        ("q", None, None, None, "set", "many"), ("q", 99, None, None, "set", 1.0),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_edit_is_one_line_that_names_the_case(edit: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="case inputs/one draws 'edited' with wrong parameters: "):
        make_inputs(case("edited", edits=[edit]), 0)


@pytest.mark.parametrize(("q_len", "align"), [(6, "bottom-right"), (3, "bottom-right"), (3, "top-left")])
def test_rotated_tokens_score_by_the_distance_of_their_positions(q_len: int, align: str) -> None:
    """Each channel pair as a complex number: q·k is Re Σ q̂ conj(k̂) e^(i(p_q − p_k)θ). Angles near 2^14·1 carry 2^-53
    of their size, so two of them and four products stay within 2^-36 of |q||k|."""
    shape = Shape(1, 1, q_len, 8, kv_len=6)
    spec = AttentionSpec(causal=True, align=align)
    plain, turned = (make_inputs(case(kind, shape, spec=spec, **p), 2) for kind, p in
                     (("normal", {}), ("rope", {"start": 16000})))  # fmt: skip
    a, b = (torch.view_as_complex(x[0, 0].unflatten(-1, (4, 2)).contiguous()) for x in (plain.q, plain.k))
    first = 6 - q_len if align == "bottom-right" else 0
    apart = torch.arange(first, first + q_len)[:, None] - torch.arange(6)
    turn = torch.polar(
        torch.ones(1, dtype=torch.float64), apart[..., None] * 1e4 ** (-torch.arange(4.0).double() / 4)
    )
    want = (a[:, None] * b.conj() * turn).real.sum(-1)
    bound = 2.0**-36 * turned.q.norm(dim=-1).max() * turned.k.norm(dim=-1).max()
    assert float((turned.q[0, 0] @ turned.k[0, 0].T - want).abs().max()) <= float(bound)
    assert torch.equal(turned.v, plain.v)


def test_rotation_needs_pairs_of_channels() -> None:
    with pytest.raises(ValueError, match="head_dim is 7; allowed: an even one"):
        make_inputs(case("rope", Shape(1, 1, 2, 7)), 0)


def test_normal_has_the_deviations_and_mean_that_were_asked() -> None:
    made = make_inputs(case(q=8.0, k=0.5, v=2.0, v_mean=-3.0), 1)
    for x, mean, std in zip(made.tensors, (0, 0, -3.0), (8.0, 0.5, 2.0), strict=True):
        assert_moments(x, mean, std)


@pytest.mark.parametrize("d", [16, 64, 128])
def test_variance_of_q_k_is_the_head_dim(d: int) -> None:
    """q and k are independent between pairs: one q, one k each. A sum of d products of normals has variance d and
    kurtosis 3 + 6/d."""
    shape = Shape(1, 1, BLOCK_ROWS, d)
    made = make_inputs(case(shape=shape), 2)
    assert_moments((made.q * made.k).sum(-1), 0.0, math.sqrt(d), 3 + 6 / d)


def test_q_k_and_v_are_independent_of_each_other_and_between_heads() -> None:
    """Correlations of n independent pairs are within 6/√n."""
    made = make_inputs(case(shape=Shape(2, 2, 1000, 8)), 4)
    rows = torch.cat([x.reshape(4, -1) for x in made.tensors])
    off = torch.corrcoef(rows) - torch.eye(12, dtype=torch.float64)
    assert float(off.abs().max()) <= 6 / math.sqrt(8000)


def test_outliers_have_their_rate_and_size() -> None:
    """Variance 1 + rate·std²; beyond 6 lie the normals' 2e-9 and 55 % of the outliers: erfc(6/√(2·101))."""
    made = make_inputs(case("outliers", Shape(1, 1, BLOCK_ROWS, 64), rate=0.01), 0)
    for x in made.tensors:
        share = 0.01 * math.erfc(6 / math.sqrt(2 * 101))
        seen = float((x.abs() > 6).double().mean())
        assert abs(seen - share) <= 6 * math.sqrt(share / x.numel())
    none = make_inputs(case("outliers", rate=0.0), 0).q
    assert_moments(none, 0.0, 1.0)


def test_channel_outliers_scale_one_channel_of_k_alone() -> None:
    made, plain = make_inputs(case("channel_outliers", channel=5, factor=20.0), 0), make_inputs(case(), 0)
    factors = torch.ones(64, dtype=torch.float64)
    factors[5] = 20.0
    assert torch.equal(made.k, plain.k * factors)
    assert torch.equal(made.q, plain.q)
    assert torch.equal(made.v, plain.v)


@pytest.mark.parametrize(
    ("params", "factor"), [({"raw": 65504.0}, 1.0), ({"score": 11.0}, 0.25), ({"raw": 1e-3}, 1.0)]
)
def test_amplitude_meets_its_peak(params: dict[str, float], factor: float) -> None:
    """To FP64: two dot products of D terms (γ_D of Σ|q||k| each) and the roundings of the factor and of q."""
    made = make_inputs(case("amplitude", spec=AttentionSpec(scale=0.25), **params), 0)
    k = made.k.repeat_interleave(2, 1)
    peak = float((made.q @ k.mT).abs().max()) * factor
    tol = (2 * 64 + 4) * U * float((made.q.abs() @ k.abs().mT).max()) * factor
    (target,) = params.values()
    assert abs(peak - target) <= tol
    assert torch.equal(made.v, make_inputs(case(), 0).v)


@pytest.mark.parametrize("seed", range(6))
def test_amplitude_is_that_of_a_visible_pair_and_positive(seed: int) -> None:
    made = make_inputs(case("amplitude", spec=AttentionSpec(causal=True), score=11.0), seed)
    s = 0.125 * (made.q @ made.k.repeat_interleave(2, 1).mT)
    seen = s.tril(made.k.shape[2] - made.q.shape[2])
    tol = (2 * 64 + 4) * U * float((made.q.abs() @ made.k.repeat_interleave(2, 1).abs().mT).max())
    assert abs(float(seen.max()) - 11.0) <= tol
    assert float(seen.abs().max()) == float(seen.max())


def test_tied_keys_are_one_vector_that_every_query_scores_the_same() -> None:
    made = make_inputs(case("tied", ties=3, score=10.0), 0)
    assert torch.equal(made.k[:, :, :3], made.k[:, :, :1].expand(-1, -1, 3, -1))
    s = (made.q @ made.k.repeat_interleave(2, 1).mT) * 0.125
    assert bool((s[..., :3] == 10.0).all())  # 8·10 is exact, and so is all else
    assert float(s[..., 3:].max()) < 10.0
    assert float(made.v.min()) >= -4.0
    assert float(made.v.max()) <= -2.0


def test_deep_negative_scores_lie_near_minus_the_depth() -> None:
    """−depth + N(0, (D − 1)/D): 16,000 of them lie within 7 of it, and exp of it is 0 in FP32."""
    made = make_inputs(case("deep_negative", depth=200.0), 0)
    s = (made.q @ made.k.repeat_interleave(2, 1).mT) * 0.125
    assert float((s + 200.0).abs().max()) <= 7.0
    assert float(s.exp().float().max()) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_heavy_key_draws_most_of_the_mass(seed: int) -> None:
    """Its score is Σ(1 + a)(1 + b)/√D ≈ √D = 8, the others' N(0, 2): V one-hot on it reads its mass."""
    made = make_inputs(case("heavy_key"), seed)
    v = torch.zeros_like(made.v)
    v[:, :, 0] = 1.0
    mass = reference(made.q, made.k, v).out[..., 0]
    assert float(mass.median()) > 0.5


def test_uniform_stays_within_its_range_and_has_its_moments() -> None:
    made = make_inputs(case("uniform", centre=20.0, half_width=10.0), 0)
    for x in (made.q, made.k):
        assert float(x.min()) >= 10.0
        assert float(x.max()) < 30.0
        assert_moments(x, 20.0, 10 / math.sqrt(3), 1.8)
    assert_moments(made.v, 0.0, 1.0)


def test_values_are_the_numbers_themselves() -> None:
    made = make_inputs(case("values", Shape(1, 1, 1, 2), **VALUES), 5)
    assert [x.flatten().tolist() for x in made.tensors] == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert made.hash == make_inputs(case("values", Shape(1, 1, 1, 2), name="other", **VALUES), 6).hash


# --- files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    save_file({f"a.{n}": torch.full((1, 2, 4, 3), 0.5 + i).bfloat16() for i, n in enumerate("qkv")}, path)
    return path


def test_a_file_gives_its_tensors_and_the_first_tokens_of_them(stored: Path) -> None:
    made = make_inputs(case("file", Shape(1, 2, 3, 3), path=str(stored), prefix="a", tokens=3), 0)
    assert [x.unique().tolist() for x in made.tensors] == [[0.5], [1.5], [2.5]]
    assert make_inputs(case("file", Shape(1, 2, 4, 3), path=str(stored), prefix="a"), 0).q.shape == (
        1,
        2,
        4,
        3,
    )


def write_pickle(path: Path) -> None:
    torch.save({"a.q": torch.zeros(1)}, path)


DAMAGE = {
    "pickle": lambda p: p.write_bytes(pickle.dumps({"a.q": [1.0]})),
    "torch pickle": write_pickle,
    "empty": lambda p: p.write_bytes(b""),
    "text": lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "cut short": lambda p: p.write_bytes(p.read_bytes()[:-5]),
    "cut in the header": lambda p: p.write_bytes(p.read_bytes()[:20]),
    "header is no JSON": lambda p: p.write_bytes(p.read_bytes()[:8] + b"\n" + p.read_bytes()[9:]),
    "huge header": lambda p: p.write_bytes(b"\xff" * 8 + p.read_bytes()[8:]),
    "absent": lambda p: p.unlink(),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_no_safetensors_is_told_in_one_line(stored: Path, damage: str) -> None:
    DAMAGE[damage](stored)
    with pytest.raises(
        ValueError, match=r"some\.safetensors (is not a readable safetensors file|does not exist)"
    ) as e:
        make_inputs(case("file", Shape(1, 2, 4, 3), path=str(stored), prefix="a"), 0)
    assert "\n" not in str(e.value)


def test_a_file_without_the_tensors_names_those_it_has(stored: Path) -> None:
    with pytest.raises(ValueError, match=r"has no b\.q; it holds a\.k, a\.q, a\.v$"):
        read_tensors(stored, ["a.q", "b.q"])


# --- mistakes -----------------------------------------------------------------------------------------------------

SMALL = Shape(1, 1, 1, 2)
MISTAKES: dict[str, tuple[Case, str]] = {
    "kind": (case("gaussian"), "case inputs/one draws 'gaussian'; allowed: normal, outliers,"),
    "unknown parameter": (case(sigma=2.0), "draws 'normal' with wrong parameters: .*sigma"),
    "text for a number": (case(q="wide"), "draws 'normal' with wrong parameters: "),
    "amplitude of nothing": (case("amplitude"), "wrong parameters: give raw= or score=, one of them"),
    "amplitude of both": (case("amplitude", raw=1.0, score=1.0), "wrong parameters: give raw= or score=, one of them"),
    "amplitude without keys": (case("amplitude", Shape(1, 1, 2, 4, kv_len=0), raw=1.0), "has no amplitude"),
    "amplitude of zeros": (case("amplitude", Shape(1, 1, 2, 0), raw=1.0), "has no amplitude"),
    "tied at scale 0": (case("tied", spec=AttentionSpec(scale=0.0)), "wrong parameters: .*zero"),
    "deep at scale 0": (case("deep_negative", spec=AttentionSpec(scale=0.0)), "wrong parameters: .*zero"),
    "no such channel": (case("channel_outliers", channel=64), "wrong parameters: index 64 is out of bounds"),
    "values missing": (case("values", SMALL, q=VALUES["q"]), "wrong parameters: .*missing"),
    "values ragged": (case("values", SMALL, **{**VALUES, "q": [[[[1.0], [1.0, 2.0]]]]}), "wrong parameters: "),
    "values of text": (case("values", SMALL, **{**VALUES, "q": "abc"}), "wrong parameters: "),
    "values rank": (case("values", SMALL, **{**VALUES, "q": [1.0]}), r"q is .*allowed: a torch tensor \[B, H, L, D\]"),
    "values shape": (
        case("values", Shape(1, 1, 1, 3), **VALUES),
        r"case inputs/one has shape \[1, 1, 1, 3\] but its inputs have \[1, 1, 1, 2\]; make them agree",
    ),
    "no prefix": (case("file", path="data/x.safetensors"), "wrong parameters: .*prefix"),
    "absent file": (case("file", path="data/x.safetensors", prefix="a"), "x.safetensors does not exist; give the path"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_line(name: str) -> None:
    wrong, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message) as caught:
        make_inputs(wrong, 0)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_rank_is_told_in_one_line(tmp_path: Path) -> None:
    save_file({f"a.{n}": torch.zeros(2, 3) for n in "qkv"}, tmp_path / "flat.safetensors")
    with pytest.raises(ValueError, match=r"wrong parameters: .*indices") as caught:
        make_inputs(case("file", path=str(tmp_path / "flat.safetensors"), prefix="a"), 0)
    assert "\n" not in str(caught.value)
