"""The report: records in, Markdown and a figure out. Nothing is computed again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.mutants.calls import CASES, RECIPES
from benchmarks.mutants.rules import RULES
from benchmarks.mutants.study import HONEST, SDPA, units
from benchmarks.mutants.table import family_of, mutants

Record = dict[str, Any]
OURS = "ours"
JUDGES = (OURS, *(r.name for r in RULES))
COLUMNS = ("ours", "FA2×", "tchk", "clos", "trit", "fi", "TE", "vLLM", "KB", "cos", "titn")
SHORT = dict(zip(JUDGES, COLUMNS, strict=True))
LETTERS = dict(zip(RECIPES, "sbhe", strict=True))


def rejects(r: Record, judge: str) -> bool | None:
    """Whether a judge fails it; None where it has no rule for the precision."""
    if judge == OURS:
        return bool(r["ours"]["status"] == "FAIL")
    accepted = r["rules"][judge]
    return None if accepted is None else not accepted


def is_mutant(r: Record) -> bool:
    return r["unit"][0] not in (HONEST, SDPA)


def is_above(r: Record) -> bool:
    return is_mutant(r) and bool(r["limit"]["above"])


def naming(r: Record) -> str:
    """How a killed mutant was named: rightly, among equals, not at all, or wrongly; `unasked` where nobody looked."""
    mutant = mutants()[r["unit"][0]]
    if not r["ours"].get("named", True):
        return "unasked"
    if mutant.of_lse:
        return "right" if "lse" in r["ours"].get("why", "") else "wrong"
    said = r["ours"].get("fault", "unknown")
    if said in mutant.names:
        return "right"
    if any(x in mutant.names for x in r["ours"].get("rivals", ())):
        return "equal"
    return "unknown" if said == "unknown" else "wrong"


def has_name(r: Record) -> bool:
    mutant = mutants()[r["unit"][0]]
    return bool(mutant.names) or mutant.of_lse


def share(hits: int, of: int) -> str:
    return f"{100 * hits / of:.1f} %" if of else "—"


def markdown(records: Sequence[Record], figure: str) -> str:
    """The whole page; `figure` is the path of the picture beside it."""
    above = [r for r in records if is_above(r)]
    parts = [
        "# Mutants\n", _opening(records), f"![What each rule catches and what it fails wrongly]({figure})\n",
        "## Who notices\n", _judges(records), _names(above), "## The limit\n", LIMIT,
        "## Missed by us above the limit\n", _missed(above),
        "## Killed and misnamed, or without a name\n", _misnamed(above),
        "## Below the limit\n", _below(records), "## False failures\n", _false(records),
        "## Kill matrix\n", _matrix(records), "## The rules\n", _rules(),
    ]  # fmt: skip
    return "\n".join(parts)


def _opening(records: Sequence[Record]) -> str:
    names = {r["unit"][0] for r in records if is_mutant(r)}
    mutant, honest = [sum(is_mutant(r) is x for r in records) for x in (True, False)]
    above = [r for r in records if is_above(r)]
    killed = sum(bool(rejects(r, OURS)) for r in above)
    right = Counter(naming(r) for r in above if rejects(r, OURS))
    alarms = sum(bool(rejects(r, OURS)) for r in records if not is_mutant(r))
    return (
        f"{len(names)} deliberately wrong implementations, edits of one step of five algorithms, in {len(CASES)} cases"
        f" and {len(RECIPES)} precisions:\n{mutant} runs, and {honest} of honest implementations (the same five without"
        " the fault, and torch's fused kernel).\n"
        f"`python noxfile.py -s mutants -- --full` writes this page{_unfinished(len(records))}.\n\n"
        f"* **Killed by us**: {killed} of the {len(above)} runs whose effect is above the computed limit"
        f" ({share(killed, len(above))}).\n"
        f"* **Named**: {right['right']} rightly and {right['equal']} among equals"
        f" ({share(right['right'] + right['equal'], killed)} of the killed), {right['unknown']} called unknown,\n "
        f" {right['wrong']} called something else.\n"
        f"* **False failures of ours**: {alarms} in {honest}.\n"
    )


def _unfinished(done: int) -> str:
    planned = len(units())
    return f" (here {done} of its {planned} runs; started again it does the rest)" if done < planned else ""


def _judges(records: Sequence[Record]) -> str:
    rows = []
    for judge in JUDGES:
        cells = []
        for recipe in (*RECIPES, None):
            of = [r for r in records if recipe in (None, r["unit"][3])]
            bad = [x for r in of if is_above(r) and (x := rejects(r, judge)) is not None]
            cells.append(share(sum(bad), len(bad)))
        good = [x for r in records if not is_mutant(r) and (x := rejects(r, judge)) is not None]
        cells += [_net(records, judge), f"{sum(good)} of {len(good)}"]
        rows.append([judge, *cells])
    text = (
        "Share of the runs above the limit that each fails, by precision; *net*: those that it fails where it passes\n"
        "every honest run of the same case and precision; and the honest runs that it fails.\n\n"
    )
    return text + _table(["rule", *RECIPES, "all", "net", "honest failed"], rows)


def _net(records: Sequence[Record], judge: str) -> str:
    """A rule that fails everything notices nothing."""
    unfair = {tuple(r["unit"][2:]) for r in records if not is_mutant(r) and rejects(r, judge)}
    bad = [(x, tuple(r["unit"][2:])) for r in records if is_above(r) and (x := rejects(r, judge)) is not None]
    return share(sum(x and at not in unfair for x, at in bad), len(bad))


def _names(above: Sequence[Record]) -> str:
    rows = []
    families = family_of()
    groups: dict[str, list[Record]] = defaultdict(list)
    for r in above:
        if rejects(r, OURS):
            groups[families[r["unit"][0]]].append(r)
    for name, members in [*groups.items(), ("all", [r for g in groups.values() for r in g])]:
        count = Counter(naming(r) for r in members)
        known = [r for r in members if has_name(r)]
        told = sum(naming(r) in ("right", "equal") for r in known)
        rows.append([name, str(len(members)), *(str(count[x]) for x in ("right", "equal", "unknown", "wrong")),
                     share(count["right"] + count["equal"], len(members)), share(told, len(known))])  # fmt: skip
    head = ["family", "killed", "right", "equal", "unknown", "wrong", "named", "of those it has a name for"]
    text = "\nHow often the fault is named: *equal*: among those that explain it as well.\n\n"
    return text + _table(head, rows)


LIMIT = """A fault moves the output by g, computed in FP64 from its formula alone, where rounding gives an error of
variance σ² (`harness.error_model`). A run is above the limit when one of these holds, at α = 1e-6 for a judgement of K
statistics:

