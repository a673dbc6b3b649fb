"""Tiles of codecs with a table: exact packing, and the int8 arithmetic against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.backends.native.codecs.parts.code_table import CodeTable
from polarlm.engine.backends.native.codecs.parts.expanded_tiles import expanded_tiles
from polarlm.engine.codecs import Codec
from polarlm.engine.jit.lang import Level
from tests.backends.native.codecs import attend
from tests.codecs.data import TABLED, streams
from tests.jit.levels import SOME, some_levels
from tests.pairs import each, in_turn

NAMES = (*TABLED, "ring4+norm16")
# A level looks up tables of 64, 128, 256 and four times 256 entries in its own ways, and tables of up to 16 in one.
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
    bytes_ = table.bytes_[codes].reshape(*codes.shape[:-1], d).astype(np.float64)
    return bytes_, codec.rounding.norms.unpack(norms).astype(np.float64)  # type: ignore[union-attr]


@levels_and_codecs
def test_scores(name: str, level: Level) -> None:
    """Of exact integers: the table's bytes, and those of the query. test_tiles.py compares with decoded keys."""
    d, n, heads = attend.sizes(NAMES.index(name), level)
    codec = codecs.get(name)
    fields, queries, got = attend.scored(codec, level, n, d, heads)

    table, limit = table_of(codec), np.float32(127)
    bytes_, norms = bytes_and_norms(codec, fields)
    top = np.abs(queries).max(-1, keepdims=True)
    rounded = np.rint(queries * (limit / top)).astype(np.float64)
    step = top[:, 0].astype(np.float64) / limit
    size = np.einsum("hd,bnd->bhn", np.abs(rounded), np.abs(bytes_)) * (step * table.scale)[:, None] * norms[:, None]
    model = np.einsum("hd,bnd->bhn", rounded, bytes_) * (step * table.scale)[:, None] * norms[:, None]
    np.testing.assert_array_less(np.abs(got - model), 1e-6 * size + 1e-12)


@levels_and_codecs
def test_mix(name: str, level: Level) -> None:
    """Of exact integers. A step of weights is 1/255 of the largest sum of two neighbours."""
    d, n, heads = attend.sizes(NAMES.index(name) + 3, level)
    codec = codecs.get(name)
    fields, weights, got = attend.mix_of_random_blocks(codec, level, n, d, heads)

    table, limit = table_of(codec), 255
    bytes_, norms = bytes_and_norms(codec, fields)
    scaled = weights * norms[:, None]
    top = scaled.reshape(3, heads, -1, 2).sum(-1).max(-1, keepdims=True)  # two neighbours' largest sum
    step = top / limit
    # Float32's own products decide which way a weight close to a half goes, so the model has an error of a few steps.
    rounded = np.rint(scaled / np.where(top > 0, step, 1))
    size = np.einsum("bhn,bnd->hd", rounded * step, np.abs(bytes_) * table.scale)
    model = 7 + np.einsum("bhn,bnd->hd", rounded * step, bytes_ * table.scale)
    few = 2 * 127 * table.scale * step.sum(0)
    np.testing.assert_array_less(np.abs(got - model), few + 1e-5 * (size + 7))


@pytest.mark.slow
@levels_and_codecs
def test_expanded_tiles_give_the_same_bits(name: str, level: Level) -> None:
    d, n, heads = attend.sizes(NAMES.index(name) + 5, level)
    codec = codecs.get(name)
    keys, values = tiles.keys(codec, n, d), tiles.values(codec, n, d)
    both = expanded_tiles(keys, values, n, d)  # type: ignore[arg-type]
    fields, queries, wanted = attend.scored(codec, level, n, d, heads)
    one: Any = attend.Expanding(keys, both.keys)  # type: ignore[arg-type, union-attr]
    np.testing.assert_array_equal(attend.scores(one, level, keys.pack(fields), queries, n), wanted)  # type: ignore[union-attr]
    fields, weights, wanted = attend.mix_of_random_blocks(codec, level, n, d, heads)
    one = attend.Expanding(values, both.values)  # type: ignore[arg-type, union-attr]
    np.testing.assert_array_equal(attend.mixed(one, level, values.pack(fields), weights, d), wanted)  # type: ignore[union-attr]


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
