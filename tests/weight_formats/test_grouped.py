"""Formats of blocks as integers and scales: exactly the values that the package gguf reads."""

from __future__ import annotations

import gguf
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine import weight_formats
from polarlm.engine.weight_formats import Grouped, Lattice, Trits, get
from tests.pairs import in_turn
from tests.weights import BLOCKS, random_blocks

FINITE = st.floats(width=16, allow_nan=False, allow_infinity=False)


LATTICES = [name for name in BLOCKS if get(name).grid is not None]
DIGITS = [name for name in BLOCKS if get(name).runs is not None]
GROUPED = [name for name in BLOCKS if name not in {*LATTICES, *DIGITS}]


def unpack(name: str, raw: np.ndarray) -> Grouped | Lattice | Trits:
    function = get(name).unpack
    return function(raw)


def reference(name: str, raw: np.ndarray) -> np.ndarray:
    values: np.ndarray = gguf.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
    return values


def test_every_format_of_blocks_has_integers() -> None:
    assert set(BLOCKS) == {name for name in weight_formats.available() if get(name).values > 1}
    assert set(BLOCKS) == {name for name in weight_formats.available() if get(name).unpack}
    for name in BLOCKS:
        kind = gguf.GGMLQuantizationType[name.upper()]
        assert (get(name).values, get(name).nbytes) == gguf.GGML_QUANT_SIZES[kind]
        assert get(name).group in (16, 32), "kernels multiply 32 inputs at a time"


@in_turn("name", BLOCKS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 7),
    blocks=st.integers(1, 5),
    scales=st.lists(FINITE, min_size=1, max_size=4),
)
def test_integers_give_gguf_s_values_to_the_bit(
    name: str, seed: int, rows: int, blocks: int, scales: list[float]
) -> None:
    """The sign of zero included."""
    raw = random_blocks(np.random.default_rng(seed), name, rows, blocks * get(name).values, scales)
    wanted = reference(name, raw)
    np.testing.assert_array_equal(unpack(name, raw).dequantize().view(np.uint32), wanted.view(np.uint32))
    stored = np.full(wanted.shape, 7, np.float32)
    get(name).dequantize(raw, stored)
    np.testing.assert_array_equal(stored.view(np.uint32), wanted.view(np.uint32))


@in_turn("name", [*LATTICES, *DIGITS])
def test_damaged_scales_give_gguf_s_infinities_and_nan(name: str, rng: np.random.Generator) -> None:
    raw = random_blocks(rng, name, 8, 1024, [np.inf, -np.inf, np.nan, 2.0**-24, 65504.0])
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(unpack(name, raw).dequantize(), reference(name, raw))


@in_turn("name", GROUPED)
def test_arrays_have_the_promised_shapes_and_types(name: str, rng: np.random.Generator) -> None:
    stored, width = get(name), 3 * get(name).values
    scale = np.float32 if name == "mxfp4" else np.float16
    for rows in (0, 1, 5):
        raw = random_blocks(rng, name, rows, width) if rows else np.empty((0, 3 * stored.nbytes), np.uint8)
        raw.setflags(write=False)  # as a mapped file
        given = unpack(name, raw)
        assert isinstance(given, Grouped)
        groups = (rows, width // stored.group)
        assert (given.codes.shape, given.codes.dtype) == ((rows, width), np.uint8), rows
        assert given.codes.max(initial=0) < 1 << stored.bits, rows
        assert (given.scale.shape, given.scale.dtype) == ((rows, 3), scale), rows
        if given.sub_scale is not None:
            assert (given.sub_scale.shape, given.sub_scale.dtype) == (groups, np.int8), rows
        if given.sub_offset is not None:
            assert (given.sub_offset.shape, given.sub_offset.dtype) == (groups, np.uint8), rows
        if given.offset is not None:
            assert (given.offset.shape, given.offset.dtype) == ((rows, 3), np.float16), rows
            assert (given.sub_offset is None) == (given.sub_scale is None), rows
        assert (given.zero, given.table) == (stored.zero, stored.table), rows
        assert given.dequantize().shape == (rows, width), rows


@in_turn("name", LATTICES)
def test_indices_scales_and_signs_have_the_promised_shapes_and_types(name: str, rng: np.random.Generator) -> None:
    stored, width = get(name), 3 * get(name).values
    points = stored.grid.points()
    assert (points.shape, points.dtype) == ((1 << stored.bits, stored.grid.cell), np.int8)
    for rows in (0, 1, 5):
        raw = random_blocks(rng, name, rows, width) if rows else np.empty((0, 3 * stored.nbytes), np.uint8)
        raw.setflags(write=False)  # as a mapped file
        given = unpack(name, raw)
        assert isinstance(given, Lattice)
        assert (given.indices.shape, given.indices.dtype) == ((rows, width // stored.grid.cell), np.uint16), rows
        assert (given.scale.shape, given.scale.dtype) == ((rows, 3), np.float16), rows
        assert (given.sub_scale.shape, given.sub_scale.dtype) == ((rows, width // stored.group), np.uint8), rows
        assert given.sub_scale.max(initial=0) < 16, rows
        assert (given.signs is None) == (stored.grid.signs == 0), rows
        if given.signs is not None:
            assert (given.signs.shape, given.signs.dtype) == ((rows, width // 8), np.uint8), rows
            assert given.signs.max(initial=0) < 1 << stored.grid.signs, rows
        assert given.dequantize().shape == (rows, width), rows


@in_turn("name", DIGITS)
def test_bytes_of_digits_have_the_promised_shapes_and_types(name: str, rng: np.random.Generator) -> None:
    stored, width = get(name), 3 * get(name).values
    assert stored.runs is not None
    assert sum(count * digits for count, digits in stored.runs) == stored.values
    assert all(count % 4 == 0 for count, _ in stored.runs), "kernels expand four bytes of a row at a time"
    for rows in (0, 1, 5):
        raw = random_blocks(rng, name, rows, width) if rows else np.empty((0, 3 * stored.nbytes), np.uint8)
        raw.setflags(write=False)  # as a mapped file
        given = unpack(name, raw)
        assert isinstance(given, Trits)
        packed = rows, 3, sum(count for count, _ in stored.runs)
        assert (given.packed.shape, given.packed.dtype) == (packed, np.uint8), rows
        assert (given.scale.shape, given.scale.dtype) == ((rows, 3), np.float16), rows
        assert set(np.unique(given.integers())) == ({-1, 0, 1} if rows else set()), rows
        assert given.dequantize().shape == (rows, width), rows


@in_turn("name", [*GROUPED, *LATTICES])
def test_every_code_occurs(name: str, rng: np.random.Generator) -> None:
    """All bits of a code or of an index are read."""
    given = unpack(name, random_blocks(rng, name, 8 if get(name).grid is None else 512, 1024))
    assert not isinstance(given, Trits)
    codes = given.codes if isinstance(given, Grouped) else given.indices
    np.testing.assert_array_equal(np.unique(codes), np.arange(1 << get(name).bits))


def test_scales_of_mxfp4_are_powers_of_two_that_bfloat16_holds() -> None:
    raw = np.zeros((256, get("mxfp4").nbytes), np.uint8)
    raw[:, 0] = np.arange(256)
    scale = unpack("mxfp4", raw).scale[:, 0]
    np.testing.assert_array_equal(scale, np.exp2(np.arange(256.0) - 128))
    assert not (scale.view(np.uint32) & 0xFFFF).any()
