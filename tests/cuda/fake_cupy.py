"""A CuPy whose GPU is the emulator: what `engine.backends.cuda.device.cupy_device` uses of it, with its rules.

Arrays are NumPy's with an address; kernels run in the emulator; a graph holds the launches that it was recorded from
and does them again. As on a GPU it knows addresses, and owns nothing: what lies there when it is launched is what it
works on. It is stricter than CuPy: whatever would go to another stream than the one in use, would take memory from the
common pool while a graph is recorded, would work on memory that the machine has back, or is not allowed while a graph
is recorded, is an AssertionError. What is copied to the host is not there before it is waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.cuda.emulated import _KINDS
from tests.cuda.fake_memory import CUDARuntimeError, Memory, MemoryPointer, Pools, UnownedMemory
from tests.cuda.formats import poisoned
from tests.cuda_emulator import Program

SHARED_WITHOUT_ASKING = 48 << 10  # static and dynamic together


class CUDADriverError(CUDARuntimeError):
    pass


class Array(np.ndarray):
    """cupy.ndarray of the machine that made it."""

    machine: Machine

    def __new__(cls, shape: Any, dtype: Any, memptr: MemoryPointer) -> Array:
        """An array at an address, which keeps the memory's owner alive."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        held = _Held(memptr.mem, (ctypes.c_ubyte * count).from_address(memptr.ptr))
        return np.asarray(held).view(dtype).reshape(shape).view(cls)

    def __array_finalize__(self, of: Any) -> None:
        self.machine = getattr(of, "machine", None)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)

    def __setitem__(self, place: Any, x: Any) -> None:
        """A kernel of CuPy's own, which takes numbers and arrays of CuPy."""
        assert isinstance(x, Array | int | float), f"{type(x).__name__} is assigned to an array of CuPy"
        self.machine.do(lambda to, x: np.asarray(to).__setitem__(place, x), self, x)


class _Held:
    def __init__(self, owner: object, raw: Any):
        self._owner, self._raw = owner, raw
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (len(raw),),
            "data": (ctypes.addressof(raw), False),
        }


class _OfThread(threading.local):
    """What CUDA and CuPy keep for each thread."""

    def __init__(self) -> None:
        self.current = 0
        self.streams: dict[int, Any] = {}


@dataclass
class Machine:
    """The state of the fake: current stream, recording, launches. Tests read and set it."""

    devices: int = 1
    order: list[tuple[str, int, int]] = field(default_factory=list)  # what GPUs wait for, and copies between them
    can_reach: bool = True
    reached: set[tuple[int, int]] = field(default_factory=set)  # GPUs that may read another one's memory
    status: int = 0  # what getDeviceCount returns
    capability: tuple[int, int] = (9, 0)
    shared_memory: int = 228 << 10  # bytes of a multiprocessor
    malloc: Any = None  # the pool in use; None: the common one
    recorded: list[Callable[[], None]] | None = None
    launches: list[str] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)  # texts
    options: list[tuple[str, ...]] = field(default_factory=list)  # options of texts compiled for one architecture
    overlapped: list[str] = field(default_factory=list)  # launches that may begin before the one before them has ended
    functions: dict[int, _Kernel] = field(default_factory=dict)  # by handle
    roots: weakref.WeakValueDictionary[int, np.ndarray] = field(default_factory=weakref.WeakValueDictionary)
    cuda: int = 13000  # version of driver and runtime
    largest_shared: int = 0
    room: int = 1 << 30  # bytes that there are
    memories: weakref.WeakSet[Memory] = field(default_factory=weakref.WeakSet)
    graphs: weakref.WeakSet[_Graph] = field(default_factory=weakref.WeakSet)
    late: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)  # copies to the host, and their numbers
    copies: int = 0  # to the host, so far

    def __post_init__(self) -> None:
        self.common, self._thread = Pools(self), _OfThread()

    @property
    def current(self) -> int:
        return self._thread.current

    @property
    def stream(self) -> Any:
        """The stream in use on this thread's GPU; None if that is CuPy's own."""
        return self._thread.streams.get(self.current)

    @stream.setter
    def stream(self, stream: Any) -> None:
        self._thread.streams[self.current] = stream

    @property
    def allocated(self) -> int:
        return sum(memory.size for memory in self.memories if memory.number == self.current)

    def take(self, number: int) -> None:
        """Make a GPU the current one of this thread."""
        self._thread.current = number

    def number_of(self, address: int) -> int:
        """The GPU in whose memory an address lies."""
        return next(of.number for of in self.memories if of.ptr <= address < of.ptr + of.size)

    def copy_late(self, to: int, content: bytes) -> None:
        """Write `content` to an address when that is waited for."""
        ctypes.memset(to, 0x7F, len(content))
        self.late.append((self.copies, lambda: ctypes.memmove(to, content, len(content))))
        self.copies += 1

    def finish(self, copies: int) -> None:
        """Do the first `copies` copies to the host."""
        while self.late and self.late[0][0] < copies:
            self.late.popleft()[1]()

    def do(self, work: Callable[..., None], *args: Any) -> None:
        """Run on the current stream, at once or when the graph is launched, with the arrays' contents at that time."""
        assert self.stream is not None, "work for CuPy's own stream"
        for arg in args:
            if isinstance(arg, Array) and arg.nbytes:
                assert self.number_of(arg.ctypes.data) == self.current, "an array of another GPU"
        if self.recorded is None:
            work(*args)
            return
        known = [_Address(self, arg) if isinstance(arg, Array) else (lambda arg=arg: arg) for arg in args]
        self.recorded.append(lambda: work(*(arg() for arg in known)))

    def empty(self, shape: Any, dtype: Any) -> Array:
        assert self.stream is not None, "memory of another stream"
        assert self.recorded is None or self.malloc is not None, "recorded work takes memory from the common pool"
        shape, dtype = tuple(np.atleast_1d(shape).tolist()), np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        array = Array(shape, dtype, (self.malloc or self.common.malloc)(max(1, size)))
        array.machine = self
        root = _root(array)
        self.roots[root.ctypes.data] = root  # by address
        kind = _KINDS.get(dtype.name)
        array.view(np.ndarray)[...] = poisoned((), kind) if kind else np.frombuffer(b"\x7f" * dtype.itemsize, dtype)[0]
        return array


