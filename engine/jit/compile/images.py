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
from typing import Any, NamedTuple, TypeVar

from polarlm.engine.jit.compile.target import machine

_HEAD = struct.Struct("<IHxx")  # the entry's offset, and ELF's number of the machine
_LEAST_ALIGNMENT = 64  # code and constants share no cache line
_MOST_BYTES = 1 << 24

# ELF, with the numbers of the System V ABI and its supplements for x86-64 and for AArch64 (AAELF64).
_IDENT = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian
_RELOCATABLE = 1
_MACHINES = {"x86_64": 62, "aarch64": 183}
_PROGBITS, _SYMTAB, _RELA, _REL = 1, 2, 4, 9  # types of sections
_WRITE, _ALLOC, _EXECUTE, _TLS = 1, 2, 4, 1 << 10  # flags of sections
_DISTANCES = {62: (2, 4), 183: (261,)}  # relocations of 32-bit distances: PC32 and PLT32, PREL32
# Relocations of instructions of AArch64: a distance in pages of 4 KiB; one in words; an address within a page, divided
# by two to the power of the number given.
_PAGES, _JUMPS, _WITHIN = 275, (282, 283), {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}


class _Header(NamedTuple):
    type: int
    machine: int
    sections: int  # offset of the section table in the file
    section_bytes: int
    section_count: int


class _Section(NamedTuple):
    type: int
    flags: int
    offset: int  # offset of its content in the file
    size: int
    link: int  # for a symbol table, the index of the section of names
    info: int  # for relocations, the index of the section that they change
    alignment: int


class _Symbol(NamedTuple):
    name: int  # offset among the names
    section: int
    value: int  # offset in the section


class _Relocation(NamedTuple):
    offset: int
    type: int
    symbol: int
    addend: int


# Fields that are not needed are skipped.
_HEADER, _SECTION = struct.Struct("<16xHH20xQ10xHH2x"), struct.Struct("<4xIQ8xQQIIQ8x")
_SYMBOL, _RELOCATION = struct.Struct("<I2xHQ8x"), struct.Struct("<QIIq")
_Record = TypeVar("_Record")


def link(code: bytes) -> bytes:
    """The image of an object file whose entry is the function `kernel`.

    Raises ValueError if it is not an object file of x86-64 or AArch64, or if its code needs more than itself and its
    constants: functions of a library, writable memory, or absolute addresses.
    """
    header = _Header(*_HEADER.unpack(_content(code, 0, _HEADER.size)))
    kind = header.type, header.section_bytes, header.machine in _DISTANCES
    if not code.startswith(_IDENT) or kind != (_RELOCATABLE, _SECTION.size, True):
        raise ValueError("it is no object file of x86-64 or AArch64")
    content = _content(code, header.sections, header.section_count * _SECTION.size)
    sections = [_Section(*fields) for fields in _SECTION.iter_unpack(content)]
    places, memory = _lay_out(code, sections)
    symbols, names = _symbols(code, sections)

    def address(symbol: _Symbol) -> int:
        """The symbol's offset in the image's memory. Raises ValueError for a symbol that it does not contain."""
        if symbol.section not in places or symbol.value >= sections[symbol.section].size:
            raise ValueError(f"it needs {_name(symbol, names)!r}, which it does not contain")
        return places[symbol.section] + symbol.value

    for section in sections:
        if section.type not in (_RELA, _REL) or section.info not in places:
            continue
        if section.type == _REL:
            raise ValueError("it has relocations without addends")
        for fields in _RELOCATION.iter_unpack(_whole(code, section, _RELOCATION)):
            relocation = _Relocation(*fields)
            if relocation.offset + 4 > sections[section.info].size:
                raise ValueError(f"it has a relocation at {relocation.offset}, after its section")
            at = places[section.info] + relocation.offset
            to = address(_item(symbols, relocation.symbol)) + relocation.addend
            word = int.from_bytes(memory[at : at + 4], "little")
            memory[at : at + 4] = _relocated(header.machine, relocation.type, word, at, to).to_bytes(4, "little")

    kernels = [symbol for symbol in symbols if _name(symbol, names) == "kernel"]
    if len(kernels) != 1 or not _item(sections, kernels[0].section).flags & _EXECUTE:
        raise ValueError("it has no function 'kernel'")
    return _HEAD.pack(address(kernels[0]), header.machine) + memory


