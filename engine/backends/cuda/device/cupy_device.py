"""`engine.backends.cuda.device.Device` on CuPy. Only this file and `cupy_recording` import CuPy.

CuPy provides memory, compilation, launches and graphs, cuBLASLt products; apart from copies between strided arrays, all
other arithmetic is in `cuda/`. All work goes to one stream. CuPy has a current stream per thread: methods select ours
first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import cupy
import numpy as np

from polarlm.engine.backends.cuda.device import Addresses, Device, PaddedInput, PeerCopy, Result, cublas_lt, overlap
from polarlm.engine.backends.cuda.device.cupy_recording import (
    HostCall,
    Recordings,
    UnrecordedCall,
    memory_errors,
    pinned_memory,
)
from polarlm.engine.backends.cuda.device.kernel_source import OPTIONS, OVERLAPS, source, waits
from polarlm.engine.backends.cuda.device.modules import Modules, compiler_threads
from polarlm.engine.backends.cuda.device.packed_launch import PackedKernel, load_driver, type_letters
from polarlm.engine.errors import EngineError
from polarlm.model_loaders.forks import cached_property

_runtime = cupy.cuda.runtime

_STAGED_BYTES = 1 << 20  # for larger arrays a copy to pinned memory does not pay
_COPIES_AT_ONCE = 16  # that share an event, after which their pinned memory is freed

# Device attributes: compute capability, and shared memory per multiprocessor.
_MAJOR, _MINOR, _SHARED_MEMORY = 75, 76, 81
_NO_DEVICE, _OLD_DRIVER = 100, 35  # cudaErrorNoDevice, cudaErrorInsufficientDriver
_NOT_READY = 600  # cudaErrorNotReady
_HAS_ACCESS = 704  # cudaErrorPeerAccessAlreadyEnabled
_LEAST_CAPABILITY = 8, 0  # cp.async and bfloat16 in the matrix instructions

_POINTERS = frozenset((cupy.ndarray, type(None), Addresses))  # types of arguments


def device_count() -> int:
    """The number of GPUs of this process, 1 at least. Raises EngineError ("device_unavailable") with the reason if it
    has none."""
    try:
        count = int(_runtime.getDeviceCount())
    except _runtime.CUDARuntimeError as error:
        if error.status == _OLD_DRIVER:
            raise _unavailable("The NVIDIA driver is older than the CUDA of the installed CuPy: update it") from None
        if error.status != _NO_DEVICE:
            raise _unavailable(f"CUDA does not start ({error})") from None
        count = 0
    if count == 0:
        raise _unavailable("The NVIDIA driver shows no GPU: look at CUDA_VISIBLE_DEVICES and nvidia-smi")
    return count


def open_device(number: int = 0) -> CupyDevice:
    """The GPU of this number. Raises EngineError ("device_unavailable") with the reason if it cannot be used."""
    count = device_count()
    if number >= count:
        choices = "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise _unavailable(f"There is no cuda:{number}: the NVIDIA driver shows {choices}")
    try:
        with memory_errors():
            device = CupyDevice(number)
    except OSError as error:
        raise _unavailable(f"The NVIDIA driver's library does not load ({_first_line(error)})") from error
    except MemoryError as error:
        raise _out_of_memory(number) from error
    except _runtime.CUDARuntimeError as error:
        raise _unavailable(f"cuda:{number} does not start ({_first_line(error)})") from error
    capability = _capability()
    if capability < _LEAST_CAPABILITY:
        raise _unavailable(
            f"The GPU, {device.name}, has compute capability {capability[0]}.{capability[1]}, and 8.0 is the least"
        )
    try:  # a missing compiler, header or library is noticed only when it is used
        with memory_errors():
            _self_test(device)
    except MemoryError as error:
        raise _out_of_memory(number) from error
    except Exception as error:
        version, newest = _nvrtc()
        gpu = f"the GPU, {device.name}, which has compute capability {capability[0]}.{capability[1]}"
        if capability[0] > newest // 10:
            reason = f"CUDA's compiler, {version}, is too old for {gpu}: update it ({_first_line(error)})"
            raise _unavailable(reason) from error
        reason = f"CUDA's compiler ({version}) or libraries do not work with {gpu} ({_first_line(error)})"
        raise _unavailable(reason) from error
    return device


def _self_test(device: CupyDevice) -> None:
    """Compute a product and a kernel, then record and replay both. Raises RuntimeError for a wrong result, and their
    own errors."""
    defines: dict[str, int | float | str] = {"ACTIVATION": "silu", **({OVERLAPS: 1} if device.overlaps else {})}
    text = source("activate_mul", None, None, **defines)

    def work(x: cupy.ndarray, bias: cupy.ndarray) -> cupy.ndarray:
        seventeens, y = device.empty((16, 16), np.float32), device.empty((16, 8), np.float32)
        device.gemm(seventeens, x, x, bias, add=False)
        device.launch("activate_mul_kernel", text, (1, 16), (32,), (y, seventeens, np.int32(8)))
        return y

    for _ in range(2):
        y = device.run_graph("test", work, [np.ones((16, 16), np.float16), np.ones(16, np.float32)])
        if not (abs(device.to_host(y) - 17**2) < 0.01).all():
            raise RuntimeError("a product of matrices is wrong")


def can_overlap() -> bool:
    """Whether the current GPU, its driver and runtime support overlapped launches."""
    return overlap.is_supported(_capability(), _runtime.driverGetVersion(), _runtime.runtimeGetVersion())


def _capability() -> tuple[int, int]:
    major, minor = (int(_runtime.deviceGetAttribute(code, _runtime.getDevice())) for code in (_MAJOR, _MINOR))
    return major, minor


def _nvrtc() -> tuple[str, int]:
    """The name and version of CUDA's compiler, and the newest architecture that it knows, as 90; a high one where it
    does not load."""
    nvrtc = cupy.cuda.nvrtc
    try:
        return f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))}", int(max(nvrtc.getSupportedArchs()))
    except Exception:
        return "NVRTC, which does not load", 1000


def _out_of_memory(number: int) -> EngineError:
    """The error of a GPU whose memory others have."""
    name, note = _runtime.getDeviceProperties(number)["name"].decode(), ""
    with suppress(_runtime.CUDARuntimeError):  # nor is there memory to ask
        free, total = (size / 2**30 for size in _runtime.memGetInfo())
        note = f" ({free:.1f} of {total:.1f} GiB)"
    return _unavailable(f"{name} has too little free memory to begin{note}: nvidia-smi shows which programs take it")


def _unavailable(reason: str) -> EngineError:
    return EngineError(reason, "device_unavailable")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class CupyDevice:
    """A GPU of the process; CUDA_VISIBLE_DEVICES says which it has."""

    def __init__(self, number: int = 0, *, overlaps: bool | None = None) -> None:
        """overlaps: whether launches overlap if the GPU supports it; None for `overlap.is_enabled`."""
        self._number = number
        _runtime.setDevice(number)
        properties = _runtime.getDeviceProperties(number)
        self.name = properties["name"].decode()
        if _runtime.getDeviceCount() > 1:
            self.name += f" (cuda:{number})"
        self.processors = int(properties["multiProcessorCount"])
        self.shared_memory = int(_runtime.deviceGetAttribute(_SHARED_MEMORY, number))
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.overlaps = (overlap.is_enabled(_capability()) if overlaps is None else overlaps) and can_overlap()
        self._driver = load_driver()
        self._modules: Modules[cupy.RawModule] = Modules(self._compile, compiler_threads())
        self._kernels: dict[tuple[str, str], PackedKernel] = {}
        self._kernels_by_types: dict[
            tuple[str, str, tuple[type, ...]], PackedKernel
        ] = {}  # for the types of arguments in Python
        self._staging: list[Any] = []  # pinned memory of the newest copies
        self._copies: deque[tuple[cupy.cuda.Event, list[Any]]] = deque()  # of earlier ones; and an event after each
        self._recordings = Recordings(self._stream, self._copy_from)
        self._peers: set[int] = set()  # other GPUs, by their numbers, whose memory this one has been allowed to read

    def use(self) -> None:
        """Make this GPU and its stream the current ones of the thread."""
        _runtime.setDevice(self._number)
        self._stream.use()

    def memory(self) -> tuple[int, int]:
        self.use()
        free, total = _runtime.memGetInfo()
        return free + cupy.get_default_memory_pool().free_bytes(), total

    def empty(self, shape: tuple[int, ...], dtype: Any) -> cupy.ndarray:
        if cupy.cuda.get_current_stream() is not self._stream:
            self.use()
        return cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> cupy.ndarray:
        y = self.empty(shape, dtype)
        if y.nbytes:
            _runtime.memsetAsync(y.data.ptr, 0, y.nbytes, self._stream.ptr)
        return y

    # -- copies ------------------------------------------------------------------------------------------------

    def from_host(self, x: np.ndarray) -> cupy.ndarray:
        if cupy.cuda.get_current_stream() is not self._stream:
            self.use()
        # Uploads may outlive a recording, so they must not come from its pool, which the next graph overwrites.
        y = cupy.ndarray(x.shape, x.dtype, cupy.get_default_memory_pool().malloc(x.nbytes))
        if x.nbytes > _STAGED_BYTES:
            x = np.ascontiguousarray(x)
            self._copy_in(y, x.ctypes.data, x.nbytes)
            self._stream.synchronize()
        elif x.nbytes:
            staging = cupy.cuda.alloc_pinned_memory(x.nbytes)
            np.ndarray(x.shape, x.dtype, staging)[...] = x
            self._copy_in(y, staging.ptr, x.nbytes)
            self._keep(staging)
        return y

    def to_host(self, x: cupy.ndarray) -> np.ndarray:
        self.use()
        x = cupy.ascontiguousarray(x)
        y = np.empty(x.shape, x.dtype)
        if x.nbytes:
            _runtime.memcpyAsync(y.ctypes.data, x.data.ptr, x.nbytes, _runtime.memcpyDeviceToHost, self._stream.ptr)
        self._stream.synchronize()
        return y

    def to_host_later(self, x: cupy.ndarray) -> tuple[cupy.ndarray, Callable[[], np.ndarray]]:
        copy, staging = self.empty(x.shape, x.dtype), pinned_memory(x.nbytes)
        copy_event = cupy.cuda.Event(disable_timing=True)
        _runtime.memcpyAsync(copy.data.ptr, x.data.ptr, x.nbytes, _runtime.memcpyDeviceToDevice, self._stream.ptr)
        _runtime.memcpyAsync(staging.ctypes.data, x.data.ptr, x.nbytes, _runtime.memcpyDeviceToHost, self._stream.ptr)
        self._stream.record(copy_event)
        self._keep(staging)

        def wait() -> np.ndarray:
            copy_event.synchronize()
            return staging.view(x.dtype).reshape(x.shape).copy()

        return copy, wait

    def from_device(self, x: cupy.ndarray, device: Device) -> cupy.ndarray:
        y = self.empty(x.shape, x.dtype)
        self._copy_from(y, x, device)
        return y

    def _copy_from(self, y: cupy.ndarray, x: cupy.ndarray, device: Device) -> None:
        """Copy a contiguous array of a device to the beginning of y. Later work of that device waits for the copy.

        Where the one GPU cannot reach the memory of the other, the driver copies through the host's.
        """
        assert isinstance(device, CupyDevice)
        assert x.flags.c_contiguous
        if device is self:
            target, source_address = y.data.ptr, x.data.ptr
            _runtime.memcpyAsync(target, source_address, x.nbytes, _runtime.memcpyDeviceToDevice, self._stream.ptr)
            return
        device.use()
        ready = device._stream.record(cupy.cuda.Event(disable_timing=True))
        self.use()
        if device._number not in self._peers:
            self._peers.add(device._number)
            _allow_peer_access(self._number, device._number)
        self._stream.wait_event(ready)
        _runtime.memcpyPeerAsync(y.data.ptr, self._number, x.data.ptr, device._number, x.nbytes, self._stream.ptr)
        device._stream.wait_event(self._stream.record(cupy.cuda.Event(disable_timing=True)))

    def _keep(self, staging: Any) -> None:
        """Keep pinned memory alive until its copy has finished."""
        self._staging.append(staging)
        if len(self._staging) == _COPIES_AT_ONCE:
            while self._copies and self._copies[0][0].done:
                self._copies.popleft()
            self._copies.append((self._stream.record(cupy.cuda.Event(disable_timing=True)), self._staging))
            self._staging = []

    def wait(self) -> None:
        self._stream.synchronize()

    def lasting_error(self) -> Exception | None:
        with suppress(_runtime.CUDARuntimeError):
            _runtime.setDevice(self._number)
        first, second = (int(_runtime.streamQuery(self._stream.ptr)) for _ in range(2))
        return None if second in (0, _NOT_READY) or first != second else _runtime.CUDARuntimeError(second)

    def _copy_in(self, y: cupy.ndarray, address: int, size: int) -> None:
        _runtime.memcpyAsync(y.data.ptr, address, size, _runtime.memcpyHostToDevice, self._stream.ptr)

    # -- work --------------------------------------------------------------------------------------------------

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        assert 0 not in grid, "an empty grid"
        if cupy.cuda.get_current_stream() is not self._stream:
            self.use()
        key = kernel, text, tuple(map(type, args))
        if key not in self._kernels_by_types:
            self._prepare_launch(*key)
        loaded = self._kernels_by_types[key]
        if Addresses in key[2]:
            args = [self._upload_addresses(arg) if type(arg) is Addresses else arg for arg in args]
        if shared > loaded.shared_limit:
            loaded.allow(shared)
        array = cupy.ndarray
        values = [arg.data.ptr if type(arg) is array else 0 if arg is None else arg for arg in args]
        # Outside of a recording the host is slower than short kernels, which then have nothing to overlap with.
        overlaps = loaded.waits and self.overlaps and self._recordings.is_recording
        sizes = *(*grid, 1, 1)[:3], *(*block, 1, 1)[:3], shared, self._stream.ptr, loaded.attribute, overlaps
        loaded.pack(*loaded.start, *sizes, *values)
        if status := loaded.launch(*loaded.handles):
            raise cupy.cuda.driver.CUDADriverError(status)

    def _prepare_launch(self, kernel: str, text: str, types: tuple[type, ...]) -> None:
        """Compile a kernel, unless it is, and let it be launched with arguments of these types. Raises TypeError."""
        letters, loaded = type_letters(types, _POINTERS), self._kernels.get((kernel, text))
        if loaded is None:
            function = self._modules.get(text).get_function(kernel)
            loaded = self._kernels[kernel, text] = PackedKernel(self._driver, function, waits(text, kernel), letters)
        if letters != loaded.letters:
            raise TypeError(f"{kernel} takes arguments of the types {loaded.letters}, as before, not {letters}")
        self._kernels_by_types[kernel, text, types] = loaded

    def expect(self, text: str) -> None:
        self._modules.expect(text)

    def wait_for(self, text: str) -> None:
        self._modules.wait(text)

    def _compile(self, text: str) -> cupy.RawModule:
        _runtime.setDevice(self._number)  # the current device is per thread
        module = cupy.RawModule(code=text, options=OPTIONS)
        module.compile()  # from CuPy's folder, or by NVRTC, which releases Python's lock
        return module

    def _upload_addresses(self, table: Addresses) -> cupy.ndarray:
        return self.from_host(np.array([[x.data.ptr if x is not None else 0 for x in row] for row in table.rows], "u8"))

    def gemm(
        self, y: cupy.ndarray, x: cupy.ndarray, weight: cupy.ndarray, bias: cupy.ndarray | None = None, /, *, add: bool
    ) -> None:
        assert x.dtype == weight.dtype
        assert y.dtype == np.float32
        assert all(array.flags.c_contiguous for array in (x, weight))
        self.use()
        self._products(y, x, weight, bias, self._stream.ptr, add=add)

    @cached_property
    def _products(self) -> cublas_lt.Products:
        self._workspace = self.empty((cublas_lt.WORKSPACE_BYTES,), np.uint8)
        return cublas_lt.Products(cublas_lt.load_library(_runtime.runtimeGetVersion()), self._workspace.data.ptr)

    def call_host(self, work: Callable[..., np.ndarray], y: cupy.ndarray, arrays: Sequence[cupy.ndarray]) -> None:
        call = HostCall(work, y, arrays, self._recordings.staging)
        if self._recordings.is_recording:
            self._recordings.cut(call)
        else:
            self.use()
            call.make(self._stream)
            self._stream.synchronize()  # its pinned memory may be replaced by a larger one

    def run_between_graphs(
        self, work: Callable[..., None], arrays: Sequence[cupy.ndarray], *, is_last: bool = False
    ) -> None:
        if self._recordings.is_recording:
            self._recordings.cut(UnrecordedCall(work, arrays), is_last=is_last)
            return
        # Its arrays are no recording's: they would enlarge a pool that never shrinks.
        with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
            work(*arrays)

    def forget(self) -> None:
        self._recordings.forget()

    def reserve_workspace(self, size: int) -> None:
        self.use()
        self._recordings.reserve_workspace(size)

    def run_graph(
        self, key: Hashable, work: Callable[..., Result], inputs: Sequence[np.ndarray | PaddedInput | PeerCopy]
    ) -> Result:
        self.use()
        return self._recordings.run_graph(key, work, inputs)


def _allow_peer_access(number: int, other: int) -> None:
    """Allow the current GPU, `number`, to read the memory of GPU `other`, if it can: GPUs without NVLink or a common
    PCIe switch often cannot, and GeForce cards cannot."""
    if number == other or not _runtime.deviceCanAccessPeer(number, other):
        return
    try:
        _runtime.deviceEnablePeerAccess(other)
    except _runtime.CUDARuntimeError as error:
        if error.status != _HAS_ACCESS:
            raise
