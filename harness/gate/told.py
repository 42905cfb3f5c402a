"""How findings are worded, a line each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from harness.gate.drift import Drift, Found, Group, Pair
from harness.gate.pooled import Pooled
from harness.report.words import clean, many

REFRESH = 'python -m harness gate --update --reason "…"'


def status(name: str, new: Pooled, old: Pooled) -> str:
    """A change of `status` or `precision`, in seeds."""
    told = f"{name} {counts(getattr(old, name))} → {counts(getattr(new, name))}"
    if name == "status" and not (new.ratio is None and old.ratio is None):
        told += f" (error ÷ expected {arrow(old.ratio, new.ratio)})"
    return told


def counts(met: Mapping[str, int]) -> str:
    return " ".join(f"{name} {n}" for name, n in met.items())


def figures(new: Pooled, old: Pooled) -> str:
    told = f"rmse {arrow(old.rmse, new.rmse)}, rel_l2 {arrow(old.rel_l2, new.rel_l2)}"
    if new.ratio is None and old.ratio is None:
        return told
    return f"{told}, error ÷ expected {arrow(old.ratio, new.ratio)}"


def arrow(old: float | None, new: float | None) -> str:
    shown = " → ".join("none" if v is None else f"{v:.3g}" for v in (old, new))
    if old and new and math.isfinite(old) and math.isfinite(new):
        return f"{shown} ({new / old - 1:+.0%})"
    return shown


def of_cell(drift: Drift, sign: int) -> str:
    seeds = many(drift.pairs, "paired seed")
    return (
        f"rmse {_percent(drift.rise, sign)} beyond the floor in {seeds} (limit {_percent(drift.limit, sign)})"
    )


def of_group(group: Group, drift: Drift, sign: int) -> str:
    name = " · ".join(map(clean, group))
    told = f"rmse {_percent(drift.rise, sign)} beyond the floor over {drift.of} cases and {drift.pairs} pairs"
    told += f" (limit {_percent(drift.limit, sign)})"
    return f"all cases · {name}: {told}, {drift.cases} of them beyond their own; most in {clean(drift.most)}"


def _percent(rise: float, sign: int) -> str:
    """Of a factor 1 + rise, upwards, or downwards for sign −1."""
    return f"{rise if sign > 0 else 1 / (1 + rise) - 1:+.1%}"


def not_paired(reasons: Sequence[str]) -> str:
    """Of how many cells the paired test said nothing, by reason; empty where it compared all."""
    met = Counter(filter(None, reasons))
    if not met:
        return ""
    why = ", ".join(reason if n == met.total() else f"{n}: {reason}" for reason, n in met.most_common())
    cells = f"{met.total()} of {many(len(reasons), 'cell')}"
    return (
        f"no paired comparison was possible in {cells} ({why}): there by verdicts and error ÷ expected alone"
    )


def notes_on(pairs: Sequence[Pair], found: Found) -> tuple[str, ...]:
    """What a reader has to know about what was compared."""
    here, there = (sorted({clean(pair[side].machine_class) for pair in pairs}) for side in (0, 1))
    notes = []
    if here != there:
        old = ", ".join(name or "unknown (an older baseline)" for name in there)
        compared = "verdicts and error ÷ expected are compared, not rmse"
        notes.append(f"machine class {', '.join(here)}, the baseline's is {old}: {compared}")
    if found.moved:
        notes.append(f"rmse moved in {found.moved} of {found.pairs} pairs, by {found.widest:.2%} at most")
    for what, meaning in (("recipe_digest", "the recipe"), ("inputs", "the inputs")):
        changed = sum(getattr(new, what) != getattr(old, what) for new, old in pairs)
        if changed:
            notes.append(f"{meaning} changed in {changed} cells: other things are compared; see {REFRESH}")
    return tuple(notes)
