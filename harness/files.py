"""Files that are whole or absent: atomic replacement, and whole-line appends."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to a temporary file beside `path` and rename it: readers see the old or the new, never a part."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """`write_atomically`, for bytes."""
    with _replacing(path) as file:
        file.write(data)


def write_lines_atomically(path: Path, lines: Iterable[str]) -> None:
    """`write_atomically`, for lines with their ends: they are never held as one text."""
    with _replacing(path) as file:
        file.writelines(line.encode() for line in lines)


def append(path: Path, text: str) -> None:
    """Add `text`, and wait until it is on the disk."""
    with _named(path), path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """A full disk raises an error that knows no file: it gets this one's name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` once all of it is on the disk, or never."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with _named(path), os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp gives 0600, which a CI artifact step cannot read
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
