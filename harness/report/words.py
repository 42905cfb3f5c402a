"""Numbers and untrusted text as strings, and the command that repeats a cell. Shared by all renderers."""

from __future__ import annotations

import glob
import math
import re
import shlex
from collections.abc import Sequence

from harness.cost.units import show_bytes, show_time
from harness.records import Machine, Status
from harness.report.model import (
    KNOWN,
    Cell,
    Cost,
    CostlyRow,
    Doubt,
    Failure,
    HazardRow,
    Headline,
    InputRow,
    KnownRow,
    LyingMask,
    OwnLoss,
    Pooled,
    RelationRow,
    Tradeoff,
    TradeoffRow,
    Unseen,
    WorstRow,
)
from harness.report.precision import short as short_reason

NONE = "–"
_COMMAND = re.compile(r"^(\s*)::", re.MULTILINE)
WORST_HEADERS = (
    "rel_l2",
    "error ÷\nexpected",
    "worst place,\nof its limit",
    "largest\n|T|",
    "slope,\nbias ulp",
)
COST_HEADERS = ("total", "floor", "precision")
COSTLY_HEADERS = ("case", "recipe", "total", "floor", "why")
UNSEEN_HEADERS = ("group", "shrink", "at", "scale", "at")
HAZARD_HEADERS = ("kind", "stage", "recipe", "seen/pred", "bits", "share")
RELATION_HEADERS = ("against", "equal bits", "rel_l2", "max ulp", "recipe")
LIE_HEADERS = ("case", "added in", "rows", "first (b,h,i)", "shown", "meant", "effective")
INPUT_HEADERS = ("case", "[B, H, L, D]", "Var(q·k)/D", "max |s|", "top prob")
LEGEND = (
    "a cell: rel_l2 against the stored truth ×(error ÷ expected) · total: rel_l2 against the exact truth, of"
    " implementations that did not fail, where there are any · floor: what it would be with ideal scales",
    "F, E: some case failed or raised, and no deviation explains it · k: a listed deviation explains it · Fn after the"
    " total: precision FAIL in n cases",
    f"! overflow, saturation, NaN, stagnation or lost probability was observed · {NONE} refused (alone, or in some"
    " cases) · ? inconclusive in some cases · blank: not run",
    "* NaN/Inf where the truth has none, or no finite figure, in some cases or seeds: left out of the figure",
)
_LETTERS = {Status.FAIL.value: "F", Status.ERROR.value: "E", KNOWN: "k", Status.INCONCLUSIVE.value: "?"}
RELATIONS_TOLD = (
    "Pairs of runs that should give the same numbers: in how many cells their bits are equal, and the cell farthest"
    " apart by ‖difference‖ / ‖output‖. An element near 0 has small ulps."
)
LIES_TOLD = (
    "Rows whose bias hides by large finite numbers and leaves nothing else, once it is added to the scores in that"
    " format. Keys shown by masks and −∞, keys not hidden by such a number, keys that weigh anything."
)
TRADEOFF_HEADERS = ("recipe", "total", "KV bytes a token", "÷ bf16", "decode step")
UNSEEN_TOLD = (
    "The smallest shrink of the output and change of the softmax scale, relative, that each case could have shown; the"
    " largest of these in a group, and where. Smaller faults pass unseen there."
)
COSTLY_TOLD = (
    "Precision FAIL with every implementation: values were lost to the format, or the expected error against the exact"
    " truth is more than 2 × the floor, what ideal scales would give."
)


def clean(text: str) -> str:
    """Text as one line of printable characters: names and reasons come from anywhere."""
    text = " ".join(text.split())
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def for_log(text: str) -> str:
    """Lines that GitHub's runner shows and does not obey: it takes `::name::` at the start of a line and `##[name]`
    anywhere for commands."""
    text = text.replace("##[", "# #[")
    return _COMMAND.sub(r"\1: :", text) if "::" in text else text


def clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def many(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def figure(value: float) -> str:
    """A relative error, two digits."""
    return f"{value:.1e}" if math.isfinite(value) else f"{value}"


def number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}g}"


def signed(value: float) -> str:
    return f"{value:+.1e}" if math.isfinite(value) else f"{value}"


def index(where: Sequence[int] | None) -> str:
    return NONE if where is None else ",".join(map(str, where))


def pooled(value: Pooled) -> str:
    """The figure, with `*` where some records could not be pooled; a dash where nothing was measured."""
    if not value.measured:
        return "n/a*" if value.left_out else NONE
    return short(value.rel_l2) + "*" * bool(value.left_out)


def cell(content: Cell | None) -> str:
    """Kernel error, error ÷ expected and marks, as short as a terminal wants it (LEGEND)."""
    if content is None:
        return ""
    marks = "!" * content.flagged + "*" * bool(content.kernel.left_out)
    marks += "".join(letter for label, letter in _LETTERS.items() if label in content.labels)
    marks += NONE * (Status.REFUSED.value in content.labels)
    if not content.kernel.measured:
        return marks
    return f"{short(content.kernel.rel_l2)} {times(content.ratio)}{marks}"


