"""What a review is made of, before it is Markdown or HTML. Texts are plain: renderers escape all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Value:
    """A cell of a table. `sort`: what it sorts by, its text where that is None. `tone` is one of TONES."""

    text: str
    sort: float | None = None
    tone: str = ""


TONES = ("", "good", "fair", "bad", "none")  # each stands beside a word or a sign of its own


@dataclass(frozen=True)
class Table:
    """`right`: columns of figures."""

    headers: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    caption: str
    right: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Bullets:
    """`folded`: the line that opens them, "" where they stand open."""

    items: tuple[str, ...]
    folded: str = ""


@dataclass(frozen=True)
class Commands:
    """Lines for a shell. `told` says what they do."""

    told: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Chart:
    """A figure and the table of what it shows. `draw` gives the SVG: only a page that shows figures calls it."""

    key: str
    title: str
    told: str
    draw: Callable[[], str]
    table: Table


@dataclass(frozen=True)
class Card:
    """A recipe's recommendation: the verdict, figures as (name, value), and reasons."""

    name: str
    verdict: str
    tone: str
    role: str
    figures: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Cards:
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class SignOff:
    """Lines for people to fill in and sign."""

    fields: tuple[str, ...]
    lines: int


Block = Table | Paragraph | Heading | Bullets | Commands | Chart | Cards | SignOff


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    title: str
    question: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...] = field(default_factory=tuple)


def table(
    caption: str, headers: Sequence[str], rows: Sequence[Sequence[Value | str]], right: Sequence[int] = ()
) -> Table:
    """A table of values; a text alone is one without a sort key of its own."""
    made = tuple(tuple(v if isinstance(v, Value) else Value(v) for v in row) for row in rows)
    return Table(tuple(headers), made, caption, frozenset(right))
