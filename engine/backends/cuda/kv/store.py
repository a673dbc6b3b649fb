"""The KV store on a GPU: launches of the kernels in `cuda/kv/` and `cuda/encode/`, and of `place_kv`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from polarlm.engine import codecs, records
from polarlm.engine.backends import transfer
from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device import Addresses, Array, Device, row_stride
from polarlm.engine.backends.cuda.heads import HeadOps, Norms, Rope
from polarlm.engine.backends.cuda.kv.cache import Buffer, LayerCache, Layouts, Side, SpanTable, pack_spans
from polarlm.engine.backends.cuda.kv.candidates import candidates, path_candidates
from polarlm.engine.backends.cuda.launch import LaunchConfig, Launcher, threads_for
from polarlm.engine.backends.cuda.rotation import DeviceTransform
from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, KVLocation, SpanView
from polarlm.engine.codecs import Codec
from polarlm.engine.errors import EngineError
from polarlm.engine.quantization.encode import read_back
from polarlm.engine.quantization.metric import Metric
from polarlm.engine.records import Layout

_COPY_THREADS = 256  # of a block


class CacheOps:
    """The ops that allocate, write, encode, copy, save and restore K/V."""

    def __init__(self, device: Device, launch: Launcher, heads: HeadOps):
        self._device, self._launch, self._heads = device, launch, heads

    def cache_bytes(self, format: CacheFormat) -> tuple[int, int]:
        keys, values = self._layouts_of(format)
        launch_configs.encode_blocks(keys, values)
        full = sum(layout.nbytes for layout in self._full_layouts(format))
        return format.kv_heads * (keys.nbytes + values.nbytes), format.kv_heads * full

    def _layouts_of(self, format: CacheFormat) -> Layouts:
        return _layout(format, format.codec_k, False, format.mean_bits), _layout(format, format.codec_v, True)

    def _full_layouts(self, format: CacheFormat) -> Layouts:
        return _layout(format, codecs.get(codecs.FULL), False), _layout(format, codecs.get(codecs.FULL), True)

    def cache(self, format: CacheFormat, quantized: int, full: int, beside: Sequence[LayerCache] = ()) -> LayerCache:
        keys, values = self._layouts_of(format)
        on_card = (other for other in beside if other.device is self._device)
        known = {side.layout: side for other in on_card for side in (other.keys, other.values)}
        try:
            sides = (
                self._side(keys, format, format.metric_k, quantized, known.get(keys)),
                self._side(values, format, format.metric_v, quantized, known.get(values)),
            )
            return LayerCache(self._device, format, *sides, self._pools(format, full), self._full_layouts(format))
        except MemoryError:
            left = self._device.memory()[0] / 2**30
            raise EngineError(
                f"The KV store does not fit into the memory of {self._device.name}, of which {left:.1f} GiB are left "
                "for the next layer: choose a smaller kv_memory or ctx_size",
                "out_of_memory",
                ("kv_memory", "ctx_size"),
            ) from None

    def buffer(self, format: CacheFormat, rows: int, *, as_slots: bool = False) -> Buffer:
        return self._pools(format, -(-rows // format.block_size))

    def _pools(self, format: CacheFormat, count: int) -> Buffer:
        """Uninitialised pools of `count` full-precision records."""
        keys, values = self._full_layouts(format)
        shapes = [(count, format.kv_heads, layout.nbytes) for layout in (keys, values)]
        return Buffer(*(self._device.empty(shape, np.uint8) for shape in shapes))

    def _side(
        self, layout: Layout, format: CacheFormat, metric: Metric | None, quantized: int, like: Side | None
    ) -> Side:
        """A pool of `quantized` records; the codec's tables are those of `like` (same layout) if given."""
        if like is None:
            tables, nearest = (
                self._upload(layout.tables if layout.tables.size else None),
                self._upload(_nearest(layout)),
            )
        else:
            tables, nearest = like.tables, like.candidates
        # Kernels write only the fields of a record; the padding stays zero, also in session files.
        pool = self._device.zeros((quantized, format.kv_heads, layout.nbytes), np.uint8)
        side = Side(layout, pool, tables, nearest)
        if metric is None:
            return side

        tokens, block_size = metric.token_feedback, format.block_size
        return replace(
            side,
            feedback=self._upload(metric.feedback.swapaxes(1, 2)),
            weights=self._upload(metric.weights if layout.record.searches_paths else None),
            matrix=self._upload(metric.matrix),
            mean_query=self._upload(metric.tilt_mean),
            token_feedback=self._upload(None if tokens is None else tokens[0].reshape(block_size, block_size).T),
        )

    def _upload(self, x: np.ndarray | None) -> Array | None:
        return None if x is None else self._device.from_host(np.ascontiguousarray(x))

    def spans(self, spans: Sequence[SpanView], block_size: int) -> SpanTable:
        return pack_spans(spans, block_size)

    def append_kv(self, cache: LayerCache, spans: SpanTable, k: Array, v: Array) -> None:
        (count, width), groups = spans.table.shape, -(-(spans.most_rows + 15) // 16)
        args = (*cache.pools(spans.buffer), k, v, spans.on(self._device), width, groups, cache.format.kv_heads)
        self._launch(
            "append_kv",
            (count * groups, cache.format.kv_heads),
            LaunchConfig({}, threads_for(2 * cache.padded)),
            *(*args, row_stride(k), row_stride(v)),
            layouts=cache.full_layouts,
        )

    def place_kv(
        self,
        qkv: Array,
        rope: Rope,
        transform: DeviceTransform,
        cache: LayerCache,
        spans: SpanTable,
        norms: Norms = None,
    ) -> Array:
        (rows, heads, dim), (count, width) = qkv.shape, spans.table.shape
        is_prompt = spans.buffer is not None and rows > 1
        dense = any(rotation.matrix is not None for rotation in (transform.keys, transform.values))
        if is_prompt or dense:  # append_kv writes 16 bytes at a time where place_kv would write 2 or 4
            q, k, v = self._heads.transform_heads(qkv, rope, transform, norms)
            self.append_kv(cache, spans, k, v)
            return q
        q = self._device.empty((rows, heads - 2 * transform.kv_heads, dim), np.float32)
        outputs, span_args = (q, *cache.pools(spans.buffer)), (spans.on(self._device), width, count)
        inputs = qkv, rope, transform, norms, rows * heads
        at_most = launch_configs.step_rows(spans.most_rows)
        self._heads.launch("place_kv", outputs, *inputs, *span_args, layouts=cache.full_layouts, rows=at_most)
        return q

    def copy_full(self, cache: LayerCache, target: KVLocation, source: KVLocation, tokens: int) -> None:
        pools = (*cache.pools(target.buffer), *cache.pools(source.buffer))
        sizes = (target.block, source.block, tokens, cache.format.kv_heads)
        grid = (cache.format.kv_heads, 2)
        self._launch("copy_full", grid, LaunchConfig({}, _COPY_THREADS), *pools, *sizes, layouts=cache.full_layouts)

    def round_trip(self, cache: LayerCache, place: KVLocation, tokens: int) -> None:
        """Encoded and decoded on the host: only `Engine.score` with every token coded uses it."""
        format, layouts = cache.format, cache.full_layouts
        pools, full = cache.pools(place.buffer), []
        for pool, layout in zip(pools, layouts, strict=True):
            fields, _ = layout.unpack(self._device.to_host(pool[place.block]))
            full.append(fields["values"][:, :tokens].astype(np.float32))
        halves = np.zeros((2, format.kv_heads, format.block_size, format.head_dim), np.float16)
        k, v = full
        halves[0, :, :tokens] = read_back(format.codec_k, k, format.metric_k, format.block_size, format.mean_bits)
        halves[1, :, :tokens] = read_back(format.codec_v, v, format.metric_v, format.block_size)
        quantized = (self._upload(layout.pack({"values": x})[None]) for layout, x in zip(layouts, halves, strict=True))
        self.copy_full(cache, place, KVLocation(Buffer(*quantized), 0), tokens)

    def encode_blocks(self, filled: Sequence[FilledBlocks]) -> None:
        alike: dict[tuple[Layouts, int], list[tuple[LayerCache, Buffer, np.ndarray]]] = {}
        for caches, blocks, sources in filled:
            moves = np.array([[source.block for source in sources], blocks], np.int32).T
            for cache in caches:
                layer = cache, cache.pools(sources[0].buffer), moves
                alike.setdefault((cache.layouts, cache.format.kv_heads), []).append(layer)
        for (layouts, heads), layers in alike.items():
            rows = [cache.values.arrays(full.v) for cache, full, _ in layers]
            rows += [cache.keys.arrays(full.k) for cache, full, _ in layers]
            pairs = 2 * [moves for _, _, moves in layers]  # of slots and blocks, for each row
            numbers = np.repeat(np.arange(len(rows), dtype=np.int32), [len(moves) for moves in pairs])
            jobs = np.column_stack([numbers, np.concatenate(pairs)])
            args = Addresses(rows, written=1), self._upload(jobs), len(layers), heads
            config = launch_configs.encode_blocks(*layouts)
            self._launch("encode_blocks", (len(jobs), heads), config, *args, layouts=layouts)

    def read_blocks(self, cache: LayerCache, blocks: Sequence[int]) -> dict[str, np.ndarray]:
        arrays = {}
        for name, pool in (("keys", cache.keys.quantized), ("values", cache.values.quantized)):
            gathered = self._device.empty((len(blocks), *pool.shape[1:]), np.uint8)
            self._copy_records(gathered, pool, np.asarray(blocks), np.arange(len(blocks)))
            arrays[name] = self._device.to_host(gathered)
        return arrays

    def write_blocks(self, cache: LayerCache, blocks: Sequence[int], arrays: Mapping[str, np.ndarray]) -> None:
        given = transfer.converted(cache.format, len(blocks), arrays, transfer.RECORDS)
        for name, pool in (("keys", cache.keys.quantized), ("values", cache.values.quantized)):
            self._copy_records(pool, self._upload(given[name]), np.arange(len(blocks)), np.asarray(blocks))

    def read_full(self, cache: LayerCache, slot: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = (
            layout.unpack(self._device.to_host(pool[slot]))[0]["values"][:, :tokens]
            for pool, layout in zip(cache.full, cache.full_layouts, strict=True)
        )
        return k, v

    def write_full(self, cache: LayerCache, slot: int, k: np.ndarray, v: np.ndarray) -> None:
        format = cache.format
        tokens = transfer.full_tokens(format, k, v)
        for pool, layout, given in zip(cache.full, cache.full_layouts, (k, v), strict=True):
            block = np.zeros((format.kv_heads, format.block_size, format.head_dim), np.float32)
            block[:, :tokens] = given
            record = layout.pack(codecs.get(codecs.FULL).encode(block))
            self._copy_records(pool, self._upload(record), np.zeros(1), np.full(1, slot))

    def _copy_records(self, to: Array, pool: Array, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy records `sources` of `pool` to records `targets` of the pool `to`."""
        moves = self._upload(np.stack([sources, targets], axis=1).astype(np.int32))
        bytes_each = to.shape[1] * to.shape[2]
        self._launch("copy_records", (len(sources),), LaunchConfig({}, _COPY_THREADS), to, pool, moves, bytes_each)


@functools.cache
def _nearest(layout: Layout) -> np.ndarray | None:
    """The candidates of the codec's points, if it has points in the plane. They take a while to find."""
    points = layout.record.points
    if points is None or points.shape[1] == 1:
        return None
    return path_candidates(points) if layout.record.searches_paths else candidates(points)


def _layout(format: CacheFormat, codec: Codec, values: bool, mean_bits: int = 0) -> Layout:
    return records.layout(codec, values, format.block_size, format.head_dim, mean_bits)
