"""The committed sample and schemas are what this version writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import matplotlib
import pytest

from benchmarks import report_speed, sample, test_throughput
from benchmarks.conftest import COMPILES
from harness import registry
from harness.report import FIGURE
from harness.report.review import PAGE
from harness.report.schema import schemas


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    sample.write_sample(folder)
    return folder


NAMES = (
    "report.md", "cells.csv", "cases.csv", "hazards.csv", "results.json", "junit.xml", "summary.md", "comment.md",
    "throughput.md", "review.md",
)  # fmt: skip
DRAWN = (FIGURE, PAGE)
AGAIN = "not what this version writes: run `python -m benchmarks.sample` and look at the difference"
PICTURE = re.compile(r"<svg\b.*?</svg>", re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_sample_is_current(made: Path, name: str) -> None:
    assert (made / name).read_bytes() == (sample.SAMPLE / name).read_bytes(), f"{name} is {AGAIN}"


@pytest.mark.parametrize("name", DRAWN)
def test_sample_of_what_is_drawn_is_current_to_the_byte_under_the_pinned_matplotlib(
    made: Path, name: str
) -> None:
    pins = (sample.ROOT / "constraints.txt").read_text(encoding="utf-8")
    if f"matplotlib=={matplotlib.__version__}\n" not in pins:
        pytest.skip(f"{name} was drawn by another matplotlib than this one, {matplotlib.__version__}")
    assert (made / name).read_bytes() == (sample.SAMPLE / name).read_bytes(), f"{name} is {AGAIN}"


def test_sample_of_the_page_is_current_around_its_pictures(made: Path) -> None:
    now, then = ((folder / PAGE).read_text(encoding="utf-8") for folder in (made, sample.SAMPLE))
    assert PICTURE.sub("", now) == PICTURE.sub("", then), f"{PAGE} is {AGAIN}"
    assert sum("<text" in picture for picture in PICTURE.findall(then)) == 5


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_of_the_sample_say_what_this_version_writes(made: Path, name: str) -> None:
    """With any matplotlib: its paths differ between versions, its texts do not."""
    now, then = ((folder / name).read_text(encoding="utf-8") for folder in (made, sample.SAMPLE))
    assert _labels(now), name
    assert _labels(now) == _labels(then), f"{name} is {AGAIN}"


def _labels(text: str) -> list[str]:
    return [label for svg in PICTURE.findall(text) for label in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def test_every_output_has_a_sample(made: Path) -> None:
    assert {path.name for path in made.iterdir()} == {*NAMES, *DRAWN}
    measured = {sample.RECORDS, sample.BEFORE, sample.REVIEWED, sample.TIMINGS}
    assert {path.name for path in sample.SAMPLE.iterdir()} == {*NAMES, *DRAWN, *measured}


def test_sample_review_shows_every_section_with_something_in_it() -> None:
    text = (sample.SAMPLE / "review.md").read_text(encoding="utf-8")
    for table in (
        "Summary by recipe", "Accuracy on real activations, by layer and recipe", "Total rel_l2 by layer and head",
        "Implementation × case: kernel error", "Total error on hard cases", "Total rel_l2 by number of keys",
        "Where each recipe breaks", "Range ledger on real activations", "Range ledger on hard cases",
        "Attribution by stage", "What if one stage had higher precision", "Quality of a model, by recipe",
        "Cost by recipe", "Definitions of the recipes",
    ):  # fmt: skip
        after = text.partition(f"**{table}")[2]
        rows = [line for line in after.split("\n\n")[1].splitlines() if line.startswith("|")]
        assert len(rows) > 2, table
    worst = text.partition("## Worst cases")[2].partition("\n## ")[0]
    assert worst.count("python -m harness run") == 18, "six a recipe"
    assert "python -m harness evidence" not in text, "a section says that it has no evidence"


def test_sample_timings_hold_every_row_of_this_version() -> None:
    """What the session would time now, or say why not; where rows are missing, `benchmarks.sample --time` measures."""
    stored = json.loads((sample.SAMPLE / sample.TIMINGS).read_text(encoding="utf-8"))
    told = [b["extra_info"] for b in stored["benchmarks"]] + stored["throughput"]["not_timed"]
    rows = [(x["case"], x["implementation"], x["recipe"]) for x in told]
    own = (e for e in registry.table().values() if e.target.startswith("harness."))
    here = {e.name for e in own if not e.needs} - {*COMPILES}
    assert len(set(rows)) == len(rows)
    assert {x[1] for x in rows} == here
    assert set(rows) == set(test_throughput.cells(sorted(here)))


@pytest.mark.parametrize("name", schemas())
def test_committed_schema_is_current(name: str) -> None:
    assert (sample.SCHEMAS / name).read_text(encoding="utf-8") == schemas()[name], f"{name} is {AGAIN}"


@pytest.mark.parametrize("name", [sample.RECORDS, sample.BEFORE, sample.REVIEWED])
def test_committed_records_obey_the_published_schema_and_are_small(name: str) -> None:
    validator = jsonschema.Draft202012Validator(
        json.loads((sample.SCHEMAS / "record.schema.json").read_text())
    )
    lines = (sample.SAMPLE / name).read_text(encoding="utf-8").splitlines()
    for line in lines:
        validator.validate(json.loads(line))
    assert 100 <= len(lines) <= 500
    assert (sample.SAMPLE / name).stat().st_size < 2**20


def test_sample_document_obeys_the_published_schema() -> None:
    validator = jsonschema.Draft202012Validator(
        json.loads((sample.SCHEMAS / "report.schema.json").read_text())
    )
    validator.validate(json.loads((sample.SAMPLE / "results.json").read_text(encoding="utf-8")))


def test_sample_shows_a_change_a_failure_and_a_known_deviation() -> None:
    told = (sample.SAMPLE / "comment.md").read_text(encoding="utf-8")
    for part in ("newly failing", "error up", "new cells", "Unexpected failures", "known 2"):
        assert part in told


def test_kernel_of_the_sample_still_holds_what_is_edited() -> None:
    assert sample.EDIT[0] in sample.KERNEL.read_text(encoding="utf-8")


def test_speed_is_measured_on_records_that_differ(tmp_path: Path) -> None:
    lines = (sample.SAMPLE / sample.RECORDS).read_text(encoding="utf-8").splitlines()
    made = list(report_speed.multiplied(lines, 3 * len(lines)))
    records = [json.loads(line) for line in made]
    assert len({(r["case"], r["implementation"], r["recipe"], r["seed"]) for r in records}) == len(made)
    judged = [
        r["errors"]["rmse"] for r in records if r["errors"] and r["errors"]["rmse"] not in (0, "nan", "inf")
    ]
    assert len(set(judged)) > 0.9 * len(judged)
