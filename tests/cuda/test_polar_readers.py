"""The device reads and writes records of `polarquant` and `polarpair` as their codecs do: through the emulator."""

from __future__ import annotations

import os

import numpy as np
import pytest

from polarlm.engine import codecs, records
from polarlm.engine.records import Layout, layout
from polarlm.engine.records.fragments import Geometry
from tests.codecs.data import gaussian
from tests.cuda.programs import Program
from tests.cuda.readers import ENCODE, read, text

ON_A_GPU = bool(os.environ.get("POLARLM_TEST_GPU"))

HALF_ULP = 2.0**-11  # the largest relative error of a rounding to half
DENORMAL = 2.0**-24  # the distance of the smallest halves


def side(name: str, values: bool, block_size: int, head_dim: int) -> Layout:
    return layout(codecs.get(name), values, block_size, head_dim)


def vectors(block_size: int, head_dim: int) -> np.ndarray:
    """Gaussian tokens of very different size, with zeros in them and a channel that never changes."""
    x = gaussian(block_size, head_dim) * np.logspace(-4, 3.5, block_size, dtype=np.float32)[:, None]
    x[:, 5] = 2
    x[3] = 0
    x[7, : head_dim // 2] = 0
    return x


def encoded(of: Layout, x: np.ndarray, seed: int = 0) -> np.ndarray:
    """x (N, D) float32 → the record (nbytes,) that the device encodes."""
    record = np.zeros(of.nbytes, np.uint8)
    args = (record, x, of.tables)
    Program(text(ENCODE, of)).launch("encode_kernel", (1,), (96,), *args, shared=x.nbytes, seed=seed)
    return record


every_shape = pytest.mark.parametrize(  # values, tokens of a block, head dim
    ("values", "block_size", "head_dim"),
    [(False, 64, 16), (True, 64, 80), (False, 64, 128), (True, 16, 80), (False, 128, 64), (True, 32, 24)],
)


@every_shape
def test_the_polarquant_reader_decodes_as_its_codec(values: bool, block_size: int, head_dim: int) -> None:
    """Up to the roundings of the point, the factor of level 4 and two products to half."""
    codec, of = codecs.get("polarquant"), side("polarquant", values, block_size, head_dim)
    fields = codec.encode(vectors(block_size, head_dim))
    exact = codec.decode(fields)
    for seed in (0, 2):
        tiles, norms, _ = read(of, of.pack(fields), seed)
        assert (norms == 1).all()
        error = np.abs(tiles.astype(np.float64) - exact)
        assert (error <= 4.01 * HALF_ULP * np.abs(exact) + 2 * DENORMAL).all()


@every_shape
def test_the_polarquant_encoder_gives_the_bytes_of_its_codec(values: bool, block_size: int, head_dim: int) -> None:
    codec, of = codecs.get("polarquant"), side("polarquant", values, block_size, head_dim)
    x = vectors(block_size, head_dim)
    x[5] *= np.float32(1e22)  # squares that are infinite
    x[6] = np.tan(np.pi / 16 * np.arange(head_dim, dtype=np.float32))  # near thresholds
    for seed in (0, 2):
        assert np.array_equal(encoded(of, x, seed), of.pack(codec.encode(x)))


def test_learned_centres_have_no_kernel() -> None:
    with pytest.raises(ValueError, match=r"polarquant-online has no GPU kernel .*\."):
        side("polarquant-online", False, 64, 64)


every_kernel = pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        ("polarpair-m4n4", 16),
        ("polarpair-m4n4+g16", 80),
        ("polarpair-m4n4+minmax", 80),
        ("polarpair-m4n2", 128),
        ("polarpair-m4n2+minmax-radius+g16", 80),
        ("polarpair-m4n2+minmax+g32", 64),
    ],
)


def keys_with_a_bias(block_size: int, head_dim: int) -> np.ndarray:
    """Tokens of any size, pairs that keep to one side of the origin, pairs that are zero, and one that saturates."""
    x = gaussian(block_size, head_dim) * np.logspace(-1, 1, block_size, dtype=np.float32)[:, None]
    x[:, : head_dim // 4] += 4
    x[:, 4:6] = 0
    x[3] = 0
    x[5, 0:2] = 1e6
    return x


@every_kernel
def test_the_polarpair_reader_decodes_as_its_codec(name: str, head_dim: int) -> None:
    """Of a radius: the roundings of the direction, of (code + ½) · step + low and of the product to half.

    An angle in float32 is off by its own roundings, and its sine and cosine by 2^-21 each.
    """
    codec, of = codecs.get(name), side(name, False, 64, head_dim)
    fields = codec.encode(keys_with_a_bias(64, head_dim))
    exact = codec.decode(fields)
    for seed in (0, 2):
        tiles, norms, _ = read(of, of.pack(fields), seed)
        assert (norms == 1).all()
        error = np.abs(tiles.astype(np.float64) - exact)
        pairs = exact.reshape(64, -1, 2)
        radius = np.repeat(np.hypot(pairs[..., 0], pairs[..., 1]), 2, axis=-1)
        assert (error <= 3.01 * HALF_ULP * np.abs(exact) + 2.0**-19 * radius + 2 * DENORMAL).all()


@every_kernel
def test_the_polarpair_encoder_gives_the_fields_of_its_codec(name: str, head_dim: int) -> None:
    """To the last bit. The arc tangents of a GPU, which choose codes between learned angles, differ from NumPy's."""
    codec, of = codecs.get(name), side(name, False, 64, head_dim)
    if ON_A_GPU and codec.minmax == "both":
        pytest.skip("atan2f of a GPU is within three units of NumPy's")
    x = keys_with_a_bias(64, head_dim)
    expected = codec.encode(x)
    for seed in (0, 2):
        fields, _ = of.unpack(encoded(of, x, seed))
        assert all(np.array_equal(fields[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("name", "values"), [("polarpair-m4n4", True), ("polarpair-m4n4+g8", False), ("polarpair-m4n2+g48", False)]
)
def test_polarpair_has_no_record_for_values_or_groups_that_cut_tiles(name: str, values: bool) -> None:
    assert records.record_of(codecs.get(name), Geometry(values, 192, 64)) is None
