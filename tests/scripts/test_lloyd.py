"""The design of scalar quantizers: equal to known optima, or stationary."""

import numpy as np
import pytest

from polarlm.engine.codecs import polarquant, turbo
from scripts.lloyd import gaussian_levels, lloyd, polar_angles


@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_uniform_density_gives_equal_cells(count):
    expected = 3 + 2 * (np.arange(count) + 0.5) / count
    assert lloyd(np.ones_like, 3.0, 5.0, count) == pytest.approx(expected, abs=1e-12)


def test_gaussian_density_gives_the_lloyd_max_quantizer():
    """Max, "Quantizing for minimum distortion" (1960), table I: four levels, printed to four digits."""
    centres = lloyd(lambda x: np.exp(-(x**2) / 2), -9.0, 9.0, 4)
    assert centres == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=5e-4)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_constants_of_turbo_are_derived_from_the_density(bits):
    assert turbo.LEVELS[bits] == pytest.approx(gaussian_levels(bits), abs=1e-12)


@pytest.mark.parametrize("level", [2, 3, 4])
def test_the_constants_of_polarquant_are_derived_from_the_density(level):
    assert polarquant.CENTRES[level] == pytest.approx(polar_angles(level), abs=1e-12)


@pytest.mark.parametrize("level", [2, 3, 4])
def test_the_centres_of_polar_angles_are_locally_optimal_and_symmetric(level):
    angles = np.linspace(0, np.pi / 2, 200_001)
    weight = np.sin(2 * angles) ** (2 ** (level - 1) - 1)

    def mean_squared_error(centres):
        return (np.square(angles[:, None] - centres).min(1) * weight).sum() / weight.sum()

    centres = polar_angles(level)
    assert centres + centres[::-1] == pytest.approx(np.full(4, np.pi / 2), abs=1e-12)
    best = mean_squared_error(centres)
    for direction in np.concatenate([np.eye(4), -np.eye(4)]):
        assert mean_squared_error(centres + 1e-3 * direction) > best
