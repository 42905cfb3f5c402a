"""What counts as worse than the baseline.

A cell has regressed when
1. for some status, more of its seeds ended there or worse (PASS, INCONCLUSIVE, REFUSED, FAIL, ERROR), or likewise for
   the precision of its recipe (PASS, INCONCLUSIVE, FAIL) where both have one;
2. its pooled rmse exceeds hypot(1.10·rmse_old, 0.05·u·truth_rms), with u the output format's unit roundoff;
3. its rmse was finite and no longer is, or more than 1.10 times as many elements have the wrong class;
4. a kind of hazard is observed that was not;
5. the run no longer has it, though it was selected.

Why 1.10: the same code differs by up to 3 % in RMSE between ISAs, which sum in another order. Why the second
term: where nearly all elements are exact, rmse is a few that round the other way, and doubles by chance.
Their mean square adds to the rest, hence hypot. A plain sum would hide 15 % wherever rmse < u·truth_rms, and
there lies every output that is rounded once and correctly (about 0.4·u·truth_rms); with hypot, 15 % shows
from 0.15·u·truth_rms upwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.formats import get_format
from harness.gate.baseline import UPDATE, Key, Pooled, pool_records
from harness.gate.scope import ALL, Selected
from harness.recipe import get_recipe
from harness.records import Record, Status
from harness.report.words import clean, clip

HEADROOM = 1.10
FLOOR = 0.05
_DIAGNOSIS = 300  # characters
# From best to worst: to refuse is worse than to be unsure, and better than to be wrong.
_ORDER = (Status.PASS, Status.INCONCLUSIVE, Status.REFUSED, Status.FAIL, Status.ERROR)
_PRECISION = (Status.PASS, Status.INCONCLUSIVE, Status.FAIL)
_TELLING = (Status.PASS, Status.FAIL, Status.ERROR)  # the others say nothing about the numbers


@dataclass(frozen=True)
class Outcome:
    """What the comparison found, a line each. `compared` cells stand in both; `told` of them ended, in this
    run, in PASS, FAIL or ERROR for some seed. Vanished cells are among the regressions too, unless nothing
    was compared; those of the baseline that were not selected are counted in a note alone."""

    compared: int
    told: int
    regressions: tuple[str, ...]
    improvements: tuple[str, ...]
    new: tuple[str, ...]
    vanished: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 no regression, 1 regressions, 3 nothing compared (or nothing but refusals and INCONCLUSIVE)."""
        if self.regressions:
            return 1
        return 0 if self.told else 3

    @property
    def text(self) -> str:
        """Regressions first. Ends with a newline."""
        worse = f"{len(self.regressions)} regressions"
        verdict = {0: "no regression", 1: worse, 3: "nothing compared, not a pass"}
        lines = [f"gate: {verdict[self.exit_code]}; {self.compared} cells of this run stand in the baseline"]
        sections = (("REGRESSION", self.regressions), ("improved", self.improvements), ("new", self.new))
        lines += [f"{word}: {line}" for word, found in sections for line in found]
        lines += [f"vanished: {line}" for line in self.vanished if not self.compared]
        return "\n".join([*lines, *(f"note: {line}" for line in self.notes)]) + "\n"


def compare(records: Iterable[Record], baseline: Mapping[Key, Pooled], selected: Selected = ALL) -> Outcome:
    """Compare what is selected of a run and of a baseline by the rules above.

    Raises ValueError, in one line, where a cell's seeds differ from the baseline's or hold one twice.
    """
    run = pool_records(r for r in records if selected(r.group_key))
    outside = sum(not selected(key) for key in baseline)
    baseline = {key: cell for key, cell in baseline.items() if selected(key)}
    pairs = [(run[key], baseline[key]) for key in sorted(run) if key in baseline]
    regressions: list[str] = []
    improvements: list[str] = []
    for new, old in pairs:
        _same_seeds(new, old)
        worse, better = _changes(new, old)
        regressions += [f"{new}: {what}" for what in worse]
        improvements += [] if worse else [f"{new}: {what}" for what in better]
    vanished = tuple(str(baseline[key]) for key in sorted(baseline) if key not in run)
    if pairs:
        regressions += [f"{name}: in the baseline, not in this run" for name in vanished]
    return Outcome(
        compared=len(pairs),
        told=sum(any(new.status.get(s.value) for s in _TELLING) for new, _ in pairs),
        regressions=tuple(regressions),
        improvements=tuple(improvements),
        new=tuple(str(run[key]) for key in sorted(run) if key not in baseline),
        vanished=vanished,
        notes=(*_notes(pairs), *([f"{outside} cells of the baseline were not selected"] if outside else [])),
    )


