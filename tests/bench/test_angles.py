"""Angles of the polar transform, compared with the inverse transform and with densities of Gaussian vectors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from polarlm.bench.quality.angles import gaussian_density, histograms, polar_angles


@given(st_numpy.arrays(np.float32, (3, 16), elements=st.floats(-100, 100, width=32)))
def test_norm_and_angles_restore_a_vector(x: np.ndarray) -> None:
    radii = np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)
    for angle in reversed(polar_angles(x, 4)):
        radii = np.stack([radii * np.cos(angle), radii * np.sin(angle)], -1).reshape(len(x), -1)
    np.testing.assert_allclose(radii, x, atol=1e-9)


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_densities_integrate_to_one(level: int) -> None:
    edges = np.linspace(0, np.pi / 2 if level > 1 else 2 * np.pi, 20_001)
    middles = (edges[1:] + edges[:-1]) / 2
    assert gaussian_density(level, middles).sum() * edges[1] == pytest.approx(1, abs=1e-7)


def test_histograms_of_gaussian_keys_match_the_densities(rng: np.random.Generator) -> None:
    keys = rng.normal(size=(4, 3000, 2, 32)).astype(np.float32)
    levels = histograms(list(keys))
    assert levels is not None
    assert [level["level"] for level in levels] == [1, 2, 3, 4]
    for level in levels:
        edges = np.array(level["edges"])
        expected = gaussian_density(level["level"], (edges[1:] + edges[:-1]) / 2)
        angles = keys.size >> level["level"]
        # Counts vary by their square root; no bin of 512 lies beyond six times that, nor does its curvature.
        allowed = 6 * np.sqrt((expected + 0.01) / (angles * np.diff(edges))) + 0.005
        for name in ("as they are", "preconditioned"):
            assert (np.abs(np.array(level[name]) - expected) < allowed).all()


def test_preconditioning_makes_angles_gaussian(rng: np.random.Generator) -> None:
    keys = rng.normal(size=(2000, 1, 32)).astype(np.float32)
    keys *= np.exp(rng.normal(size=32)).astype(np.float32)
    levels = histograms([keys])
    for level in levels[1:]:
        edges = np.array(level["edges"])
        expected = gaussian_density(level["level"], (edges[1:] + edges[:-1]) / 2)
        off = {name: np.abs(np.array(level[name]) - expected).sum() for name in ("as they are", "preconditioned")}
        assert off["preconditioned"] < off["as they are"]


def test_a_head_dim_without_a_polar_transform_has_no_histograms() -> None:
    assert histograms([np.ones((3, 1, 12), np.float32)]) is None
