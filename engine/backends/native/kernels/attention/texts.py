"""Attention of the rows of several texts, each to all rows of its own text, over float32 keys and values."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.attention.unit import KEYS, Prompt, Scratch, Unit
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Float32, Int64, Pointer, read
from polarlm.engine.jit.lang.values import Value

_SIZES = 32, 64, KEYS  # keys of a tile that code is specialized for: most texts are short


class TextRows(NamedTuple):
    """Rows of a text that attend together: the first one, and how many. first, length: of all rows of the text."""

    row: Int64
    rows: Int64
    first: Int64
    length: Int64


class TextArguments(NamedTuple):
    """Arguments of `attend_to_texts`."""

    q: Pointer
    k: Pointer
    v: Pointer
    out: Pointer
    texts: Pointer
    q_stride: Int64
    row_stride: Int64
    head_stride: Int64
    group: Int64
    kv_heads: Int64
    reach: Int64
    scale: Float32


@cache
def attend_to_texts(dim: int) -> Kernel[TextArguments]:
    """Attention of q (T, H, D) to k, v (K, T, D) of the same text → out (T, H, D); one unit per KV head and entry of
    texts, each a `TextRows`, whose rows times `group` are at most MOST_QUERIES.

    A row sees those that are at most `reach` away. group: H / K. q_stride: bytes from row to row of q, whose heads lie
    together. row_stride, head_stride: bytes from row to row and from head to head of k and v. scale: multiplies the
    scores.
    """
    layout, row_bytes = Scratch(dim), 4 * dim

    def emit(e: Emitter, args: TextArguments, begin: Value, end: Value, scratch: Value) -> None:
        group, kv_heads, reach = args.group, args.kv_heads, args.reach
        state = Unit(e, Prompt(dim), layout, scratch, None, args.row_stride)
        # Rows have positions `reach` after the keys that they see, so that the last key seen is their own.
        window = reach * 2 + 1
        with e.loop(begin, end) as unit:
            head, own = unit % kv_heads, read(e, TextRows, args.texts, unit // kv_heads)
            queries, first_position = own.rows * group, own.row - own.first + reach

            with e.loop(0, own.rows) as row, e.loop(0, group) as member:
                query = args.q + (own.row + row) * args.q_stride + (head * group + member) * row_bytes
                state.open(row * group + member, first_position + row, query, args.scale)
            state.fill_up(queries, first_position + own.rows - 1)
            from_key = e.imax(first_position - window + 1, 0) // KEYS * KEYS
            to_key = e.imin(own.length, first_position + own.rows)
            with e.loop(from_key, to_key, KEYS) as key:
                at = head * args.head_stride + (own.first + key) * args.row_stride
                left = e.imin(own.length - key, KEYS)
                for below, most in zip((0, *_SIZES), _SIZES, strict=False):
                    with e.when((left > below) & (left <= most)):
                        state.attend(args.k + at, args.v + at, key, left, queries, window, most)
            with e.loop(0, own.rows) as row, e.loop(0, group) as member:
                number = ((own.row + row) * kv_heads + head) * group + member
                state.finish(row * group + member, args.out + number * row_bytes)

    return Kernel(f"text_attention_{dim}", emit, TextArguments, scratch=layout.end)
