"""Codes of a few bits in vectors of 64 bytes, packed without unused bits.

Vectors are packed in runs. The codes of one run share the bytes of its stored vectors, place by place:

    8 bits    1 in 1    the codes themselves
    7 bits    8 in 7    stored vector i has code i below its top bit, which is bit i of the eighth
    6 bits    4 in 3    stored vector i has code i in its low six bits; its top two are bits 2i and 2i + 1 of the fourth
    4 bits    2 in 1    the first in the low half of its byte
    3 bits    8 in 3    stored vector i has codes 2i and 2i + 1 in its low six bits; its top two are bits 0 and 1 of
                        code 6 (i = 0), bit 2 of codes 6 and 7 (i = 1), bits 0 and 1 of code 7 (i = 2)
    2 bits    4 in 1    the first in the lowest bits
    10 bits   4 in 5    four vectors of low bytes, then one of the bits above, as for 2 bits

The last run may be shorter. For 7 and 6 bits, only the last vector of a full run is spread over the others.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import numpy as np

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import I8, I32, Value, vector

BYTES = vector(I8, 64)
_WORDS = vector(I32, 16)


@dataclass(frozen=True)
class Packing:
    """The packing of codes of `bits` bits."""

    bits: int

    @property
    def run(self) -> int:
        """Vectors that share bytes."""
        return {8: 1, 7: 8, 6: 4, 4: 2, 3: 8, 2: 4, 10: 4}[self.bits]

    def stored(self, count: int) -> int:
        """Vectors that `count` vectors, at most a run, are stored in."""
        return {8: count, 7: min(count, 7), 6: min(count, 3), 4: 1, 3: 3, 2: 1, 10: count + 1}[self.bits]

    def nbytes(self, vectors: int) -> int:
        """Bytes of that many vectors."""
        runs, rest = divmod(vectors, self.run)
        return 64 * (runs * self.stored(self.run) + (self.stored(rest) if rest else 0))

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """codes (..., V, 64) below 2^bits, uint8 or uint16 → (..., nbytes(V)) uint8."""
        *lead, vectors, width = codes.shape
        whole = vectors // self.run * self.run
        parts = [self._pack_runs(codes[..., :whole, :].reshape(*lead, -1, self.run, width)).reshape(*lead, -1)]
        if whole < vectors:
            parts.append(self._pack_runs(codes[..., None, whole:, :]).reshape(*lead, -1))
        return np.concatenate(parts, axis=-1)

    def unpack(self, packed: np.ndarray, vectors: int) -> np.ndarray:
        """The inverse of `pack`: (..., nbytes(V)) uint8 → (..., V, 64) uint8, or uint16 for ten bits."""
        *lead, _ = packed.shape
        rest = vectors % self.run
        whole = self.nbytes(vectors - rest)
        parts = [self._unpack_runs(packed[..., :whole].reshape(*lead, -1, self.stored(self.run), 64), self.run)]
        parts[0] = parts[0].reshape(*lead, -1, 64)
        if rest:
            parts.append(self._unpack_runs(packed[..., whole:].reshape(*lead, -1, 64), rest))
        return np.concatenate(parts, axis=-2)

    def _pack_runs(self, codes: np.ndarray) -> np.ndarray:
        """codes (..., vectors of a run, 64) → (..., stored, 64) uint8."""
        count, bits = codes.shape[-2], self.bits
        vectors = [codes[..., i, :] for i in range(count)]
        if bits == 8:
            return codes.astype(np.uint8)
        if bits == 10:
            high = _shifted([code >> 8 for code in vectors], 2)
            return np.stack([*(code & 255 for code in vectors), high], -2).astype(np.uint8)
        if bits in (2, 4):
            return _shifted(vectors, bits)[..., None, :].astype(np.uint8)
        if bits == 3:
            vectors += [np.zeros_like(vectors[0])] * (8 - count)
            a, b = vectors[6:]
            tops = a & 3, a >> 2 | b >> 2 << 1, b & 3
            stored = [vectors[2 * i] | vectors[2 * i + 1] << 3 | top << 6 for i, top in enumerate(tops)]
            return np.stack(stored, -2).astype(np.uint8)
        spread = 8 - bits  # bits of the last vector in each of the others
        low = vectors[: self.run - 1]
        if count == self.run:
            last = vectors[-1]
            low = [code | (last >> spread * i & (1 << spread) - 1) << bits for i, code in enumerate(low)]
        return np.stack(low, -2).astype(np.uint8)

    def _unpack_runs(self, stored: np.ndarray, count: int) -> np.ndarray:
        """stored (..., stored, 64) → (..., count, 64)."""
        bits, mask = self.bits, (1 << self.bits) - 1
        vectors = [stored[..., i, :] for i in range(stored.shape[-2])]
        if bits == 8:
            return stored
        if bits == 10:
            high = vectors.pop().astype(np.uint16)
            return np.stack([low | (high >> 2 * i & 3) << 8 for i, low in enumerate(vectors)], -2)
        if bits in (2, 4):
            return np.stack([vectors[0] >> bits * i & mask for i in range(count)], -2)
        if bits == 3:
            a, b, c = vectors
            codes = [code >> shift & 7 for code in vectors for shift in (0, 3)]
            codes += [a >> 6 | (b >> 6 & 1) << 2, c >> 6 | (b >> 7) << 2]
            return np.stack(codes[:count], -2)
        codes = [code & mask for code in vectors]
        if count == self.run:
            spread = 8 - bits
            pieces = [(code >> bits) << spread * i for i, code in enumerate(vectors)]
            codes.append(np.bitwise_or.reduce(pieces))
        return np.stack(codes, -2)

    def emit(self, e: Emitter, at: Value, count: int, *, dirty: bool = False) -> list[list[Value]]:
        """The codes of a run of `count` vectors at `at`: bytes (64,) each; for ten bits low bytes and the bits above.

        dirty: for 7 and 6 bits, the bits above the code may be anything.
        """
        stored = [e.load(at, _WORDS, 64 * i) for i in range(self.stored(count))]
        bits = self.bits
        if bits == 8:
            codes = stored
        elif bits == 10:
            high = stored.pop()
            return [[low.bits(BYTES), _field(high, 2 * i, 2).bits(BYTES)] for i, low in enumerate(stored)]
        elif bits in (2, 4):
            codes = [_field(stored[0], bits * i, bits) for i in range(count)]
        elif bits == 3:
            a, b, c = stored
            codes = [_field(word, shift, 3) for word in stored for shift in (0, 3)]
            last = _field(a, 6, 2) | ((b >> 4) & 0x04040404), _field(c, 6, 2) | ((b >> 5) & 0x04040404)
            codes = [*codes, *last][:count]
        else:
            codes = [word if dirty else word & _bytes((1 << bits) - 1) for word in stored]
            if count == self.run:
                codes.append(self._emit_last(stored))
        return [[code.bits(BYTES)] for code in codes]

    def emit_pack(self, e: Emitter, codes: list[list[Value]], at: Value) -> None:
        """The inverse of `emit`: the codes of a run's vectors, clean → the stored vectors at `at`."""
        words = [code[0].bits(_WORDS) for code in codes]
        bits, mask = self.bits, (1 << self.bits) - 1
        if bits == 10:
            words.append(_joined([code[1].bits(_WORDS) for code in codes], 2))
        elif bits in (2, 4):
            words = [_joined(words, bits)]
        elif bits == 3:
            words += [e.zero(_WORDS)] * (8 - len(words))
            a, b = words[6:]
            tops = a & _bytes(3), (a >> 2 & _bytes(1)) | (b >> 2 & _bytes(1)) << 1, b & _bytes(3)
            words = [words[2 * i] | words[2 * i + 1] << 3 | top << 6 for i, top in enumerate(tops)]
        elif bits < 8 and len(words) == self.run:
            last, spread = words.pop(), 8 - bits
            pieces = [last >> spread * i & _bytes((1 << spread) - 1) for i in range(len(words))]
            words = [word & _bytes(mask) | piece << bits for word, piece in zip(words, pieces, strict=True)]
        for number, word in enumerate(words):
            e.store(word, at, 64 * number)

    def _emit_last(self, stored: list[Value]) -> Value:
        """The vector that is spread over the top bits of the others."""
        spread = 8 - self.bits
        top, low = _bytes(0xFF << self.bits & 0xFF), _bytes((1 << self.bits) - 1)
        # From the lowest piece upwards: what has been collected moves down, and the next piece comes in above it.
        last = stored[0] & top
        for word in stored[1:]:
            last = ((last >> spread) & low) | (word & top)
        places = spread * len(stored)
        return (last >> (8 - places)) & _bytes((1 << places) - 1) if places < 8 else last


def _bytes(value: int) -> int:
    """A byte in each byte of a word, as a signed number."""
    return int.from_bytes(bytes([value] * 4), "little", signed=True)


def _field(word: Value, shift: int, bits: int) -> Value:
    """Some bits of each byte."""
    return ((word >> shift) if shift else word) & _bytes((1 << bits) - 1)


def side_by_side(codes: list[Value]) -> Value:
    """Four vectors of codes (16,) int32, below 256 → their bytes side by side."""
    return _joined(codes, 8)


def _joined(codes: list[Value], bits: int) -> Value:
    """Codes side by side, `bits` apart."""
    return functools.reduce(operator.or_, (code << bits * i if i else code for i, code in enumerate(codes)))


def _shifted(codes: list[np.ndarray], bits: int) -> np.ndarray:
    """Codes side by side in a byte."""
    whole = codes[0]
    for i, code in enumerate(codes[1:], 1):
        whole = whole | code << bits * i
    return whole
