"""One record told: what was run, against which truths, what each stage did, where it is off, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from harness.recipe import STAGES, TENSORS
from harness.records import Errors, Hazard, Record, Status
from harness.report import words

_ORDER = (Status.ERROR, Status.FAIL, Status.INCONCLUSIVE, Status.REFUSED, Status.PASS)
_TRACEBACK = 15  # lines
_WIDTH = 100


def find(records: Iterable[Record], cell: str) -> list[Record]:
    """Records that `CASE · IMPLEMENTATION · RECIPE · SEED` names, the worst first; commas will do for dots, later parts
    may be left out, and each may be a glob.

    Raises ValueError for more than four parts, or a seed that is no number.
    """
    parts = [p.strip() for p in cell.replace("·", ",").split(",")]
    if not 1 <= len(parts) <= 4 or not parts[0]:
        raise ValueError(f"cell is {cell!r}; allowed: CASE, IMPLEMENTATION, RECIPE, SEED, from the left")
    if len(parts) == 4 and not parts[3].isdecimal():
        raise ValueError(f"seed is {parts[3]!r}; allowed: a number")
    found = [
        r
        for r in records
        if all(fnmatchcase(have, want) for have, want in zip(r.group_key, parts, strict=False))
        and (len(parts) < 4 or r.seed == int(parts[3]))
    ]
    return sorted(found, key=_badness)


def _badness(r: Record) -> tuple[int, float]:
    ratio = r.margins.ratio if r.margins is not None and not math.isnan(r.margins.ratio) else 0.0
    return _ORDER.index(r.status), -ratio


def story(r: Record) -> list[tuple[str, list[str]]]:
    """Headings and their lines, unwrapped; those with nothing to say are left out."""
    sections = (
        ("What was run", _run), ("Verdict", _verdict), ("Truths", _truths), ("Stages", _stages), ("Places", _places),
        ("Runs that should agree", _relations), ("Traceback", _traceback), ("What to do next", _next),
    )  # fmt: skip
    return [(heading, lines) for heading, tell in sections if (lines := [_clean(x) for x in tell(r)])]


def _clean(line: str) -> str:
    """Without control characters, but with its indent."""
    bare = line.lstrip(" ")
    return " " * (len(line) - len(bare)) + words.clean(bare)


def name(r: Record) -> str:
    return f"{r.case} · {r.implementation} · {r.recipe} · seed {r.seed}"


def _run(r: Record) -> Iterator[str]:
    yield f"case {r.case} {r.shape}: {r.why}"
    yield f"recipe {r.recipe}: {r.recipe_digest}"
    yield f"on {words.machine(r.machine)}; {r.created}"
    if r.ran is not None:
        operators = ", ".join(r.ran.operators) or "nothing that is seen"
        yield f"{r.ran.backend} ran {operators} in {r.ran.dtype} on {r.ran.device}"
    if r.data:
        yield "inputs: " + ", ".join(f"{n} {x:.3g}" for n, x in r.data.items())


def _verdict(r: Record) -> Iterator[str]:
    yield f"implementation: {r.status.value}"
    yield from (f"  {reason}" for reason in r.reasons)
    if r.diagnosis is not None:
        yield f"likeliest fault: {r.diagnosis.fault}: {r.diagnosis}"
    if r.precision is not None:
        yield f"recipe: {r.precision.value}"
        yield from (f"  {reason}" for reason in r.precision_reasons)


def _truths(r: Record) -> Iterator[str]:
    if r.errors is not None:
        yield f"against the stored truth (what the kernel did): {_errors(r.errors)}"
    if r.margins is not None:
        m = r.margins
        yield (
            f"  normal is rel_l2 {m.expected_rel_l2:.3g}; error ÷ expected {m.ratio:.3g}, limit {m.limit:.3g};"
            f" {m.ceiling:.2g} of the ceiling"
        )
        yield f"  largest |T| {m.statistic:.3g} of {m.threshold:.3g}" + (
            f" along {m.direction}" if m.direction else ""
        )
    if r.total_errors is not None:
        yield f"against the exact truth (what the precision did too): {_errors(r.total_errors)}"
        if not math.isnan(r.floor):
            yield f"  with ideal scales it would be rel_l2 {r.floor:.3g}"
    if r.lse_errors is not None:
        yield f"log-sum-exp: {_errors(r.lse_errors)}"


def _errors(e: Errors) -> str:
    wrong = f"{e.class_mismatch} NaN or infinities amiss; " if e.class_mismatch else ""
    return (
        f"{wrong}rel_l2 {e.rel_l2:.3g}, max {e.max_abs:.3g} ({e.max_ulp:.3g} ulps), slope {e.slope:+.2g},"
        f" bias {e.bias_ulp:+.2g} ulps, over {e.count:,} elements"
    )


def _stages(r: Record) -> Iterator[str]:
    """Every stage that is rounded, in the order numbers meet them, with the ledger's entries."""
    formats = dict(part.split("→", 1) for part in r.recipe_digest.split() if "→" in part)
    stored = dict(part.split("=", 1) for part in r.recipe_digest.split() if part[:2] in ("q=", "k=", "v="))
    for stage in (*TENSORS, *STAGES):
        seen = [h for h in r.hazards if h.stage == stage]
        fmt = stored.get(stage) or formats.get(stage)
        if fmt is None and not seen:
            continue
        yield f"{stage} in {fmt or 'the base format'}: {'' if seen else 'nothing foreseen or seen to leave its range'}"
        yield from (f"  {line}" for h in seen for line in _hazard(h))


