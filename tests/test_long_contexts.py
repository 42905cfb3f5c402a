"""The study of long contexts: what it keeps it does not measure again, and the same points give the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_contexts as study

SMALL = (256, 1024)


@pytest.fixture
def points() -> list[dict[str, Any]]:
    growth = [
        {
            "task": f"growth:{n}", "kind": "growth", "n": n, "v_mean": mean, "recipe": recipe, "algorithm": algorithm,
            "rel_l2": 1e-3 * n**0.5, "expected": 1.1e-3 * n**0.5, "cpu_s": 1.0, "peak": 2**28,
        }
        for n in SMALL for mean in study.MEANS for recipe in study.RECIPES for algorithm in study.ALGORITHMS
    ]  # fmt: skip
    audit = {
        "task": "audit:x", "kind": "audit", "name": "x", "recipe": "bf16", "status": "PASS", "rows": "8 of 9",
        "ratio": 1.0, "rel_l2": 1e-3, "cpu_s": 2.0, "wall_s": 3.0, "kernel_s": 1.0, "peak": 2**31,
    }  # fmt: skip
    return [*growth, audit]


def test_points_that_are_held_are_not_measured_again(
    points: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "points.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in points))
    monkeypatch.setattr(study.subprocess, "run", lambda *_, **__: pytest.fail("a child was started"))
    tasks = [f"growth:{n}" for n in SMALL] + ["audit:x"]
    assert study.measured(tasks, path) == points


def test_page_holds_slope_and_peak_and_figure_and_page_are_the_same_for_the_same_points(
    points: list[dict[str, Any]], tmp_path: Path
) -> None:
    text = study.page(points, "x.svg")
    assert text == study.page(points, "x.svg")
    assert text.count("| +0.50 |") == len(study.RECIPES) * len(study.ALGORITHMS) * len(study.MEANS)
    assert "| x | bf16 | PASS | 8 of 9 | 1.00 | 2 s | 3 s | 2.00 GiB | 1 s |" in text
    pytest.importorskip("matplotlib", reason="the report extra is not installed")
    for name in ("a.svg", "b.svg"):
        study.figure(points, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
