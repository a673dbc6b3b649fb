"""The contract of `Codec`, for every codec."""

import inspect
import itertools
import pickle
import re
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polarlm.engine import codecs
from tests.codecs.data import gaussian

OPTIONS = [
    "ring3.5+norm16",
    "ring4+dense+norm16",
    "polarquant+hadamard",
    "polarquant+dense",
    "polarquant+none",
    "polarpair-m4n4+minmax",
    "polarpair-m4n2+minmax-radius+g16",
]
NAMES = [*codecs.available(), *OPTIONS]
# Head dim, block size: each head dim with one block size, and two of them with both.
SHAPES = [
    (8, 16),
    (16, 64),
    (24, 16),
    (48, 64),
    (64, 16),
    (64, 64),
    (80, 64),
    (96, 16),
    (128, 64),
    (128, 16),
    (256, 16),
]

# A case each, so that a new codec can be asked for its own (docs/adding.md).
every_codec = pytest.mark.parametrize("name", NAMES)


def serving(name, block_size, head_dim):
    """The codec; skips the test if it does not support this shape."""
    codec = codecs.get(name)
    try:
        codec.check(head_dim, block_size)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    return codec


def shapes(name):
    """The codec with each of the shapes that it supports: (codec, head dim, block size)."""
    supported = []
    for head_dim, block_size in SHAPES:
        codec = codecs.get(name)
        with suppress(ValueError):
            codec.check(head_dim, block_size)
            supported.append((codec, head_dim, block_size))
    assert len(supported) > 1
    return supported


@every_codec
def test_round_trip_keeps_shape_and_direction(name):
    for codec, head_dim, block_size in shapes(name):
        x = gaussian(2, 3, block_size, head_dim)
        y = codec.decode(codec.encode(x))
        assert y.shape == x.shape
        assert y.dtype == np.float32
        assert y.flags.c_contiguous
        # A code of two bits a value or more keeps 3/4 of the energy (Shannon: an error of 2^(−2·1) at one bit).
        assert np.square(y - x).mean() < 0.25


@every_codec
def test_fields_describe_what_encode_returns_and_bits_per_value_counts_it(name):
    for codec, head_dim, block_size in shapes(name):
        codes = codec.encode(gaussian(2, block_size, head_dim))
        fields = codec.fields(block_size, head_dim)
        assert list(codes) == list(fields)
        for key, field in fields.items():
            assert codes[key].shape == (2, *field.shape)
            assert codes[key].dtype == field.dtype
        stored = sum(code.nbytes for code in codes.values())
        assert codecs.bits_per_value(codec, block_size, head_dim) == 8 * stored / (2 * block_size * head_dim)


@every_codec
def test_a_block_is_encoded_independently_and_repeatably(name):
    for codec, head_dim, block_size in shapes(name):
        x = gaussian(2, 3, block_size, head_dim)
        together, values = codec.encode(x), codec.decode(codec.encode(x))
        for i, j in np.ndindex(2, 3):
            alone = codec.encode(x[i, j])
            assert all(np.array_equal(alone[key], together[key][i, j]) for key in together)
            assert np.array_equal(codec.decode(alone), values[i, j])


@every_codec
def test_blocks_of_several_slabs_are_encoded_independently(name):
    codec = serving(name, 32, 128)
    x = gaussian(75, 32, 128)
    order = np.random.default_rng(1).permutation(len(x))
    codes, permuted = codec.encode(x), codec.encode(x[order])
    assert all(np.array_equal(permuted[key], codes[key][order]) for key in codes)
    assert np.array_equal(codec.decode(permuted), codec.decode(codes)[order])


@every_codec
def test_strided_arrays_are_read_correctly(name):
    codec = serving(name, 32, 64)
    x = gaussian(32, 6, 64).swapaxes(0, 1)
    codes = codec.encode(x)
    plain = codec.encode(np.ascontiguousarray(x))
    assert all(np.array_equal(codes[key], plain[key]) for key in codes)
    every_other = {key: code[::2] for key, code in codes.items()}
    assert np.array_equal(codec.decode(every_other), codec.decode(codes)[::2])


@every_codec
def test_decode_writes_to_out(name):
    codec = serving(name, 32, 64)
    codes = codec.encode(gaussian(5, 32, 64))
    out = np.full((5, 32, 64), np.nan, np.float32)
    assert codec.decode(codes, out) is out
    assert np.array_equal(out, codec.decode(codes))


