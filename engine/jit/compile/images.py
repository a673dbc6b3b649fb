"""Machine code that is already linked: a process that finds its kernels in the cache does not load LLVM, whose library
takes as much memory as the weights of a small model.

An image is a head (the entry's offset and the machine), then the contents of memory: the code and the constants of an
object file. They refer to each other by relative addresses, so they work at any address where a page begins.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from polarlm.engine.jit.compile.target import machine

_HEAD = struct.Struct("<IHxx")  # the entry's offset, and ELF's number of the machine
_LEAST_ALIGNMENT = 64  # code and constants share no cache line

# ELF of 64 bits, with the numbers of the System V ABI and its supplements for x86-64 and for AArch64 (AAELF64).
_MACHINES = {"x86_64": 62, "aarch64": 183}
_PROGBITS, _SYMTAB, _RELA = 1, 2, 4  # types of sections
_WRITE, _ALLOC, _TLS = 1, 2, 1 << 10  # flags of sections
_DISTANCES = {62: (2, 4), 183: (261,)}  # relocations of 32-bit distances: PC32 and PLT32, PREL32
# Relocations of instructions of AArch64: a distance in pages of 4 KiB; one in words; an address within a page, divided
# by two to the power of the number given.
_PAGES, _JUMPS, _WITHIN = 275, (282, 283), {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}


class _Section(NamedTuple):
    type: int
    flags: int
    offset: int  # offset of its content in the file
    size: int
    link: int  # for a symbol table, the index of the section of names
    info: int  # for relocations, the index of the section that they change
    alignment: int


# The machine, and offset and number of the sections; section; symbol: offset of its name, its section, and its offset
# there; relocation: offset, type, symbol and addend. Fields that are not needed are skipped.
_HEADER, _SECTION = struct.Struct("<18xH20xQ12xH2x"), struct.Struct("<4xIQ8xQQIIQ8x")
_SYMBOL, _RELOCATION = struct.Struct("<I2xHQ8x"), struct.Struct("<QIIq")


def link(code: bytes) -> bytes:
    """The image of an object file of LLVM, for x86-64 or AArch64, whose entry is the function `kernel`.

    Raises ValueError if its code needs more than itself and its constants: functions of a library, writable memory, or
    absolute addresses.
    """
    number, table, count = _HEADER.unpack_from(code)
    sections = [_Section(*fields) for fields in _SECTION.iter_unpack(code[table : table + count * _SECTION.size])]
    places, memory = _lay_out(code, sections)
    (symbol_table,) = (section for section in sections if section.type == _SYMTAB)
    symbols = list(_SYMBOL.iter_unpack(_content(code, symbol_table)))
    names = _content(code, sections[symbol_table.link])

    def name(symbol: tuple[int, ...]) -> str:
        return names[symbol[0] :].split(b"\0", 1)[0].decode("ascii")

    def address(symbol: tuple[int, ...]) -> int:
        """The symbol's offset in the image's memory. Raises ValueError for a symbol that it does not contain."""
        _, section, value = symbol
        if section not in places:
            raise ValueError(f"it needs {name(symbol)!r}, which it does not contain")
        return places[section] + value

    for section in sections:
        if section.type == _RELA and section.info in places:
            for offset, kind, symbol, addend in _RELOCATION.iter_unpack(_content(code, section)):
                place, target = places[section.info] + offset, address(symbols[symbol]) + addend
                word = int.from_bytes(memory[place : place + 4], "little")
                memory[place : place + 4] = _relocate(number, kind, word, place, target).to_bytes(4, "little")
    (kernel,) = (symbol for symbol in symbols if name(symbol) == "kernel")
    return _HEAD.pack(address(kernel), number) + memory


def _content(code: bytes, section: _Section) -> bytes:
    return code[section.offset : section.offset + section.size]


def _lay_out(code: bytes, sections: Sequence[_Section]) -> tuple[dict[int, int], bytearray]:
    """Index of a section → its offset in memory, for the sections that are loaded; and the memory's contents."""
    places: dict[int, int] = {}
    memory = bytearray()
    for number, section in enumerate(sections):
        if not section.flags & _ALLOC or not section.size:
            continue
        if section.type != _PROGBITS or section.flags & (_WRITE | _TLS) or section.alignment > mmap.PAGESIZE:
            raise ValueError(f"it has a section of type {section.type} with flags {section.flags:#x}")
        memory += bytes(-len(memory) % max(section.alignment, _LEAST_ALIGNMENT))
        places[number] = len(memory)
        memory += _content(code, section)
    return places, memory


def _relocate(number: int, kind: int, word: int, place: int, target: int) -> int:
    """The four bytes at offset `place` of an image, which `word` is in the object file, once they refer to `target`.

    number: ELF's, of the machine. Raises ValueError for a kind of relocation that needs more than the image, and for
    places that are out of reach.
    """
    if kind in _DISTANCES[number]:
        return _field(target - place, 32)
    if number == _MACHINES["aarch64"]:
        if kind == _PAGES:
            pages = _field((target >> 12) - (place >> 12), 21)
            return word & ~(0x3 << 29 | 0x7FFFF << 5) | (pages & 3) << 29 | pages >> 2 << 5
        if kind in _JUMPS and not target & 3:
            return word & ~0x3FFFFFF | _field((target - place) >> 2, 26)
        scale = _WITHIN.get(kind)
        if scale is not None and not target & ((1 << scale) - 1):
            return word & ~(0xFFF << 10) | (target & 0xFFF) >> scale << 10
    raise ValueError(f"it has a relocation of type {kind} at {place}")


def _field(number: int, bits: int) -> int:
    """A signed number as the bits of a field. Raises ValueError if they are too few."""
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise ValueError(f"it has a distance of more than {bits} bits")
    return number & (1 << bits) - 1


class LoadedImage:
    """An image in executable, read-only memory; `address` is the entry's.

    The memory is never freed: threads may still run the code after Python's objects are gone. Raises ValueError for
    bytes that are not an image of this machine, OSError if the system does not allow executable memory.
    """

    def __init__(self, image: bytes) -> None:
        size = len(image) - _HEAD.size
        entry, number = _HEAD.unpack_from(image) if size > 0 else (0, 0)
        if not entry < size or number != _MACHINES.get(machine()):
            raise ValueError("it is no image of this machine")
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory[:] = image[_HEAD.size :]
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if protect(address, size, mmap.PROT_READ | mmap.PROT_EXEC):
            reason = os.strerror(ctypes.get_errno())
            raise OSError(f"this system does not allow memory to be executed ({reason})")
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        if (flush := _flush()) is not None:
            flush(address, address + size)
        self.address: int = address + entry


@cache
def _flush() -> Any:
    """libgcc's function that makes written memory visible as instructions, which AArch64 caches on their own; None on
    x86-64, where the processor does that. Raises OSError or AttributeError if the system does not have it."""
    if machine() == "x86_64":
        return None
    function = ctypes.CDLL("libgcc_s.so.1")["__clear_cache"]
    function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p]
    return function


def _is_available() -> bool:
    """Whether code can be linked and loaded here: on Linux, on the two machines, where `_flush` is found."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32 or machine() not in _MACHINES:
        return False
    try:
        _flush()
    except (OSError, AttributeError):
        return False
    return True


AVAILABLE = _is_available()
