"""Figures of many divergences: their definitions, and their errors beside known ones."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.bench.quality.divergence import Divergence, compare
from polarlm.bench.quality.figures import error_of, figures


def windows(kl: np.ndarray) -> list[Divergence]:
    """A window for each row of kl (W, T)."""
    return [Divergence(row, row < 1, np.exp(-row)) for row in kl]


def test_a_draft_is_accepted_by_hand() -> None:
    """p = (1/4, 3/4), q = (1/2, 1/2): the first is accepted always, the second in two of three cases."""
    found = compare(np.log([[1, 3]]).astype(np.float32), np.zeros((1, 2), np.float32))
    assert found.accepted[0] == pytest.approx(1 / 4 + 3 / 4 * 2 / 3)


@pytest.mark.parametrize(("count", "length"), [(2, 400), (4, 300)])
def test_figures_are_those_of_all_positions(count: int, length: int, rng: np.random.Generator) -> None:
    kl = rng.exponential(1, (count, length))
    found = figures(windows(kl))
    assert found.kl_mean == pytest.approx(kl.mean())
    assert (found.kl_median, found.kl_max) == pytest.approx((np.median(kl), kl.max()))
    assert found.same_top1 == pytest.approx((kl < 1).mean())
    assert (found.kl_999th_percentile is None) == (kl.size < 1000)
    assert found.errors is not None
    assert set(found.errors) == {name for name, figure in vars(found).items() if figure is not None} - {"errors"}


def test_the_error_of_a_mean_is_that_of_its_windows(rng: np.random.Generator) -> None:
    """σ/√W of the means of W windows, however alike the positions of a window are; 200 draws know it to 5 %, and 40
    windows σ to 11 %."""
    means = rng.normal(5, 1, 40)
    kl = means[:, None] + rng.normal(0, 0.01, (40, 500))
    found = figures(windows(kl))
    assert found.errors["kl_mean"] == pytest.approx(means.std() / 40**0.5, rel=0.15)
    assert found.errors["kl_mean"] == pytest.approx(1 / 40**0.5, rel=0.4)


def test_a_single_window_has_no_error() -> None:
    assert figures(windows(np.ones((1, 10)))).errors is None
    assert error_of(lambda chosen: 1.0, 1) is None
