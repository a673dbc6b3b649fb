"""Work that a GPU does again and again: recorded as CUDA graphs, which share their memory. A part of `cupy_device`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.libs import cublas

from engine.backends.cuda.device import MOST_RECORDINGS, Result

_runtime = cupy.cuda.runtime
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY; 3 is cuBLAS's
_CUBLAS_OUT_OF_MEMORY = 3

_ALIGNMENT = 256  # of what lies side by side in one buffer


class Recordings:
    """What a device has recorded: see `Device.run_graph`. The stream is in use at every call."""

    def __init__(self, stream: cupy.cuda.Stream):
        self._stream = stream
        self._kept: dict[Hashable, _Recording] = {}  # the one used last is the last
        # What recorded work writes to: kept apart, since a graph uses the same addresses for ever. All graphs share it,
        # for they run one after another.
        self._memory = cupy.cuda.MemoryPool(_memory_for_good)

    def set_aside(self, size: int) -> None:
        with memory_errors(), cupy.cuda.using_allocator(self._memory.malloc):
            cupy.empty(size, np.uint8)  # given back to the pool at once, which takes smaller arrays from it

    def run_graph(self, key: Hashable, work: Callable[..., Result], inputs: Sequence[np.ndarray]) -> Result:
        """The first call with a key only works, which compiles kernels and finds memory; the second one is recorded."""
        whole = key, tuple((x.shape, x.dtype.str) for x in inputs)
        with memory_errors():
            recording = self._kept.pop(whole, None)
            if recording is None:
                while len(self._kept) >= MOST_RECORDINGS:
                    self._kept.pop(next(iter(self._kept))).end()
                recording = _Recording(self._stream, self._memory, inputs)
                recording.take(inputs)
                with cupy.cuda.using_allocator(self._memory.malloc):
                    result = work(*recording.inputs)
                self._kept[whole] = recording
                return result
            self._kept[whole] = recording
            recording.take(inputs)
            if recording.graph is None:
                recording.record(work)
            return recording.launch()


class _Recording:
    """Work with inputs of certain shapes: a graph, once it is recorded, and the arrays that it works on."""

    def __init__(self, stream: cupy.cuda.Stream, memory: cupy.cuda.MemoryPool, inputs: Sequence[np.ndarray]):
        self.graph: cupy.cuda.Graph | None = None
        self._result: Any = None
        self._stream, self._memory = stream, memory
        # All inputs travel in one copy, out of a pinned buffer that is not touched while it is under way.
        ends = np.cumsum([-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in inputs]).tolist()
        starts = [0, *ends[:-1]]
        size = ends[-1] if ends else 0
        self._pinned, self._copied = pinned(size), cupy.cuda.Event(disable_timing=True)
        with cupy.cuda.using_allocator(memory.malloc):
            self._buffer = cupy.empty(size, np.uint8)
        places = [slice(start, start + x.nbytes) for start, x in zip(starts, inputs, strict=True)]
        self._staged = [self._pinned[place] for place in places]
        self.inputs = [
            self._buffer[place].view(x.dtype).reshape(x.shape) for place, x in zip(places, inputs, strict=True)
        ]

    def take(self, inputs: Sequence[np.ndarray]) -> None:
        """Bring the values of this call to the device."""
        self._copied.synchronize()
        for staged, x in zip(self._staged, inputs, strict=True):
            staged[:] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        size, to, of = self._pinned.nbytes, self._buffer.data.ptr, self._pinned.ctypes.data
        _runtime.memcpyAsync(to, of, size, _runtime.memcpyHostToDevice, self._stream.ptr)
        self._copied.record(self._stream)

    def record(self, work: Callable[..., Any]) -> None:
        """Turn work(*self.inputs) into a graph without doing it."""
        self._stream.begin_capture()
        try:
            with cupy.cuda.using_allocator(self._memory.malloc):
                result = work(*self.inputs)
        except BaseException:
            with contextlib.suppress(Exception):  # the capture may be void; what went wrong is in the first error
                self._stream.end_capture()
            raise
        self.graph = self._stream.end_capture()
        self._result = _without_claim(result)

    def launch(self) -> Any:
        assert self.graph is not None
        self.graph.launch(self._stream)
        return self._result

    def end(self) -> None:
        """Before it is let go: nothing reads the buffer on the host any more."""
        self._copied.synchronize()


def _without_claim(result: Any) -> Any:
    """Views of the same memory that leave it free for whatever is recorded or launched next."""
    if isinstance(result, tuple):
        return tuple(map(_without_claim, result))
    assert result.flags.c_contiguous
    memory = cupy.cuda.UnownedMemory(result.data.ptr, result.nbytes, None, result.data.device_id)
    return cupy.ndarray(result.shape, result.dtype, cupy.cuda.MemoryPointer(memory, 0))


def _memory_for_good(size: int) -> cupy.cuda.MemoryPointer:
    """For a pool whose free memory is in use: that of graphs. Raises MemoryError.

    A pool that gets CUDA's own error gives its free memory back to look for more, and graphs would write to what is no
    longer theirs. Instead the common pool gives back what it has.
    """
    with memory_errors():
        try:
            return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)
        except _runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
        cupy.get_default_memory_pool().free_all_blocks()
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)


def pinned(size: int) -> np.ndarray:
    """Bytes of the host that the device can read by itself."""
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """MemoryError for what the runtime, the driver and cuBLAS say when there is no memory."""
    try:
        yield
    except cublas.CUBLASError as error:
        if error.status != _CUBLAS_OUT_OF_MEMORY:
            raise
        raise MemoryError(str(error)) from error
    except (_runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
        if error.status != _OUT_OF_MEMORY:
            raise
        raise MemoryError(str(error)) from error