def _hazard(h: Hazard) -> Iterator[str]:
    lost = f", {h.lost_mass:.2%} of the probability mass lost" if h.lost_mass else ""
    yield f"{h}{lost}"
    yield f"  {h.kind.advice}"


def _places(r: Record) -> Iterator[str]:
    if r.errors is not None and r.errors.worst is not None:
        yield "largest error at b={} h={} i={} c={}".format(*r.errors.worst)
    if r.margins is not None and r.margins.worst_at:
        yield f"nearest to its limit (or past it): {r.margins.worst_at}, {r.margins.worst:.2g} of it"
    for row in r.mask_rows:
        yield (
            f"row {row.where}: its bias leaves {row.shown} keys, {row.meant} of them meant, and {row.effective} weigh"
            f" anything in {row.format}"
        )


def _relations(r: Record) -> Iterator[str]:
    yield from (f"{x.name}: {x}" for x in r.relations)


def _traceback(r: Record) -> Iterator[str]:
    yield from r.traceback.rstrip().splitlines()[-_TRACEBACK:]


def _next(r: Record) -> Iterator[str]:
    if r.status is not Status.PASS:
        yield f"{r.status.value}: {r.status.advice}"
    if r.diagnosis is not None and r.diagnosis.rivals:
        yield f"tell it from {', '.join(r.diagnosis.rivals)}: another shape or other data part faults that are one here"
    if r.margins is not None and r.margins.unseen and r.status in (Status.PASS, Status.INCONCLUSIVE):
        sizes = ", ".join(f"{n} {x:.1g}" for n, x in sorted(r.margins.unseen.items()))
        yield f"these inputs could not have shown faults smaller than: {sizes}"
    if r.precision is Status.FAIL:
        yield "the recipe costs too much on these inputs, whatever the kernel: widen the stage named above finer"
    yield "run it again:"
    yield from words.command_lines(again(r), _WIDTH, "  ")


def again(r: Record) -> Sequence[str]:
    """Words, unquoted, that run a record's cell again."""
    if r.group == "file":
        return ("python", "-m", "harness", "judge", r.source)
    if r.group == "test":
        return ("pytest", r.source)
    words_ = [
        "python",
        "-m",
        "harness",
        "run",
        "--cases",
        r.source or r.group,
        "--only",
        r.case,
        "-i",
        r.implementation,
    ]
    words_ += ["-r", r.recipe, "--seeds", str(r.seed + 1)]
    return (*words_, *(() if r.machine.device == "cpu" else ("--device", r.machine.device.split()[0])))
