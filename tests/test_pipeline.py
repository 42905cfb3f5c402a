"""The run: what is shared, what is refused, and what becomes of an implementation that misbehaves."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

import harness
from harness import cell, pipeline, registry
from harness.attention.algorithm import Algorithm
from harness.case import Case, Draw
from harness.inputs import make_inputs
from harness.journal import workers
from harness.recipe import DEFAULT_RECIPES
from harness.records import Record, Status, to_json
from harness.result import Result
from harness.spec import AttentionSpec, Shape

CAUSAL = Case("made", "causal", Shape(heads=2, q_len=9, head_dim=8), "small", AttentionSpec(causal=True))
FULL = Case("made", "full", Shape(q_len=5, head_dim=8), "small and not causal")
FIXED = Case(
    "made", "fixed", Shape(q_len=1, kv_len=2, head_dim=2), "the same for every seed",
    draw=Draw("values", {"q": [[[[1, 0]]]], "k": [[[[1, 1], [0, 1]]]], "v": [[[[1, 0], [0, 1]]]]}),
)  # fmt: skip


def timeless(records: list[Record]) -> list[str]:
    return [to_json(replace(r, run_ms=0.0, truth_ms=0.0, created="")) for r in records]


# --- implementations that misbehave; the registry finds them here by name ------------------------------------


@dataclass(frozen=True)
class Spoilt:
    """naive_masked, with its result spoilt."""

    spoil: Callable[[Result], Any]

    def refusals(self, *_: object) -> tuple[str, ...]:
        return ()

    def run_stored(self, stored: Any, spec: Any, recipe: Any, extras: Any, watch: Any = None) -> Any:
        return self.spoil(harness.get("naive_masked").run_stored(stored, spec, recipe, extras, watch=watch))


def _raise(_: Result) -> Result:
    raise RuntimeError("the kernel\nfell over")


def _poison(value: float) -> Callable[[Result], Result]:
    def spoil(result: Result) -> Result:
        out = result.out.clone()
        out[0, 0, 0, :2] = value
        return Result(out, result.lse)

    return spoil


SPOILT = {
    "raises": Spoilt(_raise),
    "wrong_shape": Spoilt(lambda r: Result(r.out[..., :-1], r.lse)),
    "wrong_lse": Spoilt(lambda r: Result(r.out, r.lse[..., None])),
    "integers": Spoilt(lambda r: Result(r.out.int(), r.lse)),
    "no_result": Spoilt(lambda r: r.out),
    "nothing": Spoilt(lambda _: None),
    "nan": Spoilt(_poison(math.nan)),
    "inf": Spoilt(_poison(math.inf)),
    "minus_inf": Spoilt(_poison(-math.inf)),
    "no_lse": Spoilt(lambda r: Result(r.out)),
    "strided": Spoilt(lambda r: Result(r.out.mT.contiguous().mT, r.lse)),
}


def __getattr__(name: str) -> Spoilt:
    try:
        return SPOILT[name]
    except KeyError:
        raise AttributeError(name) from None


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The misbehaving implementations beside the built-in ones, as an installed package would bring them."""
    points = [EntryPoint(name, f"{__name__}:{name}", registry.ENTRY_POINTS) for name in SPOILT]
    points.append(EntryPoint("absent", "no_such_module:x", registry.ENTRY_POINTS))
    points.append(EntryPoint("naive_masked", f"{__name__}:raises", registry.ENTRY_POINTS))
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry.table.cache_clear()
    yield
    monkeypatch.undo()
    registry.table.cache_clear()


def one(name: str, case: Case = CAUSAL, recipe: str = "bf16") -> Record:
    (record,) = harness.run([case], [name], [recipe], seeds=1)
    return record


# --- plans ---------------------------------------------------------------------------------------------------


def test_fixed_draws_run_one_seed_and_the_others_all() -> None:
    units = pipeline.plan([FIXED, FULL], ["naive_masked"], ["fp32"], seeds=4)
    assert [(u.case.name, u.seed) for u in units] == [("fixed", 0), *(("full", s) for s in range(4))]


def test_defaults_are_the_default_implementations_and_the_default_recipes() -> None:
    (unit,) = pipeline.plan([FIXED])
    other = {"chunked_decode", "paged_decode", "split_kv", "flex_attention", "scaled_mm"}
    other |= {name for name in harness.implementations() if name.startswith("sdpa_")}  # on smoke, or by name
    other |= {name for name in harness.implementations() if registry.entry(name).needs == "cuda"}
    assert set(harness.implementations()) - other == set(unit.implementations)
    assert {r.name for r in unit.recipes} == set(DEFAULT_RECIPES)
    assert unit.cells == len(unit.keys) == len(unit.implementations) * len(unit.recipes)


def test_black_boxes_run_by_default_on_smoke_alone() -> None:
    (unit,) = pipeline.plan([replace(FIXED, group="smoke")])
    (plain,) = pipeline.plan([FIXED])
    assert unit.implementations == (*plain.implementations, "sdpa_math", "sdpa_flash")


