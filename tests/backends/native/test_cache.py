"""The KV store of tiles holds what that of NumPy holds."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from polarlm.engine import codecs
from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, KVLocation
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.backends.native.cache import TileCache
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from tests.pairs import each

K, N, D = 2, 64, 64
TYPES = [("ring4", "ring3.5"), ("ring5", "f16"), ("turbo3", "q4_0"), ("f16", "f16"), ("polarquant", "polarquant")]


def format_of(types: tuple[str, str], mean_bits: int = 8) -> CacheFormat:
    k, v = map(codecs.get, types)
    return CacheFormat(k, v, None, None, mean_bits, N, K, D)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("types", "mean_bits"), each(TYPES, [0, 8, 16]))
def test_blocks_are_encoded_read_and_written_as_in_numpy(types: tuple[str, str], mean_bits: int) -> None:
    rng = np.random.default_rng(0)
    format, native, plain = format_of(types, mean_bits), NativeOps(1), NumpyOps(1)
    caches = native.cache(format, 6, 3), plain.cache(format, 6, 3)
    assert type(caches[0]) is TileCache
    for slot in range(3):
        k, v = rng.standard_normal((2, K, N, D)).astype(np.float32)
        for ops, cache in zip((native, plain), caches, strict=True):
            ops.write_full(cache, slot, k + 1, v)
    sources = [KVLocation(None, 2), KVLocation(None, 0)]
    for ops, cache in zip((native, plain), caches, strict=True):
        ops.encode_blocks([FilledBlocks([cache], [4, 1], sources)])
    wanted = plain.read_blocks(caches[1], [1, 4])
    assert any(x.any() for x in wanted.values())
    other = native.cache(format, 3, 0)
    native.write_blocks(other, [2, 0], wanted)
    for found in (native.read_blocks(caches[0], [1, 4]), native.read_blocks(other, [2, 0])):
        assert list(found) == list(wanted)
        for name, x in wanted.items():
            assert found[name].dtype == x.dtype
            assert found[name].tobytes() == x.tobytes()


@pytest.mark.parametrize("types", TYPES)
def test_cache_bytes_are_those_of_the_arrays(types: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for has_kernels in (True, False):
        if not has_kernels:
            monkeypatch.setattr(tiles, "_module", lambda name: None)
        ops, format = NativeOps(1), format_of(types)
        block, slot = ops.cache_bytes(format)
        cache = ops.cache(format, 5, 3)
        arrays = [*cache.k.values(), *cache.v.values(), *cache.mean.values()]
        assert sum(x.nbytes for x in arrays) == 5 * block, has_kernels
        assert cache.full_k.nbytes + cache.full_v.nbytes == 3 * slot, has_kernels


def test_types_without_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = NativeOps(1)
    ops.cache(format_of(("ring4", "ring3.5")), 1, 1)
    assert ops.without_kernels == set()
    monkeypatch.setattr(tiles, "_module", lambda name: None)
    ops.cache(format_of(("turbo4", "ring4")), 1, 1)
    assert ops.without_kernels == {"turbo4/ring4"}
