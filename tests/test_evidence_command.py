"""`python -m harness evidence`: what it writes, keeps and refuses, and what its tables look like."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_evidence import ATTRIBUTION, QUALITY, SHARE

from harness import quality
from harness.cli import main
from harness.evidence import Evidence, read_evidence, write_evidence
from harness.report.evidence import quality_page, to_text

QUICK = ("--cases", "smoke", "--only", "smoke/causal-gqa", "-r", "bf16", "--seeds", "1")
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.chdir(tmp_path)

    def called(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["evidence", *arguments])
        assert isinstance(stop.value.code, int)
        return (stop.value.code, *capsys.readouterr())

    return called


def held(path: str = "e.jsonl") -> list[tuple[str, str]]:
    return [(e.kind, e.recipe) for e in read_evidence(path)]


def test_attribution_is_printed_and_written(call: Call) -> None:
    code, out, err = call(*QUICK, "--out", "e.jsonl")
    assert code == 0
    assert held() == [("attribution", "bf16")]
    (found,) = read_evidence("e.jsonl")
    assert found.statement.split(" ")[0] in out  # type: ignore[union-attr]
    assert "bf16 · smoke/causal-gqa · online_softmax (1 seed)" in out
    assert "1/1 cells" in err
    assert max(map(len, out.splitlines())) <= 100


def test_other_cells_are_kept_where_that_is_asked_for(call: Call) -> None:
    write_evidence("e.jsonl", [QUALITY, replace(ATTRIBUTION, case="smoke/causal-gqa")])
    assert call(*QUICK, "--keep", "--out", "e.jsonl")[0] == 0
    assert held() == [("quality", "bf16"), ("attribution", "bf16")]
    assert read_evidence("e.jsonl")[1] != ATTRIBUTION
    assert call(*QUICK, "--out", "e.jsonl")[0] == 0
    assert held() == [("attribution", "bf16")]


def test_a_run_that_is_killed_leaves_what_was_there_and_what_it_found(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_evidence("e.jsonl", [ATTRIBUTION])

    def killed(*_: Any, **__: Any) -> Iterator[Evidence]:
        yield QUALITY
        raise KeyboardInterrupt

    monkeypatch.setattr(quality, "qualities", killed)
    monkeypatch.setattr("harness.capture.load_model", lambda: type("Model", (), {"layers": 1}))
    code, _, err = call("--no-attribution", "--quality", "-r", "bf16", "--out", "e.jsonl")
    assert code == 130
    assert "interrupted" in err
    assert held() == [("attribution", "bf16"), ("quality", "bf16")]


def test_without_the_extra_there_is_one_line_and_the_rest_goes_on(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    code, _, err = call(*QUICK, "--quality", "--out", "e.jsonl")
    assert code == 0
    assert [line for line in err.splitlines() if "gguf" in line] == [
        line for line in err.splitlines() if line.startswith("no quality: capture needs gguf")
    ]
    assert held() == [("attribution", "bf16")]
    assert call(*QUICK, "--no-attribution", "--quality", "--out", "none.jsonl")[0] == 3
    assert not Path("none.jsonl").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("-i", "sdpa_math"), "sdpa_math has no stages to switch"),
        (("-i", "nope"), "unknown implementation 'nope'"),
        (("-r", "nope"), "unknown recipe 'nope'"),
        (
            ("--quality", "--no-attribution", "--tokens", "many"),
            "tokens is 'many'; allowed: numbers with commas",
        ),
        (("--quality", "--no-attribution", "--tokens", "4096"), "tokens is 4096; allowed: 2 to 2048"),
        (("--keep",), "e.jsonl, line 1 is not evidence"),
    ],
    ids=["black-box", "implementation", "recipe", "words", "too-long", "damaged"],
)
def test_a_mistake_is_one_line_and_exit_2(call: Call, given: tuple[str, ...], told: str) -> None:
    Path("e.jsonl").write_text("damaged\n")
    code, out, err = call(*QUICK, *given, "--out", "e.jsonl")
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert told in last
    assert Path("e.jsonl").read_text() == "damaged\n"


def test_what_is_refused_is_told_and_nothing_ran_is_exit_3(call: Call) -> None:
    code, _, err = call("--cases", "outliers", "--only", "outliers/fa3", "-r", "bf16", "-i", "lower_triangle")
    assert code == 3
    assert "left out: outliers/fa3, bf16: lower_triangle computes causal attention alone" in err
    code, _, err = call("--cases", "layer", "--only", "layer/*", "-r", "bf16")
    assert code == 3
    assert "is a whole layer" in err


def test_text_from_a_file_stays_in_its_place() -> None:
    hostile = "a|b\x1b[2J<script>alert(1)</script>\n## x"
    share = replace(SHARE, stage=hostile, format=hostile)
    long = replace(
        ATTRIBUTION, case=hostile * 9, recipe=hostile, statement=hostile, best=hostile, stages=(share,) * 2
    )
    asked = replace(QUALITY, recipe=hostile, text=hostile, model=hostile, implementation=hostile)
    text = to_text([long, asked])
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    page = quality_page([asked], "python -m harness evidence", 60.0)
    assert "<script>" not in page
    assert "\x1b" not in page
    assert "\n## x" not in page


def test_stages_without_weight_share_a_row() -> None:
    light = replace(SHARE, stage="exp", format="fp32", alone_share=1e-9, without_share=0.0)
    text = to_text([replace(ATTRIBUTION, stages=(SHARE, light, replace(light, stage="row_sum")))])
    assert [line.split() for line in text.splitlines() if line.startswith("exp")] == [
        ["exp,", "row_sum", "fp32", "2e-09"]
    ]


def test_the_committed_page_says_what_the_committed_evidence_holds() -> None:
    reports = Path(__file__).resolve().parent.parent / "reports"
    made = quality_page(read_evidence(reports / "evidence.jsonl"), "command", 0.0)
    page = (reports / "quality.md").read_text(encoding="utf-8")
    assert [x for x in page.splitlines() if x[:1] == "|"] == [x for x in made.splitlines() if x[:1] == "|"]
