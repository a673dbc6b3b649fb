"""Products of rows of activations with weights in tiles (`engine.backends.native.tiles`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.linear.activations import GROUP, MATRIX, Inputs, row_bytes
from polarlm.engine.backends.native.kernels.linear.block_sums import (
    Block,
    IntCodes,
    Outputs,
    add_block,
    number_sums,
    prefetch_distance,
    sum_by_outputs,
)
from polarlm.engine.backends.native.kernels.linear.expanded_sums import SUMS, expanded_sums, is_expanded
from polarlm.engine.backends.native.kernels.linear.matrix_sums import Panels, StripPlace, matrix_sums, unit_runs
from polarlm.engine.backends.native.kernels.linear.tiling import Tiling
from polarlm.engine.backends.native.kernels.rows import apply_gate
from polarlm.engine.backends.native.tiles import ROWS, layout
from polarlm.engine.jit.lang import (
    F32,
    Emitter,
    Int64,
    Kernel,
    Level,
    Pointer,
    Type,
    Value,
    Values,
    Variable,
    read,
    vector,
)
from polarlm.engine.weight_formats import WeightFormat

_F16 = vector(F32, 16)
_STRIP_ROW = 128  # bytes of 32 outputs
_SUM_BYTES = ROWS * _STRIP_ROW  # of 16 rows and a strip


@dataclass(frozen=True)
class ProductSpec:
    """The properties that a kernel is specialized for.

    tiling: what is multiplied at once. adds: the product is added to y. has_bias: a bias is added. activation: the
    weights are [gate | up], each of whole tiles, and y = activation(gate) * up; a tile of each counts as one, and it
    excludes `adds`. by_expert: weights of several experts, each with its own rows. inputs: how x is read. to_matrices:
    y, after an activation, is what another product reads as x: panels of bfloat16.
    """

    format: WeightFormat
    tiling: Tiling
    adds: bool = False
    has_bias: bool = False
    activation: str | None = None
    by_expert: bool = False
    inputs: Inputs = Inputs.CODES
    to_matrices: bool = False

    @property
    def block_inputs(self) -> int:
        """Inputs of a block of `ProductArguments`: of the format, of numbers that become words, or one."""
        if self.inputs is Inputs.MATRICES:
            return 1
        return GROUP if self.inputs is Inputs.WORDS else self.format.values

    @property
    def name(self) -> str:
        options = "_add" * self.adds + "_bias" * self.has_bias + (f"_{self.activation}" if self.activation else "")
        rows, tiles, unpacks_again = self.tiling
        sizes = f"{rows}x{tiles}" if tiles > 1 else rows
        kind = self.inputs.suffix + "_codes" * unpacks_again
        others = "_experts" * self.by_expert + "_to_matrices" * self.to_matrices
        return f"product_{self.format.name}{kind}_{sizes}{options}{others}"

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
def product(spec: ProductSpec) -> Kernel[ProductArguments]:
    """y = x @ wᵀ, one unit per tile of 16 outputs, or per two tiles; see `units`.

    x: panels from `quantize_rows`, or from `interleave_rows` for inputs as float32; their first `rows` rows are read.
    x_stride: bytes of a panel. bias (outputs,). blocks: blocks of a row of weights, of `ProductSpec.block_inputs`.
    tiles: tiles of the weights; with an activation, of the gate projection alone.

    With `by_expert`, each entry of chosen, an `ExpertRows`, has that many units. expert_bytes, bias_bytes: of an
    expert's weights and bias. tiles: an expert's.
    """

    def emit(e: Emitter, args: ProductArguments, begin: Value, end: Value, scratch: Value) -> None:
        body = _Body(e, spec, args, scratch)
        {Way.MATRICES: body.matrices, Way.EXPANDED: body.expanded, Way.TILES: body.tiles}[way(spec, e.level)](
            begin, end
        )

    return Kernel(spec.name, emit, ProductArguments)


class Way(Enum):
    """How a kernel multiplies; README.md has the picture."""

    MATRICES = "matrices"  # weights become matrices of the level, which multiplies these
    EXPANDED = "expanded"  # blocks are expanded in memory that stays in the cache, once for many panels
    TILES = "tiles"  # the weights of a tile are unpacked in registers, for each panel


def way(spec: ProductSpec, level: Level) -> Way:
    if spec.inputs is Inputs.MATRICES:
        return Way.MATRICES
    return Way.EXPANDED if is_expanded(spec.format, spec.inputs, spec.tiling, level) else Way.TILES


class _Operands(NamedTuple):
    """What a unit multiplies: its number in a matrix, and the addresses and rows of that matrix."""

    unit: Value
    weights: Value
    x: Value
    y: Value
    bias: Value
    rows: Value


def _operands(e: Emitter, spec: ProductSpec, args: ProductArguments, unit: Value, wide: int) -> _Operands:
    """wide: tiles per unit."""
    if not spec.by_expert:
        return _Operands(unit, args.weights, args.x, args.y, args.bias, args.rows)
    units = (args.tiles + (wide - 1)) // wide
    chosen = read(e, ExpertRows, args.chosen, unit // units)
    return _Operands(
        unit % units,
        args.weights + chosen.expert * args.expert_bytes,
        args.x + chosen.panel * args.x_stride,
        args.y + chosen.panel * (args.y_stride * (1 if spec.to_matrices else spec.row_tile)),
        args.bias + chosen.expert * args.bias_bytes,
        chosen.rows,
    )


class _Body:
    """Emits the body of `product`, in each `Way`."""

    def __init__(self, e: Emitter, spec: ProductSpec, args: ProductArguments, scratch: Value) -> None:
        self._e, self._spec, self._args, self._scratch = e, spec, args, scratch
        self._parts, self._wide = _parts(spec, e.level), _tiles_of_unit(spec)

    def matrices(self, begin: Value, end: Value) -> None:
        e, spec, args, wide = self._e, self._spec, self._args, self._wide
        with unit_runs(e, begin, end, (args.tiles + (wide - 1)) // wide) as (unit, count):
            operands = _operands(e, spec, args, unit, wide)
            panels = Panels(operands.x, args.x_stride, args.blocks, operands.rows)
            outputs = _MatrixOutputs(e, spec, args, operands, self._scratch)

            def tiles(strip: Value) -> list[Value]:
                return self._tiles(operands._replace(unit=operands.unit + strip))

            matrix_sums(e, spec.format, tiles, count, panels, self._scratch + _SUM_BYTES, outputs)

    def expanded(self, begin: Value, end: Value) -> None:
        e, spec, args = self._e, self._spec, self._args
        with e.loop(begin, end) as unit:
            operands = _operands(e, spec, args, unit, self._wide)
            tiles = self._tiles(operands)
            panels, at_once = (operands.x, args.x_stride, args.blocks, operands.rows), len(tiles) // self._parts
            finish = partial(self._finish, operands)
            expanded_sums(
                e, spec.format, spec.tiling, tiles, at_once, panels, self._scratch + SUMS, spec.inputs, finish
            )

    def tiles(self, begin: Value, end: Value) -> None:
        e, spec, args, parts, scratch = self._e, self._spec, self._args, self._parts, self._scratch
        with e.loop(begin, end) as unit:
            operands = _operands(e, spec, args, unit, self._wide)
            with e.loop(0, operands.rows, spec.row_tile) as first:
                tiles = self._tiles(operands)

                def multiply(part: int) -> list[list[Value]]:
                    part_tiles, inputs = tiles[part::parts], (operands.x, first, args.blocks, args.x_stride)
                    if not spec.inputs.are_integers:
                        panel = operands.x + first // spec.row_tile * args.x_stride
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
                self._finish(operands, first, sums)

    def _tiles(self, operands: _Operands) -> list[Value]:
        """The addresses of a unit's tiles of weights."""
        e, tiles, tile = self._e, self._args.tiles, operands.unit * self._wide
        others = (
            [tile + tiles] if self._spec.activation else [e.imin(tile + i, tiles - 1) for i in range(1, self._wide)]
        )
        return [operands.weights + number * self._args.tile_bytes for number in (tile, *others)]

    def _finish(self, operands: _Operands, first: Value, sums: Sequence[Values]) -> None:
        """Store the outputs of a unit for the rows from `first` on. sums: of each tile and row."""
        by_tile = [sums] if self._spec.activation else [[tile_sums] for tile_sums in sums]
        for number, tile_sums in enumerate(by_tile):
            self._write(operands, tile_sums, operands.unit * self._wide + number, first)

    def _write(self, operands: _Operands, sums: Sequence[Values], tile: Value, first: Value) -> None:
        """Store the outputs of a tile. sums: of each row, of gate and up with an activation."""
        e, spec, args = self._e, self._spec, self._args
        for row, totals in enumerate(zip(*sums, strict=True)):
            with e.when(first + row < operands.rows) if spec.row_tile > 1 else nullcontext():
                address = operands.y + (first + row) * args.y_stride
                place = tile, args.tiles
                _write(e, spec, totals, address, operands.bias, place, args.outputs, self._scratch)


