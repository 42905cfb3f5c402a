"""The black boxes: what they refuse, what they were seen to run, and that their adapters say to torch what was said."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from record_factory import TODAY, record
from test_agreement import enumerate_hidden
from torch import Tensor
from torch.nn.attention import SDPBackend

import harness
from harness import AttentionSpec, Case, Shape, get, recipes, registry
from harness.deviations import review
from harness.error_model import WHOLE, expect
from harness.kernels import flex
from harness.kernels.black_box import in_dtype
from harness.kernels.scaled_mm import _product
from harness.kernels.sdpa import SDPA_FLASH, SDPA_MATH
from harness.kernels.visibility import additive, visible
from harness.layouts import lay_out
from harness.operands import Extras
from harness.quantize import store
from harness.records import Ran, Record, Status, read_records, to_json, write_records
from harness.report import to_markdown, to_text
from harness.report.tables import summary
from harness.result import Refusal

CAUSAL = AttentionSpec(causal=True)
SHAPE = Shape(batch=2, heads=4, kv_heads=2, q_len=9, kv_len=13, head_dim=8)
SDPA = {"fp64", "fp32", "bf16", "fp16"}
COMPUTES_AS = {
    "sdpa_math": SDPA, "sdpa_flash": SDPA, "flex_attention": SDPA - {"fp64"},
    "scaled_mm": {"fp8_e4m3", "fp8_e4m3_unscaled"},
}  # fmt: skip


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(shape: Shape = SHAPE) -> list[Tensor]:
    return [randn(*shape.tensor(n), seed=i) for i, n in enumerate("qkv")]


def one(case: Case, name: str, recipe: str = "fp32") -> Record:
    (found,) = harness.run([case], [name], [recipe], seeds=1)
    return found


def made(spec: AttentionSpec = CAUSAL, layout: str = "contiguous", **changes: object) -> Case:
    shape = Shape(heads=4, kv_heads=2, q_len=33, head_dim=16)
    return Case("made", "one", shape, "a why", spec, layout=layout, **changes)  # type: ignore[arg-type]


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPUTES_AS)
def test_a_black_box_is_judged_under_the_recipes_it_computes_as_and_no_other(name: str) -> None:
    taken = {r for r in recipes() if not get(name).refusals(CAUSAL, SHAPE, r)}
    assert taken == COMPUTES_AS[name]


def test_a_recipe_with_one_stage_or_scale_of_its_own_is_refused() -> None:
    bf16, fp8 = harness.get_recipe("bf16"), harness.get_recipe("fp8_e4m3")
    wide_p = replace(bf16, name="wide_p", at={"out": "bf16"})
    early = replace(bf16, name="early", normalise="early")
    assert "wide_p rounds elsewhere" in SDPA_MATH.refusals(CAUSAL, SHAPE, wide_p)[0]
    assert "early rounds elsewhere" in SDPA_FLASH.refusals(CAUSAL, SHAPE, early)[0]
    assert not SDPA_MATH.refusals(CAUSAL, SHAPE, replace(bf16, name="mine"))  # a name is no difference
    assert not SDPA_MATH.refusals(CAUSAL, SHAPE, replace(bf16, inputs="fp16", rotate="hadamard"))
    assert get("scaled_mm").refusals(CAUSAL, SHAPE, replace(fp8, name="small_p", p_scale=1.0))


@pytest.mark.parametrize("name", ["sdpa_efficient", "sdpa_cudnn"])
def test_what_only_cuda_has_is_refused_without_it_and_on_another_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = one(made(), name, "bf16")
    assert refused.status is Status.REFUSED
    assert f"{name} needs CUDA" in refused.reasons[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused = one(made(), name, "bf16")
    assert refused.status is Status.REFUSED
    assert refused.reasons == (f"{name} runs on CUDA alone; the case is on cpu",)


def test_list_says_why_a_kernel_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(registry, "find_spec", lambda _: Found)
    entry = registry.entry("sdpa_cudnn")
    (tmp_path / "version.py").write_text("cuda: Optional[str] = None\n")
    assert registry.unavailable(entry) == "needs CUDA, which this torch is built without"
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    assert registry.unavailable(entry) in ("", "needs CUDA, and no NVIDIA device is seen")
    assert registry.unavailable(registry.entry("sdpa_math")) == ""


def test_torchs_own_refusal_is_a_refusal_with_torchs_reason() -> None:
    refused = one(made(layout="interleaved"), "sdpa_flash", "bf16")
    assert refused.status is Status.REFUSED
    assert "last dimension of the input to have stride 1" in refused.reasons[0]
    assert one(made(layout="interleaved"), "sdpa_math", "bf16").status is Status.PASS


def test_an_option_that_a_black_box_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match="sdpa_math was given block; allowed: no options"):
        SDPA_MATH.run(*qkv(), recipe="fp64", block=16)
    with pytest.raises(ValueError, match="SDPA has no softcap"):
        SDPA_MATH.run(*qkv(), AttentionSpec(softcap=2.0), recipe="fp64")


# --- what ran -----------------------------------------------------------------------------------------------------

FUSED = "_scaled_dot_product_flash_attention_for_cpu"
SEEN = {
    ("sdpa_math", "fp32"): Ran("SDPA MATH", ("bmm", "_safe_softmax"), "float32", "cpu"),
    ("sdpa_math", "bf16"): Ran("SDPA MATH", ("bmm", "_safe_softmax"), "float32", "cpu"),
    ("sdpa_flash", "fp32"): Ran("SDPA FLASH_ATTENTION", (FUSED,), "float32", "cpu"),
    ("sdpa_flash", "bf16"): Ran("SDPA FLASH_ATTENTION", (FUSED,), "bfloat16", "cpu"),
    ("scaled_mm", "fp8_e4m3"): Ran("torch._scaled_mm", ("_scaled_mm",), "float8_e4m3fn", "cpu"),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("name", "recipe"), SEEN)
def test_operators_dtype_and_device_are_those_that_torch_dispatched(
    name: str, recipe: str, inference: bool
) -> None:
    for spec in (AttentionSpec(), CAUSAL, AttentionSpec(causal=True, align="top-left")):
        with torch.inference_mode(inference):
            found = get(name).run(*qkv(), spec, recipe=recipe, quantize=True)
        assert found.ran == SEEN[name, recipe]


def test_another_backend_than_was_asked_for_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    for box, other in ((SDPA_FLASH, SDPBackend.MATH), (SDPA_MATH, SDPBackend.FLASH_ATTENTION)):
        with monkeypatch.context() as patch:
            forced = torch.nn.attention.sdpa_kernel
            patch.setattr("harness.kernels.sdpa.sdpa_kernel", lambda _, o=other, f=forced: f(o))
            with pytest.raises(RuntimeError, match=f"{box.name} was asked for, but torch ran"):
                box.run(*qkv(), recipe="fp64")


def test_what_ran_is_in_the_record_and_in_the_report(tmp_path: Path) -> None:
    found = one(made(), "sdpa_flash", "bf16")
    assert found.ran == SEEN["sdpa_flash", "bf16"]
    write_records(tmp_path / "r.jsonl", [found])
    assert read_records(tmp_path / "r.jsonl")[0].ran == found.ran
    other = replace(found, recipe="fp16", ran=replace(found.ran, dtype="float16"))
    report = summary([found, other], review([], [], TODAY))
    line = f"sdpa_flash ran {FUSED} (SDPA FLASH_ATTENTION) on cpu: bfloat16 for bf16, float16 for fp16"
    assert report.headline.ran == (line,)
    assert line in " ".join(to_text(report).split())
    assert line in to_markdown(report).replace("\\", "")


def test_a_record_from_before_black_boxes_is_read(tmp_path: Path) -> None:
    fields = json.loads(to_json(record(schema="1.1")))
    del fields["ran"]
    (tmp_path / "r.jsonl").write_text(json.dumps(fields) + "\n")
    assert read_records(tmp_path / "r.jsonl")[0].ran is None


# --- what torch is told -------------------------------------------------------------------------------------------

RULES = [
    AttentionSpec(causal=causal, align=align, window=window)
    for causal, align, window in itertools.product(
        (False, True), ("bottom-right", "top-left"), (None, (1, None), (None, 2), (2, 1), (0, 0))
    )
]


@pytest.mark.parametrize("lens", [None, [4, 0], [2, 5]])
@pytest.mark.parametrize("masked", [False, True])
def test_mask_given_to_a_kernel_is_the_rule_pair_by_pair(masked: bool, lens: list[int] | None) -> None:
    for spec, (q_len, kv_len) in itertools.product(RULES, [(5, 5), (3, 5), (5, 3), (1, 5), (5, 1)]):
        shape = Shape(batch=2, heads=2, q_len=q_len, kv_len=kv_len, head_dim=4)
        own = None if lens is None else torch.tensor(lens).clamp(max=kv_len)
        mask = randn(1, 2, q_len, kv_len) > 0 if masked else None
        seen = visible(spec, shape, Extras(mask=mask, kv_lens=own), torch.device("cpu"))
        hidden = enumerate_hidden(shape, spec, mask, own)
        assert torch.equal(torch.ones_like(hidden) if seen is None else seen.expand_as(hidden), ~hidden)


def test_bias_is_never_rounded_to_the_dtype_of_the_inputs() -> None:
    halves = (torch.bfloat16, torch.float32)
    assert additive(torch.tensor([1.5, -math.inf]), None, halves).dtype is torch.bfloat16
    fine = torch.tensor([1 + 2.0**-20, 3e38, -math.inf])
    assert torch.equal(additive(fine, None, halves), fine)
    hidden = additive(fine, torch.tensor([True, False, True]), halves)
    assert hidden.tolist() == [1 + 2.0**-20, -math.inf, -math.inf]


def test_softmax_of_a_bias_that_bf16_lacks_is_that_of_the_whole_bias() -> None:
    bias = torch.full((1, 1, 9, 13), 100.0)
    bias[..., ::2] += 0.25  # BF16 has steps of 0.5 there
    for name in ("sdpa_math", "sdpa_flash"):
        found = get(name).run(*qkv(), recipe="bf16", quantize=True, bias=bias).out
        stored = [x.values for x in store(tuple(qkv()), harness.get_recipe("bf16"), None, True)]
        truth, expected = expect(*stored, AttentionSpec(), "bf16", bias=bias)
        assert bool(((found.double() - truth.out).abs() <= expected.ceiling).all())


@pytest.mark.parametrize("layout", ["contiguous", "bshd", "padded", "interleaved", "fused"])
def test_codes_keep_their_strides_and_what_lies_between_is_nan(layout: str) -> None:
    x = lay_out(randn(2, 3, 5, 8).bfloat16().double(), layout)
    found = in_dtype(x, torch.bfloat16)
    assert found.stride() == x.stride()
    assert torch.equal(found.double(), x)
    whole = found.as_strided((found.untyped_storage().nbytes() // 2,), (1,), 0)
    assert int((~whole.isnan()).sum()) == x.numel()


# --- scaled_mm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1, 1), (16, 32, 16), (7, 40, 53), (3, 0, 5), (33, 64, 17)])
def test_native_product_of_codes_is_the_exact_one_within_fp32(size: tuple[int, int, int]) -> None:
    """Each of K additions and the scaling round once: (K + 3)·u of Σ|a||b|."""
    m, k, n = size
    a, b = (randn(rows, k, seed=rows).to(torch.float8_e4m3fn) for rows in (m, n))
    s_a, s_b = torch.tensor(0.375), torch.tensor(3.0)
    exact = 1.125 * (a.double() @ b.double().mT)
    bound = (k + 3) * 2.0**-24 * 1.125 * (a.double().abs() @ b.double().abs().mT)
    assert bool(((_product(a, b, s_a, s_b).double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(
    "spec", [AttentionSpec(), CAUSAL, AttentionSpec(window=(3, 2), softcap=3.0)], ids=str
)
@pytest.mark.parametrize("recipe", ["fp8_e4m3", "fp8_e4m3_unscaled"])
def test_attention_over_native_fp8_products_is_within_the_ceiling(spec: AttentionSpec, recipe: str) -> None:
    stored = store(tuple(qkv()), harness.get_recipe(recipe), None, True)
    found = get("scaled_mm").run_stored(stored, spec, harness.get_recipe(recipe))
    scales = tuple(s.scale for s in stored)
    truth, expected = expect(*(s.values for s in stored), spec, recipe, WHOLE, scales=scales)
    assert found.out.dtype is torch.bfloat16
    assert bool(((found.out.double() - truth.out).abs() <= expected.ceiling).all())
    assert bool(((found.lse.double() - truth.lse).abs() <= expected.lse_ceiling).all())


# --- flex_attention -----------------------------------------------------------------------------------------------


def test_flex_that_runs_no_compiled_graph_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_has_compiler", lambda: True)
    monkeypatch.setattr(flex, "_compiled", lambda: lambda q, k, v, **_: q)
    with pytest.raises(RuntimeError, match="asked for compiled, but no compiled graph of it ran"):
        get("flex_attention").run(*qkv(), recipe="fp32", quantize=True)


def test_flex_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_has_compiler", lambda: False)
    with pytest.raises(Refusal, match="no C\\+\\+ compiler is found"):
        get("flex_attention").run(*qkv(), recipe="fp32", quantize=True)


def test_graph_without_flex_attention_is_not_taken_for_it() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    with pytest.raises(RuntimeError, match="the graph holds no flex_attention"):
        flex._backend(graph, [torch.ones(1)])


@pytest.mark.skipif(not flex._has_compiler(), reason="no C++ compiler is found")
def test_compiled_flex_computes_bottom_right_causality_of_grouped_heads() -> None:
    stored = store(tuple(qkv()), harness.get_recipe("fp32"), None, True)
    found = get("flex_attention").run_stored(stored, CAUSAL, harness.get_recipe("fp32"))
    truth, expected = expect(*(s.values for s in stored), CAUSAL, "fp32")
    assert found.ran == Ran("torch.compile", ("flex_attention (inductor)",), "float32", "cpu")
    assert bool(((found.out.double() - truth.out).abs() <= expected.ceiling).all())


# --- known deviations of torch ------------------------------------------------------------------------------------


def test_flash_on_cpu_rounds_tied_outputs_away_and_is_failed_for_it() -> None:
    """Its exponential is 5.3e-5 low from 16 keys on, at 0 too, where it feeds 16-bit P: l is low, so that outputs in
    the middle of two numbers all round away from 0."""
    (case,) = (c for c in harness.load_cases("ties") if c.name == "2-equal-maxima")
    assert one(case, "sdpa_math", "fp16").status is Status.PASS
    found = one(case, "sdpa_flash", "fp16")
    keys = torch.zeros(1, 1, 16, 16, dtype=torch.float16)
    lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(keys, keys, keys)[1]
    approximate = bool(((lse.double() - math.log(16)).abs() > 1e-5).any())
    assert (found.status is Status.FAIL) == approximate  # as this processor's kernel is
    if approximate:
        assert "shrink" in " ".join(found.reasons)
