"""The mutants' study: peers' rules on examples computed by hand, honest arrangements, a sample killed and named."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.mutants import rules, study
from benchmarks.mutants.attention import ARRANGEMENTS, Attention
from benchmarks.mutants.calls import CASES, RECIPES, made
from benchmarks.mutants.figure import svg
from benchmarks.mutants.limit import _bias, _scatter, limit
from benchmarks.mutants.report import is_above, markdown, naming, rejects
from benchmarks.mutants.study import HONEST, SDPA, Bar, Unit, read, run, units
from benchmarks.mutants.table import family_of, mutants
from harness.error_model import BLACK_BOX
from harness.truth import reference

# The scores' FP64 roundings, 2(D + 6)u·Σ|q||k|·max|v| ≤ 2·86·1.1e-16·16·5, and the sums' 256u·5: below 2e-12.
FP64 = 2e-12


def field(recipe: str = "bf16", **references: float) -> Any:
    """References of four elements, all of one value; those not given are `golden`'s 1."""
    values = {n: references.get(n, references.get("golden", 1.0)) for n in
              ("golden", "exact", "lp", "reordered", "unquantised")}  # fmt: skip
    tensors = {n: torch.full((1, 1, 1, 4), x, dtype=torch.float64) for n, x in values.items()}
    return SimpleNamespace(recipe=recipe, dtype=rules.DTYPES[recipe], softcapped=False, **tensors)


def off(by: float, value: float = 1.0) -> Tensor:
    """Four elements, the last of them off."""
    out = torch.full((1, 1, 1, 4), value, dtype=torch.float64)
    out[..., -1] += by
    return out


# Each limit by hand. BF16 at 1 + 0.3: spacing 2⁻⁷, 1.3 is stored 1.296875, less 0.3 (stored 0.30078125) 0.99609375,
# which BF16 holds: 0.00390625 from 1, twice that 0.0078125.
EDGES = [
    ("FlashAttention 2×", field(reordered=1.01), 2 * 0.01 + 0.0078125),
    ("torch _check_equal", field(lp=1.01), 4 * 0.01),
    ("torch _check_equal", field("fp32"), 1e-5),
    ("assert_close", field(), 1.6e-2 + 1e-5),
    ("assert_close", field("fp32"), 1.3e-6 + 1e-5),
    ("assert_close", field("fp16"), 1e-3 + 1e-5),
    ("tritonbench", field(), 1e-2 + 2e-2),
    ("tritonbench", field("fp32"), 1e-5 + 1e-8),
    ("tritonbench", field("fp8_e4m3"), 0.2 + 2.0),
    ("flashinfer-bench", field(), 1e-2),
    ("flashinfer-bench", field(golden=4.0), 4e-2),  # absolute and relative both have to be exceeded
    ("TransformerEngine", field(), 3e-2),
    ("TransformerEngine", field("fp16"), 2e-3),
    ("vLLM", field(), 2.5e-2),
    ("vLLM", field("fp8_e4m3"), 0.3),
    ("KernelBench", field(), 2e-2),
    ("KernelBench", field("fp32"), 2e-4),
    ("torchtitan", field(lp=1.01), 2 * 0.01),  # BF16 holds 1: no floor
]
ACCEPTS = {r.name: r.accepts for r in rules.RULES}


@pytest.mark.parametrize(("name", "f", "edge"), EDGES)
def test_rule_accepts_what_is_just_inside_and_fails_what_is_just_outside(
    name: str, f: Any, edge: float
) -> None:
    value = float(f.golden.flatten()[0])
    assert ACCEPTS[name](off(0.999 * edge, value), f) is True
    assert ACCEPTS[name](off(1.001 * edge, value), f) is False


def test_transformer_engine_compares_the_rms_in_fp8_with_the_range() -> None:
    f = field("fp8_e4m3", unquantised=0.0)
    # One of four elements is 1 and the other output is 0: RMSE ½ over a range of 1.
    assert ACCEPTS["TransformerEngine"](off(1.0, 0.0), f) is False
    f.unquantised = torch.tensor([[[[-1.0, 1.0, 0.0, 0.0]]]], dtype=torch.float64)
    out = f.unquantised.clone()
    out[..., 3] = 0.43  # RMSE 0.215 over a range of 2
    assert ACCEPTS["TransformerEngine"](out, f) is True


def test_cosine_of_one_element_in_four_that_is_off() -> None:
    # (4 + e)/(2√(4 + 2e + e²)) = 0.999 at e = 0.10845 (1/cos² − 1 = tan²: e√3/(4 + e) = 0.044755)
    edge = 4 * 0.0447550 / (math.sqrt(3) - 0.0447550)
    assert ACCEPTS["cosine > 0.999"](off(0.999 * edge), field()) is True
    assert ACCEPTS["cosine > 0.999"](off(1.001 * edge), field()) is False


