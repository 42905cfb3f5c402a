"""Which cells a user asked to compare: a filter that leaves cells out does not make them vanish."""

from __future__ import annotations

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase

from harness.case import Case
from harness.gate.pooled import Key

Selected = Callable[[Key], bool]


def ALL(_: Key) -> bool:
    """Every cell."""
    return True


def scope(
    cases: Collection[Case] | None = None,
    only: Collection[str] = (),
    implementations: Collection[str] = (),
    recipes: Collection[str] = (),
) -> Selected:
    """What these filters select, each where it is given: cases of the same groups as `cases` (so that one that has
    left its file is missed), ids that match a glob of `only`, and names."""
    groups = None if cases is None else {case.group for case in cases}

    def selected(key: Key) -> bool:
        case, implementation, recipe = key
        return (
            (groups is None or case.partition("/")[0] in groups)
            and (not only or any(fnmatchcase(case, pattern) for pattern in only))
            and (not implementations or implementation in implementations)
            and (not recipes or recipe in recipes)
        )

    return selected
