"""`judge FILE`: verdicts on tensors that another program wrote, and one clear line for every file that is none."""

from __future__ import annotations

import json
import math
import pickle
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from harness import AttentionSpec, judge, read_records, reference
from harness.cli import main
from harness.dump import read_dump
from harness.options import cu_seqlens
from harness.records import Status

Tensors = dict[str, torch.Tensor]
ROOT = Path(__file__).resolve().parent.parent
MALFORMED = 200
FP8 = {"e4m3fn": (torch.float8_e4m3fn, "fp8_e4m3"), "e4m3fnuz": (torch.float8_e4m3fnuz, "fp8_e4m3fnuz")}


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def drawn(
    shape: tuple[int, ...] = (1, 2, 128, 32), dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for n in ("q", "k", "v")}


def attended(x: Tensors, spec: AttentionSpec | None = None, dtype: torch.dtype | None = None) -> Tensors:
    """With the FP64 truth as out, rounded to the inputs' dtype."""
    truth = reference(*(x[n].double() for n in ("q", "k", "v")), spec or AttentionSpec())
    return {**x, "out": truth.out.to(dtype or x["q"].dtype)}


def scaled(kind: str, seed: int = 0) -> tuple[Tensors, Tensors]:
    """Codes with a scale a head, and the numbers that they stand for."""
    dtype, _ = FP8[kind]
    top = torch.finfo(dtype).max
    x = drawn(dtype=torch.float32, seed=seed)
    scales = {n: t.abs().amax((2, 3)) / top for n, t in x.items()}
    codes = {n: (t / scales[n][..., None, None]).clamp(-top, top).to(dtype) for n, t in x.items()}
    values = {n: c.double() * scales[n][..., None, None].double() for n, c in codes.items()}
    return {**codes, **{f"{n}_scale": s for n, s in scales.items()}}, values


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
def test_a_right_output_passes_under_the_recipe_of_its_types(
    dtype: torch.dtype, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "right.safetensors"
    save_file(attended(drawn(dtype=dtype), AttentionSpec(causal=True)), path, {"causal": "true"})
    assert call("judge", path, "--out", tmp_path / "one.jsonl") == 0
    said = capsys.readouterr().out
    assert f"causal, recipe {name}," in said
    assert "implementation: PASS" in said
    assert "b=0 h=1" in said
    assert "rows 112 to 127" in said
    assert max(map(len, said.replace(str(tmp_path), "").splitlines())) <= 100
    (record,) = read_records(tmp_path / "one.jsonl")
    assert (record.case, record.status, record.recipe) == ("file/right", Status.PASS, name)


def test_a_wrong_scale_fails_with_its_name_and_the_record_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, x = tmp_path / "wrong.safetensors", drawn((1, 4, 256, 64))
    out = attended(x, AttentionSpec(scale=0.1252))
    save_file(out, path)
    assert call("judge", path, "--out", tmp_path / "one.jsonl") == 1
    assert "likeliest: the softmax scale is off" in capsys.readouterr().out
    (record,) = read_records(tmp_path / "one.jsonl")
    assert record.diagnosis is not None
    assert record.diagnosis.fault == "scale"
    assert call("report", tmp_path / "one.jsonl", "--out", tmp_path / "report") == 1
    assert "file/wrong" in capsys.readouterr().out


def test_a_command_line_option_goes_before_the_metadata(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(attended(drawn(), AttentionSpec(scale=0.5)), path, {"scale": "0.25", "causal": "true"})
    assert call("judge", path) == 1
    assert call("judge", path, "--scale", "0.5", "--no-causal") == 0
    assert "full" in capsys.readouterr().out


@pytest.mark.parametrize("kind", FP8)
@pytest.mark.parametrize("as_bytes", [False, True], ids=["typed", "bytes"])
def test_fp8_codes_with_scales_are_judged_as_their_own_format(
    kind: str, as_bytes: bool, tmp_path: Path
) -> None:
    codes, values = scaled(kind)
    tensors = {**codes, "out": attended(values)["out"].bfloat16()}
    if as_bytes:
        tensors |= {n: codes[n].view(torch.uint8) for n in ("q", "k", "v")}
    path = tmp_path / "fp8.safetensors"
    save_file(tensors, path, {"fp8": kind} if as_bytes else {})
    options = ("--recipe", FP8[kind][1]) if as_bytes else ()
    assert call("judge", path, *options) == 0
    dump = read_dump(path)
    assert all(torch.equal(getattr(dump, n), values[n]) for n in ("q", "k", "v"))


def test_fnuz_bytes_read_as_fn_are_caught(tmp_path: Path) -> None:
    codes, values = scaled("e4m3fnuz")
    path = tmp_path / "fp8.safetensors"
    bytes_ = {n: codes[n].view(torch.uint8) for n in ("q", "k", "v")}
    save_file({**codes, **bytes_, "out": attended(values)["out"].bfloat16()}, path, {"recipe": "fp8_e4m3"})
    assert call("judge", path, "--fp8", "e4m3fnuz", "--recipe", "fp8_e4m3fnuz") == 0
    assert call("judge", path, "--fp8", "e4m3fn") == 1


def test_every_fnuz_code_is_read_with_its_own_value(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    path = tmp_path / "codes.safetensors"
    save_file(
        {n: codes.clone() for n in ("q", "k", "v")} | {"out": torch.zeros(1, 1, 16, 16)},
        path,
        {"fp8": "e4m3fnuz"},
    )
    got = read_dump(path).q.flatten()
    for code, value in enumerate(got.tolist()):  # the definition: bias 8, 0x80 is NaN
        exponent, fraction = (code >> 3) & 15, code & 7
        size = math.ldexp(fraction, -10) if exponent == 0 else math.ldexp(8 + fraction, exponent - 11)
        want = math.nan if code == 0x80 else (-size if code & 0x80 else size)
        assert value == want or (math.isnan(value) and math.isnan(want)), code


def test_layouts_are_undone_and_give_the_same_figures(tmp_path: Path) -> None:
    spec = AttentionSpec(causal=True)
    x = attended(drawn((2, 2, 64, 32)), spec)
    plain, tokens, packed = (tmp_path / f"{n}.safetensors" for n in ("bhsd", "bshd", "thd"))
    save_file(x, plain, {"causal": "true"})
    turned = {n: t.transpose(1, 2).contiguous() for n, t in x.items()}
    save_file(turned, tokens, {"causal": "true", "layout": "bshd"})
    flat = {n: t.flatten(0, 1) for n, t in turned.items()}
    save_file({**flat, "cu_seqlens_q": cu_seqlens([64, 64])}, packed, {"causal": "true", "layout": "thd"})
    figures = []
    for path in (plain, tokens, packed):
        assert call("judge", path, "--out", tmp_path / "one.jsonl") == 0
        (record,) = read_records(tmp_path / "one.jsonl")
        assert record.errors is not None
        figures.append(record.errors)
    assert figures[0] == figures[1]
    assert figures[2].rmse == pytest.approx(figures[0].rmse, rel=1e-12)


def test_pages_are_gathered_by_the_block_table(tmp_path: Path) -> None:
    x, lens = drawn((2, 2, 48, 16)), torch.tensor([48, 20])
    truth = reference(*(x[n].double() for n in ("q", "k", "v")), AttentionSpec(), kv_lens=lens)
    pool = {n: torch.full((8, 2, 16, 16), math.nan, dtype=torch.bfloat16) for n in ("k", "v")}
    table = torch.tensor([[6, 1, 3], [5, 0, -1]], dtype=torch.int32)
    for n, pages in pool.items():
        for b in range(2):
            for i in range(3 if b == 0 else 2):
                pages[table[b, i]] = x[n][b, :, 16 * i : 16 * i + 16]
    path = tmp_path / "paged.safetensors"
    tensors = {"q": x["q"], **pool, "out": truth.out.bfloat16(), "kv_lens": lens, "block_table": table}
    save_file(tensors, path)
    assert call("judge", path) == 0
    save_file({**tensors, "block_table": table.flip(1).clamp(min=0)}, path)
    assert call("judge", path) == 1


def test_extras_and_lse_are_taken_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    g = torch.Generator().manual_seed(1)
    x = drawn((1, 2, 64, 32))
    extras = {"mask": torch.rand(64, 64, generator=g) < 0.8, "bias": torch.randn(1, 2, 64, 64, generator=g).bfloat16(),
              "sinks": torch.randn(2, generator=g)}  # fmt: skip
    truth = reference(*(x[n].double() for n in ("q", "k", "v")), AttentionSpec(), **extras)
    path = tmp_path / "x.safetensors"
    tensors = {**x, **extras, "out": truth.out.bfloat16(), "lse": truth.lse.float()}
    save_file(tensors, path)
    assert call("judge", path) == 0
    save_file({**tensors, "lse": truth.lse.float() + 0.5}, path)
    assert call("judge", path) == 1
    assert "lse is off by" in capsys.readouterr().out


def test_the_judgement_is_the_one_that_python_gives(tmp_path: Path) -> None:
    x = attended(drawn())
    save_file(x, tmp_path / "x.safetensors")
    call("judge", tmp_path / "x.safetensors", "--out", tmp_path / "one.jsonl")
    (record,) = read_records(tmp_path / "one.jsonl")
    direct = judge(x["out"], x["q"], x["k"], x["v"], recipe="bf16")
    assert (record.errors, record.margins, record.reasons) == (direct.errors, direct.margins, direct.reasons)


def test_unrounded_inputs_are_quantised_on_request(tmp_path: Path) -> None:
    x = drawn(dtype=torch.float32)
    stored = {n: t.bfloat16() for n, t in x.items()}
    save_file({**x, "out": attended(stored)["out"]}, tmp_path / "x.safetensors", {"recipe": "bf16"})
    assert call("judge", tmp_path / "x.safetensors") == 2
    assert call("judge", tmp_path / "x.safetensors", "--quantize", "--out", tmp_path / "one.jsonl") == 0
    assert read_records(tmp_path / "one.jsonl")[0].precision is Status.PASS


# --- files that are none -----------------------------------------------------------------------------------------


class _Trap:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.path,))


def _header(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def _with(header: Any, body: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + body


def _damaged(
    tensor: Callable[[random.Random], str],
) -> list[tuple[str, Callable[[dict[str, Any], random.Random], Any]]]:
    """Damage done to a header."""

    def set_(key: str, value: Any) -> Callable[[dict[str, Any], random.Random], Any]:
        def change(h: dict[str, Any], r: random.Random) -> Any:
            h[tensor(r)][key] = value
            return h

        return change

    def text(old: str, new: str) -> Callable[[dict[str, Any], random.Random], Any]:
        return lambda h, r: json.dumps(h).replace(old, new, 1)

    values: list[tuple[str, Any]] = [
        ("shape", [1, 1, 8, 9]),
        ("shape", []),
        ("shape", [-1, 1, 8, 8]),
        ("shape", [2**62, 2**62, 8, 8]),
        ("shape", "8"),
        ("shape", [1.5, 1, 8, 8]),
        ("shape", None),
        ("shape", [128]),
        ("dtype", "F13"),
        ("dtype", "F64"),
        ("dtype", None),
        ("dtype", 7),
        ("dtype", "OBJECT"),
        ("data_offsets", [0, 2**63]),
        ("data_offsets", [5, 1]),
        ("data_offsets", []),
        ("data_offsets", [-8, 0]),
        ("data_offsets", [0]),
        ("data_offsets", "all"),
    ]
    changes = [(f"{k}={v}", set_(k, v)) for k, v in values]
    changes += [(f"size {n}", text("8", n)) for n in ("NaN", "Infinity", "1e400", "1e2", "true", "[]")]
    return [
        *changes,
        ("no tensor", lambda h, r: {}),
        ("a list", lambda h, r: [h]),
        ("text", lambda h, r: "not JSON"),
    ]


def malformed(trap: Path) -> list[tuple[str, bytes]]:
    """So many files, each wrong in its own way; fixed seed."""
    r = random.Random(0)
    good = save(attended(drawn((1, 1, 8, 8), torch.float32)))
    header, body = _header(good)
    files = [(f"cut at {n}", good[:n]) for n in r.sample(range(len(good)), 60)]
    files += [("grown", good + bytes(8)), ("grown by one", good + b"x"), ("empty", b"")]
    files += [
        (f"length {n}", n.to_bytes(8, "little") + good[8:])
        for n in (0, 1, 2**31, 2**63, 2**64 - 1, 100 * 2**20)
    ]
    for name in ("q", "k", "v", "out"):
        for what, change in _damaged(lambda _, name=name: name):  # type: ignore[misc]
            files.append((f"{name} {what}", _with(change(json.loads(json.dumps(header)), r), body)))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(_Trap(trap), protocol)
        files += [(f"pickle {protocol}", data), (f"pickle {protocol} padded", data + bytes(400))]
        files.append((f"pickle {protocol} as a header", _with("", b"")[:8] + data))
    return files


def unfit() -> list[tuple[str, Tensors, dict[str, str]]]:
    """Whole files whose tensors or options do not fit."""
    x = attended(drawn((1, 2, 8, 8), torch.float32))
    zero = torch.zeros

    def but(**changed: torch.Tensor | None) -> Tensors:
        return {n: t for n, t in {**x, **changed}.items() if t is not None}

    codes = zero(1, 2, 8, 8, dtype=torch.uint8)
    wrong: list[tuple[str, Tensors, dict[str, str]]] = [
        *((f"no {n}", but(**{n: None}), {}) for n in x),
        *((f"{n} int", but(**{n: codes.int()}), {}) for n in x),
        *((f"{n} bool", but(**{n: codes.bool()}), {}) for n in x),
        *((f"{n} bytes", but(**{n: codes}), {}) for n in x),
        *((f"{n} complex", but(**{n: zero(1, 2, 8, 8, dtype=torch.complex64)}), {}) for n in x),
        *((f"{n} rank 3", but(**{n: x[n][0].contiguous()}), {}) for n in x),
        *((f"{n} longer", but(**{n: zero(1, 2, 9, 8)}), {}) for n in ("k", "v", "out")),
        *((f"{n} wider", but(**{n: zero(1, 2, 8, 9)}), {}) for n in ("q", "k", "out")),
        *((f"{n} heads", but(**{n: zero(1, 3, 8, 8)}), {}) for n in x),
        *((f"{n} empty", but(**{n: zero(1, 2, 0, 8)}), {}) for n in x),
        ("all empty", {n: zero(1, 2, 0, 8) for n in x}, {}),
        ("vast and empty", {n: zero(1, 1, 2**40, 0) for n in x}, {}),
        ("odd name", but(kvlens=zero(1)), {}),
        ("lse rank", but(lse=zero(8)), {}),
        ("lse int", but(lse=codes[..., 0].int()), {}),
        ("mask float", but(mask=zero(8, 8)), {}),
        ("mask size", but(mask=zero(7, 8, dtype=torch.bool)), {}),
        ("bias bool", but(bias=codes[0, 0].bool()), {}),
        ("bias size", but(bias=zero(3, 8, 8)), {}),
        ("sinks size", but(sinks=zero(3)), {}),
        ("sinks int", but(sinks=zero(2).int()), {}),
        ("kv_lens float", but(kv_lens=torch.tensor([math.nan])), {}),
        ("kv_lens far", but(kv_lens=torch.tensor([99])), {}),
        ("kv_lens many", but(kv_lens=torch.tensor([1, 2])), {}),
        ("kv_lens negative", but(kv_lens=torch.tensor([-1])), {}),
        *(
            (f"scale {v}", but(q_scale=torch.tensor(v)), {"recipe": "fp8_e4m3"})
            for v in (math.nan, math.inf, 0.0, -1.0)
        ),
        ("scale size", but(k_scale=torch.ones(3)), {"recipe": "fp8_e4m3"}),
        ("scale blocks", but(k_scale=torch.ones(1, 2, 5, 1)), {}),
        ("scale for fp32", but(v_scale=torch.ones(1)), {}),
        ("exact one", but(exact_q=x["q"]), {}),
        ("exact size", but(exact_q=x["q"], exact_k=x["k"], exact_v=zero(1)), {}),
        ("not stored", but(), {"recipe": "fp8_e4m3"}),
        ("table alone", but(block_table=zero(1, 1).int()), {}),
        ("cu alone", but(cu_seqlens_q=torch.tensor([0, 8])), {}),
        ("table far", but(block_table=torch.tensor([[7]]), kv_lens=torch.tensor([8])), {}),
        ("packed rank", but(), {"layout": "thd"}),
        ("packed without cu", {n: t[0] for n, t in x.items()}, {"layout": "thd"}),
        (
            "cu falls",
            {**{n: t[0].contiguous() for n, t in x.items()}, "cu_seqlens_q": torch.tensor([0, 5, 2])},
            {"layout": "thd"},
        ),
    ]
    options = {
        "causal": ("yes", ""),
        "align": ("left",),
        "window": ("5", "-1,0", "a,b", "1,2,3"),
        "scale": ("nan", "inf", "x"),
        "softcap": ("0", "-1", "nan", "text"),
        "empty_row": ("one",),
        "recipe": ("fp9", "absent.toml"),
        "layout": ("sbhd",),
        "casual": ("true",),
    }
    return wrong + [(f"{k}={v}", but(), {k: v}) for k, given in options.items() for v in given]


def test_two_hundred_malformed_files_are_each_told_in_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trap, path = tmp_path / "executed", tmp_path / "x.safetensors"
    files = malformed(trap)
    files += [
        (what, save({n: t.clone().contiguous() for n, t in x.items()}, meta)) for what, x, meta in unfit()
    ]
    assert len(files) >= MALFORMED
    assert len({data for _, data in files}) >= MALFORMED
    for what, data in files:
        path.write_bytes(data)
        code, said = call("judge", path), capsys.readouterr()
        assert code == 2, what
        assert re.fullmatch(r"error: [^\n]{20,700}\n", said.err), (what, said.err)
        assert said.out == "", what
    assert not trap.exists()


@pytest.mark.parametrize("what", ["absent", "folder"])
def test_what_is_no_file_is_told_in_one_line(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    assert call("judge", tmp_path / what) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_nan_and_infinity_in_the_tensors_are_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = drawn(dtype=torch.float32)
    x["v"][0, 0, 3, 5] = math.nan
    right = attended(x)
    save_file(right, tmp_path / "x.safetensors")
    assert call("judge", tmp_path / "x.safetensors") == 0
    right["out"][0, 1, 7, 7] = math.inf
    save_file(right, tmp_path / "x.safetensors")
    assert call("judge", tmp_path / "x.safetensors") == 1
    assert "classes differ" in capsys.readouterr().out


# --- the recipes of docs/doors.md --------------------------------------------------------------------------------


def _recipe(language: str, has: str) -> str:
    blocks = re.findall(
        rf"```{language}\n(.*?)```", (ROOT / "docs/doors.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (found,) = [b for b in blocks if has in b]
    return str(found)


def test_the_documented_torch_dump_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = drawn()
    own = {
        **x,
        "my_attention": lambda q, k, v: attended({"q": q, "k": k, "v": v}, AttentionSpec(causal=True))["out"],
    }
    exec(_recipe("python", "my_attention"), own)
    assert call("judge", "dump.safetensors") == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_the_documented_cpp_dump_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = "".join(f", {n}_bytes = data.size() * 2" for n in ("k", "v", "out"))
    head = "#include <cstdint>\n#include <fstream>\n#include <string>\n#include <vector>\nint main() {\n"
    head += "std::vector<uint16_t> data(8 * 512 * 64, 0x3f80); const void *q = data.data(), *k = q, *v = q, *out = q;\n"
    head += f"uint64_t q_bytes = data.size() * 2{sizes};\n"
    Path("dump.cpp").write_text(head + _recipe("cpp", "ofstream") + "}\n")
    subprocess.run(["g++", "-std=c++17", "-Wall", "-Werror", "dump.cpp", "-o", "dump"], check=True)
    subprocess.run(["./dump"], check=True)
    dump = read_dump(Path("dump.safetensors"))
    assert (dump.out.dtype, tuple(dump.out.shape), dump.recipe) == (torch.bfloat16, (1, 8, 512, 64), "bf16")
    assert dump.spec == AttentionSpec(causal=True)
    assert bool((dump.q == 1).all())
