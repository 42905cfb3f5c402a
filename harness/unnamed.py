"""What is said of an error that no fault explains: that a right implementation errs alike, or where it lies."""

from __future__ import annotations

from torch import Tensor

from harness.compare import unravel
from harness.part import NORMAL, Part
from harness.records import Diagnosis
from harness.significance import threshold
from harness.suspects import Suspect, Trial

NOTHING = "unknown"
PLACES = 4  # that are told
MOST = 0.9  # of an error
FEW = 0.25  # of the rows, that may each have a size of their own


def of_a_twin(trial: Trial) -> Diagnosis | None:
    """An implementation known to be right that errs alike: its error is no fault, so none is named. Where all that is
    looked at is as it should be, the fault lies elsewhere."""
    if not trial.noise:
        return None
    left, beside, part = trial.total, trial.against_truth, trial.setting.part
    large = beside > NORMAL * trial.noise
    if left and not (large and left < (1 - MOST) * beside):
        return None
    right = f"{trial.setting.arrangement(trial.nearest)}, known to be right,"
    if not large and not trial.setting.is_whole:
        heads, rows = part.heads, f"{part.number(0)} to {part.number(trial.truth.shape[2] - 1)}"
        looked = f"heads {heads.start} to {heads.stop - 1}, rows {rows}"
        what = (
            f"no name: in the part looked at ({looked}) {right} gives the same bits; the fault lies elsewhere"
        )
    elif not left:
        what = f"no fault is named: {right} gives the same bits, so that what is expected may be too small"
    else:
        share = f"{1 - left / beside:.0%} of the error is its own too"
        what = f"no fault is named: {right} errs alike ({share}), so that what is expected may be too small"
    return Diagnosis(NOTHING, what, 0.0, 0.0, 0.0)


def few_elements(trial: Trial, part: Part) -> Diagnosis | None:
    """Most of the error in a handful of elements, each beyond chance: they were written wrong, or not at all."""
    energy = trial.e.square() * trial.weight
    top = energy.flatten().topk(min(PLACES, energy.numel()))
    held = top.values.cumsum(0)
    if not len(held) or not trial.total or float(held[-1]) < MOST * trial.total:
        return None
    count = int((held < MOST * trial.total).sum()) + 1
    # What remains of a right output may be a few values that were rounded the other way.
    if float(top.values[count - 1]) <= threshold(energy.numel()) ** 2:
        return None
    b, h, i, c = unravel(int(top.indices[0]), energy.shape)
    first = f"b={int(part.batches[b])} h={part.heads.start + h} i={part.number(i)} c={c}"
    what = f"{count} of {energy.numel()} elements {'is' if count == 1 else 'are'} wrong, first {first}"
    size, share = float(trial.e[b, h, i, c]), float(held[count - 1]) / trial.total
    return Diagnosis("single elements", what, size, float(top.values[0]) ** 0.5, share)


def nothing(best: tuple[Suspect, str, float] | None, trial: Trial, part: Part) -> Diagnosis:
    """No name; of the suspect that explains most, with its sentence and gain, how much that is."""
    if not trial.noise:
        what = "no fault is named: the recipe promises nothing in the part that is looked at"
        return Diagnosis(NOTHING, what, 0.0, 0.0, 0.0)
    where = _concentrated(trial, part)
    if best is None or best[2] <= 0:
        return Diagnosis(NOTHING, f"no known fault explains it{where}", 0.0, 0.0, 0.0)
    suspect, what, gain = best
    share = gain / trial.total
    near = f"; nearest: {what} ({suspect.name}), {share:.0%}"
    return Diagnosis(NOTHING, f"no known fault explains it{where}{near}", 0.0, 0.0, share)


def _concentrated(trial: Trial, part: Part) -> str:
    """The rows, heads or channels that hold most of an error, when they are few of many."""
    energy = trial.e.square() * trial.weight
    for name, x in _sums(energy):
        count = max(1, int(FEW * x.numel()))
        if x.numel() < 1 / FEW or not trial.total:
            continue
        top = x.flatten().topk(count)
        if float(top.values.sum()) < MOST * trial.total:
            continue
        first = unravel(int(top.indices[0]), x.shape)
        if name == "channels":
            return f"; it lies in few channels, most in c={first[0]}"
        row = f" i={part.number(first[2])}" if name == "rows" else ""
        return f"; it lies in few {name}, most in b={int(part.batches[first[0]])} h={part.heads.start + first[1]}{row}"
    return ""


def _sums(energy: Tensor) -> tuple[tuple[str, Tensor], ...]:
    return ("rows", energy.sum(-1)), ("heads", energy.sum((2, 3))), ("channels", energy.sum((0, 1, 2)))
