"""The random rotations: orthogonal, mixing, reproducible."""

import numpy as np
import pytest

from polarlm.engine.codecs.parts.rotation import dense, signed_hadamard, twice_signed_hadamard
from tests.pairs import in_turn

HEAD_DIMS = [8, 16, 24, 48, 64, 80, 96, 128, 256]


@pytest.mark.parametrize("rotation", [signed_hadamard, twice_signed_hadamard, dense])
def test_orthogonal(rotation):
    for head_dim in HEAD_DIMS:
        w = rotation(head_dim)
        assert w.shape == (head_dim, head_dim), head_dim
        assert w.dtype == np.float32, head_dim
        # Each entry is rounded by half an ulp, and a dot product of two unit rows adds up at most √D of those.
        tolerance = np.sqrt(head_dim) * np.finfo(np.float32).eps
        assert np.abs(w.astype(np.float64) @ w.T - np.eye(head_dim)).max() < tolerance, head_dim


@in_turn("head_dim", HEAD_DIMS)
def test_hadamard_spreads_a_coordinate_evenly_over_the_largest_power_of_two(head_dim):
    w = signed_hadamard(head_dim)
    order = max(n for n in (8, 16, 32, 64, 128, 256) if head_dim % n == 0)
    assert ((w != 0).sum(0) == order).all()
    assert ((w != 0).sum(1) == order).all()
    assert np.abs(w[w != 0]) == pytest.approx(order**-0.5, rel=1e-6)


@pytest.mark.parametrize("rotation", [signed_hadamard, twice_signed_hadamard, dense])
def test_shared_matrices_are_read_only(rotation):
    with pytest.raises(ValueError, match="read-only"):
        rotation(16)[0, 0] = 1
