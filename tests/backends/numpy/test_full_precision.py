"""Sinks and current blocks are halves: what rounds, what saturates, and what stays not a number."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.backends.kv import FilledBlocks, KVLocation, SpanView
from polarlm.engine.backends.numpy.kv.cache import LayerCache
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.codecs import NotFinite
from tests.state.fed import KV_HEADS, D, N, make_store

GIVEN = np.array([1 / 3, -1e-9, 65504, 65519, 65520, -1e30, np.inf, -np.inf, np.nan], np.float32)
STORED = np.array([0.33325195, 0, 65504, 65504, 65504, -65504, np.nan, np.nan, np.nan], np.float16)


def tokens(count: int = N) -> np.ndarray:
    """Keys or values (K, count, D): the numbers above in the first channels."""
    x = np.zeros((KV_HEADS, count, D), np.float32)
    x[..., : len(GIVEN)] = GIVEN
    return x


def wanted() -> np.ndarray:
    x = np.zeros((KV_HEADS, N, D), np.float16)
    x[..., : len(STORED)] = STORED
    return x


def caches() -> tuple[NumpyOps, LayerCache]:
    store = make_store("f16", "f16")
    return store.ops, store.cache(0)


def test_a_slot_takes_two_bytes_a_value() -> None:
    ops, cache = caches()
    assert {cache.full_k.dtype, cache.full_v.dtype} == {np.dtype(np.float16)}
    assert ops.cache_bytes(cache.format)[1] == 2 * KV_HEADS * N * D * 2 == cache.full_k[0].nbytes * 2


@pytest.mark.parametrize("way", ["step", "two slots", "prompt", "session"])
def test_what_a_slot_stores(way: str) -> None:
    """The nearest halves; beyond ±65504 these, as on a GPU; NaN for what is not finite, as of a damaged model."""
    ops, cache = caches()
    given = tokens()
    if way == "session":
        ops.write_full(cache, 1, given, given)
    elif way == "prompt":
        buffer = ops.buffer(cache.format, N)
        for side in buffer:
            side[...] = given
        ops.copy_full(cache, KVLocation(None, 1), KVLocation(buffer, 0), N)
    else:
        slots = (1,) if way == "step" else (1, 2)
        span = SpanView(slice(0, N * len(slots)), N, KVLocation(None, 1), N, 0, (), N, slots[1:])
        rows = np.concatenate([given] * len(slots), axis=1).swapaxes(0, 1)
        ops.append_kv(cache, [span], rows, rows)
    for x in ops.read_full(cache, 1, N):
        assert x.dtype == np.float16
        np.testing.assert_array_equal(x, wanted())


def test_a_prompt_keeps_its_own_keys_and_values_in_32_bits() -> None:
    ops, cache = caches()
    buffer = ops.buffer(cache.format, 2 * N)
    span = SpanView(slice(0, N), 0, KVLocation(buffer, 0), 0, None, (), N)
    ops.append_kv(cache, [span], tokens().swapaxes(0, 1), tokens().swapaxes(0, 1))
    for side in buffer:
        assert side.dtype == np.float32
        np.testing.assert_array_equal(side[:, :N], tokens())
    ops.write_full(cache, 1, wanted(), wanted())
    ops.copy_full(cache, KVLocation(buffer, 1), KVLocation(None, 1), N)
    np.testing.assert_array_equal(buffer[0][:, N:], wanted().astype(np.float32))


def test_nan_in_a_slot_is_found_when_the_block_is_encoded() -> None:
    ops, cache = caches()
    ops.write_full(cache, 1, tokens(), tokens())
    with pytest.raises(NotFinite):
        ops.encode_blocks([FilledBlocks([cache], [0], [KVLocation(None, 1)])])
