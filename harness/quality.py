"""What a precision does to a model's words: SmolLM2 with the attention of all layers in a recipe, against FP64's.

Everything but attention is the same FP32 computation in both, so that what differs comes of attention: its stored q, k
and v, its arithmetic and its output. With P the reference's next-token distribution and Q the recipe's, at each of the
text's positions: KL(P‖Q) = Σ P (ln P − ln Q), in FP64 from FP32 logits. Over n FP32 logits that differ by δ it is about
the variance of δ over P, halved: FP32 attention, δ ~ 1e-5, shows 1e-10.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness import registry
from harness.capture import Attend, SmolLM2
from harness.case import cases_folder
from harness.evidence import Quality
from harness.machine import machine
from harness.recipe import Recipe
from harness.spec import AttentionSpec
from harness.truth import reference

LENGTHS = (512, 2048)
CAUSAL = AttentionSpec(causal=True)
_ROWS = 128  # positions whose distributions are held at once in FP64: 50 MB each at SmolLM2's 49,152 tokens


@dataclass(frozen=True)
class Text:
    """A text by its token ids."""

    title: str
    ids: tuple[int, ...]

    def hash(self, tokens: int) -> str:
        """SHA-256 of the first ids, in decimal with commas."""
        return hashlib.sha256(",".join(map(str, self.ids[:tokens])).encode()).hexdigest()


def shipped_text() -> Text:
    """The text that is shipped with the cases, by its ids. Raises ValueError for a file that holds no such text."""
    path = cases_folder() / "data" / "long-text-ids.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return Text(str(facts["title"]), tuple(int(i) for i in facts["ids"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no token ids: {error}; restore it from the source") from None


def qualities(
    model: SmolLM2, text: Text, recipes: Iterable[Recipe], implementation: str = "online_softmax",
    lengths: Sequence[int] = LENGTHS, told: Callable[[str], None] = lambda _: None,
) -> Iterator[Quality]:  # fmt: skip
    """One Quality for each length and recipe. `told` hears of each layer done.

    A position whose distribution is not finite counts as a KL of +Inf and a token that differs; perplexity is +Inf
    then. Raises ValueError for a length below 2 or beyond the text, and what the implementation refuses.
    """
    found = registry.get(implementation)
    recipes = list(recipes)
    if wrong := [n for n in lengths if not 2 <= n <= len(text.ids)]:
        raise ValueError(f"tokens is {wrong[0]}; allowed: 2 to {len(text.ids)}, which the text has")

    def in_fp64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference(q[None], k[None], v[None], CAUSAL).out[0]

    def under(recipe: Recipe) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = found.run(q[None], k[None], v[None], CAUSAL, recipe=recipe, quantize=True).out
            return out[0].float()

        return attend

    for tokens in lengths:
        ids = text.ids[:tokens]
        expected = _logits(model, ids, in_fp64, told, f"reference, {tokens} tokens")
        for recipe in recipes:
            got = _logits(model, ids, under(recipe), told, f"{recipe.name}, {tokens} tokens")
            kl, same, surprise = _compare(expected, got, ids)
            yield Quality(
                model.name, text.title, text.hash(tokens), tokens, implementation, recipe.name, recipe.digest,
                float(kl.mean()), float(kl.sort().values[math.ceil(0.99 * len(kl)) - 1]), float(kl.max()),
                float(same.double().mean()), float(surprise[1].mean().exp()), float(surprise[0].mean().exp()),
                machine("cpu"), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                _change_se(surprise[0], surprise[1]),
            )  # fmt: skip


def _change_se(reference: Tensor, own: Tensor) -> float:
    """Standard error of exp(mean(own − reference)) − 1, token by token: both saw the same text. NaN for one token."""
    apart = own - reference
    if len(apart) < 2:
        return math.nan
    return float(apart.mean().exp() * apart.std() / math.sqrt(len(apart)))


def passes(recipes: int, lengths: Sequence[int], layers: int) -> int:
    """How often `told` is called."""
    return (recipes + 1) * len(lengths) * layers


def _logits(
    model: SmolLM2, ids: Sequence[int], attend: Attend, told: Callable[[str], None], name: str
) -> Tensor:
    layer = 0

    def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal layer
        out = attend(q, k, v)
        layer += 1
        told(f"{name}, layer {layer}")
        return out

    return model.forward(ids, attend=counted)[0]


def _compare(expected: Tensor, got: Tensor, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """KL and whether the likeliest token is the same, `[L]`, and −ln of the next token by both, `[2, L − 1]`."""
    follows = torch.tensor([*ids[1:], 0])
    kl, same, surprise = [], [], []
    for start in range(0, len(expected), _ROWS):
        rows = slice(start, start + _ROWS)
        p, q = (x[rows].double().log_softmax(-1) for x in (expected, got))
        broken = ~torch.isfinite(got[rows]).all(-1)
        kl.append(((p - q) * p.exp()).sum(-1).masked_fill(broken, math.inf))
        same.append((p.argmax(-1) == q.argmax(-1)) & ~broken)
        next_ = follows[rows, None]
        surprise.append(
            torch.stack(
                [-p.gather(1, next_)[:, 0], (-q.gather(1, next_)[:, 0]).masked_fill(broken, math.inf)]
            )
        )
    return torch.cat(kl), torch.cat(same), torch.cat(surprise, 1)[:, :-1]