def test_names_given_twice_run_once_and_a_single_name_needs_no_list() -> None:
    (unit,) = pipeline.plan([FIXED], ["naive_masked", "naive_masked"], ["fp32", "fp32"])
    assert unit.cells == 1
    assert pipeline.plan([FIXED], "naive_masked", "fp32") == [unit]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seeds": 0}, "seeds is 0; allowed: an integer ≥ 1"),
        ({"seeds": 1.0}, "seeds is 1.0"),
        ({"seeds": True}, "seeds is True"),
        ({"implementations": ["nope"]}, "unknown implementation 'nope'; allowed: naive_masked"),
        ({"recipes": ["nope"]}, "unknown recipe 'nope'; allowed: fp64"),
        ({"recipes": ["bf16", harness.Recipe("bf16")]}, "two recipes share one name"),
    ],
)
def test_plan_refuses(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        pipeline.plan([FIXED], **arguments)


@pytest.mark.parametrize("device", ["tpu", "meta", "mps", "", "cuda:x", "cpu:cpu"])
def test_run_refuses_a_device_it_cannot_use(device: str) -> None:
    with pytest.raises(ValueError, match=r"device .*; allowed: cpu"):
        harness.run([FIXED], ["naive_masked"], ["fp32"], device=device)


def test_missing_cuda_is_told_and_never_replaced_by_the_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    with pytest.raises(ValueError, match="sees no CUDA device; allowed here: cpu"):
        harness.run([FIXED], ["naive_masked"], ["fp32"], device="cuda")


# --- records -------------------------------------------------------------------------------------------------


def test_records_do_not_depend_on_jobs() -> None:
    units = pipeline.plan([FIXED, CAUSAL, FULL], None, ["fp32", "bf16", "fp8_e4m3"], seeds=2)
    found = []
    for jobs in (1, 2):
        with workers(jobs) as executor:
            found.append([r for _, batch in pipeline.run_units(units, executor) for r in batch])
    assert timeless(found[0]) == timeless(found[1])
    assert len(found[0]) == sum(u.cells for u in units)


def test_records_come_in_the_order_of_cases_seeds_recipes_implementations() -> None:
    names, recipes = ["online_softmax", "naive_masked"], ["bf16", "fp32"]
    records = harness.run([FULL, FIXED], names, recipes, seeds=2)
    cells = [("made/full", 0), ("made/full", 1), ("made/fixed", 0)]
    assert [r.key for r in records] == [(c, i, r, s) for c, s in cells for r in recipes for i in names]


def test_hashes_are_those_of_earlier_runs_and_change_with_the_seed() -> None:
    first, again, other = (harness.run([FULL], ["naive_masked"], ["bf16"], seeds=2)[i] for i in (0, 0, 1))
    assert (first.inputs_hash, first.output_hash) == (again.inputs_hash, again.output_hash)
    assert first.inputs_hash != other.inputs_hash
    # Fixed inputs: the SHA-256 of their FP64 bytes, on any machine and NumPy.
    values = torch.tensor([1, 0, 1, 1, 0, 1, 1, 0, 0, 1], dtype=torch.float64).numpy().tobytes()
    assert one("naive_masked", FIXED).inputs_hash == __import__("hashlib").sha256(values).hexdigest()


def test_truths_are_shared_one_for_the_exact_inputs_and_one_a_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return harness.reference(*args, **kwargs)

    monkeypatch.setattr(cell, "reference", counted)
    chosen = ["fp32", "bf16", "bf16_eager", "fp16", "fp16_eager", "fp8_e4m3"]
    storages = {harness.get_recipe(r).storage_key for r in chosen}
    assert len(storages) == 4
    harness.run([CAUSAL], ["naive_masked", "online_softmax"], chosen, seeds=2)
    assert len(calls) == 2 * (1 + len(storages))


def test_refusal_is_a_record_with_its_reason_and_no_figures() -> None:
    record = one("lower_triangle", FULL)
    assert record.status is Status.REFUSED
    assert record.reasons == ("lower_triangle computes causal attention alone; the case is not causal",)
    assert (record.errors, record.total_errors, record.output_hash) == (None, None, "")
    assert math.isnan(record.run_ms)


@pytest.mark.parametrize(
    ("recipe", "emulated"),
    [("fp32", False), ("bf16", True), ("fp8_kv", True),
     (harness.Recipe("p", at={"probs": "bf16"}), True), (harness.Recipe("s", storage={"k": "fp16"}), True)],
    ids=str,
)  # fmt: skip
def test_emulated_marks_whatever_rounds_below_the_base(recipe: Any, emulated: bool) -> None:
    assert one("naive_masked", FIXED, recipe).emulated is emulated


def test_fp64_recipe_runs_and_meets_the_truth() -> None:
    record = one("naive_masked", CAUSAL, "fp64")
    assert record.status is Status.PASS
    assert not record.emulated
    assert record.errors is not None
    assert record.errors.rel_l2 < 1e-14


@pytest.mark.parametrize(
    "shape",
    [Shape(q_len=0), Shape(kv_len=0), Shape(batch=0), Shape(q_len=3, head_dim=0, value_dim=4),
     Shape(q_len=3, value_dim=0)],
    ids=str,
)  # fmt: skip
def test_empty_sizes_run_and_have_nothing_to_fail(shape: Shape) -> None:
    records = harness.run([Case("made", "empty", shape, "nothing in it")], None, ["fp32", "bf16"], seeds=1)
    # Fewer rows than can tell right from wrong, and never a pass for that.
    assert {r.status for r in records} == {Status.INCONCLUSIVE, Status.REFUSED}, [
        r.traceback for r in records
    ]


def test_threads_are_recorded_as_they_are_now() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert one("naive_masked", FIXED).machine.threads == threads
    finally:
        torch.set_num_threads(before)


# --- misbehaviour --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("spoilt")
def test_implementation_that_raises_is_an_error_with_its_traceback_and_the_run_goes_on() -> None:
    bad, good = harness.run([CAUSAL], ["raises", "naive_masked"], ["bf16"], seeds=1)
    assert bad.status is Status.ERROR
    assert bad.reasons == ("RuntimeError: the kernel\nfell over",)
    assert "in _raise" in bad.traceback
    assert (bad.errors, bad.output_hash) == (None, "")
    assert good.status is Status.PASS


@pytest.mark.usefixtures("spoilt")
def test_implementation_that_cannot_be_imported_is_an_error() -> None:
    record = one("absent")
    assert record.status is Status.ERROR
    assert "No module named 'no_such_module'" in record.reasons[0]


@pytest.mark.usefixtures("spoilt")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong_shape", "out is (1, 2, 9, 7), but should be (1, 2, 9, 8)"),
        ("wrong_lse", "lse is (1, 2, 9, 1), but should be (1, 2, 9)"),
        ("integers", "out is torch.int32, but should be a floating-point tensor (1, 2, 9, 8)"),
        ("no_result", "out is NoneType, but should be a floating-point tensor (1, 2, 9, 8)"),
        ("nothing", "out is NoneType, but should be a floating-point tensor (1, 2, 9, 8)"),
    ],
)
def test_output_of_the_wrong_kind_fails_with_what_it_is_and_should_be(name: str, reason: str) -> None:
    record = one(name)
    assert record.status is Status.FAIL
    assert record.reasons == (reason,)
    assert record.errors is None


