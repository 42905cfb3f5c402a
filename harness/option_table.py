"""Which implementation takes which option: `list --options` and the table in docs/options.md, asked of `refusals`.

`python -m harness.option_table docs/options.md` writes the table between its markers there.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import registry
from harness._frozen import FrozenMap
from harness.files import write_atomically
from harness.recipe import DEFAULT_RECIPES, Recipe, Scaling, get_recipe
from harness.report import markdown
from harness.spec import AttentionSpec, Shape
from harness.text_table import WIDTH

SHAPE = Shape(2, 4, 4, 4)
START = "<!-- option table: python -m harness.option_table docs/options.md -->"
END = "<!-- option table ends -->"
_GAP = "  "


@dataclass(frozen=True)
class Option:
    """An option, and the least call that has it.

    `spec`, `extras`, `sizes` and `scaling` are the option itself, `beside` the rules without which it says nothing.
    """

    name: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    scaling: str | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("spec", "sizes", "beside"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))

    @property
    def shape(self) -> Shape:
        return replace(SHAPE, **self.sizes)

    def recipe(self, base: Recipe) -> Recipe:
        """The base, or FP8 with this granularity of scales."""
        if self.scaling is None:
            return base
        fp8 = get_recipe("fp8_e4m3")
        scaling = dict.fromkeys(fp8.scaling, Scaling(self.scaling))
        return replace(fp8, name=f"{fp8.name}_{self.scaling}", scaling=scaling)


_CAUSAL, _FULL = {"causal": True}, {"causal": False}
OPTIONS = (
    Option("causal", spec={"causal": True}),
    Option("not causal", spec={"causal": False}),
    Option("align top-left", spec={"align": "top-left"}, sizes={"kv_len": 7}, beside=_CAUSAL),
    Option("window, left side", spec={"window": (1, None)}),
    Option("window, right, not causal", spec={"window": (None, 1)}, beside=_FULL),
    Option("window, both, not causal", spec={"window": (1, 0)}, beside=_FULL),
    Option("scale", spec={"scale": 0.3}),
    Option("softcap", spec={"softcap": 0.5}),
    Option("empty_row nan", spec={"empty_row": "nan"}, sizes={"q_len": 7}, beside=_CAUSAL),
    Option("mask", extras=("mask",)),
    Option("bias", extras=("bias",)),
    Option("bias of −∞", extras=("bias",)),
    Option("ALiBi (a bias)", extras=("bias",)),
    Option("sinks", extras=("sinks",)),
    Option("kv_lens", extras=("kv_lens",)),
    Option("kv_lens, causal", extras=("kv_lens",), beside=_CAUSAL),
    Option("padding, left (a mask)", extras=("mask",)),
    Option("padding, right (a mask)", extras=("mask",)),
    Option("packed sequences (a mask)", extras=("mask",)),
    Option("GQA", sizes={"kv_heads": 2}),
    Option("MQA", sizes={"kv_heads": 1}),
    Option("E ≠ D", sizes={"value_dim": 3}),
    Option("D = 0", sizes={"head_dim": 0, "value_dim": 4}),
    Option("L < S", sizes={"kv_len": 7}),
    Option("L > S", sizes={"q_len": 7}),
    Option("S = 0", sizes={"kv_len": 0}),
    Option("a scale for each token", scaling="token"),
)


@dataclass(frozen=True)
class OptionTable:
    """`reasons[option][implementation]`: why it is refused; empty when it is taken."""

    options: tuple[str, ...]
    implementations: tuple[str, ...]
    reasons: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """The reasons, each once, in the order of the table."""
        return tuple(dict.fromkeys("; ".join(why) for row in self.reasons for why in row if why))

    def rows(self) -> Iterator[list[str]]:
        """Cells: yes, or no with the number of its note."""
        numbers = {note: f"no [{i}]" for i, note in enumerate(self.notes, 1)}
        for name, row in zip(self.options, self.reasons, strict=True):
            yield [name, *(numbers["; ".join(why)] if why else "yes" for why in row)]


def option_table(names: Iterable[str] | None = None) -> OptionTable:
    """Ask every implementation (or these). Imports them. Raises ValueError for an unknown name."""
    chosen = registry.implementations() if names is None else tuple(names)
    columns = [[refusals(name, option) for option in OPTIONS] for name in chosen]
    return OptionTable(tuple(o.name for o in OPTIONS), chosen, tuple(zip(*columns, strict=True)))


def base_of(name: str) -> tuple[AttentionSpec, Recipe]:
    """The plainest call an implementation takes: not causal before causal, FP64 before the rest.

    Where it takes none of them, the first, so that every option shows its refusal.
    """
    recipes = [get_recipe(r) for r in ("fp64", *DEFAULT_RECIPES)]
    plain = [(AttentionSpec(causal=causal), recipe) for recipe in recipes for causal in (False, True)]
    takes = registry.get(name).refusals
    return next((call for call in plain if not takes(call[0], SHAPE, call[1])), plain[0])


def refusals(name: str, option: Option) -> tuple[str, ...]:
    """Why an implementation does not take an option."""
    spec, recipe = base_of(name)
    spec = replace(spec, **{**option.beside, **option.spec})
    why = registry.get(name).refusals(spec, option.shape, option.recipe(recipe), option.extras)
    return tuple(why)


def to_text(table: OptionTable) -> str:
    """At most 100 columns; more implementations than fit go into a second table."""
    rows = list(table.rows())
    heads = [[""], *(name.replace("_", "_\n").split("\n") for name in table.implementations)]
    widths = [max(map(len, [*head, *(row[i] for row in rows)])) for i, head in enumerate(heads)]
    blocks = ["\n".join(_panel(columns, heads, rows, widths)) for columns in _panels(widths)]
    notes = [
        textwrap.fill(f"[{i}] {note}", WIDTH, subsequent_indent="    ")
        for i, note in enumerate(table.notes, 1)
    ]
    return "\n\n".join([*blocks, "\n".join(notes)] if notes else blocks) + "\n"


def _panels(widths: Sequence[int]) -> list[list[int]]:
    """Columns of each table, beside column 0."""
    panels: list[list[int]] = [[]]
    for i in range(1, len(widths)):
        if panels[-1] and sum(widths[c] + len(_GAP) for c in (*panels[-1], i)) + widths[0] > WIDTH:
            panels.append([])
        panels[-1].append(i)
    return panels


def _panel(
    columns: list[int], heads: list[list[str]], rows: list[list[str]], widths: list[int]
) -> Iterator[str]:
    shown = [0, *columns]
    height = max(len(heads[i]) for i in shown)
    lines = [[heads[i][n] if n < len(heads[i]) else "" for i in shown] for n in range(height)]
    lines += [["-" * widths[i] for i in shown], *([row[i] for i in shown] for row in rows)]
    for line in lines:
        yield _GAP.join(cell.ljust(widths[i]) for i, cell in zip(shown, line, strict=True)).rstrip()


def to_markdown(table: OptionTable) -> str:
    """The same as a Markdown table and a list of notes."""
    headers = ["option", *(f"`{name}`" for name in table.implementations)]
    cells = [[markdown.escape(cell) for cell in row] for row in table.rows()]
    notes = [f"* \\[{i}\\] {markdown.escape(note)}" for i, note in enumerate(table.notes, 1)]
    return "\n".join([markdown.table(headers, cells), "", *notes]).rstrip() + "\n"


def documented(text: str) -> str:
    """A document with the table of the built-in implementations between its markers, but for those whose refusals
    depend on the machine.

    Raises ValueError where there are none.
    """
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"the document lacks the lines {START} and {END}, once each and in this order")
    before, after = text[: text.index(START)], text[text.index(END) :]
    built_in = (e.name for e in registry.table().values() if e.target.startswith("harness.") and not e.needs)
    return f"{before}{START}\n\n{to_markdown(option_table(built_in))}\n{after}"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        write_atomically(path, documented(path.read_text(encoding="utf-8")))
