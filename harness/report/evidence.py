"""Evidence as tables: where errors arise and what precisions do to a model's words. Loads neither torch nor numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.evidence import Attribution, Evidence, Quality, StageShare
from harness.report import words
from harness.report.markdown import escape
from harness.report.markdown import table as markdown_table
from harness.text_table import WIDTH, table

SHOWN = 0.0005  # share from which a stage has a row of its own: 0.1 % when rounded
STAGES = ("stage", "format", "alone", "share", "without", "share of it")
QUALITY = ("recipe", "tokens", "KL mean", "KL p99", "KL max", "same top-1", "perplexity", "change")
TOLD = (
    "alone: error with this rounding alone, and its share of the squared error; without: error with all others, and"
    " the share that goes with it"
)
QUALITY_TOLD = (
    "KL: of the next-token distributions from those under FP64 attention, in nats; same top-1: positions with the same"
    " likeliest token"
)


def shown(stage: StageShare) -> bool:
    """Whether a stage weighs enough for a row; what is not a number is shown."""
    small = stage.alone_share < SHOWN and abs(stage.without_share) < SHOWN
    return not small or bool(stage.alone_lost)


def attribution_rows(found: Attribution) -> list[list[str]]:
    """The stages that weigh something, and a last row for the others."""
    rows = [
        [
            words.clean(s.stage), words.clean(s.format), _number(s.alone_rel_l2), _percent(s.alone_share),
            _number(s.without_rel_l2), _percent(s.without_share),
        ]
        for s in found.stages
        if shown(s)
    ]  # fmt: skip
    others = [s for s in found.stages if not shown(s)]
    if others:
        names = words.clean(", ".join(s.stage for s in others))
        share = math.fsum(s.alone_share for s in others)
        rows.append(
            [names, words.clean(_one(s.format for s in others)), "", f"{share:.0e}" if share else "0", "", ""]
        )
    return rows


def heading(found: Attribution) -> str:
    """What a table is of."""
    seeds = f"{found.seeds} seed{'s' * (found.seeds != 1)}"
    place = f"{found.recipe} · {found.case} · {found.implementation} ({seeds})"
    return words.clean(f"{place}: error {_number(found.rel_l2)}")


def advice(found: Attribution) -> str:
    """The what-if, and what the accumulation leaves."""
    left = f"with every rounding off {_number(found.left_rel_l2)} is left, of the sums in the products"
    if not found.best:
        return left
    return words.clean(
        f"{found.best} in higher precision buys most: {_number(found.best_rel_l2)} is left; {left}"
    )


def quality_rows(found: Iterable[Quality]) -> list[list[str]]:
    """One row a recipe and length."""
    return [
        [
            words.clean(q.recipe), str(q.tokens), _number(q.kl_mean), _number(q.kl_p99), _number(q.kl_max),
            f"{100 * q.top1_agreement:.2f} %", f"{q.perplexity:.4f}", _change(q),
        ]
        for q in found
    ]  # fmt: skip


def _change(q: Quality) -> str:
    low, high = q.change_range
    half = f" ± {50 * (high - low):.2g}" if high > low else ""
    return f"{100 * q.perplexity_change:+.2g}{half} %"


def quality_heading(found: Sequence[Quality]) -> str:
    first = found[0]
    return words.clean(
        f"{first.model} on {first.text}, attention of all layers by {first.implementation};"
        f" perplexity under FP64 attention"
        f" {', '.join(f'{q.reference_perplexity:.4f} ({q.tokens} tokens)' for q in _by_length(found))}"
    )


def to_text(found: Iterable[Evidence]) -> str:
    """Tables by recipe, at most 100 columns wide. Ends with a newline."""
    import textwrap

    def paragraph(text: str) -> list[str]:
        return textwrap.wrap(text, WIDTH, break_on_hyphens=False)

    attributions, qualities = _split(found)
    lines = ["== Where the error arises ==", *paragraph(TOLD)] if attributions else []
    for a in attributions:
        lines += [
            "",
            *paragraph(heading(a)),
            table(STAGES, attribution_rows(a), wrap=(0,), right=(2, 3, 4, 5)),
        ]
        lines += [*paragraph(words.clean(a.statement)), *paragraph(advice(a))]
    for group in _by_model(qualities):
        lines += [""] if lines else []
        lines += ["== What a model says ==", *paragraph(QUALITY_TOLD), *paragraph(quality_heading(group)), ""]
        lines.append(table(QUALITY, quality_rows(group), wrap=(0,), right=range(1, len(QUALITY))))
    return "\n".join(lines) + "\n" if lines else ""


def quality_page(found: Iterable[Evidence], command: str, seconds: float) -> str:
    """What a model says, as Markdown. Ends with a newline."""
    _, qualities = _split(found)
    parts = ["# What a precision does to a model's words", f"{QUALITY_TOLD}. Rows are by length."]
    for group in _by_model(qualities):
        rows = [[escape(x) for x in row] for row in quality_rows(group)]
        parts += [
            escape(quality_heading(group)) + ".",
            markdown_table(QUALITY, rows, right=range(1, len(QUALITY))),
        ]
    machines = dict.fromkeys(words.machine(q.machine) for q in qualities)
    parts.append(f"`{command}`: {seconds / 60:.0f} min on {escape('; '.join(machines))}.")
    return "\n\n".join(parts) + "\n"


def _split(found: Iterable[Evidence]) -> tuple[list[Attribution], list[Quality]]:
    """Attributions by recipe, qualities by length, each otherwise as they came."""
    found = list(found)
    attributions = [e for e in found if isinstance(e, Attribution)]
    recipes = list(dict.fromkeys(a.recipe for a in attributions))
    qualities = [e for e in found if isinstance(e, Quality)]
    return sorted(attributions, key=lambda a: recipes.index(a.recipe)), sorted(
        qualities, key=lambda q: q.tokens
    )


def _by_model(found: Sequence[Quality]) -> list[list[Quality]]:
    groups: dict[tuple[str, str, str], list[Quality]] = {}
    for q in found:
        groups.setdefault((q.model, q.text, q.implementation), []).append(q)
    return list(groups.values())


def _by_length(found: Sequence[Quality]) -> list[Quality]:
    return list({q.tokens: q for q in found}.values())


def _number(x: float) -> str:
    return f"{x:.2e}" if math.isfinite(x) and x else ("0" if x == 0 else str(x))


def _percent(x: float) -> str:
    return f"{100 * x:.1f} %" if math.isfinite(x) else str(x)


def _one(names: Iterable[str]) -> str:
    kinds = list(dict.fromkeys(names))
    return kinds[0] if len(kinds) == 1 else ""
