"""Tiles of half precision.

    keys    (D, N) float16: lanes are tokens, so nothing is summed across lanes; N is a multiple of 16
    values  (N, D') float16, D' = D rounded up to 16: lanes are channels

A prepared query is its D float32. Sums are float32, in the order of channels or tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.codecs.parts.sections import SectionTiles
from polarlm.engine.backends.native.kernels.encode.formats import without_metric
from polarlm.engine.backends.native.kernels.encode.groups import encode_halves
from polarlm.engine.backends.native.kernels.encode.unit import EncodeArguments
from polarlm.engine.backends.native.kernels.multiply import pieces
from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.schema.sections import Section
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I16, Value, vector

_F16, _I16 = vector(F32, 16), vector(I16, 16)


def keys(codec: Codec, block_size: int, head_dim: int) -> HalfKeys | None:
    return HalfKeys(codec, block_size, head_dim) if block_size % 16 == 0 else None


def values(codec: Codec, block_size: int, head_dim: int) -> HalfValues | None:
    return HalfValues(codec, block_size, head_dim) if block_size % 16 == 0 else None


def sum_tile(e: Emitter, heads: int, vectors: int) -> int:
    """A divisor of `vectors`: as many vectors of 16 lanes as have their sums, for all heads, in half the registers."""
    most = e.level.registers // 2 // (heads * (16 // e.level.lanes))
    return max(count for count in range(1, vectors + 1) if vectors % count == 0 and count <= max(1, most))


class HalfKeys(SectionTiles):
    """Tiles of keys."""

    def __init__(self, codec: Codec, block_size: int, head_dim: int) -> None:
        values = codec.schema(block_size, head_dim)["values"]
        section = Section.numbers("values", values, ((block_size,), (head_dim,)), (1, 0))
        super().__init__("half_keys", codec, block_size, head_dim, section)
        self._tokens, self._head_dim = block_size, head_dim
        self.query_bytes = -(-head_dim // 16) * 64

    def encoder(self, format: CacheFormat, side: int) -> Kernel[EncodeArguments] | None:
        encoding = without_metric(format, side)
        return None if encoding is None else encode_halves(encoding, True, self.name)

    def emit_query(self, e: Emitter, q: Value, out: Value) -> None:
        for first in range(0, self._head_dim, 16):
            e.store(e.load(q, _F16, 4 * first), out, 4 * first)

    def emit_scores(
        self, e: Emitter, block: Value, after: Value, queries: Sequence[Value], out: Sequence[Value]
    ) -> None:
        together = sum_tile(e, len(queries), self._tokens // 16)
        unrolled = math.gcd(self._head_dim, 4)
        for first in range(0, self._tokens // 16, together):
            totals = [[e.variable(e.zero(_F16)) for _ in range(together)] for _ in queries]
            with e.loop(0, self._head_dim, unrolled) as channel:
                offset = channel * (2 * self._tokens)
                if not first:
                    e.prefetch(after + offset, 2 * self._tokens * unrolled)
                row = block + offset
                own = [query + channel * 4 for query in queries]
                for step in range(unrolled):
                    factors = [e.broadcast(query, F32, 16, 4 * step) for query in own]
                    for group in range(together):
                        place = 2 * self._tokens * step + 32 * (first + group)
                        key = e.half_to_float(e.load(row, _I16, place))
                        for factor, total in zip(factors, totals, strict=True):
                            total[group].set(e.fma(key, factor, total[group].get()))
            for total, target in zip(totals, out, strict=True):
                for group, sum_ in enumerate(total):
                    e.store(sum_.get(), target, 64 * (first + group))

    def emit_decode(self, e: Emitter, block: Value, out: Value, scratch: Value) -> None:
        for channel in range(0, self._head_dim, 16):
            own = range(channel, min(channel + 16, self._head_dim))
            with e.loop(0, self._tokens, 16) as token:
                at, target = block + token * 2, out + token * (4 * self._head_dim)
                rows = [e.half_to_float(e.load(at, _I16, 2 * self._tokens * i)) for i in own]
                square = e.transposed(rows + rows[-1:] * (16 - len(rows)))
                for number, row in enumerate(square):
                    e.store(e.part(row, 0, len(own)), target, 4 * (self._head_dim * number + channel))


class HalfValues(SectionTiles):
    """Tiles of values."""

    def __init__(self, codec: Codec, block_size: int, head_dim: int) -> None:
        values = codec.schema(block_size, head_dim)["values"]
        self._tokens, self._head_dim, self._row = block_size, head_dim, -(-head_dim // 16) * 16
        section = Section.numbers("values", values, ((block_size,), (self._row,)), (0, 1))
        super().__init__("half_values", codec, block_size, head_dim, section)

    def encoder(self, format: CacheFormat, side: int) -> Kernel[EncodeArguments] | None:
        encoding = without_metric(format, side)
        return None if encoding is None else encode_halves(encoding, False, self.name)

    def emit_values(
        self, e: Emitter, block: Value, after: Value, weights: Sequence[Value], sums: Sequence[Value]
    ) -> None:
        parts = self._row // 16
        together = sum_tile(e, len(weights), parts)
        for first in range(0, parts, together):
            places = [64 * (first + part) for part in range(together)]
            totals = [[e.variable(e.load(target, _F16, place)) for place in places] for target in sums]
            with e.loop(0, self._tokens, 4) as token:
                offset = token * (2 * self._row)
                if not first:
                    e.prefetch(after + offset, 8 * self._row)
                row = block + offset
                own = [weight + token * 4 for weight in weights]
                for step in range(4):
                    factors = [e.broadcast(weight, F32, 16, 4 * step) for weight in own]
                    for part in range(together):
                        value = e.half_to_float(e.load(row, _I16, 2 * self._row * step + 32 * (first + part)))
                        for factor, total in zip(factors, totals, strict=True):
                            total[part].set(e.fma(value, factor, total[part].get()))
            for total, target in zip(totals, sums, strict=True):
                for place, sum_ in zip(places, total, strict=True):
                    e.store(sum_.get(), target, place)

    def emit_decode(self, e: Emitter, block: Value, out: Value, scratch: Value) -> None:
        with e.loop(0, self._tokens) as token:
            row, target = block + token * (2 * self._row), out + token * (4 * self._head_dim)
            for first, lanes in pieces(self._head_dim):
                e.store(e.half_to_float(e.load(row, vector(I16, lanes), 2 * first)), target, 4 * first)
