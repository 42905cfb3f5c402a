"""One method is one rounding, named by its stage; low-precision GEMMs are what hardware with FP32 sums computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness import AttentionSpec, Recipe, Shape, get, get_recipe
from harness.arithmetic import DTYPES, Arithmetic, Block
from harness.formats import FORMATS, FP32, get_format
from harness.recipe import STAGES, TENSORS
from harness.rounding import round_to

CAUSAL = AttentionSpec(causal=True)
LOW = ["tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"]
U32 = FP32.unit_roundoff


def tensors(n: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(n)]


def definition(x: Tensor, fmt: str, saturates: bool) -> Tensor:
    """ldexp(rint(ldexp(x, −e)), e) by NumPy in FP64 (NUMERICS section 1), then the policy."""
    f, x64 = get_format(fmt), x.double().numpy()
    e = np.maximum(np.frexp(x64)[1] - 1, f.emin) - (f.precision - 1)
    y = np.ldexp(np.rint(np.ldexp(x64, -e)), e)
    beyond = f.max if saturates else np.inf
    return torch.from_numpy(np.where(np.abs(y) > f.max, np.copysign(beyond, x64), y)).to(x.dtype)


METHODS: dict[
    str, tuple[Callable[[Arithmetic, Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
] = {
    "cast": (lambda ar, a, b: ar.cast(a, "scores"), lambda a, b: a),
    "matmul": (lambda ar, a, b: ar.matmul(a, b.mT, "scores"), lambda a, b: a @ b.mT),
    "mul": (lambda ar, a, b: ar.mul(a, b, "scores"), lambda a, b: a * b),
    "mul by a number": (lambda ar, a, b: ar.mul(a, 0.1, "scores"), lambda a, b: a * 0.1),
    "add": (lambda ar, a, b: ar.add(a, b, "scores"), lambda a, b: a + b),
    "sub": (lambda ar, a, b: ar.sub(a, b, "scores"), lambda a, b: a - b),
    "div": (lambda ar, a, b: ar.div(a, b, "scores"), lambda a, b: a / b),
    "div by a number": (lambda ar, a, b: ar.div(a, 0.3, "scores"), lambda a, b: a / torch.full_like(a, 0.3)),
    "exp": (lambda ar, a, b: ar.exp(a, "scores"), lambda a, b: torch.exp(a)),
    "tanh": (lambda ar, a, b: ar.tanh(a, "scores"), lambda a, b: torch.tanh(a)),
    "sum": (lambda ar, a, b: ar.sum(a, "scores"), lambda a, b: a.sum(-1, keepdim=True)),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fmt", LOW)
@pytest.mark.parametrize("base", ["fp32", "fp64"])
def test_one_method_is_one_rounding_of_the_bases_result(method: str, fmt: str, base: str) -> None:
    a, b = (3 * x for x in tensors(2, 2, 1, 16, 16, dtype=DTYPES[base]))
    run, plain = METHODS[method]
    ar = Arithmetic(Recipe("x", base=base, at={"scores": fmt}))
    got = run(ar, a.clone(), b.clone())
    assert got.dtype == DTYPES[base]
    assert torch.equal(got, definition(plain(a, b), fmt, saturates=fmt == "fp8_e4m3"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", ["fp32", "fp64"])
def test_a_stage_left_out_keeps_the_base(method: str, base: str) -> None:
    a, b = tensors(2, 2, 1, 16, 16, dtype=DTYPES[base])
    run, plain = METHODS[method]
    ar = Arithmetic(Recipe("x", base=base, at={s: "bf16" for s in STAGES if s != "scores"}))
    assert torch.equal(run(ar, a, b), plain(a, b))


def test_an_eager_multiply_add_rounds_its_product_and_its_sum() -> None:
    a, x, y = (round_to(t, "bf16") for t in tensors(3, 1, 1, 64, 64))
    eager = Arithmetic(Recipe("x", at={"acc": "bf16"})).rescale_add(a, x, y, "acc")
    twice = definition(definition(a * x, "bf16", False) + y, "bf16", False)
    assert torch.equal(eager, twice)
    assert not torch.equal(twice, definition(a * x + y, "bf16", False))
    assert torch.equal(Arithmetic(Recipe("x")).rescale_add(a, x, y, "acc"), a * x + y)


@pytest.mark.parametrize(("policy", "want"), [("inf", [np.inf, -np.inf]), ("saturate", [65504.0, -65504.0])])
def test_the_overflow_policy_of_a_stage_holds(policy: str, want: list[float]) -> None:
    ar = Arithmetic(Recipe("x", at={"scores": "fp16"}, overflow={"scores": policy}))
    assert ar.mul(torch.tensor([1e3, -1e3]), 1e3, "scores").tolist() == want


def test_the_overflow_policy_of_a_stage_that_keeps_the_base_holds_too() -> None:
    big = torch.tensor([3e38, -3e38])
    ar = Arithmetic(Recipe("x", overflow={"scores": "saturate"}))
    assert ar.add(big, big, "scores").tolist() == [FP32.max, -FP32.max]
    assert torch.isinf(ar.add(big, big, "scores_raw")).all()


# --- products and sums --------------------------------------------------------------------------------------------


@given(st.integers(-(2**11) + 1, 2**11 - 1), st.integers(-(2**11) + 1, 2**11 - 1), st.integers(-40, 40))
@settings(max_examples=500)
def test_products_of_eleven_bit_operands_are_exact_in_fp32(a: int, b: int, e: int) -> None:
    """11 + 11 bits fit 24. TF32 and FP16 have 11, BF16 8, the FP8 formats fewer."""
    x, y = torch.tensor([[[[a * 2.0**e]]]]), torch.tensor([[[[float(b)]]]])
    assert Arithmetic(Recipe("x")).matmul(x, y, "scores_raw").item() == a * b * 2.0**e
    assert max(FORMATS[f].precision for f in LOW) == 11


def test_products_of_all_pairs_of_e4m3_codes_are_exact_in_fp32() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[torch.isfinite(codes)]
    assert torch.equal((codes[:, None] * codes).double(), codes.double()[:, None] * codes.double())


def gemm_bound(a: Tensor, b: Tensor) -> Tensor:
    """Two sums of K exact products in FP32, in any order: each errs by at most (K − 1)·u·Σ|ab| (Higham, γ_K)."""
    depth = a.shape[-1]
    gamma = (depth - 1) * U32 / (1 - (depth - 1) * U32)
    return 2 * gamma * (a.abs().double() @ b.abs().double())


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("depth", [1, 16, 64, 300])
def test_a_gemm_is_torchs_native_one_up_to_the_order_of_its_fp32_sum(fmt: str, depth: int) -> None:
    (a,), (b,) = tensors(1, 1, 1, 32, depth), tensors(1, 1, 1, depth, 24, seed=1)
    a, b = round_to(a, fmt), round_to(b, fmt)
    mine = Arithmetic(Recipe("x", at={"scores_raw": fmt})).matmul(a, b, "scores_raw").double()
    native = (a.to(DTYPES[fmt]) @ b.to(DTYPES[fmt])).double()
    exact = a.double() @ b.double()
    f = get_format(fmt)
    # Each rounds its own sum once to the format: half an ulp of a value that is at most |exact| + the sum's error.
    bound = gemm_bound(a, b)
    bound = bound + 2 * f.unit_roundoff * (exact.abs() + bound) + f.min_subnormal
    assert bool(((mine - native).abs() <= bound).all())
    half = gemm_bound(a, b) / 2
    half = half + f.unit_roundoff * (exact.abs() + half) + f.min_subnormal / 2
    assert bool(((mine - exact).abs() <= half).all())


def test_an_fp8_gemm_is_torchs_scaled_mm_up_to_the_order_of_its_fp32_sum() -> None:
    (a,), (b,) = tensors(1, 32, 64), tensors(1, 64, 48, seed=1)
    a, b = round_to(a, "fp8_e4m3"), round_to(b, "fp8_e4m3")
    one = torch.tensor(1.0)
    try:
        native = torch._scaled_mm(
            a.to(torch.float8_e4m3fn),
            b.mT.contiguous().to(torch.float8_e4m3fn).mT,
            one,
            one,
            out_dtype=torch.float32,
        )
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch._scaled_mm refuses FP8 on this CPU: {error}")
    mine = Arithmetic(Recipe("x")).matmul(a[None, None], b[None, None], "scores_raw")[0, 0]
    # oneDNN may hand its FP32 sum over through BF16-exact or FP32 output; FP32 was asked for.
    assert bool(((mine.double() - native.double()).abs() <= gemm_bound(a, b)).all())


@pytest.mark.parametrize(
    ("a", "b"), [((2, 3, 4, 5), (2, 3, 5, 7)), ((1, 1, 1, 1), (1, 1, 1, 1)), ((1, 2, 0, 5), (1, 2, 5, 3))]
)
def test_flops_count_two_per_multiply_add(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    ar = Arithmetic(Recipe("x"))
    for n in (1, 2):
        ar.matmul(torch.zeros(a), torch.zeros(b), "acc")
        assert ar.flops == n * 2 * a[0] * a[1] * a[2] * a[3] * b[3]


# --- what a watcher sees ------------------------------------------------------------------------------------------


class Notes:
    """Every rounding, and whether it was one."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool, Block]] = []
        self.stuck = 0

    def __call__(self, stage: str, before: Tensor, after: Tensor, block: Block) -> None:
        self.seen.append((stage, before is not after, block))

    def stagnation(self, stage: str, held: Tensor, added: Tensor, after: Tensor) -> None:
        assert stage == "row_sum"
        self.stuck += 1


