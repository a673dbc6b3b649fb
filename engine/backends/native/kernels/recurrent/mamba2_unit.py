"""What the kernels of Mamba 2 are specialized for, their arguments, and the rows of a span, block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Int64, Pointer
from polarlm.engine.jit.lang.values import I32, I64, Value

_STEP_ROWS, _PROMPT_ROWS = 2, 6  # whose sums stay in registers


@dataclass(frozen=True)
class Mamba2:
    """The properties that kernels are specialized for. is_prompt: whether slots advance at the ends of blocks."""

    groups: int
    shared: int  # heads of a group
    size: int  # of a state, A
    dim: int  # of a head, D
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

    def tile(self, e: Emitter) -> tuple[int, int]:
        """Rows and vectors of a product's tile."""
        rows, vectors = e.level.float_tile
        return (min(rows, _PROMPT_ROWS), vectors) if self.is_prompt else (min(rows, _STEP_ROWS), 2 * vectors)


class Mamba2Arguments(NamedTuple):
    """Arguments of all kernels but `norm_parts`. T: rows; Q: groups.

    convolved (T, C): x, B and C after the convolution. block_keys: the keys of each block of a prompt, (blocks, Q, A,
    N). scores (T, Q, N): products of queries with the keys of the block. kept (blocks,) int32: for the end of each
    block, its row of `end_matrices` and `end_inputs`, or −1. Steps have neither block_keys nor kept.
    """

    projected: Pointer
    convolved: Pointer
    block_keys: Pointer
    scores: Pointer
    out: Pointer
    conv: Pointer
    bias: Pointer
    decay: Pointer
    dt_bias: Pointer
    skip: Pointer
    matrices: Pointer
    keys: Pointer
    updates: Pointer
    decays: Pointer
    inputs: Pointer
    spans: Pointer
    kept: Pointer
    end_matrices: Pointer
    end_inputs: Pointer
    blocks: Int64


class Span(NamedTuple):
    slot: Value
    first: Value  # row
    rows: Value
    place: Value  # of the first row's token in its block


def span_of(e: Emitter, args: Mamba2Arguments, number: Value) -> Span:
    at = args.spans + number * 16
    return Span(*(e.load(at + 4 * field, I32).sext(I64) for field in range(4)))


def kept_row(e: Emitter, args: Mamba2Arguments, number: Value) -> Value:
    """The row in which the state after a block is kept, or −1."""
    kept = e.variable(e.i64(-1))
    with e.when(number < args.blocks):
        kept.set(e.load(args.kept + number * 4, I32).sext(I64))
    return kept.get()


def by_blocks(e: Emitter, spec: Mamba2, span: Span, body: Callable[[Value, Value, Value, Value], None]) -> None:
    """Emit body(first row, rows, place, number of the block) for the rows of each block of a span."""
    row, left, place, number = (e.variable(value) for value in (span.first, span.rows, span.place, e.i64(0)))
    with e.repeat_while() as condition:
        now = e.imin(left.get(), -place.get() + spec.block)
        body(row.get(), now, place.get(), number.get())
        row.add(now)
        left.add(-now)
        place.set(e.i64(0))
        number.add(1)
        condition.append(left.get() > 0)
