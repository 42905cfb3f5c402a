"""Cases: a shape, the rules, how the inputs are drawn, and why the case exists.

Case files are Python builders that define `CASES`, and `MORE` for what runs only when the file itself is named. They
are named by the question they ask, and found by that name or by path. Loading one runs it, as importing a module does:
load only files you trust.
"""

from __future__ import annotations

import hashlib
import runpy
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness._frozen import FrozenMap
from harness.recipe import DEFAULT_RECIPES
from harness.spec import AttentionSpec, LayerSpec, Shape

FIXED_DRAWS = ("values", "file")  # q, k and v are the same for every seed: such a case runs once
FEWEST_ROWS = 8  # that a case may be judged by
EXTRAS = ("mask", "bias", "sinks", "kv_lens")
# How q, k and v lie in memory; their values are the same. `bshd`: heads inside tokens. `padded`: rows farther apart
# than they are wide. `interleaved`: neighbours in a row are two elements apart. `fused`: cut from one token-major
# buffer.
LAYOUTS = ("contiguous", "bshd", "padded", "interleaved", "fused")


@dataclass(frozen=True)
class Draw:
    """How inputs are drawn: a `kind` from the table in `harness.inputs` and its numbers."""

    kind: str = "normal"
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not isinstance(self.params, Mapping):
            raise ValueError(f"draw is {self.kind!r}, {self.params!r}; allowed: a kind's name and a mapping")
        object.__setattr__(self, "params", FrozenMap({k: _frozen(v) for k, v in self.params.items()}))


