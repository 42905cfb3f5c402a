"""Whole decoders: parameters against those published, FLOPs against torch's counter, bytes against their definition."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from harness.cli import main
from harness.cli.costing import cost
from harness.cost import settings as room
from harness.cost import units
from harness.cost.models import MODELS, Model, get_model
from harness.cost.phases import decode_step, kv_storage, prefill
from harness.cost.roofline import Rates
from harness.cost.settings import KEYS, MODEL_KEYS, NEEDED, read_config, settings
from harness.formats import BF16, FORMATS, FP8_E4M3
from harness.recipe import RECIPES

ROOT = Path(__file__).resolve().parent.parent

# Numbers of parameters, as the metadata of the models' safetensors files on huggingface.co gives them.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
}


def test_every_public_model_has_the_parameters_that_are_published_and_a_source() -> None:
    public = [m for m in MODELS.values() if m.name != "plain-7b"]
    assert {m.name: m.params for m in public} == PUBLISHED
    assert all(m.source.startswith(("arXiv:", "huggingface.co/")) for m in public)


# --- torch's counter ----------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A decoder layer in plain torch, keys repeated for the heads that share them. Nothing is hidden."""

    def __init__(self, m: Model) -> None:
        super().__init__()
        self.m = m
        self.q, self.o = (
            nn.Linear(m.width, m.heads * m.H, bias=False),
            nn.Linear(m.heads * m.H, m.width, bias=False),
        )
        self.k, self.v = (nn.Linear(m.width, m.K * m.H, bias=False) for _ in "kv")
        self.into = nn.ModuleList(nn.Linear(m.width, m.ffn, bias=False) for _ in range(m.ffn_matrices - 1))
        self.down = nn.Linear(m.ffn, m.width, bias=False)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> Tensor:
        q, k, v = (self.split(f(x), f.out_features // self.m.H) for f in (self.q, self.k, self.v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        k, v = (t.repeat_interleave(self.m.heads // self.m.K, 1) for t in (k, v))
        z = (q @ k.mT * self.m.H**-0.5).softmax(-1) @ v
        x = x + self.o(z.transpose(1, 2).flatten(2))
        inner = torch.stack([f(x) for f in self.into]).prod(0)
        return x + self.down(inner)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(2, (heads, self.m.H)).transpose(1, 2)


def counted(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_a_layer_are_those_that_torch_counts(name: str) -> None:
    """On the meta device, which computes nothing: the layers have their real sizes."""
    m, tokens, batch = replace(get_model(name), layers=1, vocab=0), 96, 2
    with torch.device("meta"), torch.no_grad():
        layer, x = Layer(m), torch.empty(batch, tokens, m.width)
        whole = counted(lambda: layer(x))
        past = tuple(torch.empty(batch, m.K, tokens - 1, m.H) for _ in "kv")
        step = counted(lambda: layer(x[:, :1], past))
    work = prefill(m, kv_storage("bf16"), BF16, tokens, batch)
    full = 4 * batch * tokens**2 * m.heads * m.H  # torch's layer hides nothing
    assert whole == work.total_flops - work.flops["attention"] + full
    assert step == decode_step(m, kv_storage("bf16"), BF16, tokens, batch).total_flops


def test_causal_flops_are_those_that_torch_counts_row_by_row() -> None:
    m = Model("small", 24, 1, 6, 40, kv_heads=2)
    q, k, v = torch.ones(1, 6, 33, 4), torch.ones(1, 6, 33, 4), torch.ones(1, 6, 33, 4)

    def rows() -> None:
        for t in range(1, 34):
            (q[:, :, t - 1 : t] @ k[:, :, :t].mT) @ v[:, :, :t]

    assert counted(rows) == prefill(m, kv_storage("bf16"), BF16, 33).flops["attention"]


def test_head_is_one_product_a_sequence_and_a_tied_embedding_is_read_whole() -> None:
    tied = Model("tied", 8, 1, 2, 16, vocab=1000, tied=True)
    free, none = replace(tied, tied=False), replace(tied, vocab=0, tied=False)
    kv = kv_storage("bf16")
    works = {m: prefill(m, kv, BF16, 5, batch=3) for m in (tied, free, none)}
    assert works[tied].flops["head"] == works[free].flops["head"] == 2 * 3 * 8 * 1000
    assert works[none].flops["head"] == 0
    assert works[tied].weights == works[none].weights + 8 * 1000 * 2
    assert works[free].weights == works[none].weights + 8 * (1000 + 3 * 5) * 2  # the head, and a row a token
    assert prefill(free, kv, BF16, 5000).weights == 2 * free.params  # never more rows than there are


# --- bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RECIPES, "fp8_e5m2", "tf32"])
def test_kv_bytes_are_codes_and_scales_and_a_step_writes_what_it_adds(name: str) -> None:
    m, kv = Model("small", 96, 3, 6, 40, kv_heads=2), kv_storage(name)
    width = FORMATS[kv.storage["k"]].bytes
    step, before = (decode_step(m, kv, BF16, tokens, batch=2) for tokens in (257, 256))
    codes = 2 * 3 * 2 * 257 * 2 * 16 * width  # sequences, layers, K and V, tokens, heads, head_dim
    scales = {
        "fp8_e4m3_block": 2 * 3 * 2 * 2 * 3 * 4,  # 3 blocks of 128 rows a head
        "fp8_e4m3_hadamard": 2 * 3 * 2 * 2 * 3 * 4,
        "mxfp8": 2
        * 3
        * 2
        * (257 * 1 + 9 * 16),  # K: a row of 16 is one block; V: 9 blocks of 32 keys, 16 wide
    }
    per_head = 2 * 3 * 2 * 2 * 4 if kv.scaling and kv.scaling["k"].source == "amax" else 0
    assert step.kv_cache == step.kv_read == codes + scales.get(name, per_head)
    assert step.kv_written == step.kv_cache - before.kv_cache > 0
    assert prefill(m, kv, BF16, 257, batch=2).kv_written == step.kv_cache


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batch_shares_the_weights_and_not_the_cache(batch: int) -> None:
    m, kv = get_model("llama-2-7b"), kv_storage("fp16")
    one, many = (decode_step(m, kv, BF16, 4096, b) for b in (1, batch))
    assert many.kv_read == batch * one.kv_read
    assert many.weights - one.weights == (batch - 1) * m.width * 2  # rows of the embedding
    assert many.attention_intensity == one.attention_intensity == 1  # 4·N·H FLOPs over 2·2·K·H bytes, N = K
    assert many.intensity >= one.intensity


def test_grouped_heads_raise_the_intensity_of_attention_by_their_group() -> None:
    m = get_model("llama-3.1-8b")
    assert decode_step(m, kv_storage("bf16"), BF16, 4096).attention_intensity == 4
    assert decode_step(m, kv_storage("fp8_e5m2"), BF16, 4096).attention_intensity == 8


def test_weights_enter_by_the_bytes_of_their_format() -> None:
    m, kv = get_model("smollm2-135m"), kv_storage("bf16")
    wide, narrow = (decode_step(m, kv, f, 100).weights for f in (BF16, FP8_E4M3))
    assert (wide, narrow) == (2 * m.params, m.params)


def test_activations_are_those_that_products_read_and_write() -> None:
    m = Model("small", 96, 3, 6, 40, kv_heads=2, head_dim=10, vocab=50)
    per_token = (
        96 + 60 + 60 + 60 + 60 + 96 + 96 + 40 + 40 + 40 + 96
    )  # x, q twice, z twice, o, x, gate, up, in, out
    work = prefill(m, kv_storage("fp8_e4m3"), BF16, 9, batch=2)  # whose output is BF16
    assert work.activations == 2 * (3 * 2 * 9 * per_token + 2 * (96 + 50))
    assert work.moved == work.weights + work.kv_read + work.kv_written + work.activations


# --- the roofline -------------------------------------------------------------------------------------------


def test_time_is_the_longer_and_the_side_is_its_cause() -> None:
    rates = Rates(bandwidth=2e12, flops=1e15)
    assert rates.ridge == 500
    assert (rates.time_s(1e12, 1e12), rates.side(1e12, 1e12)) == (0.5, "memory")
    assert (rates.time_s(1e15, 1e12), rates.side(1e15, 1e12)) == (1.0, "compute")
    assert (rates.memory_s(5e11), rates.compute_s(5e14)) == (0.25, 0.5)


def test_a_rate_that_is_not_known_limits_nothing() -> None:
    assert Rates().time_s(1, 1) is None
    assert Rates(bandwidth=4.0).time_s(1e9, 8) == 2
    assert Rates(flops=4.0).time_s(8, 1e9) == 2
    assert Rates(bandwidth=4.0).side(1, 1) is Rates(flops=4.0).side(1, 1) is None


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["bandwidth", "flops"])
def test_a_rate_that_is_none_is_refused(name: str, rate: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*; allowed: a number > 0"):
        Rates(**{name: rate})


# --- units --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), (131072, 131072), ("128K", 131072), ("128k", 131072), ("1M", 1048576), ("0.5K", 512)],
)  # fmt: skip
def test_tokens_are_read(text: str | int, tokens: int) -> None:
    assert units.parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-4", "1.5", "4KB", "K", "nan", "1e400", True, None, "1 2"])
def test_tokens_that_are_none_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"context is .*; allowed: a whole number of tokens"):
        units.parse_tokens(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "rate"), [("4.8TB/s", 4.8e12), ("900 GB/s", 9e11), ("1TiB/s", 2.0**40), ("5B/s", 5.0), ("3kB/s", 3e3)]
)  # fmt: skip
def test_bandwidths_are_read(text: str, rate: float) -> None:
    assert units.parse_bandwidth(text) == rate


