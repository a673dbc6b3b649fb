"""Tables of points rounded to bytes, and their lookup by the numbers that codes have in a tile.

The points of `ring` are mirror images: for (x, y) there is (x, −y). So a tile numbers codes in an order in which the
second half of the points is the image of the first. Levels that look up 16 bytes at a time then look up half as many.
Of codes of ten bits, as `ring5` has them, the low eight are looked up, and the high two negate coordinates. Codes of
`linear8` are bytes themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.native.codecs.parts.packing import BYTES
from polarlm.engine.jit.lang import I32, Emitter, Value, vector
from polarlm.model_loaders.forks import cached_property

_WORDS = vector(I32, 16)
_PART = 16  # entries of the tables that a register holds


@dataclass(frozen=True)
class CodeTable:
    """The points of codes, by the numbers that codes have in a tile.

    by_code (2^bits, width): the points that the codec's codes stand for; width: channels per code.
    """

    bits: int
    by_code: np.ndarray

    @property
    def width(self) -> int:
        return int(self.by_code.shape[1])

    @cached_property
    def codes(self) -> np.ndarray:
        """The code of each number, (2^bits,). See `_mirror_order`, or, where points have no mirror images, their
        order."""
        mirror_order = _mirror_order(self.by_code) if self.width == 2 and self.bits <= 8 else None
        order = np.arange(1 << self.bits) if mirror_order is None else mirror_order
        return order.astype(np.uint8 if self.bits <= 8 else np.uint16)

    @cached_property
    def numbers(self) -> np.ndarray:
        """The number of each code: the inverse of `codes`."""
        return np.argsort(self.codes).astype(self.codes.dtype)

    @cached_property
    def points(self) -> np.ndarray:
        """The point of each number, (2^bits, width) float32."""
        return self.by_code[self.codes]

    @property
    def is_even(self) -> bool:
        """Whether points are evenly spaced, so that a number is a byte itself: number 128 has the byte 0."""
        return self.width == 1 and self.bits == 8

    @property
    def scale(self) -> float:
        """The quantization step of `bytes_`."""
        if self.is_even:
            return float(self.points[1, 0] - self.points[0, 0])
        return float(np.abs(self.points).max()) / 127

    @property
    def bytes_(self) -> np.ndarray:
        """The points in steps of `scale`: (2^bits, width) int8."""
        return np.rint(self.points / self.scale).astype(np.int8)

    def emit(self, e: Emitter, bias: int) -> Callable[..., Iterator[Value]]:
        """Returns a function: numbers from `Packing.emit`, channels → for each channel a vector of its bytes plus bias,
        0 or 128; see `_table`."""
        if self.is_even:
            return lambda code, channels: iter(code if bias else [code[0] ^ -128])
        table = _table(e, _biased_rows(self.bytes_[:256], bias))  # with ten bits those of a quadrant, else all points

        def lookup(code: list[Value], channels: Sequence[int]) -> Iterator[Value]:
            for channel, value in zip(channels, table(code[0], channels), strict=True):
                if len(code) == 1:
                    yield value
                else:
                    is_negative = (code[1] & (1 << channel)).equals(1 << channel)
                    yield e.select(is_negative, -value, value)

        return lookup

    def emit_numbers(self, e: Emitter) -> Callable[[list[Value]], list[Value]]:
        """Returns a function: a code vector as of `Packing.emit_pack` → the vector of their numbers."""
        if np.array_equal(self.numbers, np.arange(len(self.numbers))):
            return lambda codes: codes
        look_up = e.level.table(e, e.constant_bytes(self.numbers.tobytes()), len(self.numbers))
        return lambda codes: [look_up(code.bits(BYTES)).bits(code.type) for code in codes]


def _mirror_order(points: np.ndarray) -> np.ndarray | None:
    """points (2P, 2) → their order in which point P + i is point i with its second coordinate negated; None
    without such an order.

    Points on the axis are their own images. They come last in each half, at most _PART of them, in any order.
    """
    steps = np.rint(points / np.abs(points).max() * 2**16).astype(np.int64)
    places = {(x, y): code for code, (x, y) in enumerate(steps.tolist())}
    images = [places.get((x, -y)) for x, y in steps.tolist()]
    upper, axis_points = np.flatnonzero(steps[:, 1] > 0), np.flatnonzero(steps[:, 1] == 0)
    if None in images or len(places) < len(points) or len(axis_points) > 2 * _PART or len(axis_points) % 2:
        return None
    first, second = axis_points[::2], axis_points[1::2]
    return np.concatenate([upper, first, [images[code] for code in upper], second])


def _biased_rows(bytes_: np.ndarray, bias: int) -> np.ndarray:
    """bytes_ (P, width) int8 → the rows of a table, (width, at least 16) uint8."""
    return np.resize((bytes_.astype(np.int16) + bias).astype(np.uint8).T, (bytes_.shape[1], max(16, len(bytes_))))


def _table(e: Emitter, entries: np.ndarray) -> Callable[[Value, Sequence[int]], Iterator[Value]]:
    """Returns a function: a vector of indices, rows of entries (width, at most 256) → for each of them a vector of its
    bytes. Where a level keeps order, a row is looked up only when the iterator reaches it."""
    if len(entries) == 2 and not e.level.keeps_order:
        look_up = e.level.pair_table(e, *(row.tobytes() for row in entries))
        return lambda index, rows: iter([look_up(index)[row] for row in rows])
    tables = [e.level.table(e, e.constant_bytes(row.tobytes()), len(row)) for row in entries]
    return lambda index, rows: (tables[row](index) for row in rows)
