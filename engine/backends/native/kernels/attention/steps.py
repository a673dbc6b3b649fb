"""Attention of a step's rows directly over codes, by online softmax over blocks.

The blocks of a sequence are cut into chunks (`engine.backends.native.attention_ops.step_table`). Each chunk gives a
partial result (`engine.backends.native.kernels.attention.partials`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.codecs.parts.expanded_tiles import ExpandedTiles
from polarlm.engine.backends.native.kernels.attention import blocks
from polarlm.engine.backends.native.kernels.attention.blocks import Query
from polarlm.engine.backends.native.kernels.attention.partials import (
    LOWEST,
    WEIGHTED,
    FullBlock,
    SpanHeader,
    Unit,
    full_chunk_blocks,
    padded,
    partial_bytes,
)
from polarlm.engine.backends.native.kernels.attention.prompts import DecodingSpec
from polarlm.engine.backends.native.kernels.multiply import pieces
from polarlm.engine.jit.lang import F32, I8, I16, I32, I64, Emitter, Kernel, Value, Values, vector
from polarlm.engine.jit.lang.records import Float32, Int64, Pointer, read
from polarlm.engine.jit.run.workers import SCRATCH

_F16 = vector(F32, 16)
_TILE_TOKENS = 256  # tokens per step of the softmax, but at least a block
_BYTES_AHEAD = 6144  # prefetch distance, in tiles as they are read: the keys of a softmax step, then its values


@dataclass(frozen=True)
class AttentionSpec(DecodingSpec):
    """The properties that a kernel is specialized for, in addition to those of its blocks.

    group: query heads of a KV head. query_tile: queries that share a pass over the blocks. is_capped: whether scores
    have a soft cap. expanded_tiles: what the blocks of a chunk become before the passes over them; None if each pass
    reads codes. Results are the same.
    """

    group: int
    query_tile: int
    is_capped: bool = False
    expanded_tiles: ExpandedTiles | None = None

    @property
    def block_tile(self) -> int:
        """Quantized blocks per step of the softmax."""
        return max(1, _TILE_TOKENS // self.block_size)

    @property
    def tiles_ahead(self) -> int:
        """Prefetch distance in tiles."""
        return max(1, min(self.block_tile, round(_BYTES_AHEAD / self.keys.nbytes)))

    @property
    def name(self) -> str:
        sizes = f"{self.block_size}x{self.head_dim}_group{self.group}_pass{self.query_tile}"
        more = "_capped" * self.is_capped + "_expanded" * (self.expanded_tiles is not None)
        return f"attention_{self.tile_names}_mean{self.mean_bits}_{sizes}{more}"

    @property
    def most_blocks(self) -> int:
        """Blocks of a chunk that there is room for."""
        assert self.expanded_tiles is not None
        return (SCRATCH - expanded_at(self)) // self.expanded_tiles.nbytes


def query_bytes(spec: AttentionSpec) -> int:
    """Bytes of a query of a pass."""
    return 2 * padded(spec.head_dim) + spec.keys.query_bytes + 4 * spec.block_size * spec.block_tile


def expanded_at(spec: AttentionSpec) -> int:
    """Offset of expanded blocks in scratch: behind queries, and the keys of `blocks.full_scores`."""
    return spec.query_tile * query_bytes(spec) + 64 * spec.head_dim


def query_tile_of(group: int, rows: int, most: int) -> int:
    """The query tile for `rows` rows: one row's tile, which is compiled already, unless it is small. most: its most."""
    size = -(-group // -(-group // most))
    return size if rows == 1 or 2 * size > most else most


class AttendArguments(NamedTuple):
    q: Pointer
    parts: Pointer
    keys: Pointer
    values: Pointer
    mean: Pointer
    mean_scale: Pointer
    full_k: Pointer
    full_v: Pointer
    headers: Pointer
    table: Pointer
    full: Pointer
    units: Pointer
    kv_heads: Int64
    blocks: Int64
    width: Int64
    most_full: Int64
    most_chunks: Int64
    window: Int64
    scale: Float32
    softcap: Float32


@cache
def attend(spec: AttentionSpec, body: type[StepBody] | None = None) -> Kernel[AttendArguments]:
    """Partial results of the chunks of sequences, one unit per chunk and KV head. body: another one than `StepBody`.

    q (T, H, D) float32. parts (T, H, most_chunks): partial results. keys, values: tiles (K, blocks). mean, mean_scale
    (K, blocks, …): the block means. full_k, full_v (slots, K, N, D) float16. headers, table, full, units: `Arrays` of a
    `StepTable`; width and most_full: its W and F.
    A row at position p sees positions > p − window. scale: multiplies the scores. softcap: c, by
    which scores s become c · tanh(s / c), if the kernel is specialized for one.
    """

    def emit(e: Emitter, args: AttendArguments, begin: Value, end: Value, scratch: Value) -> None:
        (body or StepBody)(e, spec, args, scratch).units(begin, end)

    return Kernel(spec.name, emit, AttendArguments)


class StepBody:
    def __init__(self, e: Emitter, spec: AttentionSpec, args: AttendArguments, scratch: Value) -> None:
        self.e, self.spec, self.args, self.scratch = e, spec, args, scratch

    def units(self, begin: Value, end: Value) -> None:
        e, spec, args = self.e, self.spec, self.args
        with e.loop(begin, end) as unit:
            sequence, chunk = read(e, Unit, args.units, unit // args.kv_heads)
            self.head = unit % args.kv_heads
            self.next_unit = e.imin(unit + 1, end - 1)
            self.header = read(e, SpanHeader, args.headers, sequence)
            table = args.table + sequence * args.width * 8
            begin = self.chunk_begin = (chunk - self.header.first_quantized) * self.header.chunk_blocks
            end = e.imin(begin + self.header.chunk_blocks, self.header.quantized)
            has_codes = (begin >= 0) & (begin < end)
            if spec.expanded_tiles is not None:
                with e.when(has_codes):
                    self.expand(spec.expanded_tiles, table, self.first_seen(begin, e.i64(0)), end)
            with e.loop(0, self.header.rows * spec.group, spec.query_tile) as first:
                self.open(first)
                with e.when(chunk < self.header.first_quantized):
                    first_full = chunk * full_chunk_blocks(spec.block_size)
                    end_full = e.imin(first_full + full_chunk_blocks(spec.block_size), self.header.full)
                    self.attend_to_full_blocks(self.full_of(sequence), first_full, end_full)
                with e.when(has_codes):
                    self.attend_to_codes(table, self.first_seen(begin, first), end)
                self.close(first, chunk)

    def first_seen(self, begin: Value, first: Value) -> Value:
        """The first quantized block from `begin` on that query `first` of the sequence sees."""
        e, spec = self.e, self.spec
        oldest = self.header.position + first // spec.group - self.args.window + 1 - self.header.table_start
        return e.imax(begin, e.imax(oldest, 0) // spec.block_size)

    def place(self, first: Value, number: int | Value) -> tuple[Value, Value]:
        """For query `number` of the pass that starts at query `first`: its row in the sequence, its index in (T, H).
        The sequence's last query is repeated to fill a pass up."""
        e, spec = self.e, self.spec
        query = e.imin(first + number, self.header.rows * spec.group - 1)
        row = query // spec.group
        heads = self.args.kv_heads * spec.group
        return row, (self.header.first_row + row) * heads + self.head * spec.group + query % spec.group

    def full_of(self, sequence: Value) -> Value:
        """A sequence's blocks in full precision, a `FullBlock` each."""
        return self.args.full + sequence * self.args.most_full * (8 * len(FullBlock._fields))

    def full_offset(self, slot: Value, head: Value) -> Value:
        """Of a block of a KV head in full precision."""
        return (slot * self.args.kv_heads + head) * (2 * self.spec.block_size * self.spec.head_dim)

    # -- queries and results -----------------------------------------------------------------------------------

    def open(self, first: Value) -> None:
        """Begin a pass with the queries from query `first` of the sequence on, scaled."""
        e, spec = self.e, self.spec
        size = padded(spec.head_dim)
        self._queries: list[Query] = []
        for number in range(spec.query_tile):
            row, index = self.place(first, number)
            address = self.scratch + number * query_bytes(spec)
            query = Query(
                vector=address,
                weighted=address + size,
                prepared=address + 2 * size,
                scores=address + (2 * size + spec.keys.query_bytes),
                position=self.header.position + row,
                row_max=e.variable(e.constant(F32, LOWEST)),
                row_sum=e.variable(e.zero(_F16)),
            )
            self._queries.append(query)
            source = self.args.q + index * (4 * spec.head_dim)
            for offset in range(0, size, 64):
                e.store(e.zero(_F16), query.weighted, offset)
            if spec.head_dim % 16:
                e.store(e.zero(_F16), query.vector, size - 64)
            for channel, lanes in pieces(spec.head_dim):
                x = e.load(source, vector(F32, lanes), 4 * channel)
                e.store(x * self.args.scale, query.vector, 4 * channel)

    def close(self, first: Value, chunk: Value) -> None:
        """Write the partial results of a pass."""
        e, args, size = self.e, self.args, partial_bytes(self.spec.head_dim)
        for number, query in enumerate(self._queries):
            with e.when(first + number < self.header.rows * self.spec.group):
                _, index = self.place(first, number)
                target = args.parts + (index * args.most_chunks + chunk) * size
                e.store(query.row_max.get(), target)
                e.store(e.sum_lanes(query.row_sum.get()), target, 4)
                for offset in range(0, size - WEIGHTED, 64):
                    e.store(e.load(query.weighted, _F16, offset), target, WEIGHTED + offset)

    # -- quantized blocks --------------------------------------------------------------------------------------

    def tiles_of_head(self) -> tuple[Value, Value]:
        """The first tile of the KV head's keys, and of its values."""
        keys, values, first = self.spec.keys, self.spec.values, self.head * self.args.blocks
        assert values is not None
        return self.args.keys + first * keys.nbytes, self.args.values + first * values.nbytes

    def expand(self, tiles: ExpandedTiles, table: Value, begin: Value, end: Value) -> None:
        """Expand blocks of the chunk, each to its place in it: keys, then values."""
        e, spec, (keys, values) = self.e, self.spec, self.tiles_of_head()
        assert spec.values is not None
        with e.loop(begin, end) as number:
            block, next_block = (e.load(table + i * 8, I64) for i in (number, e.imin(number + 1, end - 1)))
            own_keys, own_values = self.expanded_block(tiles, number)
            key_tile, next_key_tile = (keys + i * spec.keys.nbytes for i in (block, next_block))
            tiles.keys.emit(e, key_tile, next_key_tile, own_keys)
            value_tile, next_value_tile = (values + i * spec.values.nbytes for i in (block, next_block))
            tiles.values.emit(e, value_tile, next_value_tile, own_values)

    def expanded_block(self, tiles: ExpandedTiles, number: Value) -> tuple[Value, Value]:
        """The keys and the values of a block of the chunk, expanded; number: of the block in the table."""
        keys = self.scratch + expanded_at(self.spec) + (number - self.chunk_begin) * tiles.nbytes
        return keys, keys + tiles.keys.nbytes

    def attend_to_codes(self, table: Value, begin: Value, end: Value) -> None:
        """Attend to the quantized blocks `begin` to `end` of a table of ids, several per softmax step: its dependency
        chain is hidden by independent blocks."""
        e, spec, args, header, queries = self.e, self.spec, self.args, self.header, self._queries
        assert spec.values is not None
        keys, values = self.tiles_of_head()
        key_bytes, value_bytes = spec.keys.nbytes, spec.values.nbytes
        for query in queries:
            spec.keys.emit_query(e, query.vector, query.prepared)
        with e.loop(begin, end, spec.block_tile) as number:
            ids, count = table + number * 8, e.imin(end - number, spec.block_tile)
            with e.loop(0, count) as i:
                block, offset = e.load(ids + i * 8, I64), i * (4 * spec.block_size)
                scores = [query.scores + offset for query in queries]
                next_number = i + spec.tiles_ahead
                are_keys = next_number < count
                next_block = e.load(
                    ids + e.select(are_keys, next_number, e.imin(next_number - count, count - 1)) * 8, I64
                )
                prefetch_address = e.select(are_keys, keys + next_block * key_bytes, values + next_block * value_bytes)
                self._block_scores(queries, keys, number + i, block, prefetch_address, scores)
            start = header.table_start + number * spec.block_size
            lows = [query.position - args.window + 1 - start for query in queries]
            tokens = count * spec.block_size
            if spec.is_capped:
                blocks.cap_scores(e, queries, tokens, spec.block_size, args.softcap)
            with e.when(lows[-1] > 0):  # rows are in order of position
                blocks.mask(e, queries, lows, [tokens] * len(queries), tokens)
            blocks.softmax(e, queries, tokens, spec.block_size, spec.head_dim)
            with e.loop(0, count) as i:
                block, offset = e.load(ids + i * 8, I64), i * (4 * spec.block_size)
                weights = [query.scores + offset for query in queries]
                next_number = i + spec.tiles_ahead
                next_block = e.load(table + e.imin(number + next_number, header.quantized - 1) * 8, I64)
                are_values = next_number < count
                prefetch_address = e.select(
                    are_values, values + next_block * value_bytes, keys + next_block * key_bytes
                )
                weighted = [query.weighted for query in queries]
                if spec.expanded_tiles is None:
                    spec.values.emit_values(e, values + block * value_bytes, prefetch_address, weights, weighted)
                else:
                    _, tile = self.expanded_block(spec.expanded_tiles, number + i)
                    spec.expanded_tiles.values.emit_values(e, tile, weights, weighted)

    def _block_scores(
        self,
        queries: Sequence[Query],
        keys: Value,
        number: Value,
        block: Value,
        prefetch_address: Value,
        scores: Values,
    ) -> None:
        """Scores q·k + q·μ of each query with the keys of a block, whose mean is μ → N float32 at each of `scores`.
        number: of the block in the table. prefetch_address: a tile to prefetch."""
        e, spec = self.e, self.spec
        prepared = [query.prepared for query in queries]
        if spec.expanded_tiles is not None:
            means = self._mean_scores(queries, self.head * self.args.blocks + block) if spec.mean_bits else None
            tile, _ = self.expanded_block(spec.expanded_tiles, number)
            spec.expanded_tiles.keys.emit_scores(e, tile, prepared, scores, means)
            return
        spec.keys.emit_scores(e, keys + block * self.spec.keys.nbytes, prefetch_address, prepared, scores)
        if not spec.mean_bits:
            return
        means = self._mean_scores(queries, self.head * self.args.blocks + block)
        for more, address in zip(means, scores, strict=True):
            for offset in range(0, 4 * spec.block_size, 64):
                e.store(e.load(address, _F16, offset) + more, address, offset)

    def _mean_scores(self, queries: Sequence[Query], block: Value) -> list[Value]:
        e, bits, dim = self.e, self.spec.mean_bits, self.spec.head_dim
        address = self.args.mean + block * (dim * bits // 8)
        sums = [e.zero(F32) for _ in queries]
        wide = [e.zero(_F16) for _ in queries]
        for channel, lanes in pieces(dim):
            if bits == 8:
                mean = e.load(address, vector(I8, lanes), channel).sext(I32).to_float()
            else:
                mean = e.half_to_float(e.load(address, vector(I16, lanes), 2 * channel))
            for number, query in enumerate(queries):
                x = e.load(query.vector, vector(F32, lanes), 4 * channel)
                if lanes == 16:
                    wide[number] = e.fma(x, mean, wide[number])
                else:
                    sums[number] = sums[number] + e.sum_lanes(x * mean)
        if dim >= 16:
            sums = [total + e.sum_lanes(lanes) for total, lanes in zip(sums, wide, strict=True)]
        if bits == 8:
            scale = e.half_to_float(e.load(self.args.mean_scale + block * 2, I16))
            sums = [total * scale for total in sums]
        return sums

    # -- blocks in full precision ------------------------------------------------------------------------------

    def attend_to_full_blocks(self, full: Value, begin: Value, end: Value) -> None:
        """Attend to the blocks `begin` to `end` of `full_of`."""
        e, spec, args, n, dim = self.e, self.spec, self.args, self.spec.block_size, self.spec.head_dim
        queries, next_unit = self._queries, read(e, Unit, args.units, self.next_unit // args.kv_heads)
        next_first = next_unit.chunk * full_chunk_blocks(n)  # units in full precision come last
        next_slot = read(e, FullBlock, self.full_of(next_unit.sequence), next_first).slot
        next_number = args.full_k + self.full_offset(next_slot, self.next_unit % args.kv_heads)
        with e.loop(begin, end) as number:
            slot, start = read(e, FullBlock, full, number)
            lows = [query.position - args.window + 1 - start for query in queries]
            highs = [query.position + 1 - start for query in queries]
            count = e.imin(highs[-1], n)  # rows are in order of position
            with e.when(count > e.imax(lows[0], 0)):
                offset = self.full_offset(slot, self.head)
                first, keys, values = queries[0], args.full_k + offset, args.full_v + offset
                stride = query_bytes(spec)
                places = first.vector, first.scores, len(queries), stride, self.scratch + spec.query_tile * stride
                blocks.full_scores(e, keys, values, dim, count, *places)
                if spec.is_capped:
                    blocks.cap_scores(e, queries, e.i64(n), n, args.softcap)
                blocks.mask(e, queries, lows, highs, e.i64(n))
                blocks.softmax(e, queries, e.i64(n), n, dim)
                next_block = read(e, FullBlock, full, e.imin(number + 1, end - 1)).slot
                own_keys = args.full_k + self.full_offset(next_block, self.head)
                next_keys = e.select(number + 1 < end, own_keys, next_number)
                scores, weighted = [query.scores for query in queries], [query.weighted for query in queries]
                blocks.add_full_values(e, values, next_keys, dim, count, scores, weighted)
