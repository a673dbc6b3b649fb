"""Attention of many rows of one sequence by products of numbers of 16 bits (`matrices`)."""

from __future__ import annotations

from functools import cache

from polarlm.engine.backends.native.kernels.attention.bfloat_matrices import BFLOAT, BfloatUnit
from polarlm.engine.backends.native.kernels.attention.matrices import KEYS, MatrixFormat
from polarlm.engine.backends.native.kernels.attention.matrix_unit import PAIR, MatrixSegment, MatrixUnit
from polarlm.engine.backends.native.kernels.attention.prompts import PromptArguments, UnitRows, for_each_unit
from polarlm.engine.backends.native.kernels.attention.unit import PromptSpec
from polarlm.engine.backends.native.kernels.attention.word_matrices import WORDS, WordUnit
from polarlm.engine.jit.lang import Emitter, Kernel, Value
from polarlm.engine.jit.lang.records import read

_CACHED = 1024  # keys that all queries of a unit attend to before the next ones: they stay in the cache of level 2
_UNITS: dict[MatrixFormat, type[MatrixUnit]] = {BFLOAT: BfloatUnit, WORDS: WordUnit}


@cache
def most_queries(format: MatrixFormat, dim: int) -> int:
    """The most queries of a unit with heads of `dim` channels; 0 if there is no kernel for them."""
    return _UNITS[format].most_queries(dim)


@cache
def attend_by_matrices(format: MatrixFormat, spec: PromptSpec) -> Kernel[PromptArguments]:
    """As `attend`, with at most `most_queries` queries of a unit, and a `MatrixSegment` of the format for each segment.
    What row_max holds are numbers that scores, as the format has them, exceed by up to 8. row_sum is (T, H, 16): parts
    of each sum."""
    unit = _UNITS[format]

    def emit(e: Emitter, args: PromptArguments, begin: Value, end: Value, scratch: Value) -> None:
        state = unit(e, spec, scratch, args)

        def attend_to_segments(rows: UnitRows) -> None:
            with e.loop(0, args.count) as index:
                segment = read(e, MatrixSegment, args.segments, index)
                keys = segment.keys + rows.head * segment.key_stride
                values = segment.values + rows.head * segment.value_stride
                oldest, visible = _visible_keys(e, rows.position, rows.last, segment, args)
                with e.loop(oldest, visible, _CACHED) as cached, e.loop(0, rows.queries, PAIR) as first:
                    oldest, visible = _visible_keys(e, *state.positions(first), segment, args)
                    oldest, visible = e.imax(oldest, cached), e.imin(visible, cached + _CACHED)
                    with e.when(oldest < visible):
                        state.attend(first, (keys, values), segment, oldest // KEYS, (visible + (KEYS - 1)) // KEYS)

        with state.registers():
            for_each_unit(e, spec, args, state, (begin, end), attend_to_segments)

    scratch = unit.arrays(spec.dim, unit.most_queries(spec.dim))[-1]
    return Kernel(f"{spec.name}_by_{format.name}", emit, PromptArguments, scratch=scratch)


def _visible_keys(
    e: Emitter, position: Value, last: Value, segment: MatrixSegment, args: PromptArguments
) -> tuple[Value, Value]:
    """The first tile's first key that rows from `position` to `last` see, and the end of those that they see."""
    oldest = e.imax(position - args.window + 1 - segment.start, 0) // KEYS * KEYS
    return oldest, e.imin(segment.tokens, e.imax(last, args.sees) + 1 - segment.start)
