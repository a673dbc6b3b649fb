"""CUDA graphs of repeated work, which share one memory pool. Part of `cupy_device`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import cupy
import numpy as np

from polarlm.engine.backends.cuda.device import MOST_BATCHES, MOST_RECORDINGS, Device, PaddedInput, PeerCopy, Result

_runtime = cupy.cuda.runtime
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY

_ALIGNMENT = 256  # bytes: alignment of each input in the buffer of all inputs

_Input = np.ndarray | PaddedInput | PeerCopy
_Copy = Callable[[cupy.ndarray, cupy.ndarray, Device], None]  # copies an array of a device to the beginning of another


class Recordings:
    """The recordings of a device, see `Device.run_graph`. Callers select the stream first."""

    def __init__(self, stream: cupy.cuda.Stream, copy: _Copy):
        self.is_recording = False  # whether work is being recorded
        self._stream, self._copy = stream, copy
        self._recordings_by_key: dict[Hashable, _Recording] = {}  # least recently used first
        self._pinned: dict[int, np.ndarray] = {}  # by the place of an argument of `HostCall`, 0 for the result
        # A graph keeps the addresses that it was recorded with, so recordings allocate from their own pool. They share
        # it, since they never run concurrently.
        self._allocator = _PermanentAllocator()
        self._memory = cupy.cuda.MemoryPool(self._allocator)

    def reserve_workspace(self, size: int) -> None:
        with memory_errors(), cupy.cuda.using_allocator(self._memory.malloc):
            cupy.empty(size, np.uint8)  # freed at once: the pool keeps it and splits it for smaller arrays

    def run_graph(self, key: Hashable, work: Callable[..., Result], inputs: Sequence[_Input]) -> Result:
        """See `Device.run_graph`. The first call runs `work`, which compiles and allocates; the second one records."""
        whole = key, tuple((x.shape, _dtype(x).str) for x in inputs)
        with memory_errors():
            recording = self._recordings_by_key.pop(whole, None)
            if recording is None:
                self._drop_oldest(is_batch=None, most=MOST_BATCHES - 1)
                recording = _Recording(self._stream, self._memory, self._copy, inputs)
                recording.take(inputs)
                with cupy.cuda.using_allocator(self._memory.malloc):
                    result = work(*recording.inputs)
                self._recordings_by_key[whole] = recording
                return result
            self._recordings_by_key[whole] = recording
            recording.take(inputs)
            if not recording.parts:
                self._record(recording, work)
            return recording.launch()

    def _record(self, recording: _Recording, work: Callable[..., Any]) -> None:
        """Record work, for which the default pool's free blocks are freed if there is no memory without them: not while
        it is recorded."""
        for is_first in (True, False):
            self.is_recording, self._allocator.may_free = True, False
            try:
                recording.record(work)
                break
            except MemoryError:
                if not is_first:
                    raise
            finally:
                self.is_recording, self._allocator.may_free = False, True
            cupy.get_default_memory_pool().free_all_blocks()
        self._drop_oldest(is_batch=recording.is_batch, most=MOST_BATCHES if recording.is_batch else MOST_RECORDINGS)

    def _drop_oldest(self, *, is_batch: bool | None, most: int) -> None:
        """Drop the least recently used recordings of a kind beyond `most`; see `_Recording.is_batch`."""
        same_kind = [whole for whole, recording in self._recordings_by_key.items() if recording.is_batch is is_batch]
        for whole in same_kind[: max(0, len(same_kind) - most)]:
            self._recordings_by_key.pop(whole).end()

    def forget(self) -> None:
        """See `Device.forget`."""
        with contextlib.suppress(_runtime.CUDARuntimeError):  # of a GPU that works no more
            self._stream.synchronize()
        self._recordings_by_key.clear()

    def staging(self, place: int, x: cupy.ndarray) -> np.ndarray:
        """Pinned memory for the argument at a place of a host call, or at 0 for its result. Calls share it: each has
        waited for the one before when it writes there."""
        if place not in self._pinned or self._pinned[place].nbytes < x.nbytes:
            self._pinned[place] = pinned_memory(1 << max(0, x.nbytes - 1).bit_length())
        return self._pinned[place][: x.nbytes].view(x.dtype).reshape(x.shape)

    def cut(self, call: HostCall | UnrecordedCall, *, is_last: bool = False) -> None:
        """End the part of the recording that is under way, and begin another one after `call`, unless it is the last
        one."""
        next(reversed(self._recordings_by_key.values())).cut(call, is_last=is_last)


class HostCall:
    """A call of Python code on copies of arrays; see `Device.call_host`."""

    def __init__(
        self,
        work: Callable[..., np.ndarray],
        y: cupy.ndarray,
        arrays: Sequence[cupy.ndarray],
        staging: Callable[[int, cupy.ndarray], np.ndarray],
    ):
        """staging: see `Recordings.staging`."""
        assert all(array.flags.c_contiguous for array in (y, *arrays))
        # In a recording, later launches may use the same memory.
        self._work, self._y, self._arrays = work, _unowned_view(y), [_unowned_view(array) for array in arrays]
        self._result, *self._copies = (staging(place, array) for place, array in enumerate((y, *arrays)))

    def make(self, stream: cupy.cuda.Stream) -> None:
        for copy, x in zip(self._copies, self._arrays, strict=True):
            _runtime.memcpyAsync(copy.ctypes.data, x.data.ptr, x.nbytes, _runtime.memcpyDeviceToHost, stream.ptr)
        stream.synchronize()  # the copy of an earlier result has ended, too
        self._result[...] = self._work(*self._copies)
        target, source, size = self._y.data.ptr, self._result.ctypes.data, self._y.nbytes
        _runtime.memcpyAsync(target, source, size, _runtime.memcpyHostToDevice, stream.ptr)


class UnrecordedCall:
    """A call that launches what is not recorded; see `Device.run_between_graphs`."""

    def __init__(self, work: Callable[..., None], arrays: Sequence[cupy.ndarray]):
        # In a recording, later launches may use the same memory.
        self._work, self._arrays = work, [_unowned_view(array) for array in arrays]

    def make(self, stream: cupy.cuda.Stream) -> None:
        self._work(*self._arrays)


class _Recording:
    """The input arrays of work with given input shapes, and its graphs once they are recorded: one, or, of work that
    calls the host or launches what is not recorded, one between any two calls."""

    def __init__(self, stream: cupy.cuda.Stream, memory: cupy.cuda.MemoryPool, copy: _Copy, inputs: Sequence[_Input]):
        self.parts: list[cupy.cuda.Graph | HostCall | UnrecordedCall] = []  # in order, once it is recorded
        self._captured_parts: list[cupy.cuda.Graph | HostCall | UnrecordedCall] = []  # while it is recorded
        self._ends = False  # whether its last part has been recorded
        self._result: Any = None
        self._stream, self._memory, self._copy = stream, memory, copy
        # All inputs on the host are copied at once from a pinned buffer, which is not overwritten before that copy has
        # finished; inputs of other devices follow them.
        sizes = [math.prod(x.shape) * _dtype(x).itemsize for x in inputs]
        are_peers = [isinstance(x, PeerCopy) for x in inputs]
        places, end, on_host = {}, 0, 0
        for number in sorted(range(len(inputs)), key=are_peers.__getitem__):
            places[number] = slice(end, end + sizes[number])
            end += -(-sizes[number] // _ALIGNMENT) * _ALIGNMENT
            if not are_peers[number]:
                on_host = end
        self._pinned, self._copy_event = pinned_memory(on_host), cupy.cuda.Event(disable_timing=True)
        with cupy.cuda.using_allocator(memory.malloc):
            self._buffer = cupy.empty(end, np.uint8)
        # The part of the buffer for inputs of other devices: first byte, bytes.
        self._peer_range = on_host, end - on_host
        self._staging = [self._pinned[places[number]] for number in range(len(inputs))]
        self.inputs = [self._buffer[places[number]].view(_dtype(x)).reshape(x.shape) for number, x in enumerate(inputs)]

    def take(self, inputs: Sequence[_Input]) -> None:
        """Copy the inputs of this call to the device: those on the host, then arrays that are on devices."""
        self._copy_event.synchronize()
        for staging, x in zip(self._staging, inputs, strict=True):
            if not isinstance(x, PeerCopy):
                x = x.filler if isinstance(x, PaddedInput) else x
                staging[:] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        size, target, source = self._pinned.nbytes, self._buffer.data.ptr, self._pinned.ctypes.data
        _runtime.memcpyAsync(target, source, size, _runtime.memcpyHostToDevice, self._stream.ptr)
        self._copy_event.record(self._stream)
        first, peer_bytes = self._peer_range
        if peer_bytes:  # earlier graphs may have written there since: their memory was free when it was allocated
            _runtime.memsetAsync(target + first, 0, peer_bytes, self._stream.ptr)
        for target, x in zip(self.inputs, inputs, strict=True):
            if isinstance(x, PaddedInput | PeerCopy):
                self._copy(target, x.array, x.device)

    def record(self, work: Callable[..., Any]) -> None:
        """Capture work(*self.inputs) as graphs without running it."""
        self._captured_parts, self._ends = [], False
        self._stream.begin_capture()
        try:
            with cupy.cuda.using_allocator(self._memory.malloc):
                result = work(*self.inputs)
        except BaseException:
            with contextlib.suppress(Exception):  # the capture may be invalid; the first error says why
                self._stream.end_capture()
            raise
        self._result = _unowned_view(result)
        self.parts = [*self._captured_parts, *([] if self._ends else [self._stream.end_capture()])]

    @property
    def is_batch(self) -> bool | None:
        """Whether something is launched between its parts. None before it is recorded."""
        return any(isinstance(part, UnrecordedCall) for part in self.parts) if self.parts else None

    def cut(self, call: HostCall | UnrecordedCall, *, is_last: bool) -> None:
        """See `Recordings.cut`."""
        self._captured_parts += [self._stream.end_capture(), call]
        self._ends = is_last
        if not is_last:
            self._stream.begin_capture()

    def launch(self) -> Any:
        for part in self.parts:
            if isinstance(part, HostCall | UnrecordedCall):
                part.make(self._stream)
            else:
                part.launch(self._stream)
        return self._result

    def end(self) -> None:
        """Wait until no copy reads pinned memory, so that it can be freed."""
        self._copy_event.synchronize()
        if len(self.parts) > 1:
            self._stream.synchronize()


def _dtype(x: _Input) -> np.dtype:
    if isinstance(x, np.ndarray):
        return x.dtype
    return np.dtype(x.array.dtype) if isinstance(x, PeerCopy) else x.filler.dtype


def _unowned_view(result: Any) -> Any:
    """Views of a result that do not keep its memory allocated, so that the next recording or launch may reuse it."""
    if isinstance(result, tuple):
        return tuple(map(_unowned_view, result))
    assert result.flags.c_contiguous
    memory = cupy.cuda.UnownedMemory(result.data.ptr, result.nbytes, None, result.data.device_id)
    return cupy.ndarray(result.shape, result.dtype, cupy.cuda.MemoryPointer(memory, 0))


class _PermanentAllocator:
    """The allocator of the recordings' pool. Graphs still use the pool's free blocks. Raises MemoryError.

    If an allocator raised CUDA's own error, CuPy's pool would return its free blocks to the driver, and graphs would
    write to freed memory. So this one frees the default pool's blocks if it `may_free`, tries again and then raises
    MemoryError.
    """

    may_free = True  # not while work is being recorded

    def __call__(self, size: int) -> cupy.cuda.MemoryPointer:
        with memory_errors():
            try:
                return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)
            except _runtime.CUDARuntimeError as error:
                if error.status != _OUT_OF_MEMORY or not self.may_free:
                    raise
            cupy.get_default_memory_pool().free_all_blocks()
            return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)


def pinned_memory(size: int) -> np.ndarray:
    """`size` bytes of pinned host memory."""
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turns out-of-memory errors of the runtime and the driver into MemoryError."""
    try:
        yield
    except (_runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
        if error.status != _OUT_OF_MEMORY:
            raise
        raise MemoryError(str(error)) from error
