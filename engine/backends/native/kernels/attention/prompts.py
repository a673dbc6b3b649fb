"""Attention of many rows of one sequence over float32 keys and values, with online softmax."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.attention.unit import KEYS, Prompt, Scratch, Unit
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Float32, Int64, Pointer, read
from polarlm.engine.jit.lang.values import Value


class Segment(NamedTuple):
    """Consecutive keys and values k, v (K, ≥ tokens, D) float32 of at least one token.

    head_stride: bytes from head to head. start: position of the first token.
    """

    k: Pointer
    v: Pointer
    head_stride: Int64
    start: Int64
    tokens: Int64


class PromptArguments(NamedTuple):
    """Arguments of `attend`."""

    q: Pointer
    out: Pointer
    segments: Pointer
    row_max: Pointer
    row_sum: Pointer
    sink_scores: Pointer
    scale_back: Pointer
    before: Pointer
    rotation: Pointer
    rows: Int64
    group: Int64
    kv_heads: Int64
    tile: Int64
    position: Int64
    count: Int64
    window: Int64
    is_first: Int64
    is_last: Int64
    scale: Float32
    softcap: Float32


@cache
def attend(spec: Prompt) -> Kernel[PromptArguments]:
    """Attention of q (T, H, D) over segments of keys and values → out (T, H, D); one unit per KV head and `tile` rows.

    Row t has position p = `position` + t and sees positions p − window + 1, …, p. group: H / K. tile · group is at most
    MOST_QUERIES. scale: multiplies the scores. softcap: c, by which scores s become c · tanh(s / c), if the kernel is
    specialized for one. sink_scores (H,): scores whose values are 0, if it is for these. segments (count,): a `Segment`
    each. The segments of a sequence may be split among several launches: is_first, is_last. Between them row_max and
    row_sum (T, H) hold the maxima and the sums of weights, and out the weighted sums. The last launch multiplies
    results by scale_back (H,) and rotates them: before (D,) and rotation are a `Rotation`'s.
    """
    layout, row_bytes = Scratch(spec.dim), 4 * spec.dim

    def emit(e: Emitter, args: PromptArguments, begin: Value, end: Value, scratch: Value) -> None:
        group, kv_heads, out = args.group, args.kv_heads, args.out
        unit_state = Unit(e, spec, layout, scratch, args.softcap if spec.is_capped else None)
        with e.loop(begin, end) as unit:
            head, first_row = unit % kv_heads, unit // kv_heads * args.tile
            own_rows = e.imin(args.rows - first_row, args.tile)
            queries = own_rows * group
            first_position = args.position + first_row
            last_position = first_position + own_rows - 1
            with e.loop(0, own_rows) as row, e.loop(0, group) as member:
                number = ((first_row + row) * kv_heads + head) * group + member
                sink = args.sink_scores + (head * group + member) * 4 if spec.has_sink_scores else None
                own_q = args.q + number * row_bytes
                unit_state.open(row * group + member, first_position + row, own_q, args.scale, sink)
                with e.when(args.is_first < 1):
                    unit_state.resume(
                        row * group + member, out + number * row_bytes, args.row_max, args.row_sum, number
                    )
            unit_state.fill_up(queries, last_position)
            with e.loop(0, args.count) as index:
                k, v, head_stride, start, tokens = read(e, Segment, args.segments, index)
                from_key = e.imax(first_position - args.window + 1 - start, 0) // KEYS * KEYS
                to_key = e.imin(tokens, last_position + 1 - start)
                with e.loop(from_key, to_key, KEYS) as first:
                    at = head * head_stride + first * row_bytes
                    left = e.imin(tokens - first, KEYS)
                    unit_state.attend(k + at, v + at, start + first, left, queries, args.window)
            with e.loop(0, own_rows) as row, e.loop(0, group) as member:
                number = ((first_row + row) * kv_heads + head) * group + member
                target = out + number * row_bytes
                with e.when(args.is_last < 1):
                    unit_state.suspend(row * group + member, target, args.row_max, args.row_sum, number)
                with e.when(args.is_last > 0):
                    own_scale = args.scale_back + (head * group + member) * 4
                    unit_state.finish(row * group + member, target, (own_scale, args.before, args.rotation))

    return Kernel(spec.name, emit, PromptArguments, scratch=layout.end)
