"""Sections from evidence: where a recipe's error arises, and what it does to a model's words."""

from __future__ import annotations

import math

from harness.evidence import Attribution, Quality, StageShare
from harness.report import words
from harness.report.review import charts, figures
from harness.report.review.blocks import Block, Bullets, Chart, Commands, Paragraph, Section, Value, table
from harness.report.review.material import Material

LEAST = 1e-3  # a share below it shares a row with others
BARS = 6


def _missing(what: str, recipes: list[str], *options: str) -> tuple[Block, ...]:
    named = ",".join(map(words.clean, recipes))
    line = [
        "python",
        "-m",
        "harness",
        "evidence",
        "--recipes",
        named,
        *options,
        "--keep",
        "--out",
        "evidence.jsonl",
    ]
    told = f"{what} was not measured for {', '.join(recipes)}. This measures it; give its file as --evidence:"
    return (Commands(told, (words.command_line(line),)),)


def attribution(m: Material) -> Section:
    title = "Where the error arises"
    missing = [r for r in m.asked.recipes if all(a.recipe != r for a in m.attributions)]
    blocks: list[Block] = []
    if m.attributions:
        told = (
            "alone: the squared error of one rounding, all others exact, ÷ the recipe's. without: the part of the"
            " recipe's squared error that goes when this rounding alone is exact. The bars show, for each recipe, its"
            f" largest stages on the real case with the largest error. Stages below {LEAST:.1%} share a row of the"
            " table."
        )
        shown = [(a, _leading(a)) for a in largest(m)]
        rows = [row for a in m.attributions for row in _stages(a)]
        headers = ("case", "recipe", "stage", "format", "alone rel_l2", "alone", "without rel_l2", "without")
        detail = table("Attribution by stage", headers, rows, right=(4, 5, 6, 7))
        blocks.append(Chart("attribution", title, told, lambda: charts.attribution(shown), detail))
        said = tuple(
            f"{a.recipe} on {a.case}, {a.implementation}, {words.many(a.seeds, 'seed')}: {a.statement}"
            for a in m.attributions
        )
        blocks += [_whole(m), Bullets(said, "Whether the shares add up, of each")]
    if missing:
        blocks += _missing("The share of each stage", missing)
    return Section("attribution", title, tuple(blocks))


def _leading(a: Attribution) -> tuple[StageShare, ...]:
    """Its largest stages, in the order numbers meet them."""
    ranked = sorted(a.stages, key=lambda s: -_size(s))[:BARS]
    kept = [s for s in ranked if _size(s) >= 10 * LEAST] or ranked[:1]
    return tuple(s for s in a.stages if s in kept)


def _size(s: StageShare) -> float:
    return max((abs(x) for x in (s.alone_share, s.without_share) if not math.isnan(x)), default=math.inf)


def largest(m: Material) -> tuple[Attribution, ...]:
    """For each recipe the one with the largest error, of real activations where there are any."""
    found: dict[str, Attribution] = {}
    for a in [a for a in m.attributions if m.is_real(a.case)] or m.attributions:
        held = found.get(a.recipe)
        if held is None or a.rel_l2 > held.rel_l2:
            found[a.recipe] = a
    return tuple(found[r] for r in m.asked.recipes if r in found)


def _stages(a: Attribution) -> list[list[Value | str]]:
    rows: list[list[Value | str]] = [
        [
            a.case, a.recipe, s.stage, s.format, figures.error(s.alone_rel_l2), figures.share(s.alone_share),
            figures.error(s.without_rel_l2), figures.share(s.without_share),
        ]
        for s in a.stages
        if _size(s) >= LEAST
    ]  # fmt: skip
    rest = [s for s in a.stages if _size(s) < LEAST]
    if rest:
        alone = sum(s.alone_share for s in rest)
        rows.append([a.case, a.recipe, f"{len(rest)} others", "", "", figures.small_share(alone), "", ""])
    return rows


def _whole(m: Material) -> Block:
    """Each attribution in a line, and what one stage in higher precision buys."""
    rows: list[list[Value | str]] = []
    for a in m.attributions:
        left = a.best_rel_l2 / a.rel_l2 if a.rel_l2 > 0 else math.nan
        rows.append(
            [
                a.case, a.recipe, figures.error(a.rel_l2), a.best, figures.error(a.best_rel_l2),
                figures.signed_share(left - 1, 0), figures.error(a.left_rel_l2), figures.share(a.sum_of_shares, 0),
                "yes" if a.additive else Value("no", None, "fair"),
            ]
        )  # fmt: skip
    headers = (
        "case", "recipe", "rel_l2", "best to widen", "rel_l2 then", "change", "all exact", "sum of shares", "adds up",
    )  # fmt: skip
    return table("What if one stage had higher precision", headers, rows, right=(2, 4, 5, 6, 7))


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
        blocks += _missing("The quality of a model (extra capture)", missing, "--quality", "--no-attribution")
    return Section("quality", title, tuple(blocks))


def _quality(q: Quality) -> list[Value | str]:
    return [
        q.model, q.text, Value(str(q.tokens), q.tokens), q.recipe,
        Value(f"{q.perplexity:.4g}", None if math.isnan(q.perplexity) else q.perplexity),
        figures.change(q), figures.share(q.top1_agreement, 2),
        *(figures.error(x) for x in (q.kl_mean, q.kl_p99, q.kl_max)),
    ]  # fmt: skip