def test_flashinfer_bench_lets_a_twentieth_of_fp8_elements_be_wrong() -> None:
    f = field("fp8_e4m3")
    f.golden = torch.ones(1, 1, 5, 4, dtype=torch.float64)
    out = f.golden.clone()
    out[0, 0, 0, 0] = 9.0
    assert ACCEPTS["flashinfer-bench"](out, f) is True
    out[0, 0, 0, 1] = 9.0
    assert ACCEPTS["flashinfer-bench"](out, f) is False


def test_torchtitan_says_nothing_where_its_reference_is_a_tenth_off() -> None:
    assert ACCEPTS["torchtitan"](off(5.0), field(lp=1.2)) is True


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda r: r.name)
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rule_that_applies_accepts_a_nan(rule: rules.Rule, recipe: str) -> None:
    assert rule.accepts(off(math.nan), field(recipe)) in (False, None)


def test_eager_reference_in_fp64_is_the_truth() -> None:
    for name in ("gqa", "window", "lengths", "sinks", "bias", "mask", "softcap", "cross"):
        call = made(name, "fp32")
        truth = reference(*call.values, call.spec, **call.extras.as_options()).out
        for reordered in (False, True):
            got = rules.eager(call, call.values, torch.float64, reordered)
            assert float((got - truth).abs().max()) < FP64, name


@pytest.mark.parametrize("name", ["gqa", "ragged", "lengths", "sinks", "bias", "mask", "softcap", "decode"])
def test_honest_arrangements_in_fp64_are_the_truth(name: str) -> None:
    call = made(name, "fp8_e4m3")
    truth = reference(*call.values, call.spec, **call.extras.as_options())
    for arrangement in ARRANGEMENTS:
        out, lse = Attention(call, arrangement, exact=True).run()
        assert float((out - truth.out).abs().max()) < FP64, arrangement
        assert float((lse - truth.lse).abs().max()) < FP64, arrangement


def test_table_is_what_the_study_promises() -> None:
    table = mutants()
    assert len(table) >= 60
    runs = [run for m in table.values() for run in m.runs]
    assert {a for a, _ in runs} == set(ARRANGEMENTS)
    assert {c for _, c in runs} <= set(CASES)
    assert all(set(m.recipes) <= set(RECIPES) for m in table.values())
    assert set(family_of().values()) == {"numeric", "casts", "masks", "index", "cache", "merge"}
    assert {u.name for u in units(full=False)} == {*table, HONEST, SDPA}


def test_no_mutant_takes_its_output_from_what_the_diagnosis_compares_with() -> None:
    folder = Path(study.__file__).parent
    for name in ("attention", "numeric", "casts", "masks", "index", "cache", "merge", "table"):
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        for room in ("faults", "diagnosis", "directions", "twins", "harness.attention"):
            assert f"harness.{room.removeprefix('harness.')}" not in text, (name, room)


# One of each family, and the small ones the issue names; each with what the diagnosis has to call it.
SAMPLE = [
    ("scale + 0.2 %", "online", "full", "fp8_e4m3"),
    ("P cut", "online", "full", "fp8_e4m3"),
    ("P scale of 224 undone as 256", "online", "full", "fp8_e4m3"),
    ("no rescale", "online", "full", "fp8_e4m3"),
    ("next key leaks", "triangle", "causal", "bf16"),
    ("mask multiplied onto the scores", "naive", "causal", "bf16"),
    ("last slot of a page", "decode", "causal", "bf16"),
    ("last part lost", "split", "causal", "bf16"),
    ("lse not merged", "split", "causal", "bf16"),
]


@pytest.mark.parametrize(("case", "recipe"), [("full", "fp8_e4m3"), ("causal", "bf16")])
def test_sample_of_mutants_is_killed_and_no_honest_run_is(case: str, recipe: str) -> None:
    bar = Bar(case, recipe)
    wrong = [Unit(*x) for x in SAMPLE if x[2:] == (case, recipe)]
    honest = [Unit(HONEST, a, case, recipe) for a in ARRANGEMENTS]
    honest += [Unit(SDPA, "fused", case, recipe)] if recipe == "bf16" else []
    for record in bar.records(wrong):
        assert record["ours"]["status"] == "FAIL", record
        assert is_above(record), record
        if mutants()[record["unit"][0]].names or mutants()[record["unit"][0]].of_lse:
            assert naming(record) in ("right", "equal"), record
    for record in bar.records(honest):
        assert record["ours"]["status"] == "PASS", record


