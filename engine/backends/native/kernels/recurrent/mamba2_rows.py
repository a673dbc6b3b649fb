"""Mamba 2: rows are added to the states of heads, and their results computed."""

from __future__ import annotations

from functools import cache

from polarlm.engine.backends.native.kernels.multiply import Left, pieces, product
from polarlm.engine.backends.native.kernels.recurrent.block_end import Matrix
from polarlm.engine.backends.native.kernels.recurrent.gates import silu, softplus
from polarlm.engine.backends.native.kernels.recurrent.mamba2_unit import Mamba2, Mamba2Arguments
from polarlm.engine.backends.native.kernels.recurrent.spans import Span, by_blocks, kept_row, span_of
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I32, Value, vector
from polarlm.engine.jit.run.workers import SCRATCH


class _Scratch:
    """Offsets in bytes of a head's arrays in scratch, float32. n: the rows of a block.

    weights (n, N): of updates in results. read (n, D): what queries read of the matrix. scaled (N, D): updates, decayed
    to the end of the block. since, step (n,): how much the matrix has decayed, and dt.
    """

    def __init__(self, spec: Mamba2) -> None:
        n, self.end = spec.block, 0
        self.weights, self.read, self.scaled = self._room(n * n), self._room(n * spec.dim), self._room(n * spec.dim)
        self.since, self.step = self._room(n), self._room(n)

    def _room(self, numbers: int) -> int:
        start = self.end
        self.end += -(-numbers // 16) * 64
        return start


def supports(spec: Mamba2) -> bool:
    """Whether scratch has room for a head."""
    return _Scratch(spec).end <= SCRATCH


@cache
def add_rows(spec: Mamba2) -> Kernel[Mamba2Arguments]:
    """Rows are added to the states of heads, and their results computed, before norms; one unit per span and head."""

    def emit(e: Emitter, args: Mamba2Arguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            head = _Head(e, spec, args, scratch, span_of(e, args.spans, unit // spec.heads), unit % spec.heads)
            by_blocks(e, spec.block, head.span, head.add)

    return Kernel(spec.name("add_rows"), emit, Mamba2Arguments, scratch=_Scratch(spec).end)


class _Head:
    """A unit of `add_rows`."""

    def __init__(
        self, e: Emitter, spec: Mamba2, args: Mamba2Arguments, scratch: Value, span: Span, head: Value
    ) -> None:
        layout = _Scratch(spec)
        self.e, self.spec, self.args, self.span, self.head = e, spec, args, span, head
        self.weights, self.read, self.scaled, self.since, self.step = (
            scratch + at for at in (layout.weights, layout.read, layout.scaled, layout.since, layout.step)
        )
        self.group, of_slot = head // spec.shared, span.slot * spec.heads + head
        self.matrix = args.matrices + of_slot * (4 * spec.size * spec.dim)
        self.updates = args.updates + of_slot * (4 * spec.block * spec.dim)
        self.decays = args.decays + of_slot * (4 * spec.block)

    def add(self, row: Value, count: Value, place: Value, number: Value) -> None:
        """Add rows of one block, and compute their results."""
        e, spec, args = self.e, self.spec, self.args
        row_bytes, block_row = 4 * spec.dim, 4 * spec.block
        x = args.convolved + (row * spec.channels + self.head * spec.dim) * 4
        query = args.convolved + (row * spec.channels + (self.group + spec.groups) * spec.size + spec.inner) * 4
        self._steps(row, count, place)
        with e.loop(0, count) as i:
            step = e.load(self.step + i * 4, F32)
            for first, lanes in pieces(spec.dim):
                own = e.load(x + i * (4 * spec.channels), vector(F32, lanes), 4 * first)
                e.store(own * step, self.updates + (place + i) * row_bytes, 4 * first)
        product(
            e,
            Left(query, 4 * spec.channels, count, e.i64(spec.size)),
            (self.matrix, spec.dim),
            lambda i, first, lanes: e.zero(vector(F32, lanes)),
            lambda i, first, value: e.store(
                value * e.load(self.since + i * 4, F32), self.read + i * row_bytes, 4 * first
            ),
            spec.tile(e),
        )
        self._weigh(row, count, place)
        skip = e.load(args.skip + self.head * 4, F32)

        def finish(i: Value, first: int, value: Value) -> None:
            own = e.load(x + i * (4 * spec.channels), value.type, 4 * first)
            z = args.projected + ((row + i) * spec.columns + self.head * spec.dim) * 4
            gate = silu(e, e.load(z, value.type, 4 * first))
            target = args.out + ((row + i) * spec.inner + self.head * spec.dim) * 4
            e.store(e.fma(own, skip, value) * gate, target, 4 * first)

        product(
            e,
            Left(self.weights, block_row, count, place + count),
            (self.updates, spec.dim),
            lambda i, first, lanes: e.load(self.read + i * row_bytes, vector(F32, lanes), 4 * first),
            finish,
            spec.tile(e),
        )
        if spec.is_prompt:
            with e.when(place + count >= spec.block):
                self._end_block(number)

    def _steps(self, row: Value, count: Value, place: Value) -> None:
        """Add the rows' decays, and compute `step` and `since`."""
        e, spec, args = self.e, self.spec, self.args
        before = e.load(self.decays + e.imax(place - 1, 0) * 4, F32)
        total = e.variable(e.select(place > 0, before, e.constant(F32, 0.0)))
        rate, bias = e.load(args.decay + self.head * 4, F32), e.load(args.dt_bias + self.head * 4, F32)
        with e.loop(0, count) as i:
            given = args.projected + ((row + i) * spec.columns + self.head) * 4
            step = softplus(e, e.load(given, F32, 4 * (spec.inner + spec.channels)) + bias)
            total.add(rate * step)
            e.store(total.get(), self.decays + (place + i) * 4)
            e.store(e.exp(total.get()), self.since + i * 4)
            e.store(step, self.step + i * 4)

    def _weigh(self, row: Value, count: Value, place: Value) -> None:
        """Compute `weights`: scores, times what is left of the updates of the block's tokens."""
        e, spec = self.e, self.spec
        with e.loop(0, count) as i:
            at = place + i
            own, last = e.load(self.decays + at * 4, F32), at.trunc(I32)
            scores = self.args.scores + ((row + i) * spec.groups + self.group) * (4 * spec.block)
            for first, lanes in pieces(spec.block):
                numbers = e.constant(vector(I32, lanes), list(range(first, first + lanes)))
                between = e.exp(-e.load(self.decays, vector(F32, lanes), 4 * first) + own)
                weight = between * e.load(scores, between.type, 4 * first)
                seen = e.select(numbers <= last, weight, e.zero(between.type))
                e.store(seen, self.weights + i * (4 * spec.block), 4 * first)

    def _end_block(self, number: Value) -> None:
        e, spec, args = self.e, self.spec, self.args
        size = 4 * spec.size * spec.dim
        kept = kept_row(e, args.kept, args.blocks, number)
        target = args.end_matrices + (kept * spec.heads + self.head) * size
        keys = args.block_keys + (number * spec.groups + self.group) * (4 * spec.size * spec.block)
        state = Matrix(self.matrix, keys, self.updates, self.decays, spec.size, spec.dim, spec.block)
        state.advance(e, self.scaled, spec.tile(e), (kept >= 0, target))
