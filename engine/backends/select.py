"""Chooses the backend for a --device."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.errors import EngineError, KernelError

NO_DRIVER = "No NVIDIA driver found"

_DEVICES = re.compile(r"cuda:\d+(,\d+)*")


def select(device: str, threads: int, compiled: bool = True) -> tuple[Ops, str]:
    """The ops of `device`, and a note for the user, empty if there is nothing to say.

    device: "auto", "cpu", "cuda" or GPUs by their numbers, such as "cuda:1" or "cuda:0,1".
    The note says why "auto" does not use a GPU although the machine has an NVIDIA driver, and why NumPy computes on a
    CPU. compiled: on a CPU, use compiled kernels if they work. Raises EngineError for an unknown or unavailable device.
    """
    if device == "cpu":
        return _cpu(threads, compiled)
    numbers = gpu_numbers(device)
    try:
        return _cuda(numbers), ""
    except EngineError as error:
        if device == "auto":
            ops, note = _cpu(threads, compiled)
            no_gpu = "" if driver_version() is None else f"{error}: running on the CPU."
            return ops, " ".join(filter(None, (no_gpu, note)))
        sentence = f"device={device}: {error}; device=cpu needs none of this"
        raise EngineError(sentence, "device_unavailable", ("device",)) from error


def gpu_numbers(device: str) -> list[int]:
    """The numbers of the GPUs that a --device names; empty if it names none. Raises EngineError for an unknown one."""
    if device not in ("auto", "cpu", "cuda") and _DEVICES.fullmatch(device) is None:
        others = "and GPUs by their numbers, such as cuda:1 or cuda:0,1"
        raise EngineError(f"device={device}: there are auto, cpu and cuda, {others}", settings=("device",))
    numbers = [int(number) for number in device.partition(":")[2].split(",") if number]
    if len(set(numbers)) < len(numbers):
        raise EngineError(f"device={device}: a GPU is named twice", settings=("device",))
    return numbers


def with_host(ops: Ops, threads: int) -> tuple[Ops, str]:
    """The ops of a GPU with the CPU's ops as `host`, and a note if its kernels do not work; a CPU's ops as they are.

    Raises EngineError if POLARLM_CPU_LEVEL names no level of this CPU.
    """
    if len(ops_per_device(ops, with_others=False)) != 1:
        return ops, ""
    from polarlm.engine.backends.cuda.ops import CudaOps

    assert isinstance(ops, CudaOps)
    host, note = _cpu(threads, compiled=True)
    return (ops.with_host(host) if host.backend == "native" else ops), note


def ops_per_device(ops: Ops, with_others: bool) -> Sequence[Ops]:
    """The GPUs that these ops run on, each with ops of its own. with_others: and the other GPUs of this process."""
    if ops.backend != "cuda":
        return ()
    from polarlm.engine.backends.cuda.multi_device.ops import MultiDeviceOps
    from polarlm.engine.backends.cuda.ops import CudaOps

    assert isinstance(ops, CudaOps)
    if isinstance(ops, MultiDeviceOps):
        return ops.device_ops
    return [ops, *(ops.others() if with_others else ())]


def multi_device_ops(device_ops: Sequence[Ops], counts: Sequence[int] = ()) -> Ops:
    """The ops of several GPUs. counts: how many layers each has; empty before a model is known."""
    from polarlm.engine.backends.cuda.multi_device.ops import MultiDeviceOps
    from polarlm.engine.backends.cuda.ops import CudaOps

    return MultiDeviceOps([ops for ops in device_ops if isinstance(ops, CudaOps)], counts)


def _cpu(threads: int, compiled: bool) -> tuple[Ops, str]:
    """The ops of the CPU, and a note. Raises EngineError if POLARLM_CPU_LEVEL names no level of this CPU."""
    if not compiled:
        return NumpyOps(threads), ""
    if importlib.util.find_spec("llvmlite") is None:
        return NumpyOps(threads), without_kernels("The Python package llvmlite is missing (pip install 'polarlm[cpu]')")
    try:
        from polarlm.engine.backends.native.ops import NativeOps

        ops = NativeOps(threads)
    except KernelError as error:
        return NumpyOps(threads), without_kernels(str(error))
    except EngineError:
        raise
    except Exception as error:  # llvmlite is broken or too old
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return NumpyOps(threads), without_kernels(f"llvmlite cannot be used ({reason}; pip install 'polarlm[cpu]')")
    return ops, ops.note


def without_kernels(reason: str) -> str:
    """A note for users whose CPU computes with NumPy."""
    return f"{reason}: NumPy computes in place of compiled kernels, more slowly and with all weights as float32."


def _cuda(numbers: Sequence[int]) -> Ops:
    """The ops of the GPUs of these numbers, or of the first one. Raises EngineError if one cannot be used; the message
    is a sentence without a full stop."""
    version = driver_version()
    if version is None:
        raise EngineError(NO_DRIVER, "device_unavailable")
    install = f"pip install 'polarlm[cuda{min(13, version // 1000)}]'"
    if version < 12000:
        raise EngineError("The NVIDIA driver is older than CUDA 12: update it", "device_unavailable")
    if importlib.util.find_spec("cupy") is None:
        raise EngineError(f"An NVIDIA driver is here, but CuPy is not installed ({install})", "device_unavailable")
    try:
        from polarlm.engine.backends.cuda.device.cupy_device import open_device
        from polarlm.engine.backends.cuda.ops import CudaOps
    except ImportError as error:
        reason = str(error).strip().splitlines()[0]
        raise EngineError(f"CuPy does not find its libraries ({reason}; {install})", "device_unavailable") from error
    if not numbers:
        ops = CudaOps(open_device())
        ops.others = cache(_other_devices)  # each takes memory of its GPU
        return ops
    device_ops = [CudaOps(open_device(number)) for number in numbers]
    return device_ops[0] if len(device_ops) == 1 else multi_device_ops(device_ops)


def _other_devices() -> list[Any]:
    """The ops of all GPUs but the first that can be used."""
    from polarlm.engine.backends.cuda.device import cupy_device
    from polarlm.engine.backends.cuda.ops import CudaOps

    others = []
    for number in range(1, cupy_device.device_count()):
        with suppress(EngineError):
            others.append(CudaOps(cupy_device.open_device(number)))
    return others


def driver_version() -> int | None:
    """The newest CUDA version that the NVIDIA driver supports, such as 13020 for 13.2; None without a driver."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        version = ctypes.c_int()
        return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
    except (OSError, AttributeError):
        return None
