"""Where a recipe's error arises: one rounding on at a time, and one off at a time.

    alone_i   = ‖output with rounding i alone − truth‖         share_i = alone_i² / whole²
    without_i = ‖output with all roundings but i − truth‖      1 − without_i² / whole²

The truth is the exact one, of the unrounded inputs; everything that is off runs in FP64 (`harness.switchboard`), whose
own roundings are nothing beside FP32's. Squares pool over seeds and heads.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness import registry, switchboard
from harness.arithmetic import Block
from harness.attention.algorithm import Algorithm
from harness.case import Case
from harness.devices import use_device
from harness.evidence import Attribution, StageShare
from harness.hazards import RangeLedger, storage_hazards
from harness.inputs import make_inputs
from harness.machine import machine
from harness.operands import Extras
from harness.quantize import Stored, quantize
from harness.recipe import TENSORS, Recipe, get_recipe
from harness.records import Hazard, HazardKind
from harness.shares import BAND, ERRORS, GROUPS, SMALL, WIDEST, Balance, Sums, balance, measure, pool
from harness.truth import reference

# Where a rounding alone has less than this share, switching it off moves the squared error by less than 2·√NOTHING of
# it, 6e-5: that run is not made.
NOTHING = 1e-9
_MARGIN = f"{BAND} and {ERRORS} standard errors, at most {WIDEST},"
KEPT_BYTES = 2**28  # of outputs that recipes share (an FP32 stage alone, say)


def attribute(
    case: Case, implementation: str, recipe: str | Recipe, seeds: int = 3, device: str = "cpu"
) -> Attribution:
    """The error of one case, implementation and recipe by stage, pooled over `seeds` (one where all draws are equal).

    NaN and ±Inf: an element that is not finite in one of the runs, or in the truth, takes no part in any figure; how
    many the whole lost is in the statement. Where none is left, figures are NaN and `rel_l2` is +Inf.

    Raises ValueError for an implementation that is no algorithm over `Arithmetic` (a black box has no stages to
    switch), a case it refuses or that is a whole layer, and as `pipeline.plan` does.
    """
    return next(attributions(case, [implementation], [get_recipe(recipe)], seeds, device))


def attributions(
    case: Case, implementations: Iterable[str], recipes: Iterable[Recipe], seeds: int = 3, device: str = "cpu"
) -> Iterator[Attribution]:
    """`attribute` for several on one case: inputs, truths and the runs that recipes share are made once."""
    if case.layer is not None:
        raise ValueError(f"{case.id} is a whole layer; allowed: cases of attention alone")
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise ValueError(f"seeds is {seeds!r}; allowed: an integer ≥ 1")
    chosen = [(name, algorithm(name)) for name in implementations]
    settings = [_Setting.make(case, seed, use_device(device)) for seed in range(case.draws(seeds))]
    recipes = list(recipes)
    for name, found in chosen:
        for setting in settings:
            setting.outputs.clear()
        for recipe in recipes:
            if refused := found.refusals(case.spec, case.shape, recipe, settings[0].extras.given):
                raise ValueError("; ".join(refused))
            yield _Attributed(case, name, found, recipe, settings, device).result()


def algorithm(name: str) -> Algorithm:
    """An implementation whose roundings can be switched. Raises ValueError naming those there are."""
    entry = registry.entry(name)
    found = registry.get(name) if entry.emulated else None
    if isinstance(found, Algorithm):
        return found
    names = ", ".join(e.name for e in registry.table().values() if e.emulated)
    raise ValueError(f"{name} has no stages to switch on and off: it is a black box; allowed: {names}")


@dataclass(frozen=True)
class _Setting:
    """One draw of a case: exact q, k, v and the truth of them. `outputs`: those of an algorithm, by what was on."""

    exact: tuple[Tensor, ...]
    extras: Extras
    truth: Tensor
    outputs: dict[object, Tensor] = field(default_factory=dict)

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device) -> _Setting:
        inputs = make_inputs(case, seed)
        q, k, v = (x.to(device) for x in inputs.tensors)
        extras = inputs.extras.to(device)
        return cls((q, k, v), extras, reference(q, k, v, case.spec, **extras.as_options()).out)


class _Met:
    """A watcher that notes which stages an algorithm has."""

    def __init__(self) -> None:
        self.stages: set[str] = set()

    def __call__(self, stage: str, before: Tensor, after: Tensor, block: Block) -> None:
        self.stages.add(stage)

    def stagnation(self, stage: str, held: Tensor, added: Tensor, after: Tensor) -> None:
        pass


@dataclass
class _Attributed:
    """One case, implementation and recipe."""

    case: Case
    name: str
    algorithm: Algorithm
    recipe: Recipe
    settings: list[_Setting]
    device: str

    def result(self) -> Attribution:
        case, recipe = self.case, self.recipe
        places, hazards = self._places(), list[Hazard]()
        heads = len(self.settings) * max(1, case.shape.batch * case.shape.heads)
        sums = pool([self._measure(s, places, -(-GROUPS // heads), hazards) for s in self.settings])
        whole = float(sums.gram[:, 0, 0].sum())
        stages = tuple(_stage(recipe, places, i, sums, whole) for i in range(len(places)))
        found = balance(sums) if whole > 0 and places else None
        best = min(
            range(len(places)), key=lambda i: (sums.lost_without[i], stages[i].without_rel_l2), default=None
        )
        rel_l2 = math.inf if sums.lost and not sums.elements else _rel(whole, sums.power)
        return Attribution(
            case.id, self.name, recipe.name, recipe.digest, len(self.settings), rel_l2,
            _rel(sums.left, sums.power), stages, math.fsum(s.alone_share for s in stages),
            found is not None and found.adds_up and not sums.lost,
            statement(places, sums, found, hazards),
            "" if best is None else places[best], rel_l2 if best is None else stages[best].without_rel_l2,
            machine(self.device), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), lost=sums.lost,
        )  # fmt: skip

    def _places(self) -> tuple[str, ...]:
        """What this algorithm rounds under this recipe, in the order data meets it."""
        met = _Met()
        self._run(self.settings[0], self._stored(self.settings[0]), frozenset(), met)
        there = {*TENSORS, switchboard.ACCUMULATION, *met.stages}
        return tuple(p for p in switchboard.PLACES if p in there and switchboard.rounds(self.recipe, p))

    def _stored(self, setting: _Setting) -> tuple[Stored, ...]:
        return tuple(quantize(x, t, self.recipe) for x, t in zip(setting.exact, TENSORS, strict=True))

    def _measure(self, setting: _Setting, places: tuple[str, ...], cuts: int, seen: list[Hazard]) -> Sums:
        q, k, v = stored = self._stored(setting)
        ledger = RangeLedger(self.case.shape, self.recipe)
        whole = self.algorithm.run_stored((q, k, v), self.case.spec, self.recipe, setting.extras, ledger)
        seen += [*storage_hazards(setting.exact, (q, k, v), self.recipe), *ledger.hazards()]
        everything = frozenset(places)

        def run(on: Iterable[str]) -> Tensor:
            return self._run(setting, stored, frozenset(on))

        out, own = whole.out.double(), run(places)
        alone = [run({p}) for p in places]
        least = NOTHING * _square(out, setting.truth)
        without = [
            own if _square(x, setting.truth) < least else run(everything - {p})
            for p, x in zip(places, alone, strict=True)
        ]
        left = run(everything & {switchboard.ACCUMULATION})
        return measure(setting.truth, out, own, left, alone, without, cuts)

    def _run(
        self, setting: _Setting, stored: tuple[Stored, ...], on: frozenset[str], watch: _Met | None = None
    ) -> Tensor:
        """The output with these roundings and no others, FP64."""
        base = switchboard.switched(self.recipe, on)
        key = None
        if watch is None and not on & {*TENSORS} and not self.recipe.rotate:
            limited = self.recipe.accumulator if switchboard.ACCUMULATION in on else None
            key = (base.digest, switchboard.ACCUMULATION in on, limited, self.recipe.base)
            if key in setting.outputs:
                return setting.outputs[key]
        q, k, v = (
            s if t in on else switchboard.unrounded(x, t, self.recipe)
            for t, s, x in zip(TENSORS, stored, setting.exact, strict=True)
        )
        make = switchboard.arithmetic(self.recipe, on)
        result = self.algorithm.run_stored(
            (q, k, v), self.case.spec, base, setting.extras, watch, arithmetic=make
        )
        out: Tensor = result.out.double()
        if key is not None and (len(setting.outputs) + 1) * out.nbytes <= KEPT_BYTES:
            setting.outputs[key] = out
        return out


def _square(x: Tensor, truth: Tensor) -> float:
    """NaN where one is not finite, which is less than nothing."""
    return float((x - truth).square().sum())


def _stage(recipe: Recipe, places: tuple[str, ...], i: int, sums: Sums, whole: float) -> StageShare:
    """Of place i. `without` is seen in the arithmetic that switches: as a part of its own whole, so that what it adds
    up in another order than the recipe's own run falls out."""
    alone = float(sums.gram[:, i + 1, i + 1].sum())
    kept = float(sums.without[i]) / sums.own if sums.own else _empty(sums, 1.0)
    share = alone / whole if whole else _empty(sums, 0.0)
    format_ = switchboard.format_of(recipe, places[i])
    return StageShare(
        places[i], format_, _rel(alone, sums.power), share, _rel(kept * whole, sums.power), 1 - kept,
        sums.lost_alone[i], sums.lost_without[i],
    )  # fmt: skip