@pytest.mark.parametrize(
    ("text", "rate"), [("989TFLOP/s", 9.89e14), ("2PFLOPS", 2e15), ("1e3 GFLOPs/s", 1e12), ("67TFLOPs", 6.7e13)]
)  # fmt: skip
def test_flop_rates_are_read(text: str, rate: float) -> None:
    assert units.parse_flop_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["4.8", "TB/s", "4.8TB", "4.8Tb/s", "0TB/s", "1e400TB/s", "nanTB/s", 4.8, None]
)
def test_bandwidths_without_a_unit_or_a_size_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"bandwidth is .*; allowed: a number > 0 with its unit"):
        units.parse_bandwidth(text)  # type: ignore[arg-type]


SHOWN = [
    (units.show_bytes, [(0, "0 B"), (1000, "1000 B"), (491520, "480 KiB"), (60 * 2**30, "60.0 GiB")]),
    (units.show_bytes, [(2**20 - 1, "1.00 MiB"), (1000 * 1024, "1000 KiB")]),
    (units.show_flops, [(0, "0 FLOP"), (4.5e15, "4.50 PFLOP"), (1.2e18, "1.20 EFLOP")]),
    (units.show_time, [(6.5e-3, "6.50 ms"), (0.9999, "1.00 s"), (3029, "50.5 min"), (2e5, "2.31 d")]),
    (units.show_count, [(8030261248, "8.03 G"), (134515008, "135 M"), (7, "7.00")]),
    (units.show_rate, [(4.8e12, "4.80 TB/s")]),
    (units.show_tokens, [(131072, "128K"), (2**20, "1M"), (1000, "1000")]),
    (
        units.show_ratio,
        [(0, "0"), (0.0833, "0.0833"), (9468.2, "9468"), (0.00099951, "0.00100"), (4.069e-5, "4.07e-5")],
    ),
    (units.show_ratio, [(999999.4, "999999"), (1.2e6, "1.20e6")]),
]


