"""A sample of every output and the JSON Schemas, from committed records: `python -m benchmarks.sample`.

`--run` makes the records anew as well: of the kernel in examples/github after an edit that a review might miss, beside
three of the built-in implementations, and before that edit. Nothing here depends on the day: deviations expire as of
the day the records were made.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.case import cases_folder
from harness.deviations import Review, load_deviations, review
from harness.files import write_atomically
from harness.records import Record, read_records
from harness.report import changes, comment, job_summary, latest, to_document, to_junit, write_report
from harness.report.changes import sides
from harness.report.schema import schemas

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "reports" / "sample"
SCHEMAS = ROOT / "docs" / "schema"
KERNEL = ROOT / "examples" / "github" / "my_attention.py"
RECORDS, BEFORE = "records.jsonl", "before.jsonl"
# Scores kept in the inputs' type, as one would to save memory.
EDIT = ("torch.softmax(scores, dim=-1)", "torch.softmax(scores.to(q.dtype).float(), dim=-1)")
CASES = ("smoke/*", "magnitude/raw-*")
EARLIER = ("smoke/*", "magnitude/raw-[58]*")  # a case that came later is a new cell
RUN = (
    "run", "--cases", "smoke,magnitude", "--kernel", f"{KERNEL.name}:attention", "--implementations",
    "naive_masked,online_softmax,naive_unsafe", "--recipes", "bf16,fp16,fp16_eager,fp8_e4m3",
    "--seeds", "2", "--jobs", "1", "--no-report", "--out", "out",
)  # fmt: skip


def write_sample(folder: Path, source: Path = SAMPLE) -> None:
    """Every output from the records in `source`."""
    records, before = (read_records(source / name) for name in (RECORDS, BEFORE))
    reviewed = _review(records)
    report = write_report(records, reviewed, folder)
    changed = changes(sides(latest(before)), sides(latest(records)), f"reports/sample/{BEFORE}")
    write_atomically(folder / "results.json", to_document(report, records, reviewed))
    write_atomically(folder / "junit.xml", to_junit(records, reviewed))
    write_atomically(folder / "summary.md", job_summary(report, changed))
    write_atomically(folder / "comment.md", comment(report, changed))


def write_schemas(folder: Path) -> None:
    for name, text in schemas().items():
        write_atomically(folder / name, text)


def _review(records: Sequence[Record]) -> Review:
    day = datetime.date.fromisoformat(max(r.created for r in records)[:10])
    made = review(latest(list(records)), load_deviations(cases_folder() / "deviations.toml"), day)
    return replace(made, unmatched=())  # of a part of the cases: it cannot tell which entries are idle


def run(folder: Path) -> None:
    """The records, from two runs."""
    text = KERNEL.read_text(encoding="utf-8")
    if EDIT[0] not in text:
        raise SystemExit(f"{KERNEL} no longer holds {EDIT[0]!r}, which the sample edits")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name, kernel, only in ((BEFORE, text, EARLIER), (RECORDS, text.replace(*EDIT), CASES)):
        with tempfile.TemporaryDirectory() as place:
            write_atomically(Path(place) / KERNEL.name, kernel)
            command = [sys.executable, "-m", "harness", *RUN, *(x for glob in only for x in ("--only", glob))]
            code = subprocess.run(command, cwd=place, env=environment, check=False).returncode
            if code not in (0, 1):
                raise SystemExit(f"{' '.join(command)} ended with exit code {code}")
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(place) / "out" / "records.jsonl", folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", action="store_true", help="make the records anew first (under a minute)")
    if parser.parse_args().run:
        run(SAMPLE)
    write_sample(SAMPLE)
    write_schemas(SCHEMAS)


if __name__ == "__main__":
    main()
