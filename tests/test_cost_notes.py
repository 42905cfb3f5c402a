"""Every number of the source notes, with where it stands, and where their text is not exact.

`basics` is the note on attention, its complexity and its numerics, with its exercises; `shapes` the one on shapes and
FLOPs. The third, on training, decoding and the KV cache, prints shapes alone. A figure has to come out as printed:
ours, rounded to the digits that the note gives.
"""

from __future__ import annotations

import math

import pytest
import torch

import harness
from harness.cost import attention_flops
from harness.cost.formulas import (
    attention_over_ffn,
    causal_attention_flops,
    ffn_flops,
    full_attention_flops,
    kv_bytes,
    parity_length,
    projections,
    score_products,
)
from harness.cost.models import Model, get_model
from harness.cost.phases import decode_step, kv_storage, prefill
from harness.cost.roofline import Rates
from harness.formats import BF16, FP8_E4M3, FP16
from harness.spec import AttentionSpec, Shape

KIB, GIB, GB, MS = 2**10, 2**30, 10**9, 1e-3
K = 1024  # of tokens
SEVEN = {"layers": 32, "kv_width": 4096, "value_bytes": BF16.bytes}  # basics, 5.3
FOUR = {"layers": 48, "kv_width": 5120, "value_bytes": FP8_E4M3.bytes}  # basics, exercise 4
GROUPED = {**FOUR, "kv_width": 640}
WEIGHTS = 13  # basics, 5.3 and 6: "about 13 GB" of a 7B model in BF16
AT_2_TB = Rates(bandwidth=2e12)  # basics, 6


def attention_beside_one_product(length: int, width: int) -> float:
    """As the note compares them: see `test_the_notes_8ld2_is_one_of_the_two_products_of_an_ffn`."""
    return attention_over_ffn(length, width, products=1)


def share(ratio: float) -> float:
    """Of attention in attention and FFN."""
    return ratio / (1 + ratio)


NUMBERS = [
    ("basics 4.2: parity at L = 8192 for d = 4096", parity_length(4096, products=1), "8192", "d"),
    ("basics 4.2: the same ratio is 1", attention_beside_one_product(8192, 4096), "1.0", ".1f"),
    ("basics 4.2: 4 times at 32K", attention_beside_one_product(32 * K, 4096), "4", ".0f"),
    ("basics 5.2: BF16 takes 2 bytes", BF16.bytes, "2", "d"),
    ("basics 5.3: bytes a token", kv_bytes(1, **SEVEN), "524,288", ",d"),
    ("basics 5.3: 512 KB a token, which are KiB", kv_bytes(1, **SEVEN) / KIB, "512", ".0f"),
    ("basics 5.3: 4K", kv_bytes(4 * K, **SEVEN) / GIB, "2", ".0f"),
    ("basics 5.3: 32K", kv_bytes(32 * K, **SEVEN) / GIB, "16", ".0f"),
    ("basics 5.3: 128K", kv_bytes(128 * K, **SEVEN) / GIB, "64", ".0f"),
    ("basics 5.3: 4K ÷ weights of 13 GiB", kv_bytes(4 * K, **SEVEN) / (WEIGHTS * GIB), "15%", ".0%"),
    ("basics 5.3: 32K ÷ weights of 13 GiB", kv_bytes(32 * K, **SEVEN) / (WEIGHTS * GIB), "1.2", ".1f"),
    ("basics 5.3: 128K ÷ weights of 13 GiB", kv_bytes(128 * K, **SEVEN) / (WEIGHTS * GIB), "5", ".0f"),
    ("basics 6: read a step at 4K", kv_bytes(4096, **SEVEN) / GIB, "2", ".0f"),
    ("basics 6: that at 2 TB/s, ms", AT_2_TB.memory_s(kv_bytes(4096, **SEVEN)) / MS, "1", ".0f"),
    ("basics 6: weights of 13 GB at 2 TB/s, ms", AT_2_TB.memory_s(WEIGHTS * GB) / MS, "6.5", ".1f"),
    ("basics 6: read a step at 32K", kv_bytes(32 * K, **SEVEN) / GIB, "16", ".0f"),
    ("basics 7.1: FP16's largest", FP16.max, "65504", ".0f"),
    ("basics 7.1: exp overflows FP16 at about", math.log(FP16.max), "11", ".0f"),
    ("basics 7.2: BF16's significand, with the hidden bit", BF16.precision, "8", "d"),
    ("exercise 3: L* for d = 8192", parity_length(8192, products=1), "16384", "d"),
    ("exercise 3: 64K", attention_beside_one_product(64 * K, 8192), "4", ".0f"),
    ("exercise 3: its share at 64K", share(attention_beside_one_product(65536, 8192)), "80%", ".0%"),
    ("exercise 4: bytes a token", kv_bytes(1, **FOUR), "491,520", ",d"),
    ("exercise 4: 480 KB a token, which are KiB", kv_bytes(1, **FOUR) / KIB, "480", ".0f"),
    ("exercise 4: 128K tokens", 128 * K, "131072", "d"),
    ("exercise 4: at 128K, GiB", kv_bytes(128 * K, **FOUR) / GIB, "60", ".0f"),
    ("exercise 4: bytes a token with GQA", kv_bytes(1, **GROUPED), "61,440", ",d"),
    ("exercise 4: 60 KB a token, which are KiB", kv_bytes(1, **GROUPED) / KIB, "60", ".0f"),
    ("exercise 4: at 128K with GQA, GiB", kv_bytes(128 * K, **GROUPED) / GIB, "7.5", ".1f"),
    ("exercise 4: an eighth", kv_bytes(1, **GROUPED) / kv_bytes(1, **FOUR), "0.125", ".3f"),
    ("exercise 5: 4K, 2 GB that are GiB", kv_bytes(4 * K, **SEVEN) / GIB, "2", ".0f"),
    ("exercise 5: 32K, 16 GB that are GiB", kv_bytes(32 * K, **SEVEN) / GIB, "16", ".0f"),
    ("exercise 6: L twice as large", full_attention_flops(512, 64) / full_attention_flops(256, 64), "4", ".0f"),
]  # fmt: skip


