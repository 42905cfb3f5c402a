"""Records and evidence made up for the tests of the review."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from record_factory import MACHINE, record, reviewed

from harness.cost.settings import settings
from harness.evidence import Attribution, Evidence, Quality, StageShare
from harness.recipe import RECIPES
from harness.records import Hazard, HazardKind, Record, Status
from harness.report.review import Asked, Material

RECIPES_ASKED = ("bf16", "fp8_e4m3")
SETTING = settings({"model": "llama-3.1-8b", "context": "32K", "bandwidth": "2TB/s"})
ERRORS = {"bf16": 2e-3, "fp8_e4m3": 3e-2}
# What an attacker puts into a name or a reason: markup, table cells, a right-to-left override, control characters.
HOSTILE = (
    "<script>document.body.dataset.owned=1</script>|`x`<img src=//x.y onerror=1>[a](//x.y)‮$a$\x1b[31m_b_"
)
SATURATION = Hazard(HazardKind.SATURATION, "k", "fp8_e4m3", "observed", 900.0, -1.0, 3, 4096, (0, 1, 2, 3))
BROKEN = {"precision": Status.FAIL, "precision_reasons": ("saturation in q (fp8_e4m3, observed): peak 900",)}


def made(case: str, recipe: str, **changes: Any) -> Record:
    digest = RECIPES[recipe].digest if recipe in RECIPES else "base=fp32"
    return record(case, recipe=recipe, rel=ERRORS.get(recipe, 1e-2) / 2, recipe_digest=digest, **changes)


def records() -> list[Record]:
    """Two layers, a sweep over length, and a ladder, of two implementations under two recipes."""
    found = []
    for recipe in RECIPES_ASKED:
        for name in ("naive_masked", "online_softmax"):
            found += [made(f"real/layer{n}", recipe, implementation=name) for n in (0, 1)]
            found += [
                made(f"normal/n{n}", recipe, implementation=name, shape=f"[1, 2, {n}, 64]")
                for n in (32, 64, 128)
            ]
            found += [
                made(f"magnitude/score-{n}", recipe, implementation=name, data={"score_peak": float(n)})
                for n in (11, 90, 5000)
            ]
    return found


def share(stage: str, size: float) -> StageShare:
    return StageShare(stage, "fp8_e4m3", 1e-2, size, 2e-2, size)


def attribution(recipe: str = "fp8_e4m3", **changes: Any) -> Attribution:
    whole = Attribution(
        "real/layer0", "online_softmax", recipe, RECIPES[recipe].digest, 3, 3e-2, 1e-7,
        (share("q", 0.3), share("k", 0.6), share("v", 0.1), share("exp", 1e-9)), 1.0, True, "They add up.", "k", 1.9e-2,
        MACHINE, "2026-01-01T00:00:00Z",
    )  # fmt: skip
    return replace(whole, **changes)


def quality(recipe: str = "fp8_e4m3", **changes: Any) -> Quality:
    whole = Quality(
        "SmolLM2", "a text", "abc", 512, "online_softmax", recipe, RECIPES[recipe].digest, 1e-5, 1e-4, 1e-3, 0.999,
        20.02, 20.0, MACHINE, "2026-01-01T00:00:00Z",
    )  # fmt: skip
    return replace(whole, **changes)


def evidence() -> list[Evidence]:
    return [f(r) for r in RECIPES_ASKED for f in (attribution, quality)]


def asked(*recipes: str, **changes: Any) -> Asked:
    names = recipes or RECIPES_ASKED
    return replace(Asked(names, tuple(RECIPES[n] for n in names if n in RECIPES), SETTING), **changes)


def material(
    held: list[Record] | None = None, found: list[Evidence] | None = None, *recipes: str
) -> Material:
    held = records() if held is None else held
    return Material(held, reviewed(held), [] if found is None else found, asked(*recipes))
