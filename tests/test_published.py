"""The published figures that take a second, the table that shows them, and what the session answers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.published import __main__ as door
from benchmarks.published import golden, hopper, lazy_rescale, p_cast, pasa, sage, tied_maxima, worked_example
from benchmarks.published.flash_attention_3 import SETTINGS
from benchmarks.published.report import markdown, table
from benchmarks.published.rows import Row, number
from harness import get, reference

ROOT = Path(__file__).resolve().parent.parent


def within(rows: list[Row]) -> None:
    assert rows
    for r in rows:
        assert r.within, f"{r.setting}: {r.ours}, should be {r.band}"


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", [worked_example, tied_maxima, pasa, lazy_rescale], ids=lambda m: m.PAPER.name
)
def test_the_quick_papers_are_within_their_bands(module: object) -> None:
    within(list(module.rows(full=False)))  # type: ignore[attr-defined]


def test_a_tail_of_the_other_sign_turns_the_bias_of_tied_maxima_around() -> None:
    assert tied_maxima.bias(2, 100_000, -tied_maxima.TAIL) == pytest.approx(0.25, abs=0.003)


def test_a_mean_far_from_zero_overflows_fp16_scores_at_any_length() -> None:
    assert pasa.share(30, 0.5, 1, n=128) == 1.0
    assert pasa.share(20, 10, 1, n=128) == 0.0


@pytest.mark.parametrize("n", [1024, 2048])
def test_a_13_bit_sum_loses_what_is_published_and_a_promoted_one_does_not(n: int) -> None:
    assert hopper.largest(n, hopper.LIMITED, dots=256) == pytest.approx(hopper.PUBLISHED[n], rel=0.1)
    assert hopper.largest(n, hopper.PROMOTED, dots=256) <= 1e-3


def test_p_times_v_over_long_rows_needs_promotion() -> None:
    p, v = hopper.long_context(1.0, 1, keys=16 * 1024)
    assert hopper.p_v(hopper.LIMITED, p, v) > 0.1 > 1e-3 > hopper.p_v(hopper.PROMOTED, p, v)


def test_flash_attention_1_over_one_tile_and_in_fp64_is_attention() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 16, generator=g, dtype=torch.float64) for _ in range(3))
    for block in (16, 70, 128):
        out = golden.FLASH_1.run(q, k, v, recipe="fp64", block=block).out
        assert float((out - reference(q, k, v).out).abs().max()) <= 1e-14


def test_smaller_tiles_cost_flash_attention_1_accuracy_in_bf16() -> None:
    found = golden.squares(1, seed=9)
    assert found[16] > found[128] > 0.8 * found["eager"] > found["FP32 sums"]


def test_the_integral_of_the_flushed_share_is_the_published_one() -> None:
    for shift, published in p_cast.FLUSHED.items():
        assert p_cast.predicted(shift) == pytest.approx(published, abs=5e-4)
    assert p_cast.predicted(5, 256.0) < 0.01 * p_cast.predicted(5)


def test_a_lazy_maximum_without_narrow_p_is_attention() -> None:
    g = torch.Generator().manual_seed(1)
    s, v = torch.randn(8, 300, generator=g, dtype=torch.float64), torch.ones(300, 2, dtype=torch.float64)
    out = lazy_rescale.lazy(s / math.log(2), v, 8.0, 0.0)  # V = 1: the mass that P's cast keeps
    assert bool(((out - 1).abs() <= 2.0**-4).all())
    assert bool((lazy_rescale.lazy(s / math.log(2) + 5 * (torch.arange(300) > 128), v, 8.0, 8.0) < 0.9).all())


def test_eight_bit_rows_are_rounded_half_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5]], dtype=torch.float64)
    assert sage.by_rows(x, sage.INT8).tolist() == [[127.0, 0.0, 2.0, -2.0]]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_flash_attention_3_runs_and_ranks_fp8_behind_fp16(name: str) -> None:
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, n, 128, generator=g, dtype=torch.float64) for n in (16, 256, 256))
    algorithm, recipe, *_ = SETTINGS[name]
    out = get(algorithm).run(q, k, v, recipe=recipe, quantize=True).out.double()
    error = float((out - reference(q, k, v).out).norm() / out.norm())
    assert (error > 0.01) == name.startswith("FP8")
    assert recipe.out_format == "fp16"


# --- table and session -----------------------------------------------------------------------------------------------


def row(ours: float, low: float = 1.0, high: float = 2.0) -> Row:
    return Row("x", "1.5", ours, low, high, "n = 1")


def test_a_figure_on_the_edge_is_within_and_nan_is_not() -> None:
    assert [row(x).verdict for x in (1.0, 2.0, 0.999, 2.001, math.nan)] == ["within"] * 2 + ["OUTSIDE"] * 3
    assert [row(1.0, *b).band for b in ((1.0, math.inf), (0.0, 1e-3), (1.0, 1.0))] == ["≥ 1", "≤ 1e-3", "1"]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0.0091, "9.1e-3"),
        (3.2e-4, "3.2e-4"),
        (0.0157, "0.0157"),
        (1e-3, "1e-3"),
        (0.0, "0"),
        (-0.25, "-0.25"),
    ],
)
def test_small_figures_are_shown_as_powers_of_ten(x: float, text: str) -> None:
    assert number(x) == text


def test_the_session_answers_1_when_a_figure_is_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worked_example, "rows", lambda full: iter([row(3.0)]))
    arguments = ["--only", "worked_example", "--out", str(tmp_path / "page.md")]
    assert door.main(arguments) == 1
    assert "0 of 1 rows within their bands; outside: x" in capsys.readouterr().out
    assert "| x | 1.5 | 3 | 1 … 2 | OUTSIDE | n = 1 |" in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_the_session_answers_0_when_all_are_within_and_writes_no_part_of_a_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert door.main(["--only", "worked_example,tied_maxima"]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--only", "nobody"], ["--all"], ["extra"]])
def test_wrong_usage_is_answered_with_2_and_what_is_allowed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        door.main(arguments)
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "usage" in told
    assert arguments[0] != "--only" or "unknown nobody; allowed: worked_example, flash_attention_3" in told


@pytest.mark.parametrize("name", ["published.md", "published-full.md"])
def test_the_committed_page_holds_every_row_with_its_source_and_size(name: str) -> None:
    page = (ROOT / "reports" / name).read_text(encoding="utf-8")
    assert "OUTSIDE" not in page
    for module in door.MODULES:
        assert f"## {module.PAPER.title}\n\nSource: {module.PAPER.source}." in page
    rows = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    assert all(len(line.strip("| ").split(" | ")) == 6 for line in rows)
    assert len([line for line in rows if "| within |" in line]) == int(page.partition(" of ")[2].split()[0])


def test_tables_fit_a_hundred_columns_at_the_longest_figures() -> None:
    longest = Row("x" * 43, "(0.802, 0.599)", 1.23e-4, 1.11e-4, 2.22e-4, "n = 1")
    assert max(map(len, table([longest]).splitlines())) <= 100
    assert "n = 1" in markdown([(golden.PAPER, [longest])], full=True, seconds=1.0)
