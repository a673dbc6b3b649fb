"""Attention of the rows of a prompt, through the emulator, against float64 attention over the decoded records."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device.kernel_source import source
from polarlm.engine.backends.cuda.kv.cache import SpanTable
from tests.cuda.caches import PagedCache, random_cache, score_defines
from tests.cuda.programs import program

SEEDS = [0, 1, 2]


class OnHost:
    """A device whose arrays are the host's."""

    from_host = staticmethod(np.asarray)


def attend(
    paged: PagedCache,
    q: np.ndarray,
    window: int = 0,
    seed: int = 0,
    warps: tuple[int, int] | None = (2, 16),
    factors: np.ndarray | None = None,
    softcap: float | None = None,
    sink_scores: np.ndarray | None = None,
) -> np.ndarray:
    """q (T, H + 1, D), whose last head is not part of the call → (T, H, D).

    warps: their number and rows, of smaller blocks than the engine's for the emulator's sake; None for the engine's.
    factors (H,): multiply the heads of the output. sink_scores: (H,). As in the engine, sequences without quantized
    blocks have a launch with layouts of f16.
    """
    rows, heads, dim = len(q), q.shape[1] - 1, q.shape[2]
    group, spans = heads // paged.kv_heads, SpanTable(paged.spans, len(q), None)
    blocks = partial(launch_configs.prefill_blocks, *warps) if warps else launch_configs.prefill_attention
    out = np.full((rows, heads, dim), np.nan, np.float32)
    pools = paged.keys, paged.values, paged.full_keys, paged.full_values, paged.now_keys, paged.now_values
    counts = np.int32(paged.spans.shape[1]), np.int32(paged.kv_heads), np.int32(heads), np.int64(q[0].size)
    scores = np.int32(window), np.float32(dim**-0.5), sink_scores
    for has_codes in spans.kinds():
        both = paged.key_layout, paged.value_layout
        keys, values = both if has_codes else (layout.full for layout in both)
        config, block_rows = blocks(keys, values, group)
        tiles = spans.tiles(OnHost(), has_codes, group, block_rows)
        tables = (layout.record.tables if layout.record.tables.size else None for layout in (keys, values))
        defines = {**config.defines, **score_defines(softcap, sink_scores)}
        program(source("prefill_attention", keys, values, **defines)).launch(
            "prefill_attention_kernel",
            (len(tiles), paged.kv_heads),
            (config.threads,),
            *(out, q, *pools, paged.spans, tiles, *tables, factors, *counts, *scores),
            shared=config.shared,
            seed=seed,
        )
    return out


def check(
    rng: np.random.Generator,
    codec_k: str,
    codec_v: str,
    length: int,
    rows: int,
    group: int,
    window: int = 0,
    seeds: list[int] = SEEDS,
    warps: tuple[int, int] | None = (2, 16),
    **of_cache: Any,
) -> None:
    """The last `rows` of `length` tokens; of_cache as for `random_cache`."""
    paged = random_cache(rng, codec_k, codec_v, [length], rows=[rows], **of_cache)
    q = rng.standard_normal((rows, paged.kv_heads * group + 1, paged.key_layout.record.geometry.head_dim), np.float32)
    for seed in seeds:
        paged.assert_attention(attend(paged, q, window, seed, warps), q[:, :-1], window)


@pytest.mark.parametrize(
    ("dim", "group", "rows", "block_size", "kv_heads"),
    [(8, 1, 40, 16, 2), (16, 1, 1, 16, 1), (16, 1, 17, 16, 1), (16, 3, 50, 32, 1), (80, 8, 19, 16, 1)],
)
def test_a_first_prompt_attends_to_itself(
    rng: np.random.Generator, dim: int, group: int, rows: int, block_size: int, kv_heads: int
) -> None:
    check(rng, "f16", "f16", rows, rows, group, block_size=block_size, head_dim=dim, kv_heads=kv_heads)


# (keys, values, head dim, group, tokens, new rows, block size, bits of means)
CODED = [
    ("ring4", "ring3.5", 64, 2, 205, 20, 64, 8),
    ("ring3", "ring4", 128, 1, 150, 10, 32, 16),
    ("ring5", "turbo3", 80, 3, 90, 12, 16, 8),
    ("turbo4", "ring5", 16, 8, 300, 7, 64, 0),
    ("turbo2", "turbo4", 24, 1, 140, 50, 32, 8),
    ("ring3.5", "ring3", 256, 2, 140, 9, 64, 8),
    ("ring4+norm16", "turbo2", 8, 1, 100, 33, 16, 16),
    ("f16", "ring4", 64, 1, 135, 5, 64, 8),
    ("f16", "ring3", 64, 1, 135, 5, 64, 0),
    ("ring4", "f16", 48, 3, 135, 5, 32, 0),
    ("f16", "f16", 64, 2, 200, 70, 64, 0),
    ("polarquant", "polarquant", 64, 2, 140, 9, 64, 8),
    ("polarpair-m4n4", "polarquant", 128, 1, 135, 5, 32, 16),
    ("ring4", "ring4", 16, 1, 400, 20, 128, 8),
    ("linear8", "ring2.5", 64, 2, 205, 20, 64, 8),
    ("ring2.5", "linear8", 80, 1, 140, 9, 32, 8),
    ("trellis4", "trellis3.5", 64, 2, 205, 20, 64, 8),
    ("trellis2.5", "trellis2.5", 64, 2, 205, 20, 64, 8),
    ("trellis3", "trellis4", 144, 1, 140, 9, 32, 8),
]


