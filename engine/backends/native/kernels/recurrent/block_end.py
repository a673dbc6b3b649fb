"""The end of a block: the state there becomes that at the start of the next block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.multiply import Left, pieces, product
from polarlm.engine.backends.native.kernels.rows import over_columns
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Int64, Pointer
from polarlm.engine.jit.lang.values import F32, I32, I64, Type, Value, vector


@dataclass(frozen=True)
class Matrix:
    """A value head's state in a slot, by its addresses. keys: its key head's keys, float32 (A, N)."""

    matrix: Value
    keys: Value
    updates: Value
    decays: Value
    key_dim: int
    value_dim: int
    block: int

    def advance(
        self, e: Emitter, scaled: Value, tile: tuple[int, int], kept: tuple[Value, Value] | None = None
    ) -> None:
        """Apply the decays and updates of a complete block. scaled: scratch for N·D numbers.

        tile: of `product`. kept: a condition, and the address at which the new matrix is stored as well if it holds.
        """
        value_row = 4 * self.value_dim
        at_end = e.load(self.decays, F32, 4 * (self.block - 1))
        with e.loop(0, self.block) as i:
            factor = e.exp(at_end - e.load(self.decays + i * 4, F32))
            for first, lanes in pieces(self.value_dim):
                update = e.load(self.updates + i * value_row, vector(F32, lanes), 4 * first)
                e.store(update * factor, scaled + i * value_row, 4 * first)
        whole = e.exp(at_end)
        product(
            e,
            Left(self.keys, 4 * self.block, e.i64(self.key_dim), e.i64(self.block)),
            (scaled, self.value_dim),
            lambda i, first, lanes: e.load(self.matrix + i * value_row, vector(F32, lanes), 4 * first) * whole,
            lambda i, first, value: e.store(value, self.matrix + i * value_row, 4 * first),
            tile,
        )
        if kept is None:
            return
        condition, target = kept
        with e.when(condition), e.loop(0, self.key_dim) as i:
            for first, lanes in pieces(self.value_dim):
                at = i * value_row
                e.store(e.load(self.matrix + at, vector(F32, lanes), 4 * first), target + at, 4 * first)


class AdvanceArguments(NamedTuple):
    """Arguments of `advance`. slots: int32 (S,)."""

    matrices: Pointer
    keys: Pointer
    updates: Pointer
    decays: Pointer
    inputs: Pointer
    slots: Pointer
    channels: Int64


@cache
def advance(
    key_heads: int, shared: int, key_dim: int, value_dim: int, block: int, width: int, *, tiled: bool
) -> Kernel[AdvanceArguments]:
    """See `Ops.advance_delta`; one unit per slot and value head. shared: value heads of a key head."""
    heads = key_heads * shared

    def emit(e: Emitter, args: AdvanceArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            slot, head = e.load(args.slots + unit // heads * 4, I32).sext(I64), unit % heads
            own, key = slot * heads + head, head % key_heads if tiled else head // shared
            Matrix(
                args.matrices + own * (4 * key_dim * value_dim),
                args.keys + (slot * key_heads + key) * (4 * key_dim * block),
                args.updates + own * (4 * block * value_dim),
                args.decays + own * (4 * block),
                key_dim,
                value_dim,
                block,
            ).advance(e, scratch, e.level.float_tile)
            first, last = (args.channels * number // heads for number in (head, head + 1))
            row_bytes = args.channels * 4
            inputs = args.inputs + slot * row_bytes * (block + width - 1) + first * 4

            def repeat(offset: Value, kind: Type) -> None:
                for row in range(width - 1):
                    x = e.load(inputs + (row_bytes * (block + row) + offset), kind)
                    e.store(x, inputs + (row_bytes * row + offset))

            over_columns(e, last - first, repeat)

    sizes = f"{key_heads}x{shared}_{key_dim}x{value_dim}_{block}_{width}{'_tiled' * tiled}"
    return Kernel(f"advance_{sizes}", emit, AdvanceArguments, scratch=4 * block * value_dim)
