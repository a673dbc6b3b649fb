"""Formats of blocks as integers and scales: the values that the package gguf reads, or that are written here."""

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
    if name == "nf4":
        return reference_of_nf4(raw)
    values: np.ndarray = gguf.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
    return values


# bitsandbytes' numbers times 123.26, to the nearest whole ones.
NF4 = np.array([-123, -86, -65, -49, -35, -23, -11, 0, 10, 20, 30, 42, 54, 69, 89, 123], np.float32)


def reference_of_nf4(raw: np.ndarray) -> np.ndarray:
    """A scale in half precision and 16 bytes; byte j has the codes of values j and j + 16."""
    values = np.empty((len(raw), raw.shape[1] // 18, 32), np.float32)
    for row, block in np.ndindex(*values.shape[:2]):
        stored = raw[row, 18 * block : 18 * block + 18]
        scale = np.float32(np.frombuffer(stored[:2].tobytes(), "<f2")[0])
        for place, pair in enumerate(stored[2:]):
            values[row, block, place], values[row, block, place + 16] = scale * NF4[pair & 15], scale * NF4[pair >> 4]
    return values.reshape(len(raw), -1)


def test_every_format_of_blocks_has_integers() -> None:
    assert set(BLOCKS) == {name for name in weight_formats.available() if get(name).values > 1}
    assert set(BLOCKS) == {name for name in weight_formats.available() if get(name).unpack}
    for name in set(BLOCKS) - {"nf4"}:
        kind = gguf.GGMLQuantizationType[name.upper()]
        assert (get(name).values, get(name).nbytes) == gguf.GGML_QUANT_SIZES[kind]
        assert get(name).group in (16, 32), "kernels multiply 32 inputs at a time"


@in_turn("name", BLOCKS)
@settings(max_examples=8, deadline=None, derandomize=True)
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
