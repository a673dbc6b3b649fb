"""Attention in NumPy: of a layer over the KV store, full-precision K/V and decoded blocks, tile by tile, with online
softmax; and of the texts of an encoder, each over all of its own rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.kv import AttentionRule, KVLocation, PreparedTransform, SpanView
from polarlm.engine.backends.numpy.kv.cache import Buffer, LayerCache
from polarlm.engine.backends.numpy.rows import softcap
from polarlm.engine.backends.ops import Texts
from polarlm.engine.quantization.conditioning import read_mean

# Most query rows per KV head that attend together.
_QUERY_TILE = 768

# Most full-precision keys, and quantized blocks, in a tile.
_KEY_TILE = 1024
_BLOCK_TILE = 64


def attend_sequence(q: np.ndarray, out: np.ndarray, cache: LayerCache, span: SpanView, rule: AttentionRule) -> None:
    """Attention of scaled q (T, K, G, D), G = H / K, the rows of one sequence, in tiles of queries → out (T, H, D)."""
    tile = max(1, _QUERY_TILE // q.shape[2])
    for first in range(0, len(q), tile):
        # (T, K, G, D) → (K, G, T, D): the group of query heads of a KV head shares one pass over its keys.
        grouped = q[first : first + tile].transpose(1, 2, 0, 3)
        tile_out = attend(grouped, span.position + first, cache, span, rule)
        target = out[first : first + tile]
        target[...] = tile_out.transpose(2, 0, 1, 3).reshape(target.shape)


def attend(q: np.ndarray, position: int, cache: LayerCache, span: SpanView, rule: AttentionRule) -> np.ndarray:
    """Attention of scaled q (K, G, T, D), whose first row has `position`, by online softmax over tiles → same shape."""
    last = max(span.sees, position + q.shape[2] - 1)
    tiles = _visible_tiles(cache, span, position, last, rule.window)
    whole = functools.reduce(_merge, (_partial(q, position, tile, rule, span.sees) for tile in tiles))
    if rule.sink_scores is not None:
        sink_scores = np.broadcast_to(rule.sink_scores.reshape(*q.shape[:2], 1), q.shape[:3])
        sink_scores = sink_scores.reshape(whole.row_max.shape)
        whole = _merge(whole, _Partial(sink_scores, np.ones_like(whole.row_sum), np.zeros_like(whole.weighted)))
    return (whole.weighted / whole.row_sum).reshape(q.shape)


class _Tile(NamedTuple):
    """Consecutive keys and values k, v (K, S, D), whose first token has position `start`.

    mean (K, S/N, D): the block means, if they have been subtracted from k; else None.
    """

    start: int
    k: np.ndarray
    v: np.ndarray
    mean: np.ndarray | None = None


class _Partial(NamedTuple):
    """Attention over some of the keys: maximum score (K, R, 1), sum of exp (K, R, 1), weighted values (K, R, D)."""

    row_max: np.ndarray
    row_sum: np.ndarray
    weighted: np.ndarray


def _partial(q: np.ndarray, position: int, tile: _Tile, rule: AttentionRule, sees: int) -> _Partial:
    """Attention of q (K, G, T, D) over one tile, with R = G·T."""
    kv_heads, group, count, dim = q.shape
    flat = q.reshape(kv_heads, group * count, dim)
    scores = flat @ tile.k.swapaxes(1, 2)  # (K, R, S)
    if tile.mean is not None:  # q·k = q·(k − μ) + q·μ, one μ per block of N keys
        by_block = scores.reshape(*scores.shape[:2], tile.mean.shape[1], -1)
        by_block += (flat @ tile.mean.swapaxes(1, 2))[..., None]
    if rule.softcap is not None:
        softcap(scores, rule.softcap)
    _mask(scores.reshape(kv_heads, group, count, -1), position, tile.start, rule.window, sees)
    row_max = scores.max(axis=-1, keepdims=True)
    scores -= _finite(row_max)
    np.exp(scores, out=scores)
    return _Partial(row_max, scores.sum(axis=-1, keepdims=True), scores @ tile.v)


def _merge(a: _Partial, b: _Partial) -> _Partial:
    """Attention over the keys of both, rescaled to the larger maximum."""
    row_max = np.maximum(a.row_max, b.row_max)
    rescale_a, rescale_b = np.exp(a.row_max - _finite(row_max)), np.exp(b.row_max - _finite(row_max))
    return _Partial(
        row_max, a.row_sum * rescale_a + b.row_sum * rescale_b, a.weighted * rescale_a + b.weighted * rescale_b
    )


def _finite(row_max: np.ndarray) -> np.ndarray:
    """`row_max` with −inf, of rows that see no key, replaced by 0: exp(−inf − 0) is 0, but −inf − −inf would be NaN."""
    return np.where(np.isneginf(row_max), np.float32(0), row_max)


def _mask(scores: np.ndarray, position: int, start: int, window: int | None, sees: int) -> None:
    """Set the scores (K, G, T, S) of masked keys to −inf; rows start at `position`, keys at `start`."""
    count, size = scores.shape[2:]
    newest = max(position, sees)  # that the first row sees
    hides_new = start + size - 1 > newest
    hides_old = window is not None and start <= position + count - 1 - window
    if not (hides_new or hides_old):
        return
    # If no key is older than a window, only keys that the first row does not see can be masked.
    first_hidden = 0 if hides_old else max(0, newest + 1 - start)
    rows = position + np.arange(count)[:, None]
    keys = start + np.arange(first_hidden, size)
    hidden = keys > np.maximum(rows, sees)
    if window is not None:
        hidden |= keys <= rows - window
    np.copyto(scores[..., first_hidden:], -np.inf, where=hidden)


def _visible_tiles(cache: LayerCache, span: SpanView, position: int, last: int, window: int | None) -> Iterator[_Tile]:
    """Yields the tiles of keys and values that rows at `position` to `last` see."""
    block_size = cache.full_k.shape[2]
    oldest = 0 if window is None else max(0, position - window + 1)
    if span.sink is not None and oldest < block_size:
        yield _full_tile(0, cache.full(KVLocation(None, span.sink)), slice(None))

    ids = np.asarray(span.table, np.intp)
    for first in range(max(0, (oldest - span.table_start) // block_size), len(ids), _BLOCK_TILE):
        part = ids[first : first + _BLOCK_TILE]
        yield _Tile(span.table_start + first * block_size, *read_blocks(cache, part))

    if span.current.buffer is None:
        slots = [span.current.block, *span.following]
        for start, slot in zip(range(span.current_start, last + 1, block_size), slots, strict=False):
            if start + block_size > oldest:
                yield _full_tile(start, cache.full(KVLocation(None, slot)), slice(0, last + 1 - start))
        return
    end, buffered = last + 1 - span.current_start, cache.full(span.current)
    for first in range(max(0, oldest - span.current_start) // _KEY_TILE * _KEY_TILE, end, _KEY_TILE):
        yield _full_tile(span.current_start + first, buffered, slice(first, min(first + _KEY_TILE, end)))


def _full_tile(start: int, full: Buffer, tokens: slice) -> _Tile:
    """A tile of some tokens of a full-precision block; the first has position `start`."""
    return _Tile(start, *(side[:, tokens].astype(np.float32, copy=False) for side in full))


def read_blocks(cache: LayerCache, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Decode B quantized blocks → k without block means (K, B·N, D), v (K, B·N, D), means (K, B, D) float32 or None."""
    kv_heads, _, dim = cache.full_k.shape[1:]
    sides, format = cache.read(ids), cache.format
    k, mean = format.codec_k.decode(sides.k), read_mean(sides.mean) if sides.mean else None
    whole = k if mean is None else k + mean[:, :, None]
    v = whole if format.codec_v is None else format.codec_v.decode(sides.v)
    return k.reshape(kv_heads, -1, dim), v.reshape(kv_heads, -1, dim), mean


