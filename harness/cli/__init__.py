"""The command line: `python -m harness COMMAND`, also installed as `attention-harness`.

Exit codes: 0 pass · 1 a failure or regression · 2 wrong usage or a missing baseline · 3 nothing ran · 130 interrupted.
torch is imported by the commands that need it, after their arguments are checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from harness.cli.exits import FAILURE, INTERRUPTED, USAGE
from harness.cli.group import cli


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Every mistake of use is one line on stderr and exit code 2."""
    try:
        code = cli.main(args=None if arguments is None else list(arguments), standalone_mode=False)
    except click.UsageError as error:
        command = "python -m harness" if error.ctx is None else error.ctx.command_path
        code = _say(error.format_message(), f"see `{command} --help`", code=error.exit_code)
    except click.ClickException as error:
        code = _say(error.format_message(), code=error.exit_code)
    except BrokenPipeError:  # `… | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit meets no pipe
        code = FAILURE
    except (ValueError, OSError) as error:
        code = _say(_told(error), *getattr(error, "__notes__", ()), code=USAGE)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted; what a run recorded is whole, and `run --resume` goes on with it", err=True)
        code = INTERRUPTED
    sys.exit(code or 0)


def _told(error: ValueError | OSError) -> str:
    if not isinstance(error, OSError) or error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}; give a path that can be read or written there"


def _say(message: str, *notes: str, code: int) -> int:
    """One line, whatever the message holds."""
    said = " ".join(message.split())
    said += "".join(f" ({' '.join(note.split())})" for note in notes)
    click.echo(f"error: {said}".replace("##[", "# #["), err=True)  # which GitHub's runner would obey
    return code
