"""The device reads and writes records of `polarquant` and `polarpair` as their codecs do: through the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from engine import codecs
from engine.backends.records import Layout, layout
from tests.codecs.data import gaussian
from tests.cuda.nvrtc import compile_text, compiler
from tests.cuda.programs import Program
from tests.cuda.readers import ENCODE, READ, read, text

HALF_ULP = 2.0**-11  # the largest relative error of a rounding to half
DENORMAL = 2.0**-24  # the distance of the smallest halves

# (tokens of a block, head dim)
SHAPES = [(64, 16), (64, 64), (64, 80), (64, 128), (64, 256), (16, 80), (128, 64), (32, 24)]
every_shape = pytest.mark.parametrize(("block_size", "head_dim"), SHAPES)
both_sides = pytest.mark.parametrize("values", [False, True], ids=["keys", "values"])


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
    """x (N, D) float32 → the record (nbytes,) that the device makes of it."""
    record = np.zeros(of.nbytes, np.uint8)
    args = (record, x, of.tables)
    Program(text(ENCODE, of)).launch("encode_kernel", (1,), (96,), *args, shared=x.nbytes, seed=seed)
    return record


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 48, 64, 72, 80, 96, 128, 256])
@both_sides
def test_a_record_of_polarquant_has_all_that_its_fields_have(values: bool, head_dim: int, block_size: int) -> None:
    codec, of = codecs.get("polarquant"), side("polarquant", values, block_size, head_dim)
    fields = codec.encode(gaussian(2, 3, block_size, head_dim))
    records = of.pack(fields)
    assert records.shape == (2, 3, of.nbytes)
    back, _ = of.unpack(records)
    assert list(back) == list(fields)
    assert all(np.array_equal(back[name], field) for name, field in fields.items())
    if head_dim % 16 == 0 and of.record.geometry.tiles % 4 == 0:
        assert 8 * of.nbytes / (block_size * head_dim) == 4.0


@every_shape
@both_sides
def test_polarquant_reads_what_its_codec_decodes(values: bool, block_size: int, head_dim: int) -> None:
    """To the roundings of the unit, the factor and two products to half."""
    codec, of = codecs.get("polarquant"), side("polarquant", values, block_size, head_dim)
    fields = codec.encode(vectors(block_size, head_dim))
    exact = codec.decode(fields)
    for seed in (0, 2):
        tiles, norms, _ = read(of, of.pack(fields), seed)
        assert (norms == 1).all()
        error = np.abs(tiles.astype(np.float64) - exact)
        assert (error <= 4.01 * HALF_ULP * np.abs(exact) + 2 * DENORMAL).all()


@every_shape
@both_sides
def test_polarquant_encodes_as_its_codec_to_the_last_bit(values: bool, block_size: int, head_dim: int) -> None:
    codec, of = codecs.get("polarquant"), side("polarquant", values, block_size, head_dim)
    x = vectors(block_size, head_dim)
    x[5] *= np.float32(1e22)  # squares that are infinite
    x[6] = np.tan(np.pi / 16 * np.arange(head_dim, dtype=np.float32))  # near thresholds
    for seed in (0, 2):
        assert np.array_equal(encoded(of, x, seed), of.pack(codec.encode(x)))


def test_learned_centres_have_no_kernel() -> None:
    with pytest.raises(ValueError, match=r"polarquant\+online has no GPU kernel .*\."):
        side("polarquant+online", False, 64, 64)


PAIRS = [base + option for base in ("polarpair-m4n4", "polarpair-m4n2") for option in ("", "+minmax-radius", "+minmax")]
every_pair_codec = pytest.mark.parametrize("name", PAIRS)
every_kernel = pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        ("polarpair-m4n4", 16),
        ("polarpair-m4n4", 128),
        ("polarpair-m4n4+g16", 80),
        ("polarpair-m4n4+minmax-radius", 256),
        ("polarpair-m4n4+minmax-radius+g32", 64),
        ("polarpair-m4n4+minmax", 80),
        ("polarpair-m4n2", 8),
        ("polarpair-m4n2+g32", 256),
        ("polarpair-m4n2+g16", 64),
        ("polarpair-m4n2+minmax-radius", 128),
        ("polarpair-m4n2+minmax-radius+g16", 80),
        ("polarpair-m4n2+minmax+g16", 16),
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


@pytest.mark.parametrize("group", ["", "+g16", "+g32"])
@pytest.mark.parametrize("head_dim", [8, 16, 48, 64, 80, 128, 256])
@every_pair_codec
def test_a_record_of_polarpair_has_all_that_its_fields_have(name: str, group: str, head_dim: int) -> None:
    for block_size in (32, 64, 128):
        codec, of = codecs.get(name + group), side(name + group, False, block_size, head_dim)
        fields = codec.encode(gaussian(2, 3, block_size, head_dim))
        records = of.pack(fields)
        assert records.shape == (2, 3, of.nbytes)
        back, _ = of.unpack(records)
        assert list(back) == list(fields)
        assert all(np.array_equal(back[key], field) for key, field in fields.items())
        if head_dim % 64 == 0:
            stored = sum(field.nbytes for field in fields.values()) // (2 * 3)
            assert of.nbytes == -(-stored // 128) * 128


@every_kernel
def test_polarpair_reads_what_its_codec_decodes(name: str, head_dim: int) -> None:
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
def test_polarpair_encodes_as_its_codec(name: str, head_dim: int) -> None:
    """Codes at an edge may fall to either side: square roots and arc tangents are not the same to the last bit."""
    codec, of = codecs.get(name), side(name, False, 64, head_dim)
    x = keys_with_a_bias(64, head_dim)
    expected = codec.encode(x)
    for seed in (0, 2):
        fields, _ = of.unpack(encoded(of, x, seed))
        for key in fields.keys() - {"codes"}:
            np.testing.assert_allclose(fields[key], expected[key], rtol=2 * HALF_ULP, atol=2 * DENORMAL)
        assert np.mean(fields["codes"] == expected["codes"]) >= 0.999
        error, least = (np.square(codec.decode(codes) - x).sum(-1) for codes in (fields, expected))
        np.testing.assert_allclose(error, least, rtol=0.01)


@pytest.mark.parametrize(
    ("name", "values"), [("polarpair-m4n4", True), ("polarpair-m4n4+g8", False), ("polarpair-m4n2+g48", False)]
)
def test_groups_that_cut_tiles_have_no_kernel_nor_have_values(name: str, values: bool) -> None:
    assert codecs.get(name).record(values, 192, 64) is None


@pytest.mark.parametrize(
    ("name", "values", "arch"),
    [
        ("polarquant", False, 80),
        ("polarquant", True, 90),
        ("polarpair-m4n2+minmax-radius+g16", False, 120),
        ("polarpair-m4n4+minmax+g16", False, 86),
    ],
)
def test_readers_and_writers_compile_and_spill_no_register(name: str, values: bool, arch: int) -> None:
    try:
        compiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    for kernel in (READ, ENCODE):
        (usage,) = compile_text(text(kernel, side(name, values, 64, 128)), arch)
        assert not usage.spilled
        assert not usage.stack
