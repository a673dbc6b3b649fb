"""The best path through a bit-shift trellis of four states, for pairs of values, as complex numbers.

Letters: K heads, R vectors of each, S = K·R; D values in a vector, P = D/2 pairs; L survivors in each of four states.
"""

from __future__ import annotations

import numpy as np

from engine.codecs._cosets import STATES, Cosets

_FAR = np.float32(1e6)  # pairs are cut to this, so that squares of distances stay finite
_NEVER = np.float32(1e30)  # what it costs to begin in any state but the first

_SLAB = 2048  # survivors in each state, extended together: enough to hide the cost of a step, few enough for the cache
_RECENT = 8  # pairs whose errors move with the survivors at every step; those of older pairs move as seldom

_QUARTERS = np.array([1, 1j, -1, -1j], np.complex64)  # so is a pair turned in each state; exact


def turn(pairs: np.ndarray, quarters: int) -> np.ndarray:
    """pairs (..., 2), turned counter-clockwise by so many right angles; exact."""
    x, y = pairs[..., 0], pairs[..., 1]
    return np.stack([(x, y), (-y, x), (-x, -y), (y, -x)][quarters % 4], -1)


class PathSearch:
    """Viterbi's algorithm over codes of pairs: of all paths the one with the least sum of squared errors.

    base: (2^m, 2) float32. In state s the code c stands for base[c], turned by s right angles, and leads to state
    c & 3; every vector begins in state 0.
    """

    def __init__(self, base: np.ndarray) -> None:
        base = np.ascontiguousarray(base, np.float32)
        self._bits = len(base).bit_length() - 1
        self._cosets = Cosets(base)
        self._points = _QUARTERS[:, None] * base.view(np.complex64)[:, 0]  # (4, 2^m)

    def __call__(
        self,
        x: np.ndarray,
        feedback: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        survivors: int = 1,
    ) -> tuple[np.ndarray, np.ndarray]:
        """x (K, R, D) float32 of unit variance → codes (K, R, P) uint8, their points (K, R, D) float32.

        feedback: (K, D, D) float32, strictly lower in blocks of pairs: pair j aims at x_j + F_j·e_{<j}, e being the
        errors of the pairs before it on the same path. weights: (K, P) float32, what a squared error of each pair
        counts. survivors: L, a power of two: so many paths into each state stay in the race. Without feedback one is
        enough; with it none is, as costs to come depend on all errors before, and a better path may be lost.
        """
        codes, points = np.empty((*x.shape[:2], x.shape[2] // 2), np.uint8), np.empty_like(x)
        step = max(1, _SLAB // max(1, len(x) * survivors))
        for start in range(0, x.shape[1], step):
            part = slice(start, start + step)
            codes[:, part] = self._search(np.clip(x[:, part], -_FAR, _FAR), feedback, weights, survivors)
            points[:, part] = self.points(codes[:, part])
        return codes, points

    def points(self, codes: np.ndarray) -> np.ndarray:
        """codes (..., P) of whole vectors → (..., D) float32."""
        return np.take(self._points, self.states(codes).astype(np.intp) << self._bits | codes).view(np.float32)

    @staticmethod
    def states(codes: np.ndarray) -> np.ndarray:
        """codes (..., P) of whole vectors → the state in which each stands, (..., P)."""
        states = np.zeros_like(codes)
        states[..., 1:] = codes[..., :-1] % STATES
        return states

    def _search(
        self, x: np.ndarray, feedback: np.ndarray | None, weights: np.ndarray | None, survivors: int
    ) -> np.ndarray:
        """x (K, R, D) → codes (K, R, P)."""
        heads, count, dim = x.shape
        pairs = np.ascontiguousarray(x.reshape(-1, dim).view(np.complex64).T)  # (P, S)
        past = None if feedback is None else _Past(pairs, heads, feedback, STATES * survivors)
        points = np.repeat(self._points, survivors, axis=0)
        cost = np.full((STATES * survivors, heads * count), _NEVER)
        cost[0] = 0
        # A link is what a survivor came from, times 2^m, and its last code.
        links = np.empty((dim // 2, *cost.shape), np.uint16)
        for j, pair in enumerate(pairs):
            target = np.broadcast_to(pair, cost.shape) if past is None else past.aims(j)
            weight = None if weights is None else np.repeat(weights[:, j], count)
            cost, before = self._step(target, cost, weight, links[j])
            if past is not None:
                past.extend(j, before, pair - np.take(points, links[j]))
        return self._trace(cost.argmin(0), links).T.reshape(heads, count, -1)

    def _step(
        self, target: np.ndarray, cost: np.ndarray, weight: np.ndarray | None, links: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Extend survivors of cost (4L, S), L in each state, to each state, with a pair near target (4L, S).

        weight (S,). Fills links (4L, S), of the survivors after it; returns their cost (4L, S), and the index of the
        one before each, (4L, S) intp, in the flat array of those.
        """
        survivors = len(cost) // STATES
        state = np.arange(len(cost))[:, None] // survivors
        aims = target * _QUARTERS.conj()[state]  # the table turned back is the same in every state
        quadruples = self._cosets.quadruple(aims)
        near = np.take(self._cosets.points, quadruples, axis=1, mode="clip")  # (8, 4L, S): x and y by coset
        total, dy = near[:STATES], near[STATES:]
        total -= np.ascontiguousarray(aims.real)
        total *= total
        dy -= np.ascontiguousarray(aims.imag)
        dy *= dy
        total += dy
        if weight is not None:
            total *= weight
        total += cost
        # Floats that are not negative ascend like integers: minima over their bits find the least costs and, in place
        # of the lowest bits of each, the survivor that it comes from.
        tagged = total.view(np.uint32)
        tagged &= np.uint32(2**32 - len(cost))
        tagged |= np.arange(len(cost), dtype=np.uint32)[:, None]
        best = _least(tagged, survivors).reshape(cost.shape)
        origin = (best & np.uint32(len(cost) - 1)).astype(np.intp)
        before = origin * cost.shape[1]
        before += np.arange(cost.shape[1])
        chosen = np.take(quadruples, before)
        chosen += state * self._cosets.codes.shape[1]
        origin <<= self._bits
        origin += np.take(self._cosets.codes, chosen)
        links[...] = origin
        return best.view(np.float32), before

    def _trace(self, survivor: np.ndarray, links: np.ndarray) -> np.ndarray:
        """Last survivors (S,), and links (P, 4L, S) of all → codes (P, S) of their paths."""
        codes, columns = np.empty(links.shape[::2], np.uint8), np.arange(links.shape[2])
        for j in reversed(range(len(links))):
            link = links[j, survivor, columns]
            codes[j] = link & np.uint16((1 << self._bits) - 1)
            survivor = (link >> self._bits).astype(np.intp)
        return codes


def _least(numbers: np.ndarray, count: int) -> np.ndarray:
    """numbers (4, M, S) uint32 below 2³¹, different along M → the `count` least along M, ascending, (4, count, S)."""
    least = np.empty((len(numbers), count, numbers.shape[2]), np.uint32)
    offset: np.ndarray | np.uint32 = np.uint32(0)
    for place in range(count):
        lowest = numbers.min(axis=1)
        least[:, place] = lowest + offset
        if place < count - 1:
            numbers -= (lowest + np.uint32(1))[:, None]  # the lowest wraps around, and is the largest from now on
            offset = least[:, place] + np.uint32(1)
    return least


class _Past:
    """Errors of the pairs on the path of every survivor, and what they add to the aim of its next pair.

    A step gives survivors other ancestors, and their errors must follow. Only those of a few recent pairs do so at
    once. The others follow once for every `_RECENT` pairs, and then one product tells what they add to so many aims.
    """

    def __init__(self, pairs: np.ndarray, heads: int, feedback: np.ndarray, survivors: int) -> None:
        """pairs (P, S) complex64, S = K·R; feedback (K, D, D); survivors: 4L."""
        self._pairs, self._heads, self._feedback, self._survivors = pairs, heads, feedback, survivors
        rows = survivors * pairs.shape[1]
        self._old = np.zeros((rows, 2 * len(pairs)), np.float32)  # (4L·S, D), of the survivors when old errors moved
        self._ancestors = np.arange(rows)  # what those of now were then
        self._recent = np.zeros((rows, 2 * _RECENT), np.float32)  # of those of now, of the pairs since then
        self._aims = np.empty((rows, 0), np.complex64)  # of those then, at pairs since then, as old errors move them

    def aims(self, j: int) -> np.ndarray:
        """What pair j of each survivor aims at, (4L, S) complex64. Pairs come in turn, each followed by `extend`."""
        place = j % _RECENT
        if place == 0:
            self._begin(j)
        aims = np.take(self._aims.reshape(-1), self._ancestors * self._aims.shape[1] + place)
        if place:
            aims += self._product(self._recent[:, : 2 * place], slice(j, j + 1), slice(j - place, j))[:, 0]
        return aims.reshape(self._survivors, -1)

    def extend(self, j: int, before: np.ndarray, errors: np.ndarray) -> None:
        """Pair j: before (4L, S) intp, flat indices of the survivors that go on; its errors (4L, S) complex64."""
        self._ancestors = np.take(self._ancestors, before.reshape(-1))
        self._recent = np.take(self._recent, before.reshape(-1), axis=0)
        self._recent.view(np.complex64)[:, j % _RECENT] = errors.reshape(-1)

    def _begin(self, j: int) -> None:
        """Let errors of all pairs before j become old, and find out what they add to the next pairs."""
        if j:
            self._old = np.take(self._old, self._ancestors, axis=0)
            self._old[:, 2 * (j - _RECENT) : 2 * j] = self._recent
            self._ancestors = np.arange(len(self._old))
        following = slice(j, min(j + _RECENT, len(self._pairs)))
        self._aims = np.tile(self._pairs[following].T, (self._survivors, 1))
        if j:
            self._aims += self._product(self._old[:, : 2 * j], following, slice(0, j))

    def _product(self, errors: np.ndarray, of: slice, by: slice) -> np.ndarray:
        """errors (4L·S, 2·pairs) of the pairs `by` → what they add to the pairs `of`, (4L·S, pairs) complex64."""
        rows = self._feedback[:, 2 * of.start : 2 * of.stop, 2 * by.start : 2 * by.stop]
        by_head = errors.reshape(self._survivors, self._heads, -1, errors.shape[1])
        return np.ascontiguousarray(by_head @ rows.swapaxes(1, 2)).reshape(len(errors), -1).view(np.complex64)