def cost(content: Cost) -> list[str]:
    """What stands under COST_HEADERS."""
    answers = []
    if content.failing:
        answers.append(f"FAIL in {content.failing} of {many(content.cases, 'case')}")
    if content.inconclusive:
        answers.append(f"INCONCLUSIVE in {content.inconclusive}")
    return [pooled(content.total), optional(content.floor), " · ".join(answers) or Status.PASS.value]


def short_cost(content: Cost) -> list[str]:
    """Total error with its mark, and the floor, for a terminal."""
    total = NONE if not content.total.measured else short(content.total.rel_l2)
    total += "*" * bool(content.total.left_out) + f" F{content.failing}" * bool(content.failing)
    return [total, optional(content.floor)]


def short(value: float) -> str:
    """`figure` without the exponent's leading zero: 1.9e-3."""
    return figure(value).replace("e-0", "e-").replace("e+0", "e+")


def optional(value: float) -> str:
    """A relative error; a dash for NaN."""
    return NONE if math.isnan(value) else short(value)


def times(value: float) -> str:
    """How many times the expected error, two digits or three."""
    if not math.isfinite(value):
        return NONE if math.isnan(value) else "×inf"
    if value < 999.5:
        return f"×{value:.1f}" if value < 9.95 else f"×{value:.0f}"
    return "×" + short(value).replace("e+", "e")


def margin(failure: Failure) -> str:
    """`, ×5.3 expected`; nothing where it was not judged."""
    return "" if math.isnan(failure.ratio) else f", {times(failure.ratio)} expected"


def counts(headline: Headline) -> str:
    """`PASS 10 · FAIL 2 · …`, zeros included: an absent word would not say that nothing failed."""
    return " · ".join(f"{label} {n}" for label, n in headline.labels)


def precision(headline: Headline) -> str:
    """The same of the recipes; nothing where no record was judged so."""
    if not headline.precision:
        return ""
    return "precision, by case and recipe: " + " · ".join(f"{s} {n}" for s, n in headline.precision)


def repeated(headline: Headline) -> str:
    """Says that records were left out; nothing where none were."""
    n = headline.repeated
    if not n:
        return ""
    return f"{many(n, 'record')} left out: a later one of the same cell and device counts instead"


def extent(headline: Headline) -> str:
    h = headline
    if not h.records:
        return "no records: nothing ran"
    return (
        f"{many(h.records, 'cell')} run: {many(h.cases, 'case')} in {many(h.groups, 'group')},"
        f" {many(h.implementations, 'implementation')}, {many(h.recipes, 'recipe')}, {many(h.seeds, 'seed')}"
    )


def machine(m: Machine) -> str:
    return clean(
        f"{m.device}: {m.cpu}, ISA {m.isa}, {m.threads} threads, torch {m.torch}, Python {m.python},"
        f" commit {m.commit or 'unknown'}"
    )


def command(failure: Failure) -> tuple[str, ...]:
    """Words, unquoted, that repeat a failed cell."""
    words = ["python", "-m", "harness", "run", "--cases", clean(failure.source)]
    words += ["--only", glob.escape(clean(failure.case)), "--implementations", clean(failure.implementation)]
    words += ["--recipes", clean(failure.recipe), "--seeds", str(failure.first_seeds)]
    return (*words, *(() if failure.device == "cpu" else ("--device", clean(failure.device))))


def command_line(words: Sequence[str]) -> str:
    """One line for a POSIX shell."""
    return shlex.join(words)


def command_lines(words: Sequence[str], width: int, indent: str = "    ") -> list[str]:
    """The same command over several lines of at most `width`, still one to paste into a POSIX shell."""
    room = width - len(" \\")
    lines: list[str] = []
    for word in words:
        quoted = shlex.quote(word)
        if lines and len(lines[-1]) + 1 + len(quoted) <= room:
            lines[-1] += f" {quoted}"
            continue
        if lines:
            lines[-1] += " \\"
        first, *rest = [quoted] if len(indent) + len(quoted) <= room else _pieces(word, room - len(indent))
        lines.append(indent + first)
        for piece in rest:  # from column 0: a space would end the word
            lines[-1] += "\\"
            lines.append(piece)
    return lines


