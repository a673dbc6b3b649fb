"""Tiles of `polarpair` keys: a code of radius and angle for each pair, and a radius step for each pair and group of
tokens. Not for the option `minmax`.

The table of `parts.tables` has the points of radii from 0 to 15, or to 3. A query is multiplied by a group's steps
when the group is read, and then rounded to bytes, so its error is half a step of the largest product of channel and
step.

A tile: (D/8, N/16) vectors of 16 tokens x 4 codes, packed by `parts.packing`, then the steps, (groups, D/2) float16. A
prepared query is its D float32, with the first channels of each four pairs before their second channels.
"""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native.codecs import KeyTiles, codes_section
from polarlm.engine.backends.native.codecs.parts.code_table import CodeTable
from polarlm.engine.backends.native.codecs.parts.decoding import emit_points
from polarlm.engine.backends.native.codecs.parts.packing import Packing
from polarlm.engine.backends.native.codecs.parts.products import PAIR_LANES, emit_products, store_query
from polarlm.engine.codecs.polarpair import COSINES, SINES, PolarPair
from polarlm.engine.codecs.schema.sections import Section
from polarlm.engine.jit.lang import F32, I16, Emitter, Value, Values, vector

_F16 = vector(F32, 16)


def keys(codec: PolarPair, block_size: int, head_dim: int) -> PolarPairKeys | None:
    has_kernel = not codec.minmax and (codec.group or block_size) % 16 == 0
    return PolarPairKeys(codec, block_size, head_dim) if has_kernel else None


class PolarPairKeys(KeyTiles):
    def __init__(self, codec: PolarPair, block_size: int, head_dim: int) -> None:
        self._tokens, self._head_dim = block_size, head_dim
        radius, angle = np.divmod(np.arange(1 << codec.bits), 16)
        self._table = CodeTable(codec.bits, radius[:, None] * np.stack([COSINES, SINES], -1)[angle])
        self._packing = Packing(codec.bits)
        self._spans = block_size // (codec.group or block_size)  # number of groups of tokens that share steps
        schema, cuts = codec.schema(block_size, head_dim), ((block_size // 16, 16), (head_dim // 8, 4))
        self._codes = codes_section("codes", schema["codes"], self._packing, cuts, (2, 0, 1, 3))
        steps = Section.numbers("radius_step", schema["radius_step"])
        name = f"polarpair_{codec.bits}_keys_{self._spans}"
        super().__init__(name, codec, block_size, head_dim, self._codes, steps)
        _, self._steps_at, _ = self._sections.offsets
        self.query_bytes = -(-head_dim // 16) * 64

    def emit_query(self, e: Emitter, q: Value, out: Value) -> None:
        for first in range(0, self._head_dim, 16):
            part = e.load(q, _F16, 4 * first)
            e.store(e.shuffle(part, part, PAIR_LANES), out, 4 * first)

    def emit_scores(self, e: Emitter, block: Value, next_tile: Value, queries: Values, out: Values) -> None:
        factor_at = -(-self._head_dim // 16) * 16
        prepared = [[e.stack(factor_at + 8) for _ in queries] for _ in range(self._spans)]
        for span, targets in enumerate(prepared):
            steps = [self._steps(e, block, span, first) for first in range(0, self._head_dim, 16)]
            for query, target in zip(queries, targets, strict=True):
                parts = [e.load(query, _F16, 64 * i) * step for i, step in enumerate(steps)]
                store_query(e, parts, self._table, target)
        totals = emit_products(e, self._table, block, next_tile, self._tokens, self._head_dim, prepared)
        e.prefetch(next_tile + self._steps_at, self.nbytes - self._steps_at)
        each = self._tokens // 16 // self._spans
        for number, (total, target) in enumerate(zip(zip(*totals, strict=True), out, strict=True)):
            for group, dots in enumerate(total):
                factor = e.broadcast(prepared[group // each][number], F32, 16, factor_at)
                e.store(dots.to_float() * factor, target, 64 * group)

    def emit_decode(self, e: Emitter, block: Value, out: Value, scratch: Value) -> None:
        tokens, dim = self._tokens, self._head_dim
        ones = [e.constant(_F16, 1.0)] * (tokens // 16)
        emit_points(e, block, self._packing, self._codes.places, self._table.points, ones, out, scratch)
        each = tokens // self._spans
        with e.loop(0, tokens) as token:
            steps, row = block + token // each * dim + self._steps_at, out + token * (4 * dim)
            for first in range(0, dim, 16):
                pairs = min(8, (dim - first) // 2)
                step = e.half_to_float(e.load(steps, vector(I16, pairs), first))
                step = e.shuffle(step, step, [lane // 2 for lane in range(2 * pairs)])
                e.store(e.load(row, step.type, 4 * first) * step, row, 4 * first)

    def _steps(self, e: Emitter, block: Value, span: int, first: int) -> Value:
        """The steps (16,) of channels from `first` on, in the order of a prepared query; finite numbers beyond D."""
        pairs = min(8, (self._head_dim - first) // 2)
        steps = e.half_to_float(e.load(block, vector(I16, pairs), self._steps_at + span * self._head_dim + first))
        return e.shuffle(steps, steps, [(4 * (lane // 8) + lane % 4) % pairs for lane in range(16)])
