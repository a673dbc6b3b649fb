"""Products of rows of activations with weights in tiles (`engine.backends.native.tiles`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.linear.activations import GROUP, Inputs, are_matrices, row_bytes
from polarlm.engine.backends.native.kernels.linear.block_sums import (
    Block,
    Codes,
    Outputs,
    add_block,
    number_sums,
    prefetch_distance,
    sum_by_outputs,
)
from polarlm.engine.backends.native.kernels.linear.expanding import SUMS, expanded_sums, is_expanded
from polarlm.engine.backends.native.kernels.linear.matrix_sums import matrix_sums, runs
from polarlm.engine.backends.native.kernels.linear.tiling import Tiling
from polarlm.engine.backends.native.kernels.rows import apply_gate
from polarlm.engine.backends.native.tiles import layout
from polarlm.engine.jit.lang import F32, Emitter, Int64, Kernel, Level, Pointer, Value, Values, Variable, read, vector
from polarlm.engine.weight_formats import WeightFormat

_F16 = vector(F32, 16)


@dataclass(frozen=True)
class Product:
    """The properties that a kernel is specialized for.

    tiling: what is multiplied at once. adds: the product is added to y. has_bias: a bias is added. activation: the
    weights are [gate | up], each of whole tiles, and y = activation(gate) * up; a tile of each counts as one, and it
    excludes `adds`. by_expert: weights of several experts, each with its own rows. inputs: how x is read.
    """

    format: WeightFormat
    tiling: Tiling
    adds: bool = False
    has_bias: bool = False
    activation: str | None = None
    by_expert: bool = False
    inputs: Inputs = Inputs.CODES

    @property
    def block_inputs(self) -> int:
        """Inputs of a block of `ProductArguments`: of the format, of numbers that become words, or one."""
        return GROUP if self.inputs is Inputs.WORDS else self.format.values

    @property
    def name(self) -> str:
        options = "_add" * self.adds + "_bias" * self.has_bias + (f"_{self.activation}" if self.activation else "")
        rows, tiles, unpacks_again = self.tiling
        sizes = f"{rows}x{tiles}" if tiles > 1 else rows
        kind = self.inputs.suffix + "_codes" * unpacks_again
        return f"product_{self.format.name}{kind}_{sizes}{options}{'_experts' * self.by_expert}"

    @property
    def row_tile(self) -> int:
        return self.tiling.rows


class ExpertRows(NamedTuple):
    """The rows of an expert, in consecutive panels. Without rows, the other numbers mean nothing."""

    expert: Int64
    panel: Int64
    rows: Int64


class ProductArguments(NamedTuple):
    weights: Pointer
    x: Pointer
    y: Pointer
    bias: Pointer
    blocks: Int64
    tile_bytes: Int64
    x_stride: Int64
    y_stride: Int64
    rows: Int64
    outputs: Int64
    tiles: Int64
    chosen: Pointer = None
    expert_bytes: Int64 = 0
    bias_bytes: Int64 = 0


@cache
def product(spec: Product) -> Kernel[ProductArguments]:
    """y = x @ wᵀ, one unit per tile of 16 outputs, or per two tiles; see `units`.

    x: panels from `quantize_rows`, or from `interleave_rows` for inputs as float32; their first `rows` rows are read.
    x_stride: bytes of a panel. bias (outputs,). blocks: blocks of a row of weights, of `Product.block_inputs`. tiles:
    tiles of the weights; with an activation, of the gate projection alone.

    With `by_expert`, each entry of chosen, an `ExpertRows`, has that many units. expert_bytes, bias_bytes: of an
    expert's weights and bias. tiles: an expert's.
    """

    def emit(e: Emitter, args: ProductArguments, begin: Value, end: Value, scratch: Value) -> None:
        tiles = args.tiles
        parts, wide = _parts(spec, e.level), _tiles_of_unit(spec)

        def tiles_of(of: _Operands) -> list[Value]:
            tile = of.unit * wide
            others = [tile + tiles] if spec.activation else [e.imin(tile + i, tiles - 1) for i in range(1, wide)]
            return [tile, *others]

        def write(of: _Operands, sums: Sequence[Values], tile: Value, first: Value) -> None:
            """Store the outputs of the rows from `first` on. sums: of each row, of gate and up with an activation."""
            for row, totals in enumerate(zip(*sums, strict=True)):
                with e.when(first + row < of.rows) if spec.row_tile > 1 else nullcontext():
                    address = of.y + (first + row) * args.y_stride
                    _write(e, spec, totals, address, of.bias, (tile, tiles), args.outputs, scratch)

        def finish(of: _Operands, sums: Sequence[Values], first: Value) -> None:
            """Store the outputs of a unit. sums: of each tile and row."""
            by_tile = [sums] if spec.activation else [[tile_sums] for tile_sums in sums]
            for number, tile_sums in enumerate(by_tile):
                write(of, tile_sums, of.unit * wide + number, first)

        if are_matrices(e.level, spec.row_tile, spec.inputs):
            each = 1 if spec.activation is None else 2
            with (
                runs(e, spec.format, spec.inputs, (begin, end), tiles, each) as (unit, count),
                nullcontext(_operands(e, spec, args, unit, wide)) as of,
            ):
                tile = of.weights + of.unit * args.tile_bytes
                weights, panels = (tile, args.tile_bytes, tiles), (of.x, args.x_stride, args.blocks, of.rows)
                y = of.y + of.unit * 64, args.y_stride
                rows = matrix_sums(e, spec.format, spec.inputs, weights, (count, each), panels, y, scratch + SUMS)
                for number, first, sums in rows:
                    finish(of._replace(unit=of.unit + number), sums, first)
            return
        if is_expanded(spec.format, spec.inputs, spec.tiling, e.level):
            with e.loop(begin, end) as unit, nullcontext(_operands(e, spec, args, unit, wide)) as of:
                starts = [of.weights + number * args.tile_bytes for number in tiles_of(of)]
                inputs, at_once = (of.x, args.x_stride, args.blocks, of.rows), len(starts) // parts
                kept, kind = scratch + SUMS, spec.inputs
                for first, sums in expanded_sums(e, spec.format, spec.tiling, starts, at_once, inputs, kept, kind):
                    finish(of, sums, first)
            return
        with (
            e.loop(begin, end) as unit,
            nullcontext(_operands(e, spec, args, unit, wide)) as of,
            e.loop(0, of.rows, spec.row_tile) as first,
        ):
            starts = [of.weights + number * args.tile_bytes for number in tiles_of(of)]

            def multiply(part: int) -> list[list[Value]]:
                part_tiles, inputs = starts[part::parts], (of.x, first, args.blocks, args.x_stride)
                if not spec.inputs.are_integers:
                    panel = of.x + first // spec.row_tile * args.x_stride
                    return number_sums(e, spec.format, part_tiles, panel, args.blocks, spec.row_tile)
                return _packed_sums(e, spec, part_tiles, *inputs)

            if parts == 1:
                sums = multiply(0)
            else:  # scratch keeps the sums of the gate meanwhile
                (gates,) = multiply(0)
                for row, total in enumerate(gates):
                    e.store(total, scratch, 128 + 64 * row)
                (ups,) = multiply(1)
                sums = [[e.load(scratch, _F16, 128 + 64 * row) for row in range(spec.row_tile)], ups]
            finish(of, sums, first)

    return Kernel(spec.name, emit, ProductArguments)


class _Operands(NamedTuple):
    """What a unit multiplies: its number in a matrix, and the addresses and rows of that matrix."""

    unit: Value
    weights: Value
    x: Value
    y: Value
    bias: Value
    rows: Value


def _operands(e: Emitter, spec: Product, args: ProductArguments, unit: Value, wide: int) -> _Operands:
    """wide: tiles per unit."""
    if not spec.by_expert:
        return _Operands(unit, args.weights, args.x, args.y, args.bias, args.rows)
    units = (args.tiles + (wide - 1)) // wide
    chosen = read(e, ExpertRows, args.chosen, unit // units)
    return _Operands(
        unit % units,
        args.weights + chosen.expert * args.expert_bytes,
        args.x + chosen.panel * args.x_stride,
        args.y + chosen.panel * (args.y_stride * spec.row_tile),
        args.bias + chosen.expert * args.bias_bytes,
        chosen.rows,
    )


def units(spec: Product, tiles: int) -> int:
    """The number of units of a product. tiles: as in `product`."""
    return -(-tiles // _tiles_of_unit(spec))


def _tiles_of_unit(spec: Product) -> int:
    """Tiles per unit; with an activation one, and the up projection's tile."""
    return 1 if spec.activation is not None else spec.tiling.tiles


