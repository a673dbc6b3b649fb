"""`engine.backends.cuda.device.Device` on CuPy. Only this file, `cupy_compiler` and `cupy_recording` import CuPy.

CuPy provides memory, compilation, launches, cuBLAS and graphs; apart from copies between strided arrays, all other
arithmetic is in `cuda/`. All work goes to one stream. CuPy has a current stream per thread, so methods select ours
first.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.libs import cublas

from polarlm.engine.backends.cuda.device import Addresses, Carried, Device, Moved, Result, overlap, row_stride
from polarlm.engine.backends.cuda.device.cupy_compiler import Kernel, compile_module
from polarlm.engine.backends.cuda.device.cupy_recording import HostCall, Recordings, memory_errors, pinned
from polarlm.engine.backends.cuda.device.kernel_source import source, waits
from polarlm.engine.backends.cuda.device.modules import Modules, compiler_threads
from polarlm.engine.errors import EngineError

_runtime = cupy.cuda.runtime

_STAGED_BYTES = 1 << 20  # for larger arrays a copy to pinned memory does not pay

# Device attributes: compute capability, and shared memory per multiprocessor.
_MAJOR, _MINOR, _SHARED_MEMORY = 75, 76, 81
_NO_DEVICE, _OLD_DRIVER = 100, 35  # cudaErrorNoDevice, cudaErrorInsufficientDriver
_HAS_ACCESS = 704  # cudaErrorPeerAccessAlreadyEnabled
_LEAST_CAPABILITY = 8, 0  # cp.async and bfloat16 in the matrix instructions

_ARGUMENTS = (cupy.ndarray, np.int32, np.int64, np.float32)
_GEMM_TYPES = {"float16": _runtime.CUDA_R_16F, "uint16": _runtime.CUDA_R_16BF}


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
        there = "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise _unavailable(f"There is no cuda:{number}: the NVIDIA driver shows {there}")
    device = CupyDevice(number)
    capability = _capability()
    if capability < _LEAST_CAPABILITY:
        raise _unavailable(
            f"The GPU, {device.name}, has compute capability {capability[0]}.{capability[1]}, and 8.0 is the least"
        )
    try:  # a missing compiler, header or cuBLAS is noticed only when it is used
        gate_up = device.from_host(np.zeros((1, 16), np.float32))
        args = (device.empty((1, 8), np.float32), gate_up, np.int32(8))
        device.launch("activate_mul_kernel", source("activate_mul", ACTIVATION="silu"), (1, 1), (32,), args)
        half = device.from_host(np.zeros((8, 8), np.float16))
        device.gemm(device.empty((8, 8), np.float32), half, half, add=False)
        device.to_host(gate_up)
    except Exception as error:
        version, newest = _nvrtc()
        gpu = f"the GPU, {device.name}, which has compute capability {capability[0]}.{capability[1]}"
        if capability[0] > newest // 10:
            reason = f"CUDA's compiler, {version}, is too old for {gpu}: update it ({_first_line(error)})"
            raise _unavailable(reason) from error
        reason = f"CUDA's compiler ({version}) or libraries do not work with {gpu} ({_first_line(error)})"
        raise _unavailable(reason) from error
    return device


def can_overlap() -> bool:
    """Whether the current GPU, its driver and runtime support overlapped launches."""
    return overlap.is_there(_capability(), _runtime.driverGetVersion(), _runtime.runtimeGetVersion())


def _capability() -> tuple[int, int]:
    """The compute capability of the current GPU."""
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


def _unavailable(reason: str) -> EngineError:
    return EngineError(reason, "device_unavailable")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class CupyDevice:
    """A GPU of the process; CUDA_VISIBLE_DEVICES says which it has."""

    def __init__(self, number: int = 0, *, overlaps: bool | None = None) -> None:
        """overlaps: whether launches overlap if the GPU supports it; None for `overlap.is_wanted`."""
        self._number = number
        _runtime.setDevice(number)
        properties = _runtime.getDeviceProperties(number)
        self.name = properties["name"].decode()
        if _runtime.getDeviceCount() > 1:
            self.name += f" (cuda:{number})"
        self.processors = int(properties["multiProcessorCount"])
        self.shared_memory = int(_runtime.deviceGetAttribute(_SHARED_MEMORY, number))
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.overlaps = (overlap.is_wanted(_capability()) if overlaps is None else overlaps) and can_overlap()
        self._overlapped = overlap.OverlappedLaunch(overlap.load_driver()) if self.overlaps else None
        self._modules: Modules[cupy.RawModule] = Modules(self._compile, compiler_threads())
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._copies: deque[tuple[cupy.cuda.Event, np.ndarray]] = deque()  # copies in flight: event, pinned memory
        self._recordings = Recordings(self._stream, self._copy_from)
        self._reached: set[int] = set()  # other GPUs, by their numbers, whose memory this one has been allowed to read
        self._factors = np.array([0, 1], np.float32)  # cuBLAS reads its factors on the host

    def use(self) -> None:
        """Make this GPU and its stream the current ones of the thread."""
        _runtime.setDevice(self._number)
        self._stream.use()

    def memory(self) -> tuple[int, int]:
        self.use()
        free, total = _runtime.memGetInfo()
        return free + cupy.get_default_memory_pool().free_bytes(), total

    def empty(self, shape: tuple[int, ...], dtype: Any) -> cupy.ndarray:
        self.use()
        return cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> cupy.ndarray:
        y = self.empty(shape, dtype)
        if y.nbytes:
            _runtime.memsetAsync(y.data.ptr, 0, y.nbytes, self._stream.ptr)
        return y

    # -- copies ------------------------------------------------------------------------------------------------

    def from_host(self, x: np.ndarray) -> cupy.ndarray:
        # Uploads may outlive a recording, so they must not come from its pool, which the next graph overwrites.
        with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
            y = self.empty(x.shape, x.dtype)
        x = np.ascontiguousarray(x)
        if x.nbytes > _STAGED_BYTES:
            self._copy_in(y, x.ctypes.data, x.nbytes)
            self._stream.synchronize()
        elif x.nbytes:
            staged = pinned(x.nbytes)
            staged[:] = x.reshape(-1).view(np.uint8)
            self._copy_in(y, staged.ctypes.data, x.nbytes)
            self._keep(self._stream.record(cupy.cuda.Event(disable_timing=True)), staged)
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
        copy, staged = self.empty(x.shape, x.dtype), pinned(x.nbytes)
        copied = cupy.cuda.Event(disable_timing=True)
        _runtime.memcpyAsync(copy.data.ptr, x.data.ptr, x.nbytes, _runtime.memcpyDeviceToDevice, self._stream.ptr)
        _runtime.memcpyAsync(staged.ctypes.data, x.data.ptr, x.nbytes, _runtime.memcpyDeviceToHost, self._stream.ptr)
        self._keep(self._stream.record(copied), staged)

        def wait() -> np.ndarray:
            copied.synchronize()
            return staged.view(x.dtype).reshape(x.shape).copy()

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
            to, of = y.data.ptr, x.data.ptr
            _runtime.memcpyAsync(to, of, x.nbytes, _runtime.memcpyDeviceToDevice, self._stream.ptr)
            return
        device.use()
        ready = device._stream.record(cupy.cuda.Event(disable_timing=True))
        self.use()
        if device._number not in self._reached:
            self._reached.add(device._number)
            _reach(self._number, device._number)
        self._stream.wait_event(ready)
        _runtime.memcpyPeerAsync(y.data.ptr, self._number, x.data.ptr, device._number, x.nbytes, self._stream.ptr)
        device._stream.wait_event(self._stream.record(cupy.cuda.Event(disable_timing=True)))

    def _keep(self, copied: cupy.cuda.Event, staged: np.ndarray) -> None:
        """Keep pinned memory alive until its copy has finished."""
        while self._copies and self._copies[0][0].done:
            self._copies.popleft()
        self._copies.append((copied, staged))

    def wait(self) -> None:
        self._stream.synchronize()

    def _copy_in(self, y: cupy.ndarray, address: int, size: int) -> None:
        _runtime.memcpyAsync(y.data.ptr, address, size, _runtime.memcpyHostToDevice, self._stream.ptr)

    # -- work --------------------------------------------------------------------------------------------------

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        assert all(size > 0 for size in grid), "an empty grid"  # CuPy would launch one block, which the driver refuses
        self.use()
        compiled = self._kernels.get((kernel, text))
        if compiled is None:
            function = self._modules.get(text).get_function(kernel)
            compiled = self._kernels[kernel, text] = Kernel(function, waits(text, kernel))
        compiled.allow(shared)
        arguments = [self._upload_addresses(arg) if isinstance(arg, Addresses) else _argument(arg) for arg in args]
        # Outside of a recording the host is slower than short kernels, and these launches cost it more than CuPy's.
        if self._overlapped is None or not compiled.waits or not self._recordings.under_way:
            compiled.function(tuple(grid), tuple(block), tuple(arguments), shared_mem=shared)
            return
        values = [_c_value(arg) for arg in arguments]
        status = self._overlapped(compiled.function.kernel.ptr, self._stream.ptr, grid, block, values, shared)
        if status:
            raise cupy.cuda.driver.CUDADriverError(status)

    def expect(self, text: str) -> None:
        self._modules.expect(text)

    def wait_for(self, text: str) -> None:
        self._modules.wait(text)

    def _compile(self, text: str) -> cupy.RawModule:
        _runtime.setDevice(self._number)  # the current device is per thread
        return compile_module(text)

    def _upload_addresses(self, table: Addresses) -> cupy.ndarray:
        return self.from_host(np.array([[x.data.ptr if x is not None else 0 for x in row] for row in table.rows], "u8"))

    def gemm(self, y: cupy.ndarray, x: cupy.ndarray, weight: cupy.ndarray, *, add: bool) -> None:
        (rows, width), out = x.shape, len(weight)
        assert x.dtype == weight.dtype
        assert y.dtype == np.float32
        assert all(array.flags.c_contiguous for array in (x, weight))
        kind = _GEMM_TYPES[x.dtype.name]
        self.use()
        # cuBLAS is column-major and sees the transpose of our matrices, so this is yᵀ = weight · xᵀ.
        with memory_errors():
            cublas.gemmEx(
                cupy.cuda.get_cublas_handle(),
                *(cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, out, rows, width),
                *(self._factors[1:].ctypes.data, weight.data.ptr, kind, width, x.data.ptr, kind, width),
                *(self._factors[int(add) :].ctypes.data, y.data.ptr, _runtime.CUDA_R_32F, int(row_stride(y))),
                *(cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT),
            )

    def call_host(self, work: Callable[..., np.ndarray], y: cupy.ndarray, arrays: Sequence[cupy.ndarray]) -> None:
        call = HostCall(work, y, arrays)
        if self._recordings.under_way:
            self._recordings.cut(call)
        else:
            self.use()
            call.make(self._stream)
            self._stream.synchronize()  # its pinned memory is freed now

    def set_aside(self, size: int) -> None:
        self.use()
        self._recordings.set_aside(size)

    def run_graph(
        self, key: Hashable, work: Callable[..., Result], inputs: Sequence[np.ndarray | Carried | Moved]
    ) -> Result:
        self.use()
        return self._recordings.run_graph(key, work, inputs)


def _reach(number: int, other: int) -> None:
    """Allow the current GPU, `number`, to read the memory of GPU `other`, if it can: GPUs without NVLink or a common
    PCIe switch often cannot, and GeForce cards cannot."""
    if number == other or not _runtime.deviceCanAccessPeer(number, other):
        return
    try:
        _runtime.deviceEnablePeerAccess(other)
    except _runtime.CUDARuntimeError as error:
        if error.status != _HAS_ACCESS:
            raise


def _argument(arg: Any) -> Any:
    """A launch argument in the form that CuPy takes. Raises TypeError for types that CuPy would convert silently."""
    if arg is None:
        return np.uintp(0)  # CuPy drops an argument that is None
    if isinstance(arg, _ARGUMENTS):
        return arg
    raise TypeError(f"a kernel takes device arrays, None, np.int32, np.int64 and np.float32, not {type(arg).__name__}")


def _c_value(arg: Any) -> Any:
    """A result of `_argument` as a ctypes value."""
    if isinstance(arg, cupy.ndarray):
        return ctypes.c_void_p(arg.data.ptr)
    return np.ctypeslib.as_ctypes_type(arg.dtype)(arg.item())
