"""Tiles of `polarquant` values: weights of pairs times directions.

For each query, token and pair, weight · radius · factor is rounded to a byte, which multiplies the bytes of level 1's
cosines and sines. Lanes are pairs. Weights and radii are int16; with VBMI level 4 is part of the factor, else of the
radius.

Besides float32's errors there are roundings to half a step. The step of a direction is 1/60, and all directions are
within .14 steps of a whole number; the step of a factor is 1/255 of the largest. The step of weight · radius · factor
is 1/255 of the largest factor times the unit's largest radius times the block's largest weight · size. The size of a
token is the maximum over units of its radius divided by the unit's largest. So an attention sink, a token of large
weight and small value, does not coarsen the others.
"""

from __future__ import annotations

import functools

import numpy as np

from polarlm.engine.backends.native.codecs import ValueTiles, codes_section
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
from polarlm.engine.codecs.schema.sections import Section
from polarlm.engine.codecs.schema.streams import Stream
from polarlm.engine.jit.lang import F32, I8, I16, I32, Emitter, Value, Values, vector

_F16, _I16 = vector(F32, 16), vector(I32, 16)
_CODE = 0x0F0F0F0F  # the low four bits of each byte of a word
# What the largest weight and radius are as int16, the largest factor and direction as bytes. With 60, directions are
# nearly whole numbers (60, 50.87, 33.99, 11.93), and the sum of two products fits int16: 2 · 255 · 60 < 2¹⁵.
_WORD, _FACTOR, _DIRECTION = 32767, 255, 60
# For each channel of a unit, the lane that sums its first 4 tokens, with lanes of cosines before lanes of sines; the
# lane that sums the next 4 tokens follows it.
_CHANNELS = [16 * axis + 4 * pair + 2 * half for half in (0, 1) for pair in range(4) for axis in (0, 1)]


