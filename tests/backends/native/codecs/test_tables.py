"""Tiles of codecs with a table: exact packing, and the int8 arithmetic against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine import codecs
from tests.backends.native.codecs import attend
from tests.backends.native.hot_loops import OF_BYTES, OF_SMALL_BYTES, Loop, special_levels
from tests.codecs.data import TABLED, streams
from tests.jit.levels import SOME, some_levels
from tests.pairs import each, in_turn

from polarlm.engine.backends.native import codecs as tiles  # isort: skip
from polarlm.engine.backends.native.codecs.parts.code_table import CodeTable
from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.parts.viterbi import PathSearch, flip
from polarlm.engine.jit.isa.levels import Level

NAMES = (*TABLED, "ring4+norm16")
OF_EACH_SIZE = ("ring3", "ring3.5", "ring4", "ring5", "trellis3", "trellis3.5", "trellis4")
every_codec = in_turn("name", NAMES)
# A level looks up tables of 64, 128, 256 and four times 256 entries in its own ways, and those of up to 16 in one.
levels_and_codecs = in_turn("level name", each(SOME, NAMES))


def table_of(codec: Codec) -> CodeTable:
    found = tiles.keys(codec, 64, 64)
    return found._table  # type: ignore[attr-defined, no-any-return]


def bytes_and_norms(codec: Codec, fields: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What the table's bytes of all codes stand for, in its steps (..., N, D), and the norms (..., N), float64."""
    n, d = fields["norm"].shape[-1], codec.decode(fields).shape[-1]
    own = tiles.keys(codec, n, d).from_streams(streams(codec, fields))  # type: ignore[union-attr]
    codes, norms = own["codes"], own["norm"]
    table = table_of(codec)
    bytes_ = table.bytes_[codes] + table.beyond
    if table.flips:
        bytes_ = flip(bytes_, PathSearch.states(codes))
    bytes_ = bytes_.reshape(*codes.shape[:-1], d).astype(np.float64)
    return bytes_, codec.rounding.norms.unpack(norms).astype(np.float64)  # type: ignore[union-attr]


