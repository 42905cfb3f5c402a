"""JSON, JUnit XML, GitHub's summary and comment: what changed first, within limits, and hostile text stays text."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_factory import MACHINE, OVERFLOW, SCALE_OFF, deviation, errors, margins, record, refused, reviewed

from harness.cli import main
from harness.gate import make_baseline
from harness.records import Record, Status, to_json, write_records
from harness.report import changes, comment, job_summary, summary, to_document, to_junit, to_text, words
from harness.report.changes import Changes, sides
from harness.report.fit import LEAST, fit
from harness.report.github import COMMENT_BYTES, MARK, SUMMARY_BYTES
from harness.report.schema import schemas

SNIPPETS = [
    "|", "`", "```", "````text", "<script>", "</details>", "<!--", "-->", "]]>", "&amp;", "&", "@octocat",
    "@org/team", "a@b.c", "#12", "o/r#12", "GH-7", "gh-7", "https://evil.example", "www.evil.example", "::error::x",
    "##[error]x", "\n", "\r\n", "\r::set-output name=x::y", "\x00", "\x0b", "\x1b[31m", "\x85", "\u2028", "\ufffe",
    "\ud800", "\U0001f600", "%0A", "\\", "*", "_", "[x](y)", "![x](y)", "$x$", "~", "# h", "| a | b |", "\u202e", " ",
    "\"'", "=1+1", "known",
]  # fmt: skip
HOSTILE = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=6)), max_size=6).map("".join)
VALIDATORS = {name: jsonschema.Draft202012Validator(json.loads(text)) for name, text in schemas().items()}


def hostile_records(text: str, more: str) -> list[Record]:
    names = {"case": f"{text}/{more}", "group": text, "implementation": more, "recipe": text}
    machine = replace(MACHINE, cpu=text, commit=more)
    hazard = replace(OVERFLOW, stage=text, format="fp16")
    return [
        record(**names, status=Status.ERROR, errors=None, reasons=(more,), traceback=f"{text}\n{more}",
               machine=machine),
        record(**{**names, "case": f"{more}2"}, status=Status.FAIL, reasons=(text, more), hazards=(hazard,),
               diagnosis=replace(SCALE_OFF, what=more, rivals=(text,)), margins=margins(worst_at=text, direction=more)),
        refused(**{**names, "case": f"{text}3"}, reason=more),
        record(**{**names, "case": "known"}, status=Status.FAIL, reasons=(text,), precision=Status.FAIL,
               precision_reasons=(more,), data={more: math.nan}),
    ]  # fmt: skip


def hostile_changes(records: list[Record]) -> Changes:
    earlier = [replace(r, status=Status.PASS, errors=errors()) for r in records[:2]]
    vanished = replace(records[0], case=f"{records[0].case} gone")
    return changes(sides([*earlier, vanished]), sides(records), records[0].case)


def plain_part(markdown: str) -> str:
    """What is neither in a fence nor in a code span nor escaped."""
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    spans = re.compile(r"\\[^\n]|(`+)(?!`)[^\n]*?(?<!`)\1(?!`)")
    return spans.sub("", outside)


def assert_inert(markdown: str) -> None:
    outside = plain_part(markdown)
    tags = r"</?(?:details|summary)>|" + re.escape(MARK)
    assert "<" not in re.sub(tags, "", outside)
    assert not re.search(r"@\w|(?<!&)#\d|\bGH-\d|://|\bwww\.", outside, re.IGNORECASE)
    assert not re.search(r"[^\n\x20-\x7e]", re.sub(r"[^\x00-\x9f]", "", markdown))
    assert outside.count("<details>") == outside.count("</details>")
    assert_tables_are_whole(outside)


def assert_tables_are_whole(outside: str) -> None:
    """A head, a rule and rows of as many cells. Escaped pipes are gone from `outside`."""
    for block in re.findall(r"(?:^\|.*\n?)+", outside, re.MULTILINE):
        rows = block.strip().split("\n")
        assert re.fullmatch(r"\|[:|\-]+\|", rows[1])
        assert len({row.count("|") for row in rows}) == 1


@settings(max_examples=40, deadline=None)
@given(HOSTILE, HOSTILE)
def test_hostile_text_stays_text_in_every_output(text: str, more: str) -> None:
    records = hostile_records(text, more)
    review = reviewed(records, deviation(case="known", reason=text, link=more))
    report, changed = summary(records, review), hostile_changes(records)
    assert_inert(job_summary(report, changed))
    assert_inert(comment(report, changed))
    document = json.loads(to_document(report, records, review), parse_constant=pytest.fail)
    VALIDATORS["report.schema.json"].validate(document)
    VALIDATORS["record.schema.json"].validate(json.loads(to_json(records[0])))
    root = ET.fromstring(to_junit(records, review).encode())
    assert_counts(root)
    for line in to_text(report).split("\n"):
        assert not line.lstrip().startswith("::")
        assert "##[" not in line


def assert_counts(root: ET.Element) -> None:
    """Names, numbers and order as Jenkins' schema (junit-10.xsd) has them."""
    assert root.tag == "testsuites"
    for suite in (root, *root):
        cases = list(suite.iter("testcase"))
        assert int(suite.attrib["tests"]) == len(cases)
        for name, element in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.attrib[name]) == sum(case.find(element) is not None for case in cases)
        total = sum(float(case.attrib["time"]) for case in cases)
        assert float(suite.attrib["time"]) == pytest.approx(total, abs=1e-6 * (len(cases) + 1))
    for suite in root:
        assert suite.tag == "testsuite"
        assert {child.tag for child in suite} <= {"properties", "testcase"}
        for case in suite.iter("testcase"):
            assert set(case.attrib) == {"name", "classname", "time"}
            assert {child.tag for child in case} <= {"properties", "failure", "error", "skipped"}
            assert sum(child.tag != "properties" for child in case) <= 1


