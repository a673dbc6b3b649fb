"""The KV store of tiles: its bytes, and which layers have one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.kv.cache import LayerCache

K, N, D = 2, 64, 64
TYPES = [("ring4", "ring3.5"), ("ring5", "f16"), ("turbo3", "linear8"), ("f16", "f16"), ("polarquant", "polarquant")]


def format_of(types: tuple[str, str]) -> CacheFormat:
    k, v = map(codecs.get, types)
    return CacheFormat(k, v, None, None, 8, N, K, D)


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
