"""Attention of the rows of a step over codes as they lie, by online softmax over blocks.

The blocks of a sequence are cut into chunks (`engine.backends.native.spans`). Each gives a partial result
(`engine.backends.native.kernels.partials`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from polarlm.engine.backends.native.codecs import MOST_QUERIES, KeyTiles, ValueTiles
from polarlm.engine.backends.native.kernels import full_blocks
from polarlm.engine.backends.native.kernels.partials import LOWEST, MIX, padded, partial_bytes
from polarlm.engine.backends.native.kernels.rotation import pieces
from polarlm.engine.backends.native.spans import FULL, HEADER, UNIT, SpanHeader
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I8, I16, I32, I64, Value, Variable, vector

_F16 = vector(F32, 16)
_TOKENS_AT_ONCE = 256  # of a step of the softmax, at least a block
_BLOCKS_AHEAD = 4  # from the block that is read to the one that is prefetched


@dataclass(frozen=True, eq=False)
class Attention:
    """The properties that a kernel is specialized for.

    mean_bits: of the block means of keys, 0 for none. group: query heads of a KV head. at_once: queries of a pass over
    the blocks.
    """

    keys: KeyTiles
    values: ValueTiles
    mean_bits: int
    block_size: int
    head_dim: int
    group: int
    at_once: int

    @property
    def blocks_at_once(self) -> int:
        """Quantized blocks of a step of the softmax."""
        return max(1, _TOKENS_AT_ONCE // self.block_size)

    @property
    def name(self) -> str:
        sizes = f"{self.block_size}x{self.head_dim}_group{self.group}_pass{self.at_once}"
        return f"attention_{self.keys.name}_{self.values.name}_mean{self.mean_bits}_{sizes}"

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attention) and self.name == other.name


def queries_at_once(group: int, rows: int) -> int:
    """The size of passes for `rows` rows: that for one row, which is then compiled already, unless it is small."""
    size = -(-group // -(-group // MOST_QUERIES))
    return size if rows == 1 or 2 * size > MOST_QUERIES else MOST_QUERIES


@cache
def attend(spec: Attention) -> Kernel:
    """Partial results of the chunks of sequences, unit by chunk and KV head.

    q (T, H, D) float32. parts (T, H, most_chunks): partial results. keys, values: tiles (K, blocks), key_stride and
    value_stride bytes from head to head. mean, mean_scale (K, blocks, …): the block means. full_k, full_v
    (slots, K, N, D) float16. headers, table, full, units: of a `StepTable`, with rows of `width` and `most_full`. A
    row sees the positions above its own minus `window`. scale: multiplies the scores.
    """

    def emit(e: Emitter, *args: Value, begin: Value, end: Value, scratch: Value) -> None:
        _Body(e, spec, args, scratch).units(begin, end)

    pointers = (
        *("q", "parts", "keys", "values", "mean", "mean_scale", "full_k", "full_v"),
        *("headers", "table", "full", "units"),
    )
    integers = ("kv_heads", "blocks", "key_stride", "value_stride", "width", "most_full", "most_chunks", "window")
    return Kernel(spec.name, emit, pointers, integers, ("scale",))


@dataclass
class _Query:
    """A query of a pass: addresses in scratch, its row's position, and what has been found for it so far."""

    vector: Value  # times the scale of scores
    prepared: Value
    scores: Value  # of some blocks; then their weights
    mix: Value
    position: Value
    top: Variable
    total: Variable  # lanes, to be added up


