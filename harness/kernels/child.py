"""The run's end of a kernel's process: starts it, calls it under a time limit, ends it, and tells what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, cast

from torch import Tensor

from harness.kernels.wire import receive, send
from harness.registry import LIMIT_VARIABLE

SERVED = ("-m", "harness.kernels.served")
LIMIT_S = 60.0
START_S = 120.0  # loading torch and the kernel's module
MOST_HANGS, MOST_DEATHS = 3, 12  # one after the other, before no more calls are tried
_TOLD = 2000  # characters of stderr that are kept


class KernelEnded(RuntimeError):
    """The kernel's process did not return a result: it was ended, or ended itself."""


class KernelRaised(RuntimeError):
    """The kernel raised; the note is its own traceback."""


def limit_s() -> float:
    """Seconds that one call may take."""
    try:
        return float(os.environ.get(LIMIT_VARIABLE, "")) or LIMIT_S
    except ValueError:
        return LIMIT_S


NOTHING: Mapping[str, str] = {}


class Child:
    """One process for one kernel, started when first needed, and again after it has died. Not shared by threads.
    `program`: what Python runs there, followed by the target; `root`: where it finds its packages first; `env`: of its
    environment, what differs from this process's."""

    def __init__(
        self, target: str, program: Sequence[str] = SERVED, root: str = "", env: Mapping[str, str] = NOTHING
    ) -> None:
        self.env = env
        self.target, self.program, self.root = target, tuple(program), root or _here()
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._signature: dict[str, Any] | None = None
        self._hangs = self._deaths = 0

    def signature(self) -> dict[str, Any]:
        """What the kernel takes. Raises ValueError in one line when it cannot be loaded."""
        if self._signature is None:
            self._start()
        assert self._signature is not None
        return self._signature

    def call(
        self, text: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The kernel's reply. Raises KernelEnded and KernelRaised."""
        if self._hangs >= MOST_HANGS or self._deaths >= MOST_DEATHS:
            why = (
                f"{self._hangs} calls before it did not return"
                if self._hangs
                else f"{self._deaths} before it died"
            )
            raise KernelEnded(f"not run: {why}")
        if self._process is None:
            self._start()
        limit = limit_s()
        reply = self._exchange({**text, "limit_s": limit}, tensors, limit)
        self._hangs = self._deaths = 0
        if "raised" in reply[0]:
            raised = KernelRaised(reply[0]["raised"])
            raised.add_note(reply[0]["traceback"])
            raise raised
        return reply

    def close(self) -> str:
        """End the process, and give its last words. A later call starts another."""
        process, self._process = self._process, None
        said, self._said = self._said, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # a request that nobody read
                        pipe.close()
        if said is None:
            return ""
        with said:
            said.seek(0, os.SEEK_END)
            said.seek(max(0, said.tell() - _TOLD))
            return said.read().decode("utf-8", "replace").strip()

    def _start(self) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 — it lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, *self.program, self.target], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._said, env={**os.environ, **self.env, "PYTHONPATH": os.pathsep.join(_path(self.root))},
            start_new_session=True,  # Ctrl-C is the run's to handle
        )  # fmt: skip
        try:
            reply, _ = self._exchange(None, {}, START_S)
        except KernelEnded as ended:
            raise ValueError(f"{self.target} cannot be loaded: {ended}") from None
        if "unloaded" in reply:
            self.close()
            raise ValueError(f"{self.target} cannot be loaded: {reply['unloaded']}")
        self._signature = reply

    def _exchange(
        self, text: dict[str, Any] | None, tensors: Mapping[str, Tensor], limit: float
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Send, and wait for the reply so long. A thread waits, since pipes have no time limit on every system."""
        process, replies = self._process, []
        assert process is not None

        def exchange() -> None:
            try:
                if text is not None:
                    send(cast(Any, process.stdin), text, tensors)
                replies.append(receive(cast(Any, process.stdout)))
            except (EOFError, OSError, ValueError):
                pass  # the process is gone, as its exit code tells

        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        thread.join(limit)
        if replies:
            return replies[0]
        hung = thread.is_alive()
        code = None if hung else _exit_code(process)
        words = self.close()
        thread.join(1)
        self._hangs, self._deaths = (self._hangs + 1, 0) if hung else (0, self._deaths + 1)
        ended = KernelEnded(
            f"it did not return within {limit:g} s, and was ended"
            if hung
            else f"it ended its process: {_cause(code)}"
        )
        ended.add_note(words)
        raise ended


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(5)
    except subprocess.TimeoutExpired:  # it closed its pipes and lives on
        return None


def _cause(code: int | None) -> str:
    if code is None:
        return "it closed its end of the pipe"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _here() -> str:
    """Where this package lies, so that the child finds it from any folder."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _path(root: str) -> list[str]:
    """That, then what was given."""
    given = os.environ.get("PYTHONPATH", "")
    return [root, *([given] if given else [])]
