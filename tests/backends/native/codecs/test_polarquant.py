"""Tiles of recursive polar codes: exact packing, and the integer arithmetic against float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.codecs.polarquant import CENTRES, level_count, rows_of, upper_table
from polarlm.engine.codecs.schema.streams import split
from polarlm.engine.jit.lang import Level
from tests.backends.native.codecs import attend
from tests.codecs.data import fields_of, streams
from tests.jit.levels import SOME, some_levels
from tests.pairs import each, in_turn

CODEC = codecs.get("polarquant")
# (head dim, block size, queries that read a block together): four levels of angles or three, and odd numbers of groups
FOUR = [(64, 64, 3), (128, 64, 4), (80, 48, 1), (48, 16, 2), (256, 16, 2)]
THREE = [(8, 128, 4), (40, 32, 3)]
some_sizes = in_turn("level size", [*each(SOME, FOUR), *each(SOME, THREE)])  # not all: kernels take long to compile


class Pairs(NamedTuple):
    """Pairs of vectors: radius, factor of the levels above the first, and direction, (blocks, N, D/2), float64."""

    radius: np.ndarray
    factor: np.ndarray
    direction: np.ndarray  # (…, 2)

    @classmethod
    def read(cls, fields: dict[str, np.ndarray], d: int) -> Pairs:
        levels_ = level_count(d)
        own = streams(CODEC, fields)
        angles = np.array(CENTRES[1])[split(own["level1"], 4)]
        factor = upper_table(levels_)[rows_of(own)][..., ::2]
        radius = np.repeat(fields["radius"].astype(np.float64), 2 ** (levels_ - 1), axis=-1)
        direction = np.stack([np.cos(angles), np.sin(angles)], -1)
        return cls(radius, factor.reshape(angles.shape).astype(np.float64), direction)


@some_sizes
def test_scores(level: Level, size: tuple[int, int, int]) -> None:
    """Within half a step of factors and of products, and a rounding of each half without VBMI."""
    d, n, heads = size
    fields, queries, got = attend.scored(CODEC, level, n, d, heads)

    pairs, has_permutes = Pairs.read(fields, d), level.wide_tables
    exact = np.einsum("hd,bnd->bhn", queries.astype(np.float64), CODEC.decode(fields).astype(np.float64))
    by_pair = queries.reshape(heads, -1, 2).astype(np.float64)
    largest = np.sqrt((by_pair**2).sum(-1).max(-1))[:, None, None, None]
    product = np.abs(np.einsum("hpc,bnpc->hbnp", by_pair, pairs.direction))
    step, factor_step = largest / 127, 1 / (255 if has_permutes else 127)
    error = pairs.factor * step / 2 + product * factor_step / 2 + step * factor_step / 4
    if not has_permutes:
        error += step * factor_step * 2 / 4 + product * 2**-14
    bound = np.einsum("bnp,hbnp->bhn", pairs.radius, error)
    size = np.einsum("bnp,hbnp->bhn", pairs.radius * pairs.factor, product)
    assert (np.abs(got - exact) <= 1.001 * bound + 1e-5 * size).all()
    assert np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean()) < 0.01


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


@some_sizes
def test_mix(level: Level, size: tuple[int, int, int]) -> None:
    """Within what the roundings of directions, factors and weights allow."""
    d, n, heads = size
    rng = np.random.default_rng(3)
    fields = attend.random_fields(rng, CODEC, (3,), n, d)
    fields["radius"][0, :, 0] = 0
    own = tiles.values(CODEC, n, d)
    weights = np.exp(2 * rng.standard_normal((3, heads, n))).astype(np.float32)
    weights[1, 0] = 0
    got = attend.mixed(own, level, own.pack(fields), weights, d)

    pairs = Pairs.read(fields, d)
    has_level4 = level_count(d) == 4
    # A byte is in 255ths of the largest weight · size of a block, of the largest radius of 16 channels, and of the
    # largest product of cosines.
    cosines = [np.cos(CENTRES[level_][0]) for level_ in (2, 3, *(4,) * has_level4)]
    largest_radius = np.repeat(_largest_of_units(pairs.radius.max(1)), 8, axis=-1)[:, : d // 2]  # (blocks, D/2)
    sizes = (pairs.radius / np.maximum(largest_radius, 1e-30)[:, None]).max(-1)  # (blocks, N)
    largest_weight = np.einsum("bhn,bn->bhn", weights, sizes).max(-1)  # (blocks, H)
    step = np.einsum("bh,bp->bhp", largest_weight, largest_radius) * np.prod(cosines) / 255
    part = np.einsum("bhn,bnp->bhnp", weights, pairs.radius)
    share = part / np.maximum(step * 255 / np.prod(cosines), 1e-30)[:, :, None]  # the largest weight times radius is 1
    of_byte = step[:, :, None] * (0.5 + 0.5 * share + 0.05)
    of_direction = 0.14 / 60  # their distance from whole 60ths
    bound = np.einsum("bhnp,bnpc->hpc", of_byte, np.abs(pairs.direction) + of_direction)
    bound += of_direction * np.einsum("bhnp,bnp->hp", part, pairs.factor)[..., None]
    values = CODEC.decode(fields).astype(np.float64)
    exact = 7 + np.einsum("bhn,bnd->hd", weights, values)
    size = 7 + np.einsum("bhn,bnd->hd", weights, np.abs(values))
    assert (np.abs(got - exact) <= 1.001 * bound.reshape(heads, d) + 1e-5 * size).all()


def _largest_of_units(radius: np.ndarray) -> np.ndarray:
    """radius (blocks, D/2) → the largest of each 8 pairs, (blocks, units)."""
    units = -(-radius.shape[1] // 8)
    whole = np.zeros((len(radius), 8 * units))
    whole[:, : radius.shape[1]] = radius
    return whole.reshape(len(radius), units, 8).max(-1)


@some_levels
def test_what_a_mix_costs(level: Level) -> None:
    """Beside the error of the codec, of vectors as they are encoded."""
    rng, own = np.random.default_rng(4), tiles.values(CODEC, 64, 64)
    x = rng.standard_normal((20, 64, 64)).astype(np.float32)
    weights = np.exp(rng.standard_normal((20, 3, 64))).astype(np.float32)
    fields = CODEC.encode(x)
    plain, exact = (np.einsum("bhn,bnd->hd", weights, y.astype(np.float64)) for y in (x, CODEC.decode(fields)))
    got = attend.mixed(own, level, own.pack(fields), weights, 64) - 7
    assert ((got - exact) ** 2).mean() < 0.01 * ((exact - plain) ** 2).mean()


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
