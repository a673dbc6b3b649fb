"""The device reads and writes records of `polarquant` and `polarpair` as their codecs do: through the emulator."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

import numpy as np
import pytest

from polarlm.bench.gpu.nvrtc import compile_text, compiler
from polarlm.engine import codecs, records
from polarlm.engine.codecs.polarpair import PolarPair
from polarlm.engine.errors import EngineError
from polarlm.engine.records import Layout, layout
from polarlm.engine.records.fragments import Geometry
from tests.codecs.data import fields_of, gaussian, streams
from tests.cuda.programs import Program
from tests.cuda.readers import ENCODE, READ, read, text

ON_A_GPU = bool(os.environ.get("POLARLM_TEST_GPU"))

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
    """x (N, D) float32 → the record (nbytes,) that the device encodes."""
    record = np.zeros(of.nbytes, np.uint8)
    args = (record, x, of.tables)
    Program(text(ENCODE, of)).launch("encode_kernel", (1,), (96,), *args, shared=x.nbytes, seed=seed)
    return record


def assert_unpacked(of: Layout, fields: Mapping[str, np.ndarray], case: object) -> None:
    """Records of 2 × 3 blocks give back the fields that they were packed from."""
    records = of.pack(fields)
    assert records.shape == (2, 3, of.nbytes), case
    back, _ = of.unpack(records)
    assert list(back) == list(fields), case
    assert all(np.array_equal(back[name], field) for name, field in fields.items()), case


@both_sides
def test_a_record_of_polarquant_unpacks_to_its_fields(values: bool) -> None:
    for block_size, head_dim in itertools.product([16, 32, 64, 128], [8, 16, 24, 48, 64, 72, 80, 96, 128, 256]):
        codec, of = codecs.get("polarquant"), side("polarquant", values, block_size, head_dim)
        fields = codec.encode(gaussian(2, 3, block_size, head_dim))
        assert_unpacked(of, fields, (block_size, head_dim))
        if head_dim % 16 == 0 and of.record.geometry.tiles % 4 == 0:
            assert 8 * of.nbytes / (block_size * head_dim) == 4.0, (block_size, head_dim)


# Product: codes of keys and of values lie in other orders, which the shape cuts into fragments.
@pytest.mark.slow(keep=1)
@every_shape
@both_sides
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


# Product: codes of keys and of values lie in other orders, which the shape cuts into fragments.
@pytest.mark.slow(keep=1)
@every_shape
@both_sides
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


@every_pair_codec
def test_a_record_of_polarpair_unpacks_to_its_fields(name: str) -> None:
    for group, head_dim in itertools.product(["", "+g16", "+g32"], [8, 16, 48, 64, 80, 128, 256]):
        for block_size in (32, 64, 128):
            codec, of = codecs.get(name + group), side(name + group, False, block_size, head_dim)
            fields = codec.encode(gaussian(2, 3, block_size, head_dim))
            assert_unpacked(of, fields, (group, block_size, head_dim))
            if head_dim % 64 == 0:
                stored = sum(field.nbytes for field in fields.values()) // (2 * 3)
                assert of.nbytes == -(-stored // 128) * 128, (group, head_dim)


@pytest.mark.slow(keep=1)
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


@pytest.mark.slow(keep=1)
@every_kernel
def test_the_polarpair_encoder_gives_the_fields_of_its_codec(name: str, head_dim: int) -> None:
    """To the last bit, but for the arc tangents of a GPU."""
    codec, of = codecs.get(name), side(name, False, 64, head_dim)
    x = keys_with_a_bias(64, head_dim)
    expected = codec.encode(x)
    for seed in (0, 2):
        fields, _ = of.unpack(encoded(of, x, seed))
        if ON_A_GPU and codec.minmax == "both":
            assert_as_near_as_atan2f(codec, fields, expected, x)
        else:
            assert all(np.array_equal(fields[key], expected[key]) for key in expected)


ANGLE_ULPS = 4  # CUDA's atan2f is within 3 of the exact angle, and a turn may be added to it


def angles_of(codec: PolarPair, x: np.ndarray) -> np.ndarray:
    """x (N, D) → the angles of its pairs in [0, 2π), groups apart: (N/G, G, D/2) float32, rounded once."""
    angles = np.arctan2(x[:, 1::2].astype(np.float64), x[:, ::2])
    angles = np.where(angles < 0, angles + 2 * np.pi, angles).astype(np.float32)
    return angles.reshape(-1, codec.group or len(x), x.shape[1] // 2)


def cells(angles: np.ndarray, step: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The cells that angles (N/G, G, D/2) lie in, of sixteen; step and low (N/G, D/2) float16 → (N, D/2)."""
    step = np.where(step == 0, 1, step).astype(np.float32)[:, None]
    codes = np.clip(np.floor((angles - low[:, None].astype(np.float32)) / step), 0, 15)
    return codes.reshape(-1, angles.shape[-1]).astype(np.uint8)


