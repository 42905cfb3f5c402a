"""The pytest plug-in: a fixture that asserts attention, records of every judgement, and JUnit properties.

    def test_my_kernel(attention):
        attention.assert_close(my_attention(q, k, v), q, k, v, recipe="bf16")

`pytest --attention-records runs/attention.jsonl` writes one record a judgement, and beside them the tensors of those
that failed, for `python -m harness judge`. torch is loaded by the first judgement: pytest itself starts as before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from harness.docket import Judgement
    from harness.spec import AttentionSpec

OPTION = "--attention-records"
_WORKER = "attention_records"  # what an xdist worker hands over
_LINES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("attention-harness").addoption(
        OPTION, metavar="PATH", type=Path, default=None,
        help="write a record of every judged attention there (JSON Lines), and the tensors of failures beside it",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LINES] = []


class Attention:
    """What a test does with attention. `records`: where records go, or None."""

    def __init__(self, request: pytest.FixtureRequest, records: Path | None) -> None:
        self._request, self._records, self._count = request, records, 0

    def judge(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Judgement:
        """`harness.judge`, recorded; `options` are its own. Asserts nothing."""
        return self._judged(out, q, k, v, options)[0]

    def assert_close(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec | None = None,
        recipe: Any = "bf16", allow_inconclusive: bool = False, **options: Any,
    ) -> Judgement:  # fmt: skip
        """`harness.testing.assert_attention_close`, recorded."""
        from harness.testing import check_judgement

        judgement, kept = self._judged(out, q, k, v, {"spec": spec, "recipe": recipe, **options})
        flag = " --quantize" if options.get("quantize") else ""
        check_judgement(judgement, recipe, allow_inconclusive, self._again(kept, flag))
        return judgement

    def _judged(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> tuple[Judgement, Path | None]:
        from harness.judging import judge
        from harness.keep import keep, record_line

        judgement = judge(out, q, k, v, **options)
        number, self._count = self._count, self._count + 1
        name = self._request.node.nodeid + (f"#{number}" if number else "")
        self._properties(judgement, number)
        if self._records is None:
            return judgement, None
        call = {"q": q, "k": k, "v": v, "out": out, **options}
        self._request.config.stash[_LINES].append(record_line(name, call, judgement))
        kept = None
        if judgement.status.value == "FAIL":
            kept = keep(self._records.with_suffix(".failures"), name, call)
        return judgement, kept

    def _properties(self, judgement: Judgement, number: int) -> None:
        """Into the JUnit file; one prefix for each judgement of a test."""
        prefix = "attention" + (f"_{number}" if number else "")
        found: dict[str, object] = {
            "status": judgement.status.value, "rel_l2": f"{judgement.errors.rel_l2:.4g}",
            "times_expected": f"{judgement.margins.ratio:.4g}", "precision": judgement.precision.value,
        }  # fmt: skip
        if judgement.diagnosis is not None:
            found["fault"] = judgement.diagnosis.fault
        self._request.node.user_properties.extend(
            (f"{prefix}_{name}", value) for name, value in found.items()
        )

    def _again(self, kept: Path | None, flag: str) -> tuple[str, ...]:
        again = f"pytest '{self._request.node.nodeid}'"
        if kept is None:
            return (again, f"{again} {OPTION} attention.jsonl  # keeps the tensors")
        return (f"python -m harness judge {kept}{flag}", again)


@pytest.fixture
def attention(request: pytest.FixtureRequest) -> Attention:
    """Judge attention against FP64 truth: `attention.assert_close(out, q, k, v, spec=…, recipe="bf16")`."""
    return Attention(request, request.config.getoption(OPTION))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """An xdist worker is done: take its records."""
    node.config.stash[_LINES].extend(getattr(node, "workeroutput", {}).get(_WORKER, []))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config, lines = session.config, session.config.stash[_LINES]
    path = config.getoption(OPTION)
    if path is None:
        return
    if hasattr(config, "workeroutput"):
        config.workeroutput[_WORKER] = lines
        return
    from harness.files import write_atomically

    write_atomically(path, "".join(f"{line}\n" for line in lines))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption(OPTION)
    if path is not None and not hasattr(config, "workeroutput"):
        terminalreporter.write_line(f"attention: {len(config.stash[_LINES])} records in {path}")
