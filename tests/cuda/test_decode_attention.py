"""Attention of a step over random paged caches, run by the emulator with every check on, against float64.

The reference is attention over what the codecs' own fields decode to; `tests.cuda.caches` states the tolerance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device.kernel_source import source
from polarlm.engine.backends.cuda.launch import result_type
from tests.cuda.caches import PagedCache, random_cache, score_defines
from tests.cuda.formats import poisoned
from tests.cuda.programs import program
from tests.pairs import mostly_slow

SEEDS = [0, 1, 2]


def attend(
    cache: PagedCache,
    q: np.ndarray,
    *,
    ctas: int,
    warps: int,
    window: int = 0,
    seed: int = 0,
    rotation: tuple[Any, ...] = (1, None, None),
    factors: np.ndarray | None = None,
    kind: str = "float",
    softcap: float | None = None,
    sink_scores: np.ndarray | None = None,
) -> np.ndarray:
    """q (T, H, D) → (T, H, D). rotation: order of Hadamard's matrix, signs (D) around it. factors, sink_scores: (H,).
    kind: CUDA type of the result."""
    _, heads, dim = q.shape
    group, most = heads // cache.kv_heads, max(1, *(span.rows for span in cache.headers))
    chunks, columns = launch_configs.decode_cells(group, most)
    layouts = cache.key_layout, cache.value_layout
    order, before, behind = rotation
    config = launch_configs.decode_attention_by(warps, *layouts, group, most, len(cache.spans), order)
    cells = len(cache.spans) * cache.kv_heads * chunks
    out = poisoned(q.shape, kind)
    text = source(
        "decode_attention", *layouts, **config.defines, **result_type(out), **score_defines(softcap, sink_scores)
    )
    acc = np.full((2 * cells + ctas, columns, -(-dim // 16) * 16), np.nan, np.float32)
    ml = np.full((2 * cells + ctas, columns, 2), np.nan, np.float32)
    counts = np.zeros(cells * columns, np.int32)
    pools = cache.keys, cache.values, cache.full_keys, cache.full_values
    tables = cache.key_layout.record.tables, cache.value_layout.record.tables
    sizes = [np.int32(x) for x in (len(cache.spans), cache.spans.shape[1], cache.kv_heads, chunks, window)]
    args = out, acc, ml, counts, q, *pools, cache.spans, *tables, factors, before, behind, *sizes
    scale = np.float32(1 / np.sqrt(dim))
    kernel, shared = "decode_attention_kernel", config.shared - launch_configs.SYSTEM_BYTES  # the emulator needs none
    program(text).launch(kernel, (ctas,), (config.threads,), *args, scale, sink_scores, shared=shared, seed=seed)
    assert not counts.any()
    return out


SMALL = {"block_size": 16, "head_dim": 16, "mean_bits": 8}


def queries(rng: np.random.Generator, cache: PagedCache, group: int) -> np.ndarray:
    """(B, H, D), long enough that some tokens weigh much more than others."""
    return (2 * rng.standard_normal((cache.rows, cache.kv_heads * group, cache.head_dim))).astype(np.float32)


# Keys, values, head dim, query heads of a KV head, block size, bits of means.
CACHES = [
    ("f16", "f16", 64, 4, 64, 0),
    ("f16", "f16", 80, 7, 32, 0),
    ("f16", "f16", 8, 1, 16, 8),
    ("f16", "f16", 256, 2, 64, 0),
    ("f16", "turbo4", 128, 4, 64, 16),
    ("ring3", "f16", 256, 1, 64, 8),
    ("ring3.5", "ring3", 128, 4, 64, 8),
    ("ring3.5", "ring3.5", 16, 7, 32, 16),
    ("ring4", "ring3.5", 128, 8, 64, 8),
    ("ring4", "ring4", 80, 4, 128, 8),
    ("ring4+norm16", "ring4+dense+norm16", 96, 12, 64, 0),
    ("ring5", "turbo4", 256, 4, 128, 16),
    ("turbo3", "ring5", 8, 2, 32, 8),
    ("turbo4", "turbo2", 256, 8, 32, 0),
    ("ring3", "turbo3", 64, 11, 16, 8),
    ("polarquant", "polarquant", 64, 4, 64, 8),
    ("ring4", "polarquant", 80, 1, 64, 8),
    ("polarpair-m4n4", "ring3", 64, 4, 64, 8),
    ("polarpair-m4n2+minmax-radius+g16", "polarquant", 96, 1, 32, 0),
    ("linear8", "ring2.5", 16, 3, 32, 8),
    ("ring2.5", "linear8", 80, 4, 64, 8),
    ("ring2.5", "ring2.5", 256, 2, 64, 8),
    ("linear8", "linear8", 256, 4, 64, 8),
    ("trellis2.5", "trellis2.5", 80, 3, 32, 8),
    ("trellis4", "trellis3.5", 128, 8, 64, 8),
    ("trellis3", "trellis4", 80, 3, 32, 8),
    ("trellis3.5", "trellis3", 256, 2, 64, 16),
]


@mostly_slow("keys, values, dim, group, block, mean_bits", CACHES, [CACHES[2], CACHES[7], CACHES[14], CACHES[18]])
def test_sequences_attend(
    rng: np.random.Generator, keys: str, values: str, dim: int, group: int, block: int, mean_bits: int
) -> None:
    """Sequences that end within the first block and across its end, at later block ends, and at the start of a block,
    with one new row and with several; every order of threads gives the same bits. Each codec has a decoder of its
    own."""
    lengths = [5 * block + 3, 4, block - 1, block + 2, 2 * block + 5, 3 * block]
    shape = {"head_dim": dim, "block_size": block, "mean_bits": mean_bits, "kv_heads": 2}
    for step_rows in (None, [5, 4, 1, 9, 5, 3]):
        cache = random_cache(rng, keys, values, lengths, **shape, step_rows=step_rows)
        q = queries(rng, cache, group)
        results = [attend(cache, q, ctas=7, warps=2, seed=seed) for seed in SEEDS]
        cache.assert_attention(results[0], q)
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    ("keys", "step_rows", "ctas", "warps"),
    [
        ("ring4", None, 1, 1),
        ("ring4", None, 90, 2),
        ("ring4", [16, 1, 2, 3], 13, 3),
        ("f16", None, 13, 3),
        ("f16", [16, 1, 2, 3], 1, 3),
    ],
)
def test_any_number_of_ctas_and_warps_gives_attention(
    rng: np.random.Generator, keys: str, step_rows: list[int] | None, ctas: int, warps: int
) -> None:
    """One warp for all has three groups of means; 39 warps are more than the units of the short sequences. Whichever
    CTA is the last of a cell, it adds sums in the order of tokens."""
    lengths = [16 * 43 - 5, 16 * 18, 40, 3]
    cache = random_cache(rng, keys, "f16" if keys == "f16" else "ring3", lengths, **SMALL, step_rows=step_rows)
    q = queries(rng, cache, 3)
    first, second = (attend(cache, q, ctas=ctas, warps=warps, seed=seed) for seed in (0, 2))
    cache.assert_attention(first, q)
    np.testing.assert_array_equal(second, first)


@pytest.mark.parametrize(("codec", "dim", "block"), [("linear8", 80, 64), ("linear8", 128, 128), ("ring4", 128, 64)])
def test_wide_codes_of_twelve_warps_are_loaded_late(rng: np.random.Generator, codec: str, dim: int, block: int) -> None:
    """By groups of tiles, or one side at a time; a warp has several blocks, some of them of two parts."""
    cache = random_cache(
        rng, codec, codec, [block * 19 + 3, 4, 2 * block + 5], head_dim=dim, block_size=block, mean_bits=8
    )
    q = queries(rng, cache, 4)
    assert launch_configs.decode_attention(cache.key_layout, cache.value_layout, 4).threads == 12 * 32
    cache.assert_attention(attend(cache, q, ctas=1, warps=12), q)


@pytest.mark.parametrize(
    ("keys", "values", "block", "window"),
    [
        ("ring4", "ring3.5", 32, 1),
        ("ring4", "ring3.5", 32, 71),
        ("f16", "f16", 32, 17),
        ("f16", "f16", 32, 33),
        ("turbo3", "f16", 128, 375),
        ("ring4", "ring4", 16, 640),
    ],
)
def test_a_window_hides_older_tokens(rng: np.random.Generator, keys: str, values: str, block: int, window: int) -> None:
    """Sink, current block and quantized blocks are cut or hidden; blocks before every window have been dropped. Rows
    of a sequence have windows of their own, which may begin in different blocks. A CTA has two rows, or eight."""
    longest = block * 7 + 5
    lengths = [longest, longest + 11, block + 3, block * 2, 5]
    shape = {"block_size": block, "head_dim": 16, "mean_bits": 8}
    for step_rows, most in ((None, 1), ([16, 7, 4, 1, 5], 16)):
        dropped = max(0, (longest - most - window) // block - 1)
        cache = random_cache(rng, keys, values, lengths, dropped=dropped, **shape, step_rows=step_rows)
        for group in (4, 1):
            q = queries(rng, cache, group)
            cache.assert_attention(attend(cache, q, ctas=5, warps=2, window=window), q, window)


def test_a_sequence_without_rows_gives_zeros(rng: np.random.Generator) -> None:
    """It pads a batch."""
    cache = random_cache(rng, "ring4", "ring4", [70, 70], **SMALL)
    q = queries(rng, cache, 2)
    cache.spans[1] = 0
    out = attend(cache, q, ctas=7, warps=2)
    first = replace(cache, spans=cache.spans[:1], k=cache.k[:1], v=cache.v[:1])
    first.assert_attention(out[:1], q[:1])
    assert (out[1] == 0).all()


@pytest.mark.parametrize(
    ("softcap", "has_sink_scores", "keys", "step_rows", "window"),
    [
        (2.0, False, "ring4", None, 0),
        (None, True, "ring4", None, 50),
        (2.0, True, "f16", [3, 1, 2], 0),
        (None, True, "f16", [3, 1, 2], 0),
    ],
)
def test_scores_are_capped_and_sink_scores_take_part(
    rng: np.random.Generator,
    softcap: float | None,
    has_sink_scores: bool,
    keys: str,
    step_rows: list[int] | None,
    window: int,
) -> None:
    """Where one CTA has a cell, and where several do. Scores are beyond the cap; a sink is above all of them, another
    below."""
    cache = random_cache(rng, keys, keys, [16 * 20 - 5, 40, 3], **SMALL, step_rows=step_rows, kv_heads=2)
    q = 2 * queries(rng, cache, 3)
    sink_scores = np.array([30, -30, 0, 2, -2, 5], np.float32) if has_sink_scores else None
    for ctas in (1, 13):
        out = attend(cache, q, ctas=ctas, warps=2, window=window, softcap=softcap, sink_scores=sink_scores)
        cache.assert_attention(out, q, window, softcap, sink_scores)
    with pytest.raises(AssertionError, match="off by up to"):
        cache.assert_attention(out, q, window)


@pytest.mark.parametrize("sink", [np.nan, -np.inf])
def test_a_sink_that_is_not_finite(rng: np.random.Generator, sink: float) -> None:
    """NaN makes the result NaN; minus infinity has no weight."""
    cache = random_cache(rng, "ring4", "ring4", [70], **SMALL)
    q = queries(rng, cache, 1)
    out = attend(cache, q, ctas=3, warps=2, sink_scores=np.array([sink], np.float32))
    if np.isnan(sink):
        assert np.isnan(out).all()
    else:
        cache.assert_attention(out, q)


def test_large_scores_do_not_overflow(rng: np.random.Generator) -> None:
    """One token gets all the weight; the maximum rises from block to block."""
    cache = random_cache(rng, "ring4", "ring4", [200], **SMALL)
    q = 300 * queries(rng, cache, 2)
    cache.assert_attention(attend(cache, q, ctas=7, warps=2), q)


def test_queries_beyond_half_precision_are_its_largest_numbers(rng: np.random.Generator) -> None:
    """Infinities of both signs would give NaN."""
    cache = random_cache(rng, "ring4", "ring4", [70], **SMALL)
    q = queries(rng, cache, 1)
    q[..., :2] = 1e6, -1e6
    assert np.isfinite(attend(cache, q, ctas=3, warps=2)).all()
