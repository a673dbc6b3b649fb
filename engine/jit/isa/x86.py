"""The levels of x86-64: AVX2 and AVX-512, with or without VNNI's dot products, VBMI's table lookups, and AMX, whose
registers are tiles: 16 rows of 64 bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from polarlm.engine.jit.isa.generic import NativeHalves
from polarlm.engine.jit.lang import BF16, F32, I8, I16, I32, Emitter, Level, Type, Value, Values, vector
from polarlm.engine.jit.lang.level import ByteSum

_PAIR_PRODUCTS = {32: "avx2.pmadd.ub.sw", 64: "avx512.pmaddubs.w.512"}
_WORD_PRODUCTS = {32: "avx2.pmadd.wd", 64: "avx512.pmaddw.d.512"}
_SCALED_PRODUCTS = {32: "avx2.pmul.hr.sw", 64: "avx512.pmul.hr.sw.512"}
_PACK = {32: "avx2.packuswb", 64: "avx512.packuswb.512"}
_SHUFFLE = {32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}

_TILES, _ROWS, _BYTES = 8, 16, 64  # a tile's rows, and their bytes
_PALETTE, _PLACE_OF_BYTES, _PLACE_OF_ROWS = 1, 16, 48  # a configuration's, which has 64 bytes

_MOST_WORD = 2**15 - 1
_CURRENT_ROUNDING = 4

_LINE = 16  # entries of a part of a table
_PARTS = 8  # parts: 128 entries, all of whose indices are ≥ 0 as signed bytes


class Avx2(NativeHalves):
    name = "avx2"
    machine = "x86_64"
    cpu = "x86-64-v3"
    needs: tuple[str, ...] = ("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe", "popcnt")
    lanes = 8
    code_tiles: tuple[tuple[int, int], ...] = ((3, 1), (4, 1))
    orders_sums = True
    float_tile = 6, 1
    unpacks_first = True
    byte_register = 32
    fuses = True
    most_code = 63  # two products with a larger one may not fit an int16
    multiplies_words = True

    def map_registers(self, e: Emitter, operation: Callable[..., Value], *operands: Value) -> Value:
        """The joined results of operation(bytes of a register, *parts of the operands), register by register."""
        first = operands[0]
        width = 64 if first.lanes * first.element.width == 8 * self.byte_register == 512 else 32
        return e.map_parts(8 * width // first.element.width, partial(operation, width), *operands)

    def _call_intrinsic(self, e: Emitter, names: dict[int, str], element: Type, *operands: Value) -> Value:
        """The results, of this element, of the intrinsic for registers of each size."""

        def call(width: int, *parts: Value) -> Value:
            return e.intrinsic(f"llvm.x86.{names[width]}", vector(element, 8 * width // element.width), *parts)

        return self.map_registers(e, call, *operands)

    def dot4(self, e: Emitter, total: Value, unsigned: Value, signed: Value, fits: bool = False) -> Value:
        if not fits:  # widen bytes to int16: bytes of even index, then bytes of odd index
            words = vector(I16, 2 * total.lanes)
            a, b = unsigned.bits(words), signed.bits(words)
            total = self.dot2(e, total, (a & 255).bits(total.type), (b << 8).ashr(8).bits(total.type))
            return self.dot2(e, total, (a >> 8).bits(total.type), b.ashr(8).bits(total.type))

        def add(width: int, total: Value, unsigned: Value, signed: Value) -> Value:
            bytes_, words = vector(I8, width), vector(I16, width // 2)
            name = f"llvm.x86.{_PAIR_PRODUCTS[width]}"
            products = e.intrinsic(name, words, unsigned.bits(bytes_), signed.bits(bytes_))
            name = f"llvm.x86.{_WORD_PRODUCTS[width]}"
            return total + e.intrinsic(name, total.type, products, e.constant(words, 1))

        return self.map_registers(e, add, total, unsigned, signed)

    def sum_of_bytes(self, e: Emitter, start: Value, most: int) -> ByteSum:
        return _PairSum(e, start, most)

    def dot2(self, e: Emitter, total: Value, a: Value, b: Value) -> Value:
        def add(width: int, total: Value, a: Value, b: Value) -> Value:
            words = vector(I16, width // 2)
            name = f"llvm.x86.{_WORD_PRODUCTS[width]}"
            return total + e.intrinsic(name, total.type, a.bits(words), b.bits(words))

        return self.map_registers(e, add, total, a, b)

    def pair_products(self, e: Emitter, unsigned: Value, signed: Value) -> Value:
        return self._call_intrinsic(e, _PAIR_PRODUCTS, I16, unsigned, signed)

    def scaled_product(self, e: Emitter, a: Value, b: Value) -> Value:
        return self._call_intrinsic(e, _SCALED_PRODUCTS, I16, a, b)

    def join_words(self, e: Emitter, low: Value, high: Value) -> Value:
        return self._call_intrinsic(e, _PACK, I8, low, high)

    def lookup_in_lanes(self, e: Emitter, table: Value, index: Value) -> Value:
        return self._call_intrinsic(e, _SHUFFLE, I8, table, index)

    def table(self, e: Emitter, pointer: Value, entries: int) -> Callable[[Value], Value]:
        parts = self._parts(e, pointer, entries)
        return lambda index: e.join(_lookup_all(e, [parts], self._registers(e, index))[0])

    def pair_table(self, e: Emitter, first: bytes, second: bytes) -> Callable[[Value], tuple[Value, Value]]:
        if _is_mirrored(first, second):
            return self._mirrored_table(e, first, second)
        tables = [self._parts(e, e.constant_bytes(side), len(side)) for side in (first, second)]

        def find(index: Value) -> tuple[Value, Value]:
            a, b = _lookup_all(e, tables, self._registers(e, index))
            return e.join(a), e.join(b)

        return find

    def _registers(self, e: Emitter, index: Value) -> list[Value]:
        size = self.byte_register
        return [e.part(index, first, size) for first in range(0, index.lanes, size)]

    def _parts(self, e: Emitter, pointer: Value, entries: int) -> list[Value]:
        """A table cut into parts of 16 entries for `pshufb`, which gives 0 for an index whose highest bit is set.

        A part holds its entries xor the previous part's entries. Before each next part 16 is subtracted from the index,
        and the xor of all lookups is the entry: parts above the index's own give 0, since the index is negative there.
        """
        lines = [e.load(pointer, vector(I8, 16), first) for first in range(0, entries, _LINE)]
        steps = [line ^ lines[i - 1] if i % _PARTS else line for i, line in enumerate(lines)]
        return [e.shuffle(step, step, [i % 16 for i in range(self.byte_register)]) for step in steps]

    def _mirrored_table(self, e: Emitter, first: bytes, second: bytes) -> Callable[[Value], tuple[Value, Value]]:
        """`pair_table` where the second half of the tables is the first one's image (`_is_mirrored`).

        Half of the parts are looked up. What the index's highest bit changes: the second table's sign, and the entries
        of the first one's last part.
        """
        half = len(first) // 2
        last = bytes(a ^ b for a, b in zip(first[half - _LINE : half], first[-_LINE:], strict=True))
        tables = [self._parts(e, e.constant_bytes(table), half) for table in (first[half:], second[:half])]
        (change,) = self._parts(e, e.constant_bytes(last), _LINE)

        def find(index: Value) -> tuple[Value, Value]:
            pieces = self._registers(e, index)
            low = [piece & (half - 1) for piece in pieces]
            a, b = _lookup_all(e, tables, low)
            for i, (piece, slot) in enumerate(zip(pieces, low, strict=True)):
                is_image = piece + (128 - half) if half < 128 else piece  # its highest bit
                byte = _shuffle_bytes(e, change, (slot - (half - _LINE)) | is_image)  # in the last part, and no image
                a[i] = a[i] ^ byte
                sign = is_image if half < 128 else is_image | 1  # not 0
                b[i] = e.intrinsic("llvm.x86.avx2.psign.b", piece.type, b[i], sign)
            return e.join(a), e.join(b)

        return find


class _PairSum(ByteSum):
    """Products are added in pairs as int16, as many as fit, and then these in pairs as int32."""

    def __init__(self, e: Emitter, start: Value, most: int) -> None:
        super().__init__(partial(e.level.dot2, e), start)
        self.at_once = _MOST_WORD // (2 * most)
        self._e, self._pairs, self._count = e, e.zero(start.type), 0

    def add(self, a: Value, b: Value) -> None:
        e, bytes_ = self._e, vector(I8, 4 * a.lanes)
        products = e.level.pair_products(e, a.bits(bytes_), b.bits(bytes_))
        pairs = products if self._count == 0 else self._pairs + products
        self._pairs = e.order_sum(pairs.bits(self._total.type)).bits(pairs.type)
        self._count += 1
        if self._count == self.at_once:
            self.end()

    def end(self) -> Value:
        if self._count:
            lanes = self._total.type
            super().add(self._pairs.bits(lanes), self._e.constant(self._pairs.type, 1).bits(lanes))
            self._count = 0
        return self._total


def _is_mirrored(first: bytes, second: bytes) -> bool:
    """Whether entries of the tables' second halves equal the first halves, but for the sign of `second`, and for
    the last 16 of `first`."""
    half = len(first) // 2
    return half > _LINE and all(
        (a == b or i >= half - _LINE) and (c + d) % 256 == 0
        for i, (a, b, c, d) in enumerate(zip(first[:half], first[half:], second[:half], second[half:], strict=True))
    )


def _shuffle_bytes(e: Emitter, table: Value, index: Value) -> Value:
    return e.intrinsic(f"llvm.x86.{_SHUFFLE[index.lanes]}", index.type, table, index)


def _lookup_all(e: Emitter, tables: Sequence[Values], pieces: Values) -> list[list[Value]]:
    """The bytes that registers of indices look up in each table. Each part is used for all registers in turn."""
    halves = range(0, len(tables[0]), _PARTS)
    low = [piece & 127 for piece in pieces] if len(halves) > 1 else pieces
    totals: dict[tuple[int, int, int], Value] = {}
    for number in range(min(_PARTS, len(tables[0]))):
        indices = [piece - 16 * number for piece in low] if number else low
        for (place, table), first in product(enumerate(tables), halves):
            for i, piece in enumerate(indices):
                entry = _shuffle_bytes(e, table[first + number], piece)
                before = totals.get((place, first, i))
                totals[place, first, i] = entry if before is None else before ^ entry
    results = []
    for place in range(len(tables)):
        entries = [totals[place, 0, i] for i in range(len(pieces))]
        if len(halves) > 1:
            entries = [e.select(piece < 0, totals[place, _PARTS, i], entries[i]) for i, piece in enumerate(pieces)]
        results.append(entries)
    return results


class _Vnni(Avx2):
    """Dot products of bytes or of int16, added to a total, are one instruction."""

    most_code = 255

    def sum_of_bytes(self, e: Emitter, start: Value, most: int) -> ByteSum:
        return Level.sum_of_bytes(self, e, start, most)

    def dot4(self, e: Emitter, total: Value, unsigned: Value, signed: Value, fits: bool = False) -> Value:
        return self._dot(e, "vpdpbusd", total, unsigned, signed)

    def dot2(self, e: Emitter, total: Value, a: Value, b: Value) -> Value:
        return self._dot(e, "vpdpwssd", total, a, b)

    def _dot(self, e: Emitter, name: str, *operands: Value) -> Value:
        def add(width: int, *registers: Value) -> Value:
            return e.intrinsic(f"llvm.x86.avx512.{name}.{8 * width}", registers[0].type, *registers)

        return self.map_registers(e, add, *operands)


class Avx2Vnni(_Vnni):
    name = "avx2-vnni"
    needs = (*Avx2.needs, "avxvnni")
    wishes = ("+fast-dpwssd",)  # vpdpwssd instead of a product and a sum
    orders_sums = False


class Avx512(Avx2):
    name = "avx512"
    cpu = "x86-64-v4"
    needs = (*Avx2.needs, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
    wishes: tuple[str, ...] = ("-prefer-256-bit",)  # use 512-bit registers
    lanes = 16
    registers = 32
    code_tiles: tuple[tuple[int, int], ...] = ((8, 1),)
    float_tile = 6, 4
    orders_sums = False  # registers have room
    unpacks_first = False
    byte_register = 64

    def pair_table(self, e: Emitter, first: bytes, second: bytes) -> Callable[[Value], tuple[Value, Value]]:
        """With 64 or more entries, both bytes of an entry are looked up as an int16, for 32 indices at a time."""
        if len(first) < 64:
            return super().pair_table(e, first, second)
        both = e.constant_bytes(bytes(byte for entry in zip(first, second, strict=True) for byte in entry))
        parts = [e.load(both, vector(I16, 32), 64 * i) for i in range(len(first) // 32)]

        def find(index: Value) -> tuple[Value, Value]:
            even = index.bits(vector(I16, 32))
            low, high = _look_up(e, "hi", parts, even), _look_up(e, "hi", parts, even >> 8)
            a, b = (low & 255) | (high << 8), (low >> 8) | (high & -256)
            return a.bits(index.type), b.bits(index.type)

        return find

    def float_table(self, e: Emitter, entries: Sequence[float]) -> Callable[[Value], Value]:
        parts, kind = max(2, 1 << (len(entries) - 1).bit_length() - 4), vector(F32, 16)
        filled = [*entries, *[0.0] * (16 * parts - len(entries))]
        table = [e.constant(kind, tuple(filled[first : first + 16])) for first in range(0, len(filled), 16)]
        return lambda index: _look_up(e, "ps", table, index)


def _look_up(e: Emitter, element: str, table: Values, index: Value) -> Value:
    """The entries at the indices, int16 (32,) or int32 (16,), whose bits above those of the last entry are ignored."""
    name = f"llvm.x86.avx512.vpermi2var.{element}.512"
    parts = [e.intrinsic(name, a.type, a, index, b) for a, b in zip(table[::2], table[1::2], strict=True)]
    bit = 2 * index.lanes
    while len(parts) > 1:
        is_upper = (index & bit).equals(bit)
        parts = [e.select(is_upper, b, a) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        bit *= 2
    return parts[0]


class Avx512Vnni(_Vnni, Avx512):
    name = "avx512-vnni"
    needs: tuple[str, ...] = (*Avx512.needs, "avx512vnni")
    wishes = (*Avx512.wishes, *Avx2Vnni.wishes)
    code_tiles = (8, 1), (6, 2)  # a dot product needs no register but its sum's
    split_rows = 4


class Avx512Vbmi(Avx512Vnni):
    name = "avx512-vbmi"
    needs = (*Avx512Vnni.needs, "avx512vbmi")
    wide_tables = True

    def table(self, e: Emitter, pointer: Value, entries: int) -> Callable[[Value], Value]:
        """With more than 16 entries, one instruction looks up among 64 or 128 of them."""
        if entries <= 16:
            return super().table(e, pointer, entries)
        size = min(entries, 64)
        parts = [e.load(pointer, vector(I8, size), first) for first in range(0, entries, size)]
        parts = [e.shuffle(part, part, [lane % size for lane in range(64)]) if size < 64 else part for part in parts]
        return lambda index: e.map_parts(64, partial(_bytes, e, parts), index)

    def pair_table(self, e: Emitter, first: bytes, second: bytes) -> Callable[[Value], tuple[Value, Value]]:
        return Level.pair_table(self, e, first, second)


class Avx512Zen(Avx512Vbmi):
    """The same on AMD's CPUs, which multiply words in half of their pipes and add them in all. SSE4a tells them: no
    other CPU has it."""

    name = "avx512-zen"
    needs = (*Avx512Vbmi.needs, "sse4a")
    unpacks_first = True
    halves_products = True
    near_rows = 2


def _bytes(e: Emitter, table: Values, index: Value) -> Value:
    if len(table) == 1:
        return e.intrinsic("llvm.x86.avx512.permvar.qi.512", index.type, table[0], index)
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    low = e.intrinsic(name, index.type, table[0], index, table[1])
    if len(table) == 2:
        return low
    high = e.intrinsic(name, index.type, table[2], index, table[3])
    return e.select(index < 0, high, low)


class AmxTiles:
    """Eight registers, by their numbers, of 16 rows of 64 bytes. Between `begin` and `end` a kernel may use them.

    Of a product, the left matrix is bfloat16 (16, 32), the right one bfloat16 (16, 16, 2), a pair of inputs for each
    column, and the sum float32 (16, 16).
    """

    def begin(self, e: Emitter) -> None:
        configuration = bytearray(64)
        configuration[0] = _PALETTE
        for tile in range(_TILES):
            configuration[_PLACE_OF_BYTES + 2 * tile], configuration[_PLACE_OF_ROWS + tile] = _BYTES, _ROWS
        e.intrinsic("llvm.x86.ldtilecfg", None, e.constant_bytes(bytes(configuration)))

    def end(self, e: Emitter) -> None:
        """The system no longer saves the registers when it switches threads."""
        e.intrinsic("llvm.x86.tilerelease", None)

    def clear(self, e: Emitter, number: int) -> None:
        e.intrinsic("llvm.x86.tilezero", None, e.constant(I8, number))

    def load(self, e: Emitter, number: int, address: Value, stride: Value | int = _BYTES) -> None:
        """stride: bytes from row to row."""
        e.intrinsic("llvm.x86.tileloadd64", None, e.constant(I8, number), address, _int64(e, stride))

    def store(self, e: Emitter, number: int, address: Value, stride: Value | int = _BYTES) -> None:
        e.intrinsic("llvm.x86.tilestored64", None, e.constant(I8, number), address, _int64(e, stride))

    def add_product(self, e: Emitter, total: int, left: int, right: int) -> None:
        """total += left · right, in float32. Subnormal numbers count as 0."""
        e.intrinsic("llvm.x86.tdpbf16ps", None, *(e.constant(I8, number) for number in (total, left, right)))

    def word_table(self, e: Emitter, entries: Sequence[int]) -> Callable[[Value], Value]:
        """A function that looks up int16 (32,) in up to 64 int16."""
        words, half = vector(I16, 32), 32
        if len(entries) <= half:
            table = e.constant(words, (*entries, *[0] * (half - len(entries))))
            return lambda index: e.intrinsic("llvm.x86.avx512.permvar.hi.512", words, table, index)
        low, high = (e.constant(words, tuple(entries[first : first + half])) for first in (0, half))
        return lambda index: e.intrinsic("llvm.x86.avx512.vpermi2var.hi.512", words, low, index, high)


def _int64(e: Emitter, number: Value | int) -> Value:
    return e.i64(number) if isinstance(number, int) else number


class Avx512Amx(Avx512Vbmi):
    """And conversions to bfloat16."""

    name = "avx512-amx"
    needs = (*Avx512Vbmi.needs, "avx512bf16", "amx-tile", "amx-bf16")
    matrices = AmxTiles()

    def to_bfloat(self, e: Emitter, low: Value, high: Value) -> Value:
        both = e.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector(BF16, 32), high, low)
        return both.bits(vector(I16, 32))

    def times_power(self, e: Emitter, x: Value, n: Value) -> Value:
        options = e.zero(x.type), e.constant(I16, -1), e.constant(I32, _CURRENT_ROUNDING)
        return e.intrinsic("llvm.x86.avx512.mask.scalef.ps.512", x.type, x, n, *options)


# In ascending order. A level is a subset of every later one, except for avx2-vnni and AMD's.
LEVELS = Avx2(), Avx2Vnni(), Avx512(), Avx512Vnni(), Avx512Vbmi(), Avx512Zen(), Avx512Amx()
