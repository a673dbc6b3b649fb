"""Tiles of recursive polar codes: what their bytes have room for."""

from __future__ import annotations

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.jit.lang import Level
from tests.backends.native.codecs import attend
from tests.codecs.data import fields_of
from tests.jit.levels import some_levels

CODEC = codecs.get("polarquant")


@some_levels
def test_sums_of_the_largest_products_fit(level: Level) -> None:
    """All pairs of a query are equal, and codes whose directions are its own: for every code of the levels above."""
    own = tiles.keys(CODEC, 256, 16)
    upper = {"upper8": np.arange(256), "upper6": np.random.default_rng(3).integers(0, 64, 256)}
    codes = {name: x.astype(np.uint8).reshape(1, 256, 1) for name, x in upper.items()}
    level1, radius = np.full((1, 256, 4), 0x22, np.uint8), np.ones((1, 256, 1), np.float16)
    tile = fields_of(CODEC, {"radius": radius, "level1": level1, **codes}, 256, 16)
    query = np.tile([np.cos(np.pi * 5 / 16), np.sin(np.pi * 5 / 16)], (2, 8)).astype(np.float32)
    query[1] *= -1
    got = attend.scores(own, level, own.pack(tile), query, 256)
    exact = np.einsum("hd,bnd->bhn", query, CODEC.decode(tile))
    assert exact.max() > 2.6  # √8 is the largest possible
    np.testing.assert_allclose(got, exact, rtol=0.01)


@some_levels
def test_a_token_with_a_large_weight_and_a_small_value(level: Level) -> None:
    """It takes no precision from the others."""
    rng, own = np.random.default_rng(5), tiles.values(CODEC, 64, 64)
    x = rng.standard_normal((20, 64, 64)).astype(np.float32)
    weights = np.exp(rng.standard_normal((20, 1, 64))).astype(np.float32)
    x[:, 7] *= 1e-3
    weights[..., 7] = 300
    fields = CODEC.encode(x)
    exact = np.einsum("bhn,bnd->hd", weights, CODEC.decode(fields).astype(np.float64))
    got = attend.mixed(own, level, own.pack(fields), weights, 64) - 7
    assert ((got - exact) ** 2).mean() < 5e-4 * (exact**2).mean()
