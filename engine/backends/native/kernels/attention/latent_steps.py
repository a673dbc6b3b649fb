"""Attention of a step's rows to latent vectors, which are the keys and the values of all query heads, by online softmax
over blocks.

The lanes of a vector are LANES queries. What is read of a block, one number or four bytes at a time, is multiplied by
the numbers of all of them at once, so that a block is decoded once for them, and no sum runs across lanes. Blocks are
bytes if their codec has them (`ByteOrder`), else float32. Arrays in scratch, whose rows have a number of each query:

    vectors   (LANES, D') float32: the queries, scaled; D' = D rounded up to a multiple of 16
    prepared  (LANES, query_bytes): the queries as codes are multiplied by them
    columns   (D', LANES) float32: the same for blocks of float32
    sums      (D', LANES) float32: the weighted sums
    scores    (N, LANES) float32: scores; then weights, which may become bytes (N / 4, LANES, 4)
    norms     (N,) float32: of the tokens of a block
    mean      (D',) float32: of the keys of a block
    indices, positions (LANES,) int64, int32: of the queries, in (T, H), and of their rows
    block     float32 (N, D), then what decoding needs; or bytes of values, as of `ByteOrder`

Queries, and so scores and row_max, are multiplied by log₂ e: weights are powers of two. row_max may be less than the
largest score by _SLACK: seldom does a block change it, and the sums with it.
"""

from __future__ import annotations

import operator
from functools import reduce

from polarlm.engine.backends.native.codecs import ByteOrder
from polarlm.engine.backends.native.codecs.parts.packing import pack_bytes
from polarlm.engine.backends.native.kernels.attention.partials import LOWEST, WEIGHTED, FullBlock, padded, partial_bytes
from polarlm.engine.backends.native.kernels.attention.prompts import emit_mean
from polarlm.engine.backends.native.kernels.attention.steps import AttendArguments, AttentionSpec, StepBody
from polarlm.engine.backends.native.kernels.attention.unit import LOG2_E, larger
from polarlm.engine.backends.native.kernels.multiply import offsets, pieces
from polarlm.engine.backends.native.kernels.rows import apply_softcap
from polarlm.engine.jit.lang import F32, I16, I32, I64, Emitter, Value, read, step_inverse, vector

LANES = 16
_SLACK = 8.0  # weights are at most 2^_SLACK then
_ROW = 4 * LANES  # bytes
_FLOATS, _WORDS = vector(F32, LANES), vector(I32, LANES)


