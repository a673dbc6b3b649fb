"""Tiles of `polarquant` keys: scores by table lookup.

Level 1 has 16 directions, so a pair of query channels has 16 products with directions. Rounded to bytes, they are the
prepared query, and a code of level 1 looks its product up. A score is Σ radius · Σ factor · product, where factors are
bytes too. Lanes are tokens. With VBMI one instruction looks up the products of the 4 pairs of a half, and a dot product
of bytes sums them. Elsewhere 16 bytes are looked up at a time, and products are added as int16. The sum of all 4 pairs
fits: the squares of a half's factors add up to 1, and 127 · 127 · √4 < 2¹⁵. Level 4 then multiplies the sums.

Besides float32's errors there are roundings to half a step. The step of a product is 1/127 of the length of the query's
largest pair; a factor's step is 1/255. Without VBMI the latter is 1/127, and the sum of a half is rounded once more,
to twice the product of these steps.
"""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native.codecs import KeyTiles, codes_section
from polarlm.engine.backends.native.codecs.f16 import sum_tile
from polarlm.engine.backends.native.codecs.parts.packing import Packing
from polarlm.engine.backends.native.codecs.parts.polar import (
    COSINES,
    SINES,
    PolarTiles,
    by_lane,
    emit_cosines,
    interleave,
    pair_factors,
)
from polarlm.engine.codecs.polarquant import PolarQuant
from polarlm.engine.codecs.schema.sections import Section
from polarlm.engine.codecs.schema.streams import Stream
from polarlm.engine.jit.lang import F32, I8, I16, I32, Emitter, Value, Values, vector

_F16, _I16 = vector(F32, 16), vector(I32, 16)
_BYTES = vector(I8, 64)
_CODE = 0x0F0F0F0F  # the low four bits of each byte of a word


