"""The review: its rule, that it says what records and evidence hold, and that their text is text."""

from __future__ import annotations

import html.parser
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from record_factory import errors, refused, reviewed
from review_factory import (
    BROKEN,
    HOSTILE,
    RECIPES_ASKED,
    SATURATION,
    asked,
    attribution,
    evidence,
    made,
    material,
    quality,
    records,
)

import harness.optional
from harness.cli import main
from harness.evidence import write_evidence
from harness.records import HazardKind, Record, Status, write_records
from harness.report.review import Material, document, to_html, to_markdown, write_review
from harness.report.review.blocks import Chart, Commands, Table
from harness.report.review.rule import RULE, Verdict, recommend

GOOD = [quality("bf16"), quality("fp8_e4m3")]


def _with(*more: Record) -> list[Record]:
    return [*records(), *more]


@pytest.fixture(scope="module")
def page() -> str:
    return to_html(document(material(found=evidence())))


# --- the rule ---


def test_nothing_against_a_recipe_is_a_recommendation():
    found = recommend(material(found=GOOD), "fp8_e4m3")
    assert found.verdict is Verdict.RECOMMENDED
    assert "2 real cases and 6 hard cases" in found.reasons[0]


def test_an_error_above_the_baselines_asks_for_quality_and_quality_answers_it():
    asking = recommend(material(), "fp8_e4m3")
    assert asking.verdict is Verdict.WITH_CONDITIONS
    assert "15 × the baseline's" in asking.reasons[0]
    assert recommend(material(found=[quality("fp8_e4m3")]), "fp8_e4m3").verdict is Verdict.RECOMMENDED
    assert (
        recommend(material(), "bf16").verdict is Verdict.RECOMMENDED
    )  # the baseline is compared with nothing


def test_without_real_activations_nothing_is_decided():
    hard = [r for r in records() if not r.case.startswith("real/")]
    found = recommend(material(hard, GOOD), "fp8_e4m3")
    assert found.verdict is Verdict.NOT_DECIDED
    assert "--cases real" in found.reasons[0]


