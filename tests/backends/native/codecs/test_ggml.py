"""Tiles of codes with a scale for each 32 channels: exact packing, and the int8 arithmetic against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine import codecs
from tests.backends.native.codecs import attend
from tests.backends.native.hot_loops import OF_BYTES, OF_SMALL_BYTES, Loop, special_levels
from tests.jit.levels import some_levels

from polarlm.engine.backends.native import codecs as tiles  # isort: skip
from polarlm.engine.jit.isa.levels import Level
from tests.pairs import in_turn

NAMES = ("q8_0", "q4_0")
every_codec = in_turn("name", NAMES)


@given(
    st.sampled_from(NAMES),
    st.sampled_from([32, 64, 96, 128, 256]),
    st.sampled_from([16, 48, 64, 128]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=30, deadline=None)
def test_unpacking_gives_back_the_fields(name: str, d: int, n: int, seed: int) -> None:
    attend.check_inverse(codecs.get(name), n, d, seed)


@every_codec
def test_a_tile_takes_the_bytes_of_the_codec(name: str) -> None:
    attend.check_size(codecs.get(name), 64, 96)


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x (..., M) float32 → bytes and the value of a step (..., 1), as a kernel rounds M numbers together; float64."""
    top = np.abs(x).max(-1, keepdims=True)
    return np.rint(x * (np.float32(127) / top)).astype(np.float64), top.astype(np.float64) / 127


@some_levels
@every_codec
def test_scores(name: str, level: Level) -> None:
    """Exact integers, and within half a step of the query of the decoded keys. Some codes of q8_0 are -128."""
    d, n, heads = attend.sizes(NAMES.index(name), level, of_32=True)
    codec, rng = codecs.get(name), np.random.default_rng(1)
    fields = attend.random_fields(rng, codec, (3,), n, d)
    own = tiles.keys(codec, n, d)
    queries = rng.standard_normal((heads, d)).astype(np.float32)
    queries[:, :32] *= 30  # outliers, as queries that are not rotated have
    got = attend.scores(own, level, own.pack(fields), queries, n)

    keys = codec.decode(fields).astype(np.float64)
    codes, step = rounded(queries.reshape(heads, -1, 32))
    size = np.einsum("hd,bnd->bhn", np.abs(queries), np.abs(keys))
    model = np.einsum("hd,bnd->bhn", (codes * step).reshape(heads, d), keys)
    assert (np.abs(got - model) <= 1e-6 * size).all()

    exact = np.einsum("hd,bnd->bhn", queries, keys)
    of_query = np.einsum("hg,bng->bhn", step[..., 0] / 2, np.abs(keys).reshape(3, n, -1, 32).sum(-1))
    assert (np.abs(got - exact) <= 1.001 * of_query + 1e-6 * size).all()


@some_levels
@every_codec
def test_mix(name: str, level: Level) -> None:
    """Within half a step of the weights of the mix of the decoded values; scales have both signs."""
    d, n, heads = attend.sizes(NAMES.index(name) + 2, level, of_32=True)
    codec, rng = codecs.get(name), np.random.default_rng(2)
    fields = attend.random_fields(rng, codec, (3,), n, d)
    own = tiles.values(codec, n, d)
    weights = np.exp(2 * rng.standard_normal((3, heads, n))).astype(np.float32)
    weights[1, 0] = 0
    got = attend.mixed(own, level, own.pack(fields), weights, d)

    values = codec.decode(fields).astype(np.float64)
    exact = 7 + np.einsum("bhn,bnd->hd", weights, values)
    scales = fields["scale"].astype(np.float64)
    steps = (weights[..., None] * np.abs(scales)[:, None]).max(2) / 127  # (blocks, heads, groups)
    codes = np.abs(codec.decode({**fields, "scale": np.ones_like(fields["scale"])})).reshape(3, n, -1, 32)
    of_weights = np.einsum("bhg,bngi->hgi", steps / 2, codes).reshape(heads, d)
    size = 7 + np.einsum("bhn,bnd->hd", weights, np.abs(values))
    assert (np.abs(got - exact) <= 1.001 * of_weights + 1e-5 * size).all()


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


@special_levels
@every_codec
@pytest.mark.parametrize("side", ["keys", "values"])
def test_instructions(name: str, side: str, level: Level) -> None:
    """Codes are multiplied as bytes, in whole registers. With VNNI, and for values, hardly a vector goes to the stack
    and back where there are the 32 registers of AVX-512."""
    own = getattr(tiles, side)(codecs.get(name), 64, 64)
    loop = Loop(attend.scores_kernel(own, 64, 3) if side == "keys" else attend.mix_kernel(own, 64, 64, 3), level)
    assert loop.count((OF_BYTES if name == "q8_0" else OF_SMALL_BYTES)[level.name]) >= 24
    if level.lanes == 16 and (side == "values" or "avx512vnni" in level.needs):
        assert loop.on_stack <= 0.1 * len(loop)