@pytest.mark.parametrize(
    ("show", "value", "text"), [(show, value, text) for show, pairs in SHOWN for value, text in pairs]
)
def test_sizes_are_shown_with_three_digits(show: Callable[..., str], value: float, text: str) -> None:
    assert (show(value, "B/s") if show is units.show_rate else show(value)) == text


@given(st.floats(1e-30, 1e30))
def test_three_digits_are_never_farther_off_than_half_of_the_last(x: float) -> None:
    """1.00 … 1.005 is the worst of them; a double's own rounding is far below the hundredth that is allowed for it."""
    assert abs(float(units.show_ratio(x)) - x) <= 5.05e-3 * x


# --- what is asked for --------------------------------------------------------------------------------------

CONFIG = """
context = "64K"
batch = 4
kv = ["bf16", "fp8_e4m3_block"]
weights = "fp8_e4m3"
bandwidth = "3.35TB/s"
flops = "1979TFLOP/s"
[model]
name = "mine"
width = 1024
layers = 12
heads = 16
kv_heads = 4
ffn = 4096
ffn_matrices = 2
vocab = 50000
tied = true
source = "a file of mine"
"""


def told(*arguments: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["cost", *map(str, arguments)])
    assert stop.value.code == 0


def test_config_says_everything_and_the_command_line_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG)
    asked = settings(read_config(path))
    assert (asked.context, asked.batch, asked.weights) == (65536, 4, FP8_E4M3)
    assert asked.rates == Rates(3.35e12, 1.979e15)
    assert [kv.name for kv in asked.kv] == ["bf16", "fp8_e4m3_block"]
    assert (asked.model.H, asked.model.K, asked.model.tied) == (64, 4, True)
    told("--config", path)
    whole = capsys.readouterr().out
    assert "mine: D = 1024" in whole
    assert "65536 tokens, batch 4, weights fp8_e4m3, 3.35 TB/s, 1.98 PFLOP/s" in whole
    told("--config", path, "--model", "llama-2-7b", "--context", "2K", "--kv", "mxfp8", "--batch", "1")
    changed = capsys.readouterr().out
    assert "llama-2-7b: D = 4096" in changed
    assert "2048 tokens, batch 1, weights fp8_e4m3" in changed
    assert "fp8_e4m3_block" not in changed


