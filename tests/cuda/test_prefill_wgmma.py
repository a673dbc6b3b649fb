"""Attention of the rows of a prompt by products of warpgroups, through the emulator, against float64 attention."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import CacheFormat, KVLocation, SpanView
from tests.cuda import test_prefill_attention
from tests.cuda.caches import PagedCache, random_cache
from tests.cuda.programs import skip_without_wgmma
from tests.cuda.variants import Cache

attend = partial(test_prefill_attention.attend, warps=None, kernel="prefill_wgmma")


@pytest.fixture(autouse=True)
def _needs_warpgroups() -> None:
    skip_without_wgmma()


def case(
    rng: np.random.Generator, length: int, rows: int, dim: int, group: int = 1, kv_heads: int = 1, block_size: int = 64
) -> tuple[PagedCache, np.ndarray]:
    """A cache of `length` tokens, and queries (rows, H + 1, D) of the last of them."""
    of_cache = {"block_size": block_size, "head_dim": dim, "kv_heads": kv_heads, "mean_bits": 0}
    paged = random_cache(rng, "f16", "f16", [length], rows=rows, **of_cache)
    return paged, rng.standard_normal((rows, kv_heads * group + 1, dim), np.float32)


def attend_by(ops: CudaOps, tokens: int = 70, kv_heads: int = 1, dim: int = 64) -> np.ndarray:
    """The op `attention` for a prompt, with two query heads for each KV head."""
    rng = np.random.default_rng(1)
    format = CacheFormat(codecs.get("f16"), codecs.get("f16"), None, None, 0, 64, kv_heads, dim)
    cache, buffer = ops.cache(format, 1, 2), ops.buffer(format, tokens)
    spans = ops.spans([SpanView(slice(0, tokens), 0, KVLocation(buffer, 0), 0, None, (), 0)], 64)
    shapes = [(tokens, heads, dim) for heads in (2 * kv_heads, kv_heads, kv_heads)]
    q, k, v = (ops.to_device(rng.standard_normal(shape, np.float32)) for shape in shapes)
    ops.append_kv(cache, spans, k, v)
    return ops.to_host(ops.attention(q, cache, spans, dim**-0.5, None))


# (head dim, group, tokens, new rows, block size, KV heads)
CASES = [
    (64, 2, 70, 70, 64, 2),
    (128, 1, 65, 65, 64, 1),
    (64, 3, 130, 130, 128, 1),
    (128, 8, 19, 19, 64, 1),
    (128, 4, 330, 70, 64, 1),
    (64, 1, 300, 140, 128, 1),
    (64, 1, 1, 1, 64, 1),
    (128, 2, 129, 3, 64, 2),
]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("dim", "group", "length", "rows", "block_size", "kv_heads"), CASES)
def test_the_rows_of_a_prompt_attend(
    rng: np.random.Generator, dim: int, group: int, length: int, rows: int, block_size: int, kv_heads: int
) -> None:
    """To themselves, and to blocks of earlier turns in half precision."""
    paged, q = case(rng, length, rows, dim, group, kv_heads, block_size)
    for seed in (0, 2):
        paged.assert_attention(attend(paged, q, seed=seed), q[:, :-1])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("window", [1, 64, 100, 1000])
def test_a_window_hides_older_tokens(rng: np.random.Generator, window: int) -> None:
    paged, q = case(rng, 290, 150, 64)
    paged.assert_attention(attend(paged, q, window), q[:, :-1], window)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("softcap", "has_sink_scores"), [(2.0, True), (2.0, False), (None, True)])
def test_scores_are_capped_and_sink_scores_take_part(
    rng: np.random.Generator, softcap: float | None, has_sink_scores: bool
) -> None:
    paged, q = case(rng, 100, 45, 64, 3, 2)
    q *= 4
    sink_scores = np.array([30, -30, 0, 2, -2, 5], np.float32) if has_sink_scores else None
    out = attend(paged, q, softcap=softcap, sink_scores=sink_scores)
    paged.assert_attention(out, q[:, :-1], 0, softcap, sink_scores)


@pytest.mark.slow
def test_scores_that_rise_and_fall_steeply_do_not_overflow(rng: np.random.Generator) -> None:
    paged, q = case(rng, 200, 200, 64)
    paged.assert_attention(attend(paged, q * 12), 12 * q[:, :-1])


@pytest.mark.slow
def test_results_are_multiplied_by_the_factor_of_their_head(rng: np.random.Generator) -> None:
    paged, q = case(rng, 100, 30, 64, 2, 2)
    factors = np.array([8, 8, 0.25, 0.25], np.float32)
    np.testing.assert_array_equal(attend(paged, q, factors=factors), attend(paged, q) * factors[:, None])


def test_what_it_serves_is_half_precision_of_64_or_128_channels() -> None:
    def takes(keys: str, values: str, dim: int, size: int = 64, mean_bits: int = 0) -> bool:
        return launch_configs.takes_wgmma(*Cache(keys, values, dim, size, mean_bits).layouts())

    assert takes("f16", "f16", 64)
    assert takes("f16", "f16", 128, 128)
    assert not takes("f16", "f16", 128, mean_bits=8)
    assert not takes("f16", "ring4", 128)
    assert not takes("ring4", "f16", 128)
    assert not takes("f16", "f16", 80)
    assert not takes("f16", "f16", 256)
    assert not takes("f16", "f16", 128, 32)
