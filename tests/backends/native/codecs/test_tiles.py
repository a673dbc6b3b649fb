"""Tiles of every codec: their names, and blocks as float32 at every level of CPU features, against the codecs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine import codecs
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.backends.native.codecs import KeyTiles, ValueTiles
from polarlm.engine.backends.native.kernels.attention.prompts import DecodingSpec, decode
from polarlm.engine.codecs import Codec
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.lang import Level
from tests.backends.native.codecs import attend
from tests.codecs.data import TABLED, random_fields
from tests.jit.levels import SOME, run, some_levels
from tests.pairs import each, in_turn

NAMES = (*TABLED, "ring4+norm16", "f16", "polarquant", "polarquant+none", "polarquant+dense")
OF_KEYS = ("polarpair-m4n4", "polarpair-m4n2", "polarpair-m4n4+g16", "polarpair-m4n2+g32")


def sides(codec: Codec, n: int, d: int) -> list[KeyTiles | ValueTiles]:
    """The tiles of keys and of values, or of keys alone if the codec stores no values."""
    both = [side for side in (tiles.keys(codec, n, d), tiles.values(codec, n, d)) if side is not None]
    assert len(both) == len(codec.serves)
    return both


@pytest.mark.parametrize("name", ["ring4", "f16", "polarquant"])
def test_names_differ_where_layouts_differ(name: str) -> None:
    made = [side for n in (16, 64) for d in (64, 128) for side in sides(codecs.get(name), n, d)]
    assert len({side.name for side in made}) == len(made)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("ring4", 24),  # tokens that fill no vectors
        ("polarquant", 24),
        ("polarpair-m4n4+g8", 64),
        ("polarpair-m4n4+minmax", 64),
    ],
)
def test_what_has_no_tiles(name: str, n: int) -> None:
    assert tiles.keys(codecs.get(name), n, 64) is None


# Four levels of angles or three, and odd numbers of groups.
OF_ANGLES = [(64, 64, 3), (8, 128, 4), (80, 48, 1), (40, 32, 3), (48, 16, 2), (256, 16, 2)]
SIZED = [
    *((level, name, attend.sizes(NAMES.index(name), level)) for level, name in each(SOME, NAMES)),
    *((level, name, (d, max(n, 32), heads)) for level, name, (d, n, heads) in each(SOME, OF_KEYS, attend.SIZES)),
    *((level, "polarquant", size) for level, size in each(SOME, OF_ANGLES)),
]


@in_turn("level name size", SIZED)
def test_scores_and_mixes_are_those_of_what_is_decoded(name: str, level: Level, size: tuple[int, int, int]) -> None:
    """Any codes, and weights that are zeros for a block: off by what bytes in place of queries, points and weights
    make, root mean square, which a single other code of a table is beyond."""
    (d, n, heads), codec = size, codecs.get(name)
    fields, queries, got = attend.scored(codec, level, n, d, heads)
    exact = np.einsum("hd,bnd->bhn", queries.astype(np.float64), codec.decode(fields).astype(np.float64))
    assert np.linalg.norm(got - exact) < 0.02 * np.linalg.norm(exact)
    if "v" in codec.serves:
        fields, weights, got = attend.mix_of_random_blocks(codec, level, n, d, heads)
        exact = np.einsum("bhn,bnd->hd", weights.astype(np.float64), codec.decode(fields).astype(np.float64))
        assert np.linalg.norm(got - 7 - exact) < 0.03 * np.linalg.norm(exact)


@some_levels
@in_turn("name", ["ring4", "polarquant", "f16"])
def test_a_query_of_zeros(name: str, level: Level) -> None:
    codec = codecs.get(name)
    fields = random_fields(np.random.default_rng(2), codec.fields(16, 16), (1,))
    side = tiles.keys(codec, 16, 16)
    assert side is not None
    assert not attend.scores(side, level, side.pack(fields), np.zeros((1, 16), np.float32), 16).any()


def check(names: tuple[str, str], level: Level, n: int, d: int, seed: int) -> None:
    """Blocks 3, 0, 0 of two heads, with means of 8 or 16 bits or none. names: of the codecs of keys and values."""
    rng, both, (heads, blocks) = np.random.default_rng(seed), [codecs.get(name) for name in names], (2, 4)
    bits = (0, 8, 16)[seed % 3]
    fields = [random_fields(rng, codec.fields(n, d), (heads, blocks)) for codec in both]
    keys, values = tiles.keys(both[0], n, d), tiles.values(both[1], n, d)
    assert keys is not None
    assert values is not None
    memory = [side.pack(own) for side, own in zip((keys, values), fields, strict=True)]
    ids = np.array([3, 0, 0], np.int64)
    wanted = [codec.decode(own).astype(np.float64)[:, ids] for codec, own in zip(both, fields, strict=True)]
    scale = rng.uniform(0.01, 0.1, (heads, blocks)).astype(np.float16)
    mean = rng.integers(-127, 128, (heads, blocks, d)).astype(np.int8 if bits == 8 else np.float16)
    if bits:
        exact_mean = mean * scale[..., None].astype(np.float64) if bits == 8 else mean.astype(np.float64)
        wanted[0] = wanted[0] + exact_mean[:, ids, None]
    decoded = np.full((2, heads, len(ids), n, d), np.nan, np.float32)
    kernel = decode(DecodingSpec(keys, values, bits, n, d))
    run(kernel, level, heads * len(ids), attend.decoded(memory, ids, decoded, mean, scale))
    for side, exact in zip(decoded, wanted, strict=True):
        assert (np.abs(side - exact) <= 1e-5 * np.abs(exact).max(axis=-1, keepdims=True)).all()


@in_turn("level name", each(SOME, ["f16", "ring3.5", "turbo3", "polarquant", OF_KEYS[0], OF_KEYS[3]]))
def test_tiles_are_decoded(name: str, level: Level) -> None:
    check((name, "f16" if name in OF_KEYS else name), level, 64, 80, 1)


@pytest.mark.slow
@given(
    st.sampled_from(NAMES),
    st.sampled_from([16, 24, 48, 64, 128, 256]),
    st.sampled_from([16, 48, 64]),
    st.integers(0, 9),
)
@settings(max_examples=15)
def test_tiles_of_all_codecs_and_sizes_are_decoded(name: str, d: int, n: int, seed: int) -> None:
    """Each example compiles a kernel."""
    check((name, name), best(), n, d, seed)
