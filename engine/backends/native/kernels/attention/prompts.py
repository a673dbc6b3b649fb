"""Attention over float32 keys and values, with online softmax: of many rows of one sequence, and of the rows of several
texts, each to all rows of its own text; and decoding of quantized blocks, for prompts that read earlier turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from polarlm.engine.backends.native.codecs import KeyTiles, ValueTiles
from polarlm.engine.backends.native.kernels.attention.matrices import KEYS as MATRIX_KEYS
from polarlm.engine.backends.native.kernels.attention.matrices import MatrixFormat
from polarlm.engine.backends.native.kernels.attention.unit import KEYS, PromptSpec, Unit, arrays
from polarlm.engine.backends.native.kernels.multiply import pieces
from polarlm.engine.jit.lang import F32, I8, I16, I32, I64, Emitter, Kernel, Value, vector
from polarlm.engine.jit.lang.records import Float32, Int64, Pointer, read

_TEXT_SIZES = 32, 64, KEYS  # keys of a tile that code is specialized for: most texts are short


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
    q: Pointer
    out: Pointer
    segments: Pointer
    row_max: Pointer
    row_sum: Pointer
    sink_scores: Pointer
    scale_back: Pointer
    input_signs: Pointer
    rotation: Pointer
    rows: Int64
    group: Int64
    kv_heads: Int64
    tile: Int64
    position: Int64
    sees: Int64
    count: Int64
    window: Int64
    is_first: Int64
    is_last: Int64
    scale: Float32
    softcap: Float32


@cache
def attend(spec: PromptSpec) -> Kernel[PromptArguments]:
    """Attention of q (T, H, D) over segments of keys and values → out (T, H, D); one unit per KV head and `tile` rows.

    Row t has position p = `position` + t and sees positions p − window + 1, …, p, or up to `sees` if that is later.
    group: H / K. tile · group is at most MOST_QUERIES. scale: multiplies the scores. softcap: c, by which scores s
    become c · tanh(s / c), if the kernel is specialized for one. sink_scores (H,): scores whose values are 0, if it is
    for these. segments (count,): a `Segment` each. The segments of a sequence may be split among several launches:
    is_first, is_last. Between them row_max and row_sum (T, H) hold the maxima and the sums of weights, and out the
    weighted sums. The last launch multiplies results by scale_back (H,) and rotates them: before (D,) and rotation are
    a `Rotation`'s.
    """
    row_bytes = 4 * spec.dim

    def emit(e: Emitter, args: PromptArguments, begin: Value, end: Value, scratch: Value) -> None:
        state = Unit(e, spec, scratch, args.softcap if spec.is_capped else None)

        def attend_to_segments(rows: UnitRows) -> None:
            with e.loop(0, args.count) as index:
                k, v, head_stride, start, tokens = read(e, Segment, args.segments, index)
                from_key = e.imax(rows.position - args.window + 1 - start, 0) // KEYS * KEYS
                with e.loop(from_key, e.imin(tokens, e.imax(rows.last, args.sees) + 1 - start), KEYS) as first:
                    offset = rows.head * head_stride + first * row_bytes
                    left = e.imin(tokens - first, KEYS)
                    state.attend(k + offset, v + offset, start + first, left, rows.queries, args.window, sees=args.sees)

        for_each_unit(e, spec, args, state, (begin, end), attend_to_segments)

    return Kernel(spec.name, emit, PromptArguments, scratch=arrays(spec.dim)[-1])


class UnitRows(NamedTuple):
    """The KV head of a unit, how many queries it has, and the positions of the first and the last of its rows."""

    head: Value
    queries: Value
    position: Value
    last: Value


def for_each_unit(
    e: Emitter,
    spec: PromptSpec,
    args: PromptArguments,
    state: Any,
    units: tuple[Value, Value],
    attend_to_segments: Callable[[UnitRows], None],
) -> None:
    """Emit the work of units: open their queries or resume them, attend, and finish or suspend them. state: what a unit
    keeps of its queries, a `Unit` or a `MatrixUnit`."""
    group, kv_heads, out, row_bytes = args.group, args.kv_heads, args.out, 4 * spec.dim
    last_tile = (args.rows - 1) // args.tile
    with e.loop(*units) as unit:
        # The last rows see most: first, so that no thread is left alone with a long unit.
        head, first_row = unit % kv_heads, (last_tile - unit // kv_heads) * args.tile
        own_rows = e.imin(args.rows - first_row, args.tile)
        first_position = args.position + first_row
        rows = UnitRows(head, own_rows * group, first_position, first_position + own_rows - 1)
        with e.loop(0, own_rows) as row, e.loop(0, group) as member:
            number = ((first_row + row) * kv_heads + head) * group + member
            sink = args.sink_scores + (head * group + member) * 4 if spec.has_sink_scores else None
            own_q = args.q + number * row_bytes
            state.open(row * group + member, first_position + row, own_q, args.scale, sink)
            with e.when(args.is_first < 1):
                state.resume(row * group + member, out + number * row_bytes, args.row_max, args.row_sum, number)
        state.pad_queries(rows.queries, rows.last)
        attend_to_segments(rows)
        with e.loop(0, own_rows) as row, e.loop(0, group) as member:
            number = ((first_row + row) * kv_heads + head) * group + member
            target = out + number * row_bytes
            with e.when(args.is_last < 1):
                state.suspend(row * group + member, target, args.row_max, args.row_sum, number)
            with e.when(args.is_last > 0):
                own_scale = args.scale_back + (head * group + member) * 4
                state.finish(row * group + member, target, (own_scale, args.input_signs, args.rotation))


class TextRows(NamedTuple):
    """Rows of a text that attend together: the first one, and how many. first, length: of all rows of the text."""

    row: Int64
    rows: Int64
    first: Int64
    length: Int64


class TextArguments(NamedTuple):
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
    together. row_stride, head_stride: of k and v, bytes from row to row and from head to head. scale: of scores.
    """
    row_bytes = 4 * dim

    def emit(e: Emitter, args: TextArguments, begin: Value, end: Value, scratch: Value) -> None:
        group, kv_heads, reach = args.group, args.kv_heads, args.reach
        state = Unit(e, PromptSpec(dim), scratch, stride=args.row_stride)
        # Rows have positions `reach` after the keys that they see, so that the last key seen is their own.
        window = reach * 2 + 1
        with e.loop(begin, end) as unit:
            head, text = unit % kv_heads, read(e, TextRows, args.texts, unit // kv_heads)
            queries, first_position = text.rows * group, text.row - text.first + reach

            with e.loop(0, text.rows) as row, e.loop(0, group) as member:
                query = args.q + (text.row + row) * args.q_stride + (head * group + member) * row_bytes
                state.open(row * group + member, first_position + row, query, args.scale)
            state.pad_queries(queries, first_position + text.rows - 1)
            from_key = e.imax(first_position - window + 1, 0) // KEYS * KEYS
            with e.loop(from_key, e.imin(text.length, first_position + text.rows), KEYS) as key:
                offset = head * args.head_stride + (text.first + key) * args.row_stride
                left = e.imin(text.length - key, KEYS)
                for least, most in zip((0, *_TEXT_SIZES), _TEXT_SIZES, strict=False):
                    with e.when((left > least) & (left <= most)):
                        state.attend(args.k + offset, args.v + offset, key, left, queries, window, most)
            with e.loop(0, text.rows) as row, e.loop(0, group) as member:
                number = ((text.row + row) * kv_heads + head) * group + member
                state.finish(row * group + member, args.out + number * row_bytes)

    return Kernel(f"text_attention_{dim}", emit, TextArguments, scratch=arrays(dim)[-1])


@dataclass(frozen=True)
class DecodingSpec:
    """The properties that a kernel is specialized for. values: None if values are keys. mean_bits: bits of the block
    means of keys, 0 for none."""

    keys: KeyTiles
    values: ValueTiles | None
    mean_bits: int
    block_size: int
    head_dim: int

    @property
    def name(self) -> str:
        sizes = f"{self.block_size}x{self.head_dim}"
        return f"decode_{self.tile_names}_mean{self.mean_bits}_{sizes}"

    @property
    def tile_names(self) -> str:
        return self.keys.name if self.values is None else f"{self.keys.name}_{self.values.name}"


class DecodeArguments(NamedTuple):
    keys: Pointer
    values: Pointer
    mean: Pointer
    mean_scale: Pointer
    ids: Pointer
    k: Pointer
    v: Pointer
    blocks: Int64
    count: Int64


@cache
def decode(spec: DecodingSpec, matrices: MatrixFormat | None = None) -> Kernel[DecodeArguments]:
    """Blocks `ids` (count,) int64 → k, v (K, count, N, D) float32, keys with block means; one unit per KV head, block.
    If values are keys, nothing is written to v.

    matrices: the format of the matrices of each head that k, v are then. N is a multiple of their tokens.

    keys, values: tiles (K, blocks). mean, mean_scale (K, blocks, …): the block means.
    """
    n, dim = spec.block_size, spec.head_dim
    nbytes = 4 * n * dim

    def emit(e: Emitter, args: DecodeArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            head, block = unit // args.count, e.load(args.ids + unit % args.count * 8, I64)
            if matrices is not None:
                key, value = scratch + nbytes, scratch + 2 * nbytes
            else:
                key, value = args.k + unit * nbytes, args.v + unit * nbytes
            place = head * args.blocks + block
            spec.keys.emit_decode(e, args.keys + place * spec.keys.nbytes, key, scratch)
            if spec.mean_bits:
                emit_mean(e, spec, args, head, block, scratch)
                with e.loop(0, n) as token:
                    for first, lanes in pieces(dim):
                        x, row = e.load(scratch, vector(F32, lanes), 4 * first), key + token * (4 * dim)
                        e.store(e.load(row, x.type, 4 * first) + x, row, 4 * first)
            if spec.values is None:
                value = key
            else:
                spec.values.emit_decode(e, args.values + place * spec.values.nbytes, value, scratch)
            if matrices is not None:
                for number in range(n // MATRIX_KEYS):
                    tile = unit * (n // MATRIX_KEYS) + number
                    targets = args.k + tile * matrices.key_bytes(dim), args.v + tile * matrices.value_bytes(dim)
                    offset = 4 * dim * MATRIX_KEYS * number
                    matrices.write_tile(e, dim, (key + offset, value + offset), targets)

    name = spec.name if matrices is None else f"{spec.name}_{matrices.name}"
    return Kernel(name, emit, DecodeArguments, scratch=nbytes * (1 if matrices is None else 3))


def emit_mean(e: Emitter, spec: DecodingSpec, args: Any, head: Value, block: Value, out: Value) -> None:
    """The mean of a block of a KV head → out (D,) float32. args: of `decode`, or others of that name."""
    number = head * args.blocks + block
    mean = args.mean + number * (spec.head_dim * spec.mean_bits // 8)
    factor = e.half_to_float(e.load(args.mean_scale + number * 2, I16)) if spec.mean_bits == 8 else None
    for first, lanes in pieces(spec.head_dim):
        if factor is not None:
            value = e.load(mean, vector(I8, lanes), first).sext(I32).to_float() * factor
        else:
            value = e.half_to_float(e.load(mean, vector(I16, lanes), 2 * first))
        e.store(value, out, 4 * first)
