"""What counts as worse than the baseline.

A cell has regressed when
1. for some status, more of its seeds ended there or worse (PASS, INCONCLUSIVE, REFUSED, FAIL, ERROR), or likewise for
   the precision of its recipe (PASS, INCONCLUSIVE, FAIL) where both have one;
2. its rmse drifted up, by the paired test of `gate.drift`, alone or with all cells of its implementation and recipe;
3. its rmse was finite and no longer is, or more than 1.10 times as many elements have the wrong class;
4. a kind of hazard is observed in a stage where it was not;
5. the run no longer has it, though it was selected.

The paired test needs pairs: the same class of machine, inputs and recipe, and a baseline with rmse by seed (schema
1.2). Elsewhere error ÷ expected, which has no unit, takes the place of rmse in rule 2, pooled over seeds: it may not
exceed hypot(1.10·old, floor). The first line says in how many cells that is so, and why; verdicts and error ÷ expected
mean the same on any machine and inputs, so that this is no empty comparison, and passes. Why 1.10: the same code
differs by up to 3 % between instruction sets, and in FP32 by up to 8 % in a single seed with another library's products
(`reports/gate-study.md`). `gate.drift` explains the floor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.gate.drift import Drift, Found, find_drifts, floor_of
from harness.gate.pooled import Key, Pooled, pool_records
from harness.gate.scope import ALL, Selected
from harness.gate.told import REFRESH, figures, not_paired, notes_on, of_cell, of_group, status
from harness.records import Record, Status
from harness.report.words import clean, clip, many

HEADROOM = 1.10
_DIAGNOSIS = 300  # characters
# From best to worst: to refuse is worse than to be unsure, and better than to be wrong.
_ORDER = (Status.PASS, Status.INCONCLUSIVE, Status.REFUSED, Status.FAIL, Status.ERROR)
_PRECISION = (Status.PASS, Status.INCONCLUSIVE, Status.FAIL)
_TELLING = (Status.PASS, Status.FAIL, Status.ERROR)  # the others say nothing about the numbers


@dataclass(frozen=True)
class Outcome:
    """What the comparison found, a line each. `compared` cells stand in both; `told` of them ended, in this
    run, in PASS, FAIL or ERROR for some seed. Vanished cells are among the regressions too, unless nothing
    was compared; those of the baseline that were not selected are counted in a note alone. `expired`: known deviations
    whose date is past. `unpaired`: how many cells the paired test could not compare, and why; empty for none."""

    compared: int
    told: int
    regressions: tuple[str, ...]
    improvements: tuple[str, ...]
    new: tuple[str, ...]
    vanished: tuple[str, ...]
    notes: tuple[str, ...]
    expired: tuple[str, ...] = ()
    unpaired: str = ""

    @property
    def exit_code(self) -> int:
        """0 no regression, 1 regressions or expired deviations, 3 nothing compared (or nothing but refusals and
        INCONCLUSIVE)."""
        if self.regressions or self.expired:
            return 1
        return 0 if self.told else 3

    @property
    def text(self) -> str:
        """The verdict with what it rests on, then regressions. Ends with a newline."""
        found = ((self.regressions, "regression"), (self.expired, "expired deviation"))
        worse = ", ".join(many(len(lines), word) for lines, word in found if lines)
        verdict = {0: "no regression", 1: worse, 3: "nothing compared, not a pass"}[self.exit_code]
        first = f"gate: {verdict}; {self.compared} cells of this run stand in the baseline"
        lines = ["; ".join(filter(None, (first, self.unpaired)))]
        sections = (
            ("REGRESSION", self.regressions), ("EXPIRED", self.expired), ("improved", self.improvements),
            ("new", self.new), ("vanished", () if self.compared else self.vanished), ("note", self.notes),
        )  # fmt: skip
        lines += [f"{word}: {line}" for word, found in sections for line in found]
        return "\n".join(lines) + "\n"


def compare(records: Iterable[Record], baseline: Mapping[Key, Pooled], selected: Selected = ALL) -> Outcome:
    """Compare what is selected of a run and of a baseline by the rules above.

    Raises ValueError, in one line, where a cell's seeds differ from the baseline's or hold one twice.
    """
    run = pool_records(r for r in records if selected(r.group_key))
    outside = sum(not selected(key) for key in baseline)
    baseline = {key: cell for key, cell in baseline.items() if selected(key)}
    pairs = [(run[key], baseline[key]) for key in sorted(run) if key in baseline]
    for new, old in pairs:
        _same_seeds(new, old)
    reasons = [_why_unpaired(*pair) for pair in pairs]
    paired = [pair for pair, reason in zip(pairs, reasons, strict=True) if not reason]
    up, down = find_drifts(paired), find_drifts(paired, -1)
    loose = {pair[0].key for pair in pairs} - {pair[0].key for pair in paired}
    regressions = [of_group(group, drift, 1) for group, drift in sorted(up.groups.items())]
    improvements = [of_group(group, drift, -1) for group, drift in sorted(down.groups.items())]
    for new, old in pairs:
        worse, better = _changes(new, old, up, down, new.key in loose)
        regressions += [f"{new}: {what}" for what in worse]
        improvements += [] if worse else [f"{new}: {what}" for what in better]
    vanished = _only_in(baseline, run)
    if pairs:
        regressions += [f"{name}: in the baseline, not in this run" for name in vanished]
    return Outcome(
        compared=len(pairs),
        told=sum(any(new.status.get(s.value) for s in _TELLING) for new, _ in pairs),
        regressions=tuple(regressions),
        improvements=tuple(improvements),
        new=_only_in(run, baseline),
        vanished=vanished,
        notes=(
            *notes_on(pairs, up),
            *([f"{outside} cells of the baseline were not selected"] if outside else []),
        ),
        unpaired=not_paired(reasons),
    )


def _only_in(these: Mapping[Key, Pooled], others: Mapping[Key, Pooled]) -> tuple[str, ...]:
    """Cells that the others lack, a line each; one line for a case that they lack altogether."""
    shared = {key[0] for key in others}
    apart = Counter(key[0] for key in these if key[0] not in shared)
    whole = {case: count for case, count in apart.items() if count > 1}
    told = [f"{clean(case)}, all {count} cells" for case, count in sorted(whole.items())]
    return (*told, *(str(these[key]) for key in sorted(these) if key not in others and key[0] not in whole))


def _same_seeds(new: Pooled, old: Pooled) -> None:
    if new.seeds != old.seeds:
        here, there = (", ".join(map(str, cell.seeds)) for cell in (new, old))
        advice = f"run with the same --seeds, or make the baseline anew with {REFRESH}"
        raise ValueError(f"{new} ran with seeds {here}, its baseline with {there}; {advice}")


def _why_unpaired(new: Pooled, old: Pooled) -> str:
    """What keeps figures from being held against each other seed by seed; empty where nothing does."""
    if new.machine_class != old.machine_class:
        return "another class of machine"
    if new.inputs != old.inputs:
        return "the inputs changed"
    if new.recipe_digest != old.recipe_digest:
        return "the recipe changed"
    if len(old.rmses) != len(new.rmses) or _lacks_seeds(new, old):
        return "the baseline has no rmse by seed"
    return ""


def _lacks_seeds(new: Pooled, old: Pooled) -> bool:
    """Whether a pair has no figure in the baseline where there was one: a seed without an output ended neither in PASS
    nor in INCONCLUSIVE, and one of NaN or Inf makes the pooled figure so."""
    if not any(_is_finite(b) and not _is_finite(a) for b, a in zip(new.rmses, old.rmses, strict=True)):
        return False
    without = sum(a is None for a in old.rmses)
    answered = sum(old.status.get(s.value, 0) for s in (Status.PASS, Status.INCONCLUSIVE))
    odd = any(a is not None and not math.isfinite(a) for a in old.rmses)
    return without > len(old.seeds) - answered or (odd and _is_finite(old.rmse))


def _changes(new: Pooled, old: Pooled, up: Found, down: Found, loose: bool) -> tuple[list[str], list[str]]:
    """What got worse, what got better."""
    worse: list[str] = []
    better: list[str] = []
    for name, order in (("status", _ORDER), ("precision", _PRECISION)):
        change = _worsened(getattr(new, name), getattr(old, name), order)
        if change and (name == "status" or (new.precision and old.precision)):
            (worse if change > 0 else better).append(status(name, new, old))
    if new.key in up.cells or _lost(new, old) or (loose and _exceeds(new, old)):
        worse.append(_rise(new, old, up.cells.get(new.key), 1))
    elif new.key in down.cells or _lost(old, new) or (loose and _exceeds(old, new)):
        better.append(_rise(new, old, down.cells.get(new.key), -1))
    if new.mismatches > HEADROOM * old.mismatches:
        worse.append(f"elements of the wrong class: {old.mismatches} → {new.mismatches}")
    for name, count in new.new_hazards(old).items():
        worse.append(f"{name} observed {count} times, never in the baseline")
    if worse and new.diagnosis:
        worse[0] += f": {clean(clip(new.diagnosis, _DIAGNOSIS))}"
    return worse, better


def _worsened(new: Mapping[str, int], old: Mapping[str, int], order: Sequence[Status]) -> int:
    """Positive where, for some status, more seeds ended there or worse; negative where only fewer did."""
    more = [
        sum(new.get(s.value, 0) - old.get(s.value, 0) for s in order[rank:]) for rank in range(1, len(order))
    ]
    return max(more) if max(more) > 0 else min(more)


def _rise(new: Pooled, old: Pooled, drift: Drift | None, sign: int) -> str:
    return figures(new, old) if drift is None else f"{of_cell(drift, sign)}: {figures(new, old)}"


def _lost(new: Pooled, old: Pooled) -> bool:
    """Whether a figure is missing or not finite that was; two such are equal."""
    return _is_finite(old.rmse) and not _is_finite(new.rmse)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _exceeds(new: Pooled, old: Pooled) -> bool:
    """Whether `new` has the larger error ÷ expected, beyond what another machine could explain; rmse takes its place
    where one of the two was not judged."""
    floor = floor_of(old)
    here, there = new.ratio, old.ratio
    if here is None or there is None or not (math.isfinite(here) and math.isfinite(there)):
        here, there = new.rmse, old.rmse
    else:
        floor *= _per_rmse(old) or _per_rmse(new)
    if here is None or there is None or not (math.isfinite(here) and math.isfinite(there)):
        return False  # what was lost is told by another rule
    return here > math.hypot(HEADROOM * there, floor)


def _per_rmse(cell: Pooled) -> float:
    """1 ÷ the expected error, for the floor in its unit; 0 where no error says what it is."""
    if not cell.rmse or not cell.ratio or not (math.isfinite(cell.rmse) and math.isfinite(cell.ratio)):
        return 0.0
    return cell.ratio / cell.rmse