def ended(*records: Record, **known: object) -> str:
    """The element of the one test case of these records."""
    review = reviewed(records, *([deviation(**known)] if known else []))
    (case,) = ET.fromstring(to_junit(records, review)).iter("testcase")
    return next((child.tag for child in case if child.tag != "properties"), "passed")


def test_junit_fails_where_the_exit_code_does_and_skips_what_says_nothing() -> None:
    fail, error = record(seed=1, status=Status.FAIL), record(seed=2, status=Status.ERROR, errors=None)
    unsure = record(seed=3, status=Status.INCONCLUSIVE)
    assert ended(record()) == "passed"
    assert ended(record(), fail) == "failure"
    assert ended(record(), fail, error) == "error"
    assert ended(fail, case="*") == "skipped"
    assert ended(record(), unsure) == "passed"
    assert ended(unsure) == ended(refused()) == ended(refused(), unsure) == "skipped"
    assert ended(record(precision=Status.FAIL)) == "passed"


def test_junit_keeps_reasons_tracebacks_and_properties() -> None:
    records = [
        record(status=Status.ERROR, errors=None, reasons=("raised",), traceback="Traceback\n  boom\x00<x>"),
        record("smoke/b", status=Status.FAIL, reasons=("3 NaN",), diagnosis=SCALE_OFF, hazards=(OVERFLOW,)),
        record("smoke/c"), refused("other/d", reason="no window"),
    ]  # fmt: skip
    root = ET.fromstring(to_junit(records, reviewed(records)))
    raised, failed, passed, skipped = root.iter("testcase")
    assert raised.find("error").attrib == {"message": "ERROR: raised", "type": "ERROR"}  # type: ignore[union-attr]
    assert "  boom?<x>" in raised.findtext("error", "")
    assert "the softmax scale is off" in failed.findtext("failure", "")
    assert "overflow in scores" in failed.findtext("failure", "")
    facts = {p.attrib["name"]: p.attrib["value"] for p in passed.iter("property")}
    assert facts == {
        "status": "PASS 1", "seeds": "0", "precision": "PASS 1", "rel_l2": "0.001", "total_rel_l2": "0.002",
        "error_over_expected": "1",
    }  # fmt: skip
    assert skipped.find("skipped").attrib == {"message": "REFUSED: no window"}  # type: ignore[union-attr]
    assert [suite.attrib["name"] for suite in root] == ["smoke", "other"]


