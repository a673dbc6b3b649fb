"""Expanders: blocks of lattices and of digits (`engine.backends.native.tiles`) become codes of 8 bits."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native.kernels.linear.block_sums import PREFETCH_BYTES
from polarlm.engine.backends.native.tiles import QUAD, ROWS, LatticeField, TileLayout, block_bytes, lattice_layout
from polarlm.engine.jit.lang import F32, F64, I8, I16, I32, I64, Emitter, Value, vector
from polarlm.engine.weight_formats import WeightFormat

_WORDS, _BYTES, _ROW = vector(I32, ROWS), vector(I8, 4 * ROWS), 4 * ROWS
_EVEN = 0x00FF00FF  # the even bytes of a word


def has_expander(format: WeightFormat) -> bool:
    return format.grid is not None or format.runs is not None


def expander(e: Emitter, format: WeightFormat) -> LatticeExpander | TritExpander | None:
    """The expander of a format whose blocks become codes of 8 bits; None for others.

    layout: of expanded blocks. factor: what their scales are to be multiplied by. A call returns the expanded block of
    the block at an address, valid until the next call.
    """
    if not has_expander(format):
        return None
    return TritExpander(e, format) if format.runs is not None else LatticeExpander(e, format)


class LatticeExpander:
    """Expands blocks of a lattice. The points of an index are loaded one by one, since tables of 256 to 4096
    points fit no register; the lanes that they are loaded to are the rows."""

    def __init__(self, e: Emitter, format: WeightFormat) -> None:
        assert format.grid is not None
        self._e, self._format, self._grid, self._fields = e, format, format.grid, lattice_layout(format)
        self._cells = 32 // format.grid.cell  # cells of 32 inputs
        groups, parts = format.values // format.group, format.values // 32
        codes = 2 * ROWS + ROWS * groups
        size = codes + ROWS * format.values
        self.factor = format.grid.factor
        self.layout = TileLayout(format, (8,), None, 2 * ROWS, None, None, codes, size, is_power=False)
        self._out = e.stack(size)
        self._indices = e.stack(2 * ROWS * self._cells * parts) if format.bits > 8 else None
        points = format.grid.points().reshape(1 << format.bits, -1, 4)
        self._points = e.constant_bytes(np.ascontiguousarray(points[..., QUAD]).tobytes())

    def __call__(self, address: Value) -> Value:
        e, out, format = self._e, self._out, self._format
        e.prefetch(address + PREFETCH_BYTES, block_bytes(format))
        e.store(e.load(address, vector(I16, ROWS), self._fields["scale"].start), out)
        parts = format.values // 32
        if self._indices is not None:
            with e.loop(0, parts) as part:
                self._join_indices(address, part, self._indices + part * (2 * ROWS * self._cells))
        with e.loop(0, parts) as part:
            signs = self._expand_scales(address, part)
            codes = out + part * self.layout.part_bytes
            quads = (quad for cell in range(self._cells) for quad in self._quads(address, part, cell))
            for number, quad in enumerate(quads):
                values = quad.bits(_BYTES)
                if signs is not None:
                    values = self._apply_signs(values, signs, number)
                e.store(values, codes, self.layout.codes + _ROW * number)
        return out

    def _join_indices(self, address: Value, part: Value, out: Value) -> None:
        """Write the indices of 32 inputs, uint16 (cells, 16)."""
        e, high_bits = self._e, self._format.bits - 8
        high, low = self._field(address, part, self._fields["high"]), self._low(address, part)
        for cell in range(self._cells):
            lower = e.load(low, _WORDS, _ROW * (cell // 4)) >> 8 * (cell % 4) & 255
            upper = (high >> high_bits * cell & (1 << high_bits) - 1) << 8
            e.store((lower | upper).trunc(I16), out, 2 * ROWS * cell)

    def _expand_scales(self, address: Value, part: Value) -> Value | None:
        """Write the scales of the groups of 32 inputs → their signs, int32 (16,), if signs are stored."""
        e, count, scales, signs = self._e, 32 // self._format.group, [], None
        if self._grid.signs:
            signs = self._field(address, part, self._fields["signs"])
        if self._grid.signs == 7:
            assert signs is not None
            scales.append((signs >> 7 & 0x01010101) * 0x01020408 >> 24)
            signs = signs & 0x7F7F7F7F
            parity = signs ^ signs >> 4
            parity = parity ^ parity >> 2
            parity = parity ^ parity >> 1
            signs = signs | (parity & 0x01010101) << 7
        if "sub_scale" in self._fields:
            rest = self._field(address, part, self._fields["sub_scale"])
            scales += [rest >> 4 * number & 15 for number in range(count - len(scales))]
        out = self._out + part * (ROWS * count)
        for number, scale in enumerate(scales):
            e.store(((scale << 1) + 1).trunc(I8), out, 2 * ROWS + ROWS * number)
        return signs

    def _quads(self, address: Value, part: Value, cell: int) -> list[Value]:
        """The points of a cell as int32 (16,), four values each."""
        e, size = self._e, self._grid.cell
        loaded = []
        for row in range(ROWS):
            if self._indices is None:
                index = e.load(self._low(address, part), I8, _ROW * (cell // 4) + 4 * row + cell % 4)
            else:
                index = e.load(self._indices + part * (2 * ROWS * self._cells), I16, 2 * (ROWS * cell + row))
            loaded.append(e.load(self._points + index.zext(I64) * size, {4: F32, 8: F64}[size]))
        points = e.collect(loaded)
        if size == 4:
            return [points.bits(_WORDS)]
        both = points.bits(vector(I32, 2 * ROWS))
        return [e.shuffle(both, both, range(half, 2 * ROWS, 2)) for half in (0, 1)]

    def _apply_signs(self, values: Value, signs: Value, number: int) -> Value:
        """Four values of each row, in quad `number`, int8 (64,), with their signs."""
        e, sign_bytes = self._e, signs.bits(_BYTES)
        spread = e.shuffle(sign_bytes, sign_bytes, [lane & ~3 | number // 2 for lane in range(_BYTES.count)])
        mask = [1 << 4 * (number % 2) + place for place in QUAD] * ROWS
        return e.select((spread & e.constant(_BYTES, mask)).equals(0), values, -values)

    def _low(self, address: Value, part: Value) -> Value:
        """The address of the low bytes of the indices of 32 inputs."""
        return address + part * (ROWS * self._cells) + self._fields["low"].start

    def _field(self, address: Value, part: Value, field: LatticeField) -> Value:
        """A field of 4 to 32 bits of 32 inputs, int32 (16,)."""
        e, kind = self._e, {1: I8, 2: I16, 4: I32}[field.size]
        place = part >> 1 if field.bits == 4 else part
        loaded = e.load(address + place * (ROWS * field.size), vector(kind, ROWS), field.start).zext(I32)
        if field.bits == 4:
            return loaded >> e.splat(((part & 1) << 2).trunc(I32), ROWS) & 15
        return loaded


class TritExpander:
    factor = 1.0

    def __init__(self, e: Emitter, format: WeightFormat) -> None:
        assert format.runs is not None
        self._e, self._format, self._runs = e, format, format.runs
        codes = 2 * ROWS
        size = codes + ROWS * format.values
        self.layout = TileLayout(format, (8,), None, None, None, None, codes, size, is_power=False)
        self._out = e.stack(size)

    def __call__(self, address: Value) -> Value:
        e, out = self._e, self._out
        e.prefetch(address + PREFETCH_BYTES, block_bytes(self._format))
        e.store(e.load(address, vector(I16, ROWS)), out)
        packed, codes = address + 2 * ROWS, out + self.layout.codes
        for count, digits in self._runs:
            with e.loop(0, count // 4) as number:  # four inputs of all rows
                self._expand(packed + number * _ROW, codes + number * _ROW, count // 4, digits)
            packed, codes = packed + ROWS * count, codes + ROWS * count * digits
        return out

    def _expand(self, address: Value, out: Value, step: int, digits: int) -> None:
        """Write the codes of four bytes of each row; codes of the next digits follow after `step` others."""
        e = self._e
        packed = e.load(address, _WORDS)
        halves = [packed & _EVEN, packed >> 8 & _EVEN]
        for digit in range(digits):
            tripled = [(half << 1) + half for half in halves]
            even, odd = (half >> 8 & 0x00030003 for half in tripled)
            e.store((even | odd << 8).bits(_BYTES) - 1, out, _ROW * step * digit)
            halves = [half & _EVEN for half in tripled]