def test_limit_of_no_effect_is_zero_and_of_a_large_one_is_exceeded() -> None:
    bar = Bar("causal", "bf16")
    bench = bar.docket.bench(BLACK_BOX)
    nothing = limit(bench, torch.zeros_like(bench.call.truth.out))
    assert (nothing.size, nothing.bias, nothing.above) == (0.0, 0.0, False)
    assert limit(bench, 0.1 * bench.call.truth.out).above
    # One element of a thousand times its own spread: no bias, and yet an element that is too large.
    g = torch.zeros_like(bench.call.truth.out)
    g[0, 1, 100, 3] = 1000 * bench.call.variance[0, 1, 100, 3].sqrt()
    one = limit(bench, g)
    assert one.above
    assert one.bias == 0.0


def test_expected_statistics_are_their_formulas() -> None:
    f = torch.full((200,), 0.5, dtype=torch.float64)
    assert _bias(f, f) == pytest.approx(200 * 0.25 / math.sqrt(200 * 0.25 * (0.25 + 2)), rel=1e-12)
    few = f[:100]  # against the model's variance alone
    assert _bias(few, few) == pytest.approx(100 * 0.25 / math.sqrt(2 * 100 * 0.25), rel=1e-12)
    assert _scatter(0.4 * f, torch.ones_like(f)) == 0.0  # variances in a ratio of 1.04


def test_expected_scatter_is_what_noise_shows() -> None:
    g = torch.Generator().manual_seed(0)
    n, s = 100_000, 2.0
    kernel, twin, noise = (torch.randn(n, generator=g, dtype=torch.float64) for _ in range(3))
    h = (math.sqrt(1 + s * s) * kernel).abs() - twin.abs()
    seen = float(h.sum() / h.norm())
    # Its own standard deviation is 1; the noise is given as ±s.
    expected = _scatter(s * noise.sign(), twin)
    assert expected == pytest.approx(seen, abs=6)


def test_noise_that_makes_up_for_the_errors_adds_nothing() -> None:
    error = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert _scatter(-2 * error, error) == 0.0
    bar = Bar("causal", "bf16")
    bench = bar.docket.bench(BLACK_BOX)
    truth = bench.call.truth.out
    e = 3 * bench.call.variance.sqrt()
    # truth + e rounds: 2⁻⁵³ of |o|, which is below 1e5 σ here.
    assert limit(bench, -e, honest=truth + e).size < 1e5 * 2.0**-52
    assert limit(bench, e, honest=truth + e).size > 0.0


def test_study_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    wanted = [Unit(HONEST, a, "cross", "fp32") for a in ("naive", "online", "split")]
    first = run(path, wanted[:2])
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: len(whole) - 40], encoding="utf-8")  # killed while it wrote
    assert len(read(path)) == 1
    again = run(path, wanted)
    assert [r["unit"][1] for r in again] == ["naive", "online", "split"]
    assert again[1] == first[1]
    assert len(read(path)) == 3


def _record(name: str, status: str, recipe: str = "bf16", above: bool = True, **ours: Any) -> dict[str, Any]:
    case = mutants()[name].runs[0] if name in mutants() else ("naive", "full")
    record: dict[str, Any] = {"unit": [name, *case, recipe], "ours": {"status": status, **ours},
                              "rules": {r.name: True for r in rules.RULES}}  # fmt: skip
    if name in mutants():
        numbers = {"relative": 1e-3, "size": 0.5, "bias": 2.0, "scatter": 0.0, "own": 0.5, "rows": math.inf}
        record["limit"] = {**numbers, "above": above}
    return record


def test_report_counts_kills_names_misses_and_false_failures() -> None:
    records = [
        _record("scale + 0.2 %", "FAIL", fault="scale", rivals=[]),
        _record("scale twice", "FAIL", fault="uniform", rivals=["scale 1/D"]),
        _record("stale block", "FAIL", fault="shrink", rivals=[]),
        _record("P cut", "PASS"),
        _record("FP16 accumulator", "PASS", above=False),
        _record(HONEST, "PASS"),
        _record(HONEST, "FAIL"),
    ]
    assert [naming(r) for r in records[:3]] == ["right", "equal", "wrong"]
    assert [rejects(r, "ours") for r in records] == [True, True, True, False, False, False, True]
    page = markdown(records, "mutants.svg")
    assert "**Killed by us**: 3 of the 4 runs" in page
    assert "1 rightly and 1 among equals (66.7 % of the killed)" in page
    assert "**False failures of ours**: 1 in 2" in page
    assert "| P cut | online | full | bf16 | PASS | 0.50 | 2.00 | 0.00 | 0.50 |" in page
    assert "| stale block | shrink | 1 | online/full b |" in page
    assert svg(records).count("<svg") == 1
