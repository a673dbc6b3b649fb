"""Every op in NumPy: the definition of correct for the other backends, and the fallback without a GPU.

All arithmetic is float32 through BLAS. Loops run over sequences and over tiles of a size that fits the cache, never
over tokens, heads or blocks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import ThreadpoolController

from engine.backends.ops import CacheSpan, LayerCache, Result
from engine.conditioning import centre, read_mean
from engine.encoding import encode_well

# Tiles of attention: rows of queries per KV head, keys, and coded blocks that are decoded at once.
_QUERY_TILE = 768
_KEY_TILE = 1024
_BLOCK_TILE = 64

# Fewer rows than this are memory-bound on the weights: BLAS reads them once for all cores.
_PARALLEL_ROWS = 32


class NumpyOps:
    """See `engine.backends.ops.Ops`."""

    name = "cpu"

    def __init__(self, threads: int = 0):
        """`threads` for BLAS and for the parts of a prompt; 0 leaves BLAS as it is (it follows OMP_NUM_THREADS)."""
        self._blas = ThreadpoolController().select(user_api="blas")
        if threads:
            self._blas.limit(limits=threads)
        self._pool = ThreadPoolExecutor(thread_name_prefix="part")

    def _threads(self) -> int:
        """What BLAS may use at this moment."""
        return max((library.num_threads for library in self._blas.lib_controllers), default=1)

    def parts(self, rows: slice) -> list[slice]:
        threads = self._threads()
        if threads == 1 or rows.stop - rows.start < _PARALLEL_ROWS:
            return [rows]
        edges = np.linspace(rows.start, rows.stop, threads + 1).astype(int).tolist()
        return list(itertools.starmap(slice, itertools.pairwise(edges)))

    def each(self, work: Callable[[int], Result], count: int) -> list[Result]:
        if count == 1 or self._threads() == 1:
            return [work(i) for i in range(count)]
        # BLAS uses all cores for one product, but everything between two products would run on one: so each core
        # gets a part of the rows and a BLAS of its own.
        with self._blas.limit(limits=1):
            later = [self._pool.submit(work, i) for i in range(1, count)]
            try:
                return [work(0), *(task.result() for task in later)]
            finally:
                wait(later)  # nothing may go on writing once an error is out

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.empty(shape, np.float32)

    def to_device(self, x: Any) -> np.ndarray:
        return np.ascontiguousarray(x, np.float32)

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x

    def embed(self, table: np.ndarray, ids: Sequence[int]) -> np.ndarray:
        return table[np.asarray(ids)]

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        mean_square = np.vecdot(x, x)[..., None] / np.float32(x.shape[-1])
        normed = x * (1 / np.sqrt(mean_square + np.float32(eps)))
        normed *= weight
        return normed

    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        y = x @ weight.T
        if bias is not None:
            y += bias
        return y

    def rope(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
        half = x.shape[-1] // 2
        cos, sin = cos[:, None, :], sin[:, None, :]
        low, high = x[..., :half], x[..., half:]
        turned = low * cos - high * sin
        high *= cos
        high += low * sin
        low[...] = turned

    def rotate(self, x: np.ndarray, rotation: np.ndarray | None, scale: np.ndarray | None = None) -> np.ndarray:
        x = x if scale is None else x * scale
        return x if rotation is None else x @ rotation

    def silu_mul(self, gate_up: np.ndarray) -> np.ndarray:
        half = gate_up.shape[-1] // 2
        gate, up = gate_up[..., :half], gate_up[..., half:]
        # exp overflows to inf for gates below −88, where silu is 0 = gate / inf.
        with np.errstate(over="ignore"):
            y = np.exp(-gate)
        y += 1
        np.divide(gate, y, out=y)
        y *= up
        return y

    def append_kv(self, spans: Sequence[CacheSpan], k: np.ndarray, v: np.ndarray) -> None:
        for span in spans:
            start = span.position - span.now_start
            slots = slice(start, start + span.rows.stop - span.rows.start)
            span.now_k[:, slots] = k[span.rows].swapaxes(0, 1)
            span.now_v[:, slots] = v[span.rows].swapaxes(0, 1)

    def attention(
        self, q: np.ndarray, cache: LayerCache, spans: Sequence[CacheSpan], scale: float, window: int | None
    ) -> np.ndarray:
        out = np.empty(q.shape, np.float32)
        kv_heads = cache.exact_k.shape[1]
        heads, dim = q.shape[1:]
        tile = max(1, _QUERY_TILE // (heads // kv_heads))
        for span in spans:
            for first in range(span.rows.start, span.rows.stop, tile):
                rows = slice(first, min(first + tile, span.rows.stop))
                # (T, K·G, D) → (K, G, T, D): the query group of a KV head shares one pass over its keys.
                grouped = q[rows].reshape(-1, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)
                position = span.position + first - span.rows.start
                tile_out = _attend(grouped * np.float32(scale), position, cache, span, window)
                out[rows] = tile_out.transpose(2, 0, 1, 3).reshape(out[rows].shape)
        return out

    def encode_blocks(self, cache: LayerCache, blocks: Sequence[int], k: np.ndarray, v: np.ndarray) -> None:
        # One thread of BLAS for the thin products of an encoder; keys and values on a core each.
        tasks = [functools.partial(_encode_keys, cache, k), functools.partial(_encode_values, cache, v)]
        (coded_k, mean), (coded_v, _) = self.each(lambda i: tasks[i](), 2)
        for fields, values in ((cache.mean, mean), (cache.k, coded_k), (cache.v, coded_v)):
            for name in fields:
                fields[name][:, blocks] = values[name]

    def copy_exact(self, cache: LayerCache, slot: int, k: np.ndarray, v: np.ndarray) -> None:
        cache.exact_k[slot, :, : k.shape[1]] = k
        cache.exact_v[slot, :, : v.shape[1]] = v


def _attend(q: np.ndarray, position: int, cache: LayerCache, span: CacheSpan, window: int | None) -> np.ndarray:
    """Attention of q (K, G, T, D), scaled, whose first row stands at `position`, by online softmax over tiles."""
    tiles = _visible_tiles(cache, span, position, position + q.shape[2] - 1, window)
    whole = functools.reduce(_merge, (_partial(q, position, tile, window) for tile in tiles))
    return (whole.mix / whole.total).reshape(q.shape)


class _Tile(NamedTuple):
    """Keys and values that stand next to each other: k, v (K, S, D), the first of them at position `start`.

    mean: (K, S/N, D), one for each block of N keys, when they have been taken out of k; else None.
    """

    start: int
    k: np.ndarray
    v: np.ndarray
    mean: np.ndarray | None = None


class _Partial(NamedTuple):
    """Attention over some of the keys: maximum score (K, R, 1), sum of exp (K, R, 1), weighted values (K, R, D)."""

    top: np.ndarray
    total: np.ndarray
    mix: np.ndarray


def _partial(q: np.ndarray, position: int, tile: _Tile, window: int | None) -> _Partial:
    """q (K, G, T, D) over one tile, with R = G·T."""
    kv_heads, group, count, dim = q.shape
    flat = q.reshape(kv_heads, group * count, dim)
    scores = flat @ tile.k.swapaxes(1, 2)  # (K, R, S)
    if tile.mean is not None:  # q·k = q·(k − μ) + q·μ, one μ per block of N keys
        by_block = scores.reshape(*scores.shape[:2], tile.mean.shape[1], -1)
        by_block += (flat @ tile.mean.swapaxes(1, 2))[..., None]
    _mask(scores.reshape(kv_heads, group, count, -1), position, tile.start, window)
    top = scores.max(axis=-1, keepdims=True)
    scores -= _finite(top)
    np.exp(scores, out=scores)
    return _Partial(top, scores.sum(axis=-1, keepdims=True), scores @ tile.v)


def _merge(a: _Partial, b: _Partial) -> _Partial:
    """Attention over the keys of both."""
    top = np.maximum(a.top, b.top)
    fade_a, fade_b = np.exp(a.top - _finite(top)), np.exp(b.top - _finite(top))
    return _Partial(top, a.total * fade_a + b.total * fade_b, a.mix * fade_a + b.mix * fade_b)


def _finite(top: np.ndarray) -> np.ndarray:
    """0 for a row that a window lets see nothing here: exp(−inf − 0) = 0 where −inf − −inf would be NaN."""
    return np.where(np.isneginf(top), np.float32(0), top)


def _mask(scores: np.ndarray, position: int, start: int, window: int | None) -> None:
    """Hide from scores (K, G, T, S), rows from `position` and keys from `start`, what a row may not see."""
    count, size = scores.shape[2:]
    ahead = start + size - 1 > position
    behind = window is not None and start <= position + count - 1 - window
    if not (ahead or behind):
        return
    # Where nothing is behind the window, only the keys after the first row's own need a look.
    seen = 0 if behind else max(0, position + 1 - start)
    rows = position + np.arange(count)[:, None]
    keys = start + np.arange(seen, size)
    hidden = keys > rows
    if window is not None:
        hidden |= keys <= rows - window
    np.copyto(scores[..., seen:], -np.inf, where=hidden)


def _visible_tiles(cache: LayerCache, span: CacheSpan, position: int, last: int, window: int | None) -> Iterator[_Tile]:
    """Every tile that a row from `position` to `last` sees."""
    block_size = cache.exact_k.shape[2]
    oldest = 0 if window is None else max(0, position - window + 1)
    if span.sink is not None and oldest < block_size:
        yield _Tile(0, cache.exact_k[span.sink], cache.exact_v[span.sink])

    ids = np.asarray(span.table, np.intp)
    skipped = max(0, (oldest - span.table_start) // block_size)
    for first in range(skipped, len(ids), _BLOCK_TILE):
        part = ids[first : first + _BLOCK_TILE]
        yield _Tile(span.table_start + first * block_size, *_read_blocks(cache, part))

    size = last + 1 - span.now_start
    now_k, now_v = span.now_k[:, :size], span.now_v[:, :size]
    if span.now_as_codes:
        now_k, now_v = _as_codes(cache, now_k, now_v)
    skipped = max(0, (oldest - span.now_start) // _KEY_TILE * _KEY_TILE)
    for first in range(skipped, size, _KEY_TILE):
        rows = slice(first, first + _KEY_TILE)
        yield _Tile(span.now_start + first, now_k[:, rows], now_v[:, rows])


def _read_blocks(cache: LayerCache, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Decode coded blocks: k without its means (K, B·N, D), v (K, B·N, D), means (K, B, D) float32 or None."""
    kv_heads, _, dim = cache.exact_k.shape[1:]
    k = cache.codec_k.decode({field: codes.take(ids, axis=1) for field, codes in cache.k.items()})
    v = cache.codec_v.decode({field: codes.take(ids, axis=1) for field, codes in cache.v.items()})
    mean = read_mean({field: part.take(ids, axis=1) for field, part in cache.mean.items()}) if cache.mean else None
    return k.reshape(kv_heads, -1, dim), v.reshape(kv_heads, -1, dim), mean


