"""How commands take paths. An empty one, as an unset variable of a script leaves it, would be the current folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class _Given(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("the path is empty; give one, such as '.' for the current folder", param, ctx)
        return super().convert(value, param, ctx)


FILE = _Given(path_type=Path, dir_okay=False)
FOLDER = _Given(path_type=Path, file_okay=False)
PLACE = _Given(path_type=Path)  # either
