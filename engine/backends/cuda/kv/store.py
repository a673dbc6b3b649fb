"""The KV store on a GPU: launches of the kernels in `cuda/kv/` and `cuda/encode/`, and of `place_kv`; and the
candidates for the nearest point of a codec's table, which `cuda/encode/encode_blocks.cu` reads: a short list for every
cell of a grid.

A pair is compared only with the candidates of its cell, which finds the same point as a comparison with all points.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device import Addresses, Array, row_stride
from polarlm.engine.backends.cuda.heads import DeviceTransform, HeadOps
from polarlm.engine.backends.cuda.kv.cache import BatchTables, Buffer, LayerCache, SideArrays, SpanTable
from polarlm.engine.backends.cuda.launch import LaunchConfig, threads_for
from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, HeadRule, KVLocation, Move, RecordedSpans, Rope
from polarlm.engine.codecs.parts.nearest import can_win
from polarlm.engine.errors import EngineError
from polarlm.engine.quantization.encode import read_back
from polarlm.engine.quantization.metric import Metric, residue_costs
from polarlm.engine.records import Layout, Layouts

_CELLS = 64  # cells along each axis of the square [−4, 4)²
_SIDE = 8 / _CELLS
_MANY = 256  # with up to this many points a cell has room for four candidates, else for twelve

ALL = 0xFFFF  # marks a cell whose list does not fit: the kernel compares with every point


def candidates(points: np.ndarray) -> np.ndarray:
    """points (P, 2) float32 → (64, 64, 4) uint16, or (64, 64, 12) if P > 256: ascending codes of the points that can be
    nearest somewhere in a cell, padded with the first."""
    room = 4 if len(points) <= _MANY else 12
    centres = (np.moveaxis(np.indices((_CELLS, _CELLS)), 0, -1).reshape(-1, 2) + 0.5) * _SIDE - 4
    lists = np.empty((len(centres), room), np.uint16)
    for row, winners in zip(lists, can_win(points, centres, _SIDE), strict=True):
        codes = np.flatnonzero(winners)
        row[:] = ALL if len(codes) > room else np.pad(codes, (0, room - len(codes)), constant_values=codes[0])
    return lists.reshape(_CELLS, _CELLS, room)


_SomeLayouts = tuple[Layout | None, Layout | None]

_COPY_THREADS = 256  # a CTA has


class CacheOps(HeadOps):
    """The ops that allocate, write, encode, copy, save and restore K/V."""

    def cache_bytes(self, format: CacheFormat) -> tuple[int, int]:
        sides = len(format.sides)
        keys, values = transfer.layouts(format)
        configs = [launch_configs.encode_blocks(keys, values), launch_configs.encode_rows(keys, True)]
        configs += [launch_configs.encode_rows(side, False) for side in (keys, values)]
        if max(one.shared for one in configs if one) > self._device.shared_memory - launch_configs.SYSTEM_BYTES:
            raise ValueError(
                f"Blocks of {format.block_size} latent vectors in {format.codec_k.name} are too large for the shared "
                "memory of this GPU: choose a cache type with fewer bits, such as ring3."
            )
        codes, full = (
            format.kv_heads * sum(layout.nbytes for layout in layouts[:sides])
            for layouts in ((keys, values), _full_layouts(format))
        )
        return codes, full

    def cache(
        self, format: CacheFormat, quantized: int, full: int, earlier_caches: Sequence[LayerCache] = ()
    ) -> LayerCache:
        layouts = transfer.layouts(format)
        on_device = [other for other in earlier_caches if other.device is self._device]
        try:
            # Kernels write only the fields of a record; the padding stays zero, also in session files.
            shapes = [(quantized, format.kv_heads, layout.nbytes) for layout in layouts[: len(format.sides)]]
            pools = [self._device.zeros(shape, np.uint8) for shape in shapes]
            keys, values = self._sides(layouts, format, pools, on_device)
            slots, number = self._pools(format, full), len(on_device)
            return LayerCache(self._device, format, layouts, keys, values, slots, _full_layouts(format), number=number)
        except MemoryError:
            left = self._device.memory()[0] / 2**30
            raise EngineError(
                f"The KV store does not fit into the memory of {self._device.name}, of which {left:.1f} GiB are left "
                "for the next layer: choose a smaller kv_memory or ctx_size",
                "out_of_memory",
                ("kv_memory", "ctx_size"),
            ) from None

    def buffer(self, format: CacheFormat, rows: int, *, as_slots: bool = False, layers: int = 1) -> Any:
        """A `PromptBuffer`; of several GPUs, on each of them."""
        count = -(-rows // format.block_size)
        k, v = self._pools(format, layers * count)
        parts = (slice(first, first + count) for first in range(0, layers * count, count))
        return [Buffer(k[part], v[part]) for part in parts]

    def _pools(self, format: CacheFormat, count: int) -> Buffer:
        """Uninitialised pools of `count` full-precision records."""
        shapes = [(count, format.kv_heads, layout.nbytes) for layout in _full_layouts(format)[: len(format.sides)]]
        k, *v = (self._device.empty(shape, np.uint8) for shape in shapes)
        return Buffer(k, v[0] if v else k)

    def _sides(
        self, layouts: Layouts, format: CacheFormat, pools: Sequence[Array], earlier_caches: Sequence[LayerCache]
    ) -> list[SideArrays]:
        """Keys and values, with pools of their records. earlier_caches: caches whose codecs' tables they may have."""
        tables_by_layout = {
            layout: side
            for other in earlier_caches
            for layout, side in zip(other.layouts, (other.keys, other.values), strict=True)
        }
        sides = zip(pools, layouts, (format.metric_k, format.metric_v), strict=False)
        made = [self._side(pool, layout, metric, tables_by_layout.get(layout)) for pool, layout, metric in sides]
        return made if len(made) == 2 else made * 2

    def _side(self, pool: Array, layout: Layout, metric: Metric | None, like: SideArrays | None) -> SideArrays:
        """A side with `pool`; the codec's tables are shared with `like` (same layout) if given."""
        if like is None:
            tables = layout.record.tables
            like = SideArrays(
                pool, None, self._upload(tables if tables.size else None), self._upload(_candidates_of(layout))
            )
        arrays = SideArrays(pool, None, like.tables, like.candidates)
        if metric is None:
            return arrays
        factor, residues = residue_costs(metric, layout.record.constants["WIDTH"])
        return arrays._replace(
            feedback=self._upload(feedback_tiles(factor)),
            mean_query=self._upload(metric.tilt_mean),
            residues=self._upload(residues),
        )

    def _upload(self, x: np.ndarray | None) -> Array | None:
        return None if x is None else self._device.from_host(np.ascontiguousarray(x))

    def append_kv(self, cache: LayerCache, spans: SpanTable | BatchTables, k: Array, v: Array) -> None:
        for table in filter(None, spans.parts):
            (count, width), groups = table.shape, -(-(table.most_rows + 15) // 16)
            k_pool, v_pool = cache.pools(table.buffer)
            args = (
                *((k_pool, None, k, None) if cache.format.codec_v is None else (k_pool, v_pool, k, v)),
                table.device_table(self._device),
                width,
                groups,
                cache.format.kv_heads,
            )
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
        rule: HeadRule,
        cache: LayerCache,
        spans: SpanTable | BatchTables | RecordedSpans,
    ) -> Array:
        transform: DeviceTransform = rule.transform
        rows, heads, dim = qkv.shape
        if isinstance(spans, RecordedSpans):
            q, k, v = self.transform_heads(qkv, rope, rule)
            has_values, first = row_stride(v) == v[0].size, heads - transform.kv_heads
            # A replay appends to the spans of the batch that it runs for.
            spans.pending = (
                lambda k, v: self.append_kv(cache, spans.spans, k, v if has_values else v[:, first:]),
                (k, v if has_values else qkv),
            )
            return q
        is_prompt = spans.parts[0] is not None and rows > 1
        is_dense = transform.keys.matrix is not None or transform.values.matrix is not None
        if (
            is_prompt or is_dense or transform.sides == 1
        ):  # append_kv writes 16 bytes at a time where place_kv would write 2 or 4
            q, k, v = self.transform_heads(qkv, rope, rule)
            self.append_kv(cache, spans, k, v)
            return q
        q = self._device.empty((rows, heads - 2 * transform.kv_heads, dim), np.float32)
        assert isinstance(spans, SpanTable)
        count, width = spans.table.shape
        outputs, span_args = (q, *cache.pools(spans.buffer)), (spans.device_table(self._device), width, count)
        inputs = qkv, rope, rule, rows * heads
        at_most = launch_configs.step_rows(spans.most_rows)
        self._launch_heads("place_kv", outputs, *inputs, *span_args, layouts=cache.full_layouts, rows=at_most)
        return q

    def copy_full(self, caches: Sequence[LayerCache], moves: Sequence[Move]) -> None:
        target_pool, source_pool, one = moves[0].target.buffer, moves[0].source.buffer, caches[0]
        pools = Addresses([(*cache.pools(target_pool), *cache.pools(source_pool)) for cache in caches], written=2)
        blocks = [(target.block, source.block, tokens) for target, source, tokens in moves]
        args = pools, self._upload(np.array(blocks, np.int32)), len(moves), one.format.kv_heads
        grid = len(caches) * len(moves), one.format.kv_heads, 1 if one.format.codec_v is None else 2
        self._launch("copy_full", grid, LaunchConfig({}, _COPY_THREADS), *args, layouts=one.full_layouts)

    def round_trip(self, cache: LayerCache, place: KVLocation, tokens: int) -> None:
        """Encoded and decoded on the host: only `Engine.score` with every token coded uses it."""
        format, layouts = cache.format, cache.full_layouts
        assert format.codec_v is not None
        pools, full = cache.pools(place.buffer), []
        for pool, layout in zip(pools, layouts, strict=True):
            fields, _ = layout.unpack(self._device.to_host(pool[place.block]))
            full.append(fields["values"][:, :tokens].astype(np.float32))
        halves = np.zeros((2, format.kv_heads, format.block_size, format.head_dim), np.float16)
        k, v = full
        halves[0, :, :tokens] = read_back(format.codec_k, k, format.metric_k, format.block_size, format.mean_bits)
        halves[1, :, :tokens] = read_back(format.codec_v, v, format.metric_v, format.block_size)
        quantized = (self._upload(layout.pack({"values": x})[None]) for layout, x in zip(layouts, halves, strict=True))
        self.copy_full([cache], [Move(place, KVLocation([Buffer(*quantized)], 0), tokens)])

    def encode_blocks(self, groups: Sequence[FilledBlocks]) -> None:
        launches: dict[tuple[str, tuple, _SomeLayouts, int], list[tuple[int, SideArrays, np.ndarray]]] = {}
        for caches, blocks, sources in groups:
            moves = np.array([[source.block for source in sources], blocks], np.int32).T
            for cache in caches:
                sides = zip((cache.keys, cache.values), cache.pools(sources[0].buffer), strict=True)
                for number, (side, pool) in enumerate(sides):
                    if number and cache.format.codec_v is None:
                        break
                    kind = *_encoder(side, number, cache.layouts), cache.format.kv_heads
                    launches.setdefault(kind, []).append((number, side._replace(full=pool), moves))
        for (kernel, config_args, layouts, heads), rows in launches.items():
            rows.sort(key=lambda row: row[0])  # keys come first
            numbers = np.repeat(np.arange(len(rows), dtype=np.int32), [len(moves) for *_, moves in rows])
            jobs = np.column_stack([numbers, np.concatenate([moves for *_, moves in rows])])
            args = [Addresses([side for _, side, _ in rows], written=1), self._upload(jobs), heads]
            if kernel == "encode_blocks":
                args.insert(2, sum(number == 0 for number, *_ in rows))
            config = getattr(launch_configs, kernel)(*config_args)
            self._launch(kernel, (len(jobs), heads), config, *args, layouts=layouts)

    def read_blocks(self, cache: LayerCache, blocks: Sequence[int]) -> dict[str, np.ndarray]:
        pools = ("keys", cache.keys.quantized), ("values", cache.values.quantized)
        return {name: self._gather_records(pool, blocks) for name, pool in pools[: len(cache.format.sides)]}

    def _gather_records(self, pool: Array, blocks: Sequence[int]) -> np.ndarray:
        copied_records = self._device.empty((len(blocks), *pool.shape[1:]), np.uint8)
        self._copy_records(copied_records, pool, np.asarray(blocks), np.arange(len(blocks)))
        return self._device.to_host(copied_records)

    def write_blocks(self, cache: LayerCache, blocks: Sequence[int], arrays: Mapping[str, np.ndarray]) -> None:
        stored = transfer.convert_blocks(cache.format, len(blocks), arrays, transfer.RECORDS)
        for pool, raw in zip((cache.keys.quantized, cache.values.quantized), stored.values(), strict=False):
            self._copy_records(pool, self._upload(raw), np.arange(len(blocks)), np.asarray(blocks))

    def read_full(self, cache: LayerCache, slot: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = (
            layout.unpack(self._device.to_host(pool[slot]))[0]["values"][:, :tokens]
            for pool, layout in zip(cache.full, cache.full_layouts, strict=True)
        )
        return k, v

    def write_full(self, cache: LayerCache, slot: int, k: np.ndarray, v: np.ndarray) -> None:
        format = cache.format
        for pool, layout, x in zip(cache.full, cache.full_layouts, transfer.slot_halves(format, k, v), strict=True):
            block = np.zeros((format.kv_heads, format.block_size, format.head_dim), np.float16)
            block[:, : x.shape[1]] = x
            record = layout.pack({"values": block})
            self._copy_records(pool, self._upload(record), np.zeros(1), np.full(1, slot))

    def _copy_records(self, target_pool: Array, pool: Array, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy records `sources` of `pool` to records `targets` of the pool `target_pool`."""
        moves = self._upload(np.stack([sources, targets], axis=1).astype(np.int32))
        bytes_each = target_pool.shape[1] * target_pool.shape[2]
        self._launch(
            "copy_records", (len(sources),), LaunchConfig({}, _COPY_THREADS), target_pool, pool, moves, bytes_each
        )


def _encoder(side: SideArrays, number: int, layouts: Layouts) -> tuple[str, tuple, _SomeLayouts]:
    """The kernel that encodes the keys (number 0) or the values of a layer, the arguments of its `launch_configs`, and
    the layouts that it is made for."""
    if side.residues is None:
        return "encode_blocks", layouts, layouts
    config_args = layouts[number], side.mean_query is not None
    return "encode_rows", config_args, (None, layouts[1]) if number else (layouts[0], None)


def feedback_tiles(factor: np.ndarray) -> np.ndarray:
    """Return F (K, D, D) as `cuda/encode/encode_rows.cu` has it: uint32 (K, D / 8, D / 8, 8, 4, 2), pairs of halves."""
    heads, groups, high = len(factor), factor.shape[1] // 8, factor.astype(np.float16)
    pairs = np.stack([high, (factor - high.astype(np.float32)).astype(np.float16)]).view(np.uint32)
    return pairs.reshape(2, heads, groups, 8, groups, 4).transpose(1, 4, 2, 3, 5, 0)


@functools.cache
def _candidates_of(layout: Layout) -> np.ndarray | None:
    """The candidates of the codec's points, if it has points in the plane. They take a while to find."""
    points = layout.record.points
    if points is None or points.shape[1] == 1:
        return None
    return candidates(points)


def _full_layouts(format: CacheFormat) -> Layouts:
    keys, values = transfer.layouts(format)
    return keys.full, values.full