def _pieces(word: str, room: int) -> list[str]:
    """Quoted parts of a word too long for a line. A quote character takes 5 columns when quoted."""
    step = max(1, (room - 2) // (5 if "'" in word else 1))
    return [shlex.quote(word[i : i + step]) for i in range(0, len(word), step)]


def statistic(value: float) -> str:
    return f"{value:.1f}" if value < 999.95 else short(value)


def worst(row: WorstRow) -> list[tuple[str, ...]]:
    """What stands under WORST_HEADERS: a figure and, for most, what belongs to it."""
    m = row.margins
    judged: list[tuple[str, ...]] = [(NONE,)] * 3
    if m is not None:
        place, direction = clean(m.worst_at).replace(", ", ","), clean(m.direction)
        t = (f"{statistic(m.statistic)} of {m.threshold:.1f}", direction) if direction else (NONE,)
        judged = [(f"{m.ratio:.3g}", f"limit {m.limit:.3g}"), (f"{m.worst:.2g}", place), t]
    return [(pooled(row.kernel),), *judged, (signed(row.slope), signed(row.bias_ulp))]


def costly(row: CostlyRow) -> list[str]:
    """What stands under COSTLY_HEADERS but the reasons."""
    return [clean(row.case), clean(row.recipe), pooled(row.total), optional(row.floor)]


def short_reasons(row: CostlyRow, limit: int) -> str:
    """At most so many, without figures and places."""
    more = f" (+ {len(row.reasons) - limit})" if len(row.reasons) > limit else ""
    return "; ".join(clean(short_reason(r)) for r in row.reasons[:limit]) + more


def tradeoff_told(content: Tradeoff) -> str:
    """What the costs are of, and that they are modelled."""
    return (
        f"total: rel_l2 against the exact truth, over {many(content.cases, 'case')} of {clean(content.group)}. KV"
        f" bytes, scales included, and the decode step are modelled, not measured: {content.stated}, every byte moved"
        " once (`python -m harness cost` takes other models). –: a recipe that is not built in."
    )


def tradeoff(row: TradeoffRow, content: Tradeoff) -> list[str]:
    """What stands under TRADEOFF_HEADERS."""
    costs = [NONE] * 3
    if not math.isnan(row.kv_bytes):
        costs = [
            show_bytes(row.kv_bytes),
            f"{row.kv_bytes / content.yardstick:.3f}",
            show_time(row.decode_s),
        ]
    return [clean(row.recipe), pooled(row.total), *costs]


def own_loss(row: OwnLoss) -> str:
    names = ", ".join(map(clean, row.implementations))
    return f"in {row.cells} more (case, recipe), only with {names}: the algorithm loses what others keep"


def unseen(row: Unseen) -> list[str]:
    """What stands under UNSEEN_HEADERS."""
    return [
        clean(row.group),
        optional(row.shrink),
        clean(row.shrink_at),
        optional(row.scale),
        clean(row.scale_at),
    ]


def doubt(row: Doubt, limit: int) -> str:
    """A reason and its cases with their numbers of cells, at most `limit` of them named."""
    named = ", ".join(f"{clean(case)} ({n})" for case, n in row.cases[:limit])
    more = f" … and {many(len(row.cases) - limit, 'case')} more" if len(row.cases) > limit else ""
    return f"{clean(row.reason)}: {many(row.cells, 'cell')} in {named}{more}"


def hazard(row: HazardRow) -> list[str]:
    """What stands under HAZARD_HEADERS. `cells`: observed in the run / predicted from FP64 values."""
    room = row.worst.headroom_bits
    bits = f"{room:+.1f}" if abs(room) < 100 or math.isinf(room) else f"{room:+.0f}"
    names = [row.kind.value, f"{clean(row.stage)} {clean(row.format)}", clean(row.recipe)]
    return [*names, f"{row.observed}/{row.predicted}", bits, f"{row.worst.share:.1%}"]


def relation(row: RelationRow) -> list[str]:
    """What stands under RELATION_HEADERS: the distance is that of the cell farthest apart."""
    worst = row.worst
    apart = (NONE, NONE, NONE)
    if not worst.bits_equal:
        apart = (figure(worst.rel_l2), number(worst.max_ulps), clean(row.recipe))
    return [clean(row.name), f"{row.equal} of {row.cells}", *apart]


def lie(row: LyingMask) -> list[str]:
    """What stands under LIE_HEADERS. Counts of keys are those of the recorded rows."""
    counts = [
        f"{min(values)}" if min(values) == max(values) else f"{min(values)}–{max(values)}"
        for values in (
            [r.shown for r in row.rows],
            [r.meant for r in row.rows],
            [r.effective for r in row.rows],
        )
    ]
    return [
        clean(row.case),
        clean(row.format),
        f"{row.count} of {row.total}",
        index(row.rows[0].where),
        *counts,
    ]


def facts(row: InputRow) -> list[str]:
    """Var(q·k)/D, the largest |score|, the mean top probability."""
    return [number(row.var_qk_per_dim), number(row.score_peak), number(row.mean_top_prob, 2)]


def known(row: KnownRow) -> str:
    d = row.deviation
    return f"{d}: {many(row.records, 'cell')}; {d.reason}; {d.link or 'no link'}; until {d.expires}"
