"""ggml's types: the bytes of the `gguf` package, bit for bit."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polarlm.engine import codecs
from tests.codecs.data import streams

TYPES = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}
every_type = pytest.mark.parametrize(("name", "theirs"), TYPES.items())


def blocks(codec, fields):
    """Our fields as ggml stores them: the scale, then the codes of its 32 values. (N, D/32 · bytes) uint8."""
    parts = streams(codec, fields)
    scale, values = parts["scale"][..., None].view(np.uint8), parts["codes"]
    values = values ^ np.uint8(128) if codec.bits == 8 else values[..., :16] | values[..., 16:] << 4
    joined = np.concatenate([scale, values], -1)
    return joined.reshape(len(joined), -1)


def assert_the_same(x, name, theirs):
    codec = codecs.get(name)
    codes, expected = codec.encode(x), quants.quantize(x, theirs)
    assert np.array_equal(blocks(codec, codes), expected)
    assert np.array_equal(codec.decode(codes), quants.dequantize(expected, theirs))


@every_type
@settings(deadline=None, max_examples=100)
@given(x=hnp.arrays(np.float32, (4, 96), elements=st.floats(-65000, 65000, width=32)))
def test_bytes_and_values_match_gguf_for_any_values(name, theirs, x):
    # For smaller scales 1/d is infinite, and gguf encodes NaN; so small a scale is stored as 0 anyway.
    assert_the_same(np.where(np.abs(x) < 1e-30, np.float32(0), x), name, theirs)


@every_type
def test_ties_and_values_just_below_round_as_in_gguf(name, theirs):
    codes = np.arange(-127, 127, dtype=np.float32)
    x = np.stack([codes + 0.5, np.nextafter(codes + 0.5, np.float32(0))])
    x = np.concatenate([np.full((2, 2), 127, np.float32), x], -1)
    assert_the_same(x, name, theirs)