def assert_as_near_as_atan2f(
    codec: PolarPair, fields: dict[str, np.ndarray], expected: dict[str, np.ndarray], x: np.ndarray
) -> None:
    """Radii are those of the codec; angles those of some angles that are at most ANGLE_ULPS beside the exact ones."""
    pairs, wanted = streams(codec, fields)["codes"], streams(codec, expected)["codes"]
    np.testing.assert_array_equal(pairs >> 4, wanted >> 4)
    for name in ("radius_step", "radius_low"):
        np.testing.assert_array_equal(fields[name], expected[name])
    angles = angles_of(codec, x)
    off = ANGLE_ULPS * np.spacing(angles)
    least, most = angles - off, angles + off
    for name, lower, upper in (
        ("angle_low", least.min(1), most.min(1)),
        ("angle_step", (least.max(1) - most.min(1)) / 16, (most.max(1) - least.min(1)) / 16),
    ):
        assert (lower.astype(np.float16) <= fields[name]).all(), name
        assert (fields[name] <= upper.astype(np.float16)).all(), name
    scales = fields["angle_step"], fields["angle_low"]
    assert (cells(least, *scales) <= pairs & 15).all()
    assert (pairs & 15 <= cells(most, *scales)).all()


@pytest.mark.parametrize("name", ["polarpair-m4n4+minmax", "polarpair-m4n2+minmax+g16"])
def test_the_tolerance_admits_only_neighbouring_cells_at_a_border(name: str) -> None:
    """A cell more or less next to a border, and nothing else."""
    codec = codecs.get(name)
    turns = np.tile(np.arange(17, dtype=np.float64), 4)[:64] / 16 * 3  # borders of cells, but for roundings
    x = np.empty((64, 32), np.float32)
    x[:, ::2], x[:, 1::2] = np.cos(turns + 0.25)[:, None], np.sin(turns + 0.25)[:, None]
    x[:, 16:] = gaussian(64, 16)
    expected, moved = codec.encode(x), 0

    def with_codes(pairs: np.ndarray) -> dict[str, np.ndarray]:
        return fields_of(codec, {**expected, "codes": pairs}, *x.shape)

    for ulps in (-3, 0, 3):
        angles = angles_of(codec, x)
        codes = cells(angles + ulps * np.spacing(angles), expected["angle_step"], expected["angle_low"])
        pairs = streams(codec, expected)["codes"]
        given = with_codes(pairs & 0xF0 | codes)
        assert_as_near_as_atan2f(codec, given, expected, x)
        moved += int((codes != pairs & 15).sum())
    assert moved > 10
    middle = np.argmax(
        np.abs(streams(codec, expected)["codes"][:, 8:] & 15) % 15 > 0
    )  # neither the first cell nor the last
    row, pair = divmod(int(middle), 8)
    for change in (1, -1, 16):  # an angle's cell, and a radius
        pairs = streams(codec, expected)["codes"].copy()
        pairs[row, 8 + pair] = int(pairs[row, 8 + pair]) + change & 0xFF
        with pytest.raises(AssertionError):
            assert_as_near_as_atan2f(codec, with_codes(pairs), expected, x)
    low = np.nextafter(expected["angle_low"], np.float16(9))
    with pytest.raises(AssertionError, match="angle_low"):
        assert_as_near_as_atan2f(codec, {**expected, "angle_low": low}, expected, x)


@pytest.mark.parametrize(
    ("name", "values"), [("polarpair-m4n4", True), ("polarpair-m4n4+g8", False), ("polarpair-m4n2+g48", False)]
)
def test_polarpair_has_no_record_for_values_or_groups_that_cut_tiles(name: str, values: bool) -> None:
    assert records.record_of(codecs.get(name), Geometry(values, 192, 64)) is None


@pytest.mark.slow
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
    except EngineError as error:
        pytest.skip(str(error))
    for kernel in (READ, ENCODE):
        (usage,) = compile_text(text(kernel, side(name, values, 64, 128)), arch)
        assert not usage.spilled
        assert not usage.stack
