"""Full-precision records, through the emulator: new rows are written as Python packs them, and blocks are copied."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from polarlm.engine import codecs, records
from polarlm.engine.backends.cuda.device.kernel_source import source
from polarlm.engine.backends.cuda.kv.cache import HEADER, SpanHeader
from polarlm.engine.records import Layout
from tests.cuda.caches import headers
from tests.cuda.programs import Program

SEEDS = [0, 1, 2]
HALF_MAX = 65504.0


def layout(values: bool, block_size: int, head_dim: int) -> Layout:
    return records.layout(codecs.get("f16"), values, block_size, head_dim)


@cache
def program(kernel: str, block_size: int, head_dim: int) -> Program:
    return Program(source(kernel, *(layout(values, block_size, head_dim) for values in (False, True))))


def packed(tokens: np.ndarray, values: bool) -> np.ndarray:
    """tokens (records, K, N, DP) float16 with the channels that fill up the last tile → a pool."""
    return layout(values, *tokens.shape[-2:]).pack({"values": tokens})


def padded(dim: int) -> int:
    return -(-dim // 16) * 16


def spans_of(rows: list[list[int]], following: Sequence[int | None] = ()) -> np.ndarray:
    """rows: first row, rows, position, record and number of the block that `current` begins with, for each sequence.

    following: the record behind that, where it is not the next one.
    """
    spans = np.full((len(rows), HEADER + 3), 1 << 28, np.int32)
    for span, (first, count, position, now, block), behind in itertools.zip_longest(spans, rows, following):
        behind = now + 1 if behind is None else behind
        span[:HEADER] = SpanHeader(first, count, position, 1 << 28, 1 << 28, 1 << 28, now, block, behind)
    return spans


def append(
    x: np.ndarray, spans: np.ndarray, count: int, block_size: int, threads: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """x (T, 1 + 2K, D): a query, keys, values. Two pools (count, K, bytes) that were NaN before."""
    kv_heads, dim = x.shape[1] // 2, x.shape[2]
    empty = np.full((count, kv_heads, block_size, padded(dim)), np.nan, np.float16)
    current_k, current_v = packed(empty, False), packed(empty, True)
    k, v = x[:, 1 : 1 + kv_heads], x[:, 1 + kv_heads :]
    groups = -(-(max(span.rows for span in headers(spans)) + 15) // 16)
    counts = np.int32(spans.shape[1]), np.int32(groups), np.int32(kv_heads)
    strides = np.int64(x[0].size), np.int64(x[0].size)
    program("append_kv", block_size, dim).launch(
        "append_kv_kernel",
        (len(spans) * groups, kv_heads),
        (threads,),
        current_k,
        current_v,
        k,
        v,
        spans,
        *counts,
        *strides,
        seed=seed,
    )
    return current_k, current_v


def expected(x: np.ndarray, spans: np.ndarray, count: int, block_size: int) -> list[np.ndarray]:
    """The pools, token by token, as halves (count, K, N, DP) of keys and of values."""
    kv_heads, dim = x.shape[1] // 2, x.shape[2]
    pools = [np.full((count, kv_heads, block_size, padded(dim)), np.nan, np.float16) for _ in range(2)]
    halves = np.clip(x, -HALF_MAX, HALF_MAX).astype(np.float16)
    for span in headers(spans):
        for i in range(span.rows):
            number, token = divmod(span.position + i, block_size)
            record = span.current if number == span.current_block else span.next + number - span.current_block - 1
            for side, pool in enumerate(pools):
                new = pool[record, :, token]
                new[:, :dim] = halves[span.first_row + i, 1 + side * kv_heads :][:kv_heads]
                new[:, dim:] = 0
    return pools


def assert_appended(x: np.ndarray, spans: np.ndarray, count: int, block_size: int, threads: int = 64) -> None:
    keys, values = expected(x, spans, count, block_size)
    for seed in SEEDS:
        current_k, current_v = append(x, spans, count, block_size, threads, seed)
        np.testing.assert_array_equal(current_k, packed(keys, False))
        np.testing.assert_array_equal(current_v, packed(values, True))


@pytest.mark.parametrize(("block_size", "dim", "threads"), [(16, 8, 32), (64, 80, 256), (64, 136, 96)])
def test_a_step_writes_one_token_of_each_sequence(
    rng: np.random.Generator, block_size: int, dim: int, threads: int
) -> None:
    """Each into its own slot, whose other tokens stay unchanged."""
    x = rng.standard_normal((3, 5, dim), np.float32)
    rows = [[0, 1, 2 * block_size, 4, 2], [1, 1, block_size - 1, 1, 0], [2, 1, 5 * block_size + 10, 0, 5]]
    assert_appended(x, spans_of(rows), 5, block_size, threads)


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_step_writes_several_tokens_of_each_sequence(rng: np.random.Generator, block_size: int) -> None:
    """Across a block end into any other slot, across a multiple of 16, and from the start of a block."""
    x = rng.standard_normal((16 + 3 + 1 + 7, 5, 24), np.float32)
    rows = [[0, 16, 3 * block_size - 9, 4, 2], [16, 3, 14, 1, 0], [19, 1, block_size, 6, 1], [20, 7, block_size, 5, 1]]
    assert_appended(x, spans_of(rows, [0, 2]), 7, block_size)


@pytest.mark.parametrize(("position", "rows"), [(0, 16), (0, 50), (15, 2), (16, 17), (37, 2), (37, 50)])
def test_a_prompt_writes_from_any_position(rng: np.random.Generator, position: int, rows: int) -> None:
    """Groups of 16 positions may start before the first row and end after the last."""
    block_size = 32
    first = position // block_size
    x = rng.standard_normal((rows, 3, 24), np.float32)
    count = (position + rows - 1) // block_size + 1 - first
    assert_appended(x, spans_of([[0, rows, position, 0, first]]), count, block_size)


@pytest.mark.parametrize(("block_size", "dim"), [(128, 16), (64, 144), (16, 256)])
def test_blocks_of_several_parts_are_written(rng: np.random.Generator, block_size: int, dim: int) -> None:
    x = rng.standard_normal((block_size + 3, 3, dim), np.float32)
    assert_appended(x, spans_of([[0, len(x), 5, 1, 0]]), 3, block_size, 256)


def test_halves_are_rounded_to_even_and_saturate() -> None:
    """65520 is half way to what would be the next half, had it more exponents; 1 + 2⁻¹¹ half way from 1."""
    x = np.zeros((1, 3, 8), np.float32)
    x[:] = [1e9, -np.inf, 65519, 65520, 1 + 2**-11, 1 + 3 * 2**-11, 2**-25, -(2**-24)]
    current_k, _ = append(x, spans_of([[0, 1, 0, 0, 0]]), 1, 16, 32, 0)
    stored = layout(False, 16, 8).unpack(current_k)[0]["values"][0, 0, 0]
    wanted = [HALF_MAX, -HALF_MAX, HALF_MAX, HALF_MAX, 1, 1 + 2**-9, 0, -(2**-24)]
    assert stored.tolist() == wanted


@pytest.mark.parametrize(("tokens", "block_size", "dim"), [(0, 64, 24), (17, 64, 136), (64, 64, 24)])
def test_copy_full_copies_the_first_tokens_only(
    rng: np.random.Generator, block_size: int, dim: int, tokens: int
) -> None:
    """Places without a token in the copy are zero, whatever source and target held."""
    kv_heads = 2
    shape = (3, kv_heads, block_size, padded(dim))
    halves = rng.standard_normal((2, *shape)).astype(np.float16)
    halves[:, :, :, tokens:] = np.nan
    from_k, from_v = packed(halves[0], False), packed(halves[1], True)
    for seed in SEEDS:
        to_k, to_v = (np.full_like(pool[:2], 0xFF) for pool in (from_k, from_v))
        numbers = np.int32(1), np.int32(2), np.int32(tokens), np.int32(kv_heads)
        program("copy_full", block_size, dim).launch(
            "copy_full_kernel", (kv_heads, 2), (96,), to_k, to_v, from_k, from_v, *numbers, seed=seed
        )
        for pool, values, whole in ((to_k, False, halves[0]), (to_v, True, halves[1])):
            copy = np.zeros(whole[2].shape, np.float16)
            copy[:, :tokens] = whole[2, :, :tokens]
            np.testing.assert_array_equal(pool[1], packed(copy, values))
            assert (pool[0] == 0xFF).all()


def test_copy_full_copies_within_one_pool(rng: np.random.Generator) -> None:
    halves = rng.standard_normal((2, 2, 1, 16, 16)).astype(np.float16)
    pool_k, pool_v = packed(halves[0], False), packed(halves[1], True)
    wanted = pool_k[0].copy(), pool_v[0].copy()
    numbers = np.int32(1), np.int32(0), np.int32(16), np.int32(1)
    program("copy_full", 16, 16).launch("copy_full_kernel", (1, 2), (32,), pool_k, pool_v, pool_k, pool_v, *numbers)
    np.testing.assert_array_equal(pool_k[1], wanted[0])
    np.testing.assert_array_equal(pool_v[1], wanted[1])
