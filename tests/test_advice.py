"""Input that is right under another name: what was given, what is allowed, and what it looks like, in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from record_factory import record
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import harness
from harness.cli import main
from harness.gate import make_baseline
from harness.records import Status, write_records

CAUSAL = harness.AttentionSpec(causal=True)
G = torch.Generator().manual_seed(0)
Q = torch.randn(1, 4, 64, 16, generator=G).bfloat16()
K, V = (torch.randn(1, 2, 64, 16, generator=G).bfloat16() for _ in range(2))
OUT = sdpa(Q, K, V, is_causal=True, enable_gqa=True)
CALLS: dict[str, Callable[..., Any]] = {
    "judge": lambda **o: harness.judge(OUT, Q, K, V, **o),
    "assert_attention_close": lambda **o: harness.testing.assert_attention_close(OUT, Q, K, V, **o),
    "reference": lambda **o: harness.reference(Q, K, V, **o),
    "naive_masked": lambda **o: harness.get("naive_masked").run(Q, K, V, recipe="bf16", **o),
    "paged_decode": lambda **o: harness.get("paged_decode").run(Q, K, V, recipe="bf16", **o),
    "sdpa_math": lambda **o: harness.get("sdpa_math").run(Q, K, V, recipe="bf16", **o),
}


def told(
    capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2, monkeypatch: Any = None
) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    said = capsys.readouterr()
    assert stop.value.code == code, said
    if code == 2:
        assert said.err.count("\n") == 1, said.err
    return said.err + said.out


# --- rules as keywords -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("given", "spec"),
    [({"causal": True}, "causal=True"), ({"is_causal": True}, "causal=True"), ({"window": (3, 0)}, "window=(3, 0)"),
     ({"scale": 0.5, "softcap": 2.0}, "scale=0.5, softcap=2.0"), ({"sm_scale": 0.5}, "scale=0.5")],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)  # fmt: skip
def test_rules_given_as_keywords_are_told_where_they_go(
    call: Callable[..., Any], given: dict[str, Any], spec: str
) -> None:
    with pytest.raises(TypeError) as caught:
        call(**given)
    assert str(caught.value).endswith(f"spec=harness.AttentionSpec({spec})")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_spec_is_taken_and_other_names_are_python_s_own_error_or_ours(call: Callable[..., Any]) -> None:
    call(spec=CAUSAL)
    with pytest.raises((TypeError, ValueError), match="colour"):
        call(spec=CAUSAL, colour=3)


# --- tensors without numbers -----------------------------------------------------------------------------------------

ODD = {
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "complex": lambda x: x.to(torch.complex64),
    "integers": lambda x: x.to(torch.int32),
    "bool": lambda x: x > 0,
    "nested": lambda x: torch.nested.nested_tensor(list(x.float()), layout=torch.jagged),
    "FP8": lambda x: x.to(torch.float8_e4m3fn),
    "a list": lambda x: x.tolist(),
    "None": lambda x: None,
    "three axes": lambda x: x[0],
}


@pytest.mark.parametrize("place", range(4), ids=["out", "q", "k", "v"])
@pytest.mark.parametrize("odd", ODD)
def test_tensors_that_cannot_be_judged_are_one_line(odd: str, place: int) -> None:
    if place == 0 and odd == "FP8":
        pytest.skip("an FP8 output is judged")
    tensors: list[Any] = [OUT, Q, K, V]
    tensors[place] = ODD[odd](tensors[place])
    with pytest.raises(ValueError, match=f"^{('out', 'q', 'k', 'v')[place]} is .*; allowed: ") as caught:
        harness.judge(*tensors, spec=CAUSAL)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "x"),
    [("mask", torch.ones(64, 64, dtype=torch.bool)), ("bias", torch.zeros(64, 64)), ("sinks", torch.zeros(4)),
     ("kv_lens", torch.tensor([64])), ("lse", torch.zeros(1, 4, 64))],
)  # fmt: skip
def test_options_without_numbers_are_one_line_too(name: str, x: Tensor) -> None:
    with pytest.raises(ValueError, match=f"^{name} is on meta"):
        harness.judge(OUT, Q, K, V, **{name: x.to("meta")})


def test_scales_and_exact_inputs_without_numbers_are_one_line() -> None:
    with pytest.raises(ValueError, match="the scale of q is"):
        harness.judge(OUT, Q, K, V, recipe="fp8_e4m3", scales=(torch.ones(1, device="meta"), 1.0, 1.0))
    with pytest.raises(ValueError, match="exact does not fit"):
        harness.judge(OUT, Q, K, V, exact=(Q.to("meta"), K, V))


def test_tensors_that_ask_for_gradients_are_judged() -> None:
    leaves = [x.clone().requires_grad_() for x in (OUT, Q, K, V)]
    assert harness.judge(*leaves, spec=CAUSAL).status is Status.PASS
    assert all(x.grad is None for x in leaves)


# --- layouts ---------------------------------------------------------------------------------------------------------


def test_shapes_that_fit_with_tokens_first_say_so() -> None:
    q, k, v = (x.transpose(1, 2) for x in (Q[:, :, :8], K, V))
    with pytest.raises(
        ValueError, match=r"q has 8 heads and k 64; .*as \[B, L, H, D\] they fit: .*transpose"
    ):
        harness.reference(q, k, v)
    with pytest.raises(ValueError, match=r"head_dim") as caught:
        harness.reference(Q, K[..., :8], V)
    assert "they fit" not in str(caught.value)


def test_an_output_with_tokens_first_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"out is \(1, 64, 4, 16\); allowed: .* transpose\(1, 2\) makes it fit"
    ):
        harness.judge(OUT.transpose(1, 2), Q, K, V, spec=CAUSAL)


def test_a_call_that_fits_either_way_and_is_right_with_tokens_first_says_so_first(tmp_path: Path) -> None:
    turned = [x.transpose(1, 2).contiguous() for x in (OUT, Q, K, V)]
    j = harness.judge(*turned, spec=CAUSAL)
    assert j.status is Status.FAIL
    assert "q, k, v and out are not [B, H, L, D]; as [B, L, H, D] they fit" in j.reasons[0]
    wrong = harness.judge(torch.randn_like(turned[0].float()).bfloat16(), *turned[1:], spec=CAUSAL)
    assert not any("they fit" in reason for reason in wrong.reasons)


def test_a_dump_with_tokens_first_is_told_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turned = {
        n: x.transpose(1, 2).contiguous() for n, x in zip(("out", "q", "k", "v"), (OUT, Q, K, V), strict=True)
    }
    save_file(turned, tmp_path / "d.safetensors")
    said = told(capsys, "judge", tmp_path / "d.safetensors", "--causal", code=1)
    assert "the option layout bshd" in " ".join(said.split())
    told(capsys, "judge", tmp_path / "d.safetensors", "--causal", "--layout", "bshd", code=0)


# --- precisions ------------------------------------------------------------------------------------------------------


def test_values_wider_than_the_recipe_name_the_two_ways_on() -> None:
    q, k, v = (x.float() + 1e-5 for x in (Q, K, V))
    with pytest.raises(
        ValueError, match="quantize=True to round first, if the kernel does; recipe fp32 takes float32"
    ):
        harness.judge(OUT, q, k, v, recipe="bf16")
    with pytest.raises(ValueError, match="is no value of fp8_e4m3") as caught:
        harness.judge(OUT, Q, K, V, recipe="fp8_e4m3_unscaled")
    assert "recipe bf16 takes bfloat16 as it is" in str(caught.value)
    with pytest.raises(ValueError, match="is no value of fp16") as caught:
        harness.judge(OUT, Q * 1e6, K, V, recipe="fp16")
    assert "as it is" not in str(caught.value)


@pytest.mark.parametrize("fp8", ["e4m3fn", "e4m3fnuz", "e5m2"])
def test_a_byte_format_for_numbers_that_have_a_type_is_refused(
    fp8: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.safetensors"
    save_file({"q": Q, "k": K, "v": V, "out": OUT}, path)
    assert "no tensor holds bytes (q bfloat16, k bfloat16" in told(capsys, "judge", path, "--fp8", fp8)
    codes = {n: x.to(torch.float8_e4m3fn) for n, x in (("q", Q), ("k", K), ("v", V))}
    save_file({**codes, "out": OUT}, path)
    if fp8 != "e4m3fn":
        assert "q is torch.float8_e4m3fn; leave it out" in told(capsys, "judge", path, "--fp8", fp8)
    assert "fp8 is 'e4m3'; allowed: e4m3fn, e4m3fnuz, e5m2" in told(capsys, "judge", path, "--fp8", "e4m3")


# --- log-sum-exps ----------------------------------------------------------------------------------------------------

TRUTH = harness.reference(Q, K, V)
LSE = {
    "base 2: multiply it by ln 2": TRUTH.lse / math.log(2),
    "base 10: multiply it by ln 10": TRUTH.lse / math.log(10),
    "lacks the row's max": TRUTH.lse - TRUTH.row_max,
    "the sum and not its logarithm": TRUTH.lse.exp(),
    "wrong sign": -TRUTH.lse,
    "add ln S": TRUTH.lse - math.log(64),
    "scores that were not scaled": harness.reference(Q, K, V, harness.AttentionSpec(scale=1.0)).lse,
}


@pytest.mark.parametrize("said", LSE)
def test_a_log_sum_exp_with_one_slip_is_named(said: str) -> None:
    out = sdpa(Q, K, V, enable_gqa=True)
    j = harness.judge(out, Q, K, V, lse=LSE[said].float())
    assert j.status is Status.FAIL
    (named,) = [reason for reason in j.reasons if reason.startswith("lse: ")]
    assert said in named


def test_a_right_log_sum_exp_passes_and_noise_is_given_no_name() -> None:
    out = sdpa(Q, K, V, enable_gqa=True)
    assert harness.judge(out, Q, K, V, lse=TRUTH.lse.float()).status is Status.PASS
    noisy = TRUTH.lse + torch.randn(TRUTH.lse.shape, generator=G, dtype=torch.float64)
    j = harness.judge(out, Q, K, V, lse=noisy)
    assert j.status is Status.FAIL
    assert not any(reason.startswith("lse: ") for reason in j.reasons)


# --- commands --------------------------------------------------------------------------------------------------------


def test_a_scale_that_moves_nothing_is_not_off_by_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "tolerance", "--shape", "1,1,8,16", "-r", "bf16", "--window", "0,0", code=0)
    assert "no softmax scale, however wrong, moves this output" in said
    assert "inf" not in said


@pytest.mark.parametrize("command", ["explain", "report"])
def test_a_baseline_in_the_place_of_records_is_called_one(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "smoke.jsonl"
    path.write_text(make_baseline([record(recipe=r) for r in ("bf16", "fp16")]))
    given = ("explain", "smoke/tiny", "--records", path) if command == "explain" else ("report", path)
    said = told(capsys, *given)
    assert "is a gate's baseline: figures of 2 cells, without records; give the records of a run" in said
    path.write_text("{}\n")
    assert "gate's baseline" not in told(capsys, *given)


@pytest.mark.parametrize("command", ["explain", "report"])
def test_a_file_whose_only_record_was_cut_says_so(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    write_records(path, [record()])
    path.write_text(path.read_text()[:200])
    given = ("explain", "smoke/tiny", "--records", path) if command == "explain" else ("report", path)
    said = told(capsys, *given, code=2 if command == "explain" else 3)
    assert f"{path} holds no whole record: its only line was cut off" in said


def test_resuming_with_other_filters_says_what_it_drops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ("run", "--cases", "smoke", "--only", "smoke/normal", "-i", "naive_masked", "--seeds", "1", "--jobs", "1",
              "--no-report")  # fmt: skip
    told(capsys, *common, "-r", "bf16", code=0)
    path = Path("reports/latest/records.jsonl")
    assert json.loads(path.read_text())["recipe"] == "bf16"
    said = told(capsys, *common, "-r", "fp16", "--resume", code=0)
    assert f"of 1 records in {path}, 1 are not of this selection and go" in said
    assert "of this selection" not in told(capsys, *common, "-r", "fp16", "--resume", code=0)
