"""The nearest points of the tables of `ring` and `turbo`, for 16 pairs or values at once. Codes equal NumPy's.

A pair lies between two circles of a ring table. Its nearest point is on one of these two, since points of a circle
are closer to each other than to the next circle; on each circle the candidate is the phase nearest to the pair's
angle. So there are two candidates, and their scores decide, in the arithmetic of `engine.codecs.parts.nearest`. Where
the angle is so close to the middle of two phases that its rounding error matters, there are four.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from polarlm.engine.codecs.ring import RINGS, is_rotated, points_of
from polarlm.engine.codecs.turbo import levels_of, thresholds_of
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.float_ops import gather_pairs
from polarlm.engine.jit.lang.values import F32, I32, Value, vector

_F16, _I16 = vector(F32, 16), vector(I32, 16)

# Bit fields of the word that describes two adjacent circles: the first code (from bit 0), the number of phases of each,
# whether each is rotated by half a phase.
_INNER, _OUTER, _ROTATED = 10, 17, (24, 25)

_UNSURE = 1e-4  # in phases: a turn has at most 72, and the error of an angle is less than 5e-7 turns


# Coefficients of z, z³, … of arctan(z) / 2π for 0 ≤ z ≤ 1.
_ARC = 0.159151317, -0.0529385678, 0.0308029088, -0.0185298506, 0.00837908509, -0.00186515755


class Found(NamedTuple):
    """Codes (16,) int32, and each coordinate of their points, (16,) float32."""

    codes: Value
    points: list[Value]


class Search(Protocol):
    """A search for nearest points."""

    def __call__(self, x: Sequence[Value]) -> Found:
        """Coordinates of vectors of unit variance, each (16,) float32 and finite → the nearest points."""


class NearestOfRings:
    """The search among the points of `ring` with `bits` bits per pair."""

    def __init__(self, e: Emitter, bits: int) -> None:
        self._e = e
        rings, points = RINGS[bits], points_of(bits)
        self._points = e.constant_bytes(points.astype("<f4").tobytes())
        self._limits = [radius**2 for _, radius in rings[1:-1]]
        self._words, first = [], 0
        for number, ((inner, _), (outer, _)) in enumerate(itertools.pairwise(rings)):
            rotated = sum(is_rotated(bits, number + i) << bit for i, bit in enumerate(_ROTATED))
            self._words.append(first | inner << _INNER | outer << _OUTER | rotated)
            first += inner
        scores = np.square(points[:first]).sum(1) / 2
        self._turn_of_zero = (np.arctan2(*points[scores.argmin(), ::-1]) / (2 * np.pi)) % 1

    def __call__(self, x: Sequence[Value]) -> Found:
        e = self._e
        # NaN and infinity must not become an index, and scores must be finite.
        a, b = x = [e.fmin(e.fmax(value, -1e37), 1e37) for value in x]
        square = e.fma(a, a, b * b)
        word = e.constant(_I16, self._words[0])
        for limit, outside in zip(self._limits, self._words[1:], strict=True):
            word = e.select(square < limit, word, e.constant(_I16, outside))
        turn = e.select(square > 0.0, self._turn(a, b), e.constant(_F16, self._turn_of_zero))

        first = word & 1023
        phases = word >> _INNER & 127, word >> _OUTER & 127
        firsts, shifts = (first, first + phases[0]), [(word >> bit & 1).to_float() * 0.5 for bit in _ROTATED]
        others, unsure = [], None
        best, score = None, square
        for start, count, shift in zip(firsts, phases, shifts, strict=True):
            steps = turn * count.to_float() - shift  # from −½ to the number of phases
            phase = (steps + 0.5).to_int()
            beyond = steps - phase.to_float()
            is_between = e.absolute(beyond) > 0.5 - _UNSURE
            unsure = is_between if unsure is None else unsure | is_between
            other = phase + e.select(beyond > 0.0, e.constant(_I16, 1), e.constant(_I16, -1))
            others.append(start + e.select(other < 0, other + count, e.select(other < count, other, other - count)))
            code = start + e.select(phase < count, phase, e.zero(_I16))
            best, score = self._better(x, code, best, score)
        assert best is not None
        assert unsure is not None
        kept = [e.variable(value) for value in (score, best.codes, *best.points)]
        with e.when(e.any(unsure)):
            for code in others:
                best, score = self._better(x, code, best, score)
            for variable, value in zip(kept, (score, best.codes, *best.points), strict=True):
                variable.set(value)
        _, codes, *points = (variable.get() for variable in kept)
        return Found(codes, points)

    def _better(self, x: Sequence[Value], code: Value, best: Found | None, score: Value) -> tuple[Found, Value]:
        """The better of a candidate and the best so far, and its score; the lower code wins a tie."""
        e = self._e
        points = gather_pairs(e, self._points, code)
        (a, b), (p, q) = x, points
        own = (p * p + q * q) * 0.5 - a * p - b * q
        if best is None:
            return Found(code, points), own
        better = (own < score) | (own.equals(score) & (code < best.codes))
        chosen = [e.select(better, new, old) for new, old in zip(points, best.points, strict=True)]
        return Found(e.select(better, code, best.codes), chosen), e.select(better, own, score)

    def _turn(self, a: Value, b: Value) -> Value:
        """The angle of (a, b) in turns, from 0 to 1."""
        e = self._e
        x, y = e.absolute(a), e.absolute(b)
        is_steep = x < y
        z = e.select(is_steep, x, y) / e.select(is_steep, y, x)
        square, angle = z * z, e.constant(_F16, _ARC[-1])
        for coefficient in _ARC[-2::-1]:
            angle = e.fma(angle, square, e.constant(_F16, coefficient))
        angle = angle * z
        angle = e.select(is_steep, -angle + 0.25, angle)
        angle = e.select(a < 0.0, -angle + 0.5, angle)
        return e.select(b < 0.0, -angle + 1.0, angle)


class NearestLevels:
    """The search among the levels of `turbo` with `bits` bits per value."""

    def __init__(self, e: Emitter, bits: int) -> None:
        self._e = e
        self._levels = levels_of(bits).tolist()
        self._thresholds = thresholds_of(bits).tolist()

    def __call__(self, x: Sequence[Value]) -> Found:
        e, (value,) = self._e, x
        codes, level = e.zero(_I16), e.constant(_F16, self._levels[0])
        for number, (threshold, above) in enumerate(zip(self._thresholds, self._levels[1:], strict=True)):
            is_above = value > threshold
            codes = e.select(is_above, e.constant(_I16, number + 1), codes)
            level = e.select(is_above, e.constant(_F16, above), level)
        return Found(codes, [level])
