"""`explain CELL`: the right record, and all of its story."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from record_factory import record

import harness
from harness.cli import main
from harness.records import Record, Status, write_records
from harness.report.story import find, story

HEADINGS = ("What was run", "Verdict", "Truths", "Stages", "Places", "What to do next")


@pytest.fixture(scope="module")
def records() -> list[Record]:
    cases = [c for c in harness.load_cases("magnitude") if c.id == "magnitude/raw-80000"]
    return harness.run(cases, ["naive_masked", "online_softmax"], ["fp16_eager", "bf16"], seeds=1)


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_cell_is_found_as_a_report_prints_it_with_commas_and_by_globs(records: list[Record]) -> None:
    for cell in (
        "magnitude/raw-80000 · naive_masked · fp16_eager", "magnitude/raw-80000,naive_masked,fp16_eager,0",
        "*/raw-8*, naive*, fp16*",
    ):  # fmt: skip
        (found,) = find(records, cell)
        assert found.group_key == ("magnitude/raw-80000", "naive_masked", "fp16_eager")
    assert find(records, "magnitude/raw-80000,naive_masked,fp16_eager,1") == []


def test_the_worst_of_several_comes_first(records: list[Record]) -> None:
    found = find(records, "magnitude/raw-80000")
    assert len(found) == 4
    assert found[0].status is Status.FAIL
    assert found[-1].status is Status.PASS


def test_the_story_names_stage_place_fault_and_command(
    records: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(tmp_path / "r.jsonl", records)
    assert (
        call("explain", "magnitude/raw-80000,naive_masked,fp16_eager", "--records", tmp_path / "r.jsonl") == 0
    )
    said = capsys.readouterr().out
    for part in (
        "implementation: FAIL\n  classes differ from the stored truth: 448 NaN",
        "likeliest fault: overflow in scores_raw",
        "scores_raw in fp16:", "    subtract the row max", "probs in fp16:", "against the exact truth", "log-sum-exp: ",
        "python -m harness run --cases magnitude --only magnitude/raw-80000 -i naive_masked -r fp16_eager --seeds 1",
    ):  # fmt: skip
        assert " ".join(part.split()) in " ".join(said.replace("\\\n", " ").split()), part
    order = [
        said.index(f"== {h} ==")
        for h in ("What was run", "Verdict", "Truths", "Stages", "Places", "What to do next")
    ]
    assert order == sorted(order)
    assert max(map(len, said.splitlines())) <= 100


def test_every_reason_hazard_and_relation_of_a_record_is_told(records: list[Record]) -> None:
    for r in records:
        text = "\n".join(line for _, lines in story(r) for line in lines)
        for part in (*r.reasons, *r.precision_reasons, *map(str, r.hazards), *map(str, r.relations), r.why):
            assert str(part) in text


def test_a_record_without_output_tells_its_traceback() -> None:
    broken = replace(
        record(), status=Status.ERROR, errors=None, total_errors=None, traceback="Traceback\nKeyError: 3"
    )
    told = dict(story(broken))
    assert told["Traceback"] == ["Traceback", "KeyError: 3"]
    assert any("raised" in line for line in told["What to do next"])


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("magnitude/raw-1", "no record of .* there are 4, of cases such as magnitude/raw-80000"),
        ("a,b,c,d,e", "cell is 'a,b,c,d,e'; allowed"),
        ("a,b,c,first", "seed is 'first'"),
        ("", "cell is ''"),
    ],
)
def test_a_cell_that_is_none_is_one_line_and_exit_2(
    cell: str, says: str, records: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    write_records(tmp_path / "r.jsonl", records)
    assert call("explain", cell, "--records", tmp_path / "r.jsonl") == 2
    assert re.search(says, capsys.readouterr().err)
