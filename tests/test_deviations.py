"""Failures that are meant: what counts as known, and that a list nobody checks cannot grow."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from record_factory import TODAY, deviation, record, refused

from harness import registry
from harness.case import case_files, cases_folder, load_cases
from harness.deviations import load_deviations, review
from harness.recipe import recipes
from harness.records import Status

ENTRY = {
    "implementation": '"naive_*"', "case": '"magnitude/*"', "recipe": '"fp16*"', "status": '"FAIL"',
    "reason": '"it overflows"', "link": '"https://example.org"', "expires": "2027-01-01",
}  # fmt: skip


def write(path: Path, **changes: str) -> Path:
    lines = "".join(f"{name} = {value}\n" for name, value in {**ENTRY, **changes}.items())
    path.write_text("[[deviation]]\n" + lines, encoding="utf-8")
    return path


def failed(**changes: object) -> object:
    return record(**{"status": Status.FAIL, **changes})


def test_entry_is_read_as_written(tmp_path: Path) -> None:
    (entry,) = load_deviations(write(tmp_path / "d.toml"))
    assert entry.status is Status.FAIL
    assert entry.expires == datetime.date(2027, 1, 1)
    assert str(entry) == "naive_* × magnitude/* × fp16* → FAIL"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"status": '"REFUSED"'}, "status 'REFUSED'; allowed: FAIL, ERROR"),
        ({"status": '"fail"'}, "status 'fail'; allowed"),
        ({"expires": '"2027-01-01"'}, "expires '2027-01-01'; allowed: a date"),
        ({"expires": "2027-01-01T00:00:00"}, "allowed: a date"),
        ({"reason": '" "'}, "reason ' '; allowed: text"),
        ({"case": "7"}, "case 7; allowed: text"),
        ({"extra": "1"}, "has case, expires, extra"),
    ],
)
def test_wrong_entry_is_named_with_what_is_allowed(
    tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=r"d\.toml, deviation 1 has") as caught:
        load_deviations(write(tmp_path / "d.toml", **changes))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[deviation", "is not TOML"),
        ("[[deviations]]\na = 1", "has deviations; allowed: [[deviation]] tables alone"),
        ("deviation = 1", "allowed: [[deviation]] tables alone"),
        ("deviation = [1]", "deviation 1 is 1; allowed: a [[deviation]] table"),
        ("[[deviation]]", "deviation 1 has nothing; allowed: exactly implementation"),
    ],
)
def test_file_that_is_no_list_of_deviations_says_so(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "d.toml").write_text(text)
    with pytest.raises(ValueError, match=r"d\.toml") as caught:
        load_deviations(tmp_path / "d.toml")
    assert said in str(caught.value)


def test_empty_file_lists_nothing(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text("# nothing\n")
    assert load_deviations(tmp_path / "d.toml") == ()


def test_failure_as_listed_is_known_and_the_run_is_ok() -> None:
    found = review([record(), failed(seed=1)], [deviation(implementation="naive_*")], TODAY)
    assert [r.seed for r, _ in found.known] == [1]
    assert found.ok


@pytest.mark.parametrize(
    "changes",
    [{"implementation": "online*"}, {"case": "other/*"}, {"recipe": "fp8"}, {"status": Status.ERROR}],
)
def test_failure_that_differs_in_one_field_is_unexpected(changes: dict[str, object]) -> None:
    found = review([failed()], [deviation(**changes)], TODAY)
    assert len(found.unexpected) == 1
    assert not found.ok


def test_entry_that_explains_nothing_it_covers_is_unmatched() -> None:
    found = review([record()], [deviation()], TODAY)
    assert found.unmatched == (deviation(),)
    assert not found.ok
    assert review([record()], [deviation(case="other/*")], TODAY).ok  # not run: cannot tell


def test_expired_entry_explains_nothing_and_is_reported() -> None:
    old = deviation(expires=TODAY - datetime.timedelta(days=1))
    found = review([failed()], [old], TODAY)
    assert (len(found.unexpected), found.expired, found.unmatched) == (1, (old,), ())
    assert review([failed()], [deviation(expires=TODAY)], TODAY).ok  # the last day counts


def test_refused_and_inconclusive_cells_are_no_failures() -> None:
    assert review([refused(), record(status=Status.INCONCLUSIVE)], [], TODAY).ok


def test_globs_are_sensitive_to_case_and_two_entries_may_explain_one_cell() -> None:
    assert not review([failed()], [deviation(case="SMOKE/*")], TODAY).ok
    found = review([failed()], [deviation(), deviation(case="smoke/*")], TODAY)
    assert len(found.known) == 1
    assert found.ok


def test_shipped_list_loads_and_each_entry_covers_something_there_is() -> None:
    path = cases_folder() / "deviations.toml"
    if not path.is_file():
        pytest.skip("no deviations are listed")
    shipped = load_cases(list(case_files()))  # with what runs only when its file is named
    cells = [(i, c.id, r) for i in registry.implementations() for c in shipped for r in recipes()]
    for entry in load_deviations(path):
        assert any(entry.covers(*cell) for cell in cells), str(entry)
