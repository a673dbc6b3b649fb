"""Rounding of a block to the best paths of `trellis`: the arithmetic of `engine.codecs.parts.viterbi`, one survivor for
each state.

Four tokens are searched together: a vector has their four survivors each, token after token. A survivor's errors of
earlier pairs are in its lane; as survivors replace one another, these lanes are permuted while the errors are summed.
With feedback along tokens, rounds of tokens follow one another, and each needs the errors of earlier rounds. So
rows are in the order of rounds: round r has tokens r, r + T, r + 2T, …
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from polarlm.engine.backends.native.kernels.encode.unit import LANES, Unit, add_chains
from polarlm.engine.codecs.parts.cosets import CELLS, PER_UNIT, STATES, Cosets
from polarlm.engine.codecs.parts.viterbi import CLIP, SIGNS, UNREACHABLE, flip
from polarlm.engine.codecs.trellis import points_of
from polarlm.engine.jit.lang import F32, I8, I16, I32, I64, Value, Values, Variable, gather, gather_pairs, vector

_F16, _I16, _BYTES = vector(F32, LANES), vector(I32, LANES), vector(I8, 4 * LANES)

VECTOR_TOKENS = LANES // STATES  # tokens of a vector
_LINK = 256  # a link is the state that a survivor comes from, times this, plus its code


class PathTables:
    """What a search reads, as one array of bytes: see `engine.codecs.parts.cosets`."""

    def __init__(self, bits: int) -> None:
        base = points_of(bits)
        cosets = Cosets(base)
        parts = {
            "cells": np.append(cosets.entries, 0).astype("<u2"),  # a last one, since they are read four bytes at a time
            "candidates": np.stack([cosets.points[:STATES], cosets.points[STATES:]], -1).swapaxes(0, 1).astype("<f4"),
            "codes": cosets.codes.T.astype("<i4"),  # (Q, 4), as the candidates, whose x and y follow each other
            "points": flip(base, np.arange(STATES)[:, None]).astype("<f4"),  # by state, then by code
        }
        self.offsets, content = {}, b""
        for name, part in parts.items():
            self.offsets[name] = len(content)
            content += part.tobytes() + bytes(-part.nbytes % 64)
        self.content = np.frombuffer(content, np.uint8)


path_tables = cache(PathTables)


class _Search:
    """Emits the search. Addresses of rows of tokens point to the first of the four."""

    def __init__(self, unit: Unit, tables: PathTables, pointer: Value) -> None:
        e = self.e = unit.e
        self.unit, self.bits = unit, unit.encoding.bits
        self.addresses = {name: pointer + offset for name, offset in tables.offsets.items()}
        states = np.arange(LANES) % STATES
        self.state = e.constant(_I16, tuple(states.tolist()))
        signs = [np.where(SIGNS[states, axis] < 0, -(2**31), 0) for axis in (0, 1)]
        self.signs = [e.constant(_I16, tuple(sign.tolist())) for sign in signs]
        self.history = unit.allocate(unit.dim * (4 * LANES))
        self.links = unit.allocate(unit.pairs * (4 * LANES))

    def tokens(self, row: Value) -> Value:
        """Four neighbours of a row, each in the lanes of its survivors."""
        four = self.e.load(row, vector(F32, VECTOR_TOKENS))
        return self.e.shuffle(four, four, [lane // STATES for lane in range(LANES)])

    def run(self, offset: Value) -> None:
        """Round four tokens, at `offset` in their rows → `codes`."""
        e, unit = self.e, self.unit
        start = np.where(np.arange(LANES) % STATES == 0, 0.0, float(UNREACHABLE)).tolist()
        cost = e.variable(e.constant(_F16, tuple(start)))
        origin, inverse = e.variable(self.state), self.tokens(unit.inverses + offset)
        latest = [e.variable(e.zero(_F16)) for _ in (0, 1)]
        with e.loop(0, unit.pairs) as pair:
            rows = [unit.x + pair * unit.row_of_pairs + offset + axis * unit.row for axis in (0, 1)]
            scaled = [self._unit(row, inverse) for row in rows]
            targets = scaled
            if unit.encoding.has_metric:
                feedback = self._feedback(pair, origin.get(), [error.get() for error in latest])
                targets = [x + total for x, total in zip(scaled, feedback, strict=True)]
            source, code, points = self._step(pair, targets, cost)
            origin.set(source)
            for axis, (x, point, error) in enumerate(zip(scaled, points, latest, strict=True)):
                error.set(x - point)
                e.store(error.get(), self.history + pair * (8 * LANES), 4 * LANES * axis)
            e.store((source << 8) | code, self.links + pair * (4 * LANES))
        self._trace(cost.get(), unit.codes + offset)

    def _unit(self, row: Value, inverse: Value) -> Value:
        e, x = self.e, self.tokens(row)
        scaled = x * inverse if self.unit.encoding.has_metric else x / inverse
        return e.fmin(e.fmax(scaled, -float(CLIP)), float(CLIP))

    def _feedback(self, pair: Value, origin: Value, latest: Values) -> list[Value]:
        """The sums of errors of earlier pairs. latest: of the last one, in the order of survivors. Those before are
        brought into it: a survivor comes from the state `origin`."""
        e, unit = self.e, self.unit
        lanes = (origin * 0x04040404 + 0x03020100).bits(_BYTES)  # the bytes of the lane that a survivor comes from
        rows = [unit.block.feedback + (pair * 2 + axis) * (unit.dim * 4) for axis in (0, 1)]
        sums = [[e.variable(e.zero(_F16)) for _ in range(2)] for _ in rows]
        last = e.imax(pair * 2 - 2, 0)  # before the first pair the errors are 0
        for row, chains in zip(rows, sums, strict=True):
            for step, errors in enumerate(latest):
                factor = e.broadcast(row + last * 4, F32, LANES, 4 * step)
                chains[step].set(e.fma(factor, errors, chains[step].get()))
        with e.loop(0, last, 2) as channel:
            for step in (0, 1):
                start = self.history + channel * (4 * LANES)
                errors = e.level.lookup_in_lanes(e, e.load(start, _BYTES, 4 * LANES * step), lanes)
                e.store(errors, start, 4 * LANES * step)
                for row, chains in zip(rows, sums, strict=True):
                    factor = e.broadcast(row + channel * 4, F32, LANES, 4 * step)
                    chains[step].set(e.fma(factor, errors.bits(_F16), chains[step].get()))
        return [add_chains(chains) for chains in sums]

    def _step(self, pair: Value, targets: Values, cost: Variable) -> tuple[Value, Value, list[Value]]:
        """Extend survivors by a pair, and their costs → the state that each new one comes from, its code, its point."""
        e = self.e
        x, y = ((target.bits(_I16) ^ sign).bits(_F16) for target, sign in zip(targets, self.signs, strict=True))
        cells = [e.fmin(e.fmax(place * float(PER_UNIT) + CELLS / 2, 0.0), CELLS - 1.0).to_int() for place in (x, y)]
        quadruple = gather(e, self.addresses["cells"], cells[0] * CELLS + cells[1], I16).zext(I32)
        weight = None
        if self.unit.encoding.has_metric:
            weight = e.broadcast(self.unit.block.weights + pair * 4, F32, LANES)
        tagged_costs = []
        for coset in range(STATES):
            px, py = gather_pairs(e, self.addresses["candidates"], quadruple * STATES + coset)
            dx, dy = px - x, py - y
            total = dx * dx + dy * dy
            total = (total if weight is None else total * weight) + cost.get()
            tagged_costs.append((total.bits(_I16) & -STATES) | self.state)
        best = self._least_by_state(tagged_costs)
        origin = best & (STATES - 1)
        lanes = (origin * 0x04040404 + 0x03020100).bits(_BYTES)
        chosen = e.level.lookup_in_lanes(e, quadruple.bits(_BYTES), lanes).bits(_I16)
        code = gather(e, self.addresses["codes"], chosen * STATES + self.state, I32)
        points = gather_pairs(e, self.addresses["points"], (origin << self.bits) | code)
        cost.set(best.bits(_F16))
        return origin, code, points

    def _least_by_state(self, tagged_costs: Values) -> Value:
        """For each state that is entered a vector of costs, by the state before → the least one of each, in the lane of
        the state that is entered."""
        e = self.e

        def merge(first: Value, second: Value, step: int) -> Value:
            """Minima over pairs of lanes that are `step` apart: of `first` in one lane, of `second` in the other."""
            low = [lane - step + LANES if lane & step else lane for lane in range(LANES)]
            high = [lane + LANES if lane & step else lane + step for lane in range(LANES)]
            return e.imin(e.shuffle(first, second, low), e.shuffle(first, second, high))

        a, b, c, d = tagged_costs
        return merge(merge(a, b, 1), merge(c, d, 1), 2)

    def _trace(self, cost: Value, codes: Value) -> None:
        """The codes of the best path of each token → `codes`."""
        e, unit = self.e, self.unit
        costs = e.stack(4 * LANES)
        e.store(cost, costs)
        for token in range(VECTOR_TOKENS):
            first = STATES * token
            best, state = e.load(costs, F32, 4 * first), e.i64(0)
            for other in range(1, STATES):
                other_cost = e.load(costs, F32, 4 * (first + other))
                better = other_cost < best
                best, state = e.select(better, other_cost, best), e.select(better, e.i64(other), state)
            survivor = e.variable(state)
            with e.loop(0, unit.pairs) as number:
                pair = unit.pairs - 1 - number
                link = e.load(self.links + pair * (4 * LANES) + (survivor.get() + first) * 4, I32)
                e.store(link & (_LINK - 1), codes + pair * unit.row, 4 * token)
                survivor.set((link >> 8).zext(I64))


def round_to_paths(unit: Unit) -> None:
    """Round round by round → `codes`, in rows of tokens in the order of rounds; and so `norms`, `x`, which gets targets
    with the feedback along tokens, and their `errors`."""
    encoding = unit.encoding
    search = _Search(unit, path_tables(encoding.bits), unit.block.paths)
    if not encoding.has_metric:
        _limit_norms(unit)
    originals = token_errors = unit.x
    if encoding.rounds > 1:
        originals, unit.x, token_errors = (_by_round(unit, unit.x, unit.dim) for _ in range(3))
        unit.norms, unit.inverses = (_by_round(unit, numbers, 1) for numbers in (unit.norms, unit.inverses))
    size = unit.row // encoding.rounds  # bytes
    for number in range(encoding.rounds):
        if number:
            _feed_back(unit, token_errors, number)
        with unit.e.loop(number * size, (number + 1) * size, 4 * VECTOR_TOKENS) as offset:
            search.run(offset)
            if encoding.has_metric:
                _write_errors(unit, search.addresses["points"], originals, token_errors, offset)


def in_token_order(unit: Unit) -> tuple[Value, Value]:
    """The codes, transposed to (N, P) bytes, and the norms (N,), in the order of tokens."""
    e, rounds = unit.e, unit.encoding.rounds
    codes, norms = unit.errors, unit.allocate(unit.row)
    with e.loop(0, unit.tokens // rounds) as place:
        for number in range(rounds):
            token, source = place * rounds + number, place * 4 + unit.row // rounds * number
            e.store(e.load(unit.norms + source, F32), norms + token * 4)
            with e.loop(0, unit.pairs) as pair:
                code = e.load(unit.codes + pair * unit.row + source, I32)
                e.store(code.trunc(I8), codes + token * unit.pairs + pair)
    return codes, norms


def _limit_norms(unit: Unit) -> None:
    """Norms become at most `Encoding.largest`, and `inverses` what vectors are divided by."""
    e = unit.e
    with unit.vectors() as offset:
        norm = e.fmin(e.load(unit.norms + offset, _F16), unit.encoding.largest)
        e.store(norm, unit.norms + offset)
        e.store(e.select(norm > 0.0, norm, e.constant(_F16, 1.0)), unit.inverses + offset)


def _by_round(unit: Unit, source: Value, rows: Value | int) -> Value:
    """Rows of tokens (rows, N) float32 → the same in the order of rounds."""
    e, rounds = unit.e, unit.encoding.rounds
    out = unit.allocate(rows * unit.row)
    with e.loop(0, rows) as row, e.loop(0, unit.tokens // rounds) as place:
        for number in range(rounds):
            value = e.load(source + row * unit.row + place * (4 * rounds), F32, 4 * number)
            e.store(value, out + row * unit.row + place * 4, unit.row // rounds * number)
    return out


def _feed_back(unit: Unit, token_errors: Value, number: int) -> None:
    """Add to the targets of a round what makes up for the errors `token_errors` by the rounds before it."""
    e, round_tokens = unit.e, unit.tokens // unit.encoding.rounds
    kind = vector(F32, math.gcd(round_tokens, LANES))
    factors = unit.block.token_feedback + 4 * unit.tokens * round_tokens * number
    with e.loop(0, unit.dim, 4) as channel, e.loop(0, round_tokens, kind.count) as place:
        sums = [e.variable(e.zero(kind)) for _ in range(4)]
        with e.loop(0, number * round_tokens) as token:
            factor = e.load(factors + (token * round_tokens + place) * 4, kind)
            for row, total in enumerate(sums):
                error = e.broadcast(token_errors + channel * unit.row + token * 4, F32, kind.count, unit.row * row)
                total.set(e.fma(factor, error, total.get()))
        for row, total in enumerate(sums):
            start = unit.x + channel * unit.row + place * 4 + unit.row // unit.encoding.rounds * number
            e.store(e.load(start, kind, unit.row * row) + total.get(), start, unit.row * row)


def _write_errors(unit: Unit, points: Value, originals: Value, token_errors: Value, offset: Value) -> None:
    """The errors of four tokens: against their targets → `errors`; against what the block has → `token_errors`, with
    rounds."""
    e, kind = unit.e, vector(F32, VECTOR_TOKENS)
    state, norm = e.variable(e.zero(vector(I32, VECTOR_TOKENS))), e.load(unit.norms + offset, kind)
    with e.loop(0, unit.pairs) as pair:
        code = e.load(unit.codes + pair * unit.row + offset, vector(I32, VECTOR_TOKENS))
        point_pairs = gather_pairs(e, points, (state.get() << unit.encoding.bits) | code)
        state.set(code & (STATES - 1))
        for axis, point in enumerate(point_pairs):
            start, decoded = pair * unit.row_of_pairs + axis * unit.row + offset, point * norm
            e.store(e.load(unit.x + start, kind) - decoded, unit.errors + start)
            if unit.encoding.rounds > 1:
                e.store(e.load(originals + start, kind) - decoded, token_errors + start)