def _relocated(machine: int, kind: int, word: int, at: int, to: int) -> int:
    """The four bytes at offset `at` of an image, of which `word` is what the object file has, once they refer to `to`.

    Raises ValueError for a kind of relocation that needs more than the image, and for places that are out of reach.
    """
    if kind in _DISTANCES[machine]:
        return _field(to - at, 32)
    if machine == _MACHINES["aarch64"]:
        if kind == _PAGES:
            pages = _field((to >> 12) - (at >> 12), 21)
            return word & ~(0x3 << 29 | 0x7FFFF << 5) | (pages & 3) << 29 | pages >> 2 << 5
        if kind in _JUMPS and not to & 3:
            return word & ~0x3FFFFFF | _field((to - at) >> 2, 26)
        scale = _WITHIN.get(kind)
        if scale is not None and not to & ((1 << scale) - 1):
            return word & ~(0xFFF << 10) | (to & 0xFFF) >> scale << 10
    raise ValueError(f"it has a relocation of type {kind} at {at}")


def _field(number: int, bits: int) -> int:
    """A signed number as the bits of a field. Raises ValueError if they are too few."""
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise ValueError(f"it has a distance of more than {bits} bits")
    return number & (1 << bits) - 1


def _lay_out(code: bytes, sections: Sequence[_Section]) -> tuple[dict[int, int], bytearray]:
    """Index of a section → its offset in memory, for the sections that are loaded; and the memory's contents."""
    places: dict[int, int] = {}
    memory = bytearray()
    for number, section in enumerate(sections):
        if not section.flags & _ALLOC or not section.size:
            continue
        if section.type != _PROGBITS or section.flags & (_WRITE | _TLS):
            raise ValueError(f"it has a section of type {section.type} with flags {section.flags:#x}")
        alignment = max(section.alignment, _LEAST_ALIGNMENT)
        if alignment & (alignment - 1) or alignment > mmap.PAGESIZE:
            raise ValueError(f"it has a section that is aligned to {alignment}")
        memory += bytes(-len(memory) % alignment)
        places[number] = len(memory)
        memory += _content(code, section.offset, section.size)
        if len(memory) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB of code")
    return places, memory


def _symbols(code: bytes, sections: Sequence[_Section]) -> tuple[list[_Symbol], bytes]:
    """The symbols of an object file, and the string table of their names."""
    tables = [section for section in sections if section.type == _SYMTAB]
    if len(tables) != 1:
        raise ValueError(f"it has {len(tables)} tables of symbols")
    names = _item(sections, tables[0].link)
    symbols = [_Symbol(*fields) for fields in _SYMBOL.iter_unpack(_whole(code, tables[0], _SYMBOL))]
    return symbols, _content(code, names.offset, names.size)


def _name(symbol: _Symbol, names: bytes) -> str:
    return names[symbol.name :].split(b"\0", 1)[0].decode("ascii", "replace")


def _whole(code: bytes, section: _Section, record: struct.Struct) -> bytes:
    """The content of a section, which must be a whole number of records. Raises ValueError."""
    if section.size % record.size:
        raise ValueError(f"it has a section of {section.size} bytes for records of {record.size}")
    return _content(code, section.offset, section.size)


def _content(code: bytes, offset: int, nbytes: int) -> bytes:
    if offset + nbytes > len(code):
        raise ValueError("it is too short")
    return code[offset : offset + nbytes]


def _item(records: Sequence[_Record], number: int) -> _Record:
    if number >= len(records):
        raise ValueError(f"index {number} out of range ({len(records)} entries)")
    return records[number]


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
        system, private = _system(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = system.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
        if memory == ctypes.c_void_p(-1).value:
            raise _error("there is no memory for it")
        ctypes.memmove(memory, image[_HEAD.size :], size)
        if system.mprotect(memory, size, mmap.PROT_READ | mmap.PROT_EXEC):
            error = _error("this system does not allow memory to be executed")
            system.munmap(memory, size)
            raise error
        if (flush := _flush()) is not None:
            flush(memory, memory + size)
        self.address: int = memory + entry


@cache
def _system() -> Any:
    """The C library, with the signatures of mmap, munmap and mprotect."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


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


def _error(what: str) -> OSError:
    return OSError(f"{what} ({os.strerror(ctypes.get_errno())})")