def test_junit_counts_a_stale_deviation_as_a_failure_of_its_own() -> None:
    records = [record()]
    root = ET.fromstring(to_junit(records, reviewed(records, deviation(reason="was meant"))))
    assert (root.attrib["tests"], root.attrib["failures"]) == ("2", "1")
    assert "matches no failure of this run" in root.find(".//failure").attrib["message"]  # type: ignore[union-attr]
    assert_counts(root)


def test_document_has_every_record_once_and_null_where_there_is_no_figure() -> None:
    records = [
        record(), record(rel=2e-3), refused("smoke/b"),
        record("smoke/c", status=Status.FAIL, errors=errors(rel_l2=math.inf, nan_mismatch=3)),
    ]  # fmt: skip
    review = reviewed(records, deviation(case="smoke/c", reason="meant"))
    document = json.loads(to_document(summary(records, review), records, review))
    VALIDATORS["report.schema.json"].validate(document)
    assert document["summary"]["headline"]["repeated"] == 1
    first, second, third = document["cells"]
    assert (first["rel_l2"], first["status"], first["known"]) == (2e-3, "PASS", None)
    assert (second["rel_l2"], second["ratio"], second["floor"], second["reasons"]) == (
        None,
        None,
        "nan",
        ["no window"],
    )
    assert (third["rel_l2"], third["class_mismatch"], third["known"]) == ("inf", 3, "meant")


@pytest.mark.parametrize(
    "damage",
    [lambda r: r.pop("status"), lambda r: r.update(status="FINE"), lambda r: r.update(seed="0"),
     lambda r: r.update(run_ms="fast"), lambda r: r.update(schema="2.0"), lambda r: r["errors"].pop("rmse"),
     lambda r: r.update(reasons="none"), lambda r: r["data"].update(x="many")],
)  # fmt: skip
def test_schema_refuses_what_the_reader_refuses(damage: Callable[[dict[str, object]], object]) -> None:
    fields = json.loads(to_json(record()))
    VALIDATORS["record.schema.json"].validate(fields)
    damage(fields)
    assert not VALIDATORS["record.schema.json"].is_valid(fields)


def test_schemas_are_valid_schemas_and_say_what_fields_mean() -> None:
    for name, validator in VALIDATORS.items():
        jsonschema.Draft202012Validator.check_schema(validator.schema)
        assert validator.schema["$id"].startswith(f"urn:attention-harness:{name.split('.')[0]}:1.")
        assert all(d.get("description") for d in validator.schema["$defs"].values())


# --- what changed --------------------------------------------------------------------------------------------


def against(before: list[Record], now: list[Record]) -> Changes:
    return changes(sides(before), sides(now), "before")


def keys(found: tuple[object, ...]) -> list[str]:
    return [c.key[0] if hasattr(c, "key") else c[0][0] for c in found]  # type: ignore[attr-defined,index]