class PolarKeys(PolarTiles, KeyTiles):
    """Tiles of keys.

    Directions: for each half and each q of 0 and 1, 16 tokens, with pair q in the low bits, q + 2 in the high. Rows: 16
    of the first half, then 16 of the second. A prepared query: 16 products for each pair, then the value of a step.
    """

    side = "keys"

    def __init__(self, codec: PolarQuant, block_size: int, head_dim: int) -> None:
        super().__init__(codec, block_size, head_dim)
        self.query_bytes = 128 * self.units + 64

    def _code_sections(self, directions: Stream, rows: Stream) -> tuple[Section, Section]:
        tokens = self.tokens // 16, 16
        return (
            codes_section("directions", directions, Packing(4), (tokens, (self.units, 2, 2, 2)), (2, 0, 4, 3, 5, 1)),
            codes_section("rows", rows, None, (tokens, (self.units, 2)), (2, 0, 3, 1)),
        )

    def places(self, token: Value) -> tuple[list[list[tuple[Value, Value]]], list[Value]]:
        shifts = [token.emitter.constant(I32, shift) for shift in (0, 4)]
        pairs = [[(token + (32 * half + 16 * (pair % 2)), shifts[pair // 2]) for pair in range(4)] for half in (0, 1)]
        return pairs, [token, token + 16]

    def _emit_pack_codes(self, e: Emitter, directions: Values, rows: Values, out: Value, out_rows: Value) -> None:
        for half, row in enumerate(rows):
            e.store(row.trunc(I8), out_rows, 16 * half)
            for q in (0, 1):
                low, high = directions[4 * half + q], directions[4 * half + q + 2]
                e.store((low | high << 4).trunc(I8), out, 32 * half + 16 * q)

    def emit_query(self, e: Emitter, q: Value, out: Value) -> None:
        sums, top = _sums(e, self.levels), e.variable(e.zero(_F16))
        with e.loop(0, 64 * self.units, 64) as offset:
            square = e.load(q + offset, _F16)
            square = square * square
            top.set(e.fmax(top.get(), square + e.shuffle(square, square, [lane ^ 1 for lane in range(16)])))
        norm = e.sqrt(e.fmax_lanes(top.get()))
        inverse = e.select(norm > 0.0, e.constant(F32, 127.0) / norm, e.zero(F32))
        cosines, sines = (e.constant(_F16, tuple(x.tolist())) * inverse for x in (COSINES[1], SINES))
        with e.loop(0, self.units) as unit:
            for half in (0, 1):
                for pair in range(4):
                    x, y = (e.broadcast(q + unit * 64, F32, 16, 32 * half + 8 * pair + 4 * axis) for axis in (0, 1))
                    products = e.round(e.fma(x, cosines, y * sines)).trunc(I8)
                    e.store(products, out + unit * 128, 16 * sums.order.index(4 * half + pair))
        e.store(norm * (sums.step / 127), out, 128 * self.units)

    def emit_scores(self, e: Emitter, block: Value, next_tile: Value, queries: Values, out: Values) -> None:
        groups = self.tokens // 16
        group_tile = sum_tile(e, 2 * len(queries), groups)  # sums get a quarter of the registers: lookups need many
        sums = _sums(e, self.levels)
        for first in range(0, groups, group_tile):
            totals = [[e.variable(e.zero(_F16)) for _ in range(group_tile)] for _ in queries]
            with e.loop(0, self.units) as unit:
                if not first:
                    self.prefetch(e, next_tile, unit)
                tables = [query + unit * 128 for query in queries]
                radii = block + unit * (2 * self.tokens * self.radii)
                for number in range(group_tile):
                    place = first + number
                    directions = e.load(block + unit * (64 * groups), _I16, 64 * place)
                    rows = e.load(block + unit * (32 * groups), vector(I8, 32), self.rows_at + 32 * place)
                    offsets = (self.radii_at + 32 * place + 2 * self.tokens * i for i in range(self.radii))
                    scales = [e.half_to_float(e.load(radii, vector(I16, 16), offset)) for offset in offsets]
                    sums.read(directions, rows)
                    for table, total in zip(tables, totals, strict=True):
                        for dots, scale in zip(sums.sums(table), scales, strict=True):
                            total[number].set(e.fma(dots.to_float(), scale, total[number].get()))
            for query, total, target in zip(queries, totals, out, strict=True):
                step = e.broadcast(query, F32, 16, 128 * self.units)
                for number, sum_ in enumerate(total):
                    e.store(sum_.get() * step, target, 64 * (first + number))


class _SumsOfHalves:
    """Sums of products over all 4 pairs of a half at once, for levels where one instruction looks up 64 bytes.

    order: the order of the unit's pairs (4 · half + pair) in a prepared query. step: the value of a sum of 1.
    """

    order = tuple(range(8))
    step = 1 / 255

    def __init__(self, e: Emitter, levels: int) -> None:
        self._e, self._radii = e, 5 - levels
        factors = np.outer(COSINES[4] if levels == 4 else np.ones(4), pair_factors(0)).ravel()
        self._look_up = e.level.table(e, e.constant_bytes(np.rint(factors * 255).astype(np.uint8).tobytes()), 64)

    def read(self, directions: Value, rows: Value) -> None:
        """Take the directions (16,) int32 and rows (32,) uint8 of a unit and 16 tokens."""
        e = self._e
        numbers = [e.constant(_BYTES, [16 * (pair + lane // 16 % 2) for lane in range(64)]) for pair in (0, 2)]
        low, high = ((directions >> 4 * i if i else directions) & _CODE for i in (0, 1))
        words = rows.bits(vector(I32, 8))
        second = words >> 2
        first = (second & ~0x03030303) | (words & 0x03030303)
        flips = e.constant(_BYTES, [0, 3, 12, 15] * 16)  # a sine is the cosine at the complement of the code
        self._pairs, self._factors = [], []
        for half in (0, 1):
            order = [64 * (pair // 2) + 16 * (2 * half + pair % 2) + token for token in range(16) for pair in range(4)]
            self._pairs.append(e.shuffle(low.bits(_BYTES) | numbers[0], high.bits(_BYTES) | numbers[1], order))
            order = [32 * (pair // 2) + 16 * half + token for token in range(16) for pair in range(4)]
            upper = e.shuffle(first.bits(rows.type), second.bits(rows.type), order)
            self._factors.append(self._look_up(upper ^ flips).bits(_I16))

    def sums(self, query: Value) -> list[Value]:
        """For each radius of the unit the sums, int32 (16,). query: address of the unit's products."""
        e, totals = self._e, [self._e.zero(_I16) for _ in range(self._radii)]
        for half in (0, 1):
            products = e.level.table(e, query + 64 * half, 64)(self._pairs[half])
            number = half % self._radii
            totals[number] = e.level.dot4(e, totals[number], self._factors[half], products.bits(_I16))
        return totals


class _SumsOfPairs:
    """The same for other levels. A vector holds the pairs q of both halves, or the pairs q + 2."""

    order = 0, 1, 4, 5, 2, 3, 6, 7

    def __init__(self, e: Emitter, levels: int) -> None:
        self._e, self._levels = e, levels
        self.step = (2 if levels == 4 else 1) / 127
        self._tables = [by_lane(e, [np.rint(pair_factors(pair + q) * 127) for q in (0, 1)], 64) for pair in (0, 2)]

    def read(self, directions: Value, rows: Value) -> None:
        e = self._e
        wide = e.shuffle(rows, rows, [16 * (lane // 32) + lane % 16 for lane in range(64)]).bits(_I16)
        first, second = ((wide >> 2) & 0x0C0C0C0C) | (wide & 0x03030303), (wide >> 2) & _CODE
        uppers = [upper.bits(_BYTES) for upper in (first, second)]
        factors = [e.level.lookup_in_lanes(e, table, upper) for table, upper in zip(self._tables, uppers, strict=True)]
        self._factors = interleave(e, factors[0], factors[1])
        self._codes = [(codes & _CODE).bits(_BYTES) for codes in (directions, directions >> 4)]
        self._cosines = emit_cosines(e, rows, range(32), 2**14) if self._levels == 4 else None

    def sums(self, query: Value) -> list[Value]:
        e = self._e
        products = [
            e.level.lookup_in_lanes(e, e.load(query, _BYTES, 64 * i), code) for i, code in enumerate(self._codes)
        ]
        each = interleave(e, products[0], products[1])
        a, b = (e.level.pair_products(e, factor, product) for factor, product in zip(self._factors, each, strict=True))
        lanes = [16 * (i // 16) + 32 * (i // 8 % 2) + i % 8 for i in range(32)]
        total = e.shuffle(a, b, lanes) + e.shuffle(a, b, [lane + 8 for lane in lanes])
        if self._cosines is None:
            return [e.part(total, first, 16).sext(I32) for first in (0, 16)]
        total = e.level.scaled_product(e, total, self._cosines)
        return [(e.part(total, 0, 16) + e.part(total, 16, 16)).sext(I32)]


def _sums(e: Emitter, levels: int) -> _SumsOfHalves | _SumsOfPairs:
    return (_SumsOfHalves if e.level.wide_tables else _SumsOfPairs)(e, levels)