def _same_seeds(new: Pooled, old: Pooled) -> None:
    if new.seeds != old.seeds:
        here, there = (", ".join(map(str, cell.seeds)) for cell in (new, old))
        advice = f"run with the same --seeds, or make the baseline anew with {UPDATE}"
        raise ValueError(f"{new} ran with seeds {here}, its baseline with {there}; {advice}")


def _changes(new: Pooled, old: Pooled) -> tuple[list[str], list[str]]:
    """What got worse, what got better."""
    worse: list[str] = []
    better: list[str] = []
    for name, order in (("status", _ORDER), ("precision", _PRECISION)):
        change = _worsened(getattr(new, name), getattr(old, name), order)
        if change and (name == "status" or (new.precision and old.precision)):
            (worse if change > 0 else better).append(_status(name, new, old))
    if _exceeds(new, old):
        worse.append(_figures(new, old))
    elif _exceeds(old, new):
        better.append(_figures(new, old))
    if new.mismatches > HEADROOM * old.mismatches:
        worse.append(f"elements of the wrong class: {old.mismatches} → {new.mismatches}")
    for kind in sorted(set(new.hazards) - set(old.hazards)):
        worse.append(f"{kind} observed {new.hazards[kind]} times, never in the baseline")
    if worse and new.diagnosis:
        worse[0] += f": {clean(clip(new.diagnosis, _DIAGNOSIS))}"
    return worse, better


def _worsened(new: Mapping[str, int], old: Mapping[str, int], order: Sequence[Status]) -> int:
    """Positive where, for some status, more seeds ended there or worse; negative where only fewer did."""
    more = [
        sum(new.get(s.value, 0) - old.get(s.value, 0) for s in order[rank:]) for rank in range(1, len(order))
    ]
    return max(more) if max(more) > 0 else min(more)


def _status(name: str, new: Pooled, old: Pooled) -> str:
    told = f"{name} {_counts(getattr(old, name))} → {_counts(getattr(new, name))}"
    if name == "status" and not (new.ratio is None and old.ratio is None):
        told += f" (error ÷ expected {_arrow(old.ratio, new.ratio)})"
    return told


def _counts(met: Mapping[str, int]) -> str:
    return " ".join(f"{name} {n}" for name, n in met.items())


def _exceeds(new: Pooled, old: Pooled) -> bool:
    """Whether `new` has the larger error, beyond what another machine could explain. A figure that is missing
    or not finite is worse than any that is; two such are equal."""
    if old.rmse is None or not math.isfinite(old.rmse):
        return False
    if new.rmse is None or not math.isfinite(new.rmse):
        return True
    truth = old.truth_rms if old.truth_rms is not None and math.isfinite(old.truth_rms) else 0.0
    return new.rmse > math.hypot(HEADROOM * old.rmse, FLOOR * _roundoff(new.recipe) * truth)


def _roundoff(recipe: str) -> float:
    """Of the output's format. A user's recipe is not known here: FP32's is small enough never to hide
    much."""
    try:
        return get_format(get_recipe(recipe).out_format).unit_roundoff
    except ValueError:
        return get_format("fp32").unit_roundoff


def _figures(new: Pooled, old: Pooled) -> str:
    told = f"rmse {_arrow(old.rmse, new.rmse)}, rel_l2 {_arrow(old.rel_l2, new.rel_l2)}"
    if new.ratio is None and old.ratio is None:
        return told
    return f"{told}, error ÷ expected {_arrow(old.ratio, new.ratio)}"


def _arrow(old: float | None, new: float | None) -> str:
    shown = " → ".join("none" if v is None else f"{v:.3g}" for v in (old, new))
    if old and new and math.isfinite(old) and math.isfinite(new):
        return f"{shown} ({new / old - 1:+.0%})"
    return shown


def _notes(pairs: Sequence[tuple[Pooled, Pooled]]) -> tuple[str, ...]:
    notes = []
    for what in ("device", "isa"):
        here, there = ({clean(getattr(pair[side], what)) for pair in pairs} for side in (0, 1))
        if here != there:
            names = f"{', '.join(sorted(here))}, the baseline's is {', '.join(sorted(there))}"
            notes.append(f"{what} is {names}: same rules, the headroom of {HEADROOM - 1:.0%} covers it")
    for what, meaning in (("recipe_digest", "the recipe"), ("inputs", "the inputs")):
        changed = sum(getattr(new, what) != getattr(old, what) for new, old in pairs)
        if changed:
            notes.append(f"{meaning} changed in {changed} cells: other things are compared; see {UPDATE}")
    return tuple(notes)
