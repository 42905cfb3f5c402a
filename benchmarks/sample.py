"""A sample of every output and the JSON Schemas, from committed measurements: `python -m benchmarks.sample`.

`--run` makes the records anew as well: of the kernel in examples/github after an edit that a review might miss, beside
three of the built-in implementations, and before that edit; and those of a review in three recipes, of fewer cells than
`noxfile.py -s review` has, so that they can be kept in git. `--time` makes the timings anew (minutes). Nothing here
depends on the day: deviations expire as of the day the records were made.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.case import cases_folder
from harness.cli.group import cli
from harness.deviations import Review, load_deviations, review
from harness.files import write_atomically
from harness.records import Record, read_records
from harness.report import changes, comment, job_summary, latest, to_document, to_junit, write_report
from harness.report.changes import sides
from harness.report.schema import schemas
from harness.report.throughput import timings_markdown
from harness.report.timings import read_context, read_timings

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "reports" / "sample"
SCHEMAS = ROOT / "docs" / "schema"
KERNEL = ROOT / "examples" / "github" / "my_attention.py"
EVIDENCE = ROOT / "reports" / "evidence.jsonl"
RECORDS, BEFORE, REVIEWED, TIMINGS = "records.jsonl", "before.jsonl", "review.jsonl", "throughput.json"
# Scores kept in the inputs' type, as one would to save memory.
EDIT = ("torch.softmax(scores, dim=-1)", "torch.softmax(scores.to(q.dtype).float(), dim=-1)")
CASES = ("smoke/*", "magnitude/raw-*")
EARLIER = ("smoke/*", "magnitude/raw-[58]*")  # a case that came later is a new cell
RUN = (
    "run", "--cases", "smoke,magnitude", "--kernel", f"{KERNEL.name}:attention", "--implementations",
    "naive_masked,online_softmax,naive_unsafe", "--recipes", "bf16,fp16,fp16_eager,fp8_e4m3",
    "--seeds", "2", "--jobs", "1", "--no-report", "--out", "out",
)  # fmt: skip
RECIPES = "bf16,fp8_e4m3,fp8_kv"  # the review's own default
REVIEW_CASES = (
    "real/*", "magnitude/*", "normal/causal-n256", "normal/d128", "normal/v-mean-1", "outliers/*", "peaked/q×8",
    "sinks/learned", "sinks/learned-window", "sinks/heavy-first-key-1.3", "negative/depth-200", "ties/4-equal-maxima",
    *(f"shapes/n{n}" for n in (32, 64, 128, 256, 512, 1024)),
)  # fmt: skip
REVIEW_RUN = (
    "run", "--cases", ",".join(dict.fromkeys(glob.partition("/")[0] for glob in REVIEW_CASES)), "--only",
    ",".join(REVIEW_CASES), "--implementations", "naive_masked,online_softmax,naive_unsafe", "--recipes", RECIPES,
    "--seeds", "1", "--jobs", "1", "--no-report", "--out", "out",
)  # fmt: skip


def write_sample(folder: Path, source: Path = SAMPLE) -> None:
    """Every output from what was measured in `source`."""
    records, before = (read_records(source / name) for name in (RECORDS, BEFORE))
    reviewed = _review(records)
    report = write_report(records, reviewed, folder)
    changed = changes(sides(latest(before)), sides(latest(records)), f"reports/sample/{BEFORE}")
    write_atomically(folder / "results.json", to_document(report, records, reviewed))
    write_atomically(folder / "junit.xml", to_junit(records, reviewed))
    write_atomically(folder / "summary.md", job_summary(report, changed))
    write_atomically(folder / "comment.md", comment(report, changed))
    timings = source / TIMINGS
    write_atomically(folder / "throughput.md", timings_markdown(read_timings(timings), read_context(timings)))
    read = ("review", str(source / REVIEWED), "--recipes", RECIPES, "--evidence", str(EVIDENCE))
    cli.main([*read, "--out", str(folder)], standalone_mode=False)


def write_schemas(folder: Path) -> None:
    for name, text in schemas().items():
        write_atomically(folder / name, text)


def _review(records: Sequence[Record]) -> Review:
    day = datetime.date.fromisoformat(max(r.created for r in records)[:10])
    made = review(latest(list(records)), load_deviations(cases_folder() / "deviations.toml"), day)
    return replace(made, unmatched=())  # of a part of the cases: it cannot tell which entries are idle


def run(folder: Path) -> None:
    """The records, from three runs."""
    text = KERNEL.read_text(encoding="utf-8")
    if EDIT[0] not in text:
        raise SystemExit(f"{KERNEL} no longer holds {EDIT[0]!r}, which the sample edits")
    for name, kernel, only in ((BEFORE, text, EARLIER), (RECORDS, text.replace(*EDIT), CASES)):
        with tempfile.TemporaryDirectory() as place:
            write_atomically(Path(place) / KERNEL.name, kernel)
            _records(
                "harness", *RUN, *(x for glob in only for x in ("--only", glob)), to=folder / name, cwd=place
            )
    with tempfile.TemporaryDirectory() as place:
        _records("harness", *REVIEW_RUN, to=folder / REVIEWED, cwd=place)


def time_again(folder: Path) -> None:
    """The timings, without each round's and what else pytest-benchmark stores and no report reads."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / TIMINGS
        _python("pytest", "-q", "benchmarks/", f"--benchmark-json={path}", allowed=(0,), cwd=str(ROOT))
        stored = json.loads(path.read_text(encoding="utf-8"))
    write_atomically(folder / TIMINGS, json.dumps(reduced(stored), indent=1, ensure_ascii=False) + "\n")


def reduced(stored: Mapping[str, Any]) -> dict[str, Any]:
    kept = [
        {"name": b["name"], "stats": {n: b["stats"][n] for n in ("median", "rounds")}, "extra_info": b["extra_info"]}
        for b in stored["benchmarks"]
    ]  # fmt: skip
    return {"version": stored["version"], "throughput": stored["throughput"], "benchmarks": kept}


def _records(*command: str, to: Path, cwd: str) -> None:
    _python(*command, allowed=(0, 1), cwd=cwd)
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(cwd) / "out" / "records.jsonl", to)


def _python(*module: str, allowed: Sequence[int], cwd: str) -> None:
    command = [sys.executable, "-m", *module]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = subprocess.run(command, cwd=cwd, env=environment, check=False).returncode
    if code not in allowed:
        raise SystemExit(f"{' '.join(command)} ended with exit code {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", action="store_true", help="make the records anew first (about a minute)")
    parser.add_argument("--time", action="store_true", help="make the timings anew first (minutes)")
    given = parser.parse_args()
    if given.run:
        run(SAMPLE)
    if given.time:
        time_again(SAMPLE)
    write_sample(SAMPLE)
    write_schemas(SCHEMAS)


if __name__ == "__main__":
    main()
