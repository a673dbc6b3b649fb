"""Tiles of codes that stand for points of a table, with a norm for each token.

A code stands for 1 or 2 adjacent channels, so a vector has C = D or D/2 codes. The table has bytes: a point's
coordinates in 127ths of the largest. Products are exact int32 sums of bytes times bytes, so besides float32's errors
there are only three roundings:

    the table      half a step, 1/254 of the largest coordinate
    a query        half a step, 1/254 of its largest channel
    a weight       times its token's norm: half a step, 1/510 of the largest sum of tokens 2i and 2i + 1

A tile has V vectors of 64 codes, packed by `packing`, then the norms in the codec's dtype. Codes have numbers of the
tile's own, by which mirror images are looked up together: `code_table`.

    keys    lanes are tokens: (C/4, N/16) vectors, each of 16 tokens x 4 codes. Nothing is summed across lanes.
    values  lanes are codes: (C/p, N·p/64) vectors, each of 16/p groups x p codes x 4 tokens, p = gcd(C, 16)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.codecs import MOST_QUERIES, ByteOrder, KeyTiles, Tiles, ValueTiles, codes_section
from polarlm.engine.backends.native.codecs.parts.code_table import CodeTable
from polarlm.engine.backends.native.codecs.parts.decoding import emit_norms, emit_pack_norms, emit_points
from polarlm.engine.backends.native.codecs.parts.packing import Packing, pack_bytes
from polarlm.engine.backends.native.codecs.parts.products import (
    PAIR_LANES,
    Writer,
    emit_products,
    quantize_weights,
    read_codes,
    store_query,
    write_values,
)
from polarlm.engine.backends.native.kernels.encode.load import ANY, cover, load, measure
from polarlm.engine.backends.native.kernels.encode.rounding import (
    round_with_best_norms,
    round_without_metric,
    write_codes,
)
from polarlm.engine.backends.native.kernels.encode.unit import EncodeArguments, Unit, by_rounding, encoder
from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.parts.pair_codec import PairCodec
from polarlm.engine.codecs.schema.sections import Section
from polarlm.engine.codecs.schema.streams import Stream, codes, join, split
from polarlm.engine.jit.lang import F32, I8, I16, I32, Emitter, Kernel, Value, Values, vector
from polarlm.engine.quantization.encode import LARGEST

_F16, _I16 = vector(F32, 16), vector(I32, 16)


class VectorPlace(NamedTuple):
    """Where a vector of values is in a tile: in a chunk of p codes, `number` vectors after its vector `first`."""

    chunk: Value
    first: Value
    number: int


Visitor = Callable[[VectorPlace, Sequence[int], Iterator[Value]], None]  # given values for each of some channels
ChunkEnd = Callable[[Value], None]  # given the chunk whose values have been visited


def keys(codec: Codec, block_size: int, head_dim: int) -> TableKeys | None:
    return TableKeys(codec, block_size, head_dim) if isinstance(codec, PairCodec) else None


def values(codec: Codec, block_size: int, head_dim: int) -> TableValues | None:
    return TableValues(codec, block_size, head_dim) if isinstance(codec, PairCodec) else None


class _TableTiles(Tiles):
    _side: str
    by_token: bool  # whether the codes that `_emit_pack` reads are contiguous by token

    def __init__(self, codec: PairCodec, block_size: int, head_dim: int) -> None:
        norms, width = codec.store.norms, codec.store.width
        self._table = CodeTable(codec.store.code_bits, codec.store.points)
        self._norm, self._largest = norms.dtype, float(norms.largest)
        self._tokens, self._head_dim = block_size, head_dim
        self._codes = head_dim // width
        self._packing = Packing(self._table.bits)
        self._vectors = block_size * self._codes // 64
        self._section = self._codes_section(codes(self._table.bits, block_size, self._codes))
        norm = Section.numbers("norm", codec.schema(block_size, head_dim)["norm"])
        name = codec.name.split("+")[0].replace(".", "_")
        layout = f"{name}_norm_{8 * norms.dtype.itemsize}_{self._side}"
        super().__init__(layout, codec, block_size, head_dim, self._section, norm)
        _, self._norms_at, _ = self._sections.offsets

    def encoder(self, format: CacheFormat, side: int) -> Kernel[EncodeArguments] | str:
        encoding = by_rounding(format, side)
        if isinstance(encoding, str):
            return encoding

        def write(unit: Unit) -> None:
            unit.report(load(unit, LARGEST if encoding.has_metric else ANY))
            (cover if encoding.is_linear else measure)(unit)
            (round_with_best_norms if encoding.has_metric else round_without_metric)(unit)
            codes = unit.codes
            if self.by_token:
                codes = unit.errors  # reuses the memory of the errors
                write_codes(unit, codes)
            self._emit_pack(unit.e, codes, unit.norms, unit.block.tiles)

        return encoder(f"{encoding.name}_{self.name}", encoding, write)

    @abstractmethod
    def _codes_section(self, stream: Stream) -> Section:
        """The section of the codes (N, C)."""

    def from_streams(self, streams: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        codes = streams["codes"] if self._table.width == 2 else split(streams["codes"], self._table.bits)
        return {**streams, "codes": self._table.numbers[codes]}

    def to_streams(self, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        codes = self._table.codes[stored["codes"]]
        return {**stored, "codes": codes if self._table.width == 2 else join(codes, self._table.bits)}

    def _emit_pack(self, e: Emitter, codes: Value, norms: Value, tile: Value) -> None:
        """Pack codes and norms (N,) float32 ≥ 0, which may be overwritten, into the tile.

        codes (C, N) int32; if `by_token` (N, C) uint8, or uint16 for ten bits.
        """
        run = self._packing.run
        whole, renumber = self._vectors // run, self._table.emit_numbers(e)
        with e.loop(0, whole) as number:
            vectors = [renumber(self._emit_vector(e, codes, number * run + i)) for i in range(run)]
            self._packing.emit_pack(e, vectors, tile + number * self._packing.nbytes(run))
        if rest := self._vectors % run:
            vectors = [renumber(self._emit_vector(e, codes, e.i64(whole * run + i))) for i in range(rest)]
            self._packing.emit_pack(e, vectors, tile + self._packing.nbytes(whole * run))
        with e.loop(0, 4 * self._tokens, 64) as offset:
            e.store(e.fmin(e.load(norms + offset, _F16), self._largest), norms + offset)
        emit_pack_norms(e, norms, self._tokens, self._norm, tile + self._norms_at)

    @abstractmethod
    def _emit_vector(self, e: Emitter, codes: Value, number: Value) -> list[Value]:
        """A vector of codes: 4 bytes in each of 16 lanes; for ten bits, then a vector of their high bits."""

    def _four_bytes(self, codes: Values) -> list[Value]:
        """Four vectors of codes (16,) int32 → a vector whose lanes have a byte of each; for ten bits, low and high."""
        parts = [[code & 255 for code in codes], [code >> 8 for code in codes]] if self._table.bits > 8 else [[*codes]]
        return [pack_bytes(part) for part in parts]

    def emit_decode(self, e: Emitter, block: Value, out: Value, scratch: Value) -> None:
        norms = emit_norms(e, block + self._norms_at, self._tokens, self._norm)
        emit_points(e, block, self._packing, self._section.places, self._table.points, norms, out, scratch)


class TableKeys(_TableTiles, KeyTiles):
    """Tiles of keys.

    A prepared query: int8 (D,), with the first channels of each four codes before their second channels; at D rounded
    up to 16, the query's step times the table's, float32, and minus the sum of the bytes times what is added to
    the table's bytes, int32.
    """

    _side = "keys"
    by_token = False

    def __init__(self, codec: PairCodec, block_size: int, head_dim: int) -> None:
        self._groups, self._factor_at = block_size // 16, -(-head_dim // 16) * 16
        self.query_bytes = -(-(self._factor_at + 8) // 64) * 64
        super().__init__(codec, block_size, head_dim)

    def _codes_section(self, stream: Stream) -> Section:
        cuts = (self._groups, 16), (self._codes // 4, 4)
        return codes_section("codes", stream, self._packing, cuts, (2, 0, 1, 3))

    def _emit_vector(self, e: Emitter, codes: Value, number: Value) -> list[Value]:
        row = 4 * self._tokens
        address = codes + number // self._groups * (4 * row) + number % self._groups * 64
        return self._four_bytes([e.load(address, _I16, row * i) for i in range(4)])

    @property
    def byte_order(self) -> ByteOrder | None:
        table = self._table
        return ByteOrder(self._emit_bytes, table.width, table.scale, self._factor_at)

    def _emit_bytes(
        self, e: Emitter, block: Value, next_tile: Value, queries: Values, values: Value
    ) -> Iterator[tuple[Value, list[Value]]]:
        norms = emit_norms(e, block + self._norms_at, self._tokens, self._norm)
        e.prefetch(next_tile + self._norms_at, self.nbytes - self._norms_at)
        products = partial(emit_products, e, self._table, block, next_tile, self._tokens, self._head_dim)
        write = write_values(e, values, self._tokens)
        if e.level.has_room:
            return zip(norms, products([queries], write), strict=True)
        cuts = range(0, len(queries), MOST_QUERIES)
        parts = [[*products([queries[i : i + MOST_QUERIES]], None if i else write)] for i in cuts]
        return zip(norms, ([*chain(*totals)] for totals in zip(*parts, strict=True)), strict=True)

    def emit_query(self, e: Emitter, q: Value, out: Value) -> None:
        parts = [e.load(q, _F16, 4 * first) for first in range(0, self._factor_at, 16)]
        if self._table.width == 2:
            parts = [e.shuffle(part, part, PAIR_LANES) for part in parts]
        store_query(e, parts, self._table, out)

    def emit_scores(self, e: Emitter, block: Value, next_tile: Value, queries: Values, out: Values) -> None:
        totals = [*emit_products(e, self._table, block, next_tile, self._tokens, self._head_dim, [queries])]
        e.prefetch(next_tile + self._norms_at, self.nbytes - self._norms_at)
        self.store_scores(e, totals, emit_norms(e, block + self._norms_at, self._tokens, self._norm), queries, out)

    def look_up(self, e: Emitter, block: Value, next_tile: Value, write: Writer) -> list[Value]:
        """Give the bytes of a tile to `write`, and return its norms."""
        for _ in emit_products(e, self._table, block, next_tile, self._tokens, self._head_dim, [[]], write):
            pass
        return emit_norms(e, block + self._norms_at, self._tokens, self._norm)

    def store_scores(
        self,
        e: Emitter,
        totals: Sequence[Values],
        norms: Values,
        queries: Values,
        out: Values,
        more: Values | None = None,
    ) -> None:
        """totals: of `emit_products` → N float32 at each of out. more: what is added to all scores of each query."""
        for number, (query, target, own_totals) in enumerate(zip(queries, out, zip(*totals, strict=True), strict=True)):
            factor = e.broadcast(query, F32, 16, self._factor_at)
            for group, (total, norm) in enumerate(zip(own_totals, norms, strict=True)):
                score = total.to_float() * (norm * factor)
                e.store(score if more is None else score + more[number], target, 64 * group)


class TableValues(_TableTiles, ValueTiles):
    _side = "values"
    by_token = True

    @property
    def _lanes(self) -> int:
        """Adjacent codes of a token in a vector: p."""
        return math.gcd(self._codes, 16)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Chunks of p codes, channels of a code, and vectors of a chunk."""
        return self._codes // self._lanes, self._table.width, self._tokens * self._lanes // 64

    def emit_norms(self, e: Emitter, block: Value) -> list[Value]:
        """The norms of a tile, 16 in each vector."""
        return emit_norms(e, block + self._norms_at, self._tokens, self._norm)

    def _codes_section(self, stream: Stream) -> Section:
        p = self._lanes
        cuts = (self._tokens * p // 64, 16 // p, 4), (self._codes // p, p)
        return codes_section("codes", stream, self._packing, cuts, (3, 0, 1, 4, 2))

    def _emit_vector(self, e: Emitter, codes: Value, number: Value) -> list[Value]:
        p, kind = self._lanes, I16 if self._table.bits > 8 else I8
        size, token_vectors = kind.width // 8, self._tokens * p // 64
        first = codes + number // token_vectors * (p * size) + number % token_vectors * (64 // p * self._codes * size)
        tokens = [e.load(first, vector(kind, p), i * self._codes * size).zext(I32) for i in range(64 // p)]
        return self._four_bytes([e.join(tokens[i::4]) for i in range(4)])

    def emit_values(self, e: Emitter, block: Value, next_tile: Value, weights: Values, sums: Values) -> None:
        norms = self.emit_norms(e, block)
        e.prefetch(next_tile + self._norms_at, self.nbytes - self._norms_at)
        self.add_products(e, norms, weights, sums, partial(self.visit, e, block, next_tile))

    def add_products(
        self, e: Emitter, norms: Values, weights: Values, sums: Values, visit: Callable[[Visitor, ChunkEnd], None]
    ) -> None:
        """`emit_values` of the bytes that `visit` visits."""
        factors = [step * self._table.scale for step in quantize_weights(e, weights, norms)]
        totals = [[e.variable(e.zero(_I16)) for _ in range(self._table.width)] for _ in weights]

        def add(place: VectorPlace, channels: Sequence[int], values: Iterator[Value]) -> None:
            fours = [self._weights(e, weight + place.first * (64 // self._lanes), place.number) for weight in weights]
            for channel, value in zip(channels, values, strict=True):
                for four, total in zip(fours, totals, strict=True):
                    e.keep_order()
                    total[channel].set(e.level.dot4(e, total[channel].get(), four, value.bits(_I16), fits=True))

        def finish(chunk: Value) -> None:
            offset = chunk * (4 * self._lanes * self._table.width)
            for total, factor, target in zip(totals, factors, sums, strict=True):
                channels = [self._fold_lanes(e, channel.get()).to_float() for channel in total]
                self._add_to_sums(e, channels, factor, target + offset)
                for channel in total:
                    channel.set(e.zero(_I16))

        visit(add, finish)

    def visit(self, e: Emitter, block: Value, next_tile: Value, visitor: Visitor, finish: ChunkEnd) -> None:
        """Look the codes of a tile up, vector by vector, and call `finish` after each chunk."""
        (chunks, width, token_vectors), run = self.shape, self._packing.run
        lookup = self._table.emit(e, 0)
        if token_vectors % run:
            e.prefetch(next_tile, self._norms_at)
            for at, code in enumerate(read_codes(e, self._packing, block, self._vectors)):
                own_chunk, number = e.i64(at // token_vectors), at % token_vectors
                visitor(VectorPlace(own_chunk, e.i64(0), number), range(width), lookup(code, range(width)))
                if number == token_vectors - 1:
                    finish(own_chunk)
            return
        code_tile = math.lcm(run, 4) if token_vectors % math.lcm(run, 4) == 0 else run
        # Where few registers hold sums, a channel's sums are finished before the next one's.
        turns: list[Sequence[int]] = [[channel] for channel in range(width)] if e.level.keeps_order else [range(width)]
        with e.loop(0, chunks) as chunk:
            start, nbytes = chunk * self._packing.nbytes(token_vectors), self._packing.nbytes(code_tile)
            for channels in turns:
                with e.loop(0, token_vectors // code_tile) as part:
                    offset = start + part * nbytes
                    if channels[0] == 0:
                        e.prefetch(next_tile + offset, nbytes)
                    for number, code in enumerate(read_codes(e, self._packing, block + offset, code_tile)):
                        place = VectorPlace(chunk, part * code_tile, number)
                        visitor(place, channels, lookup(code, channels))
            finish(chunk)

    def _weights(self, e: Emitter, weights: Value, place: int) -> Value:
        """The four weights (bytes) for each lane of vector `place`."""
        fours = 16 // self._lanes
        if fours == 1:
            return e.broadcast(weights, I32, 16, 4 * place)
        words = e.load(weights, vector(I32, fours), 4 * fours * place)
        return e.shuffle(words, words, [lane // self._lanes for lane in range(16)])

    def _fold_lanes(self, e: Emitter, total: Value) -> Value:
        """The sums over the lanes of the same code: (p,)."""
        while total.lanes > self._lanes:
            half = total.lanes // 2
            total = e.part(total, 0, half) + e.part(total, half, half)
        return total

    def _add_to_sums(self, e: Emitter, channels: list[Value], factor: Value, target: Value) -> None:
        """Add channels · factor to the sums at `target`. channels: for each channel of a code, (p,) float32."""
        p, width = self._lanes, self._table.width
        for first in range(0, width):
            order = [p * (i % width) + i // width for i in range(first * p, (first + 1) * p)]
            both = e.shuffle(channels[0], channels[-1], order)
            e.store(e.fma(both, factor, e.load(target, both.type, 4 * first * p)), target, 4 * first * p)
