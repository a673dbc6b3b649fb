"""Stored norms: bounded error, monotone, and exact for zero."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.codecs.parts.norms import ByteNorm, HalfNorm

BYTE, HALF = ByteNorm(), HalfNorm(3.3)
every_format = pytest.mark.parametrize("norms", [BYTE, HALF], ids=["byte", "half"])

CODES = np.arange(256, dtype=np.uint8)


def test_byte_norms_match_their_formula():
    steps = np.arange(-127, 128)
    octaves = steps / 32 + np.sign(steps) * np.maximum(np.abs(steps) - 88, 0.0) ** 2 / 256
    assert BYTE.unpack(CODES[1:]) == pytest.approx(2**octaves, rel=1e-6)


@every_format
def test_zero_is_exact_and_only_tiny_norms_become_zero(norms):
    assert norms.unpack(norms.pack(np.zeros(3, np.float32))).tolist() == [0, 0, 0]
    assert norms.unpack(norms.pack(np.array([0.001], np.float32)))[0] > 0


@every_format
def test_a_norm_read_back_is_packed_to_the_same_code(norms):
    stored = CODES if norms is BYTE else np.arange(2**15, dtype=np.uint16).view(np.float16)
    read = norms.unpack(stored)
    assert read.dtype == np.float32
    again = norms.pack(read[read <= norms.largest])
    assert again.dtype == norms.dtype
    assert np.array_equal(again, stored[read <= norms.largest])


@given(st.integers(-88, 88), st.floats(-0.499, 0.499))
def test_error_of_a_byte_is_at_most_half_a_step_where_steps_are_fine(step, part):
    if abs(step + part) > 88:
        return
    norm = np.float32(2 ** ((step + part) / 32))
    assert BYTE.pack(norm) == 128 + step


def test_half_norms_saturate_where_a_product_would_exceed_half_precision():
    assert HALF.pack(np.array([1 / 3], np.float32)) == np.float16(1 / 3)
    assert HALF.unpack(HALF.pack(np.array([np.inf], np.float32))) == HALF.largest
    assert HALF.largest * 3.3 <= 65504
    assert float(np.nextafter(np.float16(HALF.largest), np.float16(np.inf))) * 3.3 > 65504
