"""The KV store of tiles holds what NumPy's store holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, KVLocation
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.backends.native.kv.cache import TileCache
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.kv.cache import LayerCache
from polarlm.engine.backends.numpy.ops import NumpyOps
from tests.pairs import each

K, N, D = 2, 64, 64
TYPES = [("ring4", "ring3.5"), ("ring5", "f16"), ("turbo3", "linear8"), ("f16", "f16"), ("polarquant", "polarquant")]


def format_of(types: tuple[str, str], mean_bits: int = 8) -> CacheFormat:
    k, v = map(codecs.get, types)
    return CacheFormat(k, v, None, None, mean_bits, N, K, D)


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
    for cache, blocks in ((caches[0], [1, 4]), (other, [2, 0])):
        stored = native.read_blocks(cache, blocks)
        assert stored["k.tiles"].tobytes() == cache.memory[0][:, blocks].swapaxes(0, 1).tobytes()
        actual = transfer.convert_blocks(format, 2, stored, transfer.FIELDS)
        assert list(actual) == list(wanted)
        for name, x in wanted.items():
            assert actual[name].dtype == x.dtype
            assert actual[name].tobytes() == x.tobytes()


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


@pytest.mark.parametrize(
    ("types", "block_size", "head_dim", "why"),
    [
        (("polarpair-m4n4+minmax", "ring4"), 64, 64, "no kernel reads polarpair-m4n4+minmax"),
        (("f16", "f16"), 20, 64, "kernels read blocks of a multiple of 16 tokens, not of 20"),
        (("f16", "f16"), 64, 36, "kernels read heads of a multiple of 8 channels, not of 36"),
        (("f16", "f16"), 64, 1024, "kernels have no room for heads of 1024 channels"),
    ],
    ids=str,
)
def test_a_layer_says_why_numpy_computes_it(types: tuple[str, str], block_size: int, head_dim: int, why: str) -> None:
    """test_status.py has layers that kernels compute, wholly or in part."""
    native = NativeOps(1)
    cache = native.cache(replace(format_of(types), block_size=block_size, head_dim=head_dim), 1, 1)
    assert native.numpy_fallbacks(cache) == {"attention and encoding": why}
    assert type(cache) is LayerCache
