"""A baseline that lost something says so: it is not a smaller one, and turns no test off in silence."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from record_factory import errors, grid, margins, record, refused

from harness.gate import Pooled, compare, make_baseline, read_baseline
from harness.gate.drift import SMALLEST_IN_ALL, SMALLEST_IN_CELL, find_drifts
from harness.gate.pooled import Key
from harness.records import Record, Status

ROOT = Path(__file__).parents[1]
BASELINES = ROOT / "reports" / "baselines"
EXACT = "smoke/worked-example-causal"


def lines_of(*records: Record) -> list[dict[str, Any]]:
    return [json.loads(line) for line in make_baseline(records).splitlines()]


def stored(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def changed(path: Path, old: Sequence[Record], changes: dict[str, Any]) -> Mapping[Key, Pooled]:
    """The baseline of these records, each line changed."""
    head, *cells = lines_of(*old)
    return read_baseline(stored(path, [head, *({**cell, **changes} for cell in cells)])).cells


SEEDS = [record(seed=n, rmse=1e-2) for n in range(3)]


@pytest.mark.parametrize(
    "changes",
    [
        {"rmses": [None, None, None]},
        {"rmses": [None, 0.01, 0.01]},
        {"rmses": ["nan", "nan", "nan"]},
        {"rmses": [0.01, 0.01, "nan"]},
        {"rmses": ["inf", 0.01, 0.01]},
        {"rmses": [0.01, 0.01]},
        {"rmses": []},
        {"rmses": [None, None, None], "rmse": None},
    ],
)
def test_baseline_that_lost_rmse_by_seed_is_said_to_pair_nothing(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    held = changed(tmp_path / "b", SEEDS, changes)
    first = compare(SEEDS, held).text.splitlines()[0]
    assert "no paired comparison was possible in 1 of 1 cell (the baseline has no rmse by seed)" in first
    worse = [replace(r, margins=margins(ratio=1.2)) for r in SEEDS]
    assert compare(worse, held).exit_code == 1, "error ÷ expected is compared there"


@pytest.mark.parametrize("without", [refused(seed=1), refused(seed=1, status=Status.ERROR)])
def test_seed_without_an_output_has_no_rmse_and_the_others_are_paired(
    tmp_path: Path, without: Record
) -> None:
    old = [SEEDS[0], without, SEEDS[2]]
    held = changed(tmp_path / "b", old, {})
    for new in (old, SEEDS):  # as it was, and mended
        outcome = compare(new, held)
        assert (outcome.exit_code, outcome.unpaired) == (0, "")
    risen = [r if r.errors is None else replace(r, errors=errors(rmse=1.1e-2)) for r in old]
    assert "2 paired seeds" in compare(risen, held).text


def test_output_of_nan_has_no_rmse_in_either_figure_and_the_other_seeds_are_paired(tmp_path: Path) -> None:
    old = [replace(SEEDS[0], errors=errors(rmse=math.nan)), *SEEDS[1:]]
    held = changed(tmp_path / "b", old, {})
    assert compare(old, held).unpaired == compare(SEEDS, held).unpaired == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rmse", -1e-3), ("rel_l2", -1e-3), ("truth_rms", -1.0), ("ratio", -0.5), ("ratio", "-inf"), ("mismatches", -1),
        ("rmses", [0.01, -0.01, 0.01]), ("status", {"PASS": -3}), ("precision", {"PASS": -1}),
        ("hazards", {"overflow in scores": -2}),
    ],
)  # fmt: skip
def test_negative_figure_is_a_damaged_baseline(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(
        ValueError, match=rf"line 2 is not a baseline's: .*naive_masked.* a negative {name}; "
    ) as error:
        changed(tmp_path / "b", SEEDS, {name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_baseline_cut_between_lines_is_damaged(tmp_path: Path, kept: int) -> None:
    lines = lines_of(*grid(["g/a", "g/b"], ["x", "y"], ["bf16"]))
    assert len(read_baseline(stored(tmp_path / "b", lines)).cells) == 4
    with pytest.raises(
        ValueError, match=rf"b holds {kept} cells where its first line says 4; .*--update"
    ) as error:
        read_baseline(stored(tmp_path / "b", lines[: 1 + kept]))
    assert "\n" not in str(error.value)


def test_baseline_with_more_cells_than_it_says_is_damaged(tmp_path: Path) -> None:
    more = lines_of(*grid(["g/c"], ["x"], ["bf16"]))[1:]
    with pytest.raises(ValueError, match="b holds 2 cells where its first line says 1"):
        read_baseline(stored(tmp_path / "b", [*lines_of(record()), *more]))


def test_baseline_that_lost_its_first_line_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="b has lost its first line"):
        read_baseline(stored(tmp_path / "b", lines_of(record())[1:]))


@pytest.mark.parametrize("known", [{}, {"cells": 0}])
def test_baseline_that_does_not_say_its_number_of_cells_is_read(
    tmp_path: Path, known: dict[str, int]
) -> None:
    head, *cells = lines_of(*grid(["g/a", "g/b"], ["x"], ["bf16"]))
    assert head.pop("cells") == 2
    assert len(read_baseline(stored(tmp_path / "b", [{**head, **known, "schema": "1.2"}, *cells])).cells) == 2


def test_committed_baselines_are_whole_and_say_so_since_schema_1_3() -> None:
    for path in BASELINES.glob("*.jsonl"):
        head = json.loads(path.read_text(encoding="utf-8").partition("\n")[0])
        cells = read_baseline(path).cells
        assert head.get("cells") == (None if head["schema"] == "1.2" else len(cells)), path.name
        assert {cell.machine_class for cell in cells.values()} == {head["machine_class"]}


# --- what the committed figures make of the limits -------------------------------------------------------------


def first_rise(cell: Pooled) -> float:
    """The smallest rise, the same in every seed, at which the test finds a drift in the cell alone."""
    cell = replace(cell, noise=(0.1,) * len(cell.rmses))  # a rise without spread: noise adds nothing

    def found(factor: float) -> bool:
        risen = replace(cell, rmses=tuple(None if x is None else factor * x for x in cell.rmses))
        return bool(find_drifts([(risen, cell)]).cells)

    low, high = 1.0, 2.0
    assert found(high)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high - 1


def limits(rises: Iterable[float]) -> tuple[str, str]:
    """As the documents state them: in a cell, and in all, which lies between its cells' whatever their weights."""
    ends = min(rises := list(rises)), max(rises)
    in_all = (1 + SMALLEST_IN_ALL) / (1 + SMALLEST_IN_CELL)
    told = [[f"{100 * ((1 + rise) * factor - 1):.1f}" for rise in ends] for factor in (1, in_all)]
    return (" to ".join(told[0]) + " %", " to ".join(told[1]) + " %")


@pytest.mark.parametrize("path", sorted(BASELINES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_limits_that_the_documents_state_are_those_of_the_committed_baselines(path: Path) -> None:
    rises: dict[str, list[float]] = defaultdict(list)
    for cell in read_baseline(path).cells.values():
        if any(x is not None for x in cell.rmses):
            rises[cell.recipe].append(first_rise(cell))
            if cell.recipe == "fp32" and cell.case != EXACT:
                rises[f"fp32 without {EXACT}"].append(rises["fp32"][-1])
    true = {name: limits(found) for name, found in rises.items()}
    text = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8").partition("## The floor")[2]
    stated = {}
    for names, *row in re.findall(r"^\| (`.*) \| (.*%) \| (.*%) \|$", text, re.MULTILINE):
        stated |= dict.fromkeys(names.replace("`", "").split(", "), tuple(row))
    assert stated == true
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "under `bf16` it makes them {} and {})".format(*true["bf16"]) in readme
