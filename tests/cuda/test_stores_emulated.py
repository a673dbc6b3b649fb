"""Stores of K/V on the emulated device: blocks of two sizes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.cuda.kv.cache import HEADER
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import CacheFormat, KVLocation, SpanView
from polarlm.engine.errors import EngineError
from tests.cuda.emulated import open_device

N = 16


@pytest.fixture
def ops() -> CudaOps:
    return CudaOps(open_device())


def test_stores_of_two_block_sizes_may_share_the_ops(ops: CudaOps) -> None:
    span = SpanView(slice(0, 1), 5 * N, KVLocation(None, 4), 4 * N, 1, [3], 2 * N, [6])
    assert ops.spans([span], 2 * N).table[0, : HEADER + 4].tolist() == [0, 1, 5 * N, 1, 1, 1, -1, 2, 0, 3, 4, 6, 0]
    assert ops.spans([span], N).table[0, : HEADER + 4].tolist() == [0, 1, 5 * N, 1, 2, 1, -1, 4, 0, 3, 4, 6, 0]


def format_of(k: str, v: str, block_size: int = 64, head_dim: int = 128) -> CacheFormat:
    return CacheFormat(codecs.get(k), codecs.get(v), None, None, 8, block_size, 8, head_dim)


@pytest.mark.parametrize(
    ("format", "words"),
    [
        (format_of("polarpair-m4n4+g8", "ring4"), r"m4n4\+g8 has no GPU kernel"),
        (format_of("ring4", "ring4", block_size=24), "not 24: choose another block size"),
        (format_of("ring4", "ring4", block_size=96), "a multiple of 64 tokens"),
        (format_of("ring4", "ring4", head_dim=264), "but this model's is 264"),
        (format_of("polarquant", "f16", block_size=128, head_dim=256), "choose 64"),
        (format_of("f16", "f16", head_dim=20), "multiple of 8"),
    ],
)
def test_formats_without_a_kernel_are_refused(ops: CudaOps, format: CacheFormat, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        ops.cache_bytes(format)
    assert "\n" not in str(caught.value)


def test_a_store_that_does_not_fit_is_refused(ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(shape: tuple[int, ...], dtype: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(ops._device, "empty", full)
    with pytest.raises(EngineError, match=r"KV store does not fit .* GiB are left .* kv_memory") as caught:
        ops.cache(format_of("f16", "f16"), 10, 2)
    assert caught.value.code == "out_of_memory"