def _root(array: Any) -> np.ndarray:
    """The array that all views of its memory are views of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class _Address:
    """An array as a graph holds it; views of one array stay views of it."""

    def __init__(self, machine: Machine, array: Array):
        root = _root(array)
        self._machine, self._start, self._size = machine, root.ctypes.data, root.nbytes
        self._view = array.shape, array.dtype, array.ctypes.data - self._start, array.strides

    def __call__(self) -> Array:
        stop = self._start + self._size
        there = (of.ptr <= self._start and stop <= of.ptr + of.size for of in self._machine.memories)
        assert any(there), "a graph works on memory that the machine has back"
        raw = np.frombuffer((ctypes.c_ubyte * self._size).from_address(self._start), np.uint8)
        shape, dtype, offset, strides = self._view
        array = np.ndarray(shape, dtype, raw, offset, strides).view(Array)
        array.machine = self._machine
        return array


@cache
def _program(text: str) -> Program:
    return Program(text, checked=False)


def _contiguous(x: Array) -> Array:
    if not isinstance(x, Array):
        raise TypeError(f"{type(x).__name__} is no array of CuPy")
    return np.ascontiguousarray(x).view(Array)


def make() -> tuple[Machine, dict[str, ModuleType]]:
    """A machine, and the stand-ins for CuPy's modules."""
    machine = Machine()
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cuda.runtime = _runtime(machine)
    cuda.driver = SimpleNamespace(CUDADriverError=CUDADriverError)
    cuda.nvrtc = _Nvrtc(machine)
    cuda.Stream = lambda non_blocking: _Stream(machine)
    cuda.Event, cuda.get_elapsed_time, cuda.get_current_stream = _Event, _elapsed, lambda: machine.stream
    cuda.MemoryPool = lambda allocator=None: Pools(machine, allocator)
    cuda.Memory = lambda size: Memory(machine, size)
    cuda.MemoryPointer, cuda.UnownedMemory = MemoryPointer, UnownedMemory
    cuda.Graph = _Graph
    cuda.alloc_pinned_memory = bytearray
    cuda.using_allocator = lambda malloc: _using(machine, malloc)
    cuda.set_allocator = lambda malloc: setattr(machine, "malloc", malloc)
    cupy.cuda, cupy.ndarray, cupy.empty = cuda, Array, machine.empty
    cupy.copyto = lambda to, source: machine.do(np.copyto, to, source)
    cupy.__version__ = "14.0"
    cupy.ascontiguousarray = _contiguous
    cupy.get_default_memory_pool = lambda: machine.common
    cupy.RawModule = partial(_module, machine)
    cupy.RawKernel = _Kernel
    core = ModuleType("cupy._core.core")
    core.assemble_cupy_compiler_options = lambda options: (*options, "-I/headers")
    inside = ModuleType("cupy._core")
    inside.core = core
    return machine, {"cupy": cupy, "cupy.cuda": cuda, "cupy._core": inside}


