"""Quality: the shipped text is what it says, distances of distributions are right, and precisions come in order."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_capture import tiny
from torch.nn.functional import cross_entropy, kl_div

from harness import AttentionSpec, Recipe, get, get_recipe
from harness.capture import SmolLM2
from harness.case import cases_folder
from harness.evidence import Quality
from harness.quality import LENGTHS, Text, _compare, passes, qualities, shipped_text

DATA = cases_folder() / "data"
LONG = (DATA / "long-text.txt").read_text(encoding="utf-8")
WORDS = Text("bytes", tuple((7 * i * i + 3 * i) % 256 for i in range(40)))
NAMES = ("fp64", "fp32", "fp16", "bf16", "fp8_e4m3")


# ---- the text ---------------------------------------------------------------------------------------------------


def test_shipped_ids_are_enough_and_of_the_shipped_text() -> None:
    facts = json.loads((DATA / "long-text-ids.json").read_text(encoding="utf-8"))
    assert facts["text_sha256"] == hashlib.sha256(LONG.encode()).hexdigest()
    assert LONG.startswith((DATA / "text.txt").read_text(encoding="utf-8"))
    assert len(shipped_text().ids) == max(LENGTHS)


@pytest.mark.capture
def test_the_models_own_tokenizer_gives_the_shipped_ids(smollm2: SmolLM2) -> None:
    assert smollm2.tokenize(LONG)[: max(LENGTHS)] == list(shipped_text().ids)


def test_a_texts_hash_is_of_the_tokens_that_were_read() -> None:
    assert WORDS.hash(3) == hashlib.sha256(b"0,10,34").hexdigest()
    assert WORDS.hash(3) != WORDS.hash(4)


# ---- the distances ----------------------------------------------------------------------------------------------


def test_kl_of_two_known_distributions() -> None:
    even, odd = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log()
    kl, same, surprise = _compare(torch.stack([even, odd]), torch.stack([odd, odd]), [0, 1])
    # The logits are FP32: ln ½ and ln ¼ err by 2^-25 of at most 1.4.
    assert kl.tolist() == pytest.approx(
        [0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), 0.0], abs=1e-7
    )
    assert same.tolist() == [True, True]
    assert surprise.flatten().tolist() == pytest.approx([math.log(2), math.log(4)], abs=1e-7)


def test_a_position_that_is_not_finite_counts_as_lost() -> None:
    fine = torch.zeros(3, 4)
    broken = fine.clone()
    broken[1, 2] = math.nan
    kl, same, surprise = _compare(fine, broken, [0, 0, 0])
    assert kl.tolist() == [0.0, math.inf, 0.0]
    assert same.tolist() == [True, False, True]
    assert surprise[1].tolist() == [pytest.approx(math.log(4), rel=1e-15), math.inf]


@pytest.fixture(scope="module")
def told() -> tuple[list[Quality], list[str]]:
    places: list[str] = []
    found = qualities(tiny(0.5), WORDS, map(get_recipe, NAMES), "naive_masked", (16, 40), places.append)
    return list(found), places


def test_precisions_come_in_order(told: tuple[list[Quality], list[str]]) -> None:
    for tokens in (16, 40):
        kl = [q.kl_mean for q in told[0] if q.tokens == tokens]
        assert kl == sorted(kl)
        assert kl[0] < 1e-12 < kl[2]
        assert kl[-1] > 1e-6
        assert all(q.kl_mean <= q.kl_max and q.kl_p99 <= q.kl_max for q in told[0])
        assert [q.recipe for q in told[0] if q.tokens == tokens] == list(NAMES)


def test_every_layer_of_every_pass_is_told(told: tuple[list[Quality], list[str]]) -> None:
    assert len(told[1]) == passes(len(NAMES), (16, 40), 2)
    assert told[1][:3] == [
        "reference, 16 tokens, layer 1",
        "reference, 16 tokens, layer 2",
        "fp64, 16 tokens, layer 1",
    ]


def test_figures_are_those_of_torch(told: tuple[list[Quality], list[str]]) -> None:
    """KL and perplexity by torch's own losses, on logits whose attention is torch's in FP64 or the recipe's."""
    model, ids, spec = tiny(0.5), torch.tensor(WORDS.ids), AttentionSpec(causal=True)

    def exact(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x[None].double() for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]

    def rounded(q: Any, k: Any, v: Any) -> Any:
        return (
            get("naive_masked")
            .run(q[None], k[None], v[None], spec, recipe="bf16", quantize=True)
            .out[0]
            .float()
        )

    p, q = (model.forward(WORDS.ids, attend=a)[0].double().log_softmax(-1) for a in (exact, rounded))
    found = next(f for f in told[0] if (f.recipe, f.tokens) == ("bf16", 40))
    # The reference's FP64 attention and torch's may round to other FP32 numbers: 2^-24 of logits of size 10.
    assert found.kl_mean == pytest.approx(
        float(kl_div(q, p, reduction="batchmean", log_target=True)), rel=1e-3
    )
    assert found.perplexity == pytest.approx(float(cross_entropy(q[:-1], ids[1:]).exp()), rel=1e-4)
    assert found.reference_perplexity == pytest.approx(float(cross_entropy(p[:-1], ids[1:]).exp()), rel=1e-4)
    assert found.top1_agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    # The standard error is what drawing the text's tokens again, with their places, makes of the change.
    apart = -(q - p)[:-1].gather(1, ids[1:, None])[:, 0]
    draws = torch.randint(len(apart), (20_000, len(apart)), generator=torch.Generator().manual_seed(0))
    again = apart[draws].mean(1).exp()
    assert found.change_se is not None
    expected = float(again.std()) * (len(apart) / (len(apart) - 1)) ** 0.5
    assert found.change_se == pytest.approx(
        expected, rel=6 / (2 * 20_000) ** 0.5
    )  # six standard errors of a std


def test_scores_that_overflow_lose_every_position_that_reads_them() -> None:
    loud = tiny(0.5)
    weights = {n: 300 * w if "attn_q" in n else w for n, w in loud.weights.items()}
    recipe = Recipe("over", at={"exp": "fp16"})
    (found,) = qualities(replace(loud, weights=weights), WORDS, [recipe], "naive_unsafe", (40,))
    assert found.kl_max == found.kl_mean == found.perplexity == math.inf
    assert found.top1_agreement < 1
    assert math.isfinite(found.reference_perplexity)


@pytest.mark.parametrize("tokens", [0, 1, 41])
def test_a_length_the_text_does_not_have_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"tokens is {tokens}; allowed: 2 to 40"):
        next(qualities(tiny(), WORDS, [get_recipe("bf16")], lengths=(tokens,)))


@pytest.mark.capture
def test_the_real_model_loses_more_the_coarser_its_attention(smollm2: SmolLM2) -> None:
    names = ("fp32", "bf16", "fp8_e4m3")
    found = list(qualities(smollm2, shipped_text(), map(get_recipe, names), lengths=(48,)))
    fp32, bf16, fp8 = (q.kl_mean for q in found)
    # Logits of size 30 in FP32 differ by some 1e-5, and KL is half their variance.
    assert fp32 < 1e-9 < bf16 < fp8
    assert found[1].top1_agreement > 0.9
