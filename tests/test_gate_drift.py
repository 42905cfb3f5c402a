"""The paired test: what it finds, what it takes for noise, and how it tells them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_factory import errors, record

from harness.formats import get_format
from harness.gate import Outcome, compare, pool_records
from harness.gate.drift import SMALLEST_IN_ALL, SMALLEST_IN_CELL, find_drifts
from harness.records import Record

U = get_format("bf16").unit_roundoff
CASES = ("g/a", "g/b", "g/c", "g/d")
NAMES = ("x", "y", "z")


def run(
    rises: dict[tuple[str, str, int], float] | None = None, seeds: int = 3, count: int = 8192
) -> list[Record]:
    """Cells whose error is 4·u of the truth, times 1 + its rise, with n_eff = count / 16."""
    made = []
    for case in CASES:
        for name in NAMES:
            for seed in range(seeds):
                rmse = 4 * U * (1 + seed) * (1 + (rises or {}).get((case, name, seed), 0.0))
                figures = errors(rmse=rmse, max_abs=4 * rmse, count=count)
                made.append(record(case, implementation=name, seed=seed, errors=figures))
    return made


def gated(new: list[Record], old: list[Record] | None = None) -> Outcome:
    return compare(new, pool_records(run() if old is None else old))


def everywhere(rise: float, case: str | None = None) -> dict[tuple[str, str, int], float]:
    return {(c, "x", seed): rise for c in CASES for seed in range(3) if case in (None, c)}


def test_rise_of_five_percent_in_one_cell_is_one_line_that_names_it() -> None:
    (told,) = gated(run(everywhere(0.05, "g/b"))).regressions
    assert told.startswith("g/b · x · bf16: rmse +5.0% in 3 paired seeds (limit +2.5%)")


def test_rise_of_five_percent_in_all_cells_is_one_line_that_names_the_implementation() -> None:
    (told,) = gated(run(everywhere(0.05))).regressions
    assert told.startswith(
        "all cases · x · bf16: rmse +5.0% over 4 cases and 12 pairs (limit +1.0%), 4 of them"
    )


def test_drift_of_two_percent_in_all_cells_is_found_though_no_cell_shows_it_alone() -> None:
    (told,) = gated(run(everywhere(0.02))).regressions
    assert told.startswith("all cases · x · bf16")
    assert "0 of them beyond their own" in told
    assert gated(run(everywhere(0.02, "g/a"))).regressions == ()


def test_smallest_drifts_are_what_they_say() -> None:
    for rise, code in ((SMALLEST_IN_ALL - 1e-3, 0), (SMALLEST_IN_ALL + 1e-3, 1)):
        assert gated(run(everywhere(rise))).exit_code == code
    for rise, code in ((SMALLEST_IN_CELL - 1e-3, 0), (SMALLEST_IN_CELL + 1e-3, 1)):
        assert gated(run(everywhere(rise, "g/c"))).exit_code == code


def test_rises_that_differ_by_case_are_all_found() -> None:
    rises = {
        (c, "x", s): rise for c, rise in zip(CASES, (0.05, 0.08, 0.11, 0.2), strict=True) for s in range(3)
    }
    (told,) = gated(run(rises)).regressions
    assert "4 of them beyond their own; most in g/d" in told


def test_rise_in_half_of_the_cells_is_found() -> None:
    both = everywhere(0.05, "g/a") | everywhere(0.05, "g/b")
    outcome = gated(run(both))
    assert outcome.exit_code == 1
    assert all(" · x · bf16" in line for line in outcome.regressions)


def test_fall_is_an_improvement_worded_likewise() -> None:
    outcome = gated(run(everywhere(1 / 1.05 - 1, "g/b")))
    assert outcome.exit_code == 0
    (told,) = outcome.improvements
    assert "rmse -4.8% in 3 paired seeds (limit -2.4%)" in told


def test_noise_between_seeds_of_the_size_of_the_rise_is_no_alarm() -> None:
    """d = 0.12, −0.08, 0.05: a mean of 3 % with a standard error of 6 %."""
    noisy = {(c, n, s): d for c in CASES for n in NAMES for s, d in enumerate((0.12, -0.08, 0.05))}
    assert gated(run(noisy)).regressions == ()


def test_noise_of_the_other_implementations_counts_for_one_whose_seeds_agree_by_chance() -> None:
    noisy = {(c, n, s): d for c in CASES for n in NAMES[1:] for s, d in enumerate((0.12, -0.12, 0.0))}
    assert gated(run({**noisy, **everywhere(0.05, "g/a")})).regressions == ()
    assert gated(run(everywhere(0.05, "g/a"))).exit_code == 1


def test_one_case_alone_does_not_convict_all_cells() -> None:
    (told,) = gated(run(everywhere(0.5, "g/a"))).regressions
    assert told.startswith("g/a")


def test_every_rounding_drawn_anew_does_not_alarm() -> None:
    """s = 0.5 (`reports/gate-study.md`), n_eff = 512: 1.6 % a pair."""
    rng = random.Random(8)
    tau = math.sqrt(0.5 / 512)
    for _ in range(100):
        rises = {
            (c, n, s): math.expm1(rng.gauss(0, 0.5 * tau)) for c in CASES for n in NAMES for s in range(3)
        }
        found = find_drifts(zip(*(pool_records(x).values() for x in (run(rises), run())), strict=True))
        assert not found.cells
        assert not found.groups
        assert found.moved == found.pairs == len(rises)


def test_elements_that_round_the_other_way_are_not_noise_for_the_others() -> None:
    """A nearly exact cell goes from 0 to a few wrong elements in one seed; another one rose by 5 %."""
    few = {n: record("g/few", implementation="x", seed=n, rmse=0.0) for n in range(3)}
    flipped = {**few, 1: record("g/few", implementation="x", seed=1, rmse=0.04 * U)}
    (told,) = gated([*run(everywhere(0.05, "g/b")), *flipped.values()], [*run(), *few.values()]).regressions
    assert told.startswith("g/b")


def test_moved_pairs_are_counted_and_unmoved_ones_say_nothing() -> None:
    assert gated(run()).notes == ()
    assert gated(run(everywhere(0.005, "g/a"))).notes == ("rmse moved in 3 of 36 pairs, by 0.50% at most",)


rmses = st.one_of(st.just(0.0), st.floats(0, allow_infinity=True), st.just(math.nan))


@given(st.lists(st.tuples(rmses, rmses), min_size=1, max_size=6))
def test_rise_one_way_is_the_fall_of_the_other(drawn: list[tuple[float, float]]) -> None:
    def side(n: int) -> list[Record]:
        made = [record(f"g/{i}", errors=errors(rmse=pair[n])) for i, pair in enumerate(drawn)]
        return [replace(r, seed=i) for i, r in enumerate(made)]

    new, old = (list(pool_records(side(n)).values()) for n in (0, 1))
    same_noise = [
        replace(b, noise=a.noise) for a, b in zip(new, old, strict=True)
    ]  # that of the newer run counts
    up = find_drifts(zip(new, old, strict=True))
    down = find_drifts(zip(same_noise, new, strict=True), -1)
    assert (up.cells, up.groups) == (down.cells, down.groups)


@pytest.mark.parametrize("seeds", [1, 3])
def test_same_code_is_silent_whatever_its_figures(seeds: int) -> None:
    found = find_drifts((cell, cell) for cell in pool_records(run(seeds=seeds)).values())
    assert (found.cells, found.groups, found.moved, found.widest) == ({}, {}, 0, 0.0)