def _module(machine: Machine, code: str = "", options: tuple[str, ...] = (), path: str = "") -> SimpleNamespace:
    """The module of a text, or of a file of `_Nvrtc`: a text is its own binary."""
    text = code or Path(path).read_text()

    def get_function(name: str) -> _Kernel:
        return _Kernel(machine, text, name)

    return SimpleNamespace(compile=lambda: machine.compiled.append(code), get_function=get_function)


@dataclass
class _Nvrtc:
    """CuPy's bindings of the compiler."""

    machine: Machine
    NVRTCError = CUDARuntimeError
    programs: dict[int, str] = field(default_factory=dict)

    def getVersion(self) -> tuple[int, int]:
        return 12, 4

    def getSupportedArchs(self) -> tuple[int, ...]:
        return 80, 86, 89, 90

    def createProgram(self, text: str, name: str, headers: tuple[()], names: tuple[()]) -> int:
        self.programs[len(self.programs)] = text
        return len(self.programs) - 1

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.machine.options.append(options)
        self.machine.compiled.append(self.programs[program])
        if "#error" in self.programs[program]:
            raise CUDARuntimeError(6)

    def getCUBIN(self, program: int) -> bytes:
        return self.programs[program].encode()

    def getProgramLog(self, program: int) -> str:
        return "kernel.cu(1): error"

    def destroyProgram(self, program: int) -> None:
        self.programs[program] = ""


def _runtime(machine: Machine) -> SimpleNamespace:
    def count() -> int:
        if machine.status:
            raise CUDARuntimeError(machine.status)
        return machine.devices

    def copy(to: int, of: int, size: int, kind: int, stream: int) -> None:
        assert machine.recorded is None, "a copy of the host's memory is recorded"
        assert stream == machine.stream.ptr
        if kind == 2:
            machine.copy_late(to, ctypes.string_at(of, size))
        else:
            ctypes.memmove(to, of, size)

    def copy_over(to: int, its: int, of: int, number: int, size: int, stream: int) -> None:
        assert machine.recorded is None
        assert (machine.number_of(to), machine.number_of(of)) == (its, number)
        assert stream == machine.stream.ptr
        machine.order.append(("copy", its, number))
        ctypes.memmove(to, of, size)

    def let_reach(number: int) -> None:
        if (machine.current, number) in machine.reached:
            raise CUDARuntimeError(704)
        machine.reached.add((machine.current, number))

    def clear(to: int, value: int, size: int, stream: int) -> None:
        assert machine.recorded is None, "memory is cleared again with every launch"
        assert stream == machine.stream.ptr
        ctypes.memset(to, value, size)

    properties = {"name": b"Fake GPU", "multiProcessorCount": 4}
    return SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3,
        getDevice=lambda: machine.current,
        setDevice=machine.take,
        deviceCanAccessPeer=lambda number, other: int(machine.can_reach),
        deviceEnablePeerAccess=let_reach,
        memcpyPeerAsync=copy_over,
        getDeviceCount=count,
        getDeviceProperties=lambda device: properties,
        deviceGetAttribute=lambda of, device: machine.shared_memory if of == 81 else machine.capability[of - 75],
        memGetInfo=lambda: (machine.room - machine.allocated, 2 << 30),
        memcpyAsync=copy,
        memsetAsync=clear,
        deviceSynchronize=lambda: None,
        driverGetVersion=lambda: machine.cuda + 20,
        runtimeGetVersion=lambda: machine.cuda,
    )


@contextlib.contextmanager
def _using(machine: Machine, malloc: object) -> Iterator[None]:
    before, machine.malloc = machine.malloc, malloc
    try:
        yield
    finally:
        machine.malloc = before


class _Event:
    """Its time is the number of events before it."""

    _count = itertools.count()

    def __init__(self, disable_timing: bool = False):
        self.awaited, self.timing = True, not disable_timing
        self._machine: Machine | None = None  # before it is recorded
        self._copies = 0
        self.number: int | None = None  # the GPU's

    @property
    def done(self) -> bool:
        return self._machine is None or not self._machine.late or self._machine.late[0][0] >= self._copies

    def synchronize(self) -> None:
        self.awaited = True
        if self._machine is not None:
            self._machine.finish(self._copies)

    def record(self, stream: _Stream) -> None:
        assert stream is stream.machine.stream
        assert stream.machine.recorded is None
        self.awaited, self.time, self.number = False, next(self._count), stream.number
        self._machine, self._copies = stream.machine, stream.machine.copies


