"""Tiles of recursive polar codes: their bytes, and their decoding.

A vector is cut into U units of 16 channels; a unit is two halves, and a half is 8 channels, 4 pairs. A tile has three
parts:

    directions  (U, N/16, 64) uint8    for each pair of a unit and 16 tokens, the 4-bit angle of level 1
    rows        (U, N/16, 32) uint8    for each half and token, the other angles, two bits each from the highest bit:
                                       level 4, level 3, level 2 of the last two pairs, level 2 of the first two
    radii       (U, R, N) float16      R = 1 with four levels; 2 with three, where each half has a radius

A second half stores the complement of its level 4, whose cosine is the sine of the angle: `rows_of`. A row has eight
bits where the fields have seven, so that all halves are read in the same way: 4.0 bits per value. If D is no multiple
of 16, the last half is zeros. Keys and values order the bytes of a unit differently: `_code_sections`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.codecs import Tiles
from polarlm.engine.backends.native.kernels.encode.load import ANY, load
from polarlm.engine.backends.native.kernels.encode.unit import EncodeArguments, Unit, plain_encoder
from polarlm.engine.codecs.polarquant import (
    CENTRES,
    TAN_SQUARED,
    PolarQuant,
    from_rows,
    level_count,
    rows_of,
    upper_table,
)
from polarlm.engine.codecs.schema.arrays import HALF_MAX
from polarlm.engine.codecs.schema.sections import Section
from polarlm.engine.codecs.schema.streams import Stream, join, split
from polarlm.engine.codecs.schema.streams import codes as codes_of
from polarlm.engine.jit.lang import F32, I8, I16, I32, I64, Emitter, Kernel, Value, Values, vector

COSINES = {level: np.cos(centres) for level, centres in CENTRES.items()}
SINES = np.sin(CENTRES[1])


def pair_factors(pair: int) -> np.ndarray:
    """The product of levels 2 and 3 for a pair of a half, by `level3 << 2 | level2`: (16,) float64."""
    level3, level2 = np.divmod(np.arange(16), 4)
    flip3, flip2 = 3 * (pair // 2), 3 * (pair % 2)  # the sine of an angle is the cosine of its complement
    return COSINES[3][level3 ^ flip3] * COSINES[2][level2 ^ flip2]


class PolarTiles(Tiles):
    side: str

    def __init__(self, codec: PolarQuant, block_size: int, head_dim: int) -> None:
        self.tokens, self.head_dim, self.levels = block_size, head_dim, level_count(head_dim)
        self.units, self.radii = -(-head_dim // 16), 5 - self.levels
        radius = codec.schema(block_size, head_dim)["radius"]
        radii = Section.numbers("radius", radius, ((block_size,), (self.units * self.radii,)), (1, 0))
        codes = self._code_sections(codes_of(4, block_size, head_dim // 2), codes_of(8, block_size, head_dim // 8))
        super().__init__(f"polarquant_{self.side}", codec, block_size, head_dim, *codes, radii)
        _, self.rows_at, self.radii_at, _ = self._sections.offsets

    @abstractmethod
    def _code_sections(self, directions: Stream, rows: Stream) -> tuple[Section, Section]:
        """The sections, which set the order of bytes, of the codes of pairs (N, D/2) and of halves (N, D/8)."""

    def from_streams(self, streams: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"directions": split(streams["level1"], 4), "rows": rows_of(streams), "radius": streams["radius"]}

    def to_streams(self, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        upper = from_rows(stored["rows"], self.levels)
        return {"radius": stored["radius"], "level1": join(stored["directions"], 4), **upper}

    def encoder(self, format: CacheFormat, side: int) -> Kernel[EncodeArguments] | str:
        def write_unit(unit: Unit, channels: Value, halves: int) -> None:
            """Encode the 8 · halves channels of unit `channels`."""
            e, address = unit.e, unit.x + channels * (16 * unit.row)
            with unit.vectors() as offset:
                x = [e.load(address + offset, vector(F32, 16), unit.row * channel) for channel in range(8 * halves)]
                self._emit_pack(e, *_quantize(e, x, self.levels), unit.block.tiles, channels, offset)

        def write(unit: Unit) -> None:
            unit.report(load(unit, ANY))
            with unit.e.loop(0, self.head_dim // 16) as channels:
                write_unit(unit, channels, 2)
            if self.head_dim % 16:
                write_unit(unit, unit.e.i64(self.head_dim // 16), 1)

        return plain_encoder(self.name, format, side, write)

    def prefetch(self, e: Emitter, tile: Value, unit: Value) -> None:
        each = 2 * self.tokens
        for offset, nbytes in ((0, 2 * each), (self.rows_at, each), (self.radii_at, each * self.radii)):
            e.prefetch(tile + unit * nbytes + offset, nbytes)

    def _emit_pack(
        self, e: Emitter, directions: Values, rows: Values, radii: Values, tile: Value, unit: Value, offset: Value
    ) -> None:
        """Codes of 16 tokens and of both halves of a unit, or only its first → their bytes in a tile.

        directions: codes of the pairs; rows: of the halves, int32 (16,) each; radii: float16 bits, int16 (16,). The
        first token is `offset` / 4.
        """
        missing = [e.zero(rows[0].type)] * (2 - len(rows))
        directions, rows = [*directions, *missing * 4], [*rows, *missing]
        group = unit * (self.tokens // 16) + (offset >> 6)
        self._emit_pack_codes(e, directions, rows, tile + group * 64, tile + group * 32 + self.rows_at)
        for number in range(self.radii):
            half = radii[number] if number < len(radii) else e.zero(radii[0].type)
            address = tile + unit * (2 * self.tokens * self.radii) + (offset >> 1)
            e.store(half, address, self.radii_at + 2 * self.tokens * number)

    @abstractmethod
    def _emit_pack_codes(self, e: Emitter, directions: Values, rows: Values, out: Value, out_rows: Value) -> None:
        """Codes of 16 tokens and both halves of a unit → the bytes of directions (64) and of rows (32)."""

    @abstractmethod
    def places(self, token: Value) -> tuple[list[list[tuple[Value, Value]]], list[Value]]:
        """Where a unit's bytes for 16 tokens hold the codes of token 0 ≤ t < 16 (t: int64).

        Returns for each half and pair its direction's byte and bit shift (int32), and for each half its row's byte.
        """

    def emit_decode(self, e: Emitter, block: Value, out: Value, scratch: Value) -> None:
        directions = e.constant_bytes(np.stack([COSINES[1], SINES], -1).astype("<f4").tobytes())
        factors = e.constant_bytes(upper_table(self.levels).astype("<f4").tobytes())
        whole = self.head_dim // 16

        def write(token: Value, unit: Value, halves: int) -> None:
            group = unit * (self.tokens // 16) + token // 16
            directions_at, rows = self.places(token % 16)
            for half in range(halves):
                points = []
                for place, shift in directions_at[half]:
                    code = (e.load(block + group * 64 + place, I8).zext(I32) >> shift & 15).zext(I64)
                    points.append(e.load(directions + code * 8, vector(F32, 2)))
                row = e.load(block + group * 32 + rows[half], I8, self.rows_at).zext(I64)
                address = block + ((unit * self.radii + half % self.radii) * self.tokens + token) * 2
                radius = e.half_to_float(e.load(address, I16, self.radii_at))
                value = e.join(points) * e.load(factors + row * 32, vector(F32, 8)) * radius
                e.store(value, out + token * (4 * self.head_dim) + unit * 64, 32 * half)

        with e.loop(0, self.tokens) as token:
            with e.loop(0, whole) as unit:
                write(token, unit, 2)
            if self.head_dim % 16:
                write(token, e.i64(whole), 1)


def emit_cosines(e: Emitter, rows: Value, lanes: Sequence[int], one: float) -> Value:
    """32 rows → cosines of level 4 times `one`, int16 (32,). lanes: the row that each result comes from."""
    words = np.resize(np.rint(COSINES[4] * one).astype("<i2"), 16).view(np.uint8).reshape(16, 2)
    index = ((rows.bits(vector(I32, 8)) >> 6) & 0x03030303).bits(rows.type)
    low, high = (e.level.lookup_in_lanes(e, by_lane(e, [table], 32), index) for table in words.T)
    return e.shuffle(low, high, [place for lane in lanes for place in (lane, 32 + lane)]).bits(vector(I16, 32))


def by_lane(e: Emitter, tables: Sequence[np.ndarray], width: int) -> Value:
    """A constant of `width` bytes in 128-bit lanes, which hold the tables (16 bytes each) in turn."""
    entries = np.concatenate(tables).astype(np.int64) & 255
    return e.constant(vector(I8, width), entries.tolist() * (width // len(entries)))


def interleave(e: Emitter, a: Value, b: Value) -> list[Value]:
    """In each 128-bit lane, the low 8 bytes of a and b interleaved; then the high 8 bytes."""
    size = a.lanes
    return [
        e.shuffle(a, b, [lane // 16 * 16 + first + lane % 16 // 2 + lane % 2 * size for lane in range(size)])
        for first in (0, 8)
    ]


def _quantize(e: Emitter, x: Values, levels: int) -> tuple[list[Value], list[Value], list[Value]]:
    """16 or 8 channels of 16 tokens → codes of pairs on level 1, rows of halves, int32; radii, float16 as int16. They
    equal NumPy's: it makes the same comparisons of the same float32."""
    squares = [channel * channel for channel in x]
    codes: dict[int, list[Value]] = {}
    for level in range(1, levels + 1):
        quarters = [_quarter(e, a, b, level) for a, b in zip(squares[::2], squares[1::2], strict=True)]
        codes[level], squares = [code for code, _ in quarters], [total for _, total in quarters]
    directions = []
    for code, a, b in zip(codes[1], x[::2], x[1::2], strict=True):
        flipped = e.select(a < 0.0, code ^ 7, code)
        directions.append(e.select(b < 0.0, flipped ^ 15, flipped))
    rows = []
    for half, level3 in enumerate(codes[3]):
        first, second = codes[2][2 * half : 2 * half + 2]
        row = level3 << 4 | second << 2 | first
        if levels == 4:
            row = row | (codes[4][0] ^ 3 * half) << 6
        rows.append(row)
    return directions, rows, [e.float_to_half(e.fmin(e.sqrt(total), float(HALF_MAX))) for total in squares]


def _quarter(e: Emitter, a: Value, b: Value, level: int) -> tuple[Value, Value]:
    """a², b² (16,) → the codes of their angles within a quadrant, int32, and a² + b²."""
    tan_squared = float(TAN_SQUARED[level])
    code = e.zero(vector(I32, 16))
    for beyond in (b > a * tan_squared, b > a, b * tan_squared > a):
        code = e.select(beyond, code + 1, code)
    return code, a + b
