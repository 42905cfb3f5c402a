"""The pytest plug-in, in pytest runs of its own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from harness.cli import main
from harness.records import Status, read_records

pytest_plugins = ("pytester",)
ROOT = Path(__file__).resolve().parent.parent
TEST = """
import pytest, torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from harness import AttentionSpec

def drawn(dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 128, 32, generator=g).to(dtype) for _ in range(3)]

def test_right(attention):
    q, k, v = drawn()
    j = attention.assert_close(sdpa(q, k, v, is_causal=True), q, k, v, spec=AttentionSpec(causal=True))
    assert j.status.value == "PASS"

def test_wrong(attention):
    q, k, v = drawn()
    attention.assert_close(sdpa(q, k, v, scale=0.2), q, k, v, recipe="bf16")

@pytest.mark.parametrize("name", ["a/b c"])
def test_unrounded(attention, name):
    q, k, v = drawn(torch.float32)
    out = sdpa(*(x.bfloat16() for x in (q, k, v))) * 1.05
    attention.assert_close(out, q, k, v, quantize=True)

def test_twice(attention):
    q, k, v = drawn(torch.float32)
    for factor in (1, 2):
        attention.judge(factor * sdpa(q, k, v), q, k, v, recipe="fp32")
"""


@pytest.fixture
def child(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(test_mine=TEST)
    return pytester


def test_records_properties_and_the_story_come_from_one_run(child: pytest.Pytester) -> None:
    result = child.runpytest_subprocess(
        "-p", "harness.pytest_plugin", "--attention-records", "out/attention.jsonl", "--junitxml", "junit.xml"
    )
    result.assert_outcomes(passed=2, failed=2)
    said = result.stdout.str()
    for part in (
        "attention is FAIL under recipe bf16", "likeliest fault: scale", "but should be ≤", "at b=0 h=", "to go on: ",
        "torch was seeded with ", "to repeat: pytest 'test_mine.py::test_wrong'", "attention: 5 records in out/",
    ):  # fmt: skip
        assert part in said, part
    _records(child.path)
    _junit(child.path)
    _repeats(child.path, said)


def _records(folder: Path) -> None:
    records = {r.case: r for r in read_records(folder / "out/attention.jsonl")}
    assert {c: r.status for c, r in records.items()} == {
        "test/test_mine.py-test_right": Status.PASS, "test/test_mine.py-test_wrong": Status.FAIL,
        "test/test_mine.py-test_unrounded-a-b-c": Status.FAIL, "test/test_mine.py-test_twice": Status.PASS,
        "test/test_mine.py-test_twice-1": Status.FAIL,
    }  # fmt: skip
    right = records["test/test_mine.py-test_right"]
    assert (right.recipe, right.shape, right.source) == (
        "bf16",
        "[1, 2, 128, 32]",
        "test_mine.py::test_right",
    )


def _junit(folder: Path) -> None:
    cases = {c.get("name"): c for c in ET.parse(folder / "junit.xml").getroot().iter("testcase")}
    found = {
        name: {p.get("name"): p.get("value") for p in case.iter("property")} for name, case in cases.items()
    }
    assert found["test_right"]["attention_status"] == "PASS"
    assert found["test_wrong"]["attention_fault"] == "scale"
    assert float(str(found["test_wrong"]["attention_times_expected"])) > 1
    assert found["test_twice"]["attention_1_status"] == "FAIL"


def _repeats(folder: Path, said: str) -> None:
    """The printed commands give the verdict again."""
    commands = dict.fromkeys(  # under CI pytest's summary says it all again
        line.split("judge ", 1)[1]
        for line in said.splitlines()
        if "to repeat: python -m harness judge " in line
    )
    assert len(commands) == 2
    assert sum(c.endswith(" --quantize") for c in commands) == 1
    for command in commands:
        path, *flags = command.split()
        with pytest.raises(SystemExit) as caught:
            main(["judge", str(folder / path), *flags])
        assert caught.value.code == 1


def test_without_the_option_nothing_is_written_and_the_message_tells_of_it(child: pytest.Pytester) -> None:
    result = child.runpytest_subprocess(
        "-p", "harness.pytest_plugin", "-p", "no:cacheprovider", "-k", "wrong"
    )
    result.assert_outcomes(failed=1, deselected=3)
    assert "--attention-records attention.jsonl  # keeps the tensors" in result.stdout.str()
    assert not [p for p in child.path.rglob("*") if p.suffix in (".jsonl", ".safetensors", ".failures")]


def test_the_plug_in_alone_loads_neither_torch_nor_numpy(child: pytest.Pytester) -> None:
    code = "import sys, harness.pytest_plugin; print(sorted({'torch', 'numpy', 'pydantic'} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_pytest_finds_the_plug_in_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["pytest11"]
    assert points == {"harness.pytest_plugin": "harness.pytest_plugin"}
