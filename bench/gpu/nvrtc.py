"""NVIDIA's run-time compiler without a GPU or a driver: the resources that the kernels of a text use."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from polarlm.engine.backends.cuda.device.kernel_source import OPTIONS
from polarlm.engine.errors import EngineError

# Architecture → bytes of shared memory that one block may have, static and dynamic together ("Technical
# Specifications per Compute Capability" in the CUDA programming guide; 1 KB of each SM's is the system's).
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
STATIC_LIMIT = 48 << 10
_OF_CUPY = ("-ftz=true", "--device-as-default-execution-space")  # what CuPy adds to our options


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled kernel: bytes, and registers of a thread."""

    kernel: str
    arch: int
    registers: int
    spilled: int
    stack: int
    static_shared: int


_ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for 'sm_(?P<arch>\d+)a?'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def compile_text(text: str, arch: int) -> list[Usage]:
    """Every kernel of `text`, compiled for sm_<arch> with the product's options. Raises EngineError."""
    return compile_binary(text, arch)[0]


def compile_binary(text: str, arch: int) -> tuple[list[Usage], bytes]:
    """As `compile_text`, and the compiled binary, which nvdisasm reads. Raises EngineError."""
    nvrtc, headers = compiler()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    options = [*OPTIONS, *_OF_CUPY, f"--gpu-architecture=sm_{arch}", "--ptxas-options=-v", f"--include-path={headers}"]
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    message = log.value.decode()
    if status != 0:
        raise EngineError(f"NVRTC does not compile the kernel for sm_{arch}:\n{message}")
    return [_usage(entry) for entry in _ENTRY.finditer(message)], binary.raw


def version() -> str:
    """The compiler's version, as "13.5"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    compiler()[0].nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _usage(entry: re.Match[str]) -> Usage:
    shared = re.search(r"(\d+) bytes smem", entry["rest"])
    return Usage(
        kernel=entry["kernel"],
        arch=int(entry["arch"]),
        registers=int(entry["registers"]),
        spilled=int(entry["stores"]) + int(entry["loads"]),
        stack=int(entry["stack"]),
        static_shared=int(shared[1]) if shared else 0,
    )


@cache
def compiler() -> tuple[ctypes.CDLL, Path]:
    """The library and the folder of headers from their wheels. Raises EngineError if they are not installed."""
    library = next(_installed("lib/libnvrtc.so.*"), None)
    header = next(_installed("include/cuda_fp16.h"), None)
    if library is None or header is None:
        raise EngineError(
            "Kernels are compiled by NVIDIA's compiler, which is not installed: "
            "pip install nvidia-cuda-nvrtc nvidia-cuda-runtime"
        )
    return ctypes.CDLL(str(library)), header.parent


def _installed(pattern: str) -> Iterator[Path]:
    """Files of NVIDIA's wheels; CUDA 12 has a folder `cuda_…` for every wheel, and comes last."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(Path(folder).glob(f"*/{pattern}"), key=lambda file: file.parents[1].name.startswith("cuda_"))
