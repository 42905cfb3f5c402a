"""The section on cost: bytes and times modelled from sizes, beside the error."""

from __future__ import annotations

import math

from harness.cost.units import show_bytes, show_rate, show_tokens
from harness.report import words
from harness.report.plots import TradeoffPoint, tradeoff_svg
from harness.report.review import figures
from harness.report.review.blocks import Block, Chart, Paragraph, Section, Table, Value, table
from harness.report.review.drawing import themed
from harness.report.review.material import Material

TITLE = "Accuracy against cost"


def cost(m: Material) -> Section:
    s = m.asked.setting
    rate = "" if s.rates.bandwidth is None else f", memory at {show_rate(s.rates.bandwidth, 'B/s')}"
    compute = "" if s.rates.flops is None else f", products at {show_rate(s.rates.flops, 'FLOP/s')}"
    told = (
        f"Modelled from sizes, not measured: {s.model.name}, context {show_tokens(s.context)}, batch {s.batch}, weights"
        f" {s.weights.name}{rate}{compute}. Every byte counts once, so a time is a bound from below. Other settings:"
        " --model, --context, --batch, --bandwidth, --flops."
    )
    unknown = [r for r in m.asked.recipes if m.work(r) is None]
    blocks: list[Block] = [Paragraph(told)]
    points = _points(m)
    detail = _cost_table(m)
    if points:
        shown = (
            "Down and to the left is better: error on real activations against what a token of cache costs."
        )
        blocks.append(
            Chart(
                "tradeoff",
                "Accuracy against cost",
                shown,
                lambda: themed(tradeoff_svg(points, TITLE)),
                detail,
            )
        )
    else:
        blocks.append(detail)
    if unknown:
        blocks.append(
            Paragraph(f"Not modelled: {', '.join(unknown)}; give the recipe's TOML file as --recipes.")
        )
    return Section("cost", "Cost", tuple(blocks))


def _points(m: Material) -> list[TradeoffPoint]:
    points = []
    for recipe in m.asked.recipes:
        total, size = m.total(m.real, recipe).rel_l2, m.kv_bytes(recipe)
        if total > 0 and math.isfinite(total) and math.isfinite(size):
            points.append(TradeoffPoint(recipe, total, size, m.decode_s(recipe)))
    return points


def _cost_table(m: Material) -> Table:
    base_size, base_time = m.kv_bytes(m.baseline), m.decode_s(m.baseline)
    rows: list[list[Value | str]] = []
    for recipe in m.asked.recipes:
        size, seconds, work = m.kv_bytes(recipe), m.decode_s(recipe), m.work(recipe)
        faster = math.nan if seconds is None or base_time is None else base_time / seconds
        rows.append(
            [
                recipe, figures.pooled(m.total(m.real, recipe)), figures.size(size), figures.ratio(size / base_size),
                Value(words.NONE) if work is None else Value(show_bytes(work.kv_cache), work.kv_cache),
                figures.time(seconds), figures.ratio(faster),
            ]
        )  # fmt: skip
    headers = (
        "recipe", "total rel_l2, real", "KV a token", f"of {m.baseline}", "KV in all", "decode step", "faster",
    )  # fmt: skip
    return table("Cost by recipe", headers, rows, right=range(1, 7))
