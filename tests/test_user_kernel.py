"""A user's own function as `--kernel`: judged where it works, and told of in its own cell where it does not."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.cli import main
from harness.kernels.child import Child, KernelEnded
from harness.kernels.served import serve
from harness.kernels.takes import taken
from harness.kernels.user import open_kernel
from harness.kernels.wire import receive
from harness.records import Record, Status

# One file, hence one process for all: which variant it is stands in a file beside it, read at every call.
SOURCE = '''
import ctypes, math, os, signal, time
from pathlib import Path
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

print("loading", flush=True)  # which must not disturb the messages
BESIDE = Path(__file__).parent


def which():
    return (BESIDE / "which").read_text()


def kernel(q, k, v, *, causal, scale):
    name = which()
    if name in FATES:
        return FATES[name](q, k, v, causal, scale)
    print("called", name, flush=True)
    if name in BROKEN:
        return right(*BROKEN[name](q, k, v, causal, scale))
    return AFTER[name](right(q, k, v, causal, scale), v)


def right(q, k, v, causal, scale, mask=None):
    if mask is None:
        return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def seen(q, k, last, causal=True):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return mask.tril(last) if causal else mask


def without(q, k, causal, key):
    mask = seen(q, k, 0, causal)
    mask[:, key] = False
    return mask


def stale(x):
    x = x.clone()
    x[:, :, -64:] = x[:, :, -128:-64]
    return x


BROKEN = {
    "right": lambda q, k, v, c, s: (q, k, v, c, s),
    "scale omitted": lambda q, k, v, c, s: (q, k, v, c, 1.0),
    "scale": lambda q, k, v, c, s: (q, k, v, c, s * 1.005),
    "key 37 lost": lambda q, k, v, c, s: (q, k, v, c, s, without(q, k, c, 37)),
    "right + 1": lambda q, k, v, c, s: (q, k, v, c, s, seen(q, k, 1)),
    "stale block of 64": lambda q, k, v, c, s: (q, stale(k), stale(v), c, s),
    "stale V block of 64": lambda q, k, v, c, s: (q, k, stale(v), c, s),
    "GQA interleaved": lambda q, k, v, c, s: (q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), c, s),
}
AFTER = {
    "heads swapped": lambda o, v: o.unflatten(1, (-1, 2)).flip(2).flatten(1, 2),
    "shrink": lambda o, v: o / 1.01,
    "all zeros": lambda o, v: torch.zeros_like(o),
    "wrong shape": lambda o, v: o[:, :, :-1],
    "wrong dtype": lambda o, v: o.double(),
    "a list of three": lambda o, v: [o, o, o],
    "an integer": lambda o, v: 7,
    "sparse": lambda o, v: o.to_sparse(),
    "lse of a wrong shape": lambda o, v: (o, o),
    "other device": lambda o, v: o.to("meta"),
}


def raising(*_):
    raise ZeroDivisionError("as planted")


def writing(q, k, v, causal, scale):
    out = right(q, k, v, causal, scale)
    k.mul_(2)
    return out


def scribbling_behind(q, k, v, causal, scale):
    out = right(q, k, v, causal, scale)
    v.as_strided((1,), (1,), v.shape[3]).zero_()  # in the gap after the first row
    return out


FATES = {
    "raising": raising,
    "exiting": lambda *_: os._exit(7),
    "leaving": lambda *_: exit(3),
    "segfault": lambda *_: ctypes.string_at(0),
    "killed": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "hanging": lambda *_: time.sleep(600),
    "writing": writing,
    "scribbling": scribbling_behind,
}


def with_options(q, k, v, *, causal, scale, window=None, kv_lens=None):
    raise NotImplementedError


def fp8(q, k, v, *, causal, scale, q_scale=None, k_scale=None, v_scale=None):
    """P stays wide: better than the recipe allows."""
    pairs = (q, q_scale), (k, k_scale), (v, v_scale)
    wide = [x.float() if s is None else x.float() * s[..., None, None] for x, s in pairs]
    return right(*wide, causal, scale).to(torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)


def tokens_first(q, k, v, *, is_causal, softmax_scale):
    assert all(x.is_contiguous() for x in (q, k, v))
    out = right(*(x.transpose(1, 2) for x in (q, k, v)), is_causal, softmax_scale)
    return out.transpose(1, 2)


def packed(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, causal, scale):
    ends = list(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], cu_seqlens_k.tolist(), cu_seqlens_k.tolist()[1:]))
    assert max(b - a for a, b, _, _ in ends) == max_seqlen_q
    outs = []
    for a, b, c, d in ends:
        own = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        outs.append(right(*own, causal, scale)[0].transpose(0, 1))
    return torch.cat(outs)
'''
NAMED = (
    "scale omitted", "scale", "key 37 lost", "right + 1", "stale block of 64", "stale V block of 64", "GQA interleaved",
    "heads swapped", "shrink", "all zeros",
)  # fmt: skip


def case(name: str, shape: harness.Shape, **more: Any) -> harness.Case:
    return harness.Case("own", name, shape, "a kernel of one's own", **more)


PLAIN = case("plain", harness.Shape(1, 4, 256, 64, kv_heads=2), spec=harness.AttentionSpec(causal=True))
SMALL = case("small", harness.Shape(1, 2, 64, 16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "mine.py").write_text(SOURCE)
    (folder / "which").write_text("right")
    yield folder
    for name in ("kernel", "fp8", "with_options"):
        open_kernel(f"{folder / 'mine.py'}:{name}").child.close()


@pytest.fixture
def run(folder: Path) -> Callable[..., Record]:
    def one(which: str, on: harness.Case = SMALL, function: str = "kernel", recipe: str = "bf16") -> Record:
        (folder / "which").write_text(which)
        (record,) = harness.run([on], [f"{folder / 'mine.py'}:{function}"], [recipe], seeds=1)
        return record

    return one


@pytest.mark.parametrize(
    "on", [PLAIN, case("padded", harness.Shape(1, 2, 128, 32), layout="padded")], ids=lambda c: c.id
)
@pytest.mark.parametrize("recipe", ["fp64", "fp32", "bf16", "fp16"])
def test_a_correct_sdpa_call_passes_in_its_precisions(
    run: Callable[..., Record], recipe: str, on: harness.Case
) -> None:
    record = run("right", on, recipe=recipe)
    assert record.status is Status.PASS, record.reasons
    assert record.ran is not None
    wide = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    assert (record.ran.dtype, record.ran.device, record.emulated) == (wide[recipe], "cpu", False)


@pytest.mark.parametrize(
    ("name", "recipe"), [*((name, "bf16") for name in NAMED), ("scale", "fp32"), ("scale", "fp16")]
)
def test_a_broken_variant_fails_with_the_right_name(
    run: Callable[..., Record], name: str, recipe: str
) -> None:
    record = run(name, PLAIN, recipe=recipe)
    assert record.status is Status.FAIL
    assert record.diagnosis is not None
    assert name in (record.diagnosis.fault, *record.diagnosis.rivals)
    if name == "scale":
        assert record.diagnosis.size == pytest.approx(0.005, rel=0.1)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wrong shape", "out has shape (1, 2, 63, 16), but should have (1, 2, 64, 16)"),
        ("wrong dtype", "out is torch.float64, but should be torch.bfloat16"),
        ("a list of three", "it returned a list of 3, but should return a tensor, or (out, lse)"),
        ("an integer", "it returned a int"),
        ("sparse", "out is torch.sparse_coo, but should be a dense tensor"),
        ("lse of a wrong shape", "lse has shape (1, 2, 64, 16), but should have (1, 2, 64)"),
        ("other device", "out is on meta, but q is on cpu"),
        ("writing", "it wrote its inputs: k changed during the call"),
    ],
)
def test_a_wrong_return_is_a_failure_that_says_what_was_wrong(
    run: Callable[..., Record], name: str, says: str
) -> None:
    record = run(name)
    assert record.status is Status.FAIL
    assert says in record.reasons[0]
    assert run("right").status is Status.PASS


def test_writing_between_the_rows_is_seen_too(run: Callable[..., Record]) -> None:
    padded = case("gaps", harness.Shape(1, 2, 64, 16), layout="padded")
    assert "v changed" in run("scribbling", padded).reasons[0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raising", "KernelRaised: ZeroDivisionError: as planted"),
        ("exiting", "KernelEnded: it ended its process: exit code 7"),
        ("leaving", "KernelRaised: SystemExit: 3"),
        ("segfault", "KernelEnded: it ended its process: signal SIGSEGV"),
        ("killed", "KernelEnded: it ended its process: signal SIGKILL"),
    ],
)
def test_a_kernel_that_dies_costs_its_own_cell_alone(
    run: Callable[..., Record], name: str, says: str
) -> None:
    record = run(name)
    assert record.status is Status.ERROR
    assert record.reasons == (says,)
    if name in ("raising", "segfault"):  # its own traceback, not only that of the call
        assert "mine.py" in record.traceback
    assert run("right").status is Status.PASS


def test_an_endless_kernel_is_ended_at_its_limit_and_the_next_call_has_a_new_process(
    run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_KERNEL_LIMIT_S", "0.5")
    start = time.monotonic()
    record = run("hanging")
    assert record.status is Status.ERROR
    assert record.reasons == ("KernelEnded: it did not return within 0.5 s, and was ended",)
    assert time.monotonic() - start < 20
    assert run("right").status is Status.PASS


def test_after_three_hangs_no_more_calls_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child("x:y")
    child._hangs = 3
    with pytest.raises(KernelEnded, match="not run: 3 calls before it did not return"):
        child.call({}, {})


# --- what a signature takes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "recipe", "says"),
    [
        (
            case("window", harness.Shape(1, 2, 8, 8), spec=harness.AttentionSpec(window=(3, 0))),
            "bf16",
            "takes no window",
        ),
        (
            case("cap", harness.Shape(1, 2, 8, 8), spec=harness.AttentionSpec(softcap=5.0)),
            "bf16",
            "takes no softcap",
        ),
        (
            case("mask", harness.Shape(1, 2, 8, 8), extras={"mask": harness.Draw("random")}),
            "bf16",
            "takes no mask",
        ),
        (
            case("long", harness.Shape(1, 2, 8, 8, kv_len=9), spec=harness.AttentionSpec(causal=True)),
            "bf16",
            "takes no align",
        ),
        (SMALL, "fp8_e4m3", "takes no q_scale, and fp8_e4m3 stores q in fp8_e4m3"),
        (SMALL, "mxfp8", "MX blocks"),
    ],
)
def test_what_the_signature_does_not_take_is_refused_with_its_name(
    run: Callable[..., Record], on: harness.Case, recipe: str, says: str
) -> None:
    record = run("right", on, recipe=recipe)
    assert record.status is Status.REFUSED
    assert says in " ".join(record.reasons)


def test_fp8_codes_come_with_their_scales(run: Callable[..., Record]) -> None:
    for recipe in ("fp8_e4m3", "fp8_kv", "bf16"):
        record = run("right", case("fp8", harness.Shape(2, 2, 128, 32)), "fp8", recipe)
        assert record.status is Status.PASS, record.reasons


@pytest.mark.parametrize(("function", "layout"), [("tokens_first", "bshd"), ("packed", "thd")])
def test_layouts_are_adapted(run: Callable[..., Record], function: str, layout: str, folder: Path) -> None:
    causal = case("two", harness.Shape(2, 2, 96, 32), spec=harness.AttentionSpec(causal=True))
    lens = {"kv_lens": harness.Draw("values", {"values": (96, 50)})}
    ragged = case("ragged", harness.Shape(2, 2, 96, 32), extras=lens)
    for on in (causal, *([ragged] if layout == "thd" else [])):
        record = run("right", on, f"{function}@{layout}")
        assert record.status is Status.PASS, record.reasons
    open_kernel(f"{folder / 'mine.py'}:{function}@{layout}").child.close()


def test_signatures_say_what_is_taken_under_which_name() -> None:
    def plain(q: Any, k: Any, v: Any, *, is_causal: bool, sm_scale: float, block: int = 64) -> None: ...
    def anything(query: Any, key: Any, value: Any, **options: Any) -> None: ...

    assert taken(plain) == ({"causal": "is_causal", "scale": "sm_scale"}, ("causal", "scale"))
    names, needs = taken(anything)
    assert {"causal", "scale", "window", "mask", "sinks", "k_scale"} <= names.keys()
    assert needs == ()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(q, k): ...", "it takes q, k; allowed: q, k and v first"),
        ("def f(q, k, v, *, dropout): ...", "it needs dropout, which nobody gives"),
        ("f = 3", "f of bad.py is a int; allowed: a function"),
        ("def g(q, k, v): ...", "bad.py has no f; it has g"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_module_that_has_no_kernel_is_told_of(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: what a child does when it starts."""
    (tmp_path / "bad.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    replies = io.BytesIO()
    serve(io.BytesIO(), replies, "bad.py:f")
    reply, _ = receive(io.BytesIO(replies.getvalue()))
    assert says in reply["unloaded"]


@pytest.mark.parametrize(
    ("source", "says"),
    [("import os; os._exit(4)", "it ended its process: exit code 4"), (None, "bad.py does not exist")],
)
def test_a_kernel_that_cannot_be_loaded_is_wrong_usage_in_one_line(
    source: str | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if source is not None:
        (tmp_path / "bad.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["run", "--kernel", "bad.py:f", "--cases", "smoke", "--out", "out", "--jobs", "1"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert sum(line.startswith("error: ") for line in said.splitlines()) == 1
    assert not Path("out").exists()
    open_kernel.cache_clear()


def test_the_command_runs_a_kernel_of_a_module_and_reports_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "which").write_text("right")
    with pytest.raises(SystemExit) as caught:
        main(
            [
                "run",
                "-k",
                "mine:kernel",
                "--cases",
                "smoke",
                "--only",
                "smoke/causal-*",
                "--seeds",
                "1",
                "--jobs",
                "1",
            ]
        )
    assert caught.value.code == 0
    said = capsys.readouterr()
    assert "mine:kernel takes causal, scale" in said.err
    assert "takes no q_scale" in said.out
    assert os.environ.get("HARNESS_KERNEL_LIMIT_S") is None
    records = harness.read_records(Path("reports/latest/records.jsonl"))
    assert {r.recipe for r in records if r.status is Status.PASS} == {"fp32", "bf16", "fp16"}
    open_kernel("mine:kernel").child.close()