def parts_of(qkv: np.ndarray, transform: PreparedTransform) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The queries (T, H, D), keys and values (T, K, D) in qkv (T, H + 2K, D)."""
    values = qkv.shape[1] - transform.kv_heads
    keys = values - transform.kv_heads
    return qkv[:, :keys], qkv[:, keys:values], qkv[:, values:]


def attend_to_texts(q: np.ndarray, k: np.ndarray, v: np.ndarray, texts: Texts, scale: float) -> np.ndarray:
    """Attention of q (T, H, D) to k, v (T, K, D) of the same text → (T, H, D)."""
    out, (_, heads, dim), kv_heads = np.empty(q.shape, np.float32), q.shape, k.shape[1]
    for end, rows in zip(itertools.accumulate(texts.lengths), texts.lengths, strict=True):
        text = slice(end - rows, end)
        grouped = q[text].reshape(rows, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)  # (K, G, T, D)
        scores = grouped @ (k[text].transpose(1, 2, 0) * np.float32(scale))[:, None]
        if texts.window is not None and texts.window // 2 < rows - 1:
            places = np.arange(rows)
            scores[:, :, np.abs(places[:, None] - places) > texts.window // 2] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out[text] = (scores @ v[text].swapaxes(0, 1)[:, None]).transpose(2, 0, 1, 3).reshape(rows, heads, dim)
    return out
