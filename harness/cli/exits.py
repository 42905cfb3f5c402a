"""Exit codes, and the exception for a run that failed without being wrongly used."""

from __future__ import annotations

import click

FAILURE, USAGE, NOTHING_RAN, INTERRUPTED = 1, 2, 3, 130


class RunFailed(click.ClickException):
    """The run itself broke off."""

    exit_code = FAILURE


def nothing_ran(why: str = "") -> int:
    why = why or "the selection is empty, or every cell was refused or inconclusive"
    click.echo(f"nothing ran: {why}", err=True)
    return NOTHING_RAN
