"""Tiles of half precision against float64."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.jit.lang import Level
from tests.backends.native.codecs import attend
from tests.jit.levels import some_levels

CODEC = codecs.get("f16")
SIZES = [(64, 64, 3), (128, 16, 4), (80, 128, 1), (8, 64, 2), (20, 48, 2)]  # head dim, block size, queries


@some_levels
@pytest.mark.parametrize(("d", "n", "heads"), SIZES)
def test_scores(d: int, n: int, heads: int, level: Level) -> None:
    """The errors of D products and sums in float32."""
    fields, queries, got = attend.scored(CODEC, level, n, d, heads)
    keys = fields["values"].astype(np.float64)
    size = np.einsum("hd,bnd->bhn", np.abs(queries), np.abs(keys))
    assert (np.abs(got - np.einsum("hd,bnd->bhn", queries, keys)) <= 1e-6 * size).all()


@some_levels
@pytest.mark.parametrize(("d", "n", "heads"), SIZES)
def test_mix(d: int, n: int, heads: int, level: Level) -> None:
    fields, weights, got = attend.mix_of_random_blocks(CODEC, level, n, d, heads)
    values = fields["values"].astype(np.float64)
    size = 7 + np.einsum("bhn,bnd->hd", weights, np.abs(values))
    assert (np.abs(got - 7 - np.einsum("bhn,bnd->hd", weights, values)) <= 3e-6 * size).all()
