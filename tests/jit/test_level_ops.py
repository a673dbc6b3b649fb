"""Tables of bytes at every level of CPU features: the same entries as NumPy finds."""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np
import pytest

from polarlm.engine.jit.lang import F32, I8, I16, I32, Emitter, Kernel, Level, Value, vector
from tests.jit.levels import assembly, declared, every_level, run, special_levels

_BYTES = vector(I8, 64)


def lookup(entries: np.ndarray) -> Kernel:
    """Bytes (units, 64) → the bytes of a table alone, and of a pair of tables, (units, 3, 64)."""

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        first, second = entries[0].tobytes(), entries[1].tobytes()
        single, pair = e.level.table(e, e.constant_bytes(first), len(first)), e.level.pair_table(e, first, second)
        with e.loop(begin, end) as unit:
            own = e.load(args.index + unit * 64, _BYTES)
            for place, found in enumerate((single(own), *pair(own))):
                e.store(found, args.out + unit * 192, 64 * place)

    return Kernel(f"lookup_{zlib.crc32(entries.tobytes())}", emit, declared("index out"))


@every_level
@pytest.mark.parametrize("count", [16, 64, 128, 256])
def test_lookup(count: int, level: Level) -> None:
    rng = np.random.default_rng(0)
    check_lookup(rng.integers(0, 256, (2, count), np.uint8), level)


@every_level
@pytest.mark.parametrize("count", [64, 128, 256])
def test_lookup_of_mirror_images(count: int, level: Level) -> None:
    """The second table's halves differ by their sign, and the first table's in their last entries. 0 and -128 are their
    own images."""
    rng, half = np.random.default_rng(7), count // 2
    entries = rng.integers(0, 256, (2, count), np.uint8)
    entries[0, half:-16] = entries[0, : half - 16]
    entries[1, :2] = 0, 128
    entries[1, half:] = -entries[1, :half]
    check_lookup(entries, level)


def check_lookup(entries: np.ndarray, level: Level) -> None:
    rng, count = np.random.default_rng(8), entries.shape[1]
    index = np.concatenate([np.arange(count, dtype=np.uint8), rng.integers(0, count, 1024 - count % 64, np.uint8)])
    index = index[: len(index) // 64 * 64].reshape(-1, 64)
    out = np.zeros((len(index), 3, 64), np.uint8)
    run(lookup(entries), level, len(index), (index, out))
    np.testing.assert_array_equal(out[:, 0], entries[0][index])
    np.testing.assert_array_equal(out[:, 1], entries[0][index])
    np.testing.assert_array_equal(out[:, 2], entries[1][index])


@special_levels
def test_instructions(level: Level) -> None:
    """A pair of tables of 256 bytes: with VBMI four lookups, with AVX-512 eight of words, else 32 of 16 bytes."""
    entries = np.random.default_rng(1).integers(0, 256, (2, 256), np.uint8)
    text = assembly(lookup(entries), level)
    wanted = "vperm[it]2b" if "avx512vbmi" in level.needs else "vperm[it]2w" if "avx512bw" in level.needs else "vpshufb"
    least = {"vperm[it]2b": 4, "vperm[it]2w": 8, "vpshufb": 64}[wanted]
    assert len(re.findall(wanted, text)) >= least


def both(level: Level, operation: str, a: np.ndarray, b: np.ndarray, result: type) -> np.ndarray:
    """An operation of the level, of (vectors of a, vectors of b) over rows of 32 or 64 bytes."""
    size = a[0].nbytes
    kind = vector(I8 if a.itemsize == 1 else I16, a.shape[1])
    out = np.zeros((len(a), size), np.uint8).view(result)

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            first, second = (e.load(x + unit * size, kind) for x in args[:2])
            e.store(getattr(e.level, operation)(e, first, second), args[2] + unit * out.strides[0])

    name = f"{operation}_{size}"
    run(Kernel(name, emit, declared("a b out")), level, len(a), (a, b, out))
    return out


every_size = pytest.mark.parametrize("size", [32, 64])


def dots(signed: bool, fits: bool) -> Kernel:
    """Vectors of bytes a and b (units, 64) → the sums of products of fours, added to int32 (units, 16)."""

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        lanes = vector(I32, 16)
        with e.loop(begin, end) as unit:
            at = args.out + unit * 64
            total, a, b = e.load(at, lanes), e.load(args.a + unit * 64, lanes), e.load(args.b + unit * 64, lanes)
            e.store(e.level.dot4_signed(e, total, a, b) if signed else e.level.dot4(e, total, a, b, fits=fits), at)

    return Kernel(f"dots_{signed}_{fits}", emit, declared("a b out"))


@every_level
@pytest.mark.parametrize("kind", ["unsigned", "fits", "signed"])
def test_dot_products_of_bytes(level: Level, kind: str) -> None:
    rng, signed = np.random.default_rng(6), kind == "signed"
    a = rng.integers(-128, 128, (50, 64)) if signed else rng.integers(0, 256, (50, 64))
    b = rng.integers(-127, 128, (50, 64))
    a[:4, :], b[0, :], b[1, :] = -128 if signed else 255, 127, -127
    if kind == "fits":
        a[::2], b[1::2] = np.minimum(a[::2], 128), b[1::2] // 2
    out = rng.integers(-(2**30), 2**30, (50, 16), np.int32)
    wanted = out + (a * b).reshape(50, 16, 4).sum(-1)
    operands = a.astype(np.int8 if signed else np.uint8), b.astype(np.int8)
    run(dots(signed, kind == "fits"), level, 50, (*operands, out))
    np.testing.assert_array_equal(out, wanted)


@every_level
@every_size
def test_lookup_in_lanes(level: Level, size: int) -> None:
    rng = np.random.default_rng(2)
    table, index = rng.integers(0, 256, (50, size), np.uint8), rng.integers(0, 16, (50, size), np.uint8)
    wanted = np.take_along_axis(table.reshape(50, -1, 16), index.reshape(50, -1, 16).astype(int), -1)
    found = both(level, "lookup_in_lanes", table, index, np.uint8)
    np.testing.assert_array_equal(found, wanted.reshape(50, size))


@every_level
@every_size
def test_pair_products(level: Level, size: int) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 128, (50, size), np.uint8), rng.integers(-127, 128, (50, size), np.int8)
    wanted = (a.astype(int) * b).reshape(50, -1, 2).sum(-1)
    np.testing.assert_array_equal(both(level, "pair_products", a, b.view(np.uint8), np.int16), wanted)


