"""Which fault is it? The one that explains most of the error, weighed by what was expected.

For an error e with expected variance σ² a fault of output g_F removes, per head and row,

    in degrees      ⟨e, g⟩²/⟨g, g⟩           θ̂ = ⟨e, g⟩/⟨g, g⟩, g a direction
    there or not    2⟨e, g⟩ − ⟨g, g⟩         g = o_F − o

of ⟨e, e⟩, all sums weighed by 1/σ². What is compared is the error less that of the twin that leaves least of it, so
that what the recipe does to every kernel plays no part. Two faults explain it equally when the difference is below what
the threshold of a single statistic could tell, τ², or below 1 % of it.

A fault may be in some heads or rows alone: then those count in which it is significant by itself (gain > τ²), and the
narrower place is told when it explains half as much again. What no fault explains may still be as large, element by
element, as another precision makes it (`harness.likeness`), or be a factor of each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from harness.directions import Call
from harness.likeness import Likeness, likest
from harness.misread import HONEST, misread
from harness.part import Part, choose
from harness.quantize import Stored
from harness.records import Diagnosis
from harness.significance import threshold
from harness.suspects import Setting, Suspect, Trial
from harness.unnamed import FEW, MOST, NOTHING, PLACES, few_elements, nothing, of_a_twin

__all__ = ["NOTHING", "diagnose"]

EXPLAINS = 0.5  # of what can be explained of the error, below which a fault does not explain it
TIE, SAME = 0.01, 1e-6
NARROWER = 1.5  # how much more a fault in some places must explain than one everywhere
RIVALS = 4
SIGMAS = 6  # of a sum of squares, that chance does not reach


@dataclass(frozen=True)
class _Found:
    """A suspect in the places where it explains something: `scope` all, heads or rows."""

    suspect: Suspect
    gain: float
    scope: str = "all"
    where: str = ""

    @property
    def what(self) -> str:
        return self.suspect.what + self.where


def diagnose(
    call: Call, out: Tensor, stored: tuple[Stored, Stored, Stored], sizes: Mapping[str, float],
    settings: dict[str, Setting] | None = None,
) -> Diagnosis:  # fmt: skip
    """The likeliest fault of `out` `[B, H, L, E]`, or that none known explains it. Non-finite places are left out.
    `sizes`: of the directions, as fitted to all rows looked at; a part's own are the less certain the smaller it is.
    `settings` keeps the last of the call's parts, with all that is suspected there, for outputs that fail next.
    """
    part, settings = choose(call, out), {} if settings is None else settings
    if part.key not in settings:
        settings.clear()
        settings[part.key] = Setting(part, call, stored)
    trial = Trial(settings[part.key], out)
    if not trial.total:  # nothing is left to explain, and no share of it can be told
        return of_a_twin(trial) or nothing(None, trial, part)
    suspects = list(trial.suspects())
    tau = threshold(max(len(suspects), 1))
    found = _best(suspects, part, tau)
    best, total = found[0] if found else None, trial.total
    if best is not None and best.gain > tau**2 and best.gain / total >= _least(trial, best):
        if best.gain / total < MOST * best.suspect.explainable and _large(trial):
            # A lost block explains half of the error of one whose values are doubled.
            other = misread(call, out, trial)
            if other is not None and MOST * other.explained > best.gain / total:
                return other
            if best.suspect.whole and best.scope == "all" and best.gain < MOST * total - HONEST * trial.noise:
                return _unnamed(best, trial, part, tau)  # a fault that is there leaves nothing but rounding
        rivals = tuple(f.suspect.name for f in found[1:] if _equal(best, f, tau))
        size = best.suspect.size
        if best.suspect.degrees and best.scope == "all":
            size = sizes.get(best.suspect.name, size)
        return Diagnosis(
            best.suspect.name, best.what, size, best.gain**0.5, min(1.0, best.gain / total), rivals[:RIVALS]
        )
    return _unnamed(best, trial, part, tau, lambda: misread(call, out, trial))


def _unnamed(
    best: _Found | None,
    trial: Trial,
    part: Part,
    tau: float,
    other: Callable[[], Diagnosis | None] = lambda: None,
) -> Diagnosis:
    """What no fault explains: a right implementation's own error, a likeness, `other`, or where it lies."""
    return (
        of_a_twin(trial)
        or _alike(trial)
        or _row_by_row(trial, tau)
        or few_elements(trial, part)
        or other()
        or nothing(None if best is None else (best.suspect, best.what, best.gain), trial, part)
    )


def _least(trial: Trial, found: _Found) -> float:
    """The share a fault must explain of an error that is larger than what is expected of two honest runs, or that a
    right implementation makes too: half of what it could if it were all that is wrong."""
    return EXPLAINS * found.suspect.explainable if _large(trial) or of_a_twin(trial) else 0.0


