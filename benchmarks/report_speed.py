"""What `python -m harness report` takes on many records: `python -m benchmarks.report_speed`.

A small real run is multiplied: each copy has its own case names, seeds, hashes and figures, so that nothing can be
remembered from one copy to the next that a real run of that size would not repeat too. Wall and CPU time of the command
as a user starts it, by the operating system's count, beside a loop of known work, since machines differ.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAMPLE = Path(__file__).parents[1] / "reports" / "sample" / "records.jsonl"
LOOP = 10_000_000
GROUPS = 14  # of the default run
HASHES = ("inputs_hash", "output_hash")


def changed(value: Any, draw: random.Random) -> Any:
    """The same with other figures: numbers with a fraction move by up to 1 %."""
    if isinstance(value, dict):
        return {name: changed(v, draw) for name, v in value.items()}
    if isinstance(value, list):
        return [changed(v, draw) for v in value]
    if isinstance(value, float) and not value.is_integer():
        return value * (1 + 0.01 * draw.random())
    return value


def multiplied(lines: list[str], count: int) -> Iterator[str]:
    """`count` lines: copies of the records under other names and seeds."""
    draw = random.Random(0)
    fields = [json.loads(line) for line in lines]
    for n in range(count):
        copy, which = divmod(n, len(fields))
        made = changed(fields[which], draw)
        group = f"{made['group']}{copy % GROUPS}"
        made |= {"group": group, "case": f"{group}/{made['case'].partition('/')[2]}-{copy // GROUPS % 8}"}
        made["seed"] += 1000 * (copy // GROUPS // 8)
        made |= {name: f"{draw.getrandbits(256):064x}" for name in HASHES if made[name]}
        yield json.dumps(made, separators=(",", ":"))


def loop_seconds() -> float:
    """CPU time of a loop that is the same everywhere: what this machine gives a process just now."""
    start, total = time.process_time(), 0
    for n in range(LOOP):
        total += n
    return time.process_time() - start


def used(command: list[str]) -> tuple[float, float, float, float]:
    """Wall, user and system seconds and peak GiB of a command. The peak is the largest of all commands so far."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if ended not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with exit code {ended}")
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime, after.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=SAMPLE, help="what is multiplied")
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("options", nargs="*", help="more for `python -m harness report`, after --")
    given = parser.parse_args()
    lines = given.records.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in multiplied(lines, given.count))
        print(f"{given.count} records, {path.stat().st_size / 1e6:.0f} MB, from {len(lines)}")
        command = [sys.executable, "-m", "harness", "report", str(path), *given.options]
        for _ in range(given.times):
            loop = loop_seconds()
            wall, user, system, peak = used(command)
            print(
                f"wall {wall:.2f} s, user {user:.2f} s, system {system:.2f} s, at most {peak:.2f} GiB;"
                f" {user / loop:.1f} times a loop of {LOOP:,} additions ({loop:.2f} s)"
            )


if __name__ == "__main__":
    main()
