"""Tiles of codes with a scale for each 32 channels: exact packing, and the int8 arithmetic against float64."""

from __future__ import annotations

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.jit.lang import Level
from tests.backends.native.codecs import attend
from tests.jit.levels import some_levels
from tests.pairs import in_turn

NAMES = ("q8_0", "q4_0")


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x (..., M) float32 → bytes and the value of a step (..., 1), as a kernel rounds M numbers together; float64."""
    top = np.abs(x).max(-1, keepdims=True)
    return np.rint(x * (np.float32(127) / top)).astype(np.float64), top.astype(np.float64) / 127


@some_levels
@in_turn("name", NAMES)
def test_scores(name: str, level: Level) -> None:
    """Of exact integers, with a step of the query for each 32 channels. Some codes of q8_0 are -128."""
    d, n, heads = attend.sizes(NAMES.index(name), level, of_32=True)
    codec = codecs.get(name)
    fields, queries, got = attend.scored(codec, level, n, d, heads, outliers=30)  # as queries that are not rotated have

    keys = codec.decode(fields).astype(np.float64)
    codes, step = rounded(queries.reshape(heads, -1, 32))
    size = np.einsum("hd,bnd->bhn", np.abs(queries), np.abs(keys))
    model = np.einsum("hd,bnd->bhn", (codes * step).reshape(heads, d), keys)
    assert (np.abs(got - model) <= 1e-6 * size).all()


@some_levels
def test_weights_that_are_whole_steps_are_exact(level: Level) -> None:
    """Then only the products and sums of float32 are left."""
    codec, rng = codecs.get("q8_0"), np.random.default_rng(3)
    fields = attend.random_fields(rng, codec, (2,), 64, 64)
    fields["scale"][...] = 0.5
    own = tiles.values(codec, 64, 64)
    weights = rng.integers(0, 128, (2, 2, 64)).astype(np.float32)
    weights[..., 0] = 127
    got = attend.mixed(own, level, own.pack(fields), weights, 64)
    np.testing.assert_allclose(got, 7 + np.einsum("bhn,bnd->hd", weights, codec.decode(fields)), rtol=1e-6)