WHOLE_ROW = {"scores_raw", "scores", "shifted", "exp", "row_sum", "probs", "acc", "out"}
SEEN = {
    "naive_masked": WHOLE_ROW,
    "lower_triangle": WHOLE_ROW,
    "decode_with_cache": WHOLE_ROW,
    "naive_unsafe": WHOLE_ROW - {"shifted"},
    "online_softmax": set(STAGES),
}


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize(
    "recipe", ["fp64", "bf16", "fp8_e4m3", "bf16_eager", "fp16_eager", "fp16_eager_clamped"]
)
def test_a_watcher_sees_every_stage_and_its_rounding_where_the_recipe_has_one(name: str, recipe: str) -> None:
    notes, shape = Notes(), Shape(1, 2, 9, 8)
    inputs = tensors(3, *shape.tensor("q"))
    spec = AttentionSpec(causal=True, softcap=20.0)
    get(name).run(*inputs, spec, recipe=recipe, quantize=True, watch=notes)
    assert {stage for stage, _, _ in notes.seen} == SEEN[name]
    assert {stage for stage, rounded, _ in notes.seen if rounded} == SEEN[name] & set(get_recipe(recipe).at)
    eager = "row_sum" in get_recipe(recipe).at and name == "online_softmax"
    assert (notes.stuck > 0) == eager


