"""Rows of activations in the layout that products read.

A panel has the R rows that a product multiplies at once, so that a kernel reads everything at constant offsets from one
address. For weights that are multiplied as float32 it is float32 (inputs, R). For codes and words it has, for each
group of 32 inputs, the quantized inputs of all rows, int16 or int8 (R, 32), and then four numbers of each row: the
scale, float32, and the sums of the 32 integers, of the first and of the last 16, all negative, int32. Where the level
`halves_products`, three more follow int16: the sums of x0 x2 + x1 x3 of each four, negative, of all, of the first and
of the last 16.

The fours of bytes are in the order of `tiles.QUAD`. Codes that are bytes in memory are signed: x86 multiplies them by
unsigned inputs, int8 plus 128 (`tiling.are_unsigned`). Where panels of R rows are split (`splits`), the int16 of each
eight inputs are their high bytes and then their low bytes (see `Level.split_add`). Where int8 are paired
(`are_paired`), each eight inputs of a row and of the next one lie together in the same way.

Panels for matrices of a level (`Level.matrices`) have 16 rows, and for each 32 inputs a left matrix, bfloat16 (16, 32),
with zeros where a row has no more inputs.

Inputs are quantized to int16 unless the user asks for int8 (`EngineConfig.input_bits`): the error, 2⁻¹⁶ of a group's
largest input, is far below that of the weights. Bytes take half of the products, which steps that wait for the
weights do not feel. With int8 all products with codes have these inputs, so that a row's results do not depend on how
many are multiplied together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.rows import for_each_column, inverse_rms
from polarlm.engine.backends.native.tiles import QUAD, ROWS
from polarlm.engine.jit.lang import F32, I8, I16, I32, I64, Emitter, Kernel, Type, Value, Values, round_to, vector
from polarlm.engine.jit.lang.level import LARGEST_SPLIT, Level
from polarlm.engine.jit.lang.records import Float32, Int64, Pointer
from polarlm.engine.weight_formats import WeightFormat

GROUP = 32  # inputs that share a scale
MATRIX = 2 * GROUP * ROWS  # bytes of the matrix of a group
PAIR_PRODUCTS = 16  # offset in the numbers of a row of the sums of products of pairs


class Inputs(Enum):
    """How a product reads its inputs. The values of integers are their largest magnitudes: a weight can be added to an
    int16, as `Level.halves_products` does, and no sum of 32 products with weights of that kind overflows an int32."""

    CODES = LARGEST_SPLIT  # as int16, for codes of weights
    BYTES = 127  # as int8, for codes of weights
    WORDS = 16380  # as int16, for numbers of 16 bits that become words (`expanded_weights.ExpandedNumbers`)
    MATRICES = 1  # as bfloat16, for weights that become matrices of the level
    FLOATS = 0  # as float32

    @property
    def are_integers(self) -> bool:
        return self not in (Inputs.FLOATS, Inputs.MATRICES)

    @property
    def size(self) -> int:
        """Bytes of an integer."""
        return 1 if self is Inputs.BYTES else 2

    @property
    def suffix(self) -> str:
        """Of the names of kernels."""
        return {Inputs.WORDS: "_words", Inputs.BYTES: "_bytes", Inputs.MATRICES: "_matrices"}.get(self, "")

    @staticmethod
    def shared(kinds: Iterable[Inputs]) -> Inputs:
        """The kind that decides how many rows products with several matrices multiply at once."""
        return min(kinds, key=(Inputs.MATRICES, Inputs.FLOATS, Inputs.WORDS, Inputs.BYTES, Inputs.CODES).index)


def inputs_for(
    format: WeightFormat, columns: int, level: Level, *, waits: bool, bits: str = "16", are_few: bool = True
) -> Inputs:
    """How products with a matrix read their inputs. columns: of the matrix. waits: whether the products wait for the
    weights to come from memory, as a step's weights do: then words would only cost precision. bits: that inputs of
    products with codes should have, as in `EngineConfig.input_bits`. are_few: whether there are too few rows for
    matrices of the level."""
    if bits == "bf16" and not are_few and level.matrices is not None and format.name != "f32":
        return Inputs.MATRICES
    if format.unpack is not None:
        return Inputs.BYTES if bits == "8" and most_code(format) <= level.most_code else Inputs.CODES
    becomes_words = format.nbytes == 2 and columns % GROUP == 0 and level.multiplies_words and not waits
    return Inputs.WORDS if becomes_words else Inputs.FLOATS


def most_code(format: WeightFormat) -> int:
    """The largest code of a format as it is multiplied: as an unsigned byte, 255 where codes are signed."""
    is_unsigned = format.grid is None and format.runs is None and format.table is None and format.bits < 8
    return 2**format.bits - 1 if is_unsigned else 255


def splits(level: Level, row_tile: int, inputs: Inputs = Inputs.CODES) -> bool:
    """Whether the int16 of a panel are split into bytes: those that are multiplied by bytes."""
    return inputs is Inputs.CODES and (level.splits_words or row_tile <= level.split_rows)


def are_paired(level: Level, row_tile: int, inputs: Inputs) -> bool:
    """Whether the int8 of two rows are multiplied by bytes together."""
    return inputs is Inputs.BYTES and level.splits_words and row_tile % 2 == 0


def number_bytes(level: Level, inputs: Inputs) -> int:
    """Bytes of the numbers of a group of a row."""
    return 32 if level.halves_products and inputs is not Inputs.BYTES else 16


def row_bytes(level: Level, inputs: Inputs) -> int:
    """Bytes of a group of a row of integers."""
    return GROUP * inputs.size + number_bytes(level, inputs)


def numbers_at(panel: Value, row_tile: int, level: Level, inputs: Inputs) -> list[Value]:
    """The addresses of the numbers of all rows. panel: the address of a group."""
    start, each = GROUP * inputs.size * row_tile, number_bytes(level, inputs)
    return [panel + (start + each * row) for row in range(row_tile)]


def place_of_sum(groups: int, group: int) -> int:
    """The offset in a row's numbers of the sum of the inputs of a group. groups: that 32 inputs of weights have."""
    return 4 if groups == 1 else 8 + 4 * group


