"""Mamba 2: rows are added to slots, block by block; see `engine.backends.numpy.recurrent`.

Four kernels follow each other: convolutions, of channels; keys, and their products with queries, of groups; results, of
heads; and norms, of rows. Every sum of a row has its terms in the order of the tokens, as in `gated_delta`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from polarlm.engine.backends.native.kernels.multiply import LeftMatrix, offsets, pieces, product
from polarlm.engine.backends.native.kernels.recurrent import common
from polarlm.engine.backends.native.kernels.recurrent.common import RecurrentArguments
from polarlm.engine.backends.native.kernels.rows import for_each_column
from polarlm.engine.jit.lang import F32, I32, Emitter, Kernel, Type, Value, vector
from polarlm.engine.jit.run.workers import SCRATCH

PART = 64  # channels of a unit of `convolve`


@dataclass(frozen=True)
class Mamba2Spec:
    """The properties that kernels are specialized for. is_prompt: whether slots advance at the ends of blocks."""

    groups: int
    shared: int  # heads of a group
    size: int  # A, a state's
    dim: int  # D, a head's
    block: int
    width: int
    has_bias: bool
    is_prompt: bool

    @property
    def heads(self) -> int:
        return self.groups * self.shared

    @property
    def inner(self) -> int:
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B, C."""
        return self.inner + 2 * self.groups * self.size

    @property
    def columns(self) -> int:
        """Of a projected row: z, x, B, C, dt."""
        return self.inner + self.channels + self.heads

    def name(self, kernel: str) -> str:
        sizes = f"{self.groups}x{self.shared}_{self.size}x{self.dim}_{self.block}_{self.width}"
        return f"mamba2_{kernel}_{sizes}{'_bias' * self.has_bias}{'_prompt' * self.is_prompt}"


