"""The last sections: worst cases and how to run them again, provenance, limits, and lines to sign."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from harness.records import Record, Status
from harness.report import words
from harness.report.review.blocks import (
    Block,
    Bullets,
    Commands,
    Heading,
    Paragraph,
    Section,
    SignOff,
    Value,
    table,
)
from harness.report.review.material import FAILING, Material
from harness.report.story import again

WORST = 3  # cells of each recipe and kind
_REASON = 240  # characters


def worst(m: Material) -> Section:
    told = (
        "For each recipe: implementations farthest from what is normal (failures that no deviation explains first,"
        " those that one explains last), and cases on which the recipe itself costs most; a case once. The line under"
        " each repeats it."
    )
    blocks: list[Block] = [Paragraph(told)]
    for recipe in m.asked.recipes:
        cells = list(_cells(m, recipe))
        farthest = _first(cells, lambda r: _urgency(m, r))
        others = [r for r in cells if r.case not in {x.case for x in farthest} and _is_sound(m, r)]
        blocks.append(Heading(recipe))
        for r in (*farthest, *_first(others, lambda r: (0, -_total(r)))):
            blocks.append(Commands(_told(m, r), (words.command_line([words.clean(w) for w in again(r)]),)))
    return Section("worst", "Worst cases, and how to run them again", tuple(blocks))


def _cells(m: Material, recipe: str) -> Iterator[Record]:
    """Of each case and implementation the seed that is farthest from normal."""
    for (_, _, name), records in m.cells():
        judged = [r for r in records if r.status is not Status.REFUSED]
        if name == recipe and judged:
            yield min(judged, key=lambda r: _urgency(m, r))


def _first(records: Iterable[Record], key: Callable[[Record], tuple[int, float]]) -> list[Record]:
    """The WORST smallest, each of another case."""
    best: dict[str, Record] = {}
    for r in sorted(records, key=key):
        best.setdefault(r.case, r)
    return list(best.values())[:WORST]


def _is_sound(m: Material, r: Record) -> bool:
    return any(r is other for other in m.sound(r.case, r.recipe))


def _urgency(m: Material, r: Record) -> tuple[int, float]:
    rank = 0 if m.failed(r) else 2 if r.status in FAILING else 1
    ratio = math.nan if r.margins is None else r.margins.ratio
    return rank, 0.0 if math.isnan(ratio) else -ratio


def _total(r: Record) -> float:
    total = math.nan if r.total_errors is None else r.total_errors.rel_l2
    return -math.inf if math.isnan(total) else total


def _told(m: Material, r: Record) -> str:
    label = f"{r.status.value} (known)" if m.is_known(r) else r.status.value
    ratio = "" if r.margins is None else f", {words.times(r.margins.ratio)} normal"
    total = "" if math.isinf(_total(r)) else f", total rel_l2 {words.short(_total(r))}"
    why = "; ".join((r.precision_reasons if r.status is Status.PASS else r.reasons) or r.reasons)
    why = why or r.traceback.strip().rpartition("\n")[2]
    diagnosis = f"; likeliest: {r.diagnosis}" if r.diagnosis is not None else ""
    place = f"{label} {r.case} · {r.implementation} · seed {r.seed}{ratio}{total}"
    return f"{place}: {words.clip(why + diagnosis, _REASON)}"


def provenance(m: Material) -> Section:
    machines = dict.fromkeys(words.machine(r.machine) for r in m.records)
    made = sorted({r.created for r in m.records})
    when = made[0] if len(made) == 1 else f"{made[0]} to {made[-1]}"
    items = [
        f"{words.many(len(m.records), 'record')} of {words.many(len(m.cases), 'case')},"
        f" {words.many(len(m.implementations), 'implementation')} and"
        f" {words.many(len({r.seed for r in m.records}), 'seed')}, made {when}",
        *(f"{s.name}: {words.many(s.lines, 'line')}, SHA-256 {s.sha256}" for s in m.asked.sources),
        *machines,
        *_ran(m.records),
    ]
    if m.evidence:
        stamps = sorted({e.created for e in m.evidence})
        on = dict.fromkeys(words.machine(e.machine) for e in m.evidence)
        items.append(f"evidence made {stamps[0]} to {stamps[-1]}, on {'; '.join(on)}")
    rows: list[list[Value | str]] = [
        [recipe, digest, _today(m, recipe, digest)]
        for recipe in m.asked.recipes
        for digest in _digests(m, recipe)
    ]
    shown = table("Definitions of the recipes, as they ran", ("recipe", "definition", "is it today's"), rows)
    return Section("provenance", "Provenance", (Bullets(tuple(items)), shown))


def _ran(records: Iterable[Record]) -> list[str]:
    """What black boxes were seen to run."""
    seen = dict.fromkeys(
        f"{r.implementation} ran {', '.join(r.ran.operators)} ({r.ran.backend}) in {r.ran.dtype} on {r.ran.device}"
        for r in records
        if r.ran is not None and r.ran.operators
    )
    return list(seen)


def _digests(m: Material, recipe: str) -> list[str]:
    found = [r.recipe_digest for r in m.of(recipe)] + [
        e.recipe_digest for e in m.evidence if e.recipe == recipe
    ]
    return list(dict.fromkeys(found))


def _today(m: Material, recipe: str, digest: str) -> Value:
    known = next((r for r in m.asked.known if r.name == recipe), None)
    if known is None:
        return Value("not known")
    return Value("yes", None, "good") if known.digest == digest else Value("no, it has changed", None, "bad")


def limits(m: Material) -> Section:
    total = len(m.records)
    refused = sum(r.status is Status.REFUSED for r in m.records)
    unsure = sum(r.status is Status.INCONCLUSIVE for r in m.records)
    known = sum(m.is_known(r) for r in m.records)
    emulated = sum(r.emulated for r in m.records)
    real = f"{words.many(len(m.real), 'case')} ({', '.join(map(str, m.real[:8]))})" if m.real else "none"
    s = m.asked.setting
    items = [
        f"Real activations: {real}. Other models, layers, texts and lengths may differ.",
        f"{emulated} of {total} cells emulate their precision on another machine: the error is the format's, up to the"
        " order of sums; a speed is not measured.",
        f"{refused} of {total} cells were refused, {unsure} were INCONCLUSIVE (these inputs could not have shown a"
        f" fault), {known} failed as a listed deviation says.",
        f"Cost is modelled for {s.model.name} from sizes; kernels move more bytes than they must.",
        "Backward pass, dropout, MLA, INT8 and FP4 are not covered.",
    ]
    if not any(r.head_rel_l2 for r in m.records):
        items.append("These records hold no error by head: only the head of the largest one.")
    if not m.qualities:
        items.append("What the error does to a model's output was not measured.")
    if any(len(_digests(m, recipe)) > 1 for recipe in m.asked.recipes):
        items.append("A recipe has more than one definition in these files: figures of both are pooled.")
    return Section("limits", "Limits", (Bullets(tuple(items)),))


def sign_off() -> Section:
    told = "The rule above is a proposal. The decision is that of those who sign."
    fields = ("reviewer", "date", "decision", "conditions")
    return Section("sign-off", "Sign-off", (Paragraph(told), SignOff(fields, 3)))
