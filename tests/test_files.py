"""Outputs are whole or absent, and what stands at a path stays what it is: a link, a pipe, an open file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from record_factory import record

from harness.files import append, write_atomically, write_bytes_atomically, write_lines_atomically
from harness.records import write_records

ROOT = Path(__file__).parents[1]
TEXT = "one\ntwo\n"
WRITERS: dict[str, Callable[[Path], None]] = {
    "text": lambda path: write_atomically(path, TEXT),
    "bytes": lambda path: write_bytes_atomically(path, TEXT.encode()),
    "lines": lambda path: write_lines_atomically(path, TEXT.splitlines(keepends=True)),
}
EVERY = {**WRITERS, "append": lambda path: append(path, TEXT)}
HELD = pytest.mark.skipif(not Path("/dev/fd").exists(), reason="this system has no /dev/fd")


@contextmanager
def read_by_a_thread(path: Path) -> Iterator[list[str]]:
    """What comes out of a pipe, once the block is left."""
    told: list[str] = []
    reader = threading.Thread(target=lambda: told.append(path.read_text()), daemon=True)
    reader.start()
    yield told
    reader.join(timeout=60)
    assert not reader.is_alive()


def only(folder: Path, *names: str) -> bool:
    """Nothing was left beside them."""
    return {path.name for path in folder.iterdir()} == set(names)


@pytest.mark.parametrize("name", EVERY)
def test_pipe_is_written_and_stays_a_pipe(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with read_by_a_thread(pipe) as told:
        EVERY[name](pipe)
    assert told == [TEXT]
    assert pipe.is_fifo()
    assert only(tmp_path, "pipe")


@pytest.mark.parametrize("name", EVERY)
def test_link_to_a_pipe_is_followed(tmp_path: Path, name: str) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("pipe")
    with read_by_a_thread(pipe) as told:
        EVERY[name](link)
    assert told == [TEXT]
    assert link.is_symlink()
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", WRITERS)
def test_link_stays_and_its_target_is_replaced_beside_itself(tmp_path: Path, name: str) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    target, middle, link = there / "file", there / "middle", here / "link"
    target.write_text("earlier")
    before = target.stat().st_ino
    middle.symlink_to("file")  # of its own folder
    link.symlink_to(Path("..", "there", "middle"))
    with target.open() as reader:
        WRITERS[name](link)
        assert reader.read() == "earlier", "replaced, not written over"
    assert target.read_text() == TEXT
    assert target.stat().st_ino != before
    assert link.is_symlink()
    assert middle.is_symlink()
    assert only(here, "link")
    assert only(there, "file", "middle")


@pytest.mark.parametrize("name", WRITERS)
def test_link_to_nothing_makes_what_it_names(tmp_path: Path, name: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(Path("new", "file"))
    WRITERS[name](link)
    assert link.is_symlink()
    assert (tmp_path / "new" / "file").read_text() == TEXT


def test_link_that_has_no_end_is_told_and_stays(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("link")
    with pytest.raises(OSError, match="symbolic links") as error:
        write_atomically(link, TEXT)
    assert error.value.filename == str(link)
    assert link.is_symlink()
    assert only(tmp_path, "link")


def test_folder_is_an_error_and_stays(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to("folder")
    for path in (folder, link):
        with pytest.raises(IsADirectoryError):
            write_atomically(path, TEXT)
    assert only(tmp_path, "folder", "link")


@HELD
@pytest.mark.parametrize("name", EVERY)
def test_pipe_that_the_process_holds_is_written_by_its_number(name: str) -> None:
    reading, writing = os.pipe()
    EVERY[name](Path(f"/dev/fd/{writing}"))
    os.close(writing)
    with os.fdopen(reading) as reader:
        assert reader.read() == TEXT


@HELD
@pytest.mark.parametrize("name", EVERY)
def test_file_that_the_process_holds_goes_on_where_it_is(tmp_path: Path, name: str) -> None:
    """As /dev/stdout does where it was sent to a file: what was printed stays, and what is printed next comes after."""
    link = tmp_path / "link"
    with (tmp_path / "file").open("w") as held:
        link.symlink_to(f"/dev/fd/{held.fileno()}")
        held.write("before\n")
        held.flush()
        EVERY[name](link)
        held.write("after\n")
    assert (tmp_path / "file").read_text() == f"before\n{TEXT}after\n"
    assert link.is_symlink()


@HELD
@pytest.mark.parametrize("name", EVERY)
def test_number_that_nothing_is_held_by_is_told_by_its_name(name: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    with pytest.raises(OSError, match=f"/dev/fd/{writing}"):
        EVERY[name](Path(f"/dev/fd/{writing}"))


def test_file_that_cannot_be_made_is_told_by_its_own_name(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 250)  # a name that leaves no room for a temporary one
    with pytest.raises(OSError, match="too long") as error:
        write_atomically(long, TEXT)
    assert error.value.filename == str(long)


def test_report_writes_its_outputs_into_process_substitutions_and_to_its_own_stdout(tmp_path: Path) -> None:
    """What a shell hands to `--json >(cmd)` is the number of a pipe; what is printed to a file stays beside it."""
    write_records(tmp_path / "r.jsonl", [record()])
    reading, writing = os.pipe()
    with (tmp_path / "shown").open("wb") as shown:
        done = subprocess.run(
            [sys.executable, "-m", "harness", "report", "r.jsonl", "--out", "o", "--junit", f"/dev/fd/{writing}",
             "--summary", "/dev/stdout"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, pass_fds=(writing,), stdout=shown,
            stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    os.close(writing)
    with os.fdopen(reading) as reader:
        assert reader.read().startswith("<?xml")
    assert (done.returncode, done.stderr) == (0, "")
    told = (tmp_path / "shown").read_text(encoding="utf-8")
    assert told.startswith("# Attention accuracy")
    assert (
        f"written: o/report.md, cells.csv, cases.csv, hazards.csv, /dev/fd/{writing}, /dev/stdout\n" in told
    )
