"""The recommendation: a stated rule over what was recorded. People sign; the rule only says what it found."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.evidence import Quality
from harness.records import Status
from harness.report import words
from harness.report.precision import short
from harness.report.review.material import Material
from harness.report.tables import spoils

# MLPerf Inference rules, "quality targets": 99 % of the reference's score is the usual one.
QUALITY_LOSS = 0.01
# One bit: what the harness also allows a recipe over its own floor.
ERROR_TIMES = 2.0
_NAMED = 6  # cases of one reason

RULE = (
    "NOT DECIDED where no case of real activations was judged under the recipe.",
    "NOT RECOMMENDED where, on real activations, its precision is FAIL (values are lost to the format, or the expected"
    f" error is more than {ERROR_TIMES:g} × that of ideal scales) or no implementation passes every case; or where a"
    f" model's perplexity rises by more than {QUALITY_LOSS:.0%} (MLPerf Inference asks for 99 % of the reference's"
    " quality), by the whole of its 95 % interval over the text's tokens.",
    "WITH CONDITIONS where nothing of that holds, but its precision is FAIL on a hard case; an implementation fails"
    " somewhere, and no listed deviation explains it; numbers overflow, saturate, stagnate, become NaN or lose"
    " probability mass on real activations in an implementation that passes; a real case is INCONCLUSIVE; a model's"
    f" perplexity may rise by more than {QUALITY_LOSS:.0%}, by its interval; its"
    f" likeliest token differs at more than {QUALITY_LOSS:.0%} of positions; or its error on real activations is more"
    f" than {ERROR_TIMES:g} × the baseline's and what that does to a model was not measured.",
    "RECOMMENDED otherwise. The baseline is judged by the same rule.",
)


class Verdict(enum.Enum):
    RECOMMENDED = "good"
    WITH_CONDITIONS = "fair"
    NOT_RECOMMENDED = "bad"
    NOT_DECIDED = "none"

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")


@dataclass(frozen=True)
class Recommendation:
    """`reasons`: what the rule found, those that decide first."""

    recipe: str
    verdict: Verdict
    reasons: tuple[str, ...]


def recommend(m: Material, recipe: str) -> Recommendation:
    judged = [c for c in m.real if _decided(m, c, recipe)]
    if not judged:
        told = "no case of real activations was judged under it; python -m harness run --cases real runs some"
        return Recommendation(recipe, Verdict.NOT_DECIDED, (told,))
    against = tuple(_against(m, recipe))
    conditions = tuple(_conditions(m, recipe))
    if against:
        return Recommendation(recipe, Verdict.NOT_RECOMMENDED, against + conditions)
    if conditions:
        return Recommendation(recipe, Verdict.WITH_CONDITIONS, conditions)
    return Recommendation(recipe, Verdict.RECOMMENDED, (f"nothing against it in {_extent(m, recipe)}",))


def _decided(m: Material, case: str, recipe: str) -> bool:
    found = m.precise.get((case, recipe))
    return found is not None and found.status in (Status.PASS, Status.FAIL)


def _extent(m: Material, recipe: str) -> str:
    ran = {r.case for r in m.of(recipe)}
    real = sum(c in ran for c in m.real)
    return f"{words.many(real, 'real case')} and {words.many(len(ran) - real, 'hard case')}"


def _against(m: Material, recipe: str) -> Iterator[str]:
    for reason, cases in _lost(m, recipe, m.real):
        yield f"precision FAIL on {_named(cases)}: {reason}"
    if not _passing(m, recipe):
        yield "no implementation passes every real case"
    for q in m.quality(recipe):
        if not q.change_range[0] <= QUALITY_LOSS:  # NaN too
            yield f"perplexity {_change(q)} over {_text(q)}"


def _conditions(m: Material, recipe: str) -> Iterator[str]:
    for reason, cases in _lost(m, recipe, m.hard):
        yield f"keep inputs away from {_named(cases)}: {reason}"
    yield from _failures(m, recipe)
    yield from _ranges(m, recipe)
    doubtful = [c for c in m.real if (p := m.precise.get((c, recipe))) and p.status is Status.INCONCLUSIVE]
    if doubtful:
        yield f"not decided on {_named(doubtful)}: INCONCLUSIVE"
    yield from _quality(m, recipe)


def _lost(m: Material, recipe: str, cases: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Precision FAIL, by what was said first."""
    found: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        p = m.precise.get((case, recipe))
        if p is not None and p.status is Status.FAIL:
            told = next((r.precision_reasons[0] for r in p.records if r.precision_reasons), "no reason given")
            found[short(told).replace(", observed", "").replace(", predicted", "")].append(case)
    yield from found.items()


def _passing(m: Material, recipe: str) -> list[str]:
    """Implementations that pass every real case they take, and take one."""
    passing = []
    for name in m.implementations:
        met = {r.status for case in m.real for r in m.cell(case, name, recipe)} - {Status.REFUSED}
        if met == {Status.PASS}:
            passing.append(name)
    return passing


def _failures(m: Material, recipe: str) -> Iterator[str]:
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for r in m.of(recipe):
        if m.failed(r):
            found[r.implementation][r.case] = None
    for name, cases in found.items():
        yield f"not with {name}: it fails on {_named(list(cases))}"


def _ranges(m: Material, recipe: str) -> Iterator[str]:
    """Hazards that spoil numbers, in runs that pass."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for r in m.of(recipe):
        if r.status is Status.PASS and m.is_real(r.case):
            for h in r.hazards:
                if spoils(h):
                    found[f"{h.kind.value} in {h.stage} ({h.format}) on {r.case}"][r.implementation] = None
    for told, names in found.items():
        yield f"{told}, with {_named(list(names))}"


def _quality(m: Material, recipe: str) -> Iterator[str]:
    measured = m.quality(recipe)
    for q in measured:
        low, high = q.change_range
        if low <= QUALITY_LOSS < high:
            yield f"perplexity {_change(q)} over {_text(q)}: more text can tell whether that is over {QUALITY_LOSS:.0%}"
    differing = [q for q in measured if not 1 - q.top1_agreement <= QUALITY_LOSS]
    if differing:
        worst = min(differing, key=lambda q: -math.inf if math.isnan(q.top1_agreement) else q.top1_agreement)
        yield f"the likeliest token differs at {1 - worst.top1_agreement:.1%} of positions over {_text(worst)}"
    times = m.times_baseline(recipe)
    if not measured and recipe != m.baseline and not times <= ERROR_TIMES:
        told = "cannot be compared with" if math.isnan(times) else f"is {times:.3g} ×"
        yield f"its error on real activations {told} the baseline's: measure what that does to a model first"


def _text(q: Quality) -> str:
    return f"{q.tokens} tokens of {q.text} with {q.model}"


def _change(q: Quality) -> str:
    change, (low, high) = q.perplexity_change, q.change_range
    if not math.isfinite(change):
        return f"changes by {change}"
    return f"{change:+.2%}" + (f" ± {(high - low) / 2:.2%}" if high > low else "")


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
