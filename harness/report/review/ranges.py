"""The range ledger of a review: headroom, saturation, flush and lost mass by stage."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.recipe import LAYER_STAGES, STAGES, TENSORS
from harness.records import Hazard, HazardKind, Record
from harness.report import words
from harness.report.review import figures
from harness.report.review.blocks import Block, Bullets, Paragraph, Section, Value, table
from harness.report.review.material import Material
from harness.report.tables import spoils

_ORDER = {stage: i for i, stage in enumerate((*TENSORS, *STAGES, *LAYER_STAGES))}
_HEADERS = (
    "recipe", "stage (format)", "runs", "headroom, bits", "past the max", "flushed", "lost mass", "also",
    "worst at",
)  # fmt: skip
_SHOWN = (HazardKind.OVERFLOW, HazardKind.SATURATION, HazardKind.FLUSH, HazardKind.NEAR_OVERFLOW)
Met = list[tuple[Hazard, Record]]


def ledger(m: Material) -> Section:
    told = (
        "What the runs met, by stage; of implementations that did not fail. Headroom: log2(format's max ÷ largest"
        " magnitude), 0 where an amax scale fills the format, below 0 past it. Past the max: overflowed or saturated."
        " Shares are of the elements of the worst run, lost mass of all probability. A stage that is not listed met"
        " nothing to tell."
    )
    blocks: list[Block] = [Paragraph(told)]
    for title, cases in (("real activations", m.real), ("hard cases", m.hard)):
        rows = _rows(m, cases)
        if rows:
            right = range(2, len(_HEADERS) - 2)
            blocks.append(table(f"Range ledger on {title}", _HEADERS, rows, right=right))
        elif cases:
            blocks.append(Paragraph(f"On {title} no stage met anything to tell."))
    kinds = dict.fromkeys(h.kind for r in _sound(m, m.cases) for h in r.hazards)
    blocks += [Bullets(tuple(f"{k.value}: {k.advice}" for k in kinds))] if kinds else []
    return Section("ledger", "Range ledger", tuple(blocks))


def _sound(m: Material, cases: Iterable[str]) -> Iterable[Record]:
    return (r for case in cases for recipe in m.asked.recipes for r in m.sound(case, recipe))


def _rows(m: Material, cases: Sequence[str]) -> list[list[Value | str]]:
    found: dict[tuple[str, str, str], Met] = defaultdict(list)
    for r in _sound(m, cases):
        for h in r.hazards:
            if h.source == "observed":
                found[h.stage, h.format, r.recipe].append((h, r))
    order = {recipe: i for i, recipe in enumerate(m.asked.recipes)}
    keys = sorted(found, key=lambda k: (order[k[2]], _ORDER.get(k[0], len(_ORDER)), k[1]))
    return [_row(*key, found[key]) for key in keys]


def _row(stage: str, fmt: str, recipe: str, met: Met) -> list[Value | str]:
    runs = len({r.key for _, r in met})
    others = sorted({h.kind.value for h, _ in met if h.kind not in _SHOWN})
    near = any(h.kind is HazardKind.NEAR_OVERFLOW for h, _ in met)
    worst, record = min(met, key=lambda e: (not spoils(e[0]), _bits(e[0]), -e[0].share))
    where = "" if worst.where is None else f" at b,h,i,j = {words.index(worst.where)}"
    place = f"{record.case}, {record.implementation}{where}"
    lost = figures.small_share(max((h.lost_mass for h, _ in met), default=0.0))
    if any(h.kind is HazardKind.FLUSH and spoils(h) for h, _ in met):
        lost = replace(lost, tone="bad")
    return [
        recipe, f"{stage} ({fmt})", Value(str(runs), runs), figures.bits(min(_bits(h) for h, _ in met)),
        _share(met, HazardKind.OVERFLOW, HazardKind.SATURATION), _share(met, HazardKind.FLUSH),
        lost, ", ".join([*(["near overflow"] if near else []), *others]) or words.NONE, place,
    ]  # fmt: skip


def _bits(hazard: Hazard) -> float:
    return -math.inf if math.isnan(hazard.headroom_bits) else hazard.headroom_bits


def _share(met: Met, *kinds: HazardKind) -> Value:
    shares = [h.share for h, _ in met if h.kind in kinds]
    value = figures.small_share(max(shares, default=0.0))
    bad = HazardKind.FLUSH not in kinds and any(shares)
    return replace(value, tone="bad") if bad else value
