"""What kernels of delta rules and of Mamba 2 share: spans of rows, gates, and the end of a block, whose state
becomes the state at the start of the next block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from polarlm.engine.backends.native.kernels.multiply import LeftMatrix, pieces, product
from polarlm.engine.backends.native.kernels.rows import for_each_column
from polarlm.engine.jit.lang import F32, I32, I64, Emitter, Float32, Int64, Kernel, Pointer, Type, Value, vector

_LOG_TERMS = 9  # terms of atanh(z) / z for z up to 1/3


class RecurrentArguments(NamedTuple):
    """Arguments of the kernels that add rows; see `DeltaWeights`, `Mamba2Weights` and `DeltaSlots`.

    end_rows (blocks,) int32: for the end of each block, its row of `end_matrices` and `end_inputs`, or −1; for a prompt
    alone. Of Mamba 2, with T rows and Q groups: convolved (T, C): x, B and C after the convolution. block_keys: the
    keys of each block of a prompt, (blocks, Q, A, N). scores (T, Q, N): products of queries with the keys of the block.
    Where channels decay by themselves: row_bytes from a projected row to the next, decay_inputs (T, H·A), and gates
    (T, H·D).
    """

    projected: Pointer
    out: Pointer
    conv: Pointer
    decay: Pointer
    dt_bias: Pointer
    matrices: Pointer
    keys: Pointer
    updates: Pointer
    decays: Pointer
    inputs: Pointer
    spans: Pointer
    end_rows: Pointer
    end_matrices: Pointer
    end_inputs: Pointer
    blocks: Int64
    norm: Pointer = None
    eps: Float32 = 0.0
    bias: Pointer = None
    skip: Pointer = None
    convolved: Pointer = None
    block_keys: Pointer = None
    scores: Pointer = None
    row_bytes: Int64 = 0
    decay_inputs: Pointer = None
    gates: Pointer = None


class RowSpan(NamedTuple):
    """See `engine.backends.delta.DeltaSpan`."""

    slot: Value
    first: Value  # row
    rows: Value
    place: Value  # the place of the first row's token in its block


def span_of(e: Emitter, spans: Value, number: Value) -> RowSpan:
    """The span of this number among those at the address `spans`."""
    address = spans + number * 16
    return RowSpan(*(e.load(address + 4 * field, I32).sext(I64) for field in range(4)))


def for_each_block(e: Emitter, block: int, span: RowSpan, body: Callable[[Value, Value, Value, Value], None]) -> None:
    """Emit body(first row, rows, place, number of the block) for the rows of each block of a span."""
    row, left, place, number = (e.variable(value) for value in (span.first, span.rows, span.place, e.i64(0)))
    with e.repeat_while() as condition:
        block_rows = e.imin(left.get(), -place.get() + block)
        body(row.get(), block_rows, place.get(), number.get())
        row.add(block_rows)
        left.add(-block_rows)
        place.set(e.i64(0))
        number.add(1)
        condition.append(left.get() > 0)


def end_row(e: Emitter, end_rows: Value, blocks: Value, number: Value) -> Value:
    """The row in which the state after a block is kept, or −1. end_rows: the address of the rows of `blocks` blocks."""
    row = e.variable(e.i64(-1))
    with e.when(number < blocks):
        row.set(e.load(end_rows + number * 4, I32).sext(I64))
    return row.get()


def product_tile(e: Emitter, is_prompt: bool) -> tuple[int, int]:
    """Rows and vectors of the tiles of products, whose sums stay in registers."""
    rows, vectors = e.level.float_tile
    return (min(rows, 6), vectors) if is_prompt else (min(rows, 2), 2 * vectors)


def convolution(e: Emitter, spec: Any, x: Value, inputs: Value, weights: Value, start: Value) -> Value:
    """start plus the convolution of numbers at x, silu of it. x, inputs, weights: addresses of a row's numbers, of the
    slot's inputs that are the first ones under the convolution, and of its weights. The numbers become inputs, too."""
    row_bytes, rows_before, newest = 4 * spec.channels, spec.width - 1, e.load(x, start.type)
    e.store(newest, inputs, rows_before * row_bytes)
    for row_back in range(rows_before):
        x_back, weight = (e.load(address, start.type, row_back * row_bytes) for address in (inputs, weights))
        start = e.fma(x_back, weight, start)
    return silu(e, e.fma(newest, e.load(weights, start.type, rows_before * row_bytes), start))


def repeat_inputs(
    e: Emitter,
    inputs: Value,
    sizes: tuple[Any, int, int],
    columns: Value,
    end_target: tuple[Value, Value] | None = None,
) -> None:
    """The last inputs of a block are the first ones of the next block. inputs: address of the first channel's of
    `columns`. sizes: bytes of a row, rows of a block, inputs before a row. end_target: as in `StateMatrix.advance`."""
    row_bytes, block, rows_before = sizes

    def repeat(offset: Value, kind: Type) -> None:
        for row in range(rows_before):
            x = e.load(inputs + (offset + row_bytes * (block + row)), kind)
            e.store(x, inputs + (offset + row_bytes * row))
            if end_target is not None:
                with e.when(end_target[0]):
                    e.store(x, end_target[1] + (offset + row_bytes * row))

    for_each_column(e, columns, repeat)


def silu(e: Emitter, x: Value) -> Value:
    return x / (e.exp(-x) + 1.0)


def sigmoid(e: Emitter, x: Value) -> Value:
    return e.const_like(1.0, x) / (e.exp(-x) + 1.0)


