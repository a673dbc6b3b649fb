"""Gated delta rules: rows are added to slots, block by block; see `engine.backends.numpy.gated_delta`.

Every sum of a row has its terms in the order of the tokens, so that it does not depend on which rows are computed with
it, and rows that are computed one at a time leave the same state as rows that are computed together.
"""

from __future__ import annotations

from functools import cache

from polarlm.engine.backends.native.kernels.multiply import pieces
from polarlm.engine.backends.native.kernels.recurrent.delta_rows import Rows
from polarlm.engine.backends.native.kernels.recurrent.delta_unit import Delta, DeltaArguments, Scratch, Unit
from polarlm.engine.backends.native.kernels.recurrent.spans import by_blocks, kept_row, span_of
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, Value, vector


@cache
def gated_delta(spec: Delta) -> Kernel[DeltaArguments]:
    """See `Ops.gated_delta`; one unit per span and key head."""

    def emit(e: Emitter, args: DeltaArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            head, span = unit % spec.key_heads, span_of(e, args.spans, unit // spec.key_heads)
            own = e, spec, args, scratch, span.slot, head

            def add(row: Value, count: Value, place: Value, number: Value) -> None:
                Rows(*own).add(row, count, place)
                if spec.is_prompt:
                    with e.when(place + count >= spec.block):
                        _BlockEnd(*own).advance(number)

            by_blocks(e, spec.block, span, add)

    return Kernel(spec.name, emit, DeltaArguments, scratch=Scratch(spec).end)


class _BlockEnd(Unit):
    """Emits what a unit does at the end of a block."""

    def advance(self, number: Value) -> None:
        """Make the state at the end of the block that at the start of the next one, and keep it if it is asked for."""
        e, spec, args = self.e, self.spec, self.args
        before = 4 * spec.channels * (spec.width - 1)
        kept = kept_row(e, args.kept, args.blocks, number)
        with e.loop(0, spec.shared) as member:
            head = self.value_head(member)
            target = args.end_matrices + (kept * spec.value_heads + head) * (4 * spec.key_dim * spec.value_dim)
            self.state(head).advance(e, self.scaled, (self.tile, self.vectors), (kept >= 0, target))
            self._advance_inputs(self.value_channel(head), spec.value_dim, kept, before)
        for channel, count in self.parts():
            self._advance_inputs(channel, count, kept, before)

    def _advance_inputs(self, channel: Value, count: int, kept: Value, before: int) -> None:
        e, spec = self.e, self.spec
        for back in range(spec.width - 1):
            at = self.inputs + channel * 4 + e.i64(4 * spec.channels * back)
            for first, lanes in pieces(count):
                x = e.load(at + e.i64(4 * spec.channels * spec.block), vector(F32, lanes), 4 * first)
                e.store(x, at, 4 * first)
                with e.when(kept >= 0):
                    target = self.args.end_inputs + kept * before + channel * 4 + e.i64(4 * spec.channels * back)
                    e.store(x, target, 4 * first)
