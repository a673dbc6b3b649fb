"""Weights that are expanded in memory before they are multiplied: codes as words or bytes, for products of many rows,
and numbers of 16 bits as words.

Where a level has few registers, a product of many rows would unpack its codes again for every few rows, which takes
half of its time. Expanded, they are unpacked once. For 32 inputs of 16 outputs there are

    words    (16, 16, 2) int16          of each pair of inputs and each output: codes less their zero point, or numbers
    scale    (32 / group, 16) float32
    offset   (32 / group, 16) float32   if the format has it; negative
    start    (32 / group, 16) int32     if the level `halves_products`: what a sum of products starts with

Codes that are multiplied by inputs of 8 bits are bytes, (8, 16, 4), of each quad and output, and have a start, too.

Two pairs x, y of inputs and their words v, w give vx + wy = (x + w)(y + v) − xy − vw (Winograd, A New Algorithm for
Inner Product, 1968): one product of two sums instead of two products. The sum of the xy belongs to a row and comes with
its panel, the sum of the vw belongs to an output. int32 wraps, so that the differences are exact. Each third row is
multiplied without that: its products go to the pipes that the sums of the other rows leave free.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import chain

from polarlm.engine.backends.native.kernels.linear.activations import (
    GROUP,
    PAIR_PRODUCTS,
    Inputs,
    most_code,
    numbers_at,
    place_of_sum,
    row_bytes,
)
from polarlm.engine.backends.native.kernels.linear.block_sums import PREFETCH_BYTES, Block, IntCodes
from polarlm.engine.backends.native.kernels.linear.expanders import expander
from polarlm.engine.backends.native.kernels.linear.tile_reads import is_bfloat, read_plain, times_sub, widen
from polarlm.engine.backends.native.tiles import ROWS, block_bytes, layout
from polarlm.engine.jit.lang import F32, I8, I16, I32, Emitter, Value, Values, Variable, vector
from polarlm.engine.jit.lang.level import ByteSum
from polarlm.engine.weight_formats import WeightFormat

INPUTS = 256  # inputs that become words or bytes at a time: the largest block's
_NUMBER_BYTES = 2 * GROUP * ROWS  # bytes of 32 inputs of 16 outputs
_SUM_BITS = 17
_SHARE = 8  # the largest sum over the largest word: a word has 14 bits
_CHAINS = 4  # sums that do not wait for each other
_LEAST = 2.0**-60  # below which the power of two of a sum might not be an ordinary number
_EXPONENT = 0x7F800000  # the bits of a float32's power of two
_BIAS = 127
_ROUNDING = 1.5 * 2.0**23  # the unit of its last bit is 1, and its lowest 16 bits are 0
_F16, _I16, _WORDS = vector(F32, ROWS), vector(I32, ROWS), vector(I16, 2 * ROWS)
_VECTOR = 4 * ROWS  # bytes of a pair, or of a scale, of 16 outputs


class ExpandedWeights:
    """Emits products with expanded weights; subclasses emit the expansion.

    blocks: how many blocks of a tile have `INPUTS` inputs. parts: how many times 32 inputs a block has. vectors: how
    many vectors 32 inputs are, as they are multiplied by `inputs`.
    """

    blocks: int
    parts: int
    inputs = Inputs.CODES
    vectors = GROUP // 2
    has_starts = False  # whatever the level

    def __init__(self, e: Emitter, groups: int = 1, *, has_offset: bool = False) -> None:
        """groups: of 32 inputs, each with a scale of its own."""
        self._e, self._groups, self._scales = e, groups, _VECTOR * self.vectors
        self._offsets = self._scales + _VECTOR * self._groups if has_offset else None
        self._halves = e.level.halves_products and self.inputs is not Inputs.BYTES
        self._has_starts = self._halves or self.has_starts
        self._starts = self._scales + _VECTOR * self._groups * (1 + has_offset)
        self.nbytes = self._starts + _VECTOR * self._groups * self._has_starts
        """Of 32 inputs."""

    def _write_starts(self, address: Value) -> None:
        """Write what sums of products with the words at an address start with."""
        for group in range(self._groups * self._has_starts):
            self._e.store(-self._pair_products(address, group), address, self._starts + _VECTOR * group)

    def _pair_products(self, address: Value, group: int) -> Value:
        """The sums of the products of a group's words, of one pair with the next: int32 (16,). address: address of
        words."""
        e, size, total = self._e, self.vectors // self._groups, self._e.zero(_I16)
        for pair in range(group * size, (group + 1) * size, 2):
            total = e.level.dot2(e, total, *(e.load(address, _I16, _VECTOR * (pair + i)) for i in (0, 1)))
        return total

    def write_blocks(self, tile: Value, first: Value, count: Value, out: Value) -> None:
        """Write the words of `count` blocks of a tile, from number `first` on."""
        raise NotImplementedError

    def add_products(
        self, tiles: Values, parts: Value, inputs: Value, next_inputs: Value, sums: Sequence[Sequence[Variable]]
    ) -> None:
        """Add the products of a panel's rows with words to `sums`, of each tile and row.

        tiles: addresses of the words of `parts` times 32 inputs. inputs: address of the first ones in the panel.
        next_inputs: the next panel's inputs, which are prefetched: far apart, the hardware does not foresee them.
        """
        e, row_tile, size = self._e, len(sums[0]), self.vectors // self._groups
        nbytes, at_once = row_bytes(e.level, self.inputs) * row_tile, self._at_once(size)
        with e.loop(0, parts) as part:
            own_inputs = inputs + part * nbytes
            numbers = numbers_at(own_inputs, row_tile, e.level, self.inputs)
            addresses = [tile + part * self.nbytes for tile in tiles]
            e.prefetch(next_inputs + part * nbytes, nbytes)
            for group in range(self._groups):
                dots = [[e.variable(start) for start in self._start(address, group, numbers)] for address in addresses]
                multiply = self._half_products if self._halves else self._products
                with e.loop(group * size, (group + 1) * size, at_once) as number:
                    multiply([address + number * _VECTOR for address in addresses], own_inputs + number * 4, dots)
                for address, tile_sums, totals in zip(addresses, dots, sums, strict=True):
                    self._add_group(address, group, [dot.get() for dot in tile_sums], numbers, totals)

    def _at_once(self, size: int) -> int:
        """Vectors that are multiplied in a turn of the loop over the `size` vectors of a group: with more, LLVM
        multiplies row by row and keeps the words on the stack."""
        return 2

    def _start(self, address: Value, group: int, numbers: Values) -> list[Value]:
        """What the dot products of a group start with, of each row."""
        e = self._e
        if not self._halves:
            return [e.zero(_I16) for _ in numbers]
        word_sums = e.load(address, _I16, self._starts + _VECTOR * group)
        place = PAIR_PRODUCTS if self._groups == 1 else PAIR_PRODUCTS + 4 + 4 * group
        whole = _whole_rows(len(numbers))
        return [
            e.zero(_I16) if row in whole else word_sums + e.broadcast(at_numbers, I32, ROWS, place)
            for row, at_numbers in enumerate(numbers)
        ]

    def _products(self, addresses: Values, inputs: Value, dots: Sequence[Sequence[Variable]]) -> None:
        """Add products of two pairs of inputs to the sums of each tile and row. addresses: addresses of the tiles'
        words."""
        e = self._e
        for number in range(2):
            words = [e.load(address, _I16, _VECTOR * number) for address in addresses]
            for row in range(len(dots[0])):
                pair = e.broadcast(inputs, I32, ROWS, 2 * GROUP * row + 4 * number)
                for word, tile_sums in zip(words, dots, strict=True):
                    tile_sums[row].set(e.level.dot2(e, tile_sums[row].get(), word, pair))

    def _half_products(self, addresses: Values, inputs: Value, dots: Sequence[Sequence[Variable]]) -> None:
        """The same with one product of sums, and the products of the two pairs of inputs and of words in addition: in
        all rows except `_whole_rows`."""
        e, whole = self._e, _whole_rows(len(dots[0]))
        words = [[e.load(address, _WORDS, _VECTOR * number) for number in range(2)] for address in addresses]
        for row in range(len(dots[0])):
            x, y = (e.broadcast(inputs, I32, ROWS, 2 * GROUP * row + 4 * number).bits(_WORDS) for number in range(2))
            for (v, w), tile_sums in zip(words, dots, strict=True):
                for a, b in ((x, v), (y, w)) if row in whole else ((x + w, y + v),):
                    tile_sums[row].set(e.level.dot2(e, tile_sums[row].get(), a.bits(_I16), b.bits(_I16)))

    def _add_group(self, address: Value, group: int, dots: Values, numbers: Values, totals: Sequence[Variable]) -> None:
        """Add the dot products of a group, scaled. numbers: of each row, the address of its scale and sums."""
        e, place = self._e, place_of_sum(self._groups, group)
        for at_numbers, dot, total in zip(numbers, dots, totals, strict=True):
            value = dot.to_float() * e.load(address, _F16, self._scales + _VECTOR * group)
            if self._offsets is not None:
                input_sum = e.broadcast(at_numbers, I32, ROWS, place).to_float()
                value = e.fma(input_sum, e.load(address, _F16, self._offsets + _VECTOR * group), value)
            total.set(e.fma(value, e.broadcast(at_numbers, F32, ROWS), total.get()))


def _whole_rows(row_tile: int) -> range:
    """The rows, a third of them, whose products are not halved. All of four pipes add, and two multiply: a product of
    sums takes six turns of a pipe, two of them of pipes that multiply, and the two products that it replaces take four
    of these. With only one of both, pipes would wait."""
    return range(0, row_tile // 3 * 3, 3)


class ExpandedCodes(ExpandedWeights):
    def __init__(self, e: Emitter, format: WeightFormat) -> None:
        self._format, self._expander = format, expander(e, format)
        self._layout = layout(format) if self._expander is None else self._expander.layout
        self._codes = IntCodes(e, self._layout, inputs=self.inputs)
        super().__init__(e, GROUP // format.group, has_offset=self._layout.offset is not None)
        self.blocks, self.parts = INPUTS // format.values, format.values // GROUP

    def _write_codes(self, address: Value, out: Value) -> None:
        """Write the words of 32 inputs. address: address of their codes."""
        for pair in sorted(range(self.vectors), key=self._codes.vector):
            self._e.store(self._word(address, pair), out, _VECTOR * pair)

    def _word(self, address: Value, pair: int) -> Value:
        """A pair of codes of 16 outputs, as words. address: address of the codes of 32 inputs."""
        words = self._codes.pair(address, pair).bits(_WORDS)
        return words - self._codes.zero if self._codes.zero else words

    def write_blocks(self, tile: Value, first: Value, count: Value, out: Value) -> None:
        e, expand = self._e, self._expander
        with e.loop(0, count) as number:
            address, factor = tile + (first + number) * block_bytes(self._format), 1.0
            if expand is not None:
                address, factor = expand(address), expand.factor
            self._write(Block(e, self._layout, address, factor), out + number * (self.parts * self.nbytes))

    def _write(self, block: Block, out: Value) -> None:
        e, place = self._e, self._layout
        with e.loop(0, self.parts) as part:
            address, target = block.codes + part * place.part_bytes, out + part * self.nbytes
            sub = block.subs + part * ROWS * self._groups
            e.prefetch(address + PREFETCH_BYTES, place.part_bytes)
            self._write_codes(address, target)
            for group in range(self._groups):
                scale = times_sub(e, block.scale, sub, place.sub_scale, group, signed=True)
                e.store(scale, target, self._scales + _VECTOR * group)
                if block.offset is not None and self._offsets is not None:
                    offset = -times_sub(e, block.offset, sub, place.sub_offset, group)
                    e.store(offset, target, self._offsets + _VECTOR * group)
            self._write_starts(target)


class ExpandedBytes(ExpandedCodes):
    """Codes less their zero point, int8. They are multiplied by inputs plus 128: sums start with what is too much."""

    inputs = Inputs.BYTES
    vectors = GROUP // 4
    has_starts = True

    def _write_codes(self, address: Value, out: Value) -> None:
        zero, bytes_ = self._codes.zero, vector(I8, 4 * ROWS)
        for quad in sorted(range(self.vectors), key=self._codes.vector_of_quad):
            codes = self._codes.quad(address, quad, ROWS).bits(bytes_)
            self._e.store(codes - zero if zero else codes, out, _VECTOR * quad)

    def _pair_products(self, address: Value, group: int) -> Value:
        """128 times the sum of the codes of a group."""
        e, size, total = self._e, self.vectors // self._groups, self._sum(self._e.zero(_I16))
        for quad in range(group * size, (group + 1) * size):
            total.add(e.constant(_I16, 0x01010101), e.load(address, _I16, _VECTOR * quad))
        return total.end() << 7

    def _sum(self, start: Value) -> ByteSum:
        """A sum of products of inputs with codes."""
        format, zero = self._layout.format, self._codes.zero
        most = max(zero, 2**format.bits - 1 - zero) if most_code(format) < 255 else 128
        return self._e.level.sum_of_bytes(self._e, start, 255 * most)

    def _at_once(self, size: int) -> int:
        return min(size, self._sum(self._e.zero(_I16)).at_once)

    def _start(self, address: Value, group: int, numbers: Values) -> list[Value]:
        return [self._e.load(address, _I16, self._starts + _VECTOR * group)] * len(numbers)

    def _products(self, addresses: Values, inputs: Value, dots: Sequence[Sequence[Variable]]) -> None:
        e, count = self._e, self._at_once(self.vectors // self._groups)
        sums = [[self._sum(total.get()) for total in tile_sums] for tile_sums in dots]
        for number in range(count):
            codes = [e.load(address, _I16, _VECTOR * number) for address in addresses]
            for row in range(len(dots[0])):
                fours = e.broadcast(inputs, I32, ROWS, GROUP * row + 4 * number)
                for code, tile_sums in zip(codes, sums, strict=True):
                    tile_sums[row].add(fours, code)
        for total, one in zip(chain(*dots), chain(*sums), strict=True):
            total.set(one.end())


class ExpandedNumbers(ExpandedWeights):
    """Writes numbers of 16 bits as words: integers, and a power of two for each output and 32 inputs.

    A CPU multiplies twice as many words at a time as float32. Memory keeps the numbers of the file; they become words
    as they are multiplied. The power of two is the smallest with which no sum of products with 32 inputs overflows an
    int32: the magnitudes of 32 words add up to 2¹⁷, a word is at most 2¹⁴, and inputs are at most `Inputs.WORDS`. So a
    float16 of at least half the mean magnitude of the 32, or a bfloat16 of at least a sixteenth of it, is an exact
    word. Smaller ones are rounded to the unit that the exact ones have. If one of the 32 is more than an eighth of the
    sum, it counts as the sum of eight of its kind.
    """

    blocks, parts = INPUTS // GROUP, 1

    def __init__(self, e: Emitter, format: WeightFormat) -> None:
        super().__init__(e)
        self._format, self._is_bfloat = format, is_bfloat(format)

    def write_blocks(self, tile: Value, first: Value, count: Value, out: Value) -> None:
        with self._e.loop(0, count) as number:
            self._write(tile + (first + number) * _NUMBER_BYTES, out + number * self.nbytes)

    def _write(self, numbers: Value, out: Value) -> None:
        """Write the words and scales of 32 inputs to `out`. numbers: address of (32, 16) float16 or bfloat16."""
        e = self._e
        e.prefetch(numbers + PREFETCH_BYTES, _NUMBER_BYTES)
        bound = self._bound(numbers)
        exponents = e.fmax(bound, _LEAST).bits(_I16) & _EXPONENT
        power = (-exponents + (2 * _BIAS + _SUM_BITS - 1 << 23)).bits(_F16)
        for pair in range(GROUP // 2):
            low, high = (self._round(numbers, 2 * pair + i, power) for i in (0, 1))
            e.store((high << 16) | (low & 0xFFFF), out, 4 * ROWS * pair)
        scale = (exponents - (_SUM_BITS - 1 << 23)).bits(_F16)
        e.store(scale + (bound - bound), out, self._scales)  # NaN if a number is NaN or infinite
        self._write_starts(out)

    def _round(self, numbers: Value, number: int, power: Value) -> Value:
        """A row of numbers times `power`, to the nearest integer: the lowest 16 bits of int32 (16,)."""
        e = self._e
        row = read_plain(e, numbers, self._format, ROWS, 2 * ROWS * number)
        return e.fma(row, power, e.const_like(_ROUNDING, row)).bits(_I16)

    def _bound(self, numbers: Value) -> Value:
        """Of each output, the sum of the 32 magnitudes, or eight times the largest if that is more: float32 (16,)."""
        e, halves = self._e, vector(I16, ROWS)
        bits = [e.load(numbers, halves, 2 * ROWS * number) & 0x7FFF for number in range(GROUP)]
        largest = self._widen(reduce(e.imax, bits))
        sums = [reduce(Value.__add__, map(self._widen, bits[i::_CHAINS])) for i in range(_CHAINS)]
        total, most = reduce(Value.__add__, sums), largest * float(_SHARE)
        return e.select(total > most, total, most)

    def _widen(self, bits: Value) -> Value:
        return widen(self._e, bits, is_bfloat=self._is_bfloat)