Fields = dict[str, np.ndarray]


def _encode_keys(cache: LayerCache, k: np.ndarray) -> tuple[Fields, Fields]:
    """k (K, B, N, D) → the codec's fields, and those of the means (none when keys are not centred)."""
    mean: Fields = {}
    if cache.mean:
        k, mean = centre(k, cache.mean_bits)
    return encode_well(cache.codec_k, k, cache.metric_k), mean


def _encode_values(cache: LayerCache, v: np.ndarray) -> tuple[Fields, Fields]:
    """v (K, B, N, D) → the codec's fields; values have no means."""
    return encode_well(cache.codec_v, v, cache.metric_v), {}


def _as_codes(cache: LayerCache, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """k, v (K, S ≤ N, D) as they read back from one encoded block. A part of a block is filled up with its mean."""
    count, block_size = k.shape[1], cache.exact_k.shape[2]

    def fill(x: np.ndarray) -> np.ndarray:
        mean = np.broadcast_to(x.mean(axis=1, keepdims=True), (x.shape[0], block_size - count, x.shape[2]))
        return np.concatenate([x, mean], axis=1)[:, None]

    (coded_k, mean), (coded_v, _) = _encode_keys(cache, fill(k)), _encode_values(cache, fill(v))
    k, v = cache.codec_k.decode(coded_k)[:, 0], cache.codec_v.decode(coded_v)[:, 0]
    if mean:
        k = k + read_mean(mean)
    return k[:, :count], v[:, :count]
