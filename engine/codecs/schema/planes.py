"""Bit planes: codes of a few bits packed into bytes without unused bits.

Vectors of codes are packed elementwise into vectors of bytes: a run of n codes of b bits takes ⌈n · b / 8⌉ bytes. Byte
i holds code i, or the low eight bits of a ten-bit code. The bits of the codes that remain then fill the bits of the
bytes that remain, both in order and from the lowest up:

    7 bits    8 codes in 7 bytes    byte i has code i in its low seven bits; its top bit is bit i of code 7
    6 bits    4 in 3                byte i has code i in its low six bits; its top two are bits 2i and 2i + 1 of code 3
    4 bits    2 in 1                code 0 in the low half, code 1 in the high half
    10 bits   4 in 5                four low bytes, then a byte with bits 8 and 9 of each code
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np


class CodePiece(NamedTuple):
    """`bits` bits of code `code`, from bit `low` on, are stored in byte `byte`, from bit `place` on."""

    code: int
    low: int
    byte: int
    place: int
    bits: int


@dataclass(frozen=True)
class Planes:
    """Codes of `bits` bits, 2 to 8 or 10.

    vectors: the length of a run; 0 for the least that fills whole bytes. top: whether codes take the top bits of their
    bytes, and the remaining bits of other codes those below.
    """

    bits: int
    vectors: int = 0
    top: bool = False

    @cached_property
    def run(self) -> int:
        """The number of vectors of a run, which share bytes."""
        return self.vectors or 8 // math.gcd(self.bits, 8)

    def stored_count(self, count: int) -> int:
        """The number of vectors of bytes for `count` vectors of codes: whole runs, and a shorter one at the end."""
        runs, rest = divmod(count, self.run)
        return runs * -(-self.run * self.bits // 8) + -(-rest * self.bits // 8)

    def pieces(self, count: int) -> tuple[CodePiece, ...]:
        """The pieces of the codes of a run of `count` vectors. The first piece of each code has its lowest bits."""
        return _pieces(self.bits, count, self.top)

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """codes (..., V, W) below 2^bits, of any unsigned dtype → (..., stored_count(V), W) uint8."""
        *lead, count, width = codes.shape
        stored_bytes = np.zeros((*lead, self.stored_count(count), width), np.uint8)
        for size, part, out in self._runs(codes, stored_bytes):
            for code, low, byte, place, bits in self.pieces(size):
                out[..., byte, :] |= (part[..., code, :] >> low & (1 << bits) - 1).astype(np.uint8) << place
        return stored_bytes

    def unpack(self, stored_bytes: np.ndarray, count: int) -> np.ndarray:
        """The inverse of `pack`: (..., stored_count(V), W) uint8 → (..., V, W) uint8, or uint16 for ten bits."""
        codes = np.empty((*stored_bytes.shape[:-2], count, stored_bytes.shape[-1]), code_type(self.bits))
        if count == self.run:
            _unpack_run(self.pieces(count), stored_bytes, codes)
            return codes
        for size, out, part in self._runs(codes, stored_bytes):
            _unpack_run(self.pieces(size), part, out)
        return codes

    def _runs(self, codes: np.ndarray, stored_bytes: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields, for whole runs, then for the rest: vectors per run, views (..., runs, vectors, W) of codes, bytes."""
        *lead, count, width = codes.shape
        whole, rest = divmod(count, self.run)
        for first, runs, size in ((0, whole, self.run), (whole * self.run, 1, rest)):
            if runs and size:
                at, size_stored = self.stored_count(first), self.stored_count(size)
                yield (
                    size,
                    codes[..., first : first + runs * size, :].reshape(*lead, runs, size, width),
                    stored_bytes[..., at : at + runs * size_stored, :].reshape(*lead, runs, size_stored, width),
                )


def _unpack_run(pieces: Sequence[CodePiece], stored_bytes: np.ndarray, codes: np.ndarray) -> None:
    """stored_bytes (..., n, W) → codes (..., V, W), which is written."""
    whole = min(stored_bytes.shape[-2], codes.shape[-2])
    _, _, _, place, bits = pieces[0]
    first = stored_bytes[..., :whole, :]
    np.bitwise_and(first >> place if place else first, (1 << bits) - 1, out=codes[..., :whole, :])
    for code, low, byte, place, bits in pieces[whole:]:
        part, target = stored_bytes[..., byte, :], codes[..., code, :]
        if low == 0 and place + bits == 8:
            np.right_shift(part, place, out=target)
            continue
        part = part >> place - low if place >= low else part.astype(codes.dtype) << low - place
        part &= (1 << bits) - 1 << low
        if low:
            target |= part
        else:
            target[...] = part


def code_type(bits: int) -> np.dtype:
    return np.dtype(np.uint8 if bits <= 8 else np.uint16)


@cache
def _pieces(bits: int, count: int, top: bool) -> tuple[CodePiece, ...]:
    whole, nbytes = min(bits, 8), -(-count * bits // 8)
    first = 8 - whole if top else 0
    pieces = [CodePiece(code, 0, code, first, whole) for code in range(min(count, nbytes))]
    taken = {(piece.byte, first + i) for piece in pieces for i in range(whole)}
    free = [(byte, place) for byte in range(nbytes) for place in range(8) if (byte, place) not in taken]
    left = [(code, low) for code in range(count) for low in range(whole if code < nbytes else 0, bits)]
    for (code, low), (byte, place) in zip(left, free, strict=False):  # bits of the last byte may stay unused
        *_, last = pieces
        if (code, byte, place) == (last.code, last.byte, last.place + last.bits):
            pieces[-1] = last._replace(bits=last.bits + 1)
        else:
            pieces.append(CodePiece(code, low, byte, place, 1))
    return tuple(pieces)
