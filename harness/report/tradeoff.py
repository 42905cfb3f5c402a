"""What each recipe's accuracy costs: its error beside what its K and V weigh, and how long they make a decode step.

The cost is of one stated model, modelled from sizes (`harness.cost`): a recipe enters by the formats and scales of K
and V and by its output's. Nothing of it was timed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from harness.cost.models import get_model
from harness.cost.phases import decode_step
from harness.cost.roofline import Rates
from harness.cost.units import show_rate, show_tokens
from harness.formats import get_format
from harness.recipe import RECIPES
from harness.records import Record
from harness.report.model import GroupTable, Tradeoff, TradeoffRow
from harness.report.plots import TradeoffPoint, tradeoff_svg

MODEL, CONTEXT, WEIGHTS, BANDWIDTH = "llama-3.1-8b", 32 * 1024, "bf16", 2e12
PREFERRED, YARDSTICK = "real", "bf16"
STATED = f"{MODEL}, one sequence of {show_tokens(CONTEXT)} keys, weights in {WEIGHTS}, {show_rate(BANDWIDTH, 'B/s')}"


def tradeoff(groups: Sequence[GroupTable], records: Iterable[Record]) -> Tradeoff | None:
    """Of the real cases, else of the first group. None without groups. A recipe that is not built in, or is called as
    one that is and is another, has no cost here."""
    if not groups:
        return None
    group = next((g for g in groups if g.group == PREFERRED), groups[0])
    digests = {r.recipe: r.recipe_digest for r in records}
    rows = []
    for name, cost in zip(group.recipes, group.costs, strict=True):
        known = name in RECIPES and RECIPES[name].digest == digests.get(name)
        rows.append(TradeoffRow(name, cost.total, *(modelled(name) if known else (math.nan, math.nan))))
    return Tradeoff(group.group, group.cases, STATED, modelled(YARDSTICK)[0], tuple(rows))


@lru_cache
def modelled(recipe: str) -> tuple[float, float]:
    """Bytes of K and V a token, over all layers, and seconds of a decode step that the memory limits."""
    work = decode_step(get_model(MODEL), RECIPES[recipe], get_format(WEIGHTS), CONTEXT)
    seconds = Rates(BANDWIDTH).time_s(work.total_flops, work.moved)
    return work.kv_cache / CONTEXT, math.nan if seconds is None else seconds


@dataclass(frozen=True)
class Plot:
    """What the plot of a trade-off shows. `identifier` stands in its file: the same points, the same plot."""

    title: str
    points: tuple[TradeoffPoint, ...]

    @property
    def identifier(self) -> str:
        return "sha256:" + hashlib.sha256(repr((self.title, self.points)).encode()).hexdigest()[:32]

    def is_in(self, path: Path) -> bool:
        """Whether the file, whoever wrote it, is a plot of these points."""
        try:
            return f">{self.identifier}<" in path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return False

    def svg(self) -> str:
        """Raises MissingExtra without matplotlib."""
        return tradeoff_svg(self.points, self.title, self.identifier)


def plot(shown: Tradeoff | None) -> Plot | None:
    """None where fewer than two recipes have both an error and a cost."""
    points = tuple(
        TradeoffPoint(row.recipe, row.total.rel_l2, row.kv_bytes, row.decode_s)
        for row in (() if shown is None else shown.rows)
        if all(math.isfinite(x) and x > 0 for x in (row.total.rel_l2, row.kv_bytes))
    )
    if shown is None or len(points) < 2:
        return None
    return Plot(f"Accuracy beside cost: {shown.group}; {shown.stated}", points)
