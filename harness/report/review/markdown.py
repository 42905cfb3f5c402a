"""The review as Markdown (GitHub's dialect). Every text is escaped here; figures stand as their tables."""

from __future__ import annotations

from harness.report.markdown import code_block, escape
from harness.report.markdown import table as pipe_table
from harness.report.review.blocks import (
    Block,
    Bullets,
    Card,
    Cards,
    Chart,
    Commands,
    Document,
    Heading,
    Paragraph,
    SignOff,
    Table,
)

_SIGNS = {"good": "✔", "fair": "▲", "bad": "✘", "none": "○"}


def to_markdown(doc: Document) -> str:
    """Ends with a newline."""
    facts = " · ".join(f"{escape(name)}: {escape(value)}" for name, value in doc.facts)
    parts = [f"# {escape(doc.title)}", escape(doc.question), facts]
    for section in doc.sections:
        parts.append(f"## {escape(section.title)}")
        parts += [_block(b) for b in section.blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(b: Block) -> str:
    match b:
        case Paragraph():
            return escape(b.text)
        case Heading():
            return f"### {escape(b.text)}"
        case Bullets():
            items = "\n".join(f"* {escape(item)}" for item in b.items)
            return f"{escape(b.folded)}:\n\n{items}" if b.folded else items
        case Commands():
            return f"{escape(b.told)}\n\n{code_block(chr(10).join(b.lines))}"
        case Table():
            return _table(b)
        case Chart():
            return f"{escape(b.told)}\n\n{_table(b.table)}"
        case Cards():
            return "\n\n".join(_card(card) for card in b.cards)
        case SignOff():
            return pipe_table([escape(f) for f in b.fields], [[" "] * len(b.fields)] * b.lines)


def _table(t: Table) -> str:
    rows = [[_bold(escape(v.text), v.tone) for v in row] for row in t.rows]
    return f"**{escape(t.caption)}**\n\n" + pipe_table([escape(h) for h in t.headers], rows, right=t.right)


def _bold(text: str, tone: str) -> str:
    return f"**{text}**" if tone == "bad" and text.strip() else text


def _card(card: Card) -> str:
    figures = "; ".join(f"{escape(name)} {escape(value)}" for name, value in card.figures)
    head = f"**{_SIGNS[card.tone]} {escape(card.name)}: {escape(card.verdict)}** ({escape(card.role)}; {figures})"
    return head + "\n\n" + "\n".join(f"* {escape(reason)}" for reason in card.reasons)