def softplus(e: Emitter, x: Value) -> Value:
    """log(1 + e^x) of a float32: max(x, 0) + 2 atanh(y / (2 + y)) with y = e^−|x|."""
    y = e.exp(-e.absolute(x))
    z = y / (y + 2.0)
    square, total = z * z, e.const_like(1.0 / (2 * _LOG_TERMS - 1), x)
    for term in range(_LOG_TERMS - 2, -1, -1):
        total = e.fma(total, square, e.const_like(1.0 / (2 * term + 1), x))
    return e.fmax(x, 0.0) + z * total * 2.0


@dataclass(frozen=True)
class StateMatrix:
    """A value head's state in a slot, by its addresses. keys: its key head's keys, float32 (A, N). decays: (N,), or, if
    `by_channel`, (A, N)."""

    matrix: Value
    keys: Value
    updates: Value
    decays: Value
    key_dim: int
    value_dim: int
    block: int
    by_channel: bool

    @staticmethod
    def from_arguments(
        args: Any, number: Value, keys: Value, sizes: tuple[int, int, int], *, by_channel: bool = False
    ) -> StateMatrix:
        """State number `number` of all slots and heads. sizes: A, D, N."""
        key_dim, value_dim, block = sizes
        matrix = args.matrices + number * (4 * key_dim * value_dim)
        updates = args.updates + number * (4 * block * value_dim)
        decays = args.decays + number * (4 * block * (key_dim if by_channel else 1))
        return StateMatrix(matrix, keys, updates, decays, *sizes, by_channel)

    def advance(
        self, e: Emitter, scaled: Value, tile: tuple[int, int], end_target: tuple[Value, Value] | None = None
    ) -> None:
        """Apply the decays and updates of a complete block. scaled: scratch for N·D numbers, or, if `by_channel`, N·A.

        tile: of `product`. end_target: a condition, and the address at which the new matrix is stored as well if it
        holds.
        """
        value_row, block_row = 4 * self.value_dim, 4 * self.block
        keys, updates = (scaled, self.updates) if self.by_channel else (self.keys, scaled)
        whole = e.exp(self._at_end(e, e.i64(0)))
        if self.by_channel:
            self._scale_keys(e, scaled)
        else:
            self._scale_updates(e, scaled)

        def kept(i: Value, first: int, lanes: int) -> Value:
            row = e.load(self.matrix + i * value_row, vector(F32, lanes), 4 * first)
            return row * (e.exp(self._at_end(e, i)) if self.by_channel else whole)

        product(
            e,
            LeftMatrix(keys, block_row, e.i64(self.key_dim), e.i64(self.block)),
            (updates, self.value_dim),
            kept,
            lambda i, first, value: e.store(value, self.matrix + i * value_row, 4 * first),
            tile,
        )
        if end_target is None:
            return
        condition, target = end_target
        with e.when(condition), e.loop(0, self.key_dim) as i:
            for first, lanes in pieces(self.value_dim):
                address = i * value_row
                e.store(e.load(self.matrix + address, vector(F32, lanes), 4 * first), target + address, 4 * first)

    def _at_end(self, e: Emitter, channel: Value) -> Value:
        """The logarithm of how much the matrix has decayed in a block; of one channel, if they decay by themselves."""
        return e.load(self.decays + channel * (4 * self.block), F32, 4 * (self.block - 1))

    def _scale_updates(self, e: Emitter, scaled: Value) -> None:
        """Decay the updates of a block to its end: (N, D)."""
        value_row = 4 * self.value_dim
        with e.loop(0, self.block) as i:
            factor = e.exp(self._at_end(e, e.i64(0)) - e.load(self.decays + i * 4, F32))
            for first, lanes in pieces(self.value_dim):
                update = e.load(self.updates + i * value_row, vector(F32, lanes), 4 * first)
                e.store(update * factor, scaled + i * value_row, 4 * first)

    def _scale_keys(self, e: Emitter, scaled: Value) -> None:
        """Decay the keys of a block to its end: (A, N)."""
        with e.loop(0, self.key_dim) as channel:
            row, at_end = channel * (4 * self.block), self._at_end(e, channel)
            for first, lanes in pieces(self.block):
                keys, decays = (e.load(x + row, vector(F32, lanes), 4 * first) for x in (self.keys, self.decays))
                e.store(keys * e.exp(-decays + at_end), scaled + row, 4 * first)


class AdvanceArguments(NamedTuple):
    matrices: Pointer
    keys: Pointer
    updates: Pointer
    decays: Pointer
    inputs: Pointer
    slots: Pointer  # int32 (S,)
    channels: Int64


@cache
def advance(
    key_heads: int, shared: int, key_dim: int, value_dim: int, block: int, width: int, *, tiled: bool, by_channel: bool
) -> Kernel[AdvanceArguments]:
    """See `Ops.advance_delta`; one unit per slot and value head. shared: value heads of a key head."""
    heads = key_heads * shared

    def emit(e: Emitter, args: AdvanceArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            slot, head = e.load(args.slots + unit // heads * 4, I32).sext(I64), unit % heads
            key = head % key_heads if tiled else head // shared
            keys = args.keys + (slot * key_heads + key) * (4 * key_dim * block)
            sizes = key_dim, value_dim, block
            state = StateMatrix.from_arguments(args, slot * heads + head, keys, sizes, by_channel=by_channel)
            state.advance(e, scratch, e.level.float_tile)
            first, last = (args.channels * number // heads for number in (head, head + 1))
            row_bytes = args.channels * 4
            inputs = args.inputs + slot * row_bytes * (block + width - 1) + first * 4
            repeat_inputs(e, inputs, (row_bytes, block, width - 1), last - first)

    name = f"advance_{key_heads}x{shared}_{key_dim}x{value_dim}_{block}_{width}"
    name += f"{'_tiled' * tiled}{'_by_channel' * by_channel}"
    scratch = 4 * block * (key_dim if by_channel else value_dim)
    return Kernel(name, emit, AdvanceArguments, scratch=scratch)