* **size**: √(mean of Σg²/Σσ² over rows) of the tensor, a head, 32 rows or a row exceeds slack · √(χ²_{ν, 1−α/K}/ν), or
  |g|/σ of an element exceeds slack · √(2 ln(2N/α)) + 3. What is counted is g's part alone; the error adds to it.
* **bias**: with f_i = √Σg²/σ² of row i and ω_i = min(f_i, Q75), T* = Σωf/√Σω²(f² + 2) exceeds τ + 3, τ = √(2 ln(2K/α)).
  The difference of a kernel and a twin has variance 2 along g, so T* is the self-normalised sum that a test which knows
  g expects, and 3 of its standard deviations are its power. Below 150 rows: Σωf/√(2Σω²) > 12 + 3. T* grows with √rows
  while f < 1. (1 − (τ + 3)/T*)·rms(g) has to exceed what honest kernels do: 1e-4 of the output, 5e-7 in FP32.
* **scatter**, for a fault that is noise and has no g to know beforehand: what it adds to the errors e of the honest
  run. Σ(e + g)² − Σe² stands for Σg² in *size* where it is smaller, and T_d = Σh/√Σh², h = |a_kernel| − |a_twin|, has
  to exceed τ + 3 along one of the judge's directions: for noise apart from e, and for e + g against e.
* NaN or infinities stand where the truth has none; an lse is off by more than twice its ceiling.