def test_changes_sort_every_cell_into_one_list() -> None:
    def failing(case: str) -> Record:
        return record(case, status=Status.FAIL, reasons=("x",))

    before = [record("a"), failing("b"), record("c", rel=1e-3), record("d", rel=1e-3), record("e", rel=1e-3),
              record("f"), record("g"), record("i"), failing("j")]  # fmt: skip
    now = [failing("a"), record("b"), record("c", rel=1.2e-3), record("d", rel=0.8e-3), record("e", rel=1.09e-3),
           record("f", status=Status.INCONCLUSIVE), record("h"), record("i", precision=Status.FAIL),
           failing("j"), failing("k")]  # fmt: skip
    c = against(before, now)
    assert [keys(x) for x in (c.newly_failing, c.newly_passing, c.other_status)] == [["a"], ["b"], ["f"]]
    assert [keys(x) for x in (c.error_up, c.error_down, c.precision)] == [["c"], ["d"], ["i"]]
    assert [keys(x) for x in (c.new, c.vanished)] == [["k", "h"], ["g"]]
    assert c.same == 3  # e, i, j
    assert c.notes == ()


@pytest.mark.parametrize(
    ("before", "now", "factor"),
    [(1e-3, 2e-3, 2.0), (0.0, 0.0, 1.0), (0.0, 1e-9, math.inf), (1e-3, math.nan, math.inf), (math.nan, 1e-3, 0.0),
     (math.nan, math.nan, 1.0), (math.inf, math.nan, 1.0), (2e-3, 0.0, 0.0)],
)  # fmt: skip
def test_error_that_is_not_finite_is_larger_than_any(before: float, now: float, factor: float) -> None:
    sets = [[record(errors=errors(rel_l2=x))] for x in (before, now)]
    found = changes(*map(sides, sets), "before")
    moved = [*found.error_up, *found.error_down]
    assert [c.factor for c in moved] == ([] if factor == 1 else [factor])


def test_changes_note_other_machines_and_seeds() -> None:
    there = replace(MACHINE, isa="AVX2")
    c = against([record(machine=there), record(seed=1, machine=there)], [record()])
    assert c.notes == (
        "measured on cpu AVX512, before on cpu AVX2: errors may differ by a few percent",
        "1 cells have other seeds than before: their inputs differ",
    )
    assert c.other_status == ()  # PASS 2 → PASS 1 is no change of status


def test_comment_says_first_what_changed_and_then_the_counts() -> None:
    before, now = (
        [record("smoke/a")],
        [record("smoke/a", status=Status.FAIL, reasons=("3 NaN",)), record("smoke/b")],
    )
    report = summary(now, reviewed(now))
    text = comment(report, against(before, now))
    order = [MARK, "1 cell failed", "What changed against before", "1 newly failing · 1 new", "#### newly failing",
             "| smoke/a", "PASS 1", "FAIL 1", "#### new cells", "2 cells run", "Unexpected failures", "3 NaN",
             "python -m harness run", "Errors by group", "Where it ran"]  # fmt: skip
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    same = against(now, now)
    assert "**nothing** · 2 cells as before" in comment(report, same)
    assert "What changed" not in comment(report)
    assert report.tradeoff is not None
    drawn = replace(report, tradeoff=replace(report.tradeoff, figure="tradeoff.svg"))
    assert "![" not in job_summary(drawn) + comment(drawn)
    assert job_summary(report, same).index("What changed") < job_summary(report, same).index(
        "# Attention accuracy"
    )


# --- limits --------------------------------------------------------------------------------------------------