def test_a_watcher_knows_which_rows_and_keys_are_at_work() -> None:
    notes, shape = Notes(), Shape(1, 1, 5, 4, kv_len=7)
    inputs = [torch.randn(shape.tensor(t)) for t in TENSORS]
    get("online_softmax").run(*inputs, recipe="fp32", watch=notes, block=3, q_block=2)
    blocks = [block for stage, _, block in notes.seen if stage == "scores_raw"]
    assert blocks == [Block(r, n, k) for (r, n), k in itertools.product([(0, 2), (2, 2), (4, 1)], [0, 3, 6])]


@pytest.mark.parametrize("name", SEEN)
def test_watching_changes_no_bit(name: str) -> None:
    inputs = tensors(3, 1, 2, 20, 8)
    for recipe in ("fp32", "bf16", "fp16_eager", "fp8_e4m3"):
        runs = [
            get(name).run(*inputs, CAUSAL, recipe=recipe, quantize=True, watch=watch)
            for watch in (None, Notes())
        ]
        assert torch.equal(runs[0].out, runs[1].out)
        assert torch.equal(runs[0].lse, runs[1].lse)


# --- the two flags about P ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["naive_masked", "lower_triangle", "online_softmax", "decode_with_cache"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_e4m3"])
def test_the_row_sum_takes_p_before_or_after_its_cast_as_declared(name: str, recipe: str) -> None:
    """With V = 1 and P summed after its cast numerator and denominator are one sum: the output is 1 up to the
    accumulation and one rounding. Before its cast the difference of the two is P's rounding error."""
    q, k, _ = (2 * x for x in tensors(3, 1, 2, 64, 16))
    ones: Any = torch.ones_like(q)
    r = replace(get_recipe(recipe), scaling={}, at={"probs": get_recipe(recipe).at["probs"]})
    before, after = (
        get(name).run(q, k, ones, CAUSAL, recipe=replace(r, row_sum=when), quantize=True)
        for when in ("before", "after")
    )
    # 64 additions each in P·V and l, ≤ 4 blocks of rescaling, a division: (2·64 + 4·4 + 4)·u.
    assert float((after.out - 1).abs().max()) <= (2 * 64 + 4 * 4 + 4) * U32
    error = (before.out - 1).abs()
    assert float(error.max()) <= get_format(r.at["probs"]).unit_roundoff * (1 + 2**-3)
    assert float(error.max()) > 100 * (2 * 64 + 4 * 4 + 4) * U32
    assert not torch.equal(before.lse, after.lse)
    naive = [
        get(name).run(q, k, ones, CAUSAL, recipe=Recipe("x", row_sum=when), quantize=True)
        for when in ("before", "after")
    ]
    assert torch.equal(naive[0].out, naive[1].out)  # without a cast there is no before and after


