"""The report as JUnit XML, for CI servers that show tests: a suite a group, a test case a cell, its seeds together.

A failure or an error is one that sets exit code 1, so that file and exit code agree: one that a deviation explains is
skipped with its reason, as are refusals and what was inconclusive. The recipe's precision, which sets no exit code, is
a property.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape as xml_escape
from xml.sax.saxutils import quoteattr

from harness.deviations import Review
from harness.records import Record, Status
from harness.report import words
from harness.report.model import KNOWN, pool, pool_ratio
from harness.report.tables import latest, problems

# What XML 1.0 has no way to write (section 2.2), and what it may but should not.
_ILLEGAL = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0010ffff]")
_MESSAGE = 1000  # characters; the element's text has all
# The first that a seed of the cell shows decides; PASS comes before what says nothing about the numbers.
_ORDER = (Status.ERROR.value, Status.FAIL.value, KNOWN, Status.PASS.value, Status.INCONCLUSIVE.value)
_ELEMENTS = {Status.ERROR.value: "error", Status.FAIL.value: "failure", Status.PASS.value: ""}
DEVIATIONS = "deviations"


def to_junit(records: Iterable[Record], review: Review) -> str:
    """The document. Ends with a newline."""
    records = latest(list(records))
    known = {(r.key, r.machine.device): d.reason for r, d in review.known}
    suites: dict[str, dict[tuple[str, str, str, str], list[Record]]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        suites[r.group][*r.group_key, r.machine.device].append(r)
    parts = [_suite(name, list(cells.values()), known) for name, cells in suites.items()]
    entries = problems(review)
    if entries:
        cases = [_case(DEVIATIONS, text, 0.0, [], "failure", text, text) for text in entries]
        parts.append(_wrap("testsuite", DEVIATIONS, Counter(failure=len(entries)), 0.0, "", "".join(cases)))
    total = sum((count for count, _, _ in parts), Counter[str]())
    body = "".join(text for _, _, text in parts)
    _, _, document = _wrap("testsuites", "attention accuracy", total, sum(t for _, t, _ in parts), "", body)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{document}'


_Part = tuple[Counter[str], float, str]
_Known = dict[tuple[tuple[str, str, str, int], str], str]


def _suite(name: str, cells: Sequence[Sequence[Record]], known: _Known) -> _Part:
    counts: Counter[str] = Counter()
    cases, seconds = [], 0.0
    for records in cells:
        label, decisive = _ending(records, known)
        element = _ELEMENTS.get(label, "skipped")
        counts[element] += 1
        took = _seconds(records)
        seconds += took
        message, text = _told(label, decisive, known)
        r = records[0]
        title = f"{r.case} · {r.implementation} · {r.recipe}"
        title += "" if r.machine.device == "cpu" else f" · {r.machine.device}"
        cases.append(_case(name, title, took, _facts(records), element, message, text))
    first = cells[0][0]
    facts = [(f, str(getattr(first.machine, f))) for f in ("cpu", "isa", "torch", "python", "commit")]
    return _wrap("testsuite", name, counts, seconds, first.created, _properties(facts) + "".join(cases))


def _ending(records: Sequence[Record], known: _Known) -> tuple[str, Record]:
    """What decides about a cell, and the first of its records that shows it."""
    labels: dict[str, Record] = {}
    for r in records:
        meant = (r.key, r.machine.device) in known
        labels.setdefault(KNOWN if meant else r.status.value, r)
    label = next((name for name in _ORDER if name in labels), Status.REFUSED.value)
    return label, labels[label]


def _told(label: str, r: Record, known: _Known) -> tuple[str, str]:
    """A line, and all there is to say."""
    reasons = "; ".join(r.reasons) or r.traceback.strip().rpartition("\n")[2] or r.status.advice
    line = f"{label}: {reasons}"
    if label == KNOWN:
        line = f"known: {known[r.key, r.machine.device]}; {r.status.value}: {reasons}"
    lines = [line]
    if r.diagnosis is not None:
        lines.append(f"diagnosis: {r.diagnosis}")
    lines += [f"observed: {h}" for h in r.hazards if h.source == "observed"]
    return line, "\n".join([*lines, *r.traceback.strip().split("\n")]).strip()


def _seconds(records: Iterable[Record]) -> float:
    return sum(r.run_ms for r in records if math.isfinite(r.run_ms)) / 1000


def _facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    ended = Counter(r.status.value for r in records)
    precise = Counter(r.precision.value for r in records if r.precision is not None)
    facts = [("status", " ".join(f"{s} {n}" for s, n in ended.items()))]
    facts.append(("seeds", " ".join(str(r.seed) for r in records)))
    if precise:
        facts.append(("precision", " ".join(f"{s} {n}" for s, n in precise.items())))
    for name, figure in (
        ("rel_l2", pool(r.errors for r in records).rel_l2),
        ("total_rel_l2", pool(r.total_errors for r in records).rel_l2),
        ("error_over_expected", pool_ratio(records)),
    ):
        if not math.isnan(figure):
            facts.append((name, f"{figure:.4g}"))
    return facts


def _case(
    suite: str, name: str, seconds: float, facts: Sequence[tuple[str, str]], element: str, message: str,
    text: str,
) -> str:  # fmt: skip
    head = f" <testcase classname={_attribute(suite)} name={_attribute(name)} time={_attribute(f'{seconds:.6f}')}"
    body = _properties(facts, "  ")
    if element:
        shown = _attribute(words.clip(words.clean(message), _MESSAGE))
        kind = "" if element == "skipped" else f" type={_attribute(message.partition(':')[0])}"
        body += f"  <{element} message={shown}{kind}>{_text(text)}</{element}>\n"
    return f"{head}>\n{body} </testcase>\n" if body else f"{head}/>\n"


def _properties(facts: Sequence[tuple[str, str]], indent: str = " ") -> str:
    if not facts:
        return ""
    rows = "".join(
        f"{indent} <property name={_attribute(name)} value={_attribute(value)}/>\n" for name, value in facts
    )
    return f"{indent}<properties>\n{rows}{indent}</properties>\n"


def _wrap(tag: str, name: str, counts: Counter[str], seconds: float, created: str, body: str) -> _Part:
    sums = {
        "name": name, "tests": counts.total(), "failures": counts["failure"], "errors": counts["error"],
        "skipped": counts["skipped"], "time": f"{seconds:.6f}",
    }  # fmt: skip
    if created:
        sums["timestamp"] = created.partition("+")[0]  # the schema's date-time has no zone
    shown = "".join(f" {key}={_attribute(str(value))}" for key, value in sums.items())
    return counts, seconds, f"<{tag}{shown}>\n{body}</{tag}>\n"


def _attribute(text: str) -> str:
    return quoteattr(_ILLEGAL.sub("?", text))


def _text(text: str) -> str:
    return xml_escape(_ILLEGAL.sub("?", text))
