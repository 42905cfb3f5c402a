"""Records survive the file, whatever they hold, and a file is whole or told apart from one that is not."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import tempfile
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_factory import MACHINE, OVERFLOW, record

from harness import files
from harness.records import (
    SCHEMA,
    Errors,
    Hazard,
    HazardKind,
    Record,
    Status,
    pooled_rms,
    read_records,
    to_json,
    why_empty,
    write_records,
)

NASTY = ["\u2028", "\u2029\x85\x0b\x0c", "\r\n", "\x00", "\ud800", "a\udcffb", "𝔘×", '"\\', "nan", "-inf"]
TEXT = st.one_of(st.sampled_from(NASTY), st.text(st.characters(), max_size=20))
FLOAT = st.floats()
COUNT = st.integers(0, 2**70)
WHERE = st.none() | st.tuples(COUNT, COUNT, COUNT, COUNT)
ERRORS = st.builds(
    Errors,
    **{f.name: COUNT if f.type == "int" else FLOAT for f in dataclasses.fields(Errors) if f.name != "worst"},
    worst=WHERE,
)
HAZARD = st.builds(
    Hazard, kind=st.sampled_from(HazardKind), stage=TEXT, format=TEXT, source=TEXT, peak=FLOAT,
    headroom_bits=FLOAT, count=COUNT, total=COUNT, where=WHERE, lost_mass=FLOAT,
)  # fmt: skip
RECORD = st.builds(
    Record, case=TEXT, group=TEXT, shape=TEXT, why=TEXT, implementation=TEXT, recipe=TEXT, recipe_digest=TEXT,
    seed=COUNT, status=st.sampled_from(Status), reasons=st.lists(TEXT, max_size=2).map(tuple),
    errors=st.none() | ERRORS, total_errors=st.none() | ERRORS, lse_errors=st.none() | ERRORS,
    hazards=st.lists(HAZARD, max_size=2).map(tuple), traceback=TEXT, emulated=st.booleans(), run_ms=FLOAT,
    truth_ms=FLOAT, flops=COUNT, computed_flops=COUNT, kv_bytes_per_token=FLOAT,
    data=st.dictionaries(TEXT, FLOAT, max_size=2), inputs_hash=TEXT, output_hash=TEXT, machine=st.just(MACHINE),
    created=TEXT, schema=st.just(SCHEMA),
)  # fmt: skip


def shown(value: object) -> str:
    """Equal for NaN and NaN, unlike `==`; lone surrogates as the file holds them."""
    return repr(value).replace("\\\\ud", "\\ud")


@settings(max_examples=60)
@given(st.lists(RECORD, max_size=3))
def test_records_come_back_from_a_file_as_they_were(records: list[Record]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.jsonl"
        write_records(path, records)
        assert path.read_bytes().count(b"\n") == len(records)
        assert [shown(r) for r in read_records(path)] == [shown(r) for r in records]


def test_lone_surrogates_are_written_as_text_that_every_reader_takes(tmp_path: Path) -> None:
    write_records(tmp_path / "r", [record(traceback="file \udcff.py", data={"\ud800": 1.0})])
    (read,) = read_records(tmp_path / "r")
    assert (read.traceback, read.data) == ("file \\udcff.py", {"\\ud800": 1.0})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_strings_in_strict_json(value: float) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"bare {name} in the line")

    line = json.loads(to_json(record(run_ms=value)), parse_constant=refuse)
    assert line["run_ms"] == str(value)


def test_last_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    whole = to_json(record()) + "\n"
    last = to_json(record(seed=1)) + "\n"
    for end in range(len(last)):
        if end % 97 == 0 or end > len(last) - 3:
            (tmp_path / "r").write_text(whole + last[:end])
            assert [r.seed for r in read_records(tmp_path / "r")] == [0]


@pytest.mark.parametrize(
    "line",
    ["{}", "[]", "null", "7", "not json", '{"schema":"1.0"}', '{"schema":"x"}', '{"schema":null}', "[" * 100_000,
     to_json(record()).replace('"PASS"', '"FINE"'), to_json(record())[:-1]],
)  # fmt: skip
def test_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "r"
    path.write_text(f"{to_json(record())}\n{line}\n{to_json(record())}\n")
    with pytest.raises(ValueError, match="r, line 2 is not a record"):
        read_records(path)


def test_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"r holds no records: it is not UTF-8"):
        read_records(tmp_path / "r")


def test_byte_order_mark_of_an_editor_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    (tmp_path / "r").write_text(to_json(record()) + "\n", encoding="utf-8-sig")
    assert read_records(tmp_path / "r") == [record()]


@pytest.mark.parametrize("text", [b"", b"\n", BOM_UTF8, BOM_UTF8 + b"\n", BOM_UTF8 + b" \r\n\n"])
def test_file_of_nothing_but_blanks_and_a_byte_order_mark_holds_no_records(
    tmp_path: Path, text: bytes
) -> None:
    path = tmp_path / "r"
    path.write_bytes(text)
    assert read_records(path) == []
    assert why_empty(path) == f"{path} holds no records"
    path.write_bytes(text + b"{")
    assert "its only line was cut off" in why_empty(path)


def test_newer_major_schema_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    write_records(tmp_path / "r", [record(schema="2.0")])
    with pytest.raises(ValueError, match=r"line 1 has schema 2\.0; this version reads up to .*update"):
        read_records(tmp_path / "r")


@pytest.mark.parametrize("schema", ["0.9", "1", "1.0", "1.99"])
def test_older_and_newer_minor_schemas_are_read(tmp_path: Path, schema: str) -> None:
    fields = {**json.loads(to_json(record(schema=schema))), "a field of the future": 1}
    (tmp_path / "r").write_text(json.dumps(fields) + "\n")
    assert [r.schema for r in read_records(tmp_path / "r")] == [schema]


def test_empty_file_and_blank_lines_hold_no_records(tmp_path: Path) -> None:
    for text in ("", "\n", "  \n\n"):
        (tmp_path / "r").write_text(text)
        assert read_records(tmp_path / "r") == []


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=8))
def test_pooled_rms_lies_between_the_least_and_the_largest(values: list[float]) -> None:
    pooled = pooled_rms(values)
    assert min(values) * (1 - 1e-14) <= pooled <= max(values) * (1 + 1e-14)
    assert pooled == pytest.approx(pooled_rms(reversed(values)), rel=1e-14)
    assert pooled_rms(values * 2) == pytest.approx(pooled, rel=1e-14)


@given(st.lists(st.floats(), max_size=4), st.integers(0, 4))
def test_pooled_rms_is_nan_as_soon_as_one_is(values: list[float], place: int) -> None:
    assert math.isnan(pooled_rms([*values[:place], math.nan, *values[place:]]))


def test_pooled_rms_of_nothing_is_nan_and_of_an_infinity_infinite() -> None:
    assert math.isnan(pooled_rms([]))
    assert pooled_rms([1.0, math.inf]) == math.inf
    assert pooled_rms([3e-200, 4e-200]) == pytest.approx(math.sqrt(12.5) * 1e-200)  # squares would be 0
    assert pooled_rms([1e200]) == 1e200


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "r"
    write_records(path, [record()])
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, step, full)
        with pytest.raises(OSError, match="no space"):
            write_records(path, [record(seed=1)])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["r"]


@pytest.mark.parametrize("how", [files.write_atomically, files.append])
def test_a_full_disk_is_told_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[Path, str], None]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        how(tmp_path / "f", "text")
    assert caught.value.filename == str(tmp_path / "f")


def test_text_that_cannot_be_encoded_leaves_the_old_file(tmp_path: Path) -> None:
    files.write_atomically(tmp_path / "f", "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_atomically(tmp_path / "f", "\ud800")
    assert (tmp_path / "f").read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_lines_that_end_in_an_error_leave_the_old_file(tmp_path: Path) -> None:
    files.write_lines_atomically(tmp_path / "f", ["é\n", "b\n"])
    with pytest.raises(UnicodeEncodeError):
        files.write_lines_atomically(tmp_path / "f", ["new\n", "\ud800"])
    assert (tmp_path / "f").read_bytes() == "é\nb\n".encode()
    assert os.listdir(tmp_path) == ["f"]


def test_written_file_can_be_read_by_others_and_folders_are_made(tmp_path: Path) -> None:
    files.write_atomically(tmp_path / "a" / "b", "x\n")
    assert (tmp_path / "a" / "b").read_bytes() == b"x\n"
    if os.name == "posix":
        assert (tmp_path / "a" / "b").stat().st_mode & 0o444 == 0o444


def test_every_status_and_hazard_carries_advice() -> None:
    assert all(member.advice for member in (*Status, *HazardKind))


def test_hazard_says_where_and_how_far() -> None:
    assert str(OVERFLOW) == (
        "overflow in scores (fp16, observed): peak 1e+05, headroom -0.61 bits, 12 of 4096 at b=0 h=1 i=17 j=9"
    )
    assert OVERFLOW.share == 12 / 4096
    assert dataclasses.replace(OVERFLOW, total=0).share == 0.0


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    (tmp_path / "f").chmod(0o600)
    files.write_atomically(tmp_path / "f", "new")
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(OSError, match="directory") as caught:
        files.write_atomically(tmp_path / "d", "text")
    assert caught.value.filename == str(tmp_path / "d")
    assert not list((tmp_path / "d").iterdir())
    assert os.listdir(tmp_path) == ["d"]
