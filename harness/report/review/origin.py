"""Sections from evidence: where a recipe's error arises, and what it does to a model's words."""

from __future__ import annotations

import math

from harness.evidence import Attribution, Quality
from harness.report import words
from harness.report.review import charts, figures
from harness.report.review.blocks import Block, Bullets, Chart, Commands, Paragraph, Section, Value, table
from harness.report.review.material import Material


def _missing(m: Material, what: str, recipes: list[str], more: str = "") -> tuple[Block, ...]:
    line = words.command_line(
        ["python", "-m", "harness", "evidence", "--recipes", ",".join(map(words.clean, recipes)), "--out"]
    )
    told = f"{what} was not measured for {', '.join(recipes)}{more}. This measures it; give its file as --evidence:"
    return (Commands(told, (f"{line} evidence.jsonl",)),)


def attribution(m: Material) -> Section:
    title = "Where the error arises"
    missing = [r for r in m.asked.recipes if all(a.recipe != r for a in m.attributions)]
    blocks: list[Block] = []
    if m.attributions:
        told = (
            "alone: the squared error of one rounding, all others exact, ÷ the recipe's. without: the part of the"
            " recipe's squared error that goes when this rounding alone is exact. The bars show, for each recipe, the"
            " case with the largest error."
        )
        shown = largest(m)
        rows = [row for a in m.attributions for row in _stages(a)]
        headers = ("case", "recipe", "stage", "format", "alone rel_l2", "alone", "without rel_l2", "without")
        detail = table("Attribution by stage", headers, rows, right=(4, 5, 6, 7))
        blocks.append(Chart("attribution", title, told, lambda: charts.attribution(shown), detail))
        blocks.append(_whole(m))
        said = dict.fromkeys(f"{a.recipe} on {a.case}: {a.statement}" for a in m.attributions)
        blocks.append(Bullets(tuple(said)))
    if missing:
        blocks += _missing(m, "The share of each stage", missing)
    return Section("attribution", title, tuple(blocks))


def largest(m: Material) -> tuple[Attribution, ...]:
    """For each recipe the one with the largest error."""
    found: dict[str, Attribution] = {}
    for a in m.attributions:
        held = found.get(a.recipe)
        if held is None or a.rel_l2 > held.rel_l2:
            found[a.recipe] = a
    return tuple(found[r] for r in m.asked.recipes if r in found)


def _stages(a: Attribution) -> list[list[Value | str]]:
    return [
        [
            a.case, a.recipe, s.stage, s.format, figures.error(s.alone_rel_l2), figures.share(s.alone_share),
            figures.error(s.without_rel_l2), figures.share(s.without_share),
        ]
        for s in a.stages
    ]  # fmt: skip


def _whole(m: Material) -> Block:
    """Each attribution in a line, and what one stage in higher precision buys."""
    rows: list[list[Value | str]] = []
    for a in m.attributions:
        left = a.best_rel_l2 / a.rel_l2 if a.rel_l2 > 0 else math.nan
        rows.append(
            [
                a.case, a.implementation, a.recipe, figures.error(a.rel_l2), figures.error(a.left_rel_l2),
                figures.share(a.sum_of_shares), "yes" if a.additive else Value("no", None, "fair"), a.best,
                figures.error(a.best_rel_l2), figures.share(1 - left), Value(str(a.seeds), a.seeds),
            ]
        )  # fmt: skip
    headers = (
        "case", "implementation", "recipe", "rel_l2", "all exact", "sum of shares", "adds up", "best to widen",
        "rel_l2 then", "less", "seeds",
    )  # fmt: skip
    return table("What if one stage had higher precision", headers, rows, right=(3, 4, 5, 8, 9, 10))


def quality(m: Material) -> Section:
    title = "What a model says"
    missing = [r for r in m.asked.recipes if not m.quality(r)]
    blocks: list[Block] = []
    if m.qualities:
        told = (
            "The same model and text with attention in each recipe, against the model with FP64 attention. KL: of the"
            " next-token distributions, in nats. Top-1: positions with the same likeliest token."
        )
        headers = (
            "model", "text", "tokens", "recipe", "perplexity", "change", "top-1", "KL mean", "KL 99 %", "KL max",
        )  # fmt: skip
        rows = [_quality(q) for q in m.qualities]
        blocks += [
            Paragraph(told),
            table("Quality of a model, by recipe", headers, rows, right=(2, *range(4, 10))),
        ]
    if missing:
        more = " (needs the extra capture)"
        blocks += _missing(m, "The quality of a model", missing, more)
    return Section("quality", title, tuple(blocks))


def _quality(q: Quality) -> list[Value | str]:
    return [
        q.model, q.text, Value(str(q.tokens), q.tokens), q.recipe,
        Value(f"{q.perplexity:.4g}", None if math.isnan(q.perplexity) else q.perplexity),
        figures.signed_share(q.perplexity_change), figures.share(q.top1_agreement, 2),
        *(figures.error(x) for x in (q.kl_mean, q.kl_p99, q.kl_max)),
    ]  # fmt: skip
