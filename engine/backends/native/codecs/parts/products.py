"""Byte products: prepared queries times the codes of keys, and the quantization of attention weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from polarlm.engine.backends.native.codecs import MOST_QUERIES
from polarlm.engine.backends.native.codecs.f16 import sum_tile
from polarlm.engine.backends.native.codecs.parts.code_table import CodeTable
from polarlm.engine.backends.native.codecs.parts.packing import Packing
from polarlm.engine.jit.lang import F32, I8, I32, Emitter, Value, Values, Variable, largest, round_to, scaled_to, vector

_F16, _I16 = vector(F32, 16), vector(I32, 16)

PAIR_LANES = [8 * half + 2 * i + k for half in (0, 1) for k in (0, 1) for i in range(4)]
"""The channels of 8 pairs in the order of a prepared query."""
_FOURS = [16 * part + 4 * b + k for part in range(4) for k in range(4) for b in range(4)]
"""4 bytes of 4 tokens in turn, as 4 tokens of 4 codes."""

Writer = Callable[[Value, int, int, Value], None]
"""write(first, number, group, value): what is done with the bytes, plus `_bias`, of 4 channels of 16 tokens of a tile:
number (first + number) of the fours of channels in the order of a prepared query, and of the tokens."""


def read_codes(e: Emitter, packing: Packing, address: Value, count: int) -> Iterator[list[Value]]:
    """Yields the codes of `count` vectors, from the beginning of a run. A run takes registers only when needed."""
    dirty = e.level.wide_tables  # their lookups ignore unused high bits
    for first in range(0, count, packing.run):
        start, run = address + packing.nbytes(first) if first else address, min(packing.run, count - first)
        if e.level.keeps_order and run > 2:
            # Each code is unpacked alone: what LLVM does not need of the others it leaves out.
            yield from (packing.emit(e, e.black_box(start), run, dirty=dirty)[number] for number in range(run))
        else:
            yield from packing.emit(e, start, run, dirty=dirty)


def store_query(e: Emitter, parts: Values, table: CodeTable, out: Value) -> None:
    """A query, 16 channels per vector, in the order of its prepared form → the prepared form (see `TableKeys`)."""
    integers, top = round_to(e, parts, 127.0)
    total = e.zero(_I16)
    for number, part in enumerate(integers):
        total = total + part
        e.store(part.trunc(I8), out, 16 * number)
    e.store(top * (table.scale / 127), out, 16 * len(parts))
    e.store(e.sum_lanes(total) * -_bias(e), out, 16 * len(parts) + 4)


def _bias(e: Emitter) -> int:
    """What makes a table's bytes unsigned, where products of signed bytes would take longer."""
    return 0 if e.level.signed_dots else 128


def emit_products(
    e: Emitter,
    table: CodeTable,
    block: Value,
    next_tile: Value,
    tokens: int,
    head_dim: int,
    prepared: Sequence[Values],
    write: Writer | None = None,
) -> Iterator[list[Value]]:
    """Yields the dot products of 16 of a tile's keys after the other with prepared queries: for each query int32 (16,).

    next_tile: a tile whose codes are prefetched. prepared: the tokens are cut into len(prepared) equal spans; the
    prepared queries of each. write: is given the tile's bytes.
    """
    groups, width, packing = tokens // 16, table.width, Packing(table.bits)
    vectors, factor_at = tokens * head_dim // width // 64, -(-head_dim // 16) * 16
    lookup, multiply = table.emit(e, _bias(e)), e.level.dot4_signed if e.level.signed_dots else e.level.dot4
    each = groups // len(prepared)
    totals: dict[int, list[Variable]] = {}  # of each group of 16 tokens

    def add(first: Value, address: Value, part_queries: Sequence[Values], count: int, own_groups: range) -> None:
        """Add the products of `count` code vectors at `address` with the queries at `part_queries`, of the chosen
        groups. first: the number of their first four channels."""
        for number, code in enumerate(read_codes(e, packing, address, count)):
            quad, group = divmod(number, groups)
            if group not in own_groups:
                continue
            e.keep_order()
            for channel, value in enumerate(lookup(code, range(width))):
                if write is not None:
                    write(first, quad * width + channel, group, value)
                for query, total in zip(part_queries[group // each], totals[group], strict=True):
                    e.keep_order()
                    factor = e.broadcast(query, I32, 16, 4 * (quad * width + channel))
                    total.set(multiply(e, total.get(), value.bits(_I16), factor))

    code_tile, queries = math.lcm(packing.run, groups), len(prepared[0])
    # Where few registers hold sums, those of some groups are finished before the next ones'.
    is_cut = queries > (0 if e.level.keeps_order else MOST_QUERIES)
    group_tile = sum_tile(e, queries, groups) if is_cut else groups
    for first_group in range(0, groups, group_tile):
        own_groups = range(first_group, first_group + group_tile)
        for group in own_groups:
            starts = [e.broadcast(query, I32, 16, factor_at + 4) for query in prepared[group // each]]
            totals[group] = [e.variable(start) for start in starts]
        if vectors % code_tile:
            if not first_group:
                e.prefetch(next_tile, packing.nbytes(vectors))
            add(e.i64(0), block, prepared, vectors, own_groups)
        else:
            nbytes = packing.nbytes(code_tile)
            with e.loop(0, vectors // code_tile) as part:
                first = part * (code_tile // groups * width)
                part_queries = [[query + first * 4 for query in queries] for queries in prepared]
                if not first_group:
                    e.prefetch(next_tile + part * nbytes, nbytes)
                add(first, block + part * nbytes, part_queries, code_tile, own_groups)
        for group in own_groups:
            yield [total.get() for total in totals[group]]


def write_values(e: Emitter, values: Value, tokens: int) -> Writer:
    """What writes a tile's bytes as values, in the order of `ByteOrder`."""
    groups = tokens // 16

    def write(first: Value, number: int, group: int, value: Value) -> None:
        signed = value ^ -128 if _bias(e) else value
        e.store(e.shuffle(signed, signed, _FOURS), values + first * (64 * groups), 64 * (number * groups + group))

    return write


def quantize_weights(e: Emitter, weights: Values, factors: Values) -> list[Value]:
    """Replace rows of float32 weights by bytes of weight · factor (factors ≥ 0, 16 per vector) → each row's step.

    Tokens 2i and 2i + 1 have at most 256 together, so that the sum of their products with signed bytes fits an int16.
    """
    rows = [[e.load(row, _F16, 64 * i) * factor for i, factor in enumerate(factors)] for row in weights]
    neighbours = [lane ^ 1 for lane in range(16)]
    tops = [largest(e, [part + e.shuffle(part, part, neighbours) for part in row]) for row in rows]
    for target, row, top in zip(weights, rows, tops, strict=True):
        for number, part in enumerate(scaled_to(e, row, top, 255.0)):
            e.store(part.trunc(I8), target, 16 * number)
    return [top * (1 / 255) for top in tops]