def _large(trial: Trial) -> bool:
    """Whether the error is larger than what is expected of two honest runs."""
    return trial.total > 4 * trial.noise


def _equal(best: _Found, other: _Found, tau: float) -> bool:
    return abs(best.gain - other.gain) < max(tau**2, TIE * max(best.gain, other.gain))


def _best(suspects: list[Suspect], part: Part, tau: float) -> list[_Found]:
    """In the widest scope that explains nearly as much as narrower ones, one for each name, by gain; of those that
    explain as much as the first, one that is there or not comes first: its size was not fitted."""
    chosen: list[_Found] = []
    for scope in ("all", "heads", "rows"):
        ranked = _ranked([f for s in suspects if (f := _in_scope(s, scope, part, tau)) is not None], tau)
        if ranked and (not chosen or ranked[0].gain > NARROWER * max(chosen[0].gain, 0.0) + tau**2):
            chosen = ranked
    return chosen


def _ranked(found: list[_Found], tau: float) -> list[_Found]:
    best: dict[str, _Found] = {}
    for f in found:
        if f.suspect.name not in best or f.gain > best[f.suspect.name].gain:
            best[f.suspect.name] = f
    ranked = sorted(best.values(), key=lambda f: -f.gain)
    order = {name: i for i, name in enumerate(best)}

    def place(f: _Found) -> tuple[float, ...]:
        if not _equal(ranked[0], f, tau):
            return (1,)  # by gain, as they are
        same = f.gain >= (1 - SAME) * ranked[0].gain  # one fault under two names
        return (0, f.suspect.fitted, 0, order[f.suspect.name]) if same else (0, f.suspect.fitted, 1, -f.gain)

    return sorted(ranked, key=place)


def _in_scope(s: Suspect, scope: str, part: Part, tau: float) -> _Found | None:
    """The suspect's gain everywhere, or in the heads or rows in which it is significant by itself."""
    if scope == "all":
        if s.within is not None and not bool(s.within.all()):
            return None
        return _Found(s, float(s.gain(s.power.sum(), s.cross.sum())))
    if s.power.shape[0] * s.power.shape[1] < 2 and scope == "heads":
        return None
    power, cross = (x.sum(-1) if scope == "heads" else x for x in (s.power, s.cross))
    gains = s.gain(power, cross)
    # As many tests again, of the difference of two honest runs.
    hit = gains > 2 * (tau**2 + 2 * math.log(max(gains.numel(), 1)))
    if s.within is not None:
        hit = hit & (s.within.all(-1) if scope == "heads" else s.within)
    share = float(hit.double().mean()) if hit.numel() else 0.0
    # A size of its own in many rows is no place: their denominators are imprecise.
    if not share or (share == 1 and not s.degrees) or (scope == "rows" and s.degrees and share > FEW):
        return None
    narrowed = s.narrowed(hit if scope == "rows" else hit[..., None].expand_as(s.power))
    return _Found(narrowed, float(gains[hit].sum()), scope, _told(hit, scope, part))


def _told(hit: Tensor, scope: str, part: Part) -> str:
    """Where, in the numbers of the whole call."""
    count = int(hit.sum())
    if bool(hit.all()):
        return f", in each {scope[:-1]} by its own size"
    places = []
    for index in hit.nonzero()[:PLACES].tolist():
        b, h = int(part.batches[index[0]]), part.heads.start + index[1]
        row = f" i={part.number(index[2])}" if scope == "rows" else ""
        places.append(f"b={b} h={h}{row}")
    more = " …" if count > PLACES else ""
    return f", in {count} of {hit.numel()} {scope} alone ({', '.join(places)}{more})"


def _alike(trial: Trial) -> Diagnosis | None:
    like: Likeness | None = likest(trial)
    if like is None:
        return None
    return Diagnosis(like.name, like.what, 1.0, like.gain**0.5, like.gain / trial.against_truth)


def _row_by_row(trial: Trial, tau: float) -> Diagnosis | None:
    """A factor for each row: no fault by itself, but the trace of a denominator that is imprecise. Its gain is less
    what as many factors find in noise."""
    shrink = trial.direction("shrink")
    power, cross = shrink.power.flatten(), shrink.cross.flatten()
    power, cross = power[power > 0], cross[power > 0]
    gain = float((cross * cross / power).sum()) - len(power) - SIGMAS * (2 * len(power)) ** 0.5
    if gain <= tau**2 or gain < EXPLAINS * trial.total:
        return None
    size = float((cross / power).square().mean().sqrt())
    what = "each row is off by a factor of its own, as its sum is"
    return Diagnosis("row sum", what, size, gain**0.5, gain / trial.total)
