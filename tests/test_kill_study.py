"""The study of killed runs, in short: `reports/kill-study.md` holds the long one."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kill_study import Kill, Server, one_kill, page, uninterrupted

SEED = int(os.environ.get("KILL_SEED", random.randrange(2**32)))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return uninterrupted(server, tmp_path_factory.mktemp("whole"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("n", [0, 1, 2])
def test_command_killed_at_a_random_point_is_whole_and_resumes(
    n: int, server: Server, whole: bytes, tmp_path: Path
) -> None:
    print(f"KILL_SEED={SEED}")
    found = one_kill(server, n, SEED, whole, tmp_path)
    assert found.problem == "", found
    assert found.kept + found.ran == whole.count(b"\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_study_sees_a_record_that_ran_again_and_one_that_changed(
    server: Server, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study can fail: a resumed run that starts anew, and an uninterrupted run that gave something else."""
    real = server.start
    monkeypatch.setattr(server, "start", lambda *a: real(*(x for x in a if x != "--resume")))
    found = next(
        k for n in (1, 2, 3) if (k := one_kill(server, n, SEED, whole, tmp_path / str(n))).lines > k.partial
    )
    assert "whole records ran again" in found.problem
    monkeypatch.undo()
    other = whole.replace(b'"status":"PASS"', b'"status":"FAIL"', 1)
    found = one_kill(server, 1, SEED, other, tmp_path / "other")
    assert "differ from an uninterrupted run's" in found.problem
    assert "Problems: **1**" in page([found], SEED, 32)


def test_page_counts_what_was_killed() -> None:
    kill = Kill(0, "0.1 s after the start", 1, -9, 8, 0, 8, 24, 0, 0, "")
    text = page([kill, Kill(1, "at the end", 1, 0, 32, 0, 32, 0, 0, 0, "")], 0, 32)
    assert "1 of 2 runs of 32 records died of SIGKILL" in text