def _elapsed(first: _Event, second: _Event) -> float:
    """Milliseconds: two from each event to the next."""
    assert first.timing
    assert second.timing
    return 2.0 * (second.time - first.time)


class _Stream:
    def __init__(self, machine: Machine):
        self.machine, self.number, self.ptr = machine, machine.current, 11 + machine.current

    def use(self) -> None:
        assert self.number == self.machine.current, "the stream of another GPU"
        self.machine.stream = self

    def wait_event(self, event: _Event) -> None:
        assert event.number is not None, "an event that has not been recorded"
        self.machine.order.append(("wait", self.number, event.number))

    def record(self, event: _Event) -> _Event:
        event.record(self)
        return event

    def synchronize(self) -> None:
        assert self.machine.recorded is None, "recorded work waits"
        self.machine.finish(self.machine.copies)

    def begin_capture(self) -> None:
        assert self.machine.recorded is None
        self.machine.recorded = []

    def end_capture(self) -> _Graph:
        work, self.machine.recorded = self.machine.recorded, None
        assert work is not None
        graph = _Graph(work)
        self.machine.graphs.add(graph)
        return graph


@dataclass(eq=False)
class _Graph:
    work: list[Callable[[], None]]

    def launch(self, stream: _Stream) -> None:
        for launch in self.work:
            launch()


@dataclass
class _Kernel:
    machine: Machine
    text: str
    name: str
    max_dynamic_shared_size_bytes: int | None = None  # most of a launch, if it has been set

    @property
    def kernel(self) -> Any:
        self.machine.functions[id(self)] = self
        return SimpleNamespace(ptr=id(self))

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_mem: int) -> None:
        assert all(type(sizes) is tuple and all(type(size) is int for size in sizes) for sizes in (grid, block))
        allowed, without_asking = (
            self.max_dynamic_shared_size_bytes,
            SHARED_WITHOUT_ASKING - _program(self.text).static_shared,
        )
        assert shared_mem <= (without_asking if allowed is None else allowed), "more shared memory than is allowed"
        assert not any(arg is None for arg in args), "CuPy passes None as no argument"
        values = [None if isinstance(arg, np.uintp) else arg for arg in args]
        assert all(value is None or isinstance(value, Array | np.generic) for value in values)
        self.machine.largest_shared = max(self.machine.largest_shared, shared_mem)

        def launch(*values: Any) -> None:
            self.machine.launches.append(self.name)
            _program(self.text).launch(self.name, grid, block, *values, shared=shared_mem)

        self.machine.do(launch, *values)


class Driver:
    """The NVIDIA driver's library."""

    def __init__(self, machine: Machine):
        self._machine = machine

    def cuLaunchKernelEx(self, config: Any, function: Any, values: Any, extra: None) -> int:
        launch, kernel = config._obj, self._machine.functions[function.value]
        assert launch.stream == self._machine.stream.ptr
        assert (launch.count, launch.attributes[0].id, launch.attributes[0].is_allowed) == (1, 6, 1)
        codes = _program(kernel.text).signature(kernel.name)
        args = [self._value(code, value) for code, value in zip(codes, values, strict=True)]
        kernel(tuple(launch.grid), tuple(launch.block), tuple(args), launch.shared)
        self._machine.overlapped.append(kernel.name)
        return 0

    def _value(self, code: str, address: int) -> Any:
        """What lies at an address, as CuPy would pass it; code: of the parameter's type, as the emulator names it."""
        kind = code.removeprefix("const ").removesuffix("*")
        dtype = np.dtype({"b2": "u2"}.get(kind, kind))
        if not code.endswith("*"):
            return np.frombuffer((ctypes.c_ubyte * dtype.itemsize).from_address(address), dtype)[0]
        target = ctypes.c_uint64.from_address(address).value
        if target == 0:
            return np.uintp(0)
        roots = list(self._machine.roots.items())
        (start, root) = next((start, root) for start, root in roots if start <= target < start + root.nbytes)
        whole = root.reshape(-1).view(np.uint8).view(Array)
        whole.machine = self._machine
        rest = whole[target - start :]
        return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)
