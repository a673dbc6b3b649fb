"""Codes of a few bits in vectors of 64 bytes: the bit planes of `engine.codecs.schema.planes`, as LLVM code."""

from __future__ import annotations

import functools
import operator

from polarlm.engine.codecs.schema.planes import Planes
from polarlm.engine.jit.lang import I8, I32, Emitter, Value, vector

BYTES = vector(I8, 64)
_WORDS = vector(I32, 16)


class Packing(Planes):
    """`Planes` whose unit is a vector of 64 bytes."""

    def nbytes(self, vectors: int) -> int:
        """Bytes that this many vectors of codes take."""
        return 64 * self.stored_count(vectors)

    def emit(self, e: Emitter, address: Value, count: int, *, dirty: bool = False) -> list[list[Value]]:
        """The codes of a run of `count` vectors at `address`: bytes (64,) each; for ten bits, low bytes and high bits.

        dirty: for 7 and 6 bits, the unused high bits of a byte may hold anything.
        """
        stored = [e.load(address, _WORDS, 64 * i) for i in range(self.stored_count(count))]
        codes: list[list[Value]] = [[] for _ in range(count)]
        for code, low, byte, place, bits in self.pieces(count):
            is_clean = bits == 8 or (dirty and bits == self.bits > 5)
            part = _shift(stored[byte], low % 8 - place)
            part = part if is_clean else part & _bytes((1 << bits) - 1 << low % 8)
            if low % 8:
                codes[code][-1] = codes[code][-1] | part
            else:
                codes[code].append(part)
        return [[part.bits(BYTES) for part in code] for code in codes]

    def emit_pack(self, e: Emitter, codes: list[list[Value]], address: Value) -> None:
        """The inverse of `emit`: the codes of a run's vectors, unused bits zero → the stored vectors at `address`."""
        words: list[list[Value]] = [[] for _ in range(self.stored_count(len(codes)))]
        for code, low, byte, place, bits in self.pieces(len(codes)):
            part = codes[code][low // 8].bits(_WORDS)
            if bits < min(self.bits - low // 8 * 8, 8):
                part = part & _bytes((1 << bits) - 1 << low % 8)
            words[byte].append(_shift(part, place - low % 8))
        for number, parts in enumerate(words):
            e.store(functools.reduce(operator.or_, parts), address, 64 * number)


def pack_bytes(codes: list[Value]) -> Value:
    """Four vectors of codes (16,) int32 below 256 → (16,) int32 whose four bytes are these codes."""
    return functools.reduce(operator.or_, (_shift(code, 8 * i) for i, code in enumerate(codes)))


def _shift(word: Value, bits: int) -> Value:
    return word << bits if bits > 0 else word >> -bits if bits else word


def _bytes(value: int) -> int:
    """An int32 whose four bytes are all `value`, as a signed number."""
    return int.from_bytes(bytes([value] * 4), "little", signed=True)