def _parts(spec: Product, level: Level) -> int:
    """2 if gate and up projection are multiplied in turn, because registers have no room for the sums of both; or 1."""
    rows, tiles = level.code_tiles[-1]
    is_full = 2 * spec.row_tile > rows * tiles or level.keeps_order
    return 2 if spec.activation is not None and is_full else 1


def _write(
    e: Emitter,
    spec: Product,
    totals: Values,
    row: Value,
    bias: Value,
    place: tuple[Value, Value],
    outputs: Value,
    scratch: Value,
) -> None:
    """Store the outputs of a tile in a row of y.

    totals: their sums; with an activation, of the gate and of the up projection. place: the tile's number, and the
    distance in tiles from a gate tile to its up tile.
    """
    tile, distance = place
    y, left = row + tile * 64, outputs - tile * 16
    biases = [bias + (tile + distance * number) * 64 for number in range(len(totals))]

    def finished(values: Values, offset: Value) -> Value:
        if spec.has_bias:
            values = [
                value + e.load(address + offset, value.type) for value, address in zip(values, biases, strict=True)
            ]
        if spec.activation:
            return apply_gate(e, spec.activation, *values)
        return values[0] + e.load(y + offset, values[0].type) if spec.adds else values[0]

    with e.when(left >= 16):
        e.store(finished(totals, e.i64(0)), y)
    with e.when(left < 16):
        for number, total in enumerate(totals):
            e.store(total, scratch, 64 * number)
        with e.loop(0, left) as lane:
            values = [e.load(scratch + lane * 4, F32, 64 * number) for number in range(len(totals))]
            e.store(finished(values, lane * 4), y + lane * 4)


def _packed_sums(
    e: Emitter, spec: Product, tiles: Values, x: Value, first: Value, blocks: Value, stride: Value
) -> list[list[Value]]:
    """The sums of each tile and row, for weights of codes and scales. x: panels from `quantize_rows`."""
    format, place = spec.format, layout(spec.format)
    codes, distance = (
        Codes(e, place, spec.row_tile, spec.inputs),
        place.codes + prefetch_distance(e.level, spec.row_tile),
    )
    panel = x + first // spec.row_tile * stride

    def add(outputs: Outputs, sums: Sequence[Sequence[Variable]]) -> None:
        with e.loop(0, blocks) as block:
            starts = [tile + block * place.nbytes for tile in tiles]
            inputs = panel + block * (format.values // GROUP * row_bytes(e.level, spec.inputs) * spec.row_tile)

            def before_part(part: Value) -> None:
                if outputs.first == 0:
                    for address in starts:
                        e.prefetch(address + part * place.part_bytes + distance, place.part_bytes)

            add_block(
                e, codes, [Block(e, place, address, outputs=outputs) for address in starts], inputs, sums, before_part
            )

    return sum_by_outputs(e, [[e.zero(_F16)] * spec.row_tile for _ in tiles], add)
