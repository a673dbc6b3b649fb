"""Mamba 2: rows are added to slots, block by block; see `engine.backends.numpy.mamba2`.

Four kernels follow each other: convolutions, of channels; keys, and their products with queries, of groups; results, of
heads (`mamba2_rows.py`); and norms, of rows. Every sum of a row has its terms in the order of the tokens, as in
`gated_delta`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.multiply import Left, pieces, product
from polarlm.engine.backends.native.kernels.recurrent.gates import silu
from polarlm.engine.backends.native.kernels.recurrent.mamba2_unit import Mamba2, Mamba2Arguments
from polarlm.engine.backends.native.kernels.recurrent.spans import by_blocks, kept_row, span_of
from polarlm.engine.backends.native.kernels.rows import inverse_rms, over_columns
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Float32, Int64, Pointer
from polarlm.engine.jit.lang.values import F32, Type, Value, vector

PART = 64  # channels of a unit of `convolve`


@cache
def convolve(spec: Mamba2) -> Kernel[Mamba2Arguments]:
    """silu of the convolution of x, B and C; one unit per span and `PART` channels."""
    row_bytes, before = 4 * spec.channels, spec.width - 1
    parts = -(-spec.channels // PART)

    def emit(e: Emitter, args: Mamba2Arguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            span, channel = span_of(e, args.spans, unit // parts), unit % parts * PART
            inputs = args.inputs + span.slot * (row_bytes * (before + spec.block)) + channel * 4
            columns = e.imin(-channel + spec.channels, PART)

            def add(row: Value, count: Value, place: Value, number: Value) -> None:
                with e.loop(0, count) as i:
                    own = inputs + (place + i) * row_bytes
                    given = args.projected + ((row + i) * spec.columns + channel + spec.inner) * 4
                    target = args.convolved + ((row + i) * spec.channels + channel) * 4

                    def compute(offset: Value, kind: Type) -> None:
                        newest = e.load(given + offset, kind)
                        e.store(newest, own + offset, before * row_bytes)
                        total = e.load(args.bias + channel * 4 + offset, kind) if spec.has_bias else e.zero(kind)
                        weights = args.conv + channel * 4 + offset
                        for back in range(before):
                            x = e.load(own + offset, kind, back * row_bytes)
                            total = e.fma(x, e.load(weights, kind, back * row_bytes), total)
                        total = e.fma(newest, e.load(weights, kind, before * row_bytes), total)
                        e.store(silu(e, total), target + offset)

                    over_columns(e, columns, compute)
                if spec.is_prompt:
                    with e.when(place + count >= spec.block):
                        end_block(kept_row(e, args.kept, args.blocks, number))

            def end_block(kept: Value) -> None:
                target = args.end_inputs + kept * (before * row_bytes) + channel * 4

                def repeat(offset: Value, kind: Type) -> None:
                    for row in range(before):
                        x = e.load(inputs + offset, kind, (spec.block + row) * row_bytes)
                        e.store(x, inputs + offset, row * row_bytes)
                        with e.when(kept >= 0):
                            e.store(x, target + offset, row * row_bytes)

                over_columns(e, columns, repeat)

            by_blocks(e, spec.block, span, add)

    return Kernel(spec.name("convolve"), emit, Mamba2Arguments)


@cache
def multiply_keys(spec: Mamba2) -> Kernel[Mamba2Arguments]:
    """Keys are added to their blocks, and multiplied with queries; one unit per span and group."""
    key_bytes = 4 * spec.size * spec.block  # of a group in a block

    def emit(e: Emitter, args: Mamba2Arguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            span, group = span_of(e, args.spans, unit // spec.groups), unit % spec.groups
            of_slot = args.keys + (span.slot * spec.groups + group) * key_bytes

            def copy(target: Value, source: Value) -> None:
                with e.loop(0, spec.size) as channel:
                    for first, lanes in pieces(spec.block):
                        at = channel * (4 * spec.block)
                        e.store(e.load(source + at, vector(F32, lanes), 4 * first), target + at, 4 * first)

            def add(row: Value, count: Value, place: Value, number: Value) -> None:
                keys = of_slot
                if spec.is_prompt:
                    keys = args.block_keys + (number * spec.groups + group) * key_bytes
                    with e.when(place > 0):
                        copy(keys, of_slot)
                key = args.convolved + (row * spec.channels + group * spec.size + spec.inner) * 4
                with e.loop(0, count) as i, e.loop(0, spec.size) as channel:
                    x = e.load(key + (i * spec.channels + channel) * 4, F32)
                    e.store(x, keys + (channel * spec.block + place + i) * 4)
                scores = args.scores + (row * spec.groups + group) * (4 * spec.block)
                product(
                    e,
                    Left(key + 4 * spec.groups * spec.size, 4 * spec.channels, count, e.i64(spec.size)),
                    (keys, spec.block),
                    lambda i, first, lanes: e.zero(vector(F32, lanes)),
                    lambda i, first, value: e.store(value, scores + i * (4 * spec.groups * spec.block), 4 * first),
                    spec.tile(e),
                    seen=place + count,
                )
                if spec.is_prompt:
                    with e.when(place + count < spec.block):
                        copy(of_slot, keys)

            by_blocks(e, spec.block, span, add)

    return Kernel(spec.name("multiply_keys"), emit, Mamba2Arguments)


class PartArguments(NamedTuple):
    """Arguments of `norm_parts`."""

    x: Pointer
    weight: Pointer
    parts: Int64
    columns: Int64  # of a part
    eps: Float32


@cache
def norm_parts() -> Kernel[PartArguments]:
    """x / rms(x) * weight of each part of a row, in place; one unit per row."""

    def emit(e: Emitter, args: PartArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as row, e.loop(0, args.parts) as part:
            at = part * args.columns * 4
            x = args.x + row * args.parts * args.columns * 4 + at
            factor = inverse_rms(e, x, args.columns, args.eps)

            def write(offset: Value, kind: Type) -> None:
                normed = e.load(x + offset, kind) * factor
                e.store(normed * e.load(args.weight + (at + offset), kind), x + offset)

            over_columns(e, args.columns, write)

    return Kernel("norm_parts", emit, PartArguments)