class _MatrixOutputs:
    """The outputs of strips. Sums start with what they are added to, and with the bias: a row's result does not depend
    on whether its 16 rows and its 32 outputs all exist, for which registers need no copy."""

    def __init__(self, e: Emitter, spec: ProductSpec, args: ProductArguments, operands: _Operands, copy: Value) -> None:
        """copy: memory of 2 KiB, float32 (16, 32)."""
        self._e, self._spec, self._args, self._operands, self._copy = e, spec, args, operands, copy
        self._matrices = e.level.matrices

    def start(self, place: StripPlace) -> None:
        e, spec = self._e, self._spec
        with e.when(place.are_first):
            if spec.activation is not None or not spec.adds:
                self._start_with_bias(place)
            else:
                self._start_with_y(place, adds_bias=spec.has_bias)
        if spec.activation is None:  # else a strip has all inputs
            with e.when(place.are_first.equals(0)):
                self._start_with_y(place, adds_bias=False)

    def finish(self, place: StripPlace) -> None:
        e, spec = self._e, self._spec
        if spec.activation is not None:
            self._store_copy(place)
            self._gate(place)
            return
        y, whole = self._y(place), self._is_whole(place)
        with e.when(whole):
            for side, register in enumerate(place.registers):
                self._matrices.store(e, register, y + 64 * side, self._args.y_stride)
        with e.when(whole.equals(0)):
            self._store_copy(place)
            with self._rows(place) as (target, copy):
                self._each(place, lambda offset, kind: e.store(e.load(copy + offset, kind), target + offset))

    def _unit(self, place: StripPlace) -> Value:
        return self._operands.unit + place.strip

    def _y(self, place: StripPlace) -> Value:
        return self._operands.y + place.row * self._args.y_stride + self._unit(place) * _STRIP_ROW

    def _outputs_left(self, place: StripPlace) -> Value:
        """How many outputs there are from the strip's first one on."""
        return self._args.outputs - self._unit(place) * 32

    def _is_whole(self, place: StripPlace) -> Value:
        return (place.rows >= ROWS) & (self._outputs_left(place) >= 32)

    @contextmanager
    def _rows(self, place: StripPlace) -> Iterator[tuple[Value, Value]]:
        """A loop over the rows that exist: the addresses of its outputs and of its copy."""
        y = self._y(place)
        with self._e.loop(0, place.rows) as row:
            yield y + row * self._args.y_stride, self._copy + row * _STRIP_ROW

    def _each(self, place: StripPlace, body: Callable[[Value, Type], None]) -> None:
        """Emit body(offset in bytes, type) for the outputs of a strip that exist."""
        e, left = self._e, self._outputs_left(place)
        with e.when(left >= 32):
            for offset in (0, 64):
                body(e.i64(offset), _F16)
        with e.when(left < 32), e.loop(0, left) as lane:
            body(lane * 4, F32)

    def _load_copy(self, place: StripPlace) -> None:
        for side, register in enumerate(place.registers):
            self._matrices.load(self._e, register, self._copy + 64 * side, _STRIP_ROW)

    def _store_copy(self, place: StripPlace) -> None:
        for side, register in enumerate(place.registers):
            self._matrices.store(self._e, register, self._copy + 64 * side, _STRIP_ROW)

    def _start_with_bias(self, place: StripPlace) -> None:
        e, spec, args, unit = self._e, self._spec, self._args, self._unit(place)
        if spec.activation is None:  # a store would wait for lines that are not in the cache
            for row in range(ROWS):
                e.prefetch(self._y(place) + args.y_stride * row, _STRIP_ROW, level=2)
        if not spec.has_bias:
            for register in place.registers:
                self._matrices.clear(e, register)
        elif spec.activation is not None:  # outputs are whole tiles
            for tile, register in zip((unit, unit + args.tiles), place.registers, strict=True):
                self._matrices.load(e, register, self._operands.bias + tile * 64, 0)
        else:
            bias = self._operands.bias + unit * _STRIP_ROW
            self._each(place, lambda offset, kind: e.store(e.load(bias + offset, kind), self._copy + offset))
            for side, register in enumerate(place.registers):
                self._matrices.load(e, register, self._copy + 64 * side, 0)

    def _start_with_y(self, place: StripPlace, *, adds_bias: bool) -> None:
        e, bias, y = self._e, self._operands.bias + self._unit(place) * _STRIP_ROW, self._y(place)
        whole = self._is_whole(place)
        if not adds_bias:
            with e.when(whole):
                for side, register in enumerate(place.registers):
                    self._matrices.load(e, register, y + 64 * side, self._args.y_stride)
            with e.when(whole.equals(0)), self._rows(place) as (target, copy):
                self._each(place, lambda offset, kind: e.store(e.load(target + offset, kind), copy + offset))
        else:
            with self._rows(place) as (target, copy):

                def add(offset: Value, kind: Type) -> None:
                    e.store(e.load(target + offset, kind) + e.load(bias + offset, kind), copy + offset)

                self._each(place, add)
        with e.when(whole.equals(0)) if not adds_bias else nullcontext():
            self._load_copy(place)

    def _gate(self, place: StripPlace) -> None:
        e, spec, args, unit = self._e, self._spec, self._args, self._unit(place)
        assert spec.activation is not None
        with e.loop(0, place.rows) as number:
            gate, up = (e.load(self._copy + number * _STRIP_ROW, _F16, 64 * side) for side in (0, 1))
            value, row = apply_gate(e, spec.activation, gate, up), place.row + number
            if not spec.to_matrices:
                e.store(value, self._operands.y + row * args.y_stride + unit * 64)
            else:
                half = e.part(self._e.level.to_bfloat(e, value, value), 0, ROWS)
                panel = self._operands.y + row // ROWS * args.y_stride + row % ROWS * 64
                e.store(half, panel + (unit // 2 * MATRIX + unit % 2 * 32))


def units(spec: ProductSpec, tiles: int) -> int:
    """The number of units of a product. tiles: as in `product`."""
    return -(-tiles // _tiles_of_unit(spec))


def _tiles_of_unit(spec: ProductSpec) -> int:
    """Tiles per unit; with an activation one, and the up projection's tile."""
    return 1 if spec.activation is not None else spec.tiling.tiles


def _parts(spec: ProductSpec, level: Level) -> int:
    """2 if gate and up projection are multiplied in turn, because registers have no room for the sums of both; or 1."""
    rows, tiles = level.code_tiles[-1]
    is_full = 2 * spec.row_tile > rows * tiles or level.keeps_order
    return 2 if spec.activation is not None and is_full else 1


def _write(
    e: Emitter,
    spec: ProductSpec,
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

    def complete(values: Values, offset: Value) -> Value:
        if spec.has_bias:
            values = [
                value + e.load(address + offset, value.type) for value, address in zip(values, biases, strict=True)
            ]
        if spec.activation:
            return apply_gate(e, spec.activation, *values)
        return values[0] + e.load(y + offset, values[0].type) if spec.adds else values[0]

    with e.when(left >= 16):
        e.store(complete(totals, e.i64(0)), y)
    with e.when(left < 16):
        for number, total in enumerate(totals):
            e.store(total, scratch, 64 * number)
        with e.loop(0, left) as lane:
            values = [e.load(scratch + lane * 4, F32, 64 * number) for number in range(len(totals))]
            e.store(complete(values, lane * 4), y + lane * 4)


def _packed_sums(
    e: Emitter, spec: ProductSpec, tiles: Values, x: Value, first: Value, blocks: Value, stride: Value
) -> list[list[Value]]:
    """The sums of each tile and row, for weights of codes and scales. x: panels from `quantize_rows`."""
    format, place = spec.format, layout(spec.format)
    codes = IntCodes(e, place, spec.row_tile, spec.inputs)
    distance = place.codes + prefetch_distance(e.level, spec.row_tile)
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
                e, codes, [Block(e, place, start, outputs=outputs) for start in starts], inputs, sums, before_part
            )

    return sum_by_outputs(e, [[e.zero(_F16)] * spec.row_tile for _ in tiles], add)
