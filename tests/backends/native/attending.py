"""Steps of random sequences over caches of the native backend, and their attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.kv import CacheFormat, KVLocation, ScoreRule, SpanView
from polarlm.engine.backends.native.attention_ops.heads import PreparedTransform
from polarlm.engine.backends.native.attention_ops.steps import AttentionOps
from polarlm.engine.backends.native.kv.cache import CacheOps
from polarlm.engine.backends.numpy.attention import read_blocks
from polarlm.engine.backends.numpy.kv.cache import LayerCache, Sides
from polarlm.engine.jit.lang import Level
from polarlm.engine.quantization.conditioning import centre
from tests.backends.native.launching import launcher

SCALE = 0.3


class Sequence_(NamedTuple):
    """Tokens that a sequence has, and rows that a step adds."""

    length: int
    rows: int = 1


class Step(NamedTuple):
    """The inputs of attention. keys, values: of each sequence (tokens, K, D) float64, as they read back."""

    cache: LayerCache
    views: list[SpanView]
    q: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]


class Shape(NamedTuple):
    kv_heads: int = 2
    group: int = 3
    dim: int = 64
    block_size: int = 16
    types: tuple[str, str] = ("f16", "f16")
    mean_bits: int = 8


def format_of(shape: Shape) -> CacheFormat:
    k, v = (codecs.get(name) for name in shape.types)
    return CacheFormat(k, v, None, None, shape.mean_bits, shape.block_size, shape.kv_heads, shape.dim)


def step(
    shape: Shape, sequences: Sequence[Sequence_], window: int | None, seed: int = 0, dtype: type = np.float32
) -> Step:
    """A step whose cache holds NaN wherever no token of a sequence lies. Slots hold its keys and values exactly."""
    rng, n, format = np.random.default_rng(seed), shape.block_size, format_of(shape)
    most = sum(sequence.length // n + 1 for sequence in sequences)
    slots = iter(rng.permutation(len(sequences) * (3 + 16 // n) + 2).tolist())
    ids = rng.permutation(most + 3)
    cache = CacheOps().cache(format, most + 3, len(sequences) * (3 + 16 // n) + 2)
    cache.full_k[:], cache.full_v[:] = np.nan, np.nan
    views, first, taken, keys, values = [], 0, 0, [], []
    for length, rows in sequences:
        k, v = rng.standard_normal((2, length + rows, shape.kv_heads, shape.dim)).astype(dtype).astype(np.float32)
        k += rng.standard_normal((shape.kv_heads, shape.dim)).astype(dtype).astype(np.float32)
        k, v = (x.astype(np.float16).astype(np.float32) for x in (k, v))
        complete, oldest = length // n, 0 if window is None else max(0, length - window + 1)
        own = list(range(max(1, oldest // n), complete))
        table = ids[taken : taken + len(own)].tolist()
        taken += len(own)
        sink = next(slots) if complete and oldest < n else None
        current = [next(slots) for _ in range(complete, (length + rows - 1) // n + 1)]
        for slot, block in [(sink, 0), *((slot, complete + i) for i, slot in enumerate(current))]:
            if slot is not None:
                part = slice(block * n, min((block + 1) * n, length + rows))
                for full, x in ((cache.full_k, k), (cache.full_v, v)):
                    full[slot, :, : part.stop - part.start] = x[part].swapaxes(0, 1)
        if own:
            _encode(cache, table, own, k, v)
        views.append(
            SpanView(
                rows=slice(first, first + rows),
                position=length,
                current=KVLocation(None, current[0]),
                current_start=complete * n,
                sink=sink,
                table=table,
                table_start=own[0] * n if own else n,
                following=current[1:],
            )
        )
        first += rows
        keys.append(k.astype(np.float64))
        values.append(v.astype(np.float64))
    q = rng.standard_normal((first, shape.kv_heads * shape.group, shape.dim)).astype(np.float32)
    return Step(cache, views, q, keys, values)


def _encode(cache: LayerCache, table: Sequence[int], blocks: Sequence[int], k: np.ndarray, v: np.ndarray) -> None:
    """Store blocks of k and v, and change these to what reads back."""
    format, n = cache.format, cache.format.block_size
    part = slice(blocks[0] * n, (blocks[-1] + 1) * n)
    by_head = [x[part].reshape(len(blocks), n, format.kv_heads, format.head_dim).transpose(2, 0, 1, 3) for x in (k, v)]
    keys, mean = (by_head[0], {}) if not format.mean_bits else centre(by_head[0], format.mean_bits)
    cache.write(table, Sides(format.codec_k.encode(keys), format.codec_v.encode(by_head[1]), mean))
    stored_k, stored_v, means = read_blocks(cache, np.asarray(table))
    stored_k = stored_k.reshape(by_head[0].shape)
    if means is not None:
        stored_k = stored_k + means[:, :, None]
    k[part] = stored_k.transpose(1, 2, 0, 3).reshape(k[part].shape)
    v[part] = stored_v.reshape(by_head[1].shape).transpose(1, 2, 0, 3).reshape(v[part].shape)


def exact(
    case: Step,
    window: int | None,
    transform: PreparedTransform | None = None,
    *,
    softcap: float | None = None,
    sink_scores: np.ndarray | None = None,
) -> np.ndarray:
    """Attention in float64: (T, H, D)."""
    out = np.empty(case.q.shape)
    group = case.q.shape[1] // case.cache.format.kv_heads
    for view, k, v in zip(case.views, case.keys, case.values, strict=True):
        for row in range(view.rows.start, view.rows.stop):
            position = view.position + row - view.rows.start
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            k_heads, v_heads = (x[seen].swapaxes(0, 1).repeat(group, axis=0) for x in (k, v))
            scores = np.einsum("hd,htd->ht", case.q[row] * SCALE, k_heads)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if sink_scores is not None:
                scores = np.column_stack([sink_scores, scores])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[row] = np.einsum("ht,htd->hd", weights[:, -v_heads.shape[1] :], v_heads)
    if transform is not None:
        out = out if transform.scale_back is None else out * transform.scale_back[:, None]
        out = out if transform.value_rotation is None else out @ transform.value_rotation.T.astype(np.float64)
    return out


def attended(
    case: Step,
    level: Level,
    window: int | None,
    transform: PreparedTransform | None = None,
    threads: int = 1,
    *,
    softcap: float | None = None,
    sink_scores: np.ndarray | None = None,
) -> np.ndarray:
    ops = AttentionOps(launcher(level, threads))
    table = ops.spans(case.views, case.cache.format.block_size)
    return ops.attention(case.q, case.cache, table, ScoreRule(SCALE, window, softcap, sink_scores), transform)
