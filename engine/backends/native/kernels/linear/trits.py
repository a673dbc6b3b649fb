"""Blocks of digits of base 3 (`engine.backends.native.tiles`) become codes of 8 bits."""

from __future__ import annotations

from polarlm.engine.backends.native.kernels.linear.block_sums import AHEAD
from polarlm.engine.backends.native.tiles import ROWS, TileLayout, block_bytes
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import I8, I16, I32, Value, vector
from polarlm.engine.weight_formats import WeightFormat

_WORDS, _BYTES, _ROW = vector(I32, ROWS), vector(I8, 4 * ROWS), 4 * ROWS
_EVEN = 0x00FF00FF  # the even bytes of a word


class TritExpander:
    """An `Expander` of blocks of digits."""

    factor = 1.0

    def __init__(self, e: Emitter, format: WeightFormat) -> None:
        assert format.runs is not None
        self._e, self._format, self._runs = e, format, format.runs
        codes = 2 * ROWS
        size = codes + ROWS * format.values
        self.layout = TileLayout(format, (8,), 0, None, None, None, None, codes, size, is_power=False)
        self._out = e.stack(size)

    def __call__(self, at: Value) -> Value:
        """The expanded block of the block at an address: valid until the next."""
        e, out = self._e, self._out
        e.prefetch(at + AHEAD, block_bytes(self._format))
        e.store(e.load(at, vector(I16, ROWS)), out, self.layout.scale)
        packed, codes = at + 2 * ROWS, out + self.layout.codes
        for count, digits in self._runs:
            with e.loop(0, count // 4) as number:  # four inputs of all rows
                self._expand(packed + number * _ROW, codes + number * _ROW, count // 4, digits)
            packed, codes = packed + ROWS * count, codes + ROWS * count * digits
        return out

    def _expand(self, at: Value, out: Value, step: int, digits: int) -> None:
        """Write the codes of four bytes of each row; codes of the next digits follow after `step` others."""
        e = self._e
        packed = e.load(at, _WORDS)
        halves = [packed & _EVEN, packed >> 8 & _EVEN]
        for digit in range(digits):
            tripled = [(half << 1) + half for half in halves]
            even, odd = (half >> 8 & 0x00030003 for half in tripled)
            e.store((even | odd << 8).bits(_BYTES) - 1, out, _ROW * step * digit)
            halves = [half & _EVEN for half in tripled]