def test_comment_and_summary_stay_within_githubs_limits_and_say_what_was_cut() -> None:
    now = [
        record(f"g{n % 40}/{n}" + "|×" * 400, status=Status.FAIL, reasons=("r" * 2000,), implementation=f"i{n % 7}",
               traceback="T\n" * 50)
        for n in range(700)
    ]  # fmt: skip
    before = [replace(r, status=Status.PASS) for r in now[: len(now) // 2]]
    report, changed = summary(now, reviewed(now)), against(before, now)
    for text, limit in (
        (comment(report, changed), COMMENT_BYTES),
        (job_summary(report, changed), SUMMARY_BYTES),
    ):
        assert limit / 2 < len(text.encode()) <= limit
        assert "**Cut here: " in text.strip().split("\n")[-1]
        assert "Left out: " in text.strip().split("\n")[-1]
        assert_inert(text)


BLOCK = st.sampled_from([
    "## head", "text " * 9, "| a | b |\n|:--|:--|\n" + "| x | y |\n" * 9 + "| x | z |", "````text\n```\nx\n| q |\n````",
    "<details><summary>s</summary>\n\n```text\nx\n```\n\n</details>", "* item\n* item",
])  # fmt: skip


@given(st.lists(BLOCK, min_size=1, max_size=120), st.integers(LEAST, 3 * LEAST))
def test_cut_markdown_is_a_whole_start_with_nothing_open(blocks: list[str], limit: int) -> None:
    text = "\n\n".join(blocks) + "\n"
    shown = fit(text, limit, "report.md")
    assert len(shown.encode()) <= limit
    if len(text.encode()) <= limit:
        assert shown == text
        return
    start, _, tail = shown.rpartition("\n**Cut here: ")
    assert text.startswith(start.rstrip("\n"))
    assert tail.endswith("All of it is in report.md.\n")
    left = int(tail.split()[0])
    assert left == sum(map(bool, text.split("\n"))) - sum(map(bool, start.split("\n")))
    assert_tables_are_whole(plain_part(shown))
    assert len(re.findall("^`{4}", start, re.MULTILINE)) % 2 == 0
    assert start.count("<details>") == start.count("</details>")


def test_limit_that_holds_no_tail_is_refused() -> None:
    with pytest.raises(ValueError, match=f"allowed: at least {LEAST}"):
        fit("x" * 9999, LEAST - 1, "report.md")


# --- the command line ----------------------------------------------------------------------------------------

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def called(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        return int(end.value.code or 0), *capsys.readouterr()

    return called


def test_report_writes_what_is_asked_for_and_compares_with_records_or_a_baseline(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [record(), record("smoke/gone")]
    write_records("before.jsonl", before)
    Path("base.jsonl").write_text(make_baseline(before), encoding="utf-8")
    write_records("r.jsonl", [record(status=Status.FAIL, reasons=("x",))])
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    Path("step.md").write_text("earlier\n")
    for other in ("before.jsonl", "base.jsonl"):
        code, out, _ = call(
            "report", "r.jsonl", "--out", "o", "--json", "o/r.json", "--junit", "o/j.xml", "--summary", "o/s.md",
            "--comment", "o/c.md", "--step-summary", "--against", other,
        )  # fmt: skip
        assert code == 1
        assert (
            "written: o/report.md, cells.csv, cases.csv, hazards.csv, o/r.json, o/j.xml, o/s.md, o/c.md"
            in out
        )
        told = Path("o/c.md").read_text(encoding="utf-8")
        assert f"What changed against {other}" in told
        assert "1 newly failing · 1 vanished" in told
        assert told.count("measured on") == 0
    step = Path("step.md").read_text(encoding="utf-8")
    assert step.startswith("earlier\n\n### What changed against before.jsonl")
    assert step.count("# Attention accuracy") == 2


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--step-summary"], ["GITHUB_STEP_SUMMARY is not set", "--summary FILE"]),
        (["--against", "none", "--comment", "c"], ["none does not exist", "baseline"]),
        (["--against", "r.jsonl", "--json", "x"], ["--against r.jsonl was given", "--comment FILE"]),
        (["--against", "bad", "--comment", "c"], ["bad, line 1 is not a record"]),
        (["--against", "odd", "--comment", "c"], ["odd, line 1"]),
    ],
)
def test_mistake_with_outputs_is_one_line_before_anything_is_written(
    call: Call, arguments: list[str], parts: list[str]
) -> None:
    write_records("r.jsonl", [record()])
    Path("bad").write_text("nonsense\n")
    Path("odd").write_text('{"schema": "1.0"}\n')
    code, _, err = call("report", "r.jsonl", *arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert all(part in err for part in parts)
    assert not Path("report.md").exists()


@contextmanager
def pipe_of(path: Path) -> Iterator[str]:
    """A pipe that gives what the file holds, once, as `<(cat FILE)` does."""
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(path.read_bytes()), daemon=True)
    writer.start()
    yield pipe.name
    writer.join(timeout=60)
    assert not writer.is_alive()
    pipe.unlink()


def test_against_reads_a_pipe_as_it_reads_a_file(call: Call) -> None:
    before = [record(), record("smoke/gone")]
    write_records("before.jsonl", before)
    Path("base.jsonl").write_text(make_baseline(before), encoding="utf-8-sig")
    Path("bad").write_text("nonsense\n")
    Path("odd").write_text('\n{"schema": "1.0"}\n')
    write_records("r.jsonl", [record(status=Status.FAIL, reasons=("x",))])
    for name in ("before.jsonl", "base.jsonl"):
        with pipe_of(Path(name)) as pipe:
            code, _, err = call("report", "r.jsonl", "--out", "o", "--comment", "c.md", "--against", pipe)
        assert (code, err) == (1, "")
        assert "1 newly failing · 1 vanished" in Path("c.md").read_text(encoding="utf-8")
    for name, told in (("bad", "pipe, line 1 is not a record"), ("odd", "pipe, line 2 is not a baseline's")):
        with pipe_of(Path(name)) as pipe:
            code, _, err = call("report", "r.jsonl", "--out", "o", "--comment", "c.md", "--against", pipe)
        assert (code, err.count("\n")) == (2, 1)
        assert told in err


@pytest.mark.parametrize(("text", "told"), [("", "pipe held no whole record"), ('{"a', "pipe held no whole record"),
                                            ("x\n", "pipe, line 1 is not a record")])  # fmt: skip
def test_pipe_that_holds_no_records_is_told_without_waiting_for_another(
    call: Call, text: str, told: str
) -> None:
    Path("file").write_text(text)
    with pipe_of(Path("file")) as pipe:
        code, _, err = call("report", pipe, "--out", "o")
    assert code == (2 if "line" in told else 3)
    assert told in err


def test_report_beside_a_pipe_is_asked_where_it_goes(call: Call) -> None:
    os.mkfifo("pipe")
    code, _, err = call("report", "pipe")
    assert (code, err.count("\n")) == (2, 1)
    assert "pipe is no file, beside which the report could stand; say with --out FOLDER where it goes" in err


def test_step_summary_into_a_pipe_is_written(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """As to a terminal, where a workflow is tried by hand: there is no disk to wait for."""
    write_records("r.jsonl", [record()])
    os.mkfifo("summary")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary")
    told: list[str] = []
    reader = threading.Thread(
        target=lambda: told.append(Path("summary").read_text(encoding="utf-8")), daemon=True
    )
    reader.start()
    assert call("report", "r.jsonl", "--out", "o", "--step-summary")[0] == 0
    reader.join(timeout=60)
    assert told[0].startswith("# Attention accuracy")


def test_full_step_summary_is_told_and_kept(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records("r.jsonl", [record()])
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    Path("step.md").write_text("x" * (SUMMARY_BYTES - 1000))
    code, _, err = call("report", "r.jsonl", "--out", "o", "--step-summary")
    assert (code, Path("step.md").stat().st_size) == (0, SUMMARY_BYTES - 1000)
    assert "summary is full" in err


@pytest.mark.parametrize("text", ["::error::x", "  ::error::x", "a\n::add-mask::x", "x ##[error]y", "\r::x"])
def test_text_for_a_log_holds_no_workflow_command(text: str) -> None:
    shown = words.for_log(text)
    assert "##[" not in shown
    assert not any(line.lstrip().startswith("::") for line in re.split("[\r\n]", shown))
    assert words.for_log("a::b harness::c") == "a::b harness::c"
