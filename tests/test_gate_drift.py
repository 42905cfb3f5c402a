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
from harness.gate.noise import ALARMS, S0, ceiling, factor, share, tail, unit
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
    assert told.startswith("g/b · x · bf16: rmse +5.0% beyond the floor in 3 paired seeds (limit +2.5%)")


def test_rise_of_five_percent_in_all_cells_is_one_line_that_names_the_implementation() -> None:
    (told,) = gated(run(everywhere(0.05))).regressions
    assert told.startswith(
        "all cases · x · bf16: rmse +5.0% beyond the floor over 4 cases and 12 pairs (limit +1.0%), 4 of them"
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
    assert "rmse -4.8% beyond the floor in 3 paired seeds (limit -2.4%)" in told


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


# --- noise ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0.0, 1.0, 5.0, 50.0])
def test_tail_without_a_lead_is_that_of_students_t(t: float) -> None:
    """Closed forms for 1, 2 and 4 degrees of freedom; the integral's step errs by less than 1e-5 of them."""
    x = t / math.sqrt(4 + t * t)
    known = {
        1: 0.5 - math.atan(t) / math.pi, 2: 0.5 - t / (2 * math.sqrt(2 + t * t)), 4: 0.5 - 0.75 * x + 0.25 * x**3
    }  # fmt: skip
    for freedom, chance in known.items():
        assert tail(0.0, t, freedom) == pytest.approx(chance, rel=1e-5)


@given(st.floats(0, 4), st.floats(0, 30), st.sampled_from([1, 2, 4, 16, 400]))
def test_tail_lies_between_that_of_its_lead_and_a_larger_one(a: float, z: float, freedom: int) -> None:
    alone = 0.5 * math.erfc(a / math.sqrt(2))
    assert tail(a, z, freedom) <= alone * (1 + 1e-6)
    assert tail(a + 0.1, z, freedom) < tail(a, z, freedom)


@given(st.floats(0, 3), st.integers(1, 60), st.sampled_from([1e-3, 1e-5, 1e-7]))
def test_factor_keeps_its_chance_and_is_no_larger_than_that_takes(
    a: float, freedom: int, alpha: float
) -> None:
    z = factor(a, freedom, alpha)
    assert tail(a, z, freedom) <= alpha
    assert tail(a, 0.999 * z, freedom) > alpha


def test_ceiling_is_the_normals_bound_for_many_elements_and_more_for_few() -> None:
    for sigma in (1e-3, 0.03, 0.3, 2.0, 30.0):
        high = ceiling(sigma, 1e-5)
        normal = S0 * sigma * math.sqrt(2 * math.log(1e5))
        assert high >= normal
        if sigma < 1:
            assert math.cosh(high) ** -((S0 * sigma) ** -2) == pytest.approx(1e-5, rel=1e-6)
    assert ceiling(1e-3, 1e-5) == pytest.approx(S0 * 1e-3 * math.sqrt(2 * math.log(1e5)), rel=1e-5)


def test_unit_of_few_elements_is_as_wide_as_their_log_f() -> None:
    """8 normal errors on either side: deviation of ½·log F, against S0 units of the τ that they show."""
    rng = random.Random(4)
    squares = [[rng.gauss(0, 1) ** 2 for _ in range(8)] for _ in range(4000)]
    taus = [math.sqrt(max(x) / (2 * sum(x))) for x in squares]
    logs = [0.5 * math.log(sum(x)) for x in squares]
    spread = math.sqrt(sum((a - b) ** 2 for a, b in zip(logs[::2], logs[1::2], strict=True)) / 2000)
    assert S0 * unit(sum(taus) / 4000) > 0.9 * spread
    assert unit(0.05) == 0.05


def test_one_seed_of_few_elements_is_not_convicted_by_seeds_that_agree_by_chance() -> None:
    """s of the large cells is 0.07; d of a cell of one seed and few elements, 0.42 τ: six standard errors, which eight
    degrees of freedom exceed by chance."""
    tau = math.sqrt(0.5 / 512)
    rises = {(c, "x", s): math.expm1(k * tau) for c in CASES[:2] for s, k in enumerate((0.1, -0.1, 0.0))}
    few = errors(rmse=4 * U, max_abs=12 * U, count=16)
    old = [record("g/few", implementation="x", errors=few)]
    new = [record("g/few", implementation="x", errors=replace(few, rmse=4 * U * 1.25))]
    assert gated([*run(rises), *new], [*run(), *old]).regressions == ()
    (told,) = gated([*run(), *new], [*run(), *old]).regressions  # no other bit moved: then it is a fault
    assert told.startswith("g/few")


def test_small_moves_that_the_floor_would_hide_still_tell_the_noise() -> None:
    """rmse of 0.4·u·truth, as an output rounded once has: d of 0.5 % is below the floor, and s is not 0."""

    def side(rises: tuple[float, ...], lone: float) -> list[Record]:
        cell = [
            record(
                "g/a",
                implementation="x",
                seed=s,
                errors=errors(rmse=0.4 * U * (1 + r), max_abs=2 * U, count=8192),
            )
            for s, r in enumerate(rises)
        ]
        few = errors(rmse=0.4 * U * (1 + lone), max_abs=0.7 * U, count=16)
        return [*cell, record("g/few", implementation="x", errors=few)]

    assert gated(side((0.004, -0.004, 0.0), 0.05), side((0.0, 0.0, 0.0), 0.0)).regressions == ()


def test_false_alarms_are_divided_among_what_moved() -> None:
    assert share(35) == ALARMS / 70
    limits = []
    for names in (NAMES[:1], NAMES):
        new = run({("g/b", n, s): rise for n in names for s, rise in enumerate((0.06, 0.05, 0.04))})
        found = find_drifts(zip(pool_records(new).values(), pool_records(run()).values(), strict=True))
        assert len(found.cells) == len(names)
        limits.append(found.cells["g/b", "x", "bf16"].limit)
    assert limits[0] < limits[1]