class _Body:
    """Emits the kernel `attend`."""

    def __init__(self, e: Emitter, spec: Attention, args: Sequence[Value], scratch: Value) -> None:
        self.e, self.spec, self.scratch = e, spec, scratch
        self.q, self.parts, self.keys, self.values, self.mean, self.mean_scale, *rest = args
        self.full_k, self.full_v, self.headers, self.table, self.full, self.units_at, *integers, self.scale = rest
        self.kv_heads, self.blocks, self.key_stride, self.value_stride, self.width, *integers = integers
        self.most_full, self.most_chunks, self.window = integers

    def units(self, begin: Value, end: Value) -> None:
        e, spec = self.e, self.spec
        with e.loop(begin, end) as unit:
            pair = self.units_at + (unit // self.kv_heads) * (8 * UNIT)
            sequence, chunk = e.load(pair, I64), e.load(pair, I64, 8)
            self.head = unit % self.kv_heads
            self.unit_after = e.least(unit + 1, end - 1)
            words = [e.load(self.headers + sequence * (8 * HEADER), I64, 8 * i) for i in range(HEADER)]
            self.header: Any = SpanHeader._make(words)
            with e.loop(0, self.header.rows * spec.group, spec.at_once) as first:
                queries = self._queries(first)
                with e.when(chunk.equals(0)):
                    self._full_blocks(queries, self.full + sequence * self.most_full * (8 * FULL))
                with e.when(chunk > 0):
                    self._quantized_blocks(queries, self.table + sequence * self.width * 8, chunk - 1)
                self._write(queries, first, chunk)

    # -- queries and results -----------------------------------------------------------------------------------

    def _queries(self, first: Value) -> list[_Query]:
        """The queries of a pass; the last one again for those beyond the rows of the sequence."""
        e, spec = self.e, self.spec
        size = padded(spec.head_dim)
        queries = []
        for number in range(spec.at_once):
            row, index = self._place(first, number)
            at = self.scratch + number * self._stride
            query = _Query(
                vector=at,
                mix=at + size,
                prepared=at + 2 * size,
                scores=at + (2 * size + spec.keys.query_bytes),
                position=self.header.position + row,
                top=e.variable(e.constant(F32, LOWEST)),
                total=e.variable(e.zero(_F16)),
            )
            queries.append(query)
            source = self.q + index * (4 * spec.head_dim)
            for offset in range(0, size, 64):
                e.store(e.zero(_F16), query.mix, offset)
            if spec.head_dim % 16:
                e.store(e.zero(_F16), query.vector, size - 64)
            for channel, lanes in pieces(spec.head_dim):
                own = e.load(source, vector(F32, lanes), 4 * channel)
                e.store(own * self.scale, query.vector, 4 * channel)
        return queries

    @property
    def _stride(self) -> int:
        """Bytes of scratch for a query."""
        spec = self.spec
        return 2 * padded(spec.head_dim) + spec.keys.query_bytes + 4 * spec.block_size * spec.blocks_at_once

    def _place(self, first: Value, number: int) -> tuple[Value, Value]:
        """The row in its sequence of the query with a number in a pass, and its index among all queries (T, H)."""
        e, spec = self.e, self.spec
        own = e.least(first + number, self.header.rows * spec.group - 1) if number else first
        row = own // spec.group
        heads = self.kv_heads * spec.group
        return row, (self.header.first_row + row) * heads + self.head * spec.group + own % spec.group

    def _write(self, queries: Sequence[_Query], first: Value, chunk: Value) -> None:
        e, size = self.e, partial_bytes(self.spec.head_dim)
        for number, query in enumerate(queries):
            with e.when(first + number < self.header.rows * self.spec.group):
                _, index = self._place(first, number)
                target = self.parts + (index * self.most_chunks + chunk) * size
                e.store(query.top.get(), target)
                e.store(e.sum_lanes(query.total.get()), target, 4)
                for offset in range(0, size - MIX, 64):
                    e.store(e.load(query.mix, _F16, offset), target, MIX + offset)

    # -- quantized blocks --------------------------------------------------------------------------------------

    def _quantized_blocks(self, queries: Sequence[_Query], table: Value, chunk: Value) -> None:
        """Some blocks at a time: the steps of a softmax wait for each other, those of other blocks fill the time."""
        e, spec, header = self.e, self.spec, self.header
        for query in queries:
            spec.keys.emit_query(e, query.vector, query.prepared)
        begin = chunk * header.chunk_blocks
        end = e.least(begin + header.chunk_blocks, header.quantized)
        oldest = queries[0].position - self.window + 1 - header.table_start
        begin = e.most(begin, e.most(oldest, 0) // spec.block_size)
        keys, values = self.keys + self.head * self.key_stride, self.values + self.head * self.value_stride
        with e.loop(begin, end, spec.blocks_at_once) as number:
            ids, count = table + number * 8, e.least(end - number, spec.blocks_at_once)
            with e.loop(0, count) as i:
                block, offset = e.load(ids + i * 8, I64), i * (4 * spec.block_size)
                scores = [query.scores + offset for query in queries]
                after = e.load(table + e.least(number + i + _BLOCKS_AHEAD, header.quantized - 1) * 8, I64)
                self._block_scores(queries, keys, block, after, scores)
            start = header.table_start + number * spec.block_size
            lows = [query.position - self.window + 1 - start for query in queries]
            tokens = count * spec.block_size
            with e.when(lows[-1] > 0):  # rows are in order of position
                self._hide(queries, lows, [tokens] * len(queries), tokens)
            self._soften(queries, tokens)
            with e.loop(0, count) as i:
                block, offset = e.load(ids + i * 8, I64), i * (4 * spec.block_size)
                weights = [query.scores + offset for query in queries]
                after = e.load(table + e.least(number + i + _BLOCKS_AHEAD, header.quantized - 1) * 8, I64)
                own, ahead = values + block * spec.values.nbytes, values + after * spec.values.nbytes
                spec.values.emit_mix(e, own, ahead, weights, [query.mix for query in queries])

    def _block_scores(
        self, queries: Sequence[_Query], keys: Value, block: Value, after: Value, scores: Sequence[Value]
    ) -> None:
        """q·k + q·μ of each query and the keys of a block, whose mean is μ."""
        e, spec = self.e, self.spec
        own, ahead = keys + block * spec.keys.nbytes, keys + after * spec.keys.nbytes
        spec.keys.emit_scores(e, own, ahead, [query.prepared for query in queries], scores)
        if not spec.mean_bits:
            return
        added = self._mean_scores(queries, self.head * self.blocks + block)
        for more, at in zip(added, scores, strict=True):
            for offset in range(0, 4 * spec.block_size, 64):
                e.store(e.load(at, _F16, offset) + more, at, offset)

    def _mean_scores(self, queries: Sequence[_Query], block: Value) -> list[Value]:
        e, bits, dim = self.e, self.spec.mean_bits, self.spec.head_dim
        at = self.mean + block * (dim * bits // 8)
        sums = [e.zero(F32) for _ in queries]
        wide = [e.zero(_F16) for _ in queries]
        for channel, lanes in pieces(dim):
            if bits == 8:
                mean = e.load(at, vector(I8, lanes), channel).sext(I32).to_float()
            else:
                mean = e.half_to_float(e.load(at, vector(I16, lanes), 2 * channel))
            for number, query in enumerate(queries):
                own = e.load(query.vector, vector(F32, lanes), 4 * channel)
                if lanes == 16:
                    wide[number] = e.fma(own, mean, wide[number])
                else:
                    sums[number] = sums[number] + e.sum_lanes(own * mean)
        if dim >= 16:
            sums = [total + e.sum_lanes(lanes) for total, lanes in zip(sums, wide, strict=True)]
        if bits == 8:
            scale = e.half_to_float(e.load(self.mean_scale + block * 2, I16))
            sums = [total * scale for total in sums]
        return sums

    # -- softmax -----------------------------------------------------------------------------------------------

    def _over_tokens(self, tokens: Value, body: Callable[[Sequence[int], Value], None]) -> None:
        """body(offsets in bytes of vectors of 16 tokens, offset before these): for all tokens, a multiple of N."""
        step = next(size for size in (64, 48, 32, 16) if self.spec.block_size % size == 0)
        with self.e.loop(0, tokens * 4, 4 * step) as before:
            body(range(0, 4 * step, 64), before)

    def _hide(self, queries: Sequence[_Query], lows: Sequence[Value], highs: Sequence[Value], tokens: Value) -> None:
        """Hide the tokens below those of `lows`, and from those of `highs` on."""
        e = self.e
        lanes = e.constant(vector(I32, 16), tuple(range(16)))
        for query, first, last in zip(queries, lows, highs, strict=True):
            low, high = e.most(first, 0).trunc(I32), e.most(last, 0).trunc(I32)
            with e.loop(0, tokens, 16) as token:
                numbers = lanes + token.trunc(I32)
                at = query.scores + token * 4
                seen = (numbers >= low) & (numbers < high)
                e.store(e.select(seen, e.load(at, _F16), e.constant(_F16, LOWEST)), at)

    def _soften(self, queries: Sequence[_Query], tokens: Value) -> None:
        """Scores → weights, in place; tops, totals and mixes as they need.

        Where a score is above the top so far, what was found before fades.
        """
        e = self.e
        highest = [e.variable(e.constant(_F16, LOWEST)) for _ in queries]

        def find(offsets: Sequence[int], before: Value) -> None:
            for query, top in zip(queries, highest, strict=True):
                for offset in offsets:
                    score = e.load(query.scores + before, _F16, offset)
                    top.set(e.select(score > top.get(), score, top.get()))

        self._over_tokens(tokens, find)
        tops = [e.maximum_lanes(top.get()) for top in highest]
        grown = [top > query.top.get() for query, top in zip(queries, tops, strict=True)]
        some = grown[0]
        for other in grown[1:]:
            some = some | other
        with e.when(some):
            for query, top in zip(queries, tops, strict=True):
                new = e.maximum(top, query.top.get())
                fade = e.exp(query.top.get() - new)
                query.top.set(new)
                query.total.set(query.total.get() * fade)
                for offset in range(0, padded(self.spec.head_dim), 64):
                    e.store(e.load(query.mix, _F16, offset) * fade, query.mix, offset)

        def weigh(offsets: Sequence[int], before: Value) -> None:
            for query in queries:
                for offset in offsets:
                    weight = e.exp(e.load(query.scores + before, _F16, offset) - query.top.get())
                    e.store(weight, query.scores + before, offset)
                    query.total.add(weight)

        self._over_tokens(tokens, weigh)

    # -- blocks in full precision ------------------------------------------------------------------------------

    def _full_blocks(self, queries: Sequence[_Query], full: Value) -> None:
        e, spec, n, dim = self.e, self.spec, self.spec.block_size, self.spec.head_dim
        following = self._first_keys(self.unit_after, nbytes := 2 * n * dim)
        with e.loop(0, self.header.full) as number:
            at = full + number * (8 * FULL)
            slot, start = e.load(at, I64), e.load(at, I64, 8)
            lows = [query.position - self.window + 1 - start for query in queries]
            highs = [query.position + 1 - start for query in queries]
            count = e.least(highs[-1], n)  # rows are in order of position
            with e.when(count > e.most(lows[0], 0)):
                offset = (slot * self.kv_heads + self.head) * nbytes
                first, keys, values = queries[0], self.full_k + offset, self.full_v + offset
                widened = self.scratch + spec.at_once * self._stride
                places = first.vector, first.scores, len(queries), self._stride, widened
                full_blocks.scores(e, keys, values, dim, count, *places)
                self._hide(queries, lows, highs, e.i64(n))
                self._soften(queries, e.i64(n))
                after = e.least(number + 1, self.header.full - 1) * (8 * FULL)
                own_keys = self.full_k + (e.load(full + after, I64) * self.kv_heads + self.head) * nbytes
                after_keys = e.select(number + 1 < self.header.full, own_keys, following)
                scores, mixes = [query.scores for query in queries], [query.mix for query in queries]
                full_blocks.mix(e, values, after_keys, dim, count, scores, mixes)

    def _first_keys(self, unit: Value, nbytes: int) -> Value:
        """The address of the keys of the first block in full precision that a unit reads. nbytes: of a block."""
        sequence = self.e.load(self.units_at + (unit // self.kv_heads) * (8 * UNIT), I64)
        slot = self.e.load(self.full + sequence * self.most_full * (8 * FULL), I64)
        return self.full_k + (slot * self.kv_heads + unit % self.kv_heads) * nbytes