@pytest.mark.parametrize(("ours", "printed", "digits"), [n[1:] for n in NUMBERS], ids=[n[0] for n in NUMBERS])
def test_number_comes_out_as_the_note_prints_it(ours: float, printed: str, digits: str) -> None:
    assert format(ours, digits) == printed


# --- formulas -----------------------------------------------------------------------------------------------

SIZES = [
    (1, 1, 1, 64, 1, 1, 64),
    (2, 7, 11, 96, 6, 2, 16),
    (3, 128, 128, 512, 8, 8, 64),
]  # B, T, S, D, N, K, H


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_table_of_projections_is_that_of_the_shapes_note(sizes: tuple[int, ...]) -> None:
    b, t, _, d, n, k, h = sizes
    made = projections(b, t, d, n, k, h)
    assert {x: p.flops for x, p in made.items()} == {
        "q": 2 * b * t * d * n * h,
        "k": 2 * b * t * d * k * h,
        "v": 2 * b * t * d * k * h,
        "o": 2 * b * t * d * n * h,
    }
    assert {x: p.params for x, p in made.items()} == {
        "q": d * n * h,
        "k": d * k * h,
        "v": d * k * h,
        "o": d * n * h,
    }
    assert [made[x].output for x in "qkvo"] == [(b, t, n, h), (b, t, k, h), (b, t, k, h), (b, t, d)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_table_of_scores_is_that_of_the_shapes_note(sizes: tuple[int, ...]) -> None:
    b, t, s, _, n, k, h = sizes
    made = score_products(b, t, s, n, h)
    assert made["scores"].flops == made["values"].flops == 2 * b * t * s * n * h
    assert made["scores"].output == (b, t, s, n)
    assert made["values"].output == (b, t, n, h)
    call = Shape(b, n, t, h, kv_heads=k, kv_len=s)
    assert sum(p.flops for p in made.values()) == attention_flops(call, AttentionSpec())


def test_q_has_n_heads_where_the_shapes_note_writes_d() -> None:
    """[B, T, D, H] holds D/N times as many values as the product has: it would take as many more FLOPs to make."""
    q = projections(2, 5, 96, 6, 2, 16)["q"]
    assert q.flops == 2 * 96 * math.prod(q.output)
    assert q.flops != 2 * 96 * math.prod((2, 5, 96, 16))


@pytest.mark.parametrize("heads", [1, 2, 8, 64])
def test_attention_takes_4_l_squared_d_whatever_the_heads(heads: int) -> None:
    products = score_products(1, 384, 384, heads, 512 // heads)
    assert sum(p.flops for p in products.values()) == full_attention_flops(384, 512) == 4 * 384**2 * 512


@pytest.mark.parametrize("length", [1, 2, 256, 4096])
def test_causal_half_keeps_half_of_the_diagonal(length: int) -> None:
    """Basics 5.1 says "about half": (1 + 1/L)/2 of the full square."""
    causal = attention_flops(Shape(heads=8, q_len=length), AttentionSpec(causal=True))
    assert causal == causal_attention_flops(length, 8 * 64)
    assert causal / full_attention_flops(length, 8 * 64) == (1 + 1 / length) / 2


# --- where the text is not exact ----------------------------------------------------------------------------


def test_the_notes_8ld2_is_one_of_the_two_products_of_an_ffn() -> None:
    """Basics 4.2 has two products of 2·d·4d = 8d² FLOPs a token, and writes 8Ld² for both. Both are 16Ld², beside 4L²d
    of both products of attention: parity is at 4d, not at 2d, and 32K tokens at d = 4096 make it 2, not 4."""
    length, d = 32 * K, 4096
    up, down = 2 * length * d * 4 * d, 2 * length * 4 * d * d
    assert up == down == 8 * length * d**2 == ffn_flops(length, d, 4 * d, matrices=1)
    assert ffn_flops(length, d, 4 * d) == up + down
    assert attention_over_ffn(length, d, products=1) == length / (2 * d) == 4
    assert attention_over_ffn(length, d) == length / (4 * d) == 2
    assert parity_length(d) == get_model("plain-7b").parity == 16384
    ratio = attention_over_ffn(65536, 8192)  # exercise 3: a share of 2/3, not of 80 %
    assert (ratio, f"{share(ratio):.0%}") == (2, "67%")


def test_a_causal_prefill_puts_parity_twice_as_far() -> None:
    """The note's criterion speaks of prefill, which is causal: half of 4L²d is left."""
    model, tokens = get_model("plain-7b"), 32768
    work = prefill(model, kv_storage("bf16"), BF16, tokens)
    assert work.flops["attention"] / work.flops["ffn"] == tokens / (8 * model.width) * (1 + 1 / tokens)


def test_kb_of_the_notes_are_kib_and_their_gb_are_two_units() -> None:
    """13 GB of weights give the printed 15 %, 1.2 and 5 times as GiB, and the printed 6.5 ms as 10⁹ bytes."""
    four, ratio = kv_bytes(4 * K, **SEVEN), kv_bytes(128 * K, **SEVEN) / WEIGHTS
    assert format(four / (WEIGHTS * GB), ".0%") == "17%"
    assert (format(ratio / GIB, ".1f"), format(ratio / GB, ".1f")) == ("4.9", "5.3")
    assert format(AT_2_TB.memory_s(WEIGHTS * GIB) / MS, ".1f") == "7.0"
    assert format(kv_bytes(1, **SEVEN) / 1000, ".0f") == "524"


def test_plain_7b_weighs_what_the_note_says_to_the_gigabyte() -> None:
    model = get_model("plain-7b")
    step = decode_step(model, kv_storage("bf16"), BF16, 4096)
    assert format(model.params * BF16.bytes / GB, ".0f") == "13"
    assert format(step.weights / GIB, ".0f") == "12"
    assert (step.kv_read, step.kv_read // 4096) == (kv_bytes(4096, **SEVEN), kv_bytes(1, **SEVEN))


def test_kv_outweighs_the_weights_at_32k_and_is_then_most_of_what_a_step_moves() -> None:
    """Basics 6: the bandwidth goes to K and V instead of the weights."""
    kv, model = kv_storage("bf16"), get_model("plain-7b")
    short, long = (decode_step(model, kv, BF16, tokens) for tokens in (4 * K, 32 * K))
    assert short.kv_read < short.weights < long.kv_read
    assert long.kv_read > long.moved / 2


def test_exercise_4_holds_for_a_whole_model_and_its_scales_add_what_they_weigh() -> None:
    model = Model("exercise 4", 5120, 48, 40, 4 * 5120, ffn_matrices=2)
    grouped = Model("exercise 4, GQA", 5120, 48, 40, 4 * 5120, kv_heads=5, ffn_matrices=2)
    assert (model.kv_width, grouped.kv_width) == (5120, 640)
    bare, scaled = (decode_step(model, kv_storage(name), BF16, 128 * K) for name in ("fp8_e5m2", "fp8_e4m3"))
    assert bare.kv_cache == 60 * GIB
    assert scaled.kv_cache == 60 * GIB + 48 * 2 * 40 * 4  # an FP32 scale a head of K and of V
    assert decode_step(grouped, kv_storage("fp8_e5m2"), BF16, 128 * K).kv_cache == 7.5 * GIB


def test_a_step_that_leaves_its_own_key_out_loses_the_diagonal() -> None:
    """Basics 5.2 lists k_1 … k_{t−1} for step t. Its own k_t belongs to it: all steps together are then the causal form
    in training, and the first of them has a key to attend to."""
    length = 64
    steps = [Shape(heads=2, q_len=1, kv_len=t) for t in range(1, length + 1)]
    whole = attention_flops(Shape(heads=2, q_len=length), AttentionSpec(causal=True))
    assert sum(attention_flops(s, AttentionSpec(causal=True)) for s in steps) == whole
    short = [Shape(heads=2, q_len=1, kv_len=t) for t in range(length)]
    assert whole - sum(attention_flops(s, AttentionSpec(causal=True)) for s in short) == 4 * 2 * 64 * length


def test_a_cache_saves_far_more_than_the_half_of_a_heading() -> None:
    """The heading of basics 5.2 says half. Without a cache step t is a prefill of t tokens: (L + 2)/3 times as many
    attention FLOPs, and (L + 1)/2 times as many of everything else."""
    model, kv, length = get_model("smollm2-135m"), kv_storage("bf16"), 256
    cached = [decode_step(model, kv, BF16, t) for t in range(1, length + 1)]
    again = [prefill(model, kv, BF16, t) for t in range(1, length + 1)]

    def ratio(part: str) -> float:
        return sum(w.flops[part] for w in again) / sum(w.flops[part] for w in cached)

    assert ratio("attention") == (length + 2) / 3
    assert ratio("projections") == ratio("ffn") == (length + 1) / 2
    assert ratio("head") == 1


def test_attention_of_a_step_is_linear_in_the_context_and_of_a_prefill_quadratic() -> None:
    """The table of basics 6: 1 × L against L × L."""
    model, kv = get_model("llama-3.1-8b"), kv_storage("bf16")
    step, twice = (decode_step(model, kv, BF16, n) for n in (4096, 8192))
    assert twice.flops["attention"] == 2 * step.flops["attention"]
    whole, long = (prefill(model, kv, BF16, n) for n in (4096, 8192))
    assert long.flops["attention"] / whole.flops["attention"] == 4 * (1 - 1 / (2 * 4097))
    assert long.flops["ffn"] == 2 * whole.flops["ffn"]


# --- the worked example -------------------------------------------------------------------------------------


def printed(x: torch.Tensor) -> list[str]:
    return [f"{v:.3f}" for v in x.flatten().tolist()]


def test_worked_example_comes_out_as_printed_step_by_step() -> None:
    """Basics 8 and exercise 2. V = identity reads the weights; the sum of exponentials is exp(lse − max)."""
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)[None, None]
    k = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)[None, None]
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)[None, None]
    truth = harness.reference(q, k, v)
    weights = harness.reference(q, k, torch.eye(3, dtype=torch.float64)[None, None]).out
    sums = (truth.lse - truth.row_max).exp()
    assert printed(truth.row_max[0, 0, [0, 2]]) == ["0.707", "1.414"]
    assert printed(sums[0, 0, [0, 2]]) == ["2.493", "1.986"]
    assert printed(weights[0, 0, 0]) == ["0.401", "0.198", "0.401"]
    assert printed(weights[0, 0, 2]) == ["0.503", "0.248", "0.248"]  # 0.50349; the note's 0.504 is 1 ÷ 1.986
    assert f"{1 / 1.986:.3f}" == "0.504"
    assert printed((weights * sums[..., None])[0, 0, 2]) == ["1.000", "0.493", "0.493"]
    assert printed(truth.out) == ["0.802", "0.599", "0.599", "0.599", "0.752", "0.497"]
