"""Tiles of pairs of a radius and an angle: exact packing, and the int8 arithmetic against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine import codecs
from tests.backends.native.codecs import attend
from tests.backends.native.hot_loops import OF_BYTES, Loop, special_levels
from tests.codecs.data import streams
from tests.jit.levels import SOME, run
from tests.pairs import each, in_turn

from polarlm.engine.backends.native import codecs as tiles  # isort: skip
from polarlm.engine.backends.native.kernels.attention.decoding import Decoding, decode
from polarlm.engine.jit.isa.levels import Level

NAMES = ("polarpair-m4n4", "polarpair-m4n2", "polarpair-m4n4+g16", "polarpair-m4n2+g32")


@given(
    st.sampled_from(NAMES),
    st.sampled_from([8, 16, 48, 64, 80, 96, 128, 256]),
    st.sampled_from([32, 64, 96, 128]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=30, deadline=None)
def test_unpacking_gives_back_the_fields(name: str, d: int, n: int, seed: int) -> None:
    attend.check_inverse(codecs.get(name), n, d, seed)


@pytest.mark.parametrize("name", NAMES)
def test_a_tile_takes_the_bytes_of_the_codec(name: str) -> None:
    attend.check_size(codecs.get(name), 64, 80)


@pytest.mark.parametrize("name", ["polarpair-m4n4+g8", "polarpair-m4n4+minmax", "polarpair-m4n2+minmax-radius"])
def test_other_options_have_no_tiles(name: str) -> None:
    assert tiles.keys(codecs.get(name), 64, 64) is None


def test_values_have_no_tiles() -> None:
    assert tiles.values(codecs.get(NAMES[0]), 64, 64) is None


@in_turn("level name", [*each(SOME, NAMES[::2]), *each(SOME, NAMES[1::2])])
def test_scores(name: str, level: Level) -> None:
    """Exact integers, and within half a step of the table and half a step of the query of the decoded keys. Every level
    has tables of both sizes."""
    d, n, heads = attend.sizes(NAMES.index(name), level)
    n = max(n, 32)
    codec, rng = codecs.get(name), np.random.default_rng(1)
    fields = attend.random_fields(rng, codec, (3,), n, d)
    own = tiles.keys(codec, n, d)
    queries = rng.standard_normal((heads, d)).astype(np.float32)
    got = attend.scores(own, level, own.pack(fields), queries, n)

    scale, limit = own._table.scale, np.float32(127)  # type: ignore[attr-defined]
    spans = fields["radius_step"].shape[-2]
    steps = np.repeat(fields["radius_step"].astype(np.float32), 2, axis=-1)  # (blocks, spans, D)
    products = queries[:, None, None] * steps  # (H, blocks, spans, D)
    top = np.abs(products).max(-1, keepdims=True)
    rounded, step = np.rint(products * (limit / top)).astype(np.float64), top.astype(np.float64) / limit
    bytes_ = own._table.bytes_[streams(codec, fields)["codes"]].reshape(3, spans, -1, d)  # type: ignore[attr-defined]
    signed = bytes_.astype(np.float64)
    model = np.einsum("hbsd,bstd->bhst", rounded * step, signed).reshape(3, heads, n) * scale
    size = np.einsum("hbsd,bstd->bhst", np.abs(rounded) * step, np.abs(signed)).reshape(3, heads, n) * scale
    assert (np.abs(got - model) <= 1e-6 * size + 1e-12).all()

    exact = np.einsum("hd,bnd->bhn", queries, codec.decode(fields).astype(np.float64))
    of_table = np.abs(products).sum(-1)[..., None] * scale / 2
    points = (np.abs(signed) + 0.5).sum(-1) * scale  # (blocks, spans, tokens)
    of_query = points * step / 2
    bound = (of_table + of_query).swapaxes(0, 1).reshape(3, heads, n)
    assert (np.abs(got - exact) <= 1.001 * bound + 1e-5 * size).all()


@in_turn("level name", each(SOME, NAMES[::2]))
def test_tiles_are_decoded(name: str, level: Level) -> None:
    """Beside values of half precision, in another order than they are stored in."""
    d, n, _ = attend.sizes(NAMES.index(name), level)
    n = max(n, 32)
    rng, pair, ids = np.random.default_rng(2), (codecs.get(name), codecs.get("f16")), np.array([2, 0], np.int64)
    fields = [attend.random_fields(rng, codec, (2, 3), n, d) for codec in pair]
    keys, values = tiles.keys(pair[0], n, d), tiles.values(pair[1], n, d)
    assert keys is not None
    assert values is not None
    memory = [side.pack(own) for side, own in zip((keys, values), fields, strict=True)]
    found = np.full((2, 2, len(ids), n, d), np.nan, np.float32)
    run(decode(Decoding(keys, values, 0, n, d)), level, 2 * len(ids), attend.decoded(memory, ids, found))
    for side, codec, own in zip(found, pair, fields, strict=True):
        exact = codec.decode(own)[:, ids]
        assert (np.abs(side - exact) <= 1e-6 * np.abs(exact).max(axis=-1, keepdims=True)).all()


@special_levels
@pytest.mark.parametrize("name", ["polarpair-m4n4", "polarpair-m4n2+g32"])
def test_instructions(name: str, level: Level) -> None:
    """Bytes are looked up and multiplied in whole registers, as those of `ring`."""
    own = tiles.keys(codecs.get(name), 64, 64)
    assert own is not None
    loop = Loop(attend.scores_kernel(own, 64, 3), level)
    lookup = "vpshufb"
    if level.lanes == 16:
        lookup = "vperm[it]?2?b" if "avx512vbmi" in level.needs else "vperm[it]2w"
    assert loop.count(lookup) >= 4
    assert loop.count(OF_BYTES[level.name]) >= 24
    if level.lanes == 16:
        assert loop.on_stack <= (0.02 if "avx512vbmi" in level.needs else 0.2) * len(loop)
