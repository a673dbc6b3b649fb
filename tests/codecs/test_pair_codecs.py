"""Codecs whose codes each stand for a point of a table: their errors, and decoding to norm · points."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine import codecs
from tests.codecs.data import TABLED, gaussian, stored_norms
from tests.pairs import in_turn

EPS = np.finfo(np.float32).eps
# As published for turbo.
ERRORS = {
    **{"ring2.5": 0.0565, "ring3": 0.0292, "ring3.5": 0.0151, "ring4": 0.0077, "ring5": 0.0020},
    **{"turbo2": 0.116, "turbo3": 0.0340, "turbo4": 0.0093, "linear8": 0.000043},
}


def test_error_on_gaussian_vectors() -> None:
    x, errors = gaussian(64, 64, 128), {}
    for name in TABLED:
        codec = codecs.get(name)
        errors[name] = float(np.square(codec.decode(codec.encode(x)) - x).mean())
    assert errors == pytest.approx(ERRORS, rel=0.01)


@in_turn("name", [*TABLED, *(f"{name}+norm16" for name in TABLED if "ring" in name)])
def test_decode_is_the_stored_norm_times_the_nearest_points(name: str) -> None:
    codec = codecs.get(name)
    table = codec.rounding
    for dim in (8, 48, 128):
        x = gaussian(3, 16, dim) * np.logspace(-2, 2, 16, dtype=np.float32)[:, None]
        norms = codec.norms(x)
        if name != "linear8":  # whose norms cover the largest value
            assert np.allclose(norms, np.sqrt(np.square(x.astype(np.float64)).mean(-1)), rtol=dim * EPS)
        codes, points = table.nearest((x / norms[..., None]).reshape(-1, table.width))
        assert np.array_equal(points, table.points[codes])
        fields, encoded = table.assemble(codes.reshape(3, 16, -1), norms), codec.encode(x)
        assert list(encoded) == list(fields)
        assert all(np.array_equal(encoded[key], fields[key]) for key in fields)
        stored = stored_norms(codec, norms)
        assert np.array_equal(codec.decode(fields), points.reshape(x.shape) * stored[..., None])
