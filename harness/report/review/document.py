"""Records and evidence → the whole review, section by section, in the order a reader needs them."""

from __future__ import annotations

import math

from harness.report import words
from harness.report.review import accuracy, closing, costs, figures, growth, origin, ranges
from harness.report.review.blocks import (
    Block,
    Bullets,
    Card,
    Cards,
    Document,
    Paragraph,
    Section,
    Value,
    table,
)
from harness.report.review.material import Material
from harness.report.review.rule import RULE, Recommendation, recommend


def document(m: Material) -> Document:
    """Everything that is said. Figures are drawn when a renderer asks for them."""
    others = [r for r in m.asked.recipes if r != m.baseline]
    listed = " and ".join(filter(None, (", ".join(others[:-1]), others[-1]))) if others else ""
    title = f"Review: {listed} against {m.baseline}" if others else f"Review: {m.baseline}"
    question = (
        f"Can attention run in {listed} where it runs in {m.baseline} today: how much accuracy does it cost, on real"
        " activations and at the limits, where does the error arise, and what is gained?"
        if others
        else f"How accurate is attention in {m.baseline}, on real activations and at the limits, and what does it cost?"
    )
    made = max((r.created for r in m.records), default="")
    commits = ", ".join(dict.fromkeys(r.machine.commit or "unknown" for r in m.records))
    facts = (
        ("baseline", m.baseline),
        ("cases", f"{len(m.real)} real, {len(m.hard)} hard"),
        ("implementations", str(len(m.implementations))),
        ("measured", made.partition("T")[0]),
        ("commit", commits),
    )
    sections = (
        _summary(m), accuracy.real(m), accuracy.hard(m), growth.length(m), growth.amplitude(m), ranges.ledger(m),
        origin.attribution(m), origin.quality(m), costs.cost(m), closing.worst(m), closing.provenance(m),
        closing.limits(m), closing.sign_off(),
    )  # fmt: skip
    return Document(title, question, facts, sections)


def _summary(m: Material) -> Section:
    cards = tuple(_card(m, recommend(m, recipe)) for recipe in m.asked.recipes)
    rule: tuple[Block, ...] = (Paragraph("How a recommendation is made, in this order:"), Bullets(RULE))
    rows: list[list[Value | str]] = [
        [
            recipe, figures.pooled(m.total(m.real, recipe)), figures.ratio(m.times_baseline(recipe)),
            figures.pooled(m.total(m.hard, recipe)), figures.size(m.kv_bytes(recipe)), figures.time(m.decode_s(recipe)),
        ]
        for recipe in m.asked.recipes
    ]  # fmt: skip
    headers = (
        "recipe",
        "total rel_l2, real",
        "÷ baseline",
        "total rel_l2, hard",
        "KV a token",
        "decode step",
    )
    shown = table("Summary by recipe", headers, rows, right=range(1, 6))
    return Section("summary", "Summary and recommendation", (Cards(cards), shown, *rule))


def _card(m: Material, r: Recommendation) -> Card:
    recipe = r.recipe
    total, times = m.total(m.real, recipe), m.times_baseline(recipe)
    size, base = m.kv_bytes(recipe), m.kv_bytes(m.baseline)
    seconds, base_seconds = m.decode_s(recipe), m.decode_s(m.baseline)
    compared = recipe != m.baseline
    shown = [("error on real activations", words.pooled(total))]
    if compared and not math.isnan(times):
        shown.append(("that, ÷ the baseline's", f"×{times:.3g}"))
    if compared and size > 0 and base > 0:
        shown.append(("KV cache, modelled", figures.signed_share(size / base - 1, 0).text))
    if compared and seconds and base_seconds:
        shown.append(("decode step, modelled", figures.signed_share(seconds / base_seconds - 1, 0).text))
    shown += [(f"perplexity, {q.tokens} tokens", figures.change(q).text) for q in m.quality(recipe)]
    role = "baseline" if not compared else "candidate"
    return Card(recipe, r.verdict.words, r.verdict.value, role, tuple(shown), r.reasons)
