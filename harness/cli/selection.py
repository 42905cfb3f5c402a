"""What runs: the options that choose cases, implementations and recipes, and what they choose."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import click

from harness import registry
from harness.case import Case, load_cases
from harness.cluster import parse
from harness.recipe import DEFAULT_RECIPES, Recipe, get_recipe, load_recipe

SEEDS = 3
KERNEL_RECIPES = ("fp32", "bf16", "fp16", "fp8_e4m3")  # a kernel is taken for a fused one; others are named
F = TypeVar("F", bound=Callable[..., Any])


def _names(_: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Repeated options and comma lists come to the same."""
    names = tuple(name.strip() for value in values for name in value.split(",") if name.strip())
    if values and not names:  # an empty variable in a script must not choose everything
        raise click.BadParameter("no name is given; leave the option out for its default", param=option)
    return names


def many(*names: str, metavar: str, help: str) -> Callable[[F], F]:
    return click.option(*names, metavar=metavar, help=help, multiple=True, callback=_names)


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    many("--cases", metavar="NAME|FILE.py", help="Case files.  [default: all]"),
    many("--only", metavar="GLOB", help="Case ids of these files, such as 'magnitude/raw-*'."),
    many("-i", "--implementations", "--implementation", metavar="NAME", help="[default: all]"),
    many(
        "-k", "--kernel", "kernels", metavar="FILE.py:NAME",
        help="Your own function, instead of the built-in ones; also package.module:NAME.",
    ),
    click.option("--layout", type=click.Choice(["bhsd", "bshd", "thd"]), help="How --kernel takes q, k and v."),
    click.option("--time-limit", type=click.FloatRange(0.1), metavar="S", help="For a call of --kernel.  [60]"),
    many("-r", "--recipes", "--recipe", metavar="NAME|FILE.toml", help="[default: all but fp64]"),
    click.option(
        "--seeds", type=click.IntRange(1), default=SEEDS, show_default=True, metavar="N",
        help="Draws of each random case.",
    ),
    click.option("--device", default="cpu", show_default=True, metavar="NAME", help="cpu, cuda or cuda:N."),
    click.option(
        "--jobs", type=click.IntRange(1), default=None, metavar="N",
        help="Processes.  [default: one a core; 1 on cuda]",
    ),
    click.option(
        "--executor", default=None, metavar="URL", help="A Dask cluster: dask://host:8786, dask://local?workers=2.",
    ),
)  # fmt: skip


def filters(command: F) -> F:
    """The options that choose what runs. Names may be repeated or joined with commas."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class Selection:
    """Cases × seeds × recipes × implementations on a device; None: those of each case's group by default."""

    cases: tuple[Case, ...]
    implementations: tuple[str, ...] | None
    recipes: tuple[Recipe, ...]
    seeds: int
    device: str
    jobs: int
    named: bool = True  # whether the recipes were: else a case may leave some out
    executor: str = ""

    @property
    def cells(self) -> int:
        return sum(
            case.draws(self.seeds)
            * sum(self.named or case.chooses(r.name) for r in self.recipes)
            * len(self.of(case))
            for case in self.cases
        )

    def of(self, case: Case) -> tuple[str, ...]:
        """The implementations that run on a case."""
        if self.implementations is None:
            return registry.default_implementations(case.group)
        return self.implementations

    def __str__(self) -> str:
        names = {i for case in self.cases for i in self.of(case)}
        parts = (
            (self.cells, "cell"), (len(self.cases), "case"), (len(names), "implementation"),
            (len(self.recipes), "recipe"), (self.seeds, "seed"), (self.jobs, "job"),
        )[: 5 if self.executor else None]  # fmt: skip
        cells, *rest = (f"{n} {word}{'s' * (n != 1)}" for n, word in parts)
        return f"{cells}: {', '.join(rest)}, {self.device}{f' on {self.executor}' if self.executor else ''}"


def select(
    cases: tuple[str, ...], only: tuple[str, ...], implementations: tuple[str, ...], recipes: tuple[str, ...],
    seeds: int, device: str, jobs: int | None, kernels: tuple[str, ...] = (), layout: str | None = None,
    time_limit: float | None = None, executor: str | None = None,
) -> Selection:  # fmt: skip
    """The selection that these options make. torch is not loaded: what it alone can tell is checked later. The time
    limit is for kernels' processes, which inherit it.

    Raises ValueError naming what was given and what is allowed.
    """
    names = tuple(dict.fromkeys((*implementations, *_kernels(kernels, layout)))) or None
    if time_limit is not None:
        os.environ[registry.LIMIT_VARIABLE] = str(time_limit)
    for name in names or ():
        registry.entry(name)
    own = bool(names) and all(map(registry.is_kernel, names or ()))
    chosen = tuple(dict.fromkeys(_recipe(r) for r in recipes or (KERNEL_RECIPES if own else DEFAULT_RECIPES)))
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"unknown device {device!r}; allowed: cpu, cuda or cuda:N")
    if executor is not None:
        parse(executor)
        if jobs is not None:
            raise ValueError(
                f"--jobs {jobs} was given with --executor, whose workers are the jobs; leave one out"
            )
        jobs = 1
    if jobs is None:
        jobs = _cores() if device == "cpu" else 1
    return Selection(
        _cases(cases, only), names, chosen, seeds, device, jobs, bool(recipes) or own, executor or ""
    )


def _kernels(kernels: tuple[str, ...], layout: str | None) -> tuple[str, ...]:
    """Kernels as names of implementations."""
    for name in kernels:
        place, _, function = name.partition("@")[0].rpartition(":")
        file = place.endswith(".py")
        if not place or not function or (not file and ("/" in place or "\\" in place)):
            raise ValueError(
                f"kernel is {name!r}; allowed: path/to/file.py:function or package.module:function"
            )
        if file and not Path(place).is_file():
            raise ValueError(f"{place} does not exist; give the path of the file that {function} is in")
    if layout is None:
        return kernels
    if not kernels:
        raise ValueError(f"--layout {layout} was given without --kernel, which it is for")
    bare = (name.partition("@")[0] for name in kernels)
    return tuple(name if layout == "bhsd" else f"{name}@{layout}" for name in bare)


def _cases(cases: tuple[str, ...], only: tuple[str, ...]) -> tuple[Case, ...]:
    chosen = load_cases(cases or "all")
    if not only:
        return chosen
    kept = tuple(c for c in chosen if any(fnmatchcase(c.id, pattern) for pattern in only))
    if not kept:
        click.echo(
            f"no case id matches {', '.join(only)}; there are {', '.join(c.id for c in chosen)}", err=True
        )
    return kept


def _recipe(name: str) -> Recipe:
    return load_recipe(Path(name)) if name.endswith(".toml") else get_recipe(name)


def _cores() -> int:
    """Cores this process may use: a container's share, not the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