def _frozen(value: Any) -> Any:
    """Lists as tuples all the way down, so that a Draw hashes."""
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Case:
    """One problem. `id` is `group/name`: stable, because records and baselines are keyed by it.

    `extras`: how `mask`, `bias`, `sinks` and `kv_lens` are drawn, for those it has (kinds in `harness.extras`).
    `layout`: one of LAYOUTS. `seeds`: run this many draws at most, where the cases are the sample. `recipes`: of those
    a run takes where none are named, only these, where the others repeat what they show. `relations`: also run what
    should give the same numbers (other block sizes, rows and sequences alone, one call for all steps) and record how
    far apart they are (first draw alone). `layer`: the case is a whole layer, and `shape` and `spec` those of the
    attention inside; X and weights are drawn by a kind for layers. `rows`: judge a long call by so
    many rows of each head (`harness.choose_rows`, whose seed is the draw's); its exact inputs are FP32 numbers.
    `source`: the file it comes from, set on loading; it takes no part in comparisons.

    Raises ValueError for a name that cannot be an id, a value out of these, or a case without a reason.
    """

    group: str
    name: str
    shape: Shape
    why: str
    spec: AttentionSpec = AttentionSpec()
    draw: Draw = Draw()
    extras: Mapping[str, Draw] = field(default_factory=dict)
    layout: str = "contiguous"
    seeds: int | None = None
    recipes: tuple[str, ...] = ()
    relations: bool = False
    layer: LayerSpec | None = None
    rows: int | None = None
    source: str = field(default="", compare=False)

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
        extras = self.extras
        if not isinstance(extras, Mapping) or not all(isinstance(d, Draw) for d in extras.values()):
            raise ValueError(
                f"extras of {self.id} is {extras!r}; allowed: a mapping of names to harness.Draw"
            )
        for name in extras:
            if name not in EXTRAS:
                raise ValueError(f"extras of {self.id} names {name!r}; allowed: {', '.join(EXTRAS)}")
        object.__setattr__(self, "extras", FrozenMap(extras))
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout of {self.id} is {self.layout!r}; allowed: {', '.join(LAYOUTS)}")
        whole = isinstance(self.seeds, int) and not isinstance(self.seeds, bool) and self.seeds >= 1
        if self.seeds is not None and not whole:
            raise ValueError(
                f"seeds of {self.id} is {self.seeds!r}; allowed: an integer ≥ 1, or None for no limit"
            )
        if not isinstance(self.recipes, tuple) or any(r not in DEFAULT_RECIPES for r in self.recipes):
            allowed = ", ".join(DEFAULT_RECIPES)
            raise ValueError(
                f"recipes of {self.id} is {self.recipes!r}; allowed: a tuple of {allowed}, or () for all"
            )
        if not isinstance(self.relations, bool):
            raise ValueError(f"relations of {self.id} is {self.relations!r}; allowed: True, False")
        counts = isinstance(self.rows, int) and not isinstance(self.rows, bool) and self.rows >= FEWEST_ROWS
        if self.rows is not None and not counts:
            raise ValueError(
                f"rows of {self.id} is {self.rows!r}; allowed: an integer ≥ {FEWEST_ROWS}, or None for all"
            )
        if self.rows is not None and (
            self.layer is not None or self.relations or self.layout != "contiguous"
        ):
            raise ValueError(
                f"{self.id} is judged by some rows, beside a layer, relations or a layout; allowed: rows alone"
            )
        if self.layer is not None:
            self._check_layer(self.layer)

    def _check_layer(self, layer: LayerSpec) -> None:
        if not isinstance(layer, LayerSpec):
            raise ValueError(f"layer of {self.id} is {layer!r}; allowed: a harness.LayerSpec, or None")
        if self.extras or self.layout != "contiguous":
            raise ValueError(f"{self.id} has a layer beside extras or a layout; allowed: the layer alone")
        layer.check(self.shape, self.spec)

    @property
    def id(self) -> str:
        return f"{self.group}/{self.name}"

    def draws(self, seeds: int) -> int:
        """How many of `seeds` draws run: fewer where all give the same inputs, or the case limits them."""
        return 1 if self.draw.kind in FIXED_DRAWS else min(seeds, self.seeds or seeds)

    def chooses(self, recipe: str) -> bool:
        """Whether a run that names no recipes takes this one."""
        return not self.recipes or recipe in self.recipes

    @property
    def digest(self) -> str:
        """16 hex digits of all that defines the problem, its name and its reason left out: a record can tell by it
        whether its case has changed since."""
        draws = [("qkv", self.draw), *sorted(self.extras.items())]
        parts = [(name, draw.kind, sorted(draw.params.items())) for name, draw in draws]
        facts: tuple[Any, ...] = (self.shape, self.spec, parts, self.layout, self.relations)
        facts += () if self.layer is None else (self.layer,)
        text = repr(facts if self.rows is None else (*facts, ("rows", self.rows)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def cases_folder() -> Path:
    """`cases/` of the source tree, or the copy that travels in the wheel."""
    package = Path(__file__).resolve().parent
    installed = package / "_cases"
    return installed if installed.is_dir() else package.parent / "cases"


def case_files() -> dict[str, Path]:
    """The built-in case files by name."""
    return {p.stem: p for p in sorted(cases_folder().glob("*.py"))}


def load_cases(source: str | Path | Iterable[str | Path] = "all") -> tuple[Case, ...]:
    """Cases of a built-in name (`smoke`), of `all`, of a `path.py`, or of several of these. `all` leaves out what a
    file keeps under `MORE`.

    Raises ValueError for an unknown name (naming the valid ones), a file without `CASES`, or an id used twice.
    """
    if isinstance(source, (str, Path)):
        source = [source]
    built_in = case_files()
    chosen: dict[Path, bool] = {}  # whether with MORE; ordered, and a file named twice is loaded once
    for item in source:
        if str(item) == "all":
            chosen.update({path: chosen.get(path, False) for path in built_in.values()})
        elif str(item) in built_in:
            chosen[built_in[str(item)]] = True
        elif str(item).endswith(".py") and Path(item).is_file():
            chosen[Path(item).resolve()] = True
        else:
            raise ValueError(
                f"unknown cases {str(item)!r}; allowed: all, {', '.join(built_in)}, or a path.py"
            )
    names = {path: name for name, path in built_in.items()}
    cases = [
        replace(case, source=names.get(path, str(path)))
        for path, more in chosen.items()
        for case in _load_file(path, more)
    ]
    seen: set[str] = set()
    for case in cases:
        if case.id in seen:
            raise ValueError(f"case id {case.id!r} is used twice; give each case of a group its own name")
        seen.add(case.id)
    return tuple(cases)


def _load_file(path: Path, more: bool) -> list[Case]:
    try:
        defined = runpy.run_path(str(path))
    except (
        Exception,
        SystemExit,
    ) as error:  # the file is its user's own code: whatever it raises is told by line
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ValueError(f"{where}: {type(error).__name__}: {error}; mend the case file") from error
    parts = [defined.get("CASES"), *([defined.get("MORE", [])] if more else [])]
    for name, cases in zip(("CASES", "MORE"), parts, strict=False):
        if not isinstance(cases, (list, tuple)) or not all(isinstance(c, Case) for c in cases):
            raise ValueError(f"{path} does not define {name}; allowed: a list of harness.Case")
    return [case for cases in parts for case in cases or ()]
