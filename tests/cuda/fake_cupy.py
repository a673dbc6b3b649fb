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
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.cuda.emulated import _KINDS, program_of
from tests.cuda.fake_memory import CUDARuntimeError, Memory, MemoryPointer, Pools, UnownedMemory
from tests.cuda.formats import poisoned

SHARED_WITHOUT_ASKING = 48 << 10  # static and dynamic together


class CUDADriverError(CUDARuntimeError):
    pass


class Array(np.ndarray):
    """cupy.ndarray of a machine, which has a class of its own."""

    machine: Machine

    def __new__(cls, shape: Any, dtype: Any, memptr: MemoryPointer) -> Array:
        """An array at an address, which keeps the memory's owner alive."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        held = _Held(memptr.mem, (ctypes.c_ubyte * count).from_address(memptr.ptr))
        return np.asarray(held).view(dtype).reshape(shape).view(cls)

    @property
    def data(self) -> Any:
        self.machine.asked[self.ctypes.data] = self
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


class _Pinned(bytearray):
    """Pinned memory of the host."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(self))


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
    broken: int = 0  # what all work returns, as after an access out of bounds
    capability: tuple[int, int] = (9, 0)
    shared_memory: int = 228 << 10  # bytes of a multiprocessor
    malloc: Any = None  # the pool in use; None: the common one
    recorded: list[Callable[[], None]] | None = None
    launches: list[str] = field(default_factory=list)
    overlapped: list[str] = field(default_factory=list)  # launches that may begin before the one before them has ended
    functions: dict[int, _Kernel] = field(default_factory=dict)  # by handle
    asked: weakref.WeakValueDictionary[int, Array] = field(default_factory=weakref.WeakValueDictionary)  # by address
    cuda: int = 13000  # version of driver and runtime
    largest_shared: int = 0
    room: int = 1 << 30  # bytes that there are
    memories: weakref.WeakSet[Memory] = field(default_factory=weakref.WeakSet)
    graphs: weakref.WeakSet[_Graph] = field(default_factory=weakref.WeakSet)
    late: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)  # copies to the host, and their numbers
    copies: int = 0  # to the host, so far

    def __post_init__(self) -> None:
        self.common, self._thread = Pools(self), _OfThread()
        self.array = type("ndarray", (Array,), {"machine": self})

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

    def check(self) -> None:
        if self.broken:
            raise CUDARuntimeError(self.broken)

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
        self.check()
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
        array: Array = self.array(shape, dtype, (self.malloc or self.common.malloc)(max(1, size)))
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
        return np.ndarray(shape, dtype, raw, offset, strides).view(self._machine.array)


def _contiguous(x: Array) -> Array:
    if not isinstance(x, Array):
        raise TypeError(f"{type(x).__name__} is no array of CuPy")
    return np.ascontiguousarray(x).view(type(x))


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
    cuda.alloc_pinned_memory = _Pinned
    cuda.using_allocator = lambda malloc: _using(machine, malloc)
    cuda.set_allocator = lambda malloc: setattr(machine, "malloc", malloc)
    cupy.cuda, cupy.ndarray, cupy.empty = cuda, machine.array, machine.empty
    cupy.copyto = lambda to, source: machine.do(np.copyto, to, source)
    cupy.__version__ = "14.0"
    cupy.ascontiguousarray = _contiguous
    cupy.get_default_memory_pool = lambda: machine.common
    cupy.RawModule = partial(_module, machine)
    cupy.RawKernel = _Kernel
    return machine, {"cupy": cupy, "cupy.cuda": cuda}


def _module(machine: Machine, code: str, options: tuple[str, ...]) -> SimpleNamespace:
    """The module of a text."""

    def get_function(name: str) -> _Kernel:
        return _Kernel(machine, code, name)

    return SimpleNamespace(compile=lambda: None, get_function=get_function)