@every_codec
def test_decode_refuses_an_out_of_wrong_shape_dtype_or_strides(name):
    codec = serving(name, 32, 64)
    codes = codec.encode(gaussian(5, 32, 64))
    strided = np.empty((32, 5, 64), np.float32).swapaxes(0, 1)
    for out in (np.empty((5, 32, 32), np.float32), np.empty((5, 32, 64)), strided):
        with pytest.raises(ValueError, match="C-contiguous float32"):
            codec.decode(codes, out)


@every_codec
def test_no_blocks(name):
    codec = serving(name, 32, 64)
    assert codec.decode(codec.encode(np.empty((3, 0, 32, 64), np.float32))).shape == (3, 0, 32, 64)


@every_codec
def test_refuses_nan_and_infinity(name):
    codec = serving(name, 32, 64)
    for bad in (np.nan, np.inf, -np.inf):
        x = gaussian(2, 32, 64)
        x[1, 7, 33] = bad
        with pytest.raises(ValueError, match="not finite"):
            codec.encode(x)


@every_codec
def test_refuses_arrays_of_one_dimension(name):
    with pytest.raises(ValueError, match=r"shape \(64,\)"):
        codecs.get(name).encode(np.zeros(64, np.float32))


@every_codec
def test_zeros_stay_zero(name):
    for codec, head_dim, block_size in shapes(name):
        assert not codec.decode(codec.encode(np.zeros((2, block_size, head_dim), np.float32))).any()


@every_codec
def test_huge_vectors_saturate(name):
    codec = serving(name, 32, 64)
    for scale in (1e5, 1e18, 1e30, 3e37):
        x = gaussian(2, 32, 64) * np.float32(scale)
        y = codec.decode(codec.encode(x))
        assert np.isfinite(y).all()
        assert np.abs(y).max() <= 65504
        if scale == 1e5:
            assert np.sum(x * y) > 0.8 * np.linalg.norm(x) * np.linalg.norm(y)


@every_codec
def test_denormal_vectors_stay_finite_and_small(name):
    codec = serving(name, 32, 64)
    x = gaussian(2, 32, 64) * np.float32(1e-40)
    y = codec.decode(codec.encode(x))
    assert np.isfinite(y).all()
    assert np.abs(y).max() < 1e-30


@pytest.mark.parametrize("name", ["ring4", "turbo3", "polarquant", "polarpair-m4n4"])
@settings(deadline=None, max_examples=20)
@given(
    x=hnp.arrays(np.float32, (32, 32), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    block=hnp.arrays(np.float32, (32, 32), elements=st.floats(-8, 8, width=32)),
)
def test_any_finite_vector_is_encoded_and_affects_no_other_block(name, x, block):
    codec = serving(name, 32, 32)
    pair = codec.decode(codec.encode(np.stack([x, block])))
    assert np.isfinite(pair).all()
    assert np.array_equal(pair[1], codec.decode(codec.encode(block)))


@every_codec
def test_refuses_unsupported_shapes_in_a_sentence(name):
    dims = {head_dim for head_dim, _ in SHAPES} | {12, 20}
    for head_dim, block_size in itertools.product(sorted(dims), (6, 16, 64)):
        codec = codecs.get(name)
        x = gaussian(block_size, head_dim)
        try:
            codec.check(head_dim, block_size)
        except ValueError as error:
            refusal = str(error)
            assert re.fullmatch(rf"Cache type {re.escape(name)} .* (head dimension|block) .*: choose .*\.", refusal)
            with pytest.raises(ValueError, match=re.escape(refusal)):
                codec.encode(x)
        else:
            assert codec.decode(codec.encode(x)).shape == x.shape


@every_codec
def test_a_codec_is_restored_by_name_and_by_pickle(name):
    codec = codecs.get(name)
    assert codec.name == name
    assert codecs.get(codec.name) == codec
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert len(pickle.dumps(codec)) < 1000


@pytest.mark.parametrize(
    "name",
    ["", "polar", "f16+dense", "polarquant+", "polarquant+dense+none", "polarquant+fast", "turbo3+g16", "f16+key"],
)
def test_unknown_names_and_options_are_refused_in_a_sentence(name):
    with pytest.raises(ValueError, match=r"ache type .*\.$"):
        codecs.get(name)


def promises():
    """The tests here that take a codec's name alone, each as it is for one codec."""
    tests = {name: inspect.unwrap(test) for name, test in globals().items() if name.startswith("test_")}
    return {
        name: test
        for name, test in tests.items()
        if {*inspect.signature(test).parameters} == {"name"} and "unknown" not in name
    }
