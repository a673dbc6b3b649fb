"""Packing of codes of pairs: it round trips, fills every byte, and follows the documented layout."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine import codecs
from polarlm.engine.codecs._pairs import PairPacking

BITS = (6, 7, 8, 10)
every_width = pytest.mark.parametrize("bits", BITS)


def random_codes(bits: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, shape, np.uint16)


def units_by_hand(bits: int, fields: dict[str, np.ndarray], token: int, unit: int) -> int:
    """One unit of one block, read as the docstring of `_pairs` describes it."""
    low, high = fields["low"], fields.get("high")
    if bits == 8:
        return int(low[token, 2 * unit]) | int(low[token, 2 * unit + 1]) << 8
    quarter, row = divmod(token, low.shape[0] // 4)
    one, two, three = (int(high[i, row, unit]) if i < len(high) else 0 for i in range(3))
    above = {
        6: (one & 15, two & 15, one >> 4, two >> 4),
        7: (one & 63, two & 63, three & 63, one >> 6 | two >> 6 << 2 | three >> 6 << 4),
        10: (one & 3, one >> 2 & 3, one >> 4 & 3, one >> 6),
    }[bits][quarter]
    return int(low[token, unit]) | above << 8


@every_width
def test_units_follow_the_layout(bits):
    codes = random_codes(bits, 8, 12)
    packing = PairPacking(bits)
    fields = packing.pack(codes)
    for token, unit in np.ndindex(8, 12 // packing.pairs):
        value = units_by_hand(bits, fields, token, unit)
        pairs = [value >> bits * i & 2**bits - 1 for i in range(packing.pairs)]
        assert pairs == codes[token, packing.pairs * unit : packing.pairs * (unit + 1)].tolist()


@every_width
@settings(deadline=None)
@given(blocks=st.integers(1, 3), quads=st.integers(1, 5), eighths=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_codes_round_trip_and_fill_every_byte(bits, blocks, quads, eighths, seed):
    codes = random_codes(bits, blocks, 4 * quads, 4 * eighths, seed=seed)
    packing = PairPacking(bits)
    fields = packing.pack(codes)
    assert 8 * sum(field.nbytes for field in fields.values()) == bits * codes.size
    shapes = {
        name: ((blocks, *field.shape), field.dtype) for name, field in packing.fields(4 * quads, 8 * eighths).items()
    }
    assert {name: (field.shape, field.dtype) for name, field in fields.items()} == shapes
    assert packing.head_dim(fields) == 8 * eighths

    points = np.random.default_rng(0).standard_normal((2**bits, 2), np.float32)
    values = packing.table(points)[packing.units(fields)].reshape(blocks, 4 * quads, 8 * eighths)
    assert np.array_equal(values, points[codes].reshape(values.shape))


@every_width
def test_any_leading_dimensions(bits):
    codes = random_codes(bits, 2, 3, 16, 8)
    fields = PairPacking(bits).pack(codes)
    for i, j in np.ndindex(2, 3):
        alone = PairPacking(bits).pack(codes[i, j])
        assert all(np.array_equal(alone[name], fields[name][i, j]) for name in alone)


@pytest.mark.parametrize(("name", "bits"), [("ring3", 3), ("ring3.5", 3.5), ("ring4", 4), ("ring5", 5)])
def test_bits_per_value(name, bits):
    for head_dim, (option, norm) in product([8, 16, 24, 48, 64, 80, 96, 128, 256], [("", 8), ("+norm16", 16)]):
        codec = codecs.get(name + option)
        for block_size in (4, 12, 16, 64, 128):
            assert codecs.bits_per_value(codec, block_size, head_dim) == bits + norm / head_dim, (option, head_dim)