def _empty(sums: Sums, without_error: float) -> float:
    """Of a whole without error; NaN where no element is left to err."""
    return without_error if sums.elements or not sums.lost else math.nan


def _rel(square: float, power: float) -> float:
    if math.isnan(square):
        return math.nan
    return math.sqrt(square / power) if power else (0.0 if square == 0 else math.inf)


def statement(
    places: tuple[str, ...], sums: Sums, found: Balance | None, hazards: Iterable[Hazard] = ()
) -> str:
    """One sentence on whether the shares add up, and where they do not, why."""
    if found is None:
        if sums.lost and not sums.elements:
            return "No output element is finite in every run: there is no error to share out."
        exact = "Every output element is exact" if places else "The recipe rounds nothing"
        return f"{exact} here: there is no error to share out."
    told = f"The shares sum to {found.sum:.2f}"
    if sums.lost:
        breaking = [p for p, n in zip(places, sums.lost_alone, strict=True) if n]
        by = f"; {' and '.join(breaking)} would do that alone" if breaking else ""
        return f"{told} over what is finite: {sums.lost} of {sums.all_elements} output elements are not{by}."
    if found.adds_up:
        return (
            f"{told}, which is 1 within {found.within:.2f} ({_MARGIN} over {found.groups} groups of rows):"
            " the roundings err independently."
        )
    if found.margin < abs(found.sum - 1):
        return f"{told}, not 1 within {found.within:.2f}: {_why(places, sums, found, hazards)}."
    return f"{told}: so few elements decide the error that chance alone could move it by {found.margin:.2f}."