class LatentBody(StepBody):
    """`StepBody` where values are keys. A query tile of fewer than LANES leaves lanes whose numbers are not used."""

    def __init__(self, e: Emitter, spec: AttentionSpec, args: AttendArguments, scratch: Value) -> None:
        super().__init__(e, spec, args, scratch)
        self._order, self._size, n = spec.keys.byte_order, padded(spec.head_dim), spec.block_size
        square = self._size // 4 * LANES
        sizes = square, spec.keys.query_bytes // 4 * LANES, square, square, n * LANES, n, square // LANES, 32, 16
        self._vectors, self._prepared, *places = (scratch + offset for offset in offsets(*sizes))
        self._columns, self._sums, self._scores, self._norms, self._mean, *places = places
        self._indices, self._positions, self._block = places
        self._row_max, self._row_sum = (e.variable(e.zero(_FLOATS)) for _ in range(2))
        self._tile = 8 if e.level.has_room else 4  # sums that stay in registers
        self._lanes = [min(lane, spec.query_tile - 1) for lane in range(LANES)]  # whose query each lane has

    def open(self, first: Value) -> None:
        e, spec, size, nbytes = self.e, self.spec, self._size, self.spec.keys.query_bytes
        e.store(e.zero(_FLOATS), self._mean, size - 64)
        with e.loop(0, spec.query_tile) as lane:
            row, index = self.place(first, lane)
            e.store(index, self._indices + lane * 8)
            e.store((self.header.position + row).trunc(I32), self._positions + lane * 4)
            source, target = self.args.q + index * (4 * spec.head_dim), self._vectors + lane * size
            e.store(e.zero(_FLOATS), target, size - 64)
            for channel, width in pieces(spec.head_dim):
                x = e.load(source, vector(F32, width), 4 * channel)
                e.store(x * (self.args.scale * LOG2_E), target, 4 * channel)
            if self._order is not None:
                spec.keys.emit_query(e, target, self._prepared + lane * nbytes)
        with e.loop(0, size * LANES, _ROW) as offset:
            e.store(e.zero(_FLOATS), self._sums + offset)
        self._row_max.set(e.constant(_FLOATS, LOWEST))
        self._row_sum.set(e.zero(_FLOATS))

    def close(self, first: Value, chunk: Value) -> None:
        """The last query, which fills up a pass, is written several times."""
        e, args, size = self.e, self.args, partial_bytes(self.spec.head_dim)
        row_max = self._row_max.get() * (1 / LOG2_E)
        indices = (e.load(self._indices, I64, 8 * lane) for lane in range(self.spec.query_tile))
        targets = [args.parts + (index * args.most_chunks + chunk) * size for index in indices]
        for lane, target in enumerate(targets):
            e.store(e.extract(row_max, lane), target)
            e.store(e.extract(self._row_sum.get(), lane), target, 4)
        with e.loop(0, size - WEIGHTED, 64) as offset:
            rows = [e.load(self._sums + offset * LANES, _FLOATS, _ROW * i) for i in range(LANES)]
            for target, x in zip(targets, e.transpose(rows), strict=False):
                e.store(x, target + offset, WEIGHTED)

    # -- blocks ------------------------------------------------------------------------------------------------

    def attend_to_codes(self, table: Value, begin: Value, end: Value) -> None:
        e, spec, args, n = self.e, self.spec, self.args, self.spec.block_size
        tiles = args.keys + self.head * args.blocks * spec.keys.nbytes
        if self._order is None:
            self._turn_vectors()
        with e.loop(begin, end) as number:
            block, next_block = (e.load(table + i * 8, I64) for i in (number, e.imin(number + 1, end - 1)))
            tile, next_tile = (tiles + i * spec.keys.nbytes for i in (block, next_block))
            more = e.zero(_FLOATS)
            if spec.mean_bits:
                emit_mean(e, spec, args, self.head, block, self._mean)
                more = self._mean_products()
            start = self.header.table_start + number * n
            if self._order is None:
                strides = spec.keys.emit_floats(e, tile, self._block, self._block + 4 * n * spec.head_dim)
                self._score_floats(strides, start, e.i64(n), more, next_tile)
                self._add_floats(strides, e.i64(n), has_mean=spec.mean_bits > 0)
            else:
                self._score_bytes(self._order, tile, next_tile, start, more)
                self._add_bytes(self._order)

    def attend_to_full_blocks(self, full: Value, begin: Value, end: Value) -> None:
        e, n, dim, header = self.e, self.spec.block_size, self.spec.head_dim, self.header
        self._turn_vectors()
        with e.loop(begin, end) as number:
            slot, start = read(e, FullBlock, full, number)
            count = e.imin(header.position + header.rows - start, n)
            with e.when(count > e.imax(header.position - self.args.window + 1 - start, 0)):
                source = self.args.full_k + self.full_offset(slot, self.head)
                with e.loop(0, (count + (LANES - 1)) // LANES * (LANES * dim), LANES) as at:
                    halves = e.load(source + at * 2, vector(I16, LANES))
                    e.store(e.half_to_float(halves), self._block + at * 4)
                self._score_floats((4 * dim, 4), start, count, e.zero(_FLOATS))
                self._add_floats((4 * dim, 4), count)

    def _turn_vectors(self) -> None:
        """vectors → columns."""
        e = self.e
        with e.loop(0, self._size, 64) as offset:
            parts = [e.load(self._vectors + offset, _FLOATS, self._size * lane) for lane in self._lanes]
            for number, column in enumerate(e.transpose(parts)):
                e.store(column, self._columns + offset * LANES, _ROW * number)

    def _mean_products(self) -> Value:
        """The products of the queries with a block's mean."""
        e, totals = self.e, [self.e.variable(self.e.zero(_FLOATS)) for _ in range(self.spec.query_tile)]
        with e.loop(0, self._size, 64) as offset:
            mean = e.load(self._mean + offset, _FLOATS)
            for lane, total in enumerate(totals):
                total.set(e.fma(e.load(self._vectors + offset, _FLOATS, self._size * lane), mean, total.get()))
        return e.combine_rows([totals[lane].get() for lane in self._lanes], operator.add)

    # -- scores ------------------------------------------------------------------------------------------------

    def _score_bytes(self, order: ByteOrder, tile: Value, next_tile: Value, start: Value, more: Value) -> None:
        """The scores with a tile's keys, and `more` → scores; the bytes of its values → block."""
        e, spec = self.e, self.spec
        queries = [self._prepared + spec.keys.query_bytes * lane for lane in range(spec.query_tile)]
        factor = e.collect([e.load(queries[lane], F32, order.factor_at) for lane in self._lanes])
        for group, (norm, totals) in enumerate(order.emit(e, tile, next_tile, queries, self._block)):
            e.store(norm, self._norms, 64 * group)
            for i, total in enumerate(e.transpose([totals[lane] for lane in self._lanes])):
                own_norm = e.broadcast(self._norms, F32, LANES, 64 * group + 4 * i)
                score = e.fma(total.to_float(), own_norm * factor, more)
                self._store_score(score, self._scores, 16 * group + i)
        self._mask(start, e.i64(spec.block_size))

    def _score_floats(
        self, strides: tuple[int, int], start: Value, count: Value, more: Value, next_tile: Value | None = None
    ) -> None:
        """The scores with the first `count` tokens, rounded up, of block, and `more` → scores. strides: bytes from
        token to token, and from channel to channel."""
        e, dim, tile, (by_token, by_channel) = self.e, self.spec.head_dim, self._tile, strides
        ahead = 8 * tile * self.spec.keys.nbytes // (self.spec.block_size * dim)  # to prefetch in a turn of the loop
        with e.loop(0, count, tile) as token:
            totals = [e.variable(e.zero(_FLOATS)) for _ in range(tile)]
            tokens = self._block + token * by_token
            with e.loop(0, dim, 8) as channel:
                if next_tile is not None:
                    e.prefetch(next_tile + (token * dim + channel * tile) * ahead // (8 * tile), ahead, level=2)
                for i in range(8):
                    query = e.load(self._columns + channel * _ROW, _FLOATS, _ROW * i)
                    for number, total in enumerate(totals):
                        offset = by_token * number + by_channel * i
                        key = e.broadcast(tokens + channel * by_channel, F32, LANES, offset)
                        total.set(e.fma(key, query, total.get()))
            for number, total in enumerate(totals):
                self._store_score(total.get() + more, self._scores + token * _ROW, number)
        self._mask(start, count)

    def _store_score(self, score: Value, scores: Value, token: int) -> None:
        if self.spec.is_capped:
            score = apply_softcap(self.e, score, self.e.splat(self.args.softcap * LOG2_E, LANES))
        self.e.store(score, scores, _ROW * token)

    def _mask(self, start: Value, count: Value) -> None:
        """Set scores to LOWEST of tokens that a query does not see, or that are not among the first `count`. start: the
        position of the first one."""
        e, n = self.e, self.spec.block_size
        first, last = (e.load(self._positions, I32, 4 * lane).sext(I64) for lane in (0, self._lanes[-1]))
        window = e.imin(self.args.window, 1 << 30)
        with e.when((count < n) | (first < start + (n - 1)) | (last - window >= start)):
            positions = e.load(self._positions, _WORDS)
            with e.loop(0, n) as token:
                place, address = e.splat((start + token).trunc(I32), LANES), self._scores + token * _ROW
                is_seen = (place <= positions) & (place > positions - window.trunc(I32))
                e.store(e.select(is_seen, e.load(address, _FLOATS), e.constant(_FLOATS, LOWEST)), address)

    # -- weights -----------------------------------------------------------------------------------------------

    def _weigh(self, *, has_norms: bool) -> tuple[Value, Value]:
        """Scores → weights, with norms times these, in place. Returns the sum of the weights without norms, and with
        them the largest sum of those of tokens 2i and 2i + 1."""
        e, n, old = self.e, self.spec.block_size, self._row_max.get()
        tops = [e.variable(old) for _ in range(4)]
        with e.loop(0, n, 4) as token:
            for i, top in enumerate(tops):
                top.set(larger(e.load(self._scores + token * _ROW, _FLOATS, _ROW * i), top.get()))
        highest = reduce(larger, [top.get() for top in tops])
        exceeds = highest > old + _SLACK
        with e.when(e.any(exceeds)):
            self._row_max.set(e.select(exceeds, highest, old))  # no query depends on the others
            rescale = e.exp2(old - self._row_max.get())  # 1 in others
            self._row_sum.set(self._row_sum.get() * rescale)
            with e.loop(0, self._size * LANES, _ROW) as offset:
                e.store(e.load(self._sums + offset, _FLOATS) * rescale, self._sums + offset)
        totals = [e.variable(e.zero(_FLOATS)) for _ in range(4)]
        pairs = [e.variable(e.zero(_FLOATS)) for _ in range(2)]
        with e.loop(0, n, 4) as token:
            weights, place = [], self._scores + token * _ROW
            for i, total in enumerate(totals):
                weights.append(e.exp2(e.load(place, _FLOATS, _ROW * i) - self._row_max.get()))
                total.add(weights[i])
                if has_norms:
                    weights[i] = weights[i] * e.broadcast(self._norms + token * 4, F32, LANES, 4 * i)
                e.store(weights[i], place, _ROW * i)
            for pair, (a, b) in zip(pairs, (weights[:2], weights[2:]), strict=True):
                pair.set(larger(a + b, pair.get()))
        total_weight = reduce(operator.add, [total.get() for total in totals])
        self._row_sum.add(total_weight)
        return total_weight, larger(*(pair.get() for pair in pairs))

    def _round_weights(self, top: Value) -> None:
        """Weights → bytes, so that the largest two of tokens 2i and 2i + 1 become 255 together, as
        `products.quantize_weights` does."""
        e, inverse = self.e, step_inverse(self.e, top, 255.0)
        with e.loop(0, self.spec.block_size, 4) as token:
            parts = [e.round(e.load(self._scores + token * _ROW, _FLOATS, _ROW * i) * inverse) for i in range(4)]
            e.store(pack_bytes(parts), self._scores + token * (_ROW // 4))

    # -- values ------------------------------------------------------------------------------------------------

    def _add_bytes(self, order: ByteOrder) -> None:
        """Add the weighted values of a block of bytes to the sums."""
        e, n = self.e, self.spec.block_size
        total_weight, top = self._weigh(has_norms=True)
        self._round_weights(top)
        factor = top * (order.scale / 255)
        with e.loop(0, self.spec.head_dim, 8) as first:  # channels of two words
            source, sums = self._block + first * n, self._sums + first * _ROW
            for part in [(0, 1)] if e.level.has_room else [(0,), (1,)]:  # words whose sums stay in registers
                totals = {(word, k): e.variable(e.zero(_WORDS)) for word in part for k in range(4)}
                for four in range(n // 4):
                    weights = e.load(self._scores, _WORDS, _ROW * four)
                    for (word, k), total in totals.items():
                        value = e.broadcast(source, I32, LANES, 4 * (n * word + 4 * four + k))
                        total.set(e.level.dot4(e, total.get(), weights, value, fits=True))
                for (word, k), total in totals.items():
                    channel = 2 * k + word if order.width == 2 else 4 * word + k
                    x, old = total.get().to_float(), e.load(sums, _FLOATS, _ROW * channel)
                    if self.spec.mean_bits:
                        old = e.fma(e.broadcast(self._mean + first * 4, F32, LANES, 4 * channel), total_weight, old)
                    e.store(e.fma(x, factor, old), sums, _ROW * channel)

    def _add_floats(self, strides: tuple[int, int], count: Value, *, has_mean: bool = False) -> None:
        """Add the weighted values of the first `count` tokens of block to the sums. strides: see `_score_floats`."""
        e, tile, (by_token, by_channel) = self.e, self._tile, strides
        total_weight, _ = self._weigh(has_norms=False)
        with e.loop(0, self.spec.head_dim, tile) as channel:
            sums, channels = self._sums + channel * _ROW, self._block + channel * by_channel
            totals = [e.variable(e.load(sums, _FLOATS, _ROW * i)) for i in range(tile)]
            with e.loop(0, count) as token:
                weight = e.load(self._scores + token * _ROW, _FLOATS)
                for i, total in enumerate(totals):
                    value = e.broadcast(channels + token * by_token, F32, LANES, by_channel * i)
                    total.set(e.fma(value, weight, total.get()))
            for i, total in enumerate(totals):
                if has_mean:
                    mean = e.broadcast(self._mean + channel * 4, F32, LANES, 4 * i)
                    total.set(e.fma(mean, total_weight, total.get()))
                e.store(total.get(), sums, _ROW * i)