@every_level
def test_bfloat16(level: Level) -> None:
    """Numbers are rounded to it: to the nearest, ties to even."""
    rng, lanes = np.random.default_rng(9), vector(F32, 16)
    low, high = (rng.standard_normal((2, 50, 16)) * 2.0 ** rng.integers(-30, 30, (2, 50, 16))).astype(np.float32)
    low[0, :4], high[1, :2] = [np.inf, -np.inf, np.nan, 0], [1 + 2**-8, 1 + 3 * 2**-8]  # and ties
    words = np.zeros((50, 32), np.int16)

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            both = e.level.to_bfloat(e, *(e.load(side + unit * 64, lanes) for side in args[:2]))
            e.store(both, args.words + unit * 64)

    run(Kernel("bfloat16", emit, declared("low high words")), level, 50, (low, high, words))
    numbers = np.concatenate([low, high], 1)
    bits = numbers.view(np.uint32)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    found = (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(found, np.where(np.isnan(numbers), numbers, nearest))


@every_level
def test_times_power(level: Level) -> None:
    x = np.random.default_rng(10).uniform(-2, 2, (4, 16)).astype(np.float32)
    n, out = np.linspace(-160, 127, 64).round().astype(np.float32).reshape(4, 16), np.zeros((4, 16), np.float32)
    x[0, 0], n[3, 0] = np.nan, -1e30

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            own, power = (e.load(side + unit * 64, vector(F32, 16)) for side in args[:2])
            e.store(e.level.times_power(e, own, power), args.out + unit * 64)

    run(Kernel("times_power", emit, declared("x n out")), level, 4, (x, n, out))
    np.testing.assert_allclose(out, np.ldexp(x, np.maximum(n, -200).astype(int)), rtol=0, atol=2.0**-125)
    is_normal = np.abs(out) > 2.0**-125
    np.testing.assert_array_equal(out[is_normal], np.ldexp(x, n.clip(-200).astype(int))[is_normal])


@every_level
@every_size
def test_scaled_product_is_rounded(level: Level, size: int) -> None:
    a, b = np.random.default_rng(4).integers(-(2**15) + 1, 2**15, (2, 500, size // 2), np.int16)
    a[0], b[0] = 2**14, np.arange(size // 2) - 8  # ties
    wanted = np.floor(a.astype(float) * b / 2**15 + 0.5)
    np.testing.assert_array_equal(both(level, "scaled_product", a, b, np.int16), wanted)


@every_level
@every_size
def test_join_words(level: Level, size: int) -> None:
    a, b = np.random.default_rng(5).integers(0, 256, (2, 50, size // 2), np.int16)
    wanted = np.concatenate([a.reshape(50, -1, 8), b.reshape(50, -1, 8)], -1).reshape(50, size)
    np.testing.assert_array_equal(both(level, "join_words", a, b, np.uint8), wanted)
