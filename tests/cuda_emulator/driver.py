"""Launches the kernels of a CUDA text on NumPy arrays."""

from __future__ import annotations

import ctypes
import math
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.backends.cuda.device import Addresses
from polarlm.engine.backends.cuda.device.kernel_source import waits
from tests.cuda_emulator.build import kernel_names, library, machine

# NumPy knows no bfloat16: its bits travel as uint16.
_DTYPES = {"b2": "u2"}
_LAUNCHES = threading.Lock()  # there is one machine


class EmulatorError(AssertionError):
    """A kernel did what it may not: kernel, file and line, thread, and what it did."""


class Traffic(NamedTuple):
    """The accesses of one instruction in a launch. place: for `Program.place`. used: wavefronts, of shared memory, or
    sectors of 32 bytes. least: of any order of the same bytes."""

    place: int
    is_shared: bool
    requests: int
    used: int
    least: int


class Program:
    """The kernels of one text (see `engine.backends.cuda.device.kernel_source.source`).

    checked: stop at the first race, access out of bounds, misaligned vector access, load of shared memory that
    nobody has written, undefined shift or conversion. Without checks a launch takes less than half the time, and a
    kernel that writes out of bounds may take the process with it.
    """

    def __init__(self, text: str, *, checked: bool = True):
        self._text, self._checked = text, checked
        path = library(text, checked)
        self._machine = _open_machine()
        self._library = ctypes.CDLL(str(path))
        self._waits = {name: waits(text, name) for name in kernel_names(text)}

    @property
    def static_shared(self) -> int:
        """Bytes of static shared memory of the text."""
        start, stop = (ctypes.c_void_p * 4).in_dll(self._library, "emulator_library")[2:]
        return (stop or 0) - (start or 0)

    def signature(self, name: str) -> list[str]:
        """The types of a kernel's parameters, as `signature.h` writes them."""
        signature = getattr(self._library, f"emulator_signature_{name}")
        signature.restype = ctypes.c_char_p
        return signature().decode().split(",")

    def launch(
        self, name: str, grid: Sequence[int], block: Sequence[int], *args: Any, shared: int = 0, seed: int = 0
    ) -> None:
        """Run kernel `name` over grid and block (1 to 3 sizes each); arrays that it may write are changed in place.

        args: arrays for pointers (views keep their strides and share memory with others of the same base), None for a
        null pointer, `Addresses` of arrays, NumPy scalars for numbers; bfloat16 as uint16. shared: bytes of dynamic
        shared memory.
        seed: the order of threads and blocks: 0 forward, 1 backward, others random.
        A kernel that `waits` may use no array before it does, but those that are read-only in NumPy: no launch writes
        them.
        EmulatorError when an argument does not fit the kernel's signature, or the kernel does something wrong.
        """
        with _LAUNCHES:
            codes = self.signature(name)
            if len(codes) != len(args):
                raise EmulatorError(f"{name}: takes {len(codes)} arguments, not {len(args)}")
            most, threads = getattr(self._library, f"emulator_most_threads_{name}")(), math.prod(block)
            if threads > most:
                raise EmulatorError(f"{name}: launched with {threads} threads in a block, its launch bounds are {most}")
            self._machine.emulator_reset(ctypes.byref(ctypes.c_char.in_dll(self._library, "emulator_library")))
            memory = _Memory(self._machine)
            # The launch reads each value through a pointer: both must live until it returns.
            values = [
                _value(f"{name}: argument {i}", *pair, memory) for i, pair in enumerate(zip(codes, args, strict=True))
            ]
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            sizes = [(ctypes.c_uint * 3)(*size, *(1,) * (3 - len(size))) for size in (grid, block)]
            call, overlaps = getattr(self._library, f"emulator_call_{name}"), int(self._waits[name])
            if self._machine.emulator_launch(
                call, pointers, *sizes, ctypes.c_size_t(shared), ctypes.c_uint(seed), overlaps
            ):
                raise EmulatorError(f"{name}: {self._place()}{self._machine.emulator_error().decode()}")
            memory.copy_back()

    def traffic(
        self, name: str, grid: Sequence[int], block: Sequence[int], *args: Any, shared: int = 0
    ) -> list[Traffic]:
        """`launch`, of a program with checks, and what each of its accesses costs."""
        assert self._checked, "accesses are seen by checks alone"
        self._machine.emulator_count(1)
        try:
            self.launch(name, grid, block, *args, shared=shared)
            rows, row = [], (ctypes.c_long * 5)()
            while self._machine.emulator_traffic(len(rows), row):
                rows.append(Traffic(row[0], bool(row[1]), *row[2:]))
        finally:
            self._machine.emulator_count(0)
        return rows

    def _place(self) -> str:
        """ "file:line: " of the error, with the lines that called it; empty when it has no place."""
        offset = self._machine.emulator_error_offset()
        return self.place(offset) if offset else ""

    def place(self, offset: int) -> str:
        """ "file:line: " of an instruction, with the lines that called it; empty when it is none of a kernel's."""
        path = library(self._text, self._checked, with_lines=True)
        command = ["addr2line", "--inlines", "--exe", str(path), hex(offset)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        ours = [line.split(" ")[0] for line in lines if Path(line.split(":")[0]).suffix in {".cu", ".cuh"}]
        short = [line[line.rfind("cuda/") :] if "cuda/" in line else line.rsplit("/", 1)[-1] for line in ours]
        return f"{', called from '.join(short)}: " if short else ""


@cache
def _open_machine() -> ctypes.CDLL:
    opened = ctypes.CDLL(str(machine()), ctypes.RTLD_GLOBAL)  # for libraries of kernels
    opened.emulator_buffer.restype = ctypes.c_void_p
    opened.emulator_error.restype = ctypes.c_char_p
    opened.emulator_error_offset.restype = ctypes.c_size_t
    return opened


class _Memory:
    """Device copies of the arrays of one launch: one for each base array."""

    def __init__(self, machine: ctypes.CDLL):
        self._machine = machine
        self._copies: dict[int, tuple[np.ndarray, int, bool]] = {}

    def pointer(self, where: str, array: np.ndarray, constant: bool) -> int:
        if array.size and array.strides[-1:] not in ((), (array.itemsize,)):
            raise EmulatorError(f"{where}: the elements of the last axis are not next to each other")
        if not constant and not array.flags.writeable:
            raise EmulatorError(f"{where}: a read-only array for a pointer that is not const")
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        start = base.ctypes.data
        if start not in self._copies:
            if not base.flags.forc:
                raise EmulatorError(f"{where}: its base array is not contiguous")
            # A buffer is read-only for the kernel if no argument may write it; views of one base share the buffer.
            fixed = int(not base.flags.writeable)
            address = self._machine.emulator_buffer(ctypes.c_size_t(base.nbytes), int(constant), fixed)
            if not address:
                raise EmulatorError(f"{where}: the emulator's memory is full")
            ctypes.memmove(address, start, base.nbytes)
            self._copies[start] = (base, address, constant)
        _, address, is_constant = self._copies[start]
        if is_constant and not constant:
            raise EmulatorError(f"{where}: the same array was given for a const pointer; pass the written one first")
        return address + array.ctypes.data - start

    def table(self, where: str, addresses: Addresses) -> np.ndarray:
        """The addresses of copies of the arrays: uint64 (rows, columns)."""
        return np.array(
            [
                [
                    0 if x is None else self.pointer(where, x, column >= addresses.written)
                    for column, x in enumerate(row)
                ]
                for row in addresses.rows
            ],
            np.uint64,
        )

    def copy_back(self) -> None:
        for base, address, constant in self._copies.values():
            if not constant:
                ctypes.memmove(base.ctypes.data, address, base.nbytes)


def _value(where: str, code: str, arg: Any, memory: _Memory) -> Any:
    """The ctypes value of one argument for a parameter of type `code` ("f4", "const u1*", see signature.h)."""
    kind = code.removeprefix("const ").removesuffix("*")
    dtype = np.dtype(_DTYPES.get(kind, kind))
    if isinstance(arg, Addresses):
        arg = memory.table(where, arg)
    if code.endswith("*"):
        if arg is None:
            return ctypes.c_void_p(None)
        if not isinstance(arg, np.ndarray) or arg.dtype != dtype:
            raise EmulatorError(f"{where} is {_describe(arg)}, the kernel wants a pointer to {dtype} ({code})")
        return ctypes.c_void_p(memory.pointer(where, arg, code.startswith("const ")))
    if not isinstance(arg, np.generic) or arg.dtype != dtype:
        raise EmulatorError(f"{where} is {_describe(arg)}, the kernel wants a NumPy scalar {dtype}")
    return (ctypes.c_char * dtype.itemsize).from_buffer_copy(arg.tobytes())


def _describe(arg: Any) -> str:
    if isinstance(arg, np.ndarray):
        return f"an array of {arg.dtype}"
    return f"a NumPy scalar {arg.dtype}" if isinstance(arg, np.generic) else f"a Python {type(arg).__name__}"
