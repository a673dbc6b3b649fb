"""Tiles of `q8_0` and `q4_0`: codes, and a scale for each 32 channels of a token.

V vectors of 64 codes, packed by `parts.packing`, then the scales.

    keys    lanes are tokens: (D/32, N/16, 8) vectors, each of 16 tokens x 4 channels; scales (D/32, N) float16
    values  lanes are channels: (D/16, N/4) vectors, each of 16 channels x 4 tokens; scales (D/32, N) float16

Products are exact sums of bytes times bytes. Besides float32's errors there is one rounding of each:

    a query        half a step for each 32 channels, 1/254 of the largest of them
    a weight       times the scale of its token's 32 channels: half a step, 1/254 of the largest of the block
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.codecs import KeyTiles, Tiles, ValueTiles, codes_section
from polarlm.engine.backends.native.codecs.f16 import sum_tile
from polarlm.engine.backends.native.codecs.parts.decoding import emit_pack_norms, emit_points
from polarlm.engine.backends.native.codecs.parts.packing import Packing, pack_bytes
from polarlm.engine.backends.native.kernels.encode.load import load
from polarlm.engine.backends.native.kernels.encode.rounding import write_codes
from polarlm.engine.backends.native.kernels.encode.unit import EncodeArguments, Unit, plain_encoder
from polarlm.engine.codecs.ggml import Grouped
from polarlm.engine.codecs.schema.arrays import SATURATION
from polarlm.engine.codecs.schema.sections import Section
from polarlm.engine.codecs.schema.streams import Stream
from polarlm.engine.jit.lang import F32, I8, I16, I32, Emitter, Kernel, Value, Values, round_to, vector

_F16, _I16, _HALVES = vector(F32, 16), vector(I32, 16), vector(I16, 16)
_GROUP = 32
_LIMIT = 127.0


class _GroupedTiles(Tiles):
    _side: str
    by_token: bool  # whether the codes that `emit_pack` reads are contiguous by token

    def __init__(self, codec: Grouped, block_size: int, head_dim: int) -> None:
        self._tokens, self._head_dim, self._groups = block_size, head_dim, head_dim // _GROUP
        self._packing, self._zero = Packing(codec.bits), codec.zero
        self._vectors = block_size * head_dim // 64
        schema = codec.schema(block_size, head_dim)
        self._codes = self._codes_section(schema["codes"])
        scales = Section.numbers("scale", schema["scale"], ((block_size,), (self._groups,)), (1, 0))
        super().__init__(f"{codec.name}_{self._side}", codec, block_size, head_dim, self._codes, scales)
        _, self._scales_at, _ = self._sections.offsets

    def encoder(self, format: CacheFormat, side: int) -> Kernel[EncodeArguments] | None:
        choose = _round_to_bytes if self._packing.bits == 8 else _round_to_nibbles

        def write(unit: Unit) -> None:
            e = unit.e
            unit.report(load(unit, float(SATURATION)))
            scales = unit.allocate(unit.dim // _GROUP * unit.row)
            with e.loop(0, unit.dim // _GROUP) as group, unit.vectors() as offset:
                first = group * (_GROUP * unit.row) + offset
                e.store(choose(unit, unit.x + first, unit.codes + first), scales + group * unit.row + offset)
            codes = unit.codes
            if self.by_token:
                write_codes(unit, unit.errors)
                codes = unit.errors
            self.emit_pack(e, codes, scales, unit.block.tiles)

        return plain_encoder(self.name, format, side, write, self._packing.bits)

    @abstractmethod
    def _codes_section(self, codes: Stream) -> Section:
        """The section of the codes (N, D/32, 32)."""

    def emit_pack(self, e: Emitter, codes: Value, scales: Value, tile: Value) -> None:
        """Pack codes, plus their zero point, and scales (D/32, N) float32 into the tile.

        codes (D, N) int32; if `by_token` (N, D) uint8.
        """
        run = self._packing.run
        with e.loop(0, self._vectors // run) as number:
            vectors = [[self._emit_vector(e, codes, number * run + i)] for i in range(run)]
            self._packing.emit_pack(e, vectors, tile + number * self._packing.nbytes(run))
        emit_pack_norms(e, scales, self._groups * self._tokens, np.dtype(np.float16), tile + self._scales_at)

    @abstractmethod
    def _emit_vector(self, e: Emitter, codes: Value, number: Value) -> Value:
        """A vector of codes: 4 bytes in each of 16 lanes."""

    def emit_decode(self, e: Emitter, block: Value, out: Value, scratch: Value) -> None:
        scales_at = block + self._scales_at
        scales = [self._scales(e, scales_at + 2 * self._tokens * group) for group in range(self._groups)]
        points = np.arange(1 << self._packing.bits)[:, None] - self._zero
        places = self._codes.places.reshape(self._tokens, self._head_dim)
        emit_points(e, block, self._packing, places, points, scales, out, scratch)

    def _dot(self, e: Emitter, total: Value, code: list[Value], signed: Value) -> Value:
        codes = code[0].bits(_I16)
        if e.level.signed_dots and self._packing.bits == 4:
            return e.level.dot4_signed(e, total, codes, signed)
        return e.level.dot4(e, total, codes, signed, fits=self._packing.bits == 4)

    def _scales(self, e: Emitter, address: Value) -> list[Value]:
        """The scales of a group, float32, 16 tokens per vector."""
        return [e.half_to_float(e.load(address, _HALVES, 2 * first)) for first in range(0, self._tokens, 16)]


def _inverse(e: Emitter, scale: Value) -> Value:
    """1 / scale, or 0 where that overflows."""
    inverse = e.constant(_F16, 1.0) / scale
    return e.select(e.absolute(inverse) < float("inf"), inverse, e.zero(_F16))


def _round_to_bytes(unit: Unit, x: Value, codes: Value) -> Value:
    """32 rows at x → codes + 128 at `codes`, int32 rows; returns the scales (16,)."""
    e, top = unit.e, unit.e.variable(unit.e.zero(_F16))
    with e.loop(0, _GROUP * unit.row, unit.row) as row:
        top.set(e.fmax(top.get(), e.absolute(e.load(x + row, _F16))))
    scale = top.get() / 127.0
    inverse = _inverse(e, scale)
    with e.loop(0, _GROUP * unit.row, unit.row) as row:
        scaled = e.load(x + row, _F16) * inverse
        size = e.absolute(scaled)
        whole = size.to_int()
        is_half = size - whole.to_float() >= 0.5
        whole = e.select(is_half, whole + 1, whole)
        e.store(e.select(scaled < 0.0, -whole, whole) + 128, codes + row)
    return scale


def _round_to_nibbles(unit: Unit, x: Value, codes: Value) -> Value:
    """32 rows at x → codes at `codes`, int32 rows; returns the scales (16,)."""
    e = unit.e
    top, farthest = e.variable(e.zero(_F16)), e.variable(e.load(x, _F16))
    with e.loop(0, _GROUP * unit.row, unit.row) as row:
        value = e.load(x + row, _F16)
        size = e.absolute(value)
        is_farther = size > top.get()
        top.set(e.select(is_farther, size, top.get()))
        farthest.set(e.select(is_farther, value, farthest.get()))
    scale = farthest.get() / -8.0
    inverse = _inverse(e, scale)
    with e.loop(0, _GROUP * unit.row, unit.row) as row:
        e.store(e.fmin(e.load(x + row, _F16) * inverse + 8.5, 15.0).to_int(), codes + row)
    return scale


class GroupedKeys(_GroupedTiles, KeyTiles):
    """Tiles of keys.

    A prepared query: int8 (D,); the step of each 32 channels, float32 (D/32,); and the start value of their sum of
    products, int32 (D/32,): minus the sum of the bytes times the zero point.
    """

    _side = "keys"
    by_token = False

    def __init__(self, codec: Grouped, block_size: int, head_dim: int) -> None:
        super().__init__(codec, block_size, head_dim)
        self.query_bytes = -(-(head_dim + 8 * self._groups) // 64) * 64

    def _codes_section(self, codes: Stream) -> Section:
        cuts = (self._tokens // 16, 16), (self._groups,), (8, 4)
        return codes_section("codes", codes, self._packing, cuts, (2, 0, 3, 1, 4))

    def _emit_vector(self, e: Emitter, codes: Value, number: Value) -> Value:
        row, parts = 4 * self._tokens, self._tokens // 16
        group, part, place = number // (8 * parts), number // 8 % parts, number % 8
        address = codes + (group * 8 + place) * (4 * row) + part * 64
        return pack_bytes([e.load(address, _I16, row * i) for i in range(4)])

    def emit_query(self, e: Emitter, q: Value, out: Value) -> None:
        for group in range(self._groups):
            halves = [e.load(q, _F16, 4 * _GROUP * group + 64 * half) for half in (0, 1)]
            integers, top = round_to(e, halves, _LIMIT)
            for half, integer in enumerate(integers):
                e.store(integer.trunc(I8), out, _GROUP * group + 16 * half)
            e.store(top * (1 / _LIMIT), out, self._head_dim + 4 * group)
            start = e.sum_lanes(integers[0] + integers[1]) * -self._zero
            e.store(start, out, self._head_dim + 4 * self._groups + 4 * group)

    def emit_scores(self, e: Emitter, block: Value, next_tile: Value, queries: Values, out: Values) -> None:
        parts, run = self._tokens // 16, self._packing.run
        # With one vector of sums at a time, LLVM would spill the queries' factors to the stack for the next one.
        group_tile = sum_tile(e, len(queries), parts)
        totals = [[e.variable(e.zero(_F16)) for _ in range(parts)] for _ in queries]
        e.prefetch(next_tile + self._scales_at, self.nbytes - self._scales_at)

        def add(group: Value, chunks: Sequence[int]) -> None:
            """Add the products of 32 channels, of the tokens of these chunks."""
            offset, nbytes = group * self._packing.nbytes(8 * parts), self._packing.nbytes(8 * parts)
            if not chunks[0]:
                e.prefetch(next_tile + offset, nbytes)
            address = block + offset
            scales = self._scales(e, block + group * (2 * self._tokens) + self._scales_at)
            group_queries = [query + group * _GROUP for query in queries]
            steps = [query + group * 4 + self._head_dim for query in queries]
            for chunk in chunks:
                starts = [e.broadcast(step, I32, 16, 4 * self._groups) for step in steps]
                dots = [list(starts) for _ in range(group_tile)]
                for first in range(0, 8, run):
                    for part, sums in enumerate(dots, chunk):
                        start = address + self._packing.nbytes(8 * part + first)
                        e.keep_order()
                        for place, code in enumerate(self._packing.emit(e, start, run), first):
                            for head, query in enumerate(group_queries):
                                e.keep_order()
                                factor = e.broadcast(query, I32, 16, 4 * place)
                                sums[head] = self._dot(e, sums[head], code, factor)
                for part, sums in enumerate(dots, chunk):
                    for total, dot, step in zip(totals, sums, steps, strict=True):
                        factor = scales[part] * e.broadcast(step, F32, 16)
                        total[part].set(e.fma(dot.to_float(), factor, total[part].get()))

        chunks = range(0, parts, group_tile)
        # Where few registers hold the sums, a chunk's sums are finished before the next one's.
        turns: list[Sequence[int]] = [[chunk] for chunk in chunks] if e.level.keeps_order else [chunks]
        for own_chunks in turns:
            with e.loop(0, self._groups) as group:
                add(group, own_chunks)
        for total, target in zip(totals, out, strict=True):
            for part, score in enumerate(total):
                e.store(score.get(), target, 64 * part)


class GroupedValues(_GroupedTiles, ValueTiles):
    _side = "values"
    by_token = True

    def _codes_section(self, codes: Stream) -> Section:
        cuts = (self._tokens // 4, 4), (self._groups,), (2, 16)
        return codes_section("codes", codes, self._packing, cuts, (2, 3, 0, 4, 1))

    def _emit_vector(self, e: Emitter, codes: Value, number: Value) -> Value:
        fours = self._tokens // 4
        address = codes + number % fours * (4 * self._head_dim) + number // fours * 16
        return pack_bytes([e.load(address, vector(I8, 16), i * self._head_dim).zext(I32) for i in range(4)])

    def emit_values(self, e: Emitter, block: Value, next_tile: Value, weights: Values, sums: Values) -> None:
        fours, run = self._tokens // 4, self._packing.run
        byte_weights = [e.stack(self._tokens) for _ in weights]
        half_bytes = self._packing.nbytes(fours)
        # Both halves of a group share the loads of weights where registers have room for the sums of both.
        halves = [(0, 1)] if e.level.has_room else [(0,), (1,)]
        e.prefetch(next_tile + self._scales_at, self.nbytes - self._scales_at)
        with e.loop(0, self._groups) as group:
            e.prefetch(next_tile + group * (2 * half_bytes), 2 * half_bytes)
            scales = self._scales(e, block + group * (2 * self._tokens) + self._scales_at)
            steps, starts = [], []
            for weight, target in zip(weights, byte_weights, strict=True):
                scaled = [e.load(weight, _F16, 64 * i) * scale for i, scale in enumerate(scales)]
                integers, top = round_to(e, scaled, _LIMIT)
                total = integers[0]
                for integer in integers[1:]:
                    total = total + integer
                for i, integer in enumerate(integers):
                    e.store(integer.trunc(I8), target, 16 * i)
                steps.append(top * (1 / _LIMIT))
                starts.append(e.splat(e.sum_lanes(total) * -self._zero, 16))
            address = block + group * (2 * half_bytes)
            for group_tile in halves:
                totals = {(half, head): e.variable(start) for half in group_tile for head, start in enumerate(starts)}
                code_tile = max(run, 4)
                with e.loop(0, fours, code_tile) as first:
                    tile = address + (first // run) * self._packing.nbytes(run)
                    for place in range(0, code_tile, run):
                        codes = {
                            half: self._packing.emit(e, tile + (half * half_bytes + self._packing.nbytes(place)), run)
                            for half in group_tile
                        }
                        for i in range(run):
                            for head, weight in enumerate(byte_weights):
                                e.keep_order()
                                factor = e.broadcast(weight + first * 4, I32, 16, 4 * (place + i))
                                for half in group_tile:
                                    sum_ = totals[half, head]
                                    sum_.set(self._dot(e, sum_.get(), codes[half][i], factor))
                for (half, head), sum_ in totals.items():
                    target = sums[head] + group * (4 * _GROUP)
                    old = e.load(target, _F16, 64 * half)
                    e.store(e.fma(sum_.get().to_float(), steps[head], old), target, 64 * half)


keys, values = GroupedKeys, GroupedValues
