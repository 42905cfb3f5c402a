import json
import math
from pathlib import Path

import pytest

from harness.evidence import Attribution, Quality, StageShare, read_evidence, write_evidence
from harness.records import Machine

MACHINE = Machine("cpu", "a cpu", "AVX2", 2, 1, "Linux", "3.11.7", "2.13.0", "2.4.6", "0.1.0", "abc")
SHARE = StageShare("probs", "bf16", 1e-3, 0.3, 2e-3, math.nan)
ATTRIBUTION = Attribution(
    "real/layer", "online_softmax", "bf16", "d", 3, 2e-3, 1e-7, (SHARE,), 1.01, True, "They add up.", "probs", 1e-3,
    MACHINE, "2026-01-01",
)  # fmt: skip
QUALITY = Quality(
    "SmolLM2", "a text", "h", 512, "online_softmax", "bf16", "d", 1e-5, 1e-4, math.inf, 0.99, 20.2, 20.0, MACHINE,
    "2026-01-01",
)  # fmt: skip


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    write_evidence(path, [ATTRIBUTION, QUALITY])
    first, second = read_evidence(path)
    assert repr(first) == repr(ATTRIBUTION)
    assert second == QUALITY
    assert QUALITY.perplexity_change == pytest.approx(0.01, rel=1e-12)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "no readable kind"),
        ("[]", "no readable kind"),
        ('{"kind": "attribution"}', "no readable kind"),
        ('{"kind": "attribution", "schema": "1.0"}', "Field required"),
        ('{"kind": "rumour", "schema": "1.0"}', "allowed: attribution, quality"),
        ('{"kind": "quality", "schema": "2.0"}', "update attention-harness"),
    ],
    ids=["cut", "list", "no-schema", "no-fields", "unknown-kind", "newer"],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "evidence.jsonl"
    write_evidence(path, [QUALITY])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=f"line 2.*{told}"):
        read_evidence(path)


def test_lines_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    write_evidence(path, [QUALITY])

    def refuse(name: str) -> float:
        raise AssertionError(name)

    assert json.loads(path.read_text(), parse_constant=refuse)["kl_max"] == "inf"
