"""Tiles of `tables` whose codes have been looked up in memory, for many queries that read them one after the other.

Their scores and sums are those of the tiles, to the bit: all products are exact. A tile has its norms, float32 (N,),
then

    keys    (N/16, D/4) vectors of 16 tokens x 4 channels, as `products.Writer` has them; where products of bytes are
            made of products of int16, 2 vectors of int16 in place of each: of its even bytes, and of its odd ones
    values  (C/p, channels of a code, N·p/64) vectors of 16/p groups x p codes x 4 tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.codecs import KeyTiles, ValueTiles
from polarlm.engine.backends.native.codecs.f16 import sum_tile
from polarlm.engine.backends.native.codecs.parts.packing import BYTES
from polarlm.engine.backends.native.codecs.parts.tables import ChunkEnd, TableKeys, TableValues, VectorPlace, Visitor
from polarlm.engine.jit.lang import F32, I16, I32, Emitter, Value, Values, vector

_F16, _I16, _WORDS = vector(F32, 16), vector(I32, 16), vector(I16, 32)
_UNROLLED = 4  # vectors of values that a turn of a loop reads, at most


class ExpandedKeys:
    def __init__(self, keys: TableKeys, tokens: int, head_dim: int) -> None:
        self._keys, self._tokens, self._head_dim, self._fours = keys, tokens, head_dim, head_dim // 4
        self.nbytes = 4 * tokens + 2 * tokens * head_dim  # bytes leave half of it free

    def emit(self, e: Emitter, block: Value, next_tile: Value, out: Value) -> None:
        """Expand a tile → out. next_tile: as for `KeyTiles.emit_scores`."""
        vectors, each = out + 4 * self._tokens, _vectors(e)

        def write(first: Value, number: int, group: int, value: Value) -> None:
            words = value.bits(_WORDS)
            parts = [value] if each == 1 else [words & 255, words >> 8]
            place = each * (group * self._fours + number)
            for i, part in enumerate(parts):
                e.store(part, vectors + first * (64 * each), 64 * (place + i))

        for group, norm in enumerate(self._keys.look_up(e, block, next_tile, write)):
            e.store(norm, out, 64 * group)

    def emit_scores(self, e: Emitter, tile: Value, queries: Values, out: Values, more: Values | None) -> None:
        """As `KeyTiles.emit_scores`. more: what is added to all scores of each query."""
        totals = [*self._products(e, tile + 4 * self._tokens, queries)]
        self._keys.store_scores(e, totals, _norms(e, tile, self._tokens), queries, out, more)

    def _products(self, e: Emitter, vectors: Value, queries: Values) -> Iterator[list[Value]]:
        """As `emit_products`, of prepared queries."""
        groups, each, bias_at = self._tokens // 16, _vectors(e), -(-self._head_dim // 16) * 16 + 4
        multiply = e.level.dot4_signed if e.level.signed_dots else e.level.dot4
        starts = [e.broadcast(query, I32, 16, bias_at) for query in queries]
        if each == 2:
            multiply, queries = e.level.dot2, [self._query_words(e, query) for query in queries]
        group_tile = sum_tile(e, len(queries), groups)
        for first in range(0, groups, group_tile):
            own_groups = range(first, first + group_tile)
            totals = [[e.variable(start) for start in starts] for _ in own_groups]
            with e.loop(0, self._fours) as four:
                own = vectors + four * (64 * each)
                for i in range(each):
                    keys = [e.load(own, _I16, 64 * (each * self._fours * group + i)) for group in own_groups]
                    for number, query in enumerate(queries):
                        factor = e.broadcast(query + four * (4 * each), I32, 16, 4 * i)
                        for key, total in zip(keys, totals, strict=True):
                            total[number].set(e.order_sum(multiply(e, total[number].get(), key, factor)))
            yield from ([total.get() for total in own_totals] for own_totals in totals)

    def _query_words(self, e: Emitter, query: Value) -> Value:
        """The bytes of a prepared query as int16: for each four of channels, the even ones, then the odd ones."""
        out = e.stack(-(-self._head_dim // 64) * 128)
        for first in range(0, self._head_dim, 64):
            words = e.load(query, _WORDS, first)
            even, odd = (part.bits(_I16) for part in ((words << 8).ashr(8), words.ashr(8)))
            for half in (0, 1):
                lanes = [16 * k + 8 * half + i for i in range(8) for k in (0, 1)]
                e.store(e.shuffle(even, odd, lanes), out, 2 * first + 64 * half)
        return out


class ExpandedValues:
    def __init__(self, values: TableValues, tokens: int, head_dim: int) -> None:
        self._values, self._tokens = values, tokens
        self.nbytes = 4 * tokens + tokens * head_dim

    def emit(self, e: Emitter, block: Value, next_tile: Value, out: Value) -> None:
        """Expand a tile → out. next_tile: as for `KeyTiles.emit_scores`."""
        _, width, count = self._values.shape

        def write(place: VectorPlace, channels: Sequence[int], values: Iterator[Value]) -> None:
            for channel, value in zip(channels, values, strict=True):
                first = (place.chunk * width + channel) * count + place.first
                e.store(value, out + 4 * self._tokens + first * 64, 64 * place.number)

        self._values.visit(e, block, next_tile, write, lambda chunk: None)
        for group, norm in enumerate(self._values.emit_norms(e, block)):
            e.store(norm, out, 64 * group)

    def emit_values(self, e: Emitter, tile: Value, weights: Values, sums: Values) -> None:
        """As `ValueTiles.emit_values`."""
        chunks, width, count = self._values.shape
        step = next(n for n in range(_UNROLLED, 0, -1) if count % n == 0)
        turns = [range(width)] if e.level.has_room else [range(channel, channel + 1) for channel in range(width)]

        def visit(visitor: Visitor, finish: ChunkEnd) -> None:
            with e.loop(0, chunks) as chunk:
                for channels in turns:
                    with e.loop(0, count, step) as first:
                        own = tile + 4 * self._tokens + (chunk * (width * count) + first) * 64
                        for number in range(step):
                            values = (e.load(own, BYTES, 64 * (channel * count + number)) for channel in channels)
                            visitor(VectorPlace(chunk, first, number), channels, values)
                finish(chunk)

        self._values.add_products(e, _norms(e, tile, self._tokens), weights, sums, visit)


class ExpandedTiles(NamedTuple):
    keys: ExpandedKeys
    values: ExpandedValues

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@cache
def expanded_tiles(keys: KeyTiles, values: ValueTiles | None, tokens: int, head_dim: int) -> ExpandedTiles | None:
    """Keys and values as these tiles have them; None where one side has no table."""
    if not isinstance(keys, TableKeys) or not isinstance(values, TableValues):
        return None
    return ExpandedTiles(ExpandedKeys(keys, tokens, head_dim), ExpandedValues(values, tokens, head_dim))


def _norms(e: Emitter, tile: Value, tokens: int) -> list[Value]:
    return [e.load(tile, _F16, 4 * token) for token in range(0, tokens, 16)]


def _vectors(e: Emitter) -> int:
    """Vectors of 16 keys and 4 channels: 2 of words, or 1 of bytes. Without VNNI, products of bytes are of words."""
    return 2 if e.level.multiplies_words and e.level.most_code < 255 else 1
