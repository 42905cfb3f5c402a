"""Quantiles against closed forms, thresholds against their formula, tests of projections against synthetic data."""

from __future__ import annotations

import math

import pytest
import torch

from harness.significance import (
    ALPHA,
    FEW_ROWS,
    NO_SPREAD,
    TWIN_LIMIT,
    chi_square_quantile,
    ratio_limit,
    shift,
    spread,
    threshold,
)  # fmt: skip

DRAWS = 2000


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def powers(*size: int, seed: int = 1) -> torch.Tensor:
    """f of rows as unlike as those of attention: log-normal."""
    return torch.exp(normal(*size, seed=seed))


@pytest.mark.parametrize("upper", [0.5, 1e-3, 1e-9, 1e-12])
def test_two_degrees_have_the_quantile_of_an_exponential(upper: float) -> None:
    # P(χ²₂ > x) = exp(−x/2); the bisection stops at 1e-9 of x.
    assert chi_square_quantile(2, upper) == pytest.approx(-2 * math.log(upper), rel=2e-9)


@pytest.mark.parametrize("upper", [0.5, 1e-3, 1e-9])
def test_one_degree_has_the_quantile_of_a_squared_normal(upper: float) -> None:
    x = chi_square_quantile(1, upper)
    assert math.erfc(math.sqrt(x / 2)) == pytest.approx(upper, rel=1e-6)


@pytest.mark.parametrize("degrees", [4, 6, 20])
@pytest.mark.parametrize("upper", [0.1, 1e-6])
def test_even_degrees_have_the_tail_of_a_poisson_sum(degrees: int, upper: float) -> None:
    # P(χ²_2m > x) = e^(−x/2) Σ_{k<m} (x/2)^k / k!
    half = chi_square_quantile(degrees, upper) / 2
    tail = math.exp(-half) * sum(half**k / math.factorial(k) for k in range(degrees // 2))
    assert tail == pytest.approx(upper, rel=1e-6)


@pytest.mark.parametrize("degrees", [1000, 30_000, 1_000_000])
def test_many_degrees_approach_wilson_and_hilferty(degrees: int) -> None:
    z, c = 4.753424308822899, 2 / (9 * degrees)  # the normal quantile at 1 − 1e-6
    cubed = degrees * (1 - c + z * math.sqrt(c)) ** 3
    # Their error is of relative size z³/ν^1.5 or less.
    assert chi_square_quantile(degrees, 1e-6) == pytest.approx(cubed, rel=z**3 / degrees**1.5)


def test_limit_of_a_ratio_falls_to_the_slack_with_more_rows() -> None:
    limits = [ratio_limit(n, 1000, 1.25) for n in (1, 4, 32, 2048, 10**6)]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] < 1.26
    assert ratio_limit(0, 0, 1.25) == ratio_limit(1, 1, 1.25)  # nothing pooled is one row


def test_limits_are_those_stated_for_a_billionth() -> None:
    # NUMERICS section 5 gives them at 1 − 1e-9 and slack 1.25.
    stated = {1: 7.6, 32: 2.3, 2048: 1.36}
    for rows, limit in stated.items():
        assert ratio_limit(rows, 1, 1.25, alpha=1e-9) == pytest.approx(limit, abs=0.05)


def test_threshold_is_that_of_a_sub_gaussian_family() -> None:
    assert threshold(100) == math.sqrt(2 * math.log(2 * 100 / ALPHA))
    assert threshold(0) == threshold(1)
    k, tau = 57, threshold(57, 1e-3)
    assert k * 2 * math.exp(-(tau**2) / 2) == pytest.approx(1e-3)


@pytest.mark.parametrize("rows", [8, FEW_ROWS, 400])
def test_statistic_of_nothing_is_normal_and_stays_below_its_threshold(rows: int) -> None:
    kernel, twin, f = normal(DRAWS, rows), normal(DRAWS, rows, seed=2), powers(DRAWS, rows)
    found = [shift(*x) for x in zip(kernel, twin, f, strict=True)]
    t = torch.tensor([s.t for s in found])
    # A deviation of DRAWS unit normals is within 5/√(2·DRAWS) = 0.08 of 1; self-normalised sums, clipping and the
    # larger of two variances only make it smaller, by the share that the single largest ω² takes.
    assert 0.75 < float(t.std()) < 1.08
    assert abs(float(t.mean())) < 5 / math.sqrt(DRAWS)
    limit = TWIN_LIMIT if rows < FEW_ROWS else threshold(DRAWS)
    assert float(t.abs().max()) < limit


@pytest.mark.parametrize("rows", [32, 400])
def test_fitted_size_is_unbiased(rows: int) -> None:
    theta = 0.5
    f = powers(DRAWS, rows)
    kernel, twin = normal(DRAWS, rows) + theta * f, normal(DRAWS, rows, seed=2)
    found = [shift(*x) for x in zip(kernel, twin, f, strict=True)]
    mean = sum(s.theta for s in found) / DRAWS
    se = math.sqrt(sum(s.se**2 for s in found)) / DRAWS
    # Clipping at 6 medians cuts what a heavy f adds to its own row: at most the share of such rows.
    assert mean == pytest.approx(theta, abs=5 * se + (0.02 if rows >= FEW_ROWS else 0.0))


def test_a_shift_is_found_when_it_is_as_large_as_promised() -> None:
    f = powers(1000)
    theta = 2 * math.sqrt(2) * threshold(100) / float(f.norm())  # twice what is called unseen
    found = [shift(normal(1000, seed=s) + theta * f, normal(1000, seed=s + 999), f) for s in range(50)]
    assert min(x.t for x in found) > threshold(100) / 2
    assert sum(x.t > threshold(100) for x in found) > 40


def test_one_row_cannot_make_a_shift() -> None:
    kernel = torch.zeros(1000, dtype=torch.float64)
    kernel += normal(1000)
    kernel[3] = 1e6
    assert abs(shift(kernel, normal(1000, seed=2), powers(1000)).t) < threshold(100)


def test_equal_bits_have_no_statistic() -> None:
    a, f = normal(400), powers(400)
    assert shift(a, a.clone(), f).t == 0.0
    assert spread(a, a.clone(), f).t == 0.0
    assert spread(a * 0, a * 0, f) == NO_SPREAD


def test_dispersion_of_nothing_stays_below_its_threshold() -> None:
    kernel, twin, f = normal(DRAWS, 400), normal(DRAWS, 400, seed=2), powers(DRAWS, 400)
    t = torch.tensor([spread(*x).t for x in zip(kernel, twin, f, strict=True)])
    assert float(t.abs().max()) < threshold(DRAWS)
    assert 0.85 < float(t.std()) < 1.1


def test_dispersion_beyond_the_twins_is_found_with_its_ratio() -> None:
    kernel, twin, f = 2 * normal(4000), normal(4000, seed=2), powers(4000)
    found = spread(kernel, twin, f)
    assert found.t > threshold(100)
    assert found.ratio == pytest.approx(4.0, rel=5 * math.sqrt(2 * 2 / 4000))
    assert found.excess == pytest.approx(math.sqrt(3 / float((f * f).mean())), rel=0.2)


def test_few_rows_have_no_dispersion() -> None:
    x = normal(FEW_ROWS - 1)
    assert spread(x, x + 1, x.abs()) == NO_SPREAD


def test_no_rows_have_no_shift() -> None:
    none = torch.zeros(0, dtype=torch.float64)
    found = shift(none, none, none)
    assert (found.t, found.theta, found.se) == (0.0, 0.0, math.inf)
