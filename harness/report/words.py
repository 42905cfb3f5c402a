"""Numbers and untrusted text as strings, and the command that repeats a cell. Shared by all renderers."""

from __future__ import annotations

import glob
import math
import shlex
from collections.abc import Sequence

from harness.records import Machine, Status
from harness.report.model import (
    KNOWN,
    Cell,
    Failure,
    HazardRow,
    Headline,
    InputRow,
    KnownRow,
    LyingMask,
    Pooled,
    RelationRow,
    WorstRow,
)

NONE = "–"
WORST_HEADERS = ("", "rel_l2", "×median", "max ulp", "b,h,i,c", "slope", "bias ulp")
HAZARD_HEADERS = ("kind", "stage", "recipe", "seen/pred", "bits", "share")
RELATION_HEADERS = ("against", "equal bits", "rel_l2", "max ulp", "recipe")
LIE_HEADERS = ("case", "added in", "rows", "first (b,h,i)", "shown", "meant", "effective")
INPUT_HEADERS = ("case", "[B, H, L, D]", "Var(q·k)/D", "max |s|", "top prob")
SHORT_LEGEND = (
    "kernel error, then total error. F, E: some case failed or raised, and no deviation explains it · k: a listed"
    " deviation explains it",
    f"! overflow, saturation, NaN, stagnation or lost probability was observed · {NONE} refused (alone, or in some"
    " cases) · ? inconclusive in some cases",
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
LEGEND = (
    "FAIL, ERROR: some case failed, and no deviation explains it · known: a listed deviation explains it",
    "! overflow, saturation, NaN, stagnation or lost probability was observed on the way"
    f" · {NONE} refused (after a figure: in some cases) · ? inconclusive in some cases · blank: not run",
    "* NaN/Inf where the truth has none, or no finite figure, in some cases or seeds: left out of the figure",
)


def clean(text: str) -> str:
    """Text as one line of printable characters: names and reasons come from anywhere."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


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
    return figure(value.rel_l2) + "*" * bool(value.left_out)


def cell(content: Cell | None, truth: str) -> str:
    """What stands in a group's table: status word, figure, marks (LEGEND)."""
    if content is None:
        return ""
    labels = content.labels
    word = next((w for w in (Status.FAIL.value, Status.ERROR.value, KNOWN) if w in labels), "")
    shown = pooled(content.kernel if truth == "kernel" else content.total)
    if shown == NONE:
        shown = "" if word or Status.INCONCLUSIVE.value in labels else NONE
    marks = "!" * content.flagged + "?" * (Status.INCONCLUSIVE.value in labels)
    if Status.REFUSED.value in labels and shown != NONE:
        marks += NONE
    return f"{word} {shown}{marks}".strip()


def both(content: Cell | None) -> str:
    """Kernel and total error and marks, as short as a terminal wants it (SHORT_LEGEND)."""
    if content is None:
        return ""
    marks = "!" * content.flagged + "*" * bool(content.kernel.left_out or content.total.left_out)
    marks += "".join(letter for label, letter in _LETTERS.items() if label in content.labels)
    marks += NONE * (Status.REFUSED.value in content.labels)
    if not content.kernel.measured:
        return marks
    return f"{_short(content.kernel.rel_l2)} {_short(content.total.rel_l2)}{marks}"


def _short(value: float) -> str:
    """`figure` without the exponent's leading zero: 1.9e-3."""
    return figure(value).replace("e-0", "e-").replace("e+0", "e+")


def counts(headline: Headline) -> str:
    """`PASS 10 · FAIL 2 · …`, zeros included: an absent word would not say that nothing failed."""
    return " · ".join(f"{label} {n}" for label, n in headline.labels)


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
    words = ["python", "-m", "harness", "run", "--cases", clean(failure.group)]
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


def worst(row: WorstRow) -> list[str]:
    """What stands under WORST_HEADERS."""
    figures = [pooled(row.kernel), number(row.times_median), number(row.max_ulp), index(row.worst)]
    return [row.label, *figures, signed(row.slope), signed(row.bias_ulp)]


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
