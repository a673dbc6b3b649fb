"""The level of x86-64 with AMX, whose registers are tiles: 16 rows of 64 bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polarlm.engine.jit.isa.x86 import Avx512Vbmi
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import I8, I16, Value, vector

_ROWS, _BYTES = 16, 64  # a tile's
_SUM, _LEFT, _RIGHT = 0, (1, 2), 3  # tiles
_PALETTE, _PLACE_OF_BYTES, _PLACE_OF_ROWS = 1, 16, 48  # a configuration's, which has 64 bytes


class Avx512Amx(Avx512Vbmi):
    """AVX-512 with VNNI and VBMI, and AMX for bfloat16."""

    name = "avx512-amx"
    needs = (*Avx512Vbmi.needs, "amx-tile", "amx-bf16")
    matrix_rows = _ROWS

    def word_table(self, e: Emitter, entries: Sequence[int]) -> Callable[[Value], Value]:
        words, half = vector(I16, 32), 32
        if len(entries) <= half:
            table = e.constant(words, (*entries, *[0] * (half - len(entries))))
            return lambda index: e.intrinsic("llvm.x86.avx512.permvar.hi.512", words, table, index)
        low, high = (e.constant(words, tuple(entries[first : first + half])) for first in (0, half))
        return lambda index: e.intrinsic("llvm.x86.avx512.vpermi2var.hi.512", words, low, index, high)

    def begin_tiles(self, e: Emitter, pairs: int) -> None:
        shapes = {_SUM: (_ROWS, _BYTES), _RIGHT: (pairs, _BYTES), **dict.fromkeys(_LEFT, (_ROWS, 4 * pairs))}
        configuration = bytearray(64)
        configuration[0] = _PALETTE
        for tile, (rows, nbytes) in shapes.items():
            configuration[_PLACE_OF_BYTES + 2 * tile], configuration[_PLACE_OF_ROWS + tile] = nbytes, rows
        e.intrinsic("llvm.x86.ldtilecfg", None, e.constant_bytes(bytes(configuration)))

    def end_tiles(self, e: Emitter) -> None:
        """The system no longer saves tiles when it switches threads."""
        e.intrinsic("llvm.x86.tilerelease", None)

    def multiply_tiles(self, e: Emitter, left: Sequence[Value], right: Value, out: Value) -> None:
        total, factor, stride = e.constant(I8, _SUM), e.constant(I8, _RIGHT), e.i64(_BYTES)
        e.intrinsic("llvm.x86.tileloadd64", None, factor, right, stride)
        e.intrinsic("llvm.x86.tilezero", None, total)
        for tile, at in zip(_LEFT, left, strict=False):
            own = e.constant(I8, tile)
            e.intrinsic("llvm.x86.tileloadd64", None, own, at, stride)
            e.intrinsic("llvm.x86.tdpbf16ps", None, total, own, factor)
        e.intrinsic("llvm.x86.tilestored64", None, total, out, stride)


LEVELS = (Avx512Amx(),)