@pytest.mark.usefixtures("spoilt")
@pytest.mark.parametrize(("name", "word"), [("nan", "2 NaN"), ("inf", "2 +Inf"), ("minus_inf", "2 −Inf")])
def test_class_that_the_truth_does_not_have_fails(name: str, word: str) -> None:
    record = one(name)
    assert record.status is Status.FAIL
    assert record.reasons == (f"classes differ from the stored truth: {word}",)
    assert record.errors is not None
    assert record.errors.class_mismatch == 2
    assert math.isfinite(record.errors.rel_l2)  # of the rest


@pytest.mark.usefixtures("spoilt")
def test_lse_may_be_left_out_and_strides_do_not_matter() -> None:
    plain, bare, strided = (one(name) for name in ("naive_masked", "no_lse", "strided"))
    assert bare.status is strided.status is Status.PASS
    assert bare.lse_errors is None
    assert plain.lse_errors is not None
    assert plain.output_hash == bare.output_hash == strided.output_hash


@pytest.mark.usefixtures("spoilt")
def test_entry_points_join_but_cannot_replace_a_built_in() -> None:
    assert set(SPOILT) < set(harness.implementations())
    assert registry.entry("nan").summary == f"from {__name__}:nan"
    assert not registry.entry("nan").emulated
    assert harness.get("nan") is SPOILT["nan"]
    assert isinstance(harness.get("naive_masked"), Algorithm)
    assert one("naive_masked").status is Status.PASS


def test_inputs_that_cannot_be_made_say_of_which_case() -> None:
    case = replace(FULL, draw=Draw("nope"))
    with pytest.raises(ValueError, match=r"made/full draws 'nope'; allowed: normal"):
        harness.run([case], ["naive_masked"], ["fp32"])


def test_errors_by_head_are_those_of_the_whole_on_captured_activations() -> None:
    (case,) = (c for c in harness.load_cases("real") if c.id == "real/smollm2-layer00")
    (found,) = harness.run([case], ["naive_masked"], ["bf16"], seeds=1)
    q, k, v = make_inputs(case, 0).tensors
    size = harness.reference(q, k, v, case.spec).out.square().sum((0, 2, 3))
    assert found.total_errors is not None
    heads = torch.tensor(found.head_rel_l2, dtype=torch.float64)
    assert heads.shape == (9,)
    whole = float(((heads**2 * size).sum() / size.sum()).sqrt())
    assert whole == pytest.approx(found.total_errors.rel_l2, rel=5e-4)  # each is kept to 4 digits
    (drawn,) = harness.run([harness.load_cases("smoke")[0]], ["naive_masked"], ["bf16"], seeds=1)
    assert drawn.head_rel_l2 == ()
