"""Numbers of 16 bits, float16 or bfloat16, as words: integers, and a power of two for each output and 32 inputs.

A CPU multiplies twice as many words at a time as float32. Memory keeps the numbers of the file; they become words as
they are multiplied. The power of two is the smallest with which no sum of products with 32 inputs overflows an int32:
the magnitudes of 32 words add up to 2¹⁷, a word is at most 2¹⁴, and inputs are at most `Inputs.WORDS`. So a float16 of
at least half the mean magnitude of the 32, or a bfloat16 of at least a sixteenth of it, is an exact word. Smaller ones
are rounded to the unit that the exact ones have. If one of the 32 is more than an eighth of the sum, it counts as the
sum of eight of its kind.
"""

from __future__ import annotations

from functools import reduce

from polarlm.engine.backends.native.kernels.linear.activations import GROUP
from polarlm.engine.backends.native.kernels.linear.block_sums import AHEAD
from polarlm.engine.backends.native.kernels.linear.code_words import Words
from polarlm.engine.backends.native.kernels.linear.tile_reads import is_bfloat, read_plain, widened
from polarlm.engine.backends.native.tiles import ROWS
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I16, I32, Value, vector
from polarlm.engine.weight_formats import WeightFormat

NUMBER_BYTES = 2 * GROUP * ROWS  # of 32 inputs of 16 outputs
_SUM_BITS = 17
_SHARE = 8  # of the largest word in the largest sum: a word has 14 bits
_CHAINS = 4  # sums that do not wait for each other
_LEAST = 2.0**-60  # below which the power of two of a sum might not be an ordinary number
_EXPONENT = 0x7F800000  # the bits of a float32's power of two
_BIAS = 127
_ROUNDING = 1.5 * 2.0**23  # the unit of its last bit is 1, and its lowest 16 bits are 0
_F16, _I16 = vector(F32, ROWS), vector(I32, ROWS)


class NumberWords(Words):
    """Writes numbers as words."""

    def __init__(self, e: Emitter, format: WeightFormat) -> None:
        super().__init__(e)
        self._format, self._is_bfloat = format, is_bfloat(format)

    def write(self, numbers: Value, out: Value) -> None:
        """Write the words and scales of 32 inputs to `out`. numbers: address of (32, 16) float16 or bfloat16."""
        e = self._e
        e.prefetch(numbers + AHEAD, NUMBER_BYTES)
        bound = self._bound(numbers)
        exponents = e.fmax(bound, _LEAST).bits(_I16) & _EXPONENT
        power = (-exponents + (2 * _BIAS + _SUM_BITS - 1 << 23)).bits(_F16)
        for pair in range(GROUP // 2):
            low, high = (self._rounded(numbers, 2 * pair + i, power) for i in (0, 1))
            e.store((high << 16) | (low & 0xFFFF), out, 4 * ROWS * pair)
        scale = (exponents - (_SUM_BITS - 1 << 23)).bits(_F16)
        e.store(scale + (bound - bound), out, self._scales)  # NaN if a number is NaN or infinite
        self._write_starts(out)

    def _rounded(self, numbers: Value, number: int, power: Value) -> Value:
        """A row of numbers times `power`, to the nearest integer: the lowest 16 bits of int32 (16,)."""
        e = self._e
        row = read_plain(e, numbers, self._format, ROWS, 2 * ROWS * number)
        return e.fma(row, power, e.like(_ROUNDING, row)).bits(_I16)

    def _bound(self, numbers: Value) -> Value:
        """Of each output, the sum of the 32 magnitudes, or eight times the largest if that is more: float32 (16,)."""
        e, halves = self._e, vector(I16, ROWS)
        bits = [e.load(numbers, halves, 2 * ROWS * number) & 0x7FFF for number in range(GROUP)]
        largest = self._widened(reduce(e.imax, bits))
        sums = [reduce(Value.__add__, map(self._widened, bits[i::_CHAINS])) for i in range(_CHAINS)]
        total, most = reduce(Value.__add__, sums), largest * float(_SHARE)
        return e.select(total > most, total, most)

    def _widened(self, bits: Value) -> Value:
        return widened(self._e, bits, is_bfloat=self._is_bfloat)