class PolarValues(PolarTiles, ValueTiles):
    """Tiles of values.

    Directions: for each pair, both halves of 8 tokens; the first 8 tokens in the low bits. Rows: for each 8 tokens, the
    first half's, then the second half's.
    """

    side = "values"

    def _code_sections(self, directions: Stream, rows: Stream) -> tuple[Section, Section]:
        tokens = self.tokens // 16, 2, 8
        return (
            codes_section("directions", directions, Packing(4), (tokens, (self.units, 2, 4)), (3, 0, 1, 5, 4, 2)),
            codes_section("rows", rows, None, (tokens, (self.units, 2)), (3, 0, 1, 4, 2)),
        )

    def places(self, token: Value) -> tuple[list[list[tuple[Value, Value]]], list[Value]]:
        eight, token_in_eight = token // 8, token % 8
        shift = (eight * 4).trunc(I32)
        pairs = [[(token_in_eight + (16 * pair + 8 * half), shift) for pair in range(4)] for half in (0, 1)]
        return pairs, [eight * 16 + token_in_eight + 8 * half for half in (0, 1)]

    def _emit_pack_codes(self, e: Emitter, directions: Values, rows: Values, out: Value, out_rows: Value) -> None:
        for half, row in enumerate(rows):
            for eight in (0, 1):
                e.store(e.part(row, 8 * eight, 8).trunc(I8), out_rows, 16 * eight + 8 * half)
            for pair in range(4):
                code = directions[4 * half + pair]
                both = e.part(code, 0, 8) | e.part(code, 8, 8) << 4
                e.store(both.trunc(I8), out, 16 * pair + 8 * half)

    def emit_values(self, e: Emitter, block: Value, next_tile: Value, weights: Values, sums: Values) -> None:
        groups, size = self.tokens // 16, max(32, e.level.byte_register or 64)  # lookups take 32 bytes or 64
        largest_radii, inverses = e.stack(4 * self.units), e.stack(4 * self.units)
        with e.loop(0, self.units) as unit:  # for all units first, so that their dependency chains overlap
            radii = block + unit * (2 * self.tokens * self.radii) + self.radii_at
            largest, inverse = self._largest_radius(e, radii)
            e.store(largest, largest_radii + unit * 4)
            e.store(inverse, inverses + unit * 4)
        token_sizes = e.stack(8 * self.tokens)
        self._measure_tokens(e, block + self.radii_at, inverses, token_sizes)
        tops = [self._store_weights(e, weight, token_sizes) for weight in weights]
        factors = _PairFactors(e, self.levels, size)
        step = factors.largest * COSINES[1].max() / (_FACTOR * _DIRECTION) * (2**15 / _WORD)
        directions = [by_lane(e, [np.rint(x * (_DIRECTION / COSINES[1].max()))], size) for x in (COSINES[1], SINES)]
        kind, lanes = vector(I32, size // 4), [lane % 8 for lane in range(size // 2)]
        scaled = [e.stack(2 * self.tokens * factors.sets) for _ in weights]
        with e.loop(0, self.units) as unit:
            self.prefetch(e, next_tile, unit)
            address, rows = block + unit * (64 * groups), block + unit * (32 * groups) + self.rows_at
            radii = block + unit * (2 * self.tokens * self.radii) + self.radii_at
            inverse = e.load(inverses + unit * 4, F32)
            self._scale(e, radii, rows, inverse, token_sizes + 4 * self.tokens, weights, scaled, factors)
            by_part = []
            for first in range(0, 64, size):
                totals = [[e.variable(e.zero(kind)) for _ in directions] for _ in weights]
                with e.loop(0, groups) as group:
                    codes = e.load(address + group * 64, kind, first)
                    for eight in (0, 1):
                        code = ((codes >> 4 * eight if eight else codes) & _CODE).bits(vector(I8, size))
                        values = [e.level.lookup_in_lanes(e, table, code).bits(kind) for table in directions]
                        words = factors.read(e.load(rows + group * 32, vector(I8, 16), 16 * eight), first)
                        for head, total in zip(scaled, totals, strict=True):
                            e.keep_order()
                            sets = (2 * self.tokens * i + 16 * eight for i in range(factors.sets))
                            at_eight = head + group * 32
                            head_weights = [
                                e.shuffle(x := e.load(at_eight, vector(I16, 8), place), x, lanes) for place in sets
                            ]
                            products = [
                                e.level.scaled_product(e, head_weights[i % len(head_weights)], word)
                                for i, word in enumerate(words)
                            ]
                            bytes_ = e.level.join_words(e, products[0], products[1]).bits(kind)
                            for channel, value in zip(total, values, strict=True):
                                channel.set(e.level.dot4(e, channel.get(), bytes_, value, fits=True))
                by_part.append([[channel.get() for channel in total] for total in totals])
            for number, (top, target) in enumerate(zip(tops, sums, strict=True)):
                cosines, sines = (e.join([part[number][axis] for part in by_part]) for axis in (0, 1))
                parts = [e.shuffle(cosines, sines, [lane + four for lane in _CHANNELS]) for four in (0, 1)]
                own_sums, factor = target + unit * 64, top * step * e.load(largest_radii + unit * 4, F32)
                e.store(e.fma((parts[0] + parts[1]).to_float(), factor, e.load(own_sums, _F16)), own_sums)

    def _largest_radius(self, e: Emitter, radii: Value) -> tuple[Value, Value]:
        """The largest radius of a unit, and its inverse or 0. Radii are ≥ 0, so their bits compare as integers."""
        size = 32 if self.tokens % 32 == 0 else 16
        halves = [e.load(radii, vector(I16, size), first) for first in range(0, 2 * self.tokens * self.radii, 2 * size)]
        top = e.half_to_float(e.imax_lanes(functools.reduce(e.imax, halves)))
        return top, e.select(top > 0.0, e.constant(F32, 1.0) / top, e.zero(F32))

    def _measure_tokens(self, e: Emitter, radii: Value, inverses: Value, out: Value) -> None:
        """Each token's size (see above), and _WORD divided by it → out (2, N) float32."""
        with e.loop(0, 2 * self.tokens, 32) as offset:
            top = e.variable(e.zero(_F16))
            with e.loop(0, self.units) as unit:
                inverse = e.broadcast(inverses + unit * 4, F32, 16)
                address = radii + unit * (2 * self.tokens * self.radii) + offset
                for number in range(self.radii):
                    radius = e.half_to_float(e.load(address, vector(I16, 16), 2 * self.tokens * number))
                    part = radius * inverse
                    top.set(e.select(part > top.get(), part, top.get()))
            largest = top.get()
            e.store(largest, out + offset * 2)
            word = e.select(largest > 0.0, e.constant(_F16, float(_WORD)) / largest, e.zero(_F16))
            e.store(word, out + offset * 2, 4 * self.tokens)

    def _store_weights(self, e: Emitter, weights: Value, sizes: Value) -> Value:
        """Replace the float32 weights by int16 of weight · size, with token sizes (N,) → the largest product.

        Products are ≥ 0, so their bits compare as integers.
        """
        parts = [e.load(weights, _F16, 64 * i) * e.load(sizes, _F16, 64 * i) for i in range(self.tokens // 16)]
        top = e.imax_lanes(functools.reduce(e.imax, (part.bits(_I16) for part in parts))).bits(F32)
        inverse = e.select(top > 0.0, e.const_like(float(_WORD), top) / top, e.zero(F32))
        for number, part in enumerate(parts):
            e.store(e.round(part * inverse).trunc(I16), weights, 32 * number)
        return top

    def _scale(
        self,
        e: Emitter,
        radii: Value,
        rows: Value,
        inverse: Value,
        token_sizes: Value,
        weights: Values,
        out: Values,
        factors: _PairFactors,
    ) -> None:
        """Weights (N,) int16 times the radii of a unit → `out` (sets, N) int16.

        inverse: of the unit's largest radius. token_sizes (N,): _WORD divided by each token's size.
        """
        group_tile = 32 if self.tokens % 32 == 0 else 16
        for first in range(0, self.tokens, group_tile):
            places = [2 * (first + self.tokens * i) for i in range(self.radii)]
            unit_radii = [e.half_to_float(e.load(radii, vector(I16, group_tile), place)) for place in places]
            token_words = e.load(token_sizes, vector(F32, group_tile), 4 * first)
            words = [e.round(radius * inverse * token_words).trunc(I16) for radius in unit_radii]
            if factors.has_level4 < (self.levels == 4):
                groups = range(first // 16, (first + group_tile) // 16)
                lanes = [16 * (token // 8) + 8 * half + token % 8 for half in (0, 1) for token in range(16)]
                cosines = [
                    emit_cosines(e, e.load(rows, vector(I8, 32), 32 * group), lanes, _WORD / COSINES[4].max())
                    for group in groups
                ]
                by_half = (e.join([e.part(x, 16 * half, 16) for x in cosines]) for half in (0, 1))
                words = [e.level.scaled_product(e, words[0], x) for x in by_half]
            for weight, target in zip(weights, out, strict=True):
                own_weights = e.load(weight, vector(I16, group_tile), 2 * first)
                for number, word in enumerate(words):
                    e.store(e.level.scaled_product(e, own_weights, word), target, 2 * (first + self.tokens * number))


class _PairFactors:
    """Factors of pairs in the order of directions, `size` bytes at a time.

    largest: what the largest byte stands for, times the largest cosine of level 4 if factors do not include it.
    sets: sets of scaled weights that they multiply: 1, or one for each half.
    """

    def __init__(self, e: Emitter, levels: int, size: int) -> None:
        self._e, self._size = e, size
        self.has_level4 = levels == 4 and e.level.wide_tables
        self.sets = 1 if self.has_level4 else 2
        pairs = [pair_factors(pair) for pair in range(4)]
        largest, level4 = pairs[0].max(), COSINES[4].max() if levels == 4 else 1.0
        self.largest = float(largest * level4)
        if self.has_level4:
            entries = np.rint(np.outer(COSINES[4], pairs[0]).ravel() * (_FACTOR / self.largest))
            self._look_up = e.level.table(e, e.constant_bytes(entries.astype(np.uint8).tobytes()), 64)
        else:
            tables = [np.rint(pair * (_FACTOR / largest)) for pair in pairs]
            self._tables = [by_lane(e, tables[i : i + size // 16], size) for i in range(0, 4, size // 16)]

    def read(self, rows: Value, first: int) -> list[Value]:
        """rows (16,) uint8 of both halves of 8 tokens → the factors for directions from byte `first` on, int16: of the
        first halves, and of the second halves."""
        e, size = self._e, self._size
        wide = e.shuffle(rows, rows, [lane % 16 for lane in range(size)])
        shifted = (wide.bits(vector(I32, size // 4)) >> 2).bits(wide.type)
        pairs = [(first + byte) // 16 for byte in range(size)]
        level2 = e.constant(wide.type, [0 if pair > 1 else 0x03 for pair in pairs])  # level 2 of the first two pairs
        if self.has_level4:
            flips = e.constant(wide.type, [(0, 3, 12, 15)[pair] for pair in pairs])
            factors = self._look_up((shifted & ~level2 | wide & level2) ^ flips)
        else:
            rest = e.constant(wide.type, [0x0F if pair > 1 else 0x0C for pair in pairs])
            factors = e.level.lookup_in_lanes(e, self._tables[first // size], shifted & rest | wide & level2)
        return [word.bits(vector(I16, size // 2)) for word in interleave(e, factors, e.zero(factors.type))]
