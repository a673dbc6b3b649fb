"""Attention of prompts at every level of CPU features, against NumPy in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, HeadTransform, KVLocation, ScoreRule, SpanView
from polarlm.engine.backends.native.attention_ops import prompts
from polarlm.engine.backends.native.attention_ops.heads import HeadOps
from polarlm.engine.backends.native.attention_ops.prompts import PromptOps
from polarlm.engine.backends.native.kv.cache import CacheOps
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.attention import attend
from polarlm.engine.backends.numpy.kv.cache import LayerCache
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.codecs import get
from polarlm.engine.codecs.parts.rotation import dense, signed_hadamard
from polarlm.engine.errors import KernelError
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.lang import Level
from tests.backends.native.launching import launcher
from tests.jit.levels import some_levels

N = 32  # tokens of a block
PLAIN = NumpyOps(1)


def sequence(
    rng: np.random.Generator, dim: int, kv_heads: int, codec: str, blocks: int, rows: int, done: int
) -> tuple[LayerCache, SpanView]:
    """A cache and a prompt of `rows`, `done` rows after the first of its own: after a sink and quantized blocks.

    No blocks: the prompt begins the sequence.
    """
    format = CacheFormat(get(codec), get(codec), None, None, 8 if codec != "f16" else 0, N, kv_heads, dim)
    cache = CacheOps().cache(format, blocks + 1, 2)
    buffer = PLAIN.buffer(format, max(done + rows, N * blocks) + N)
    for array in (*buffer, cache.full_k, cache.full_v):
        array[...] = rng.standard_normal(array.shape)
    if blocks:
        PLAIN.encode_blocks(
            [FilledBlocks([cache], list(range(blocks, 0, -1)), [KVLocation(buffer, i) for i in range(blocks)])]
        )
    for side in buffer:  # memory that no token has been written to
        side[:, N + done + rows :] = np.nan
    start = (blocks + 1) * N if blocks else 0
    span = SpanView(
        slice(0, rows), start + done, KVLocation(buffer, 1), start, 1 if blocks else None, range(blocks, 0, -1), N
    )
    return cache, span


def exact(
    q: np.ndarray,
    cache: LayerCache,
    span: SpanView,
    rule: ScoreRule,
    transform: HeadTransform,
) -> np.ndarray:
    rows, _, dim = q.shape
    grouped = (q.astype(np.float64) * rule.scale).reshape(rows, cache.format.kv_heads, -1, dim).transpose(1, 2, 0, 3)
    out = attend(grouped, span.position, cache, span, rule).transpose(2, 0, 1, 3).reshape(q.shape)
    assert out.dtype == np.float64
    out = out if transform.scale_back is None else out * transform.scale_back[:, None]
    return out if transform.value_rotation is None else out @ transform.value_rotation.T


def check(found: np.ndarray, wanted: np.ndarray) -> None:
    """Each vector is within 1e-5 of its norm."""
    assert found.dtype == np.float32
    assert (np.abs(found - wanted) <= 1e-5 * np.linalg.norm(wanted, axis=-1, keepdims=True)).all()


def transform(
    rng: np.random.Generator, heads: int, kv_heads: int, rotation: np.ndarray | None, is_scaled: bool
) -> HeadTransform:
    scale_back = rng.uniform(0.5, 2, heads).astype(np.float32) if is_scaled else None
    return HeadTransform(kv_heads, None, None, rotation, scale_back)


@some_levels
@pytest.mark.parametrize(
    ("dim", "group", "rows", "done", "blocks", "window"),
    [(64, 3, 100, 70, 6, None), (80, 1, 33, 0, 0, 20), (8, 8, 30, 65, 5, 90)],
)
def test_prompts_attend(
    dim: int, group: int, rows: int, done: int, blocks: int, window: int | None, level: Level
) -> None:
    rng = np.random.default_rng(dim)
    cache, span = sequence(rng, dim, 2, "polarquant", blocks, rows, done)
    stored = transform(rng, 2 * group, 2, signed_hadamard(dim), is_scaled=True)
    (prepared,) = HeadOps(launcher(level)).prepare([stored])
    q = rng.standard_normal((rows, 2 * group, dim)).astype(np.float32)
    found = PromptOps(launcher(level)).attention(q, cache, [span], ScoreRule(0.3, window), prepared)
    check(found, exact(q, cache, span, ScoreRule(0.3, window), stored))


@some_levels
@pytest.mark.parametrize(("softcap", "has_sink_scores"), [(1.5, False), (None, True), (50.0, True)])
def test_scores_with_a_cap_and_heads_with_a_sink(level: Level, softcap: float | None, has_sink_scores: bool) -> None:
    """The sink counts once, also where blocks are decoded in several parts."""
    rng = np.random.default_rng(0)
    cache, span = sequence(rng, 64, 2, "f16", 9, 50, 70)
    q = rng.standard_normal((50, 6, 64)).astype(np.float32)
    sink_scores = np.linspace(-20, 12, 6).astype(np.float32) if has_sink_scores else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "_DECODED", 4 * N)
        found = PromptOps(launcher(level)).attention(q, cache, [span], ScoreRule(0.3, 200, softcap, sink_scores))
    plain = transform(rng, 6, 2, None, is_scaled=False)
    check(found, exact(q, cache, span, ScoreRule(0.3, 200, softcap, sink_scores), plain))


@pytest.mark.slow
@given(
    dim=st.sampled_from([24, 64]),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    codec=st.sampled_from(["f16", "ring4", "turbo3", "polarquant", "q8_0"]),
    rotation=st.sampled_from(["none", "hadamard", "dense"]),
    blocks=st.integers(0, 12),
    rows=st.integers(1, 150),
    done=st.integers(0, 150),
    window=st.none() | st.integers(1, 300),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_prompts_attend_to_all_that_is_before_them(
    dim: int,
    group: int,
    kv_heads: int,
    codec: str,
    rotation: str,
    blocks: int,
    rows: int,
    done: int,
    window: int | None,
    threads: int,
    seed: int,
) -> None:
    """On any number of threads, and with blocks that are decoded in several parts."""
    rng = np.random.default_rng(seed)
    dim = dim if codec in ("f16", "polarquant") else 64
    cache, span = sequence(rng, dim, kv_heads, codec, blocks, rows, done)
    matrix = {"none": None, "hadamard": signed_hadamard(dim), "dense": dense(dim)}[rotation]
    stored = transform(rng, kv_heads * group, kv_heads, matrix, is_scaled=rotation == "dense")
    (prepared,) = HeadOps(launcher(best())).prepare([stored])
    q = rng.standard_normal((rows, kv_heads * group, dim)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "_DECODED", 5 * N)
        found = PromptOps(launcher(best(), threads)).attention(q, cache, [span], ScoreRule(0.25, window), prepared)
    check(found, exact(q, cache, span, ScoreRule(0.25, window), stored))


def test_results_are_the_same_for_any_number_of_threads_and_any_parts() -> None:
    rng = np.random.default_rng(0)
    cache, span = sequence(rng, 64, 2, "ring4", 9, 200, 30)
    q = rng.standard_normal((200, 6, 64)).astype(np.float32)
    wanted = PromptOps(launcher(best())).attention(q, cache, [span], ScoreRule(0.1, 90))
    for threads in (2, 3, 8):
        found = PromptOps(launcher(best(), threads)).attention(q, cache, [span], ScoreRule(0.1, 90))
        np.testing.assert_array_equal(found, wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "_DECODED", 4 * N)
        np.testing.assert_array_equal(
            PromptOps(launcher(best())).attention(q, cache, [span], ScoreRule(0.1, 90)), wanted
        )
    parts = []
    for rows in (slice(0, 77), slice(77, 78), slice(78, 200)):
        own = replace(span, rows=slice(0, rows.stop - rows.start), position=span.position + rows.start)
        parts.append(PromptOps(launcher(best())).attention(q[rows], cache, [own], ScoreRule(0.1, 90)))
    np.testing.assert_array_equal(np.concatenate(parts), wanted)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_queries_that_are_not_finite_give_results_that_are_not(broken: float) -> None:
    """Damaged weights are found by their results."""
    rng = np.random.default_rng(0)
    cache, span = sequence(rng, 64, 1, "f16", 0, 4, 0)
    q = rng.standard_normal((4, 1, 64)).astype(np.float32)
    q[2, 0, 5] = broken
    found = PromptOps(launcher(best())).attention(q, cache, [span], ScoreRule(0.1))
    assert np.isnan(found[2]).all()
    assert np.isfinite(found[[0, 1, 3]]).all()


@pytest.mark.parametrize(("codec", "dim"), [("kivi4", 64), ("f16", 1024), ("f16", 20)])
def test_layers_without_kernels_attend_in_numpy(codec: str, dim: int) -> None:
    rng = np.random.default_rng(0)
    ops = NativeOps(1)
    cache, span = sequence(rng, dim, 1, codec, 2, 40, 0)
    q = rng.standard_normal((40, 2, dim)).astype(np.float32)
    found = ops.attention(q, cache, ops.spans([span], N), ScoreRule(0.1))
    np.testing.assert_array_equal(found, PLAIN.attention(q, cache, [span], ScoreRule(0.1)))


def test_too_many_queries_for_a_head_are_refused() -> None:
    rng = np.random.default_rng(0)
    cache, span = sequence(rng, 8, 1, "f16", 0, 1, 0)
    with pytest.raises(KernelError, match="193 query heads"):
        PromptOps(launcher(best())).attention(np.zeros((1, 193, 8), np.float32), cache, [span], ScoreRule(0.1))
