"""Two things at once in a program that is still one thread, on systems whose processes can be forked."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(work: Callable[[], None], worth: bool) -> Iterator[None]:
    """Do `work` beside the body, in a fork that shares all that was read, or before it: where a fork is not `worth` its
    fifth of a second, or not safe. Both are done on the way out. What fails in the fork is done again here, where its
    error is raised.
    """
    child = os.fork() if worth and _can_fork() else None
    if child is None:
        work()
        yield
        return
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)  # nothing of the parent's is flushed or freed here
    try:
        yield
    finally:
        status = os.waitpid(child, 0)[1]
    if status:
        work()


def _can_fork() -> bool:
    """Linux, a second core, and no thread whose locks a fork would take along: torch starts some that Python does not
    count."""
    return (
        sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and threading.active_count() == 1
        and "torch" not in sys.modules
    )
