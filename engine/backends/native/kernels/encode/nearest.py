"""The nearest points of the tables of `ring`, `turbo` and `linear`, for 16 pairs or values at once: the codes of NumPy.

A pair lies between two circles of a ring table. Its nearest point is on one of these two, since points of a circle
are closer to each other than to the next circle; on each circle the candidate is the phase nearest to the pair's
angle. So there are two candidates, and their scores decide, in the arithmetic of `engine.codecs.parts.nearest`. Where
the angle is so close to the middle of two phases that its rounding error matters, there are four.

Where points are images of points in a quadrant, the nearest to the pair's image there is found. The pair's signs are
the signs of its nearest point, but where the pair is so close to an axis that the scores of two images are equal.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from polarlm.engine.codecs.linear import BITS, MIDDLE, STEPS
from polarlm.engine.codecs.ring import RINGS, in_quadrants, points_of
from polarlm.engine.codecs.turbo import levels_of, thresholds_of
from polarlm.engine.jit.lang import F32, I32, Emitter, Value, Values, gather_pairs, vector

_F16, _I16 = vector(F32, 16), vector(I32, 16)

# Bit fields of the word that describes two adjacent circles: the first code (from bit 0), the number of phases of each,
# whether the inner one is rotated by half a phase.
_INNER, _OUTER, _ODD = 10, 17, 24

_UNSURE = 1e-4  # in phases: a turn has at most 72, and the error of an angle is less than 5e-7 turns


# Coefficients of z, z³, … of arctan(z) / 2π for 0 ≤ z ≤ 1.
_ARC = 0.159151317, -0.0529385678, 0.0308029088, -0.0185298506, 0.00837908509, -0.00186515755


class NearestPoints(NamedTuple):
    """Codes (16,) int32, and each coordinate of their points, (16,) float32."""

    codes: Value
    points: list[Value]


class NearestOfRings:
    """The search among the points of `ring` with `bits` bits per pair."""

    def __init__(self, e: Emitter, bits: int) -> None:
        self._e, self._symmetric = e, in_quadrants(bits)
        quarters = 4 if self._symmetric else 1
        rings, points = [(phases // quarters, radius) for phases, radius in RINGS[bits]], points_of(bits)
        points = points[: len(points) // quarters]
        self._points = e.constant_bytes(points.astype("<f4").tobytes())
        self._tables = [find for axis in points.T if (find := e.level.float_table(e, axis.tolist())) is not None]
        self._several_innermost = rings[0][0] > 1 and not self._symmetric
        self._limits = [radius**2 for _, radius in rings[1:-1]]
        self._words, first = [], 0
        for number, ((inner, _), (outer, _)) in enumerate(itertools.pairwise(rings)):
            self._words.append(first | inner << _INNER | outer << _OUTER | (number & 1) << _ODD)
            first += inner
        scores = np.square(points[:first]).sum(1) / 2
        self._turn_of_zero = (np.arctan2(*points[scores.argmin(), ::-1]) / (2 * np.pi)) % 1 * quarters

    def __call__(self, x: Values) -> NearestPoints:
        """Coordinates of vectors of unit variance, each (16,) float32 and finite → the nearest points."""
        e = self._e
        # NaN and infinity must not become an index, and scores must be finite.
        x = [e.fmin(e.fmax(value, -1e37), 1e37) for value in x]
        if not self._symmetric:
            return self._nearest(x)[0]
        image = [e.absolute(value) for value in x]
        return self._with_signs(x, image, *self._nearest(image))

    def _nearest(self, x: Values) -> tuple[NearestPoints, Value]:
        """The nearest of the points, or of the points in a quadrant to a pair there, and its score."""
        e, (a, b) = self._e, x
        square = e.fma(a, a, b * b)
        word = e.constant(_I16, self._words[0])
        for limit, outer_word in zip(self._limits, self._words[1:], strict=True):
            word = e.select(square < limit, word, e.constant(_I16, outer_word))
        turn = e.select(square > 0.0, self._turn(a, b), e.constant(_F16, self._turn_of_zero))

        first, shift = word & 1023, (word >> _ODD & 1).to_float() * 0.5
        phases = word >> _INNER & 127, word >> _OUTER & 127
        firsts, shifts = (first, first + phases[0]), (shift, -shift + 0.5)
        if self._symmetric:
            shifts = e.constant(_F16, 0.5), e.constant(_F16, 0.5)
        is_unsure = square < 1e-9 if self._several_innermost else None  # so small, scores round to equal ones
        others, best, score = list[Value](), None, square
        for start, count, shift in zip(firsts, phases, shifts, strict=True):
            steps = turn * count.to_float() - shift  # from −½ to the number of phases
            phase = (steps + 0.5).to_int()
            excess = steps - phase.to_float()
            is_between = e.absolute(excess) > 0.5 - _UNSURE
            is_unsure = is_between if is_unsure is None else is_unsure | is_between
            other = phase + e.select(excess > 0.0, e.constant(_I16, 1), e.constant(_I16, -1))
            others.append(start + self._on_circle(other, count))
            code = start + self._on_circle(phase, count)
            best, score = self._choose_better(x, code, best, score)
        assert best is not None
        assert is_unsure is not None
        results = [e.variable(value) for value in (score, best.codes, *best.points)]
        with e.when(e.any(is_unsure)):
            for code in others:
                best, score = self._choose_better(x, code, best, score)
            for variable, value in zip(results, (score, best.codes, *best.points), strict=True):
                variable.set(value)
        score, codes, *points = (variable.get() for variable in results)
        return NearestPoints(codes, points), score

    def _on_circle(self, phase: Value, count: Value) -> Value:
        """A phase from −1 to `count` as one below `count`: the next one on the circle, or the end of a quadrant."""
        e = self._e
        if self._symmetric:
            return e.select(phase < 0, e.zero(_I16), e.select(phase < count, phase, count - 1))
        return e.select(phase < 0, phase + count, e.select(phase < count, phase, phase - count))

    def _with_signs(self, x: Values, image: Values, nearest: NearestPoints, score: Value) -> NearestPoints:
        """The nearest to the pair if `nearest`, with `score`, is the nearest to its image in the quadrant.

        Among equal scores the lowest code wins, so a coordinate is negative only if that makes the score less.
        """
        e, (p, q) = self._e, nearest.points
        rest, scaled_y = (p * p + q * q) * 0.5, image[1] * q
        is_low = (x[1] < 0.0) & (rest - image[0] * p + scaled_y > score)
        scaled_y = e.select((x[1] < 0.0) & ~is_low, -scaled_y, scaled_y)
        is_left = (x[0] < 0.0) & (rest + image[0] * p - scaled_y > score)
        signs = e.select(is_left, e.constant(_I16, 256), e.zero(_I16)) | e.select(
            is_low, e.constant(_I16, 512), e.zero(_I16)
        )
        return NearestPoints(nearest.codes | signs, [e.select(is_left, -p, p), e.select(is_low, -q, q)])

    def _choose_better(
        self, x: Values, code: Value, best: NearestPoints | None, score: Value
    ) -> tuple[NearestPoints, Value]:
        """The better of a candidate and the best so far, and its score; the lower code wins a tie."""
        e = self._e
        points = [find(code) for find in self._tables] or gather_pairs(e, self._points, code)
        (a, b), (p, q) = x, points
        candidate_score = (p * p + q * q) * 0.5 - a * p - b * q
        if best is None:
            return NearestPoints(code, points), candidate_score
        better = (candidate_score < score) | (candidate_score.equals(score) & (code < best.codes))
        best_points = [e.select(better, new, old) for new, old in zip(points, best.points, strict=True)]
        return NearestPoints(e.select(better, code, best.codes), best_points), e.select(better, candidate_score, score)

    def _turn(self, a: Value, b: Value) -> Value:
        """The angle of (a, b) in turns, from 0 to 1; of a pair in the quadrant, in quarters of a turn."""
        e = self._e
        x, y = e.absolute(a), e.absolute(b)
        is_steep = x < y
        z = e.select(is_steep, x, y) / e.select(is_steep, y, x)
        square, angle = z * z, e.constant(_F16, _ARC[-1])
        for coefficient in _ARC[-2::-1]:
            angle = e.fma(angle, square, e.constant(_F16, coefficient))
        angle = angle * z
        angle = e.select(is_steep, -angle + 0.25, angle)
        if self._symmetric:
            return angle * 4.0
        angle = e.select(a < 0.0, -angle + 0.5, angle)
        return e.select(b < 0.0, -angle + 1.0, angle)


class NearestLevels:
    """The search among the levels of `turbo` with `bits` bits per value."""

    def __init__(self, e: Emitter, bits: int) -> None:
        self._e = e
        self._levels = levels_of(bits).tolist()
        self._thresholds = thresholds_of(bits).tolist()

    def __call__(self, x: Values) -> NearestPoints:
        e, (value,) = self._e, x
        codes, level = e.zero(_I16), e.constant(_F16, self._levels[0])
        for number, (threshold, next_level) in enumerate(zip(self._thresholds, self._levels[1:], strict=True)):
            is_above = value > threshold
            codes = e.select(is_above, e.constant(_I16, number + 1), codes)
            level = e.select(is_above, e.constant(_F16, next_level), level)
        return NearestPoints(codes, [level])


class NearestEvenLevels:
    """The search among the levels of `linear8`."""

    def __init__(self, e: Emitter, bits: int) -> None:
        self._e = e

    def __call__(self, x: Values) -> NearestPoints:
        e, (value,) = self._e, x
        codes = e.fmin(e.fmax(value * float(STEPS) + (MIDDLE + 0.5), 0.0), 255.0).to_int()
        return NearestPoints(codes, [(codes - MIDDLE).to_float() * (1 / STEPS)])


Search = NearestOfRings | NearestLevels | NearestEvenLevels


def search(e: Emitter, bits: int, width: int) -> Search:
    """The search among the points of codes of `bits` bits, each of `width` values."""
    kind = NearestOfRings if width == 2 else NearestLevels if bits < BITS else NearestEvenLevels
    return kind(e, bits)
