"""The cache types of `bench/quality/codecs`: ggml's bytes, bit for bit, KIVI's formula, and the contract of codecs."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polarlm.bench.quality import types
from polarlm.engine import codecs
from tests.codecs.data import gaussian, streams
from tests.codecs.test_contract import promises
from tests.pairs import each, in_turn


@pytest.fixture(autouse=True, scope="module")
def _known():
    with types.more_types(None):
        yield


@pytest.mark.parametrize(("name", "promise"), each(["q8_0", "q4_0", "kivi4", "kivi4+token"], promises()))
def test_they_keep_the_contract(name, promise):
    promises()[promise](name)


# -- ggml's types --------------------------------------------------------------------------------------------------

TYPES = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}
every_type = pytest.mark.parametrize(("name", "theirs"), TYPES.items())


def ggml_blocks(codec, fields):
    """Our fields as ggml stores them: the scale, then the codes of its 32 values. (N, D/32 · bytes) uint8."""
    parts = streams(codec, fields)
    scale, values = parts["scale"][..., None].view(np.uint8), parts["codes"]
    values = values ^ np.uint8(128) if codec.bits == 8 else values[..., :16] | values[..., 16:] << 4
    joined = np.concatenate([scale, values], -1)
    return joined.reshape(len(joined), -1)


def assert_the_same(x, name, theirs):
    codec = codecs.get(name)
    codes, expected = codec.encode(x), quants.quantize(x, theirs)
    assert np.array_equal(ggml_blocks(codec, codes), expected)
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


# -- KIVI ------------------------------------------------------------------------------------------------------------

both = pytest.mark.parametrize("name", ["kivi4", "kivi4+token"])


def grouped(x, name):
    """x (64, D) → (groups, 32): tokens of a channel, or channels of a token."""
    by_token = name.endswith("token")
    return x.reshape(-1, 32) if by_token else x.reshape(2, 32, -1).swapaxes(1, 2).reshape(-1, 32)


@both
@in_turn("head_dim", [32, 64, 96, 128, 256])
def test_codes_match_the_formula(name, head_dim):
    """In float64, from the stored scale and zero point."""
    x = gaussian(64, head_dim) + np.linspace(-5, 5, head_dim, dtype=np.float32)
    codes = codecs.get(name).encode(x)
    scale, zero = (codes[key].astype(np.float64).reshape(-1, 1) for key in ("scale", "zero"))
    exact = grouped(x, name)
    assert np.allclose(zero[:, 0], exact.min(1), rtol=2**-11)
    assert np.allclose(scale[:, 0], np.ptp(exact, axis=1) / 15, rtol=2**-11 + 1e-6)
    values = streams(codecs.get(name), codes)["codes"]
    cell = (exact - zero) / scale
    clear = np.abs(cell % 1 - 0.5) > 1e-4
    assert clear.mean() > 0.99
    assert (grouped(values, name) == np.clip(np.rint(cell), 0, 15))[clear].all()
    decoded = grouped(codecs.get(name).decode(codes), name)
    assert np.allclose(decoded, scale * grouped(values, name) + zero, rtol=0, atol=1e-5)
