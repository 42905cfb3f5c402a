"""The committed sample and schemas are what this version writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import matplotlib
import pytest

from benchmarks import report_speed, sample
from harness.report import FIGURE
from harness.report.schema import schemas


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    sample.write_sample(folder)
    return folder


NAMES = (
    "report.md", "cells.csv", "cases.csv", "hazards.csv", "results.json", "junit.xml", "summary.md", "comment.md",
    "tradeoff.svg",
)  # fmt: skip
AGAIN = "not what this version writes: run `python -m benchmarks.sample` and look at the difference"


@pytest.mark.parametrize("name", NAMES)
def test_sample_is_current(made: Path, name: str) -> None:
    pins = (sample.ROOT / "constraints.txt").read_text(encoding="utf-8")
    if name.endswith(".svg") and f"matplotlib=={matplotlib.__version__}\n" not in pins:
        pytest.skip(f"drawn by another matplotlib than this one, {matplotlib.__version__}")
    assert (made / name).read_bytes() == (sample.SAMPLE / name).read_bytes(), f"{name} is {AGAIN}"


def test_every_output_has_a_sample(made: Path) -> None:
    assert {path.name for path in made.iterdir()} == {*NAMES, FIGURE}


def test_sample_of_the_figure_says_what_this_version_writes(made: Path) -> None:
    """Not byte for byte: matplotlib's paths differ between its versions."""
    now, then = ((folder / FIGURE).read_text(encoding="utf-8") for folder in (made, sample.SAMPLE))
    assert _labels(now) == _labels(then), f"{FIGURE} is {AGAIN}"


def _labels(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("name", schemas())
def test_committed_schema_is_current(name: str) -> None:
    assert (sample.SCHEMAS / name).read_text(encoding="utf-8") == schemas()[name], f"{name} is {AGAIN}"


@pytest.mark.parametrize("name", [sample.RECORDS, sample.BEFORE])
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
