"""Sinks and current blocks are halves: what rounds, what saturates, and what stays not a number."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.backends.kv import KVLocation, Move, SpanView
from tests.state.fed import KV_HEADS, D, N, make_store

NEW, STORED = np.zeros((KV_HEADS, N, D), np.float32), np.zeros((KV_HEADS, N, D), np.float16)
NEW[..., :9] = 1 / 3, -1e-9, 65504, 65519, 65520, -1e30, np.inf, -np.inf, np.nan
STORED[..., :9] = 0.33325195, 0, 65504, 65504, 65504, -65504, np.nan, np.nan, np.nan


@pytest.mark.parametrize("way", ["step", "two slots", "prompt", "session"])
def test_what_a_slot_stores(way: str) -> None:
    """The nearest halves; beyond ±65504 these, as on a GPU; NaN for what is not finite, as of a damaged model."""
    store = make_store("f16", "f16")
    ops, cache = store.ops, store.cache(0)
    if way == "session":
        ops.write_full(cache, 1, NEW, NEW)
    elif way == "prompt":
        ops.copy_full([cache], [Move(KVLocation(None, 1), KVLocation((NEW, NEW), 0), N)])
    else:
        slots = (1,) if way == "step" else (1, 2)
        span = SpanView(slice(0, N * len(slots)), N, KVLocation(None, 1), N, 0, (), N, slots[1:])
        rows = np.concatenate([NEW] * len(slots), axis=1).swapaxes(0, 1)
        ops.append_kv(cache, [span], rows, rows)
    for x in ops.read_full(cache, 1, N):
        assert x.dtype == np.float16
        np.testing.assert_array_equal(x, STORED)


def test_a_prompt_keeps_its_own_keys_and_values_in_32_bits() -> None:
    store = make_store("f16", "f16")
    ops, cache = store.ops, store.cache(0)
    buffer = ops.buffer(cache.format, 2 * N)
    span = SpanView(slice(0, N), 0, KVLocation(buffer, 0), 0, None, (), N)
    ops.append_kv(cache, [span], NEW.swapaxes(0, 1), NEW.swapaxes(0, 1))
    ops.write_full(cache, 1, STORED, STORED)
    ops.copy_full([cache], [Move(KVLocation(buffer, 1), KVLocation(None, 1), N)])
    for side in buffer:
        assert side.dtype == np.float32
        np.testing.assert_array_equal(side[:, :N], NEW)
        np.testing.assert_array_equal(side[:, N:], STORED.astype(np.float32))
