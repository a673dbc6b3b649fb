"""NVIDIA's run-time compiler, which needs no GPU or driver: the resources that the kernels of a text use."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from polarlm.engine.backends.cuda.device.kernel_source import OPTIONS
from polarlm.engine.errors import EngineError

# Architecture → most bytes of shared memory of a block, static and dynamic together ("Technical Specifications per
# Compute Capability" in the CUDA programming guide; the system reserves 1 KB of each SM's).
_LIMITS = {
    **dict.fromkeys((80, 87), 163 << 10),
    **dict.fromkeys((86, 89, 120, 121), 99 << 10),
    **dict.fromkeys((90, 100, 103, 110), 227 << 10),
}
SHARED_LIMIT = dict(sorted(_LIMITS.items()))
STATIC_LIMIT = 48 << 10

OF_CUPY = ("-ftz=true", "--device-as-default-execution-space")  # options that CuPy adds to ours


@dataclass(frozen=True)
class Usage:
    """The resources of a compiled kernel: registers per thread; the other sizes are in bytes."""

    kernel: str
    arch: int
    registers: int
    spilled: int
    stack: int
    static_shared: int


_ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for 'sm_(?P<arch>\d+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def compile_text(text: str, arch: int) -> list[Usage]:
    """Every kernel of `text`, compiled for sm_<arch> with the product's options. Raises EngineError."""
    return compile_binary(text, arch)[0]


def compile_binary(text: str, arch: int) -> tuple[list[Usage], bytes]:
    """Like `compile_text`, with the compiled binary, which nvdisasm reads. Raises EngineError."""
    _, headers = compiler()
    options = [*OPTIONS, *OF_CUPY, f"--gpu-architecture=sm_{arch}", "--ptxas-options=-v", f"--include-path={headers}"]
    message, binary = run_compiler(text, options)
    if not binary:
        raise EngineError(f"NVRTC does not compile the kernel for sm_{arch}:\n{message}")
    return [_usage(entry) for entry in _ENTRY.finditer(message)], binary


def run_compiler(text: str, options: Sequence[str]) -> tuple[str, bytes]:
    """What the compiler says of `text`, and the binary, which is empty if it does not compile."""
    nvrtc, _ = compiler()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode(), b"" if failed else binary.raw


def version() -> str:
    """The compiler's version, such as "13.5"."""
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


def compiler() -> tuple[ctypes.CDLL, Path]:
    """The newest of `compilers`. Raises EngineError without one."""
    if not compilers():
        raise EngineError(
            "Kernels are compiled by NVIDIA's compiler, which is not installed: "
            "pip install nvidia-cuda-nvrtc nvidia-cuda-runtime"
        )
    return compilers()[0]


@cache
def compilers() -> list[tuple[ctypes.CDLL, Path]]:
    """NVRTC's library and the folder of CUDA's headers, of each CUDA whose wheels are installed, the newest first."""
    libraries, headers = _installed("lib/libnvrtc.so.*"), _installed("include/cuda_fp16.h")
    return [(ctypes.CDLL(str(libraries[major])), headers[major].parent) for major in libraries if major in headers]


def _installed(pattern: str) -> dict[str, Path]:
    """A file of NVIDIA's wheels for each CUDA, by its folder's name. The wheels of CUDA 13 share the folder "cu13";
    wheels of CUDA 12, "cu12" here, have a folder `cuda_…` each, and come last."""
    spec, files = importlib.util.find_spec("nvidia"), dict[str, Path]()
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob(f"*/{pattern}"), reverse=True):
            name = file.parents[1].name
            files["cu12" if name.startswith("cuda_") else name] = file
    return dict(sorted(files.items(), reverse=True))
