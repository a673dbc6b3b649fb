"""Gated delta rules: rows are added to slots, block by block; see `engine.backends.numpy.gated_delta`.

Every sum of a row has its terms in the order of the tokens, so that it does not depend on which rows are computed with
it, and rows that are computed one at a time leave the same state as rows that are computed together.
"""

from __future__ import annotations

from functools import cache

from polarlm.engine.backends.native.kernels.multiply import pieces
from polarlm.engine.backends.native.kernels.recurrent.delta_rows import Rows
from polarlm.engine.backends.native.kernels.recurrent.delta_unit import Delta, DeltaArguments, Scratch, Unit
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I32, I64, Value, vector


@cache
def gated_delta(spec: Delta) -> Kernel[DeltaArguments]:
    """See `Ops.gated_delta`; one unit per span and key head."""

    def emit(e: Emitter, args: DeltaArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            head, span = unit % spec.key_heads, args.spans + unit // spec.key_heads * 16
            slot, first, count, place = (e.load(span + 4 * field, I32).sext(I64) for field in range(4))
            unit_state = e, spec, args, scratch, slot, head
            row, left, at, number = (e.variable(value) for value in (first, count, place, e.i64(0)))
            with e.repeat_while() as condition:
                now = e.imin(left.get(), -at.get() + spec.block)
                Rows(*unit_state).add(row.get(), now, at.get())
                row.add(now)
                left.add(-now)
                at.add(now)
                if spec.is_prompt:
                    with e.when(at.get() >= spec.block):
                        _BlockEnd(*unit_state).advance(number.get())
                        number.add(1)
                        at.set(e.i64(0))
                condition.append(left.get() > 0)

    return Kernel(spec.name, emit, DeltaArguments, scratch=Scratch(spec).end)


class _BlockEnd(Unit):
    """Emits what a unit does at the end of a block."""

    def advance(self, number: Value) -> None:
        """Make the state at the end of the block that at the start of the next one, and keep it if it is asked for."""
        e, spec, args = self.e, self.spec, self.args
        before = 4 * spec.channels * (spec.width - 1)
        kept = e.variable(e.i64(-1))
        with e.when(number < args.blocks):
            kept.set(e.load(args.kept + number * 4, I32).sext(I64))
        with e.loop(0, spec.shared) as member:
            head = self.value_head(member)
            target = args.end_matrices + (kept.get() * spec.value_heads + head) * (4 * spec.key_dim * spec.value_dim)
            self.state(head).advance(e, self.scaled, (self.tile, self.vectors), (kept.get() >= 0, target))
            self._advance_inputs(self.value_channel(head), spec.value_dim, kept.get(), before)
        for channel, count in self.parts():
            self._advance_inputs(channel, count, kept.get(), before)

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
