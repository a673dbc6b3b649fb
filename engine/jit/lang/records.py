"""Records in memory: named tuples with 8 bytes per field, such as a kernel's arguments or rows of a table.

    class Arguments(NamedTuple):
        x: Pointer
        columns: Int64
        eps: Float32

A program makes one from arrays and numbers, by keyword, and packs it; in a kernel that reads it, its fields are values.
"""

from __future__ import annotations

import struct
from ctypes import addressof, c_char
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, get_type_hints

import numpy as np

from polarlm.engine.jit.lang.memory import MemoryEmitter
from polarlm.engine.jit.lang.values import F32, I64, POINTER, Number, Type, Value

Pointer: TypeAlias = Annotated[Any, POINTER]
"""An array, an address, or None for a null pointer."""
Int64: TypeAlias = Annotated[Any, I64]
Float32: TypeAlias = Annotated[Any, F32]

Record = TypeVar("Record", bound=tuple[Any, ...])


class _Layout(NamedTuple):
    types: tuple[Type, ...]
    pointers: tuple[int, ...]  # indices of the fields that are pointers
    struct: struct.Struct


@cache
def _layout(record: type) -> _Layout:
    hints = get_type_hints(record, localns=globals(), include_extras=True)
    types = tuple(hints[name].__metadata__[0] for name in record._fields)  # type: ignore[attr-defined]
    pointers = tuple(number for number, kind in enumerate(types) if kind == POINTER)
    return _Layout(types, pointers, struct.Struct("=" + "".join("f4x" if kind == F32 else "q" for kind in types)))


def pack(record: tuple[Any, ...]) -> bytes:
    """The bytes of the record in memory. Raises struct.error or TypeError if a field has not its declared type."""
    _, pointers, words = _layout(type(record))
    fields = list(record)
    for number in pointers:
        field = fields[number]
        if isinstance(field, np.ndarray):
            fields[number] = _address(field)
        elif field is None:
            fields[number] = 0
    return words.pack(*fields)


def _address(array: np.ndarray) -> int:
    """The address of its data. `ctypes.data` takes three times as long, and is most of a kernel call's overhead."""
    try:
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # read-only, not contiguous, or empty
        return array.ctypes.data


def words(record: tuple[Any, ...]) -> np.ndarray:
    """The packed record as int64, one per field."""
    return np.frombuffer(pack(record), np.int64)


def read(e: MemoryEmitter, record: type[Record], pointer: Value, number: Number = 0) -> Record:
    """The values of record `number` in the table at `pointer`."""
    types = _layout(record).types
    at = pointer if isinstance(number, int) and not number else pointer + number * (8 * len(types))
    return record._make(e.load(at, kind, 8 * place) for place, kind in enumerate(types))  # type: ignore[attr-defined]
