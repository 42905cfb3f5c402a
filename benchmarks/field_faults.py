"""Does attention that is right pass every fault that the field reported, and is each fault caught when it is planted?

    python benchmarks/field_faults.py --out reports/field.md

runs the cases of `cases/field.py` on the algorithms that are right, plants each fault of `tests/field_plants.py`, and
writes a table with a row for each.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

import field_faults  # noqa: E402
from field_plants import PLANTS  # noqa: E402

from harness.case import Case, case_files  # noqa: E402
from harness.cell import Unit, run_unit  # noqa: E402
from harness.files import write_atomically  # noqa: E402
from harness.recipe import get_recipe  # noqa: E402
from harness.records import Status  # noqa: E402

RIGHT = ("naive_masked", "lower_triangle", "online_softmax", "decode_with_cache", "split_kv")
HEAD = """# The field's own faults

The 48 reports of `cases/field.py`: attention faults that people met, each as a small case. What is right has to pass,
and the fault, planted, has to be caught. `python benchmarks/field_faults.py --out reports/field.md` writes this page,
`tests/test_field.py` holds it; `python -m harness run --cases field` runs the cases.

*Right*: statuses of {right}
on the case, under its own recipes. `lower_triangle` refuses what is not causal; `naive_unsafe` is a fault itself and
not among them. *Fault*: what the judge says of the planted one; "precision" where the recipe is what is wrong, "gate"
where stored runs are compared, "relation" where two runs of one thing have other bits. *Named*: the likeliest fault,
then what explains it as well; a name is expected where a direction, a suspect or a hazard describes the fault, and
"unknown" is the honest answer where none does.

"""


def right_statuses(case: Case) -> Counter[Status]:
    recipes = tuple(get_recipe(r) for r in case.recipes)
    return Counter(r.status for r in run_unit(Unit(case, 0, RIGHT, recipes)))


def shown(counts: Counter[Status]) -> str:
    return ", ".join(f"{counts[s]} {s.value}" for s in Status if counts[s])


def fault_cells(plant: field_faults.Planted, found: field_faults.Seen) -> tuple[str, str]:
    """What was said of the fault, and what it was called: with what is wrong with that, if anything."""
    status = found.status if plant.instrument == "status" else f"{plant.instrument}: {found.status}"
    if found.status != plant.caught_as:
        status += f" — missed: {plant.missed}"
    first, rest = found.names[:1], found.names[1:]
    name = first[0] + (f", or {', '.join(rest)}" if rest else "") if first else "—"
    if plant.told and first and not set(plant.told) & set(found.names):
        name += f" — should be {' or '.join(plant.told)}: {plant.misnamed}"
    return status, name if plant.precise else "not looked for: a diagnosis over 65,600 keys takes a minute"


def rows(rights: dict[str, Counter[Status]], found: dict[str, field_faults.Seen]) -> Iterator[str]:
    entries = runpy.run_path(str(case_files()["field"]))["ENTRIES"]
    yield "| entry | case | planted fault | right | fault | named |"
    yield "|---|---|---|---|---|---|"
    for entry, (title, thread) in entries.items():
        head = f"[{entry}](https://github.com/{thread}) {title}"
        for plant in (p for p in PLANTS if p.entry == entry):
            cells = (
                head,
                plant.case,
                plant.what,
                shown(rights[plant.case]),
                *fault_cells(plant, found[plant.id]),
            )
            yield "| " + " | ".join(cells) + " |"
            head = ""
    others = [name for name in rights if name not in {p.case for p in PLANTS}]
    yield ""
    yield (
        "Cases of these entries that no fault is planted in, on the same algorithms: "
        + "; ".join(f"{name} {shown(rights[name])}" for name in others)
        + "."
    )


def summary(rights: Iterable[Counter[Status]], found: dict[str, field_faults.Seen]) -> str:
    rights = list(rights)
    total = sum(rights, Counter())
    caught = [p for p in PLANTS if found[p.id].status == p.caught_as]
    named = [p for p in PLANTS if p.told]
    given = [p for p in named if set(p.told) & set(found[p.id].names)]
    first = [p for p in given if found[p.id].names[0] in p.told]
    whole = {p.entry for p in PLANTS} - {p.entry for p in PLANTS if p not in caught}
    return (
        f"{len({p.entry for p in PLANTS})} entries, {len(rights)} cases: {shown(total)}. {len(PLANTS)} planted faults:"
        f" {len(caught)} caught, all of {len(whole)} entries; {len(named)} have a name, {len(given)} were given it,"
        f" {len(first)} as the likeliest.\n\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = field_faults.cases()
    rights = {name: right_statuses(case) for name, case in tqdm(cases.items(), "right", disable=None)}
    found = {plant.id: plant.seen() for plant in tqdm(PLANTS, "planted", disable=None)}
    text = HEAD.format(right=", ".join(f"`{n}`" for n in RIGHT[:-1]) + f" and `{RIGHT[-1]}`")
    text += summary(rights.values(), found) + "\n".join(rows(rights, found)) + "\n"
    write_atomically(options.out, text)
    print(summary(rights.values(), found).strip())


if __name__ == "__main__":
    main()