@cache
def convolve(spec: Mamba2Spec) -> Kernel[RecurrentArguments]:
    """silu of the convolution of x, B and C; one unit per span and `PART` channels."""
    row_bytes, rows_before = 4 * spec.channels, spec.width - 1
    parts = -(-spec.channels // PART)

    def emit(e: Emitter, args: RecurrentArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            span, channel = common.span_of(e, args.spans, unit // parts), unit % parts * PART
            inputs = args.inputs + span.slot * (row_bytes * (rows_before + spec.block)) + channel * 4
            columns = e.imin(-channel + spec.channels, PART)

            def add(row: Value, count: Value, place: Value, number: Value) -> None:
                with e.loop(0, count) as i:
                    input_row = inputs + (place + i) * row_bytes
                    source = args.projected + ((row + i) * spec.columns + channel + spec.inner) * 4
                    target = args.convolved + ((row + i) * spec.channels + channel) * 4

                    def compute(offset: Value, kind: Type) -> None:
                        bias = e.load(args.bias + channel * 4 + offset, kind) if spec.has_bias else e.zero(kind)
                        weights = args.conv + channel * 4 + offset
                        places = source + offset, input_row + offset, weights
                        e.store(common.convolution(e, spec, *places, bias), target + offset)

                    for_each_column(e, columns, compute)
                if spec.is_prompt:
                    with e.when(place + count >= spec.block):
                        end_row = common.end_row(e, args.end_rows, args.blocks, number)
                        end = end_row >= 0, args.end_inputs + end_row * (rows_before * row_bytes) + channel * 4
                        common.repeat_inputs(e, inputs, (row_bytes, spec.block, rows_before), columns, end)

            common.for_each_block(e, spec.block, span, add)

    return Kernel(spec.name("convolve"), emit, RecurrentArguments)


@cache
def multiply_keys(spec: Mamba2Spec) -> Kernel[RecurrentArguments]:
    """Keys are added to their blocks, and multiplied with queries; one unit per span and group."""
    key_bytes = 4 * spec.size * spec.block  # a group's in a block

    def emit(e: Emitter, args: RecurrentArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            span, group = common.span_of(e, args.spans, unit // spec.groups), unit % spec.groups
            slot_keys = args.keys + (span.slot * spec.groups + group) * key_bytes

            def copy(target: Value, source: Value) -> None:
                with e.loop(0, spec.size) as channel:
                    for first, lanes in pieces(spec.block):
                        offset = channel * (4 * spec.block)
                        e.store(e.load(source + offset, vector(F32, lanes), 4 * first), target + offset, 4 * first)

            def add(row: Value, count: Value, place: Value, number: Value) -> None:
                keys = slot_keys
                if spec.is_prompt:
                    keys = args.block_keys + (number * spec.groups + group) * key_bytes
                    with e.when(place > 0):
                        copy(keys, slot_keys)
                key = args.convolved + (row * spec.channels + group * spec.size + spec.inner) * 4
                with e.loop(0, count) as i, e.loop(0, spec.size) as channel:
                    x = e.load(key + (i * spec.channels + channel) * 4, F32)
                    e.store(x, keys + (channel * spec.block + place + i) * 4)
                scores = args.scores + (row * spec.groups + group) * (4 * spec.block)
                product(
                    e,
                    LeftMatrix(key + 4 * spec.groups * spec.size, 4 * spec.channels, count, e.i64(spec.size)),
                    (keys, spec.block),
                    lambda i, first, lanes: e.zero(vector(F32, lanes)),
                    lambda i, first, value: e.store(value, scores + i * (4 * spec.groups * spec.block), 4 * first),
                    common.product_tile(e, spec.is_prompt),
                    visible_columns=place + count,
                )
                if spec.is_prompt:
                    with e.when(place + count < spec.block):
                        copy(slot_keys, keys)

            common.for_each_block(e, spec.block, span, add)

    return Kernel(spec.name("multiply_keys"), emit, RecurrentArguments)


def _arrays(spec: Mamba2Spec) -> list[int]:
    """Offsets of a head's arrays in scratch, float32, and their end. n: the rows of a block.

    weights (n, N): of updates in results. read (n, D): what queries read of the matrix. scaled (N, D): updates, decayed
    to the end of the block. since, step (n,): how much the matrix has decayed, and dt.
    """
    n = spec.block
    return offsets(n * n, n * spec.dim, n * spec.dim, n, n)


def supports(spec: Mamba2Spec) -> bool:
    """Whether scratch has room for a head."""
    return _arrays(spec)[-1] <= SCRATCH


@cache
def add_rows(spec: Mamba2Spec) -> Kernel[RecurrentArguments]:
    """Rows are added to the states of heads, and their results computed, before norms; one unit per span and head."""

    def emit(e: Emitter, args: RecurrentArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            head = _Head(e, spec, args, scratch, common.span_of(e, args.spans, unit // spec.heads), unit % spec.heads)
            common.for_each_block(e, spec.block, head.span, head.add)

    return Kernel(spec.name("add_rows"), emit, RecurrentArguments, scratch=_arrays(spec)[-1])


class _Head:
    def __init__(
        self, e: Emitter, spec: Mamba2Spec, args: RecurrentArguments, scratch: Value, span: common.RowSpan, head: Value
    ) -> None:
        self.e, self.spec, self.args, self.span, self.head = e, spec, args, span, head
        self.weights, self.read, self.scaled, self.start_decay, self.step = (
            scratch + offset for offset in _arrays(spec)[:-1]
        )
        self.group, number = head // spec.shared, span.slot * spec.heads + head
        self.state = common.StateMatrix.from_arguments(args, number, args.keys, (spec.size, spec.dim, spec.block))
        self.matrix, self.updates, self.decays = self.state.matrix, self.state.updates, self.state.decays

    def add(self, row: Value, count: Value, place: Value, number: Value) -> None:
        e, spec, args = self.e, self.spec, self.args
        row_bytes, block_row = 4 * spec.dim, 4 * spec.block
        x = args.convolved + (row * spec.channels + self.head * spec.dim) * 4
        query = args.convolved + (row * spec.channels + (self.group + spec.groups) * spec.size + spec.inner) * 4
        self._steps(row, count, place)
        with e.loop(0, count) as i:
            step = e.load(self.step + i * 4, F32)
            for first, lanes in pieces(spec.dim):
                values = e.load(x + i * (4 * spec.channels), vector(F32, lanes), 4 * first)
                e.store(values * step, self.updates + (place + i) * row_bytes, 4 * first)
        product(
            e,
            LeftMatrix(query, 4 * spec.channels, count, e.i64(spec.size)),
            (self.matrix, spec.dim),
            lambda i, first, lanes: e.zero(vector(F32, lanes)),
            lambda i, first, value: e.store(
                value * e.load(self.start_decay + i * 4, F32), self.read + i * row_bytes, 4 * first
            ),
            common.product_tile(e, spec.is_prompt),
        )
        self._weigh(row, count, place)
        skip = e.load(args.skip + self.head * 4, F32)

        def finish(i: Value, first: int, value: Value) -> None:
            inputs = e.load(x + i * (4 * spec.channels), value.type, 4 * first)
            z = args.projected + ((row + i) * spec.columns + self.head * spec.dim) * 4
            gate = common.silu(e, e.load(z, value.type, 4 * first))
            target = args.out + ((row + i) * spec.inner + self.head * spec.dim) * 4
            e.store(e.fma(inputs, skip, value) * gate, target, 4 * first)

        product(
            e,
            LeftMatrix(self.weights, block_row, count, place + count),
            (self.updates, spec.dim),
            lambda i, first, lanes: e.load(self.read + i * row_bytes, vector(F32, lanes), 4 * first),
            finish,
            common.product_tile(e, spec.is_prompt),
        )
        if spec.is_prompt:
            with e.when(place + count >= spec.block):
                self._end_block(number)

    def _steps(self, row: Value, count: Value, place: Value) -> None:
        """Add the rows' decays, and compute `step` and `start_decay`."""
        e, spec, args = self.e, self.spec, self.args
        rows_before = e.load(self.decays + e.imax(place - 1, 0) * 4, F32)
        total = e.variable(e.select(place > 0, rows_before, e.constant(F32, 0.0)))
        rate, bias = e.load(args.decay + self.head * 4, F32), e.load(args.dt_bias + self.head * 4, F32)
        with e.loop(0, count) as i:
            source = args.projected + ((row + i) * spec.columns + self.head) * 4
            step = common.softplus(e, e.load(source, F32, 4 * (spec.inner + spec.channels)) + bias)
            total.add(rate * step)
            e.store(total.get(), self.decays + (place + i) * 4)
            e.store(e.exp(total.get()), self.start_decay + i * 4)
            e.store(step, self.step + i * 4)

    def _weigh(self, row: Value, count: Value, place: Value) -> None:
        """Compute `weights`: scores, times what is left of the updates of the block's tokens."""
        e, spec = self.e, self.spec
        with e.loop(0, count) as i:
            token = place + i
            decay, last = e.load(self.decays + token * 4, F32), token.trunc(I32)
            scores = self.args.scores + ((row + i) * spec.groups + self.group) * (4 * spec.block)
            for first, lanes in pieces(spec.block):
                numbers = e.constant(vector(I32, lanes), list(range(first, first + lanes)))
                pair_decay = e.exp(-e.load(self.decays, vector(F32, lanes), 4 * first) + decay)
                weight = pair_decay * e.load(scores, pair_decay.type, 4 * first)
                visible_columns = e.select(numbers <= last, weight, e.zero(pair_decay.type))
                e.store(visible_columns, self.weights + i * (4 * spec.block), 4 * first)

    def _end_block(self, number: Value) -> None:
        e, spec, args = self.e, self.spec, self.args
        size = 4 * spec.size * spec.dim
        end_row = common.end_row(e, args.end_rows, args.blocks, number)
        target = args.end_matrices + (end_row * spec.heads + self.head) * size
        keys = args.block_keys + (number * spec.groups + self.group) * (4 * spec.size * spec.block)
        replace(self.state, keys=keys).advance(
            e, self.scaled, common.product_tile(e, spec.is_prompt), (end_row >= 0, target)
        )
