"""What every weight format does, and what each of them says."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import weight_formats
from polarlm.engine.weight_formats import find, get
from tests.pairs import in_turn
from tests.weight_formats.test_grouped import reference
from tests.weights import BLOCKS, pack

NAMES = weight_formats.available()


def defined(name: str, raw: bytes) -> np.ndarray:
    """The values of one block as the package gguf reads them, or as they are written out."""
    with np.errstate(all="ignore"):
        return reference(name, np.frombuffer(raw, np.uint8)[None])[0]


# Format → the values of a block's bytes: as the standard library reads them, or by `defined`.
DEFINITIONS: dict[str, Callable[[bytes], Sequence[float] | np.ndarray]] = {
    "f32": lambda raw: struct.unpack("<f", raw),
    "f16": lambda raw: struct.unpack("<e", raw),
    "bf16": lambda raw: struct.unpack("<f", b"\0\0" + raw),
    **{name: functools.partial(defined, name) for name in BLOCKS},
}


def dequantized(name: str, raw: np.ndarray) -> np.ndarray:
    stored = get(name)
    out = np.full((len(raw), raw.shape[1] // stored.nbytes * stored.values), 7, np.float32)
    stored.dequantize(raw, out)
    return out


def test_every_module_is_a_format() -> None:
    folder = Path(weight_formats.__file__).parent
    assert set(NAMES) == {path.stem for path in folder.glob("*.py") if not path.name.startswith("_")}
    assert {"f32", "f16", "bf16"} <= set(NAMES)
    assert [get(name).name for name in NAMES] == list(NAMES)


def test_find_takes_the_names_of_files() -> None:
    assert find("BF16") is get("bf16")
    assert find("F8_E4M3") is None
    with pytest.raises(KeyError):
        get("BF16")


@in_turn("name", NAMES)
def test_rows_are_dequantized_independently(name: str, rng: np.random.Generator) -> None:
    """Read-only bytes at any address, into a part of a larger array, whatever they say."""
    stored = get(name)
    raw = rng.integers(0, 256, (5, 4 * stored.nbytes), np.uint8)
    whole = np.full((7, 4 * stored.values), 7, np.float32)
    unaligned = np.frombuffer(b"x" + raw.tobytes(), np.uint8, offset=1).reshape(raw.shape)
    with np.errstate(invalid="ignore"):
        stored.dequantize(unaligned, whole[1:6])
        rows = np.concatenate([dequantized(name, raw[i : i + 1]) for i in range(5)])
    np.testing.assert_array_equal(whole[1:6], rows)
    assert (whole[[0, 6]] == 7).all()


@in_turn("name", NAMES)
def test_dequantized_values_equal_the_definition(name: str, rng: np.random.Generator) -> None:
    """Every bit pattern of 16 bits: NaN whatever it carries, infinities, subnormals, both zeros; many of 32, and of
    larger blocks.
    """
    size = get(name).nbytes
    if size == 2:
        raw = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(256, -1)
    elif size > 4:
        raw = rng.integers(0, 256, (16, 16 * size), np.uint8)
    else:
        special = np.array([0, 1 << 31, 1, 0x7FFFFF, 0x800000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF], "<u4")
        drawn = rng.integers(0, 1 << 32, 4096 - len(special), np.uint32).astype("<u4")
        raw = np.concatenate([special, drawn]).view(np.uint8).reshape(16, -1)
    with np.errstate(invalid="ignore", over="ignore"):
        values = dequantized(name, raw).reshape(-1)
    wanted = np.concatenate([DEFINITIONS[name](block.tobytes()) for block in raw.reshape(-1, size)])
    np.testing.assert_array_equal(np.isnan(values), np.isnan(wanted))
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(values[numbers], wanted[numbers].astype(np.float32))
    np.testing.assert_array_equal(np.signbit(values[numbers]), np.signbit(wanted[numbers]))


# Format → the root mean square of the errors of normal values, relative to the values: a little above what is measured.
ERRORS = {
    **{"f32": 0, "f16": 2.5e-4, "bf16": 2e-3, "q8_0": 0.007, "q5_1": 0.045, "q5_0": 0.05, "q4_1": 0.09, "q4_0": 0.1},
    "mxfp4": 0.15,
}


@in_turn("name", weight_formats.writable())
def test_values_are_converted_to_near_ones(name: str, rng: np.random.Generator) -> None:
    quantize = get(name).quantize
    x = rng.standard_normal((7, 256)).astype(np.float32)
    raw = quantize(x)
    assert (raw.shape, raw.dtype) == ((7, get(name).size(256)), np.uint8)
    error = np.sqrt(np.square(dequantized(name, raw) - x).mean())
    assert ERRORS[name] / 2 <= error <= ERRORS[name]
    np.testing.assert_array_equal(quantize(x[2:3]), raw[2:3])
    np.testing.assert_array_equal(dequantized(name, quantize(np.zeros_like(x))), 0)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_plain_values_are_rounded_to_nearest_even(name: str, rng: np.random.Generator) -> None:
    quantize = get(name).quantize
    assert quantize is not None
    ties = (np.arange(1, 512, dtype=np.float32) * 2**-11 + 1)[None]  # ties of f16; half of them are ties of bf16
    for x in (rng.standard_normal((5, 64)).astype(np.float32), ties, ties * (1 + 2**-7)):
        np.testing.assert_array_equal(quantize(x), pack(x, name))


def test_numbers_beyond_half_precision_become_its_largest() -> None:
    quantize = get("f16").quantize
    values = dequantized("f16", quantize(np.array([[1e6, -1e6, 65520, np.inf, np.nan]], np.float32)))
    np.testing.assert_array_equal(values, [[65504, -65504, 65504, 65504, np.nan]])


@in_turn("name", weight_formats.writable())
def test_damage_is_not_hidden(name: str) -> None:
    """A row with NaN has NaN or infinity afterwards."""
    quantize = get(name).quantize
    x = np.ones((3, 256), np.float32)
    x[1, 5] = np.nan
    assert np.isfinite(dequantized(name, quantize(x))).all(axis=1).tolist() == [True, False, True]
