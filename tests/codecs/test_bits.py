"""Packing of 4 and 6 bits: it round trips and fills every byte."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polarlm.engine.codecs._bits import (
    pack_nibbles,
    pack_row_of_sixes,
    pack_sixes,
    unpack_nibbles,
    unpack_row_of_sixes,
    unpack_sixes,
)


@st.composite
def codes(draw, below, tokens_per_unit, width_unit):
    """(lead, rows, width) uint8 below `below`, with rows and width multiples of the two units."""
    shape = (
        draw(st.integers(1, 3)),
        tokens_per_unit * draw(st.integers(1, 5)),
        width_unit * draw(st.integers(1, 5)),
    )
    return draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, below - 1)))


@given(codes(16, 1, 2))
def test_nibbles_round_trip_in_half_a_byte(x):
    packed = pack_nibbles(x)
    assert 2 * packed.nbytes == x.size
    assert np.array_equal(unpack_nibbles(packed), x)


@given(codes(64, 4, 1))
def test_sixes_round_trip_in_three_quarters_of_a_byte(x):
    lead, rows, width = x.shape
    packed = pack_sixes(x)
    assert packed.shape == (lead, 3, rows // 4, width)
    unpacked = np.empty((lead, 4, rows // 4, width), np.uint8)
    unpack_sixes(packed, unpacked)
    assert np.array_equal(unpacked.reshape(x.shape), x)


@given(codes(64, 1, 4))
def test_a_row_of_sixes_round_trips_in_three_quarters_of_its_bytes(x):
    packed = pack_row_of_sixes(x)
    assert 4 * packed.nbytes == 3 * x.nbytes
    assert np.array_equal(unpack_row_of_sixes(packed), x)


def test_unpacking_sixes_writes_only_the_strided_output():
    x = np.random.default_rng(0).integers(0, 64, (8, 3), np.uint8)
    wide = np.full((4, 2, 3, 2), 255, np.uint8)
    unpack_sixes(pack_sixes(x), wide[..., 0])
    assert np.array_equal(wide[..., 0].reshape(8, 3), x)
    assert (wide[..., 1] == 255).all()