@given(
    st.sampled_from(NAMES),
    st.sampled_from([8, 16, 48, 64, 80, 96, 128, 256]),
    st.sampled_from([16, 48, 64, 128]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_unpacking_gives_back_the_fields(name: str, d: int, n: int, seed: int) -> None:
    attend.check_inverse(codecs.get(name), n, d, seed)


@every_codec
def test_a_tile_takes_the_bytes_of_the_codec(name: str) -> None:
    attend.check_size(codecs.get(name), 64, 128)


@in_turn("name", NAMES)
def test_names_differ_where_layouts_differ(name: str) -> None:
    codec = codecs.get(name)
    every = [side(codec, n, d) for side in (tiles.keys, tiles.values) for n in (16, 64) for d in (64, 128)]
    assert len({own.name for own in every if own is not None}) == len(every)


def test_blocks_that_do_not_fill_vectors_have_no_tiles() -> None:
    assert tiles.keys(codecs.get("ring4"), 24, 64) is None
    assert tiles.values(codecs.get("ring4"), 24, 64) is None


@levels_and_codecs
def test_scores(name: str, level: Level) -> None:
    """Exact integers, and within half a step of the table and half a step of the query of the decoded keys."""
    d, n, heads = attend.sizes(NAMES.index(name), level)
    codec, rng = codecs.get(name), np.random.default_rng(1)
    fields = attend.random_fields(rng, codec, (3,), n, d)
    own = tiles.keys(codec, n, d)
    queries = rng.standard_normal((heads, d)).astype(np.float32)
    got = attend.scores(own, level, own.pack(fields), queries, n)

    table, limit = table_of(codec), np.float32(127)
    bytes_, norms = bytes_and_norms(codec, fields)
    top = np.abs(queries).max(-1, keepdims=True)
    rounded = np.rint(queries * (limit / top)).astype(np.float64)
    step = top[:, 0].astype(np.float64) / limit
    size = np.einsum("hd,bnd->bhn", np.abs(rounded), np.abs(bytes_)) * (step * table.scale)[:, None] * norms[:, None]
    model = np.einsum("hd,bnd->bhn", rounded, bytes_) * (step * table.scale)[:, None] * norms[:, None]
    last_half = (step * table.scale)[:, None] * norms[:, None] * table.beyond
    np.testing.assert_array_less(np.abs(got - model), 1e-6 * size + 1.001 * last_half + 1e-12)

    keys = codec.decode(fields).astype(np.float64)
    exact = np.einsum("hd,bnd->bhn", queries.astype(np.float64), keys)
    of_table = np.abs(queries).sum(-1)[:, None] * table.scale / 2 * norms[:, None]
    of_query = np.abs(keys).sum(-1)[:, None] * step[:, None] / 2
    both = d * table.scale * step[:, None] / 4 * norms[:, None]
    roundings = of_table + of_query + both + last_half
    np.testing.assert_array_less(np.abs(got - exact), 1.001 * roundings + 1e-5 * size + 1e-12)


@some_levels
def test_a_query_of_zeros(level: Level) -> None:
    codec = codecs.get("ring4")
    own = tiles.keys(codec, 16, 16)
    fields = attend.random_fields(np.random.default_rng(2), codec, (1,), 16, 16)
    assert not attend.scores(own, level, own.pack(fields), np.zeros((1, 16), np.float32), 16).any()


@levels_and_codecs
def test_mix(name: str, level: Level) -> None:
    """Exact integers, and within half a step of the table and of the weights of the mix of the decoded values. A step
    of weights is 1/255 of the largest sum of two neighbours."""
    d, n, heads = attend.sizes(NAMES.index(name) + 3, level)
    codec, rng = codecs.get(name), np.random.default_rng(3)
    fields = attend.random_fields(rng, codec, (3,), n, d)
    own = tiles.values(codec, n, d)
    weights = np.exp(2 * rng.standard_normal((3, heads, n))).astype(np.float32)
    weights[1, 0] = 0
    got = attend.mixed(own, level, own.pack(fields), weights, d)

    table, limit = table_of(codec), 255
    bytes_, norms = bytes_and_norms(codec, fields)
    scaled = weights * norms[:, None]
    top = scaled.reshape(3, heads, -1, 2).sum(-1).max(-1, keepdims=True)  # of two neighbours
    step = top / limit
    # Float32's own products decide which way a weight close to a half goes, so the model has an error of a few steps.
    rounded = np.rint(scaled / np.where(top > 0, step, 1))
    size = np.einsum("bhn,bnd->hd", rounded * step, np.abs(bytes_) * table.scale)
    model = 7 + np.einsum("bhn,bnd->hd", rounded * step, bytes_ * table.scale)
    few = 2 * 127 * table.scale * step.sum(0)
    np.testing.assert_array_less(np.abs(got - model), few + 1e-5 * (size + 7))

    values = codec.decode(fields).astype(np.float64)
    exact = 7 + np.einsum("bhn,bnd->hd", weights, values)
    of_table = np.einsum("bhn->h", scaled)[:, None] * table.scale / 2
    points = np.abs(bytes_) * table.scale + table.scale / 2
    of_weights = np.einsum("bh,bd->hd", step[..., 0] / 2, points.sum(1))
    np.testing.assert_array_less(np.abs(got - exact), 1.001 * (of_table + of_weights) + 1e-5 * (size + 7))


@some_levels
def test_weights_of_neighbours_fit_together(level: Level) -> None:
    """Two weights of 127.5 steps become 128 each; times the largest coordinate, 127, their sum still fits an int16."""
    codec, (n, d) = codecs.get("ring3.5"), (16, 16)
    own = tiles.values(codec, n, d)
    table = table_of(codec)
    codes = np.full((1, n, d // 2), table.by_code[:, 0].argmax(), np.uint8)
    fields = codec.rounding.assemble(codes, np.ones((1, n), np.float32))  # type: ignore[union-attr]
    got = attend.mixed(own, level, own.pack(fields), np.ones((1, 1, n), np.float32), d)
    np.testing.assert_allclose(got[0, ::2], 7 + n * table.by_code[:, 0].max(), rtol=1 / 127)


@pytest.mark.parametrize("name", ["ring3", "ring3.5", "ring4"])
def test_points_are_numbered_by_mirror_images(name: str) -> None:
    """Half of the numbers are the images of the others, also as bytes, but for points on the axis at the end."""
    table = table_of(codecs.get(name))
    half = len(table.points) // 2
    assert sorted(table.codes.tolist()) == list(range(2 * half))
    np.testing.assert_array_equal(table.numbers[table.codes], np.arange(2 * half))
    upper, lower = table.bytes_[:half].astype(int), table.bytes_[half:].astype(int)
    np.testing.assert_array_equal(upper[:, 1], -lower[:, 1])
    assert (upper[:-16, 0] == lower[:-16, 0]).all()
    differ = upper[:, 0] != lower[:, 0]
    assert not upper[differ, 1].any()


@special_levels
@pytest.mark.parametrize(
    ("name", "side"), [("ring4", "keys"), ("ring3.5", "values"), ("turbo3", "keys"), ("turbo4", "values")]
)
def test_instructions(name: str, side: str, level: Level) -> None:
    """Bytes are looked up and multiplied in whole registers: 16 bytes of a table at once, and those of mirror images
    together; with AVX-512 64 bytes, or two tables of as many words. With its 32 registers hardly a vector goes to the
    stack and back; the tables alone are more than the 16 of AVX2."""
    own = getattr(tiles, side)(codecs.get(name), 64, 64)
    loop = Loop(attend.scores_kernel(own, 64, 3) if side == "keys" else attend.mix_kernel(own, 64, 64, 3), level)
    lookup = "vpshufb"
    if name.startswith("ring") and level.lanes == 16:
        lookup = "vperm[it]2b" if "avx512vbmi" in level.needs else "vperm[it]2w"
    assert loop.count(lookup) >= 4
    if lookup == "vpshufb" and name.startswith("ring"):  # parts of both tables, and of what differs, in each register
        registers, parts = {"ring4": (8, 8), "ring3.5": (16, 4)}[name]
        assert loop.count(lookup) == registers * (2 * parts + 1)
    assert loop.count((OF_BYTES if side == "keys" else OF_SMALL_BYTES)[level.name]) >= 12
    if level.lanes == 16:
        assert loop.on_stack <= (0.02 if "avx512vbmi" in level.needs else 0.2) * len(loop)