def check_coded(rng: np.random.Generator, case: Any, **more: Any) -> None:
    codec_k, codec_v, dim, group, length, rows, block_size, mean_bits = case
    of_cache: dict[str, Any] = {"block_size": block_size, "head_dim": dim, "mean_bits": mean_bits}
    check(rng, codec_k, codec_v, length, rows, group, **of_cache, **more)


@pytest.mark.parametrize("length", [100, 128, 129])
def test_a_prompt_may_continue_within_or_at_the_end_of_a_block(rng: np.random.Generator, length: int) -> None:
    check_coded(rng, ("ring4", "ring3.5", 16, 1, length, 3, 64, 8))


@pytest.mark.slow
@pytest.mark.parametrize("case", CODED, ids=str)
def test_a_prompt_attends_to_blocks_of_every_codec(rng: np.random.Generator, case: Any) -> None:
    """Each codec has a decoder of its own. With few rows of a warp, and in the engine's blocks of threads."""
    check_coded(rng, case)
    check_coded(rng, case, warps=None, seeds=[2])


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_heads_of_the_size_that_models_have_attend(rng: np.random.Generator, dim: int) -> None:
    """Registers and shared memory bound the tiles of rows, which the size of heads decides."""
    check(rng, "f16", "f16", 150, 45, 2, head_dim=dim, warps=(1, 32), seeds=[0, 3])
    check(rng, "f16", "f16", 70, 70, 3, head_dim=dim, warps=None, seeds=[2])


@pytest.mark.parametrize(
    ("window", "rows", "dropped"), [(1, 45, 0), (16, 170, 0), (17, 20, 4), (40, 170, 0), (64, 20, 4), (1000, 45, 0)]
)
def test_a_window_hides_older_tokens(rng: np.random.Generator, window: int, rows: int, dropped: int) -> None:
    """With blocks hidden from some rows, hidden from all, or dropped."""
    check(rng, "ring4", "turbo3", 190, rows, 2, window, [1], block_size=16, head_dim=16, dropped=dropped, mean_bits=8)


@pytest.mark.parametrize("window", [0, 40])
def test_several_prompts_attend_each_to_itself(rng: np.random.Generator, window: int) -> None:
    """With and without quantized blocks, from the beginning of a block and from within one, of one row and of many."""
    lengths, rows = [70, 100, 16, 17, 90], [70, 33, 16, 1, 1]
    paged = random_cache(rng, "ring4", "ring3.5", lengths, rows=rows, block_size=16, head_dim=32, kv_heads=2)
    assert 0 < sum(span.quantized > 0 for span in paged.headers) < len(lengths)
    q = rng.standard_normal((sum(rows), 5, 32), np.float32)
    paged.assert_attention(attend(paged, q, window), q[:, :-1], window)


@pytest.mark.parametrize(
    ("softcap", "has_sink_scores", "codec", "window", "warps"),
    [
        (2.0, False, "f16", 0, (1, 32)),
        (None, True, "f16", 0, (1, 32)),
        (2.0, True, "ring4", 0, (2, 16)),
        (None, True, "ring4", 40, (2, 16)),
    ],
)
def test_scores_are_capped_and_sink_scores_take_part(
    rng: np.random.Generator,
    softcap: float | None,
    has_sink_scores: bool,
    codec: str,
    window: int,
    warps: tuple[int, int],
) -> None:
    """Scores are beyond the cap; a sink is above all of them, another below."""
    paged = random_cache(rng, codec, codec, [100], rows=[45], block_size=16, head_dim=16, mean_bits=8, kv_heads=2)
    q = 4 * rng.standard_normal((45, 7, 16), np.float32)
    sink_scores = np.array([30, -30, 0, 2, -2, 5], np.float32) if has_sink_scores else None
    out = attend(paged, q, window, warps=warps, softcap=softcap, sink_scores=sink_scores)
    paged.assert_attention(out, q[:, :-1], window, softcap, sink_scores)
    with pytest.raises(AssertionError, match="off by up to"):
        paged.assert_attention(out, q[:, :-1], window)


def test_scores_that_rise_and_fall_steeply_do_not_overflow(rng: np.random.Generator) -> None:
    """Maxima change from part to part, by more than half precision can weigh."""
    paged = random_cache(rng, "f16", "f16", [96], rows=[96], block_size=16, head_dim=16)
    q = rng.standard_normal((96, 2, 16), np.float32) * 12
    paged.assert_attention(attend(paged, q), q[:, :-1])


def test_queries_beyond_half_precision_are_its_largest_numbers(rng: np.random.Generator) -> None:
    """Infinities of both signs would give NaN."""
    paged = random_cache(rng, "ring4", "ring4", [70], rows=[40], block_size=16, head_dim=16)
    q = rng.standard_normal((40, 2, 16), np.float32)
    q[..., :2] = 1e6, -1e6
    assert np.isfinite(attend(paged, q)).all()