def panel_bytes(columns: int, row_tile: int, level: Level, inputs: Inputs = Inputs.CODES) -> int:
    """Bytes of a panel of `row_tile` rows; columns is a multiple of 32, but for float32 and matrices."""
    if inputs is Inputs.FLOATS:
        return 4 * columns * row_tile
    if inputs is Inputs.MATRICES:
        return -(-columns // GROUP) * MATRIX
    return columns // GROUP * row_bytes(level, inputs) * row_tile


class RowArguments(NamedTuple):
    x: Pointer
    weight: Pointer
    out: Pointer
    columns: Int64
    stride: Int64
    eps: Float32
    sources: Pointer = None


@cache
def quantize_rows(
    has_norm: bool, row_tile: int, *, inputs: Inputs = Inputs.CODES, is_unsigned: bool = False, picks: bool = False
) -> Kernel[RowArguments]:
    """Rows of x → panels of int16 or int8, one unit per row. A group's largest magnitude becomes that of `inputs`.

    has_norm: x / rms(x) * weight is quantized instead. columns: a multiple of 32. stride: bytes from row to row of x.
    is_unsigned: int8 become unsigned bytes, with the zero point 128. picks: a unit is a row of the panels, whose row of
    x is in sources (units,) int32; negative: it is not written.
    """

    def emit(e: Emitter, args: RowArguments, begin: Value, end: Value, scratch: Value) -> None:
        f16, groups = vector(F32, 16), args.columns // 32
        size = panel_bytes(GROUP, row_tile, e.level, inputs) // row_tile
        with _rows(e, args, begin, end, picks) as (row, source):
            panel, place = row // row_tile, row % row_tile
            start = args.out + panel * groups * (size * row_tile)
            if has_norm:
                factor = inverse_rms(e, source, args.columns, args.eps)
            with e.loop(0, groups) as group:
                halves = [e.load(source + group * 128, f16, 64 * half) for half in (0, 1)]
                if has_norm:
                    norms = [e.load(args.weight + group * 128, f16, 64 * half) for half in (0, 1)]
                    halves = [half * factor * norm for half, norm in zip(halves, norms, strict=True)]
                integers, top = round_to(e, halves, float(inputs.value))
                target, each = start + group * (size * row_tile), number_bytes(e.level, inputs)
                numbers = target + place * each + GROUP * inputs.size * row_tile
                if inputs is Inputs.BYTES:
                    is_paired = are_paired(e.level, row_tile, inputs)
                    sums = _write_bytes(e, target, place, integers, is_paired=is_paired, is_unsigned=is_unsigned)
                else:
                    for number, half in enumerate(integers):
                        packed_half = _split(e, half) if splits(e.level, row_tile, inputs) else half.trunc(I16)
                        e.store(packed_half, target + place * (2 * GROUP), 32 * number)
                    words = e.join([half.trunc(I16) for half in integers]).bits(vector(I32, 16))
                    sums = _negative_sums(e, words, with_pair_products=each > 16)
                e.store(top * (1 / inputs.value), numbers)
                e.store(sums, numbers, 4)

    kind = inputs.suffix + "_unsigned" * is_unsigned
    return Kernel(f"quantize{kind}{'_normed' * has_norm}{'_picked' * picks}_{row_tile}", emit, RowArguments)


def _negative_sums(e: Emitter, words: Value, *, with_pair_products: bool) -> Value:
    """The sums in a row's numbers, int32 (3,), or with sums of products (6,). words (16,) int32: its pairs of int16."""
    zero, ones = e.zero(words.type), e.constant(words.type, [0x10001] * 16)
    pairs, fours = e.level.dot2(e, zero, words, ones), zero
    if with_pair_products:  # in the even lanes; the odd ones hold the same again
        fours = e.level.dot2(e, zero, words, e.shuffle(words, words, [lane ^ 1 for lane in range(16)]))
    even, odd = range(0, 32, 2), range(1, 16, 2)
    sums = e.shuffle(pairs, fours, even) + e.shuffle(pairs, zero, [*odd, *range(16, 24)])
    return -_take_lanes(e, sums, [0, 16, 20, 8, 24, 28] if with_pair_products else [0, 16, 20])


def _take_lanes(e: Emitter, sums: Value, lanes: Sequence[int]) -> Value:
    """Lanes of the sums of each eight lanes, and of each four, whose numbers follow: of a row, and of its halves."""
    for step in (2, 1):
        sums = sums + e.shuffle(sums, sums, [lane ^ step for lane in range(sums.lanes)])
    return e.shuffle(sums + e.shuffle(sums, sums, [lane ^ 4 for lane in range(sums.lanes)]), sums, lanes)


def _write_bytes(
    e: Emitter, address: Value, row: Value, halves: Values, *, is_paired: bool, is_unsigned: bool
) -> Value:
    """Write 32 inputs of a row, int32, to the panel at an address. Returns the sums in its numbers, int32 (3,)."""
    lanes = vector(I32, 8)
    bytes_ = e.join([_order_quads(e, half) for half in halves]).trunc(I8)
    if is_paired:
        target = address + (row // 2 * (2 * GROUP) + row % 2 * 8)
        for eight in range(0, GROUP, 8):
            e.store(e.part(bytes_, eight, 8), target, 2 * eight)
    else:
        e.store(bytes_ ^ -128 if is_unsigned else bytes_, address + row * GROUP)
    fours = e.level.sum_of_bytes(e, e.zero(lanes), Inputs.BYTES.value)
    fours.add(e.constant(lanes, 0x01010101), bytes_.bits(lanes))
    return -_take_lanes(e, fours.end(), [0, 8, 12])


def _order_quads(e: Emitter, integers: Value) -> Value:
    return e.shuffle(integers, integers, [lane & ~3 | QUAD[lane & 3] for lane in range(16)])


def _split(e: Emitter, integers: Value) -> Value:
    """int32 (16,) as bytes (32,): see above."""
    ordered = _order_quads(e, integers)
    high, low = (ordered + 128).ashr(8).trunc(I8), ordered.trunc(I8)
    return e.shuffle(high, low, [lane + 16 * i + first for first in (0, 8) for i in (0, 1) for lane in range(8)])


@cache
def write_matrices(has_norm: bool, *, picks: bool = False) -> Kernel[RowArguments]:
    """Rows of x → panels of bfloat16 for matrices, one unit per row. Arguments as of `quantize_rows`, with any number
    of columns."""

    def emit(e: Emitter, args: RowArguments, begin: Value, end: Value, scratch: Value) -> None:
        f16, whole, rest = vector(F32, 16), args.columns // GROUP, args.columns % GROUP
        stride = (args.columns + (GROUP - 1)) // GROUP * MATRIX
        with _rows(e, args, begin, end, picks) as (row, source):
            target = args.out + row // ROWS * stride + row % ROWS * (2 * GROUP)
            factor = inverse_rms(e, source, args.columns, args.eps) if has_norm else None

            def write(group: Value, x: Value, weight: Value) -> None:
                halves = [e.load(x, f16, 64 * half) for half in (0, 1)]
                if factor is not None:
                    norms = [e.load(weight, f16, 64 * half) for half in (0, 1)]
                    halves = [half * factor * norm for half, norm in zip(halves, norms, strict=True)]
                e.store(e.level.to_bfloat(e, *halves), target + group * MATRIX)

            with e.loop(0, whole) as group:
                write(group, source + group * 128, args.weight + group * 128)
            with e.when(rest > 0):
                numbers = [(source, scratch), (args.weight, scratch + 128)][: 1 + has_norm]
                for address, copy in numbers:
                    for half in (0, 64):
                        e.store(e.zero(f16), copy, half)
                    with e.loop(0, rest) as column:
                        e.store(e.load(address + (whole * GROUP + column) * 4, F32), copy + column * 4)
                write(whole, scratch, scratch + 128)

    return Kernel(f"matrices{'_normed' * has_norm}{'_picked' * picks}", emit, RowArguments)


@cache
def interleave_rows(has_norm: bool, row_tile: int, *, picks: bool = False) -> Kernel[RowArguments]:
    """Rows of x → panels of float32, one unit per row. Arguments as of `quantize_rows`, with any number of columns."""

    def emit(e: Emitter, args: RowArguments, begin: Value, end: Value, scratch: Value) -> None:
        with _rows(e, args, begin, end, picks) as (row, source):
            panel = args.out + row // row_tile * args.columns * (4 * row_tile)
            target = panel + row % row_tile * 4
            factor = inverse_rms(e, source, args.columns, args.eps) if has_norm else None

            def write(offset: Value, kind: Type) -> None:
                value = e.load(source + offset, kind)
                if factor is not None:
                    value = value * factor * e.load(args.weight + offset, kind)
                for lane in range(value.lanes or 1):
                    number = e.extract(value, lane) if value.lanes else value
                    e.store(number, target + offset * row_tile, 4 * row_tile * lane)

            for_each_column(e, args.columns, write)

    return Kernel(f"interleave{'_normed' * has_norm}{'_picked' * picks}_{row_tile}", emit, RowArguments)


@contextmanager
def _rows(e: Emitter, args: RowArguments, begin: Value, end: Value, picks: bool) -> Iterator[tuple[Value, Value]]:
    """A loop over units: the number of a row of the panels, and the address of its row of x."""
    with e.loop(begin, end) as row:
        if not picks:
            yield row, args.x + row * args.stride
            return
        source = e.load(args.sources + row * 4, I32).sext(I64)
        with e.when(source >= 0):
            yield row, args.x + source * args.stride
