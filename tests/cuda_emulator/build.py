"""From the text of a kernel to a shared library: g++, once for every text."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.kept_files import EMULATED, used

_HERE = Path(__file__).parent
_SHIM = sorted(_HERE.glob("*.h"))
_MACHINE = sorted(_HERE.glob("*.cpp"))

_COMMON = ["-std=c++20", "-fPIC", "-U_FORTIFY_SOURCE"]
# Products and sums are fused where one is the other's only use, as NVIDIA's compiler does.
_FUSED = ["-ffp-contract=fast", "-fexpensive-optimizations", *(["-mfma"] if platform.machine() == "x86_64" else [])]
# Without sibling calls a return address is a line of the kernel. Every access becomes a call of a hook (hooks.cpp).
_KERNEL = [
    *_COMMON,
    "-O1",
    *_FUSED,
    "-fno-strict-aliasing",
    "-fno-optimize-sibling-calls",
    "-fno-threadsafe-statics",
    "-fno-gnu-unique",
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
    "-include",
    "device.h",
]
_CHECKS = [
    "-fsanitize=thread,alignment,bounds,shift,integer-divide-by-zero,float-cast-overflow",
    "-fno-sanitize-recover=all",
]

_LINK = ["g++", "-shared", "-Wl,-z,now", "-Wl,-Bsymbolic"]
# The machine's functions are called at every access of a kernel: they are compiled as one, and none is replaced.
_MACHINE_FLAGS = ["-O2", "-flto", "-fno-semantic-interposition"]

_BOUNDED_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\(\s*([^,)]+)[^)]*\)\s*)?(\w+)\s*\(")


def kernel_names(text: str) -> dict[str, str]:
    """Kernels that a text defines, in order: name → the most threads of a block, an expression in C++."""
    kernels = _BOUNDED_KERNEL.findall(re.sub(r"//[^\n]*", "", text))
    return {name: bound or "1024" for bound, name in kernels}


def library(text: str, checked: bool, *, with_lines: bool = False) -> Path:
    """The shared library of a CUDA text, to be opened after the machine's. Skips the calling test where there is no
    g++; AssertionError if it fails.

    with_lines: also with the lines and inlined calls of each instruction, in a third more time. The instructions and
    their addresses are the same.
    """
    if sys.platform != "linux" or not shutil.which("g++"):
        pytest.skip("the CUDA emulator needs g++ on Linux")
    calls = "".join(f"EMULATOR_KERNEL({name}, {bound})\n" for name, bound in kernel_names(text).items())
    whole = f'{text}\n#line 1 "launch"\nEMULATOR_LIBRARY({int(checked)})\n{calls}'
    flags = [*_KERNEL, *(_CHECKS if checked else []), *(["-gdwarf-4"] if with_lines else [])]
    path = EMULATED / f"{_key(whole, *flags, *(file.read_text() for file in _SHIM))}.so"
    if not path.exists():
        EMULATED.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=EMULATED) as folder:
            source, objects, linked = (Path(folder) / name for name in ("kernel.cpp", "kernel.o", "kernel.so"))
            source.write_text(whole)
            _run(["g++", f"-I{_precompiled(flags)}", f"-I{_HERE}", *flags, "-c", str(source), "-o", str(objects)])
            _run([*_LINK, "-nodefaultlibs", str(objects), "-o", str(linked)])  # they are the machine's
            os.replace(linked, path)
    used(path)
    return path


def _precompiled(flags: list[str]) -> Path:
    """A folder with device.h as g++ has read it with `flags`, which takes longer than most kernels."""
    folder = EMULATED / _key(*flags, *(file.read_text() for file in _SHIM))
    folder.mkdir(exist_ok=True)
    target = folder / "device.h.gch"
    header_flags = [flag for flag in flags if flag not in ("-include", "device.h")]
    _make_once(target, ["g++", f"-I{_HERE}", *header_flags, "-x", "c++-header", str(_HERE / "device.h")])
    used(folder)
    return folder


@cache
def machine() -> Path:
    """The shared library of the emulated machine, whose functions all kernels' libraries call."""
    EMULATED.mkdir(mode=0o700, exist_ok=True)
    texts = [file.read_text() for file in [*_MACHINE, *_SHIM]]
    path = EMULATED / f"{_key(*texts, *_COMMON, *_MACHINE_FLAGS, *_LINK)}.machine.so"
    _make_once(path, [*_LINK, *_COMMON, *_MACHINE_FLAGS, *map(str, _MACHINE)])
    used(path)
    return path


def _make_once(path: Path, command: list[str]) -> None:
    """Run a command of g++ that makes the file, unless it is there or another process makes it, which takes seconds."""
    if path.exists():
        return
    import fcntl  # Windows has none

    with (EMULATED / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
                made = Path(unfinished) / path.name
                _run([*command, "-o", str(made)])
                os.replace(made, path)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"g++ does not compile the kernel:\n{done.stderr[:6000]}"
