"""Records made up for the tests of what reads them."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from harness.deviations import Deviation, Review, review
from harness.records import Diagnosis, Errors, Hazard, HazardKind, Machine, Margins, Record, Status

TODAY = datetime.date(2026, 1, 1)
IMPLEMENTATIONS = ("naive_masked", "lower_triangle", "online_softmax", "decode_with_cache", "naive_unsafe")
MACHINE = Machine("cpu", "Some CPU", "AVX512", 2, 2, "Linux", "3.11.7", "2.13.0", "2.4.0", "0.1.0", "abc1234")
ERRORS = Errors(
    count=8192, nan_mismatch=0, posinf_mismatch=0, neginf_mismatch=0, max_abs=1e-2, rmse=1e-3,
    rel_l2=1e-3, rel_l1=1e-3, cosine=1.0, sqnr_db=60.0, max_ulp=3.0, p99_ulp=1.0, bias_ulp=-0.01,
    slope=-1e-4, truth_rms=1.0, worst=(0, 1, 17, 3),
)  # fmt: skip
MARGINS = Margins(
    ratio=1.0, limit=1.5, worst=0.5, worst_at="row b=0 h=1 i=17", ceiling=0.1, statistic=3.0, threshold=6.2,
    direction="shrink", expected_rel_l2=1e-3, unseen={"shrink": 1e-3, "scale": 2e-3},
)  # fmt: skip
SCALE_OFF = Diagnosis("scale", "the softmax scale is off", 0.002, 40.0, 0.99, ("softcap",))
OVERFLOW = Hazard(HazardKind.OVERFLOW, "scores", "fp16", "observed", 1e5, -0.61, 12, 4096, (0, 1, 17, 9))


def errors(**changes: Any) -> Errors:
    return replace(ERRORS, **changes)


def margins(**changes: Any) -> Margins:
    return replace(MARGINS, **changes)


def record(case: str = "smoke/tiny", **changes: Any) -> Record:
    """A PASS of both questions; `rel` and `rmse` set the figure of both truths, the total one twice as large."""
    figures = {
        name: changes.pop(key) for key, name in (("rel", "rel_l2"), ("rmse", "rmse")) if key in changes
    }
    kernel = errors(**figures)
    total = replace(kernel, rel_l2=2 * kernel.rel_l2, rmse=2 * kernel.rmse)
    made = Record(
        case=case, group=case.partition("/")[0], shape="[1, 2, 64, 64]", why="made up", recipe="bf16",
        implementation="naive_masked", recipe_digest="base=fp32", seed=0, status=Status.PASS, reasons=(),
        errors=kernel, total_errors=total, lse_errors=None, hazards=(), traceback="", emulated=True,
        run_ms=1.0, truth_ms=2.0, flops=1000, computed_flops=2000, kv_bytes_per_token=256.0, data={},
        inputs_hash="12ab", output_hash="34cd", machine=MACHINE, created="2026-01-01T00:00:00Z",
        source=case.partition("/")[0], margins=MARGINS, precision=Status.PASS, floor=2e-3,
    )  # fmt: skip
    return replace(made, **changes)


def refused(case: str = "smoke/tiny", reason: str = "no window", **changes: Any) -> Record:
    nothing = {
        "errors": None, "total_errors": None, "status": Status.REFUSED, "reasons": (reason,), "margins": None,
        "precision": None, "floor": float("nan"),
    }  # fmt: skip
    return record(case, **{**nothing, **changes})


def grid(
    cases: Iterable[str], implementations: Iterable[str], recipes: Iterable[str], seeds: int = 2
) -> list[Record]:
    """Every combination, with figures that differ."""
    cells = itertools.product(cases, implementations, recipes, range(seeds))
    return [
        record(c, implementation=i, recipe=r, seed=s, rel=1e-4 * (1 + n % 97), rmse=1e-4 * (1 + n % 97))
        for n, (c, i, r, s) in enumerate(cells)
    ]


def reviewed(records: Iterable[Record], *deviations: Deviation) -> Review:
    return review(records, deviations, TODAY)


def deviation(**changes: Any) -> Deviation:
    entry = Deviation("*", "*", "*", Status.FAIL, "a reason", "a link", datetime.date(2027, 1, 1))
    return replace(entry, **changes)
