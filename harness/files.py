"""Files that are whole or absent: atomic replacement, and whole-line appends.

What stands at a path stays what it is. A link is followed: the file it leads to is replaced, beside that file. A pipe
or a device is written as it stands, and so is what the process holds open (/dev/stdout, /dev/fd/3).
"""

from __future__ import annotations

import contextlib
import errno
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
    with _named(path), _standing(path) or path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        if path.is_file():  # a pipe has no disk
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
    """A file that takes the place of `path` once all of it is on the disk, or never; or what stands there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _named(path):
        standing = _standing(path)
        if standing is not None:
            with standing as file:
                yield file
            return
    target = _followed(path)
    handle, temporary = _temporary(target)
    try:
        with _named(target), os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == temporary:  # a folder stands there
            error.filename, error.filename2 = str(target), None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _mode(target: Path) -> int:
    """That of the file which is replaced; mkstemp gives a new one 0600, which a CI artifact step cannot read."""
    return target.stat().st_mode & 0o777 if target.is_file() else 0o644


def _standing(path: Path) -> IO[bytes] | None:
    """What is written as it stands, opened; None for a file, a folder and what is not there."""
    number = _held(path)
    if number is not None:
        return os.fdopen(os.dup(number), "wb")
    if path.is_file() or path.is_dir() or not path.exists():
        return None
    # To make or cut is for files; a system may refuse to in a folder that others write to (fs.protected_fifos).
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags & ~(os.O_CREAT | os.O_TRUNC)))


def _held(path: Path) -> int | None:
    """The number of what this process holds open, where `path` is a name of it."""
    own = ("/dev/fd", f"/proc/{os.getpid()}/fd")
    for _ in range(40):  # links; as many as Linux follows
        folder = os.path.realpath(path.parent)
        if folder in own:
            return int(path.name) if path.name.isdecimal() else None
        if not path.is_symlink():
            return None
        path = Path(folder, os.readlink(path))
    return None


def _followed(path: Path) -> Path:
    """Where links lead to."""
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # what cannot be followed to an end
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _temporary(target: Path) -> tuple[int, str]:
    try:
        return tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        error.filename = str(target)  # not a name that nobody gave
        raise