def _named(places: tuple[str, ...], sets: Iterable[tuple[int, ...]]) -> str:
    return "; ".join(" and ".join(", ".join(places[i] for i in one).rsplit(", ", 1)) for one in sets)


def _why(places: tuple[str, ...], sums: Sums, found: Balance, hazards: Iterable[Hazard]) -> str:
    if found.twins and abs(found.once - 1) <= found.within:
        named = _named(places, found.twins)
        return f"{named} round the same numbers alike, and counted once they sum to {found.once:.2f}"
    # The whole is less than its parts though they do not cancel: some of them do not happen beside others.
    if found.alike and found.linear > found.sum > 1:
        return (
            f"{_named(places, found.alike)} round in part the same numbers one after the other, and the later find them"
            " rounded already"
        )
    gram = sums.gram.sum(0)
    heavy = {p for i, p in enumerate(places, 1) if float(gram[i, i]) > SMALL * float(gram[0, 0])}
    kinds = (HazardKind.OVERFLOW, HazardKind.SATURATION, HazardKind.FLUSH)
    lost = [h for h in hazards if h.kind in kinds and h.stage in heavy]
    pair = max(found.crossed, key=lambda p: abs(found.crossed[p]), default=None)
    missing = 1 - found.sum
    if pair is not None and found.crossed[pair] / missing >= 0.5:
        one, other = (places[i] for i in pair)
        said = (
            f"the errors of {one} and {other} are correlated, {found.crossed[pair]:+.2f} of the squared error"
        )
    elif abs(found.linear - 1) >= abs(missing) / 2:
        said = (
            "the errors are too large to superpose, the sum of the single ones has"
            f" {found.linear:.2f} times the squared error of all together"
        )
    else:
        said = "errors of several stages are correlated"
    if lost:
        worst = max(lost, key=lambda h: h.share)
        said += (
            f" ({worst.kind.value} in {worst.stage}, {worst.format}: {worst.count} of {worst.total} values)"
        )
    return said