def test_every_key_is_documented_and_the_documented_file_is_valid() -> None:
    example = tomllib.loads(textwrap.dedent((room.__doc__ or "").partition("\n\n")[2]))
    assert tuple(example) == KEYS
    assert settings(example).model is MODELS["llama-3.1-8b"]
    assert set(re.findall(r"\w+", cost.help or "")) >= {*KEYS, *MODEL_KEYS}
    assert set(NEEDED) < set(MODEL_KEYS)


def test_example_of_the_document_is_valid_and_the_readmes_table_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = (
        (ROOT / "docs" / "cost.md").read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    )
    assert settings(tomllib.loads(example)).model.params == get_model("llama-3.1-8b").params
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it costs")[2].split("```\n")
    told(*readme[1].split()[4:])
    assert readme[3] in capsys.readouterr().out


def test_command_loads_nothing_heavy() -> None:
    """Neither torch nor numpy, nor what the other commands need: it has 0.3 s."""
    script = (
        "import sys\nfrom harness.cli import main\ntry:\n    main(['cost', '--model', 'plain-7b'])\nfinally:\n"
        "    heavy = {'torch', 'numpy', 'pydantic', 'tabulate', 'harness.registry', 'harness.records'}\n"
        "    print(heavy & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "set()"


BAD = [
    ("colour = 3", "unknown key 'colour'; allowed: model, context"),
    ("[model]\nwidht = 3", r"\[model\]: unknown key 'widht'; allowed: name, width"),
    ("[model]\nwidth = 3", r"\[model\] lacks layers, heads, ffn"),
    ("model = 3", "unknown model 3; allowed: plain-7b"),
    ("model = []", r"unknown model \[\]; allowed: plain-7b"),
    ('model = "plain-7b"\ncontext = 1.5', "context is 1.5"),
    ('model = "plain-7b"\nbatch = true', "batch is True"),
    ('model = "plain-7b"\nbatch = 4294967296', "batch is 4294967296"),
    ('model = "plain-7b"\nkv = []', r"kv is \[\]; allowed: one name or more"),
    ('model = "plain-7b"\nkv = [3]', r"kv is \[3\]"),
    ('model = "plain-7b"\nweights = 8', "unknown format 8"),
    ('model = "plain-7b"\nflops = 989', "flops is 989"),
    ("[model]\nwidth = 100\nlayers = 1\nheads = 3\nffn = 4", "width 100 over 3 heads"),
    ("[model]\nwidth = 96\nlayers = 1\nheads = 6\nkv_heads = 4\nffn = 4", "6 query heads over 4 kv heads"),
    ("[model]\nwidth = 0\nlayers = 1\nheads = 3\nffn = 4", "width is 0; allowed: an integer ≥ 1"),
    ("[model]\nwidth = 3.0\nlayers = 1\nheads = 3\nffn = 4", "width is 3.0"),
    ("[model]\nwidth = 3\nlayers = 1\nheads = 3\nffn = 4\ntied = 1", "tied is 1; allowed: true, false"),
    ("[model]\nwidth = 3\nlayers = 1\nheads = 3\nffn = 4\nname = 1", "name is 1"),
    ("[model]\nwidth = 3\nlayers = 1\nheads = 3\nffn = 4\nsource = 1", "source is 1"),
    (f"[model]\nwidth = 3\nlayers = {10**400}\nheads = 3\nffn = 4", "layers is 1000"),
]


@pytest.mark.parametrize(("text", "said"), BAD, ids=[t.replace("\n", " ")[:60] for t, _ in BAD])
def test_config_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        settings(read_config(path))


# --- the tables ---------------------------------------------------------------------------------------------

RATES = ("--bandwidth", "4.8TB/s", "--flops", "989TFLOP/s")


@pytest.mark.parametrize("context", ["1", "128K", "10M"])
@pytest.mark.parametrize("batch", [1, 999])
@pytest.mark.parametrize("name", MODELS)
def test_tables_fit_a_terminal(
    name: str, batch: int, context: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kv = ",".join([*RECIPES, "fp8_e5m2"])
    told("--model", name, "--context", context, "--batch", batch, "--kv", kv, *RATES)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert all(out.count(f"\n{recipe} ") == 2 for recipe in RECIPES)


def test_the_list_of_models_fits_a_terminal_and_names_each_source(capsys: pytest.CaptureFixture[str]) -> None:
    told("--list")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert all(out.count(f"\n{m.name} ") == 2 and m.source in out for m in MODELS.values())


def test_table_of_the_notes_7b_prints_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    told("--model", "plain-7b", "--context", "128K", "--kv", "bf16", "--bandwidth", "2TB/s")
    row = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("bf16 ")]
    assert [r[1:5] for r in row] == [["512", "KiB", "64.0", "GiB"]] * 2
    assert row[1][5] == "5.33"  # of weights of 12.0 GiB; the note's 13 give 4.9


@pytest.mark.parametrize(
    ("rates", "shown", "hidden"),
    [
        ((), (), ("memory", "compute", "time  ", "limit", "ridge")),
        (RATES[:2], ("memory", "time"), ("compute", "limit", "ridge")),
        (RATES[2:], ("compute", "time"), ("memory", "limit", "ridge")),
        (RATES, ("memory", "compute", "time", "limit", "ridge: 206 FLOP/B"), ()),
    ],
)
def test_columns_of_a_rate_that_is_not_given_are_left_out(
    rates: tuple[str, ...],
    shown: tuple[str, ...],
    hidden: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    told("--model", "llama-3.1-8b", "--context", "8K", *rates)
    out = capsys.readouterr().out
    assert all(name in out for name in shown)
    assert not any(name in out for name in hidden)
