"""Does the gate fire on unchanged code, and does it see what is planted?

    python -m benchmarks.gate_study --runs 100 --out reports/gate-study.md

repeats the smoke run of the gate (`benchmarks/gate/runs.py`) under two instruction sets, `--runs` times each, and holds
every run against baselines of both; then runs with another library's products within one class of machine; then
simulates gates whose bits moved, with draws that nothing was tuned on (`benchmarks/gate/chance.py`); then plants
regressions (`benchmarks/gate/plants.py`). A study that was stopped goes on in `--state`; `--only chance` and
`--only planted` make those sections anew, from one run a setting, and leave the rest of the report as it is.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gate import chance_page
from benchmarks.gate.plants import Planted, of_kernel, of_records
from benchmarks.gate.runs import ROOT, SETTINGS, collect, read_runs
from harness.files import write_atomically
from harness.gate import Pooled, compare, pool_records
from harness.records import Record, read_records

ISAS, OTHERS = ("avx2", "default"), ("avx2-mkl-compatible", "avx2-onednn-sse41")

UNCHANGED = """\
## Unchanged code

Each run is the gate's own: every smoke case, implementation, recipe and seed, computed and judged anew, in one
long-lived process per setting (started once, not for each run). Between runs changed: the order of the units, where
tensors lie in memory, and in some the threads or the number of processes. *Different records*: how many sets of records
were met, timings, dates, commit and thread count apart.

| setting | runs | with 2 threads | with 2 processes | records | different records | environment |
|---|---|---|---|---|---|---|"""
AGAINST = """
Every run against the first run under each instruction set as its baseline. Across instruction sets the gate compares
verdicts and error ÷ expected. The last two settings are of the class `avx2` as far as torch says, with the matrix
products of another processor: the paired test has to take them for noise.

| setting | baseline | runs | alarms | notes |
|---|---|---|---|---|"""
PLANTED = """\
## Planted

Through `python -m harness gate`, one at a time.

| planted | exit code | lines |
|---|---|---|"""


@dataclass(frozen=True)
class Held:
    """Runs of a setting against one baseline."""

    setting: str
    baseline: str
    runs: int
    alarms: int
    notes: tuple[str, ...]


def held(state: Path, setting: str, baseline: Mapping[Any, Pooled], name: str) -> Held:
    """`compare` is a function of records without their timings: once for each set of records, counted as often as it
    was met."""
    met = Counter(r["signature"] for r in read_runs(state, setting))
    alarms, notes = 0, set()
    for found, runs in met.items():
        outcome = compare(read_records(state / f"{setting}-{found}.records"), baseline)
        alarms += runs * (outcome.exit_code != 0)
        notes |= set(outcome.notes)
    return Held(setting, name, sum(met.values()), alarms, tuple(sorted(notes)))


def first_records(state: Path, setting: str) -> list[Record]:
    return read_records(state / f"{setting}-{read_runs(state, setting)[0]['signature']}.records")


def by_chance(state: Path, gates: int, seed: int) -> str:
    for setting in (*ISAS, *OTHERS):
        collect(setting, 1, state)
    settings = {setting: pool_records(first_records(state, setting)) for setting in (*ISAS, *OTHERS)}
    return chance_page.section(settings, gates, seed)


def planted(state: Path) -> str:
    collect("avx2", 1, state)
    with tempfile.TemporaryDirectory() as scratch:
        plants = [*of_records(first_records(state, "avx2"), Path(scratch)), *of_kernel(Path(scratch))]
    rows = (f"| {p.what} | {p.code} | {_lines(p)} |" for p in plants)
    return "\n".join([PLANTED, *rows]) + "\n"


def put_in(report: str, section: str) -> str:
    """The report with this section in the place of the one of its title. Raises ValueError where there is none."""
    title = section.partition("\n")[0]
    before, found, after = report.partition(f"{title}\n")
    if not found:
        raise ValueError(f"the report has no section {title!r}; make it whole, without --only")
    _, following, rest = after.partition("\n## ")
    return before + section + following + rest


def study(state: Path, runs: int, gates: int, seed: int) -> str:
    for setting in ISAS:
        collect(setting, runs, state)
    for setting in OTHERS:
        collect(setting, min(runs, 2), state)
    bases = {setting: pool_records(first_records(state, setting)) for setting in ISAS}
    table = [held(state, a, bases[b], b) for a, b in itertools.product(ISAS, ISAS)]
    table += [held(state, setting, bases["avx2"], "avx2") for setting in OTHERS]
    return page(state, table, by_chance(state, gates, seed), planted(state))


def page(
    state: Path,
    table: Sequence[Held],
    by_chance: str,
    planted: str,
) -> str:
    first = first_records(state, "avx2")[0].machine
    runs = {setting: read_runs(state, setting) for setting in (*ISAS, *OTHERS)}
    command = f"python -m benchmarks.gate_study --runs {max(len(runs[s]) for s in ISAS)}"
    total, alarms = sum(len(runs[s]) for s in ISAS), sum(h.alarms for h in table)
    parts = [
        "# Does the gate flake, and does it sleep?\n",
        f"`{command}`, torch {first.torch}, {first.system}.\n",
        UNCHANGED,
        *(_setting(setting, met) for setting, met in runs.items()),
        AGAINST,
        *(
            f"| {h.setting} | {h.baseline} | {h.runs} | **{h.alarms}** | {'; '.join(h.notes) or '—'} |"
            for h in table
        ),
        f"\n**{total} runs under two instruction sets, {sum(h.runs for h in table)} comparisons, {alarms} alarms.**",
    ]
    return "\n".join(parts) + f"\n\n{by_chance}\n{planted}"


def _setting(setting: str, met: Sequence[Mapping[str, Any]]) -> str:
    two = [sum(r[what] == 2 for r in met) for what in ("threads", "jobs")]
    environment = " ".join(f"`{n}={v}`" for n, v in SETTINGS[setting].items())
    different = len({r["signature"] for r in met})
    cells = (setting, len(met), *two, met[0]["cells"], different, environment)
    return "| " + " | ".join(map(str, cells)) + " |"


def _lines(p: Planted) -> str:
    return "<br>".join(line.replace("|", "¦") for line in p.regressions) or "—"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="under each instruction set")
    parser.add_argument("--gates", type=int, default=10_000, help="simulated, a row")
    parser.add_argument("--seed", type=int, default=20261207, help="of the simulated gates")
    parser.add_argument("--only", choices=["chance", "planted"], help="make this section of --out anew")
    parser.add_argument("--state", type=Path, default=ROOT / "reports/latest/gate-study")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.only:
        if not options.out:
            parser.error("--only needs --out, the report that the section stands in")
        chance = options.only == "chance"
        section = by_chance(options.state, options.gates, options.seed) if chance else planted(options.state)
        text = put_in(options.out.read_text(encoding="utf-8"), section)
    else:
        text = study(options.state, options.runs, options.gates, options.seed)
    if options.out:
        write_atomically(options.out, text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
