"""The work of a unit of attention on its queries, over tiles of float32 keys and values, with online softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from polarlm.engine.backends.native.kernels.attention.partials import LOWEST
from polarlm.engine.backends.native.kernels.multiply import multiply, offsets, pieces, rotate
from polarlm.engine.backends.native.kernels.rows import apply_softcap
from polarlm.engine.jit.lang import F32, I32, I64, Emitter, Value, vector
from polarlm.engine.jit.run.workers import SCRATCH

KEYS = 128  # keys of a tile
MOST_QUERIES = 192  # most queries of a unit
_QUERY_TILE = 6  # queries whose sums stay in registers
LOG2_E = 1 / math.log(2)
_F16 = vector(F32, 16)


@dataclass(frozen=True)
class PromptSpec:
    """The properties that a kernel is specialized for.

    dim: D. is_scaled: whether results are multiplied by a scale for each head. order: of the `Rotation` of results.
    is_capped: whether scores have a soft cap. has_sink_scores: whether each query head has a score without a value.
    """

    dim: int
    is_scaled: bool = False
    order: int = 1
    is_capped: bool = False
    has_sink_scores: bool = False

    @property
    def name(self) -> str:
        rule = "_capped" * self.is_capped + "_sink_scores" * self.has_sink_scores
        return f"prompt_attention_{self.dim}_{'scaled' * self.is_scaled}{self.order}{rule}"


def arrays(dim: int) -> list[int]:
    """Offsets of a unit's arrays in scratch, and their end. They are float32 if not said otherwise.

    keys (D, KEYS): a tile, transposed. weights (_QUERY_TILE, KEYS): scores, then their exponentials. rescale (2, 16):
    the factors of older sums, then the sums of new weights. For each query: position, int64; query (D,), scaled;
    weighted (D,), the weighted values; row_max and row_sum, the maximum of its scores and the sum of its weights. These
    are powers of two: queries, and so scores, are multiplied by log₂ e.
    """
    n = MOST_QUERIES
    return offsets(KEYS * dim, _QUERY_TILE * KEYS, 32, 2 * n, n * dim, n * dim, n, n)


def supports(dim: int) -> bool:
    """Whether scratch has room for a unit with heads of `dim` channels."""
    return arrays(dim)[-1] <= SCRATCH


class Unit:
    """Emits the work of a unit on its queries. Their state is in scratch."""

    def __init__(
        self, e: Emitter, spec: PromptSpec, scratch: Value, softcap: Value | None = None, stride: Value | None = None
    ) -> None:
        """stride: bytes from row to row of keys and of values; None: they lie together."""
        self._row_stride = 4 * spec.dim if stride is None else stride
        self._e, self._spec, self._dim, self._softcap = e, spec, spec.dim, softcap
        places = (scratch + offset for offset in arrays(spec.dim)[:-1])
        self._keys, self._weights, self._rescale, self._position, *query_arrays = places
        self._query, self._weighted, self._row_max, self._row_sum = query_arrays
        rows, vectors = e.level.float_tile
        self._rows = max(n for n in (1, 2, 3, 4, _QUERY_TILE) if n <= rows)  # divisors of MOST_QUERIES
        self._vectors = max(n for n in (1, 2, 4) if n <= vectors)  # divisors of KEYS / 16

    def _row(self, i: Value) -> tuple[Value, Value]:
        return self._query + i * (4 * self._dim), self._weighted + i * (4 * self._dim)

    def open(self, i: Value, position: Value, q: Value, scale: Value, sink: Value | None = None) -> None:
        """Initialize query i from q (D,), times scale, with an empty sum, or with the score at `sink`."""
        e = self._e
        query, weighted = self._row(i)
        factor = scale * LOG2_E
        for first, lanes in pieces(self._dim):
            e.store(e.load(q, vector(F32, lanes), 4 * first) * factor, query, 4 * first)
            e.store(e.zero(vector(F32, lanes)), weighted, 4 * first)
        e.store(e.constant(F32, LOWEST) if sink is None else e.load(sink, F32) * LOG2_E, self._row_max + i * 4)
        e.store(e.constant(F32, 0.0 if sink is None else 1.0), self._row_sum + i * 4)
        e.store(position, self._position + i * 8)

    def pad_queries(self, queries: Value, position: Value) -> None:
        """Initialize padding queries up to a multiple of `_rows`; their results are not read."""
        e = self._e
        with e.loop(queries, (queries + (self._rows - 1)) // self._rows * self._rows) as i:
            self.open(i, position, self._query, e.constant(F32, 0.0))

    def resume(self, i: Value, out: Value, row_max: Value, row_sum: Value, number: Value) -> None:
        """Load the state of query i that an earlier launch has stored."""
        e = self._e
        _copy(e, out, self._row(i)[1], self._dim)
        e.store(e.load(row_max + number * 4, F32), self._row_max + i * 4)
        e.store(e.load(row_sum + number * 4, F32), self._row_sum + i * 4)

    def suspend(self, i: Value, out: Value, row_max: Value, row_sum: Value, number: Value) -> None:
        e = self._e
        _copy(e, self._row(i)[1], out, self._dim)
        e.store(e.load(self._row_max + i * 4, F32), row_max + number * 4)
        e.store(e.load(self._row_sum + i * 4, F32), row_sum + number * 4)

    def finish(self, i: Value, out: Value, epilogue: tuple[Value, Value, Value] | None = None) -> None:
        """Store the result of query i: normalized, scaled and rotated.

        epilogue: the addresses of the scale, of the signs before the rotation, and of the rotation, if the kernel is
        specialized for one of them.
        """
        e, weighted, order = self._e, self._row(i)[1], self._spec.order
        row_sum = e.load(self._row_sum + i * 4, F32)
        factor = e.const_like(1.0, row_sum) / row_sum
        if epilogue is not None and self._spec.is_scaled:
            factor = factor * e.load(epilogue[0], F32)
        for first, lanes in pieces(self._dim):
            x = e.load(weighted, vector(F32, lanes), 4 * first) * factor
            if epilogue is not None and order > 1:
                x = x * e.load(epilogue[1], x.type, 4 * first)
            e.store(x, out if order == 1 else weighted, 4 * first)
        if epilogue is not None and order != 1:
            rotate(e, weighted, out, epilogue[2], self._dim, order)

    def attend(
        self,
        k: Value,
        v: Value,
        start: Value,
        tokens: Value,
        queries: Value,
        window: Value,
        most: int = KEYS,
        sees: Value | None = None,
    ) -> None:
        """Attend with all queries to a tile of keys and values, whose first token has position `start`.

        sees: position up to which all queries see, if that is later than their own. most: of its tokens, a multiple of
        16. What is computed for places beyond them has no part in results.
        """
        e, rows, vectors = self._e, self._rows, min(self._vectors, most // 16)
        self._transpose(k, tokens, vectors)
        with e.loop(0, queries, rows) as i:
            address = self._position + i * 8
            lowest, highest = e.load(address, I64), self._newest(e.load(address, I64, 8 * (rows - 1)), sees)
            with e.when((start <= highest) & (start + tokens > lowest - window + 1)):
                query, weighted = self._row(i)
                visible = e.imin(highest - start + 1, tokens)
                with e.loop(0, visible, 16 * vectors) as first:
                    panel = multiply(
                        e,
                        query,
                        4 * self._dim,
                        self._keys + first * 4,
                        4 * KEYS,
                        e.i64(self._dim),
                        [[e.zero(_F16)] * vectors for _ in range(rows)],
                    )
                    for row, sums in enumerate(panel):
                        for number, value in enumerate(sums):
                            e.store(value, self._weights + first * 4, 4 * (KEYS * row + 16 * number))
                if self._softcap is not None:
                    self._cap(self._softcap * LOG2_E, most)
                self._mask(i, start, tokens, window, most, sees)
                self._softmax(i, most)
                parts = list(pieces(self._dim))
                for number in range(0, len(parts), self._vectors):
                    self._add_values(weighted, v, visible, parts[number : number + self._vectors])

    def _transpose(self, k: Value, tokens: Value, vectors: int) -> None:
        """k (tokens, D) → keys (D, KEYS), where copies of the last token are padding, as far as products read them.

        vectors: of 16 keys that products read at once.
        """
        e, step = self._e, 16 * vectors
        with e.loop(0, (tokens + (step - 1)) // step * step, 16) as first:
            rows = [k + e.imin(first + i, tokens - 1) * self._row_stride for i in range(16)]
            target = self._keys + first * 4
            whole = self._dim // 16 * 16
            with e.loop(0, whole, 16) as channel:
                for number, column in enumerate(e.transpose([e.load(row + channel * 4, _F16) for row in rows])):
                    e.store(column, target + channel * (4 * KEYS), 4 * KEYS * number)
            for rest in range(whole, self._dim):
                e.store(e.collect([e.load(row, F32, 4 * rest) for row in rows]), target, 4 * KEYS * rest)

    def _newest(self, position: Value, sees: Value | None) -> Value:
        return position if sees is None else self._e.imax(position, sees)

    def _cap(self, cap: Value, most: int) -> None:
        e = self._e
        with e.loop(0, self._rows) as row:
            for place in range(0, 4 * most, 64):
                score = e.load(self._weights + row * (4 * KEYS), _F16, place)
                e.store(apply_softcap(e, score, e.const_like(cap, score)), self._weights + row * (4 * KEYS), place)

    def _mask(self, i: Value, start: Value, tokens: Value, window: Value, most: int, sees: Value | None) -> None:
        """Set scores of `_rows` queries from i on to LOWEST where they do not see the key, of up to `most`."""
        e, address, integers = self._e, self._position + i * 8, vector(I32, 16)
        lowest, highest = e.load(address, I64), e.load(address, I64, 8 * (self._rows - 1))
        seen_by_all = e.imin(self._newest(lowest, sees) - start + 1, tokens)
        with e.when((seen_by_all < most) | (start < highest - window + 1)), e.loop(0, self._rows) as row:
            position = e.load(address + row * 8, I64)
            last = e.imax(e.imin(self._newest(position, sees) - start, tokens - 1), -1).trunc(I32)
            first = e.imin(e.imax(position - start - window + 1, 0), most).trunc(I32)
            scores = self._weights + row * (4 * KEYS)
            for number in range(0, most, 16):
                key = e.constant(integers, list(range(number, number + 16)))
                score = e.load(scores, _F16, 4 * number)
                is_visible = (key <= last) & (key >= first)
                e.store(e.select(is_visible, score, e.const_like(LOWEST, score)), scores, 4 * number)

    def _softmax(self, i: Value, most: int) -> None:
        """Scores of up to `most` keys → weights in place; updates row_max, row_sum and rescale of `_rows` queries from
        i on."""
        e, places = self._e, range(0, 4 * most, 64)
        with e.loop(0, self._rows) as row:
            row_weights = self._weights + row * (4 * KEYS)
            own_row_max, rescale = self._row_max + (i + row) * 4, self._rescale + row * 4
            old_row_max = e.load(own_row_max, F32)
            highest = reduce(larger, [e.load(row_weights, _F16, place) for place in places])
            row_max = larger(e.combine_lanes(highest, larger), old_row_max)
            # Of keys that are not seen the weight is 0, also where none is and the maximum is LOWEST.
            top = e.splat(e.select(row_max > LOWEST, row_max, e.zero(F32)), 16)
            total = e.zero(_F16)
            for place in places:
                score = e.load(row_weights, _F16, place)
                weight = e.exp2(score - top)
                e.store(weight, row_weights, place)
                # The weight of a score of −infinity is 0: 0 · score makes the sum NaN where a score is not finite.
                total = total + e.fma(score, e.const_like(0.0, score), weight)
            e.store(row_max, own_row_max)
            e.store(old_row_max - row_max, rescale)
            e.store(e.sum_lanes(total), rescale, 64)
        e.store(e.exp2(e.load(self._rescale, _F16)), self._rescale)
        for number in range(self._rows):
            row_sum, rescale = self._row_sum + i * 4, e.load(self._rescale, F32, 4 * number)
            weight_sum = e.load(self._rescale, F32, 64 + 4 * number)
            e.store(e.fma(e.load(row_sum, F32, 4 * number), rescale, weight_sum), row_sum, 4 * number)

    def _add_values(self, weighted: Value, v: Value, visible: Value, part: Sequence[tuple[int, int]]) -> None:
        """Add weights · values to the rescaled sums, for the channels of `part`."""
        e, row_bytes = self._e, 4 * self._dim
        start = []
        for row in range(self._rows):
            rescale, offset = e.load(self._rescale, F32, 4 * row), row_bytes * row
            start.append([e.load(weighted, vector(F32, lanes), offset + 4 * first) * rescale for first, lanes in part])
        sums = multiply(e, self._weights, 4 * KEYS, v + 4 * part[0][0], self._row_stride, visible, start)
        for row, values in enumerate(sums):
            for (channel, _), value in zip(part, values, strict=True):
                e.store(value, weighted, row_bytes * row + 4 * channel)


def _copy(e: Emitter, source: Value, target: Value, dim: int) -> None:
    for first, lanes in pieces(dim):
        e.store(e.load(source, vector(F32, lanes), 4 * first), target, 4 * first)


def larger(a: Value, b: Value) -> Value:
    """The larger of floats; b if one is NaN, which is one instruction."""
    return a.emitter.select(a > b, a, b)
