"""Kernels, and records in memory: named tuples with 8 bytes per field, such as their arguments or rows of a table.

    class Arguments(NamedTuple):
        x: Pointer
        columns: Int64
        eps: Float32

A program makes one from arrays and numbers, by keyword, and packs it; in a kernel that reads it, its fields are values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, get_type_hints

import numpy as np

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I64, POINTER, Number, Type, Value

Pointer: TypeAlias = Annotated[Any, POINTER]
"""An array, an address, or None for a null pointer."""
Int64: TypeAlias = Annotated[Any, I64]
Float32: TypeAlias = Annotated[Any, F32]

Record = TypeVar("Record", bound=tuple[Any, ...])


@cache
def _layout(record: type) -> tuple[tuple[Type, ...], tuple[int, ...], struct.Struct]:
    """The types of the fields, the places of pointers among them, and how they are packed."""
    hints = get_type_hints(record, localns=globals(), include_extras=True)
    types = tuple(hints[name].__metadata__[0] for name in record._fields)  # type: ignore[attr-defined]
    pointers = tuple(number for number, kind in enumerate(types) if kind == POINTER)
    return types, pointers, struct.Struct("=" + "".join("f4x" if kind == F32 else "q" for kind in types))


def pack(record: tuple[Any, ...]) -> bytes:
    """The bytes of the record in memory. Raises struct.error or TypeError if a field has not its declared type."""
    _, pointers, words = _layout(type(record))
    fields = list(record)
    for number in pointers:
        field = fields[number]
        if isinstance(field, np.ndarray):
            fields[number] = address(field)
        elif field is None:
            fields[number] = 0
    return words.pack(*fields)


_byte_of = c_char.from_buffer  # looking it up takes as long as the call


def address(array: np.ndarray) -> int:
    """The address of its data. `ctypes.data` takes three times as long, and is most of a kernel call's overhead."""
    try:
        return addressof(_byte_of(array))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # read-only, not contiguous, or empty
        return array.ctypes.data


def words(record: tuple[Any, ...]) -> np.ndarray:
    """The packed record as int64, one per field; writable."""
    return np.frombuffer(bytearray(pack(record)), np.int64)


def read(e: Emitter, record: type[Record], pointer: Value, number: Number = 0) -> Record:
    """The values of record `number` in the table at `pointer`."""
    types, _, _ = _layout(record)
    start = pointer if isinstance(number, int) and not number else pointer + number * (8 * len(types))
    return record._make(e.load(start, kind, 8 * place) for place, kind in enumerate(types))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Kernel(Generic[Record]):
    """A function of arguments that computes units begin, …, end − 1 of an op.

    name: unique; it includes everything that the kernel is specialized for. emit(e, arguments, begin, end, scratch)
    emits its body. arguments: the record whose values `emit` gets. scratch: bytes of the calling
    thread's memory that it needs, aligned to 64. Units may run in any order, on any threads.
    """

    name: str
    emit: Callable[[Emitter, Record, Value, Value, Value], None]
    arguments: type[Record]
    scratch: int = 0

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self.name == other.name

    def pack(self, arguments: Record) -> np.ndarray:
        """The arguments as the kernel reads them: int64, 8 bytes per field."""
        assert type(arguments) is self.arguments, f"{self.name} takes {self.arguments.__name__}, not {arguments}"
        return words(arguments)
