"""Cases: a shape, the rules, how the inputs are drawn, and why the case exists.

Case files are Python builders that define `CASES`. They are named by the question they ask, and found by that name
or by path. Loading one runs it, as importing a module does: load only files you trust.
"""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness._frozen import FrozenMap
from harness.spec import AttentionSpec, Shape

FIXED_DRAWS = ("values", "file")  # the same for every seed: they run once


@dataclass(frozen=True)
class Draw:
    """How inputs are drawn: a `kind` from the table in `harness.inputs` and its numbers."""

    kind: str = "normal"
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not isinstance(self.params, Mapping):
            raise ValueError(f"draw is {self.kind!r}, {self.params!r}; allowed: a kind's name and a mapping")
        object.__setattr__(self, "params", FrozenMap({k: _frozen(v) for k, v in self.params.items()}))

    @property
    def fixed(self) -> bool:
        """Whether every seed gives the same inputs."""
        return self.kind in FIXED_DRAWS


def _frozen(value: Any) -> Any:
    """Lists as tuples all the way down, so that a Draw hashes."""
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Case:
    """One problem. `id` is `group/name`: stable, because records and baselines are keyed by it.

    Raises ValueError for a name that cannot be an id, or without a reason.
    """

    group: str
    name: str
    shape: Shape
    why: str
    spec: AttentionSpec = AttentionSpec()
    draw: Draw = Draw()

    def __post_init__(self) -> None:
        for part in (self.group, self.name):
            if not isinstance(part, str) or not part or not all(c.isalnum() or c in "-_.+=×" for c in part):
                raise ValueError(f"case name is {part!r}; allowed: letters, digits and - _ . + = ×")
        wanted = (("shape", Shape), ("spec", AttentionSpec), ("draw", Draw))
        for field_name, kind in wanted:
            if not isinstance(getattr(self, field_name), kind):
                raise ValueError(
                    f"{field_name} of {self.id} is {getattr(self, field_name)!r}; allowed: a {kind.__name__}"
                )
        if not isinstance(self.why, str) or not self.why.strip():
            raise ValueError(f"case {self.id} gives no reason; say in `why` what it can show")

    @property
    def id(self) -> str:
        return f"{self.group}/{self.name}"


def cases_folder() -> Path:
    """`cases/` of the source tree, or the copy that travels in the wheel."""
    package = Path(__file__).resolve().parent
    installed = package / "_cases"
    return installed if installed.is_dir() else package.parent / "cases"


def case_files() -> dict[str, Path]:
    """The built-in case files by name."""
    return {p.stem: p for p in sorted(cases_folder().glob("*.py"))}


def load_cases(source: str | Path | Iterable[str | Path] = "all") -> tuple[Case, ...]:
    """Cases of a built-in name (`smoke`), of `all`, of a `path.py`, or of several of these.

    Raises ValueError for an unknown name (naming the valid ones), a file without `CASES`, or an id used twice.
    """
    if isinstance(source, (str, Path)):
        source = [source]
    built_in = case_files()
    chosen: dict[Path, None] = {}  # an ordered set: a file named twice is loaded once
    for item in source:
        if str(item) == "all":
            chosen.update(dict.fromkeys(built_in.values()))
        elif str(item) in built_in:
            chosen[built_in[str(item)]] = None
        elif str(item).endswith(".py") and Path(item).is_file():
            chosen[Path(item).resolve()] = None
        else:
            raise ValueError(
                f"unknown cases {str(item)!r}; allowed: all, {', '.join(built_in)}, or a path.py"
            )
    cases = [case for path in chosen for case in _load_file(path)]
    seen: set[str] = set()
    for case in cases:
        if case.id in seen:
            raise ValueError(f"case id {case.id!r} is used twice; give each case of a group its own name")
        seen.add(case.id)
    return tuple(cases)


def _load_file(path: Path) -> list[Case]:
    try:
        cases = runpy.run_path(str(path)).get("CASES")
    except (
        Exception,
        SystemExit,
    ) as error:  # the file is its user's own code: whatever it raises is told by line
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ValueError(f"{where}: {type(error).__name__}: {error}; mend the case file") from error
    if not isinstance(cases, (list, tuple)) or not all(isinstance(c, Case) for c in cases):
        raise ValueError(f"{path} does not define CASES; allowed: a list of harness.Case")
    return list(cases)
