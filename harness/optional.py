"""Optional packages: the extras that hold them, and what is said where one is absent."""

from __future__ import annotations

import sys
from importlib.util import find_spec

# Extra → the packages it brings, by import name.
EXTRAS = {
    "report": ("jinja2", "matplotlib"),
    "capture": ("gguf",),
    "dask": ("distributed",),
    "certify": ("flint",),
}


class MissingExtra(RuntimeError):
    """An optional package is not installed. The message is one line: which one, and how to install it."""


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'attention-harness[{extra}]'"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a finder that refuses it, or a module put there by hand
        return module in sys.modules and sys.modules[module] is not None


def need(what: str, extra: str, *modules: str) -> None:
    """Raise MissingExtra unless what `what` uses is installed: `modules`, or all that the extra brings. Nothing is
    imported."""
    absent = [name for name in modules or EXTRAS[extra] if not _is_there(name)]
    if absent:
        verb = "which is" if len(absent) == 1 else "which are"
        raise MissingExtra(f"{what} needs {' and '.join(absent)}, {verb} not installed: {install(extra)}")
