"""Tables of bytes at every level of CPU features: the same entries as NumPy finds."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.backends.native.levels import every_level, run

from engine.backends.native.byte_ops import PairTable, Table  # isort: skip
from engine.backends.native.compiler import Kernel, assembly
from engine.backends.native.emit import Emitter
from engine.backends.native.target import Level
from engine.backends.native.values import I8, Value, vector

_BYTES = vector(I8, 64)


def lookup(entries: np.ndarray) -> Kernel:
    """Bytes (units, 64) → the bytes of a table alone, and of a pair of tables, (units, 3, 64)."""

    def emit(e: Emitter, index: Value, out: Value, begin: Value, end: Value, scratch: Value) -> None:
        first, second = entries[0].tobytes(), entries[1].tobytes()
        single, pair = Table(e, e.constant_bytes(first), len(first)), PairTable(e, first, second)
        with e.loop(begin, end) as unit:
            own = e.load(index + unit * 64, _BYTES)
            for place, found in enumerate((single[own], *pair[own])):
                e.store(found, out + unit * 192, 64 * place)

    return Kernel(f"lookup_{entries.shape[1]}", emit, ("index", "out"))


@every_level
@pytest.mark.parametrize("count", [16, 64, 128, 256])
def test_lookup(count: int, level: Level) -> None:
    rng = np.random.default_rng(0)
    entries = rng.integers(0, 256, (2, count), np.uint8)
    index = np.concatenate([np.arange(count, dtype=np.uint8), rng.integers(0, count, 1024 - count % 64, np.uint8)])
    index = index[: len(index) // 64 * 64].reshape(-1, 64)
    out = np.zeros((len(index), 3, 64), np.uint8)
    run(lookup(entries), level, len(index), (index, out))
    np.testing.assert_array_equal(out[:, 0], entries[0][index])
    np.testing.assert_array_equal(out[:, 1], entries[0][index])
    np.testing.assert_array_equal(out[:, 2], entries[1][index])


@every_level
def test_instructions(level: Level) -> None:
    """A pair of tables of 256 bytes: with VBMI four lookups, with AVX-512 eight of words, else 32 of 16 bytes."""
    if not level.has("avx2"):
        pytest.skip("this level has no instruction for it")
    entries = np.random.default_rng(1).integers(0, 256, (2, 256), np.uint8)
    text = assembly(lookup(entries), level)
    wanted = "vperm[it]2b" if level.has("avx512vbmi") else "vperm[it]2w" if level.has("avx512bw") else "vpshufb"
    least = {"vperm[it]2b": 4, "vperm[it]2w": 8, "vpshufb": 64}[wanted]
    assert len(re.findall(wanted, text)) >= least