@pytest.mark.parametrize("name", list(SEEN))
@pytest.mark.parametrize("base", ["fp32", "fp64"])
@pytest.mark.parametrize("p_scale", [2.0**-3, 256.0, 2.0**40])
def test_a_power_of_two_on_p_changes_no_bit_where_p_keeps_the_base(
    name: str, base: str, p_scale: float
) -> None:
    inputs = tensors(3, 1, 2, 33, 8, dtype=torch.float64)
    for normalise in ("late", "early"):
        plain, scaled = (
            get(name).run(
                *inputs, CAUSAL, recipe=Recipe("x", base=base, p_scale=s, normalise=normalise), quantize=True
            )
            for s in (1.0, p_scale)
        )
        assert torch.equal(plain.out, scaled.out)
        assert torch.equal(plain.lse, scaled.lse)


def test_a_power_of_two_on_p_saves_what_e4m3_would_flush() -> None:
    q = torch.zeros(1, 1, 1, 4)
    k, v = torch.zeros(1, 1, 9, 4), torch.ones(1, 1, 9, 4)
    bias = torch.zeros(9).index_fill_(0, torch.arange(1, 9), -8.0)  # exp(−8) = 3.4e-4 < 2⁻¹⁰ < 256·exp(−8)
    r = replace(get_recipe("fp8_e4m3"), scaling={}, at={"probs": "fp8_e4m3"})
    lost, kept = (
        get("naive_masked").run(q, k, v, recipe=replace(r, p_scale=s), bias=bias, quantize=True).out
        for s in (1.0, 256.0)
    )
    mass = 8 * float(np.exp(-8.0))
    # Flushed: exactly the first key's share. Kept: within E4M3's roundoff of the rest's mass.
    assert float(lost[0, 0, 0, 0]) == pytest.approx(1 / (1 + mass), abs=8 * U32)
    assert abs(float(kept[0, 0, 0, 0]) - 1) <= 2.0**-4 * mass + 16 * U32