@dataclass
class _Nvrtc:
    """CuPy's bindings of the compiler."""

    machine: Machine
    NVRTCError = CUDARuntimeError

    def getVersion(self) -> tuple[int, int]:
        return 12, 4

    def getSupportedArchs(self) -> tuple[int, ...]:
        return 80, 86, 89, 90


def _runtime(machine: Machine) -> SimpleNamespace:
    def count() -> int:
        if machine.status:
            raise CUDARuntimeError(machine.status)
        return machine.devices

    def copy(to: int, of: int, size: int, kind: int, stream: int) -> None:
        machine.check()
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
        assert stream == machine.stream.ptr
        if machine.recorded is not None:  # then it is cleared again with every launch
            machine.recorded.append(lambda: ctypes.memset(to, value, size))
        else:
            ctypes.memset(to, value, size)

    def memory() -> tuple[int, int]:
        machine.check()
        return machine.room - machine.allocated, 2 << 30

    def choose(number: int) -> None:
        machine.check()
        machine.take(number)

    def query(stream: int) -> int:
        assert machine.recorded is None, "a stream that is recorded is queried"
        return machine.broken or 600  # not ready

    properties = {"name": b"Fake GPU", "multiProcessorCount": 4}
    return SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3,
        getDevice=lambda: machine.current,
        setDevice=choose,
        deviceCanAccessPeer=lambda number, other: int(machine.can_reach),
        deviceEnablePeerAccess=let_reach,
        memcpyPeerAsync=copy_over,
        getDeviceCount=count,
        getDeviceProperties=lambda device: properties,
        deviceGetAttribute=lambda of, device: machine.shared_memory if of == 81 else machine.capability[of - 75],
        memGetInfo=memory,
        memcpyAsync=copy,
        memsetAsync=clear,
        streamQuery=query,
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
        machine.check()  # where there is no memory, there is no stream either
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
        self.machine.check()
        assert self.machine.recorded is None, "recorded work waits"
        self.machine.finish(self.machine.copies)

    def launch_host_func(self, call: Callable[[Any], None], argument: Any) -> None:
        assert self.machine.recorded is None
        call(argument)

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


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class Driver:
    """The NVIDIA driver's library. It takes a launch as C does: a configuration, and a pointer to each argument, of the
    type that the kernel's text says."""

    def __init__(self, machine: Machine):
        self._machine = machine

    def cuLaunchKernelEx(self, config: Any, function: Any, places: Any, extra: None) -> int:
        machine, launch = self._machine, _Config.from_address(config.value)
        if machine.broken:
            return machine.broken
        kernel, sizes = machine.functions[function.value], [[*launch.grid], [*launch.block]]
        assert launch.stream == machine.stream.ptr
        assert 0 not in (*launch.grid, *launch.block), "an empty grid"
        if launch.count:  # one attribute: programmatic stream serialization is allowed
            assert (launch.count, struct.unpack("i4xi", ctypes.string_at(launch.attributes, 12))) == (1, (6, 1))
            machine.overlapped.append(kernel.name)
        program, allowed = program_of(kernel.text, False), kernel.max_dynamic_shared_size_bytes
        most = SHARED_WITHOUT_ASKING - program.static_shared if allowed is None else allowed
        assert launch.shared <= most, "more shared memory than is allowed"
        machine.largest_shared = max(machine.largest_shared, launch.shared)
        shared, codes = launch.shared, program.signature(kernel.name)

        def run(*values: Any) -> None:
            machine.launches.append(kernel.name)
            program.launch(kernel.name, *sizes, *values, shared=shared)

        machine.do(run, *[self._value(code, place) for code, place in zip(codes, places, strict=True)])
        return 0

    def _value(self, code: str, place: int) -> Any:
        """What lies at an address; code: of the parameter's type, as the emulator names it."""
        if code.endswith("*"):
            address = ctypes.c_uint64.from_address(place).value
            return self._machine.asked[address] if address else None
        dtype = np.dtype(code)
        return np.frombuffer((ctypes.c_ubyte * dtype.itemsize).from_address(place), dtype)[0]
