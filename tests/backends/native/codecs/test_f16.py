"""Tiles of half precision against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine import codecs
from tests.backends.native.codecs import attend
from tests.backends.native.hot_loops import Loop, special_levels
from tests.jit.levels import some_levels

from polarlm.engine.backends.native import codecs as tiles  # isort: skip
from polarlm.engine.jit.isa.levels import Level

CODEC = codecs.get("f16")
SIZES = [(64, 64, 3), (128, 16, 4), (80, 128, 1), (8, 64, 2), (20, 48, 2)]  # head dim, block size, queries


@given(st.integers(1, 260), st.sampled_from([16, 48, 64]), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_unpacking_gives_back_the_fields(d: int, n: int, seed: int) -> None:
    attend.check_inverse(CODEC, n, d, seed)


@some_levels
@pytest.mark.parametrize(("d", "n", "heads"), SIZES)
def test_scores(d: int, n: int, heads: int, level: Level) -> None:
    """The errors are those of D products and sums in float32."""
    rng = np.random.default_rng(1)
    fields = attend.random_fields(rng, CODEC, (3,), n, d)
    own = tiles.keys(CODEC, n, d)
    queries = rng.standard_normal((heads, d)).astype(np.float32)
    got = attend.scores(own, level, own.pack(fields), queries, n)
    keys = fields["values"].astype(np.float64)
    size = np.einsum("hd,bnd->bhn", np.abs(queries), np.abs(keys))
    assert (np.abs(got - np.einsum("hd,bnd->bhn", queries, keys)) <= 1e-6 * size).all()


@some_levels
@pytest.mark.parametrize(("d", "n", "heads"), SIZES)
def test_mix(d: int, n: int, heads: int, level: Level) -> None:
    rng = np.random.default_rng(2)
    fields = attend.random_fields(rng, CODEC, (3,), n, d)
    own = tiles.values(CODEC, n, d)
    weights = np.exp(2 * rng.standard_normal((3, heads, n))).astype(np.float32)
    got = attend.mixed(own, level, own.pack(fields), weights, d)
    values = fields["values"].astype(np.float64)
    size = 7 + np.einsum("bhn,bnd->hd", weights, np.abs(values))
    assert (np.abs(got - 7 - np.einsum("bhn,bnd->hd", weights, values)) <= 3e-6 * size).all()


@special_levels
@pytest.mark.parametrize("side", ["keys", "values"])
def test_instructions(level: Level, side: str) -> None:
    """Halves are widened in whole registers, each for three multiply-adds, and no vector goes to the stack."""
    own = getattr(tiles, side)(CODEC, 64, 64)
    loop = Loop(attend.scores_kernel(own, 64, 3) if side == "keys" else attend.mix_kernel(own, 64, 64, 3), level)
    assert loop.count("vcvtph2ps") >= 8
    assert loop.count("vfmadd231ps") == 3 * loop.count("vcvtph2ps")
    assert loop.on_stack == 0