A fault in the formula's range (exp without the max) has no g in FP64: the difference of the two runs is taken.
"""


def _missed(above: Sequence[Record]) -> str:
    rows = [[*r["unit"], r["ours"]["status"], *(f"{r['limit'][x]:.2f}" for x in ("size", "bias", "scatter", "own"))]
            for r in above if not rejects(r, OURS)]  # fmt: skip
    if not rows:
        return "None.\n"
    text = "Shares of what each has to exceed; `own`: what our directions see of the bias.\n\n"
    return text + _table(
        ["mutant", "run", "case", "recipe", "status", "size", "bias", "scatter", "own"], rows
    )


def _misnamed(above: Sequence[Record]) -> str:
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in above:
        if rejects(r, OURS) and naming(r) in ("unknown", "wrong"):
            groups[r["unit"][0], r["ours"].get("fault", "unknown")].append(r)
    rows = []
    for (name, said), members in groups.items():
        where = _where([r["unit"][1:] for r in members])
        rows.append([name if has_name(members[0]) else f"{name} †", said, str(len(members)), where])
    if not rows:
        return "None.\n"
    return "†: the diagnosis has no name for it.\n\n" + _table(["mutant", "said", "runs", "where"], rows)


def _where(units: Iterable[Sequence[str]]) -> str:
    """arrangement/case: letters of the precisions."""
    found: dict[str, str] = defaultdict(str)
    for arrangement, case, recipe in units:
        found[f"{arrangement}/{case}"] += LETTERS[recipe]
    return ", ".join(f"{run} {letters}" for run, letters in found.items())


def _below(records: Sequence[Record]) -> str:
    rows = []
    for r in records:
        if not is_mutant(r) or is_above(r):
            continue
        limit = r["limit"]
        more = limit["rows"]
        grown = f"{more:.2g} × the rows" if isinstance(more, float) and more < 1e4 else "—"
        nearest = ("size", "scatter", "own") if mutants()[r["unit"][0]].random else ("size", "bias")
        rows.append([*r["unit"], f"{limit['relative']:.1e}", f"{max(limit[x] for x in nearest):.2f}", grown,
                     "yes" if rejects(r, OURS) else ""])  # fmt: skip
    text = (
        "rel: rms(g)/rms(o). share: of the nearest limit. appears: where a bias would be above it. A dash: it is\n"
        "noise, or smaller than what honest kernels do.\n\n"
    )
    return text + _table(
        ["mutant", "run", "case", "recipe", "rel", "share", "appears", "killed all the same"], rows
    )


def _false(records: Sequence[Record]) -> str:
    rows = []
    for judge in JUDGES:
        where: Counter[str] = Counter()
        for r in records:
            if not is_mutant(r) and rejects(r, judge):
                where[f"{r['unit'][2]} {LETTERS[r['unit'][3]]}"] += 1
        if where:
            cases: dict[str, str] = defaultdict(str)
            for key in where:
                case, letter = key.split()
                cases[case] += letter
            rows.append([judge, str(sum(where.values())), ", ".join(f"{c} {x}" for c, x in cases.items())])
    text = "Runs of honest implementations that a rule fails, and where (s FP32, b BF16, h FP16, e E4M3).\n\n"
    return text + _table(["rule", "runs", "cases"], rows)


def _matrix(records: Sequence[Record]) -> str:
    text = (
        "Letters: precisions (s FP32, b BF16, h FP16, e E4M3) in which a mutant is failed: capital in all its runs,"
        " small\nin some, a dot in none; a blank: no rule. Runs below the limit are counted too.\n\n"
    )
    by: dict[str, list[Record]] = defaultdict(list)
    for r in records:
        if is_mutant(r):
            by[r["unit"][0]].append(r)
    rows = [[name, *(_cell(by[name], judge) for judge in JUDGES)] for name in mutants() if name in by]
    return text + _table(["mutant", *(SHORT[j] for j in JUDGES)], rows)


def _cell(members: Sequence[Record], judge: str) -> str:
    text = ""
    for recipe in RECIPES:
        found = [x for r in members if r["unit"][3] == recipe and (x := rejects(r, judge)) is not None]
        if found:
            text += LETTERS[recipe].upper() if all(found) else LETTERS[recipe] if any(found) else "·"
    return text


def _rules() -> str:
    text = "Re-expressed from their sources: the rule, not the code. Short names are the matrix' columns.\n\n"
    return text + "\n".join(
        f"* **{r.name}** ({SHORT[r.name]}): {r.what}." + (f" [source]({r.source})" if "//" in r.source else "")
        for r in RULES
    ) + "\n"  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    escape: Callable[[str], str] = lambda x: x.replace("|", "\\|")  # noqa: E731
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(escape(x) for x in line) + " |" for line in lines) + "\n"