IMPLEMENTATIONS = ("naive_masked", "online_softmax")
RUINS = {
    "precision": ([made("real/layer9", "fp8_e4m3", **BROKEN)], "precision FAIL on real/layer9: saturation in q"),
    "no implementation": (
        [made("real/layer9", "fp8_e4m3", implementation=i, status=Status.FAIL) for i in IMPLEMENTATIONS],
        "no implementation passes every real case",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUINS)
def test_what_is_lost_on_real_activations_decides_against(name: str):
    more, told = RUINS[name]
    found = recommend(material(_with(*more), GOOD), "fp8_e4m3")
    assert found.verdict is Verdict.NOT_RECOMMENDED
    assert told in found.reasons[0]
    assert recommend(material(_with(*more), GOOD), "bf16").verdict is Verdict.RECOMMENDED


@pytest.mark.parametrize("perplexity", [20.21, math.nan, math.inf], ids=["1.05 %", "nan", "inf"])
def test_a_model_that_loses_more_than_the_stated_quality_decides_against(perplexity: float):
    found = recommend(material(found=[quality(perplexity=perplexity)]), "fp8_e4m3")
    assert found.verdict is Verdict.NOT_RECOMMENDED
    assert "perplexity" in found.reasons[0]
    assert recommend(material(found=[quality(perplexity=20.19)]), "fp8_e4m3").verdict is Verdict.RECOMMENDED


@pytest.mark.parametrize(
    ("change", "se", "verdict"),
    [
        (0.02, 0.004, Verdict.NOT_RECOMMENDED),  # 1.2 to 2.8 %
        (0.02, 0.006, Verdict.WITH_CONDITIONS),  # 0.8 to 3.2 %
        (0.005, 0.004, Verdict.WITH_CONDITIONS),  # −0.3 to 1.3 %
        (0.005, 0.002, Verdict.RECOMMENDED),
        (0.0101, None, Verdict.NOT_RECOMMENDED),  # recorded without: by the change alone
        (0.0101, math.nan, Verdict.NOT_RECOMMENDED),
    ],
)
def test_a_rise_of_perplexity_decides_by_the_whole_of_its_interval(
    change: float, se: float | None, verdict: Verdict
) -> None:
    found = recommend(material(found=[quality(perplexity=20 * (1 + change), change_se=se)]), "fp8_e4m3")
    assert found.verdict is verdict
    assert (verdict is Verdict.RECOMMENDED) or "perplexity" in found.reasons[0]
    if verdict is Verdict.WITH_CONDITIONS:
        assert "more text can tell whether that is over 1%" in found.reasons[0]


CONDITIONS = {
    "hard": (made("magnitude/far", "fp8_e4m3", **BROKEN), "keep inputs away from magnitude/far: saturation in q"),
    "failure": (made("normal/odd", "fp8_e4m3", status=Status.FAIL), "not with naive_masked: it fails on normal/odd"),
    "range": (made("real/layer9", "fp8_e4m3", hazards=(SATURATION,)), "saturation in k (fp8_e4m3) on real/layer9"),
    "doubt": (made("real/layer9", "fp8_e4m3", precision=Status.INCONCLUSIVE), "not decided on real/layer9"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_names_what_it_is_about(name: str):
    more, told = CONDITIONS[name]
    found = recommend(material(_with(more), GOOD), "fp8_e4m3")
    assert found.verdict is Verdict.WITH_CONDITIONS
    assert told in found.reasons[0]


def test_other_words_of_a_model_are_a_condition():
    found = recommend(material(found=[quality(top1_agreement=0.98)]), "fp8_e4m3")
    assert found.verdict is Verdict.WITH_CONDITIONS
    assert "differs at 2.0% of positions" in found.reasons[0]


def test_a_failure_that_is_meant_or_refused_is_no_condition():
    from record_factory import deviation

    failing = made("normal/odd", "fp8_e4m3", status=Status.FAIL)
    held = _with(failing, refused("normal/odd", recipe="fp8_e4m3", implementation="online_softmax"))
    listed = reviewed(held, deviation(case="normal/odd"))
    assert recommend(Material(held, listed, GOOD, asked()), "fp8_e4m3").verdict is Verdict.RECOMMENDED


def test_the_rule_that_is_applied_is_in_the_document():
    text = to_markdown(document(material()))
    for line in RULE:
        assert line.split(" where")[0].split(" otherwise")[0] in text


# --- what it says ---


def _tables(m: Material) -> dict[str, Table]:
    blocks = [b for s in document(m).sections for b in s.blocks]
    tables = [b.table if isinstance(b, Chart) else b for b in blocks if isinstance(b, (Chart, Table))]
    return {t.caption: t for t in tables}


def test_figures_are_pooled_and_compared_with_the_first_recipe():
    shown = _tables(material())["Summary by recipe"]
    text = [[v.text for v in row] for row in shown.rows]
    assert text[0][:3] == ["bf16", "2.0e-3", "×1.00"]
    assert text[1][:3] == ["fp8_e4m3", "3.0e-2", "×15.0"]
    assert text[0][4:] == [
        "128 KiB",
        "9.66 ms",
    ]  # as `python -m harness cost --context 32K --bandwidth 2TB/s` says
    assert text[1][4:] == ["64.0 KiB", "8.58 ms"]


def test_a_later_record_of_the_same_cell_stands_for_it():
    held = _with(made("real/layer0", "fp8_e4m3", total_errors=errors(rel_l2=0.5)))
    rows = _tables(material(held))["Accuracy on real activations, by layer and recipe"].rows
    found = {(r[0].text, r[1].text): r[2] for r in rows}[("real/layer0", "fp8_e4m3")]
    assert found.sort == pytest.approx(
        math.sqrt((0.5**2 + 0.03**2) / 2), rel=1e-12
    )  # beside online_softmax's


def test_lengths_make_a_line_and_amplitudes_a_ladder():
    held = _with(made("magnitude/raw-80000", "fp8_e4m3", data={"score_peak": 1e4}, **BROKEN))
    tables = _tables(material(held))
    lengths = tables["Total rel_l2 by number of keys"]
    assert [row[1].text for row in lengths.rows] == ["32", "64", "128"]
    broken = {row[0].text: row[3].text for row in tables["Where each recipe breaks"].rows}
    assert broken == {"bf16": "none of these", "fp8_e4m3": "10,000 (magnitude/raw-80000)"}


def test_the_ledger_counts_what_runs_met():
    tables = _tables(material(_with(made("real/layer9", "fp8_e4m3", hazards=(SATURATION,)))))
    (row,) = tables["Range ledger on real activations"].rows
    assert [v.text for v in row[:5]] == ["fp8_e4m3", "k (fp8_e4m3)", "1", "−1.0", "0.07%"]
    assert row[-1].text == "real/layer9, naive_masked at b,h,i,j = 0,1,2,3"


def test_the_ledger_names_the_place_of_what_spoils_numbers_not_of_a_flush_that_does_not():
    harmless = replace(SATURATION, kind=HazardKind.FLUSH, headroom_bits=-9.0, peak=1.0)
    held = _with(
        *(made(f"real/layer{n}", "fp8_e4m3", hazards=(h,)) for n, h in ((7, harmless), (8, SATURATION)))
    )
    (row,) = _tables(material(held))["Range ledger on real activations"].rows
    assert row[3].text == "−9.0"
    assert row[-1].text.startswith("real/layer8")


def test_stages_too_small_to_matter_share_a_row():
    rows = _tables(material(found=evidence()))["Attribution by stage"].rows
    assert [r[2].text for r in rows if r[1].text == "bf16"] == ["q", "k", "v", "1 others"]


@pytest.mark.parametrize("kind", ["attribution", "quality"])
def test_evidence_that_is_missing_is_said_with_the_command_that_measures_it(kind: str):
    found = [e for e in evidence() if e.kind != kind]
    (section,) = (s for s in document(material(found=found)).sections if s.key == kind)
    (block,) = section.blocks
    assert isinstance(block, Commands)
    assert "was not measured for bf16, fp8_e4m3" in block.told
    assert block.lines[0].startswith("python -m harness evidence --recipes bf16,fp8_e4m3")


def test_worst_cases_come_with_the_line_that_repeats_them():
    failing = made("normal/odd", "fp8_e4m3", status=Status.FAIL, reasons=("it is wrong",), seed=2)
    (section,) = (s for s in document(material(_with(failing))).sections if s.key == "worst")
    lines = [b for b in section.blocks if isinstance(b, Commands) and "normal/odd" in b.told]
    assert lines[0].told.startswith("FAIL normal/odd · naive_masked · seed 2")
    again = "python -m harness run --cases normal --only normal/odd -i naive_masked -r fp8_e4m3 --seeds 3"
    assert lines[0].lines == (again,)


def test_a_recipe_that_changed_since_is_told():
    held = [replace(r, recipe_digest="old") if r.recipe == "fp8_e4m3" else r for r in records()]
    rows = _tables(material(held))["Definitions of the recipes, as they ran"].rows
    assert [r[2].text for r in rows] == ["yes", "no, it has changed"]


def test_a_user_recipe_without_its_definition_has_no_cost_and_says_so():
    held = [replace(r, recipe="mine") if r.recipe == "fp8_e4m3" else r for r in records()]
    text = to_markdown(document(material(held, [], "bf16", "mine")))
    assert "Not modelled: mine" in text


def test_little_is_enough():
    """Nothing but refusals, and one record: each section still says something."""
    for held in (
        [refused("smoke/a", recipe="bf16")],
        [made("smoke/a", "bf16", margins=None, precision=None)],
    ):
        m = material(held, [], "bf16")
        assert recommend(m, "bf16").verdict is Verdict.NOT_DECIDED
        for section in document(m).sections:
            assert section.blocks
        assert to_html(document(m)).count("<section") == 13


def test_what_is_bad_is_marked_so_in_a_column_of_figures():
    m = material(_with(made("real/layer9", "fp8_e4m3", hazards=(SATURATION,))))
    assert '<td class="r bad" data-v="-1">−1.0</td>' in to_html(document(m))
    assert "**−1.0**" in to_markdown(document(m))


# --- the files ---


def test_the_same_records_give_the_same_bytes(page: str):
    assert to_html(document(material(found=evidence()))) == page


def test_figures_are_small_and_their_text_is_text():
    charts = [
        b for s in document(material(found=evidence())).sections for b in s.blocks if isinstance(b, Chart)
    ]
    assert [c.key for c in charts] == ["heatmap", "length", "ladder", "attribution", "tradeoff"]
    for chart in charts:
        svg = chart.draw()
        assert len(svg.encode()) < 100_000
        assert not re.search(r'(href|src)="(?!#)|url\((?!#)|@import|<script|<style|font-family', svg)
        texts = [t.text for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
        assert "fp8_e4m3" in texts
        assert not any("$" in (t or "") for t in texts if chart.key != "tradeoff")
        # what is left of a colour is a name of the page's
        assert not re.findall(r"#[0-9a-f]{6}\b", svg)


class _Reader(html.parser.HTMLParser):
    """Elements, attributes that load or run something, and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "xlink:href", "srcset")
        self.loads += [(k, v or "") for k, v in attrs if k in names or k.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone(page: str):
    reader = _Reader()
    reader.feed(page)
    assert reader.tags.count("script") == 1
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(reader.tags)
    assert all(value.startswith("#") for _, value in reader.loads)
    assert "default-src 'none'" in page
    assert not re.search(r"url\((?!#)|@import", page)
    for key in (
        "summary",
        "real",
        "hard",
        "length",
        "ladder",
        "ledger",
        "attribution",
        "quality",
        "cost",
        "sign-off",
    ):
        assert f'<section id="{key}">' in page


def _hostile() -> Material:
    everywhere = dict.fromkeys(("why", "implementation", "source"), HOSTILE)
    told = {"reasons": (HOSTILE,), "precision_reasons": (HOSTILE,), "precision": Status.FAIL}
    met = (replace(SATURATION, stage=HOSTILE),)
    held = [made(f"real/{HOSTILE}", r, hazards=met, **everywhere, **told) for r in RECIPES_ASKED]
    held += [made(f"magnitude/{HOSTILE}", HOSTILE, why=HOSTILE, data={"score_peak": 9.0}, shape=HOSTILE)]
    held += [made(f"n/{n}{HOSTILE}", HOSTILE, why=HOSTILE, shape=f"[1, 2, {n}, 64]") for n in (1, 2, 3)]
    held = [replace(r, machine=replace(r.machine, cpu=HOSTILE, commit=HOSTILE)) for r in held]
    found = [
        attribution(case=HOSTILE, statement=HOSTILE, best=HOSTILE, recipe_digest=HOSTILE),
        quality(text=HOSTILE, model=HOSTILE, perplexity=30.0),
    ]
    return material(held, found, *RECIPES_ASKED, HOSTILE)


def test_text_from_files_runs_nothing_in_the_page(page: str):
    hostile = to_html(document(_hostile()))
    reader = _Reader()
    reader.feed(hostile)
    assert reader.tags.count("script") == 1
    assert "img" not in reader.tags
    assert all(value.startswith("#") for _, value in reader.loads)
    assert "<script>document.body.dataset.owned=1</script>|`x`" in reader.text  # it is shown, as text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f‪-‮⁦-⁩]", hostile)


def test_text_from_files_opens_nothing_in_markdown():
    text = to_markdown(document(_hostile()))
    outside = re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", text)  # fences, which their content cannot close
    assert "<script" not in outside
    assert "<img" not in outside
    assert not re.search(r"(?<!\\)\[a(?<!\\)\]\(", outside)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f‪-‮⁦-⁩]", text)
    for line in outside.splitlines():
        if line.startswith("|"):  # as many cells as the table has
            table = next(t for t in outside.split("\n\n") if line in t.split("\n")).splitlines()
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table}) == 1


def test_every_table_of_the_page_is_in_markdown_too(page: str):
    doc = document(material(found=evidence()))
    rows = sum(len(t.rows) for t in _tables(material(found=evidence())).values())
    assert page.count("<tr>") - page.count("<thead>") == rows
    text = to_markdown(doc)
    assert (
        sum(line.startswith("|") for line in text.splitlines()) == rows + 2 * page.count("<thead>") + 5
    )  # sign-off's


# --- the command ---


def _run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    write_records(path, records())
    write_evidence(tmp_path / "evidence.jsonl", evidence())
    return path


def test_the_command_writes_both_files_and_names_what_it_read(
    stored: Path, capsys: pytest.CaptureFixture[str]
):
    out = stored.parent / "out"
    given = ("review", stored, "--recipes", "bf16,fp8_e4m3", "--evidence", stored.with_name("evidence.jsonl"))
    assert (
        _run(*given, "--out", out, "--model", "llama-3.1-8b", "--context", "32K", "--bandwidth", "2TB/s") == 0
    )
    assert "written" in capsys.readouterr().out
    text = (out / "review.md").read_text()
    assert text.startswith("# Review: fp8_e4m3 against bf16")
    assert "records.jsonl: 32 lines, SHA-256" in text
    assert "evidence.jsonl: 4 lines, SHA-256" in text
    assert (out / "review.html").read_text().startswith("<!doctype html>")


WRONG = {
    "absent": (
        ("review", "nowhere.jsonl"),
        "nowhere.jsonl does not exist; make one with `python -m harness run`",
    ),
    "unknown": (("--recipes", "bf16,fp16"), "has no record of recipe 'fp16'; it has bf16, fp8_e4m3"),
    "model": (("--model", "gpt-9"), "unknown model 'gpt-9'"),
    "evidence": (("--evidence", "nowhere.jsonl"), "make one with `python -m harness evidence`"),
    "empty": (("--recipes", ","), "no recipe is given"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line_and_exit_2(stored: Path, name: str, capsys: pytest.CaptureFixture[str]):
    given, told = WRONG[name]
    assert _run(*(given if given[0] == "review" else ("review", stored, *given))) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert not (stored.parent / "review.md").exists()


def test_a_pipe_is_refused_since_its_digest_takes_a_second_reading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    os.mkfifo(tmp_path / "pipe")
    assert _run("review", tmp_path / "pipe") == 2
    assert (
        "pipe is no file; give one: the document names what it rests on by a SHA-256"
        in capsys.readouterr().err
    )


def test_an_empty_file_is_nothing_ran(tmp_path: Path):
    (tmp_path / "records.jsonl").write_text("")
    assert _run("review", tmp_path / "records.jsonl") == 3


def test_without_the_extra_one_line_names_it(
    stored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(harness.optional, "find_spec", lambda name: None if name == "jinja2" else True)
    assert _run("review", stored) == 2
    assert (
        "needs jinja2, which is not installed: pip install 'attention-harness[report]'"
        in capsys.readouterr().err
    )


def test_a_recipe_file_gives_a_user_recipe_its_cost(stored: Path):
    recipe = stored.with_name("mine.toml")
    recipe.write_text('storage = { q = "bf16", k = "fp8_e5m2", v = "fp8_e5m2" }\nat = { out = "bf16" }\n')
    write_records(stored, [replace(r, recipe="mine") if r.recipe == "fp8_e4m3" else r for r in records()])
    assert _run("review", stored, "--recipes", f"bf16,{recipe}") == 0
    text = stored.with_name("review.md").read_text()
    assert "Not modelled" not in text
    assert "no, it has changed" in text  # made-up records hold another digest


def test_the_command_loads_neither_torch_nor_a_plot_before_it_is_asked_to():
    code = (
        "import sys, json; import harness.cli.reviewing, harness.report.review;"
        "print(json.dumps([m for m in ('torch', 'numpy', 'matplotlib', 'jinja2') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_the_template_and_what_it_includes_travel_in_the_package(tmp_path: Path):
    folder = Path(__file__).parents[1] / "harness/report/review"
    assert {p.name for p in folder.iterdir() if p.suffix in (".j2", ".css", ".js")} == {
        "review.html.j2", "review.css", "review.js",
    }  # fmt: skip
    write_review(records(), reviewed(records()), [], asked(), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"review.md", "review.html"}


def test_errors_by_head_are_told_with_the_largest_marked():
    heads = (1e-3, 4e-3, 2e-3)
    cells = [replace(r, head_rel_l2=heads) if r.group == "real" else r for r in records()]
    text = to_markdown(document(material(cells)))
    line = next(x for x in text.splitlines() if "4.0e-3 ▲" in x and "real/layer0" in x and "| bf16" in x)
    assert [x.strip() for x in line.split("|")[3:6]] == ["1.0e-3", "4.0e-3 ▲", "2.0e-3"]


def test_records_without_errors_by_head_say_how_to_get_them():
    assert "hold no error by head" in to_markdown(document(material()))


def test_an_error_of_a_quarter_of_the_output_breaks_a_recipe_whatever_its_floor():
    big = errors(rel_l2=0.6)
    cells = [
        replace(r, total_errors=big, errors=errors(rel_l2=1e-3)) if r.group == "magnitude" else r
        for r in records()
    ]
    text = to_markdown(document(material(cells)))
    assert "6.0e-1 BREAKS" in text
    assert "the error is 60% of the output" in text
