"""Compiled modules of CUDA texts: by CuPy, or by its bindings of NVRTC for an architecture that it does not know."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import cupy
from cupy._core import core

from polarlm.engine.backends.cuda.device.kernel_source import OF_CUPY, OPTIONS, target


def compile_module(text: str) -> cupy.RawModule:
    """The module of a text for the current GPU, compiled or from CuPy's folder. NVRTC releases Python's lock. Raises
    its errors."""
    if architecture := target(text):
        return cupy.RawModule(path=str(binary_file(text, architecture)))  # loaded with its first kernel
    module = cupy.RawModule(code=text, options=OPTIONS)
    module.compile()
    return module


def binary_file(text: str, architecture: str) -> Path:
    """The file of a text compiled for an architecture, such as "sm_90a": CuPy would compile it for "sm_90"."""
    nvrtc = cupy.cuda.nvrtc
    options = (*core.assemble_cupy_compiler_options(OPTIONS), *OF_CUPY, f"--gpu-architecture={architecture}")
    key = "\0".join((text, *options, str(nvrtc.getVersion())))
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")  # CuPy's own
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"polarlm-{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    if not path.exists():
        binary = _compiled(nvrtc, text, options)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(binary)
        os.replace(file.name, path)
    return path


def _compiled(nvrtc: Any, text: str, options: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{error}:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
