"""`python -m harness compare`: both sides judged, and timed only where both are right. No test reads a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import compare_study
from harness import registry
from harness.cli import main
from harness.timing.pairs import Paired

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--shape", "1,2,32,16", "--budget", "0.05")
# Any verdict about the time of calls that are all alike: 0 no slower, 1 slower, 3 undecided.
ANY = {0, 1, 3}
KERNELS = """
import torch
def good(q, k, v, *, causal, scale):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
def wrong(q, k, v, *, causal, scale):
    return good(q, k, v, causal=causal, scale=1.1 * scale)
"""


# What an old checkout's registry gives: its naive_masked is wrong, and has nothing but what the first ones had.
WRONG = """
_get = get

class _Wrong:
    def refusals(self, *given):
        return ()

    def run_stored(self, *given):
        from dataclasses import replace
        right = _get("naive_masked").run_stored(*given)
        return replace(right, out=right.out * 1.1)

def get(name):
    return _Wrong() if name == "naive_masked" else _get(name)
"""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`harness compare` in this process, in a folder that has two kernels."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.py").write_text(KERNELS)

    def called(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as stop:
            main(["compare", *map(str, arguments)])
        assert isinstance(stop.value.code, int)
        return Outcome(stop.value.code, *capsys.readouterr())

    return called


def test_two_recipes_are_both_judged_and_timed(compare: Call) -> None:
    done = compare("naive_masked", "sdpa_flash:bf16", *SMALL, "--causal")
    assert done.code in ANY
    assert "naive_masked:fp32" in done.out
    assert "sdpa_flash:bf16" in done.out
    assert done.out.count("PASS, ×") == 2
    assert "B ÷ A = " in done.out
    assert max(map(len, done.out.splitlines())) <= 100


def test_emulated_precision_is_called_so(compare: Call) -> None:
    done = compare("naive_masked:fp32", "naive_masked:bf16", *SMALL)
    assert "B is emulated: its time is the emulator's" in done.out
    assert "A is emulated" not in done.out


def test_a_wrong_kernel_is_not_timed_and_fails(compare: Call) -> None:
    done = compare("sdpa_flash", "kernels.py:wrong", *SMALL)
    assert done.code == 1
    assert "not timed: B did not pass" in done.out
    assert "B is FAIL: " in done.out
    assert "B ÷ A" not in done.out
    anyway = compare("sdpa_flash", "kernels.py:wrong", *SMALL, "--anyway")
    assert anyway.code == 1
    assert "B ÷ A = " in anyway.out


def test_a_side_that_raises_or_refuses_is_told_in_a_line(
    compare: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raises:
        def refusals(self, *_: object) -> tuple[str, ...]:
            return ()

        def run_stored(self, *_: object) -> None:
            raise RuntimeError("no such luck\nand more")

    get = registry.get
    monkeypatch.setattr(registry, "get", lambda name: Raises() if name == "naive_masked" else get(name))
    done = compare("naive_masked", "sdpa_flash:fp8_e4m3", *SMALL)
    assert done.code == 3
    assert "A is ERROR: RuntimeError: no such luck\n" in done.out
    assert "B is REFUSED: sdpa_flash rounds as" in done.out
    assert "nothing was timed" in done.err


def test_an_old_checkout_runs_its_own_code(compare: Call, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(ROOT / "harness", old / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    with (old / "harness" / "registry.py").open("a", encoding="utf-8") as registry_of_old:
        registry_of_old.write(WRONG)
    shutil.rmtree(old / "harness" / "timing")  # a checkout from before there was any timing
    done = compare("naive_masked", "sdpa_flash", "--old", old, *SMALL)
    first, second = done.out.split("[1, 2, 32, 16]")[1:]
    assert done.code in ANY
    assert "A is FAIL" in first
    assert "not timed: A did not pass" in first
    assert second.count("PASS, ×") == 2  # its sdpa_flash was left as it is
    assert "B ÷ A = " in second


MISTAKES = [
    (["naive_masked"], "1 given", "two, A and B, or --old"),
    (["naive_masked", "sdpa_flash", "sdpa_math"], "3 given", "two, A and B"),
    (["naive_masked", "nope"], "'nope'", "naive_masked, lower_triangle"),
    (["naive_masked", "nope:bf16"], "'nope'", "naive_masked, lower_triangle"),
    (["naive_masked", "naive_masked:nope"], "'nope'", "fp64, fp32"),
    (["naive_masked", "missing.py:f"], "missing.py", "name:recipe"),
    (["naive_masked", "sdpa_flash", "--shape", "1,2"], "'1,2'", "B,H,L,D"),
    (["naive_masked", "sdpa_flash", "--shape", "1,2,0,16"], "[1, 2, 0, 16]", "sizes ≥ 1"),
    (["naive_masked", "sdpa_flash", "--threshold", "many"], "'many'", "5% or 0.05"),
    (["naive_masked", "sdpa_flash", "--threshold", "100%"], "'100%'", "between 0 and 1"),
    (["naive_masked", "sdpa_flash", "--threads", "0"], "0", "1 to"),
    (["naive_masked", "sdpa_flash", "--budget", "0"], "--budget", "x>0"),
    (["naive_masked", "sdpa_flash", "-r", "nope"], "'nope'", "fp64, fp32"),
    (["naive_masked", "--old", "nowhere"], "nowhere", "root of another checkout"),
    (["kernels.py:good", "--old", str(ROOT)], "--old", "two kernels as A and B"),
]


@pytest.mark.parametrize(
    ("arguments", "given", "allowed"), MISTAKES, ids=[" ".join(m[0][-2:]) for m in MISTAKES]
)
def test_mistake_is_one_line_with_what_was_given_and_what_is_allowed(
    compare: Call, arguments: list[str], given: str, allowed: str
) -> None:
    done = compare(*arguments)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert given in done.err
    assert allowed in done.err


def test_the_study_of_two_checkouts_measures_again_in_fresh_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What no two processes repeat is looked at again by others; the study has to be able to start them."""

    def twice(measure: Callable[[], Paired], renew: Callable[[], None]) -> Paired:
        measure()
        renew()
        return measure()

    for name, value in (("EACH", 1), ("SHORT_S", 0.2), ("repeated", twice)):
        monkeypatch.setattr(compare_study, name, value)
    ((_, found),) = compare_study.checkouts(0)
    assert found.rounds >= 1
